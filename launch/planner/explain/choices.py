"""The reasons for a plan: the alternatives of each choice, with the number that rejected each of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from launch.fabric.choose import SyncPrediction
from launch.plan.forecast import Alternative, Choice
from launch.plan.layouts import TrainingLayout
from launch.planner.memory.training import TrainingMemory
from launch.planner.search.candidate import Candidate
from launch.planner.search.options import RolloutOption, TrainingOption
from launch.planner.search.problem import MODES, Mode, Problem
from launch.planner.search.search import Search

T = TypeVar("T")
MOST = 12
"""Maximum number of alternatives of a choice."""
GB = 1e9


def choices(search: Search, found: Candidate) -> tuple[Choice, ...]:
    """All choices of a plan."""
    made = [_mode(search, found), _training_layout(search, found), _engines(search, found), _sequences(search, found)]
    if found.mode == "disaggregated":
        made.insert(1, _split(search, found))
    if found.sync is not None:
        made.append(_route(found.sync))
        if "shadow" in found.pauses and (found.problem.asynchronous or found.problem.shadow):
            made.append(_staging(found))
        if found.problem.running_kv != "none" and not found.problem.border:
            made.append(_running_kv(found))
    made.append(_recipe(found))
    return tuple(made)


def layout_name(layout: TrainingLayout) -> str:
    """`TP4 CP2 PP4 VPP5 DP5`, with EP and `recompute` if the layout has any."""
    vpp = f" VPP{layout.vpp}" if layout.vpp > 1 else ""
    again = f" recompute {'+'.join(layout.recompute)}" if layout.recompute else ""
    ep = f" EP{layout.ep}" if layout.ep > 1 else ""
    return f"TP{layout.tp}{ep} CP{layout.cp} PP{layout.pp}{vpp} DP{layout.dp}{again}"


def _per_hour(candidate: Candidate) -> str:
    return f"{candidate.prompts_per_hour:,.0f} prompts/h"


def _mode(search: Search, found: Candidate) -> Choice:
    problem = search.asked
    why = "placement.mode pins it" if len(problem.modes) == 1 else "the fastest"
    return Choice(key="placement.mode", value=found.mode, reason=f"{why}: {_per_hour(found)}",
                  alternatives=tuple(_other_mode(problem, mode) for mode in MODES if mode != found.mode))


def _other_mode(problem: Problem, mode: Mode) -> Alternative:
    best = Search(problem, mode).best()
    if best is None:
        return Alternative(value=mode, rejected_by="no layout fits")
    why = f"{_per_hour(best)}" + (" (synchronous: generation ends with the longest completion)"
                                  if mode != "disaggregated" else "")
    return Alternative(value=mode, rejected_by=why, prompts_per_hour=best.prompts_per_hour)


def _split(search: Search, found: Candidate) -> Choice:
    units, mine = search.problem.units, found.training.units
    tried: list[tuple[int, Candidate]] = []
    for direction in (-1, 1):
        near = 0
        for training in range(mine + direction, 0 if direction < 0 else units, direction):
            best = search.best(training_units=training)
            if best is not None:
                tried.append((training, best))
                near += 1
            if near == MOST // 2:
                break
    name = "nodes" if len(search.problem.cluster.nodes) > 1 else "GPUs"
    alternatives = tuple(
        Alternative(value=f"{training} train + {units - training} roll out", prompts_per_hour=best.prompts_per_hour,
                    rejected_by=f"{_per_hour(best)}: {binding(best)}") for training, best in sorted(tried))
    return Choice(key="split", value=f"{mine} {name} train + {found.rollout.units} roll out",
                  reason=f"{_per_hour(found)}: {binding(found)}", alternatives=alternatives)


def binding(found: Candidate) -> str:
    """The phase or limit that sets the length of the step."""
    training, rollout = found.training.seconds, found.rollout.seconds
    if found.waits:
        return f"algorithm.max_staleness = {found.problem.max_staleness} sets the pace ({found.step_s:.1f} s)"
    if not found.problem.asynchronous:
        longest = "generation" if rollout >= training else "training"
        return f"{longest} is the longer phase ({rollout:.1f} s generation, {training:.1f} s training)"
    if rollout > training:
        return f"rollout sets the pace ({rollout:.1f} s against {training:.1f} s of training)"
    return f"training sets the pace ({training:.1f} s against {rollout:.1f} s of rollout)"


def _training_layout(search: Search, found: Candidate) -> Choice:
    mine = found.training
    fitting = [(option.layout, option.seconds) for option in search.training_options(mine.units)
               if option.layout != mine.layout]
    alternatives = [Alternative(value=layout_name(layout), rejected_by=_slower(search, found, layout, seconds))
                    for layout, seconds in _one_of_each(fitting, besides=mine.layout)[:MOST]]
    unfit = sorted(search.unfit(mine.units), key=lambda pair: (pair[1].total, layout_name(pair[0])))
    alternatives += [_unfit(layout, memory) for layout, memory in _one_of_each(unfit)[:MOST]]
    worst = mine.worst
    fastest = all(seconds >= mine.seconds for _, seconds in fitting)
    return Choice(key="trainer", value=layout_name(mine.layout),
                  reason=f"{'the fastest' if fastest else 'the shortest step'} that fits: "
                         f"training {mine.seconds:.1f} s, {worst.total / GB:.1f} GB of "
                         f"{mine.memory.limit / GB:.1f} GB on stage {worst.stage}", alternatives=tuple(alternatives))


def _slower(search: Search, found: Candidate, layout: TrainingLayout, seconds: float) -> str:
    """Why a layout that fits was not chosen."""
    mine = found.training
    if seconds >= mine.seconds:
        return f"training {seconds:.1f} s against {mine.seconds:.1f} s"
    if search.mode != "disaggregated":
        return f"training {seconds:.1f} s, but it leaves the engine too little memory"
    other = Candidate(search.mode, TrainingOption(search.problem, layout, mine.units), found.rollout, search.problem)
    return (f"training {seconds:.1f} s, but the sync {other.sync_s:.2f} s against {found.sync_s:.2f} s, and so the "
            f"step {other.step_s:.2f} s against {found.step_s:.2f} s")


def _one_of_each(rows: Iterable[tuple[TrainingLayout, T]], besides: TrainingLayout | None = None
                 ) -> list[tuple[TrainingLayout, T]]:
    """The first row of each (TP, EP, CP, PP), since layouts that differ only in VPP are listed once. The family of the
    chosen layout also keeps the plain 1F1B schedule."""
    seen, kept = set() if besides is None else {_family(besides)}, []
    for layout, value in rows:
        plain = besides is not None and _family(layout) == _family(besides) and layout.vpp == 1
        if plain or _family(layout) not in seen:
            seen.add(_family(layout))
            kept.append((layout, value))
    return kept


def _family(layout: TrainingLayout) -> tuple[int, ...]:
    return layout.tp, layout.ep, layout.cp, layout.pp


def _unfit(layout: TrainingLayout, memory: TrainingMemory) -> Alternative:
    worst = memory.stages[memory.worst_stage]
    return Alternative(value=layout_name(layout), rejected_by=f"does not fit: {worst.total / GB:.1f} GB on stage "
                                                              f"{worst.stage} against {memory.limit / GB:.1f} GB")


def _engines(search: Search, found: Candidate) -> Choice:
    mine = found.rollout
    alternatives = [
        Alternative(value=f"TP{option.layout.tp} x {option.layout.replicas}",
                    rejected_by=f"rollout {option.seconds:.1f} s against {mine.seconds:.1f} s ({option.time.limit})")
        for option in _fastest_of_each_tp(search.rollout_options(mine.units)) if option.layout.tp != mine.layout.tp]
    alternatives += [Alternative(value=what.removeprefix("rollout "), rejected_by=why)
                     for what, why in sorted(search.space.rejected.items()) if what.startswith("rollout")]
    alternatives += search.engines_without_room(mine.units)
    kv = mine.memory.kv_tokens
    return Choice(key="rollout", value=f"TP{mine.layout.tp} x {mine.layout.replicas}",
                  reason=f"{mine.seconds:.1f} s; an engine's cache holds {kv:,} tokens; {mine.time.limit} binds it",
                  alternatives=tuple(alternatives))


def _fastest_of_each_tp(options: Iterable[RolloutOption]) -> list[RolloutOption]:
    first: dict[int, RolloutOption] = {}
    for option in options:
        first.setdefault(option.layout.tp, option)
    return list(first.values())


def _sequences(search: Search, found: Candidate) -> Choice:
    """The number of sequences that an engine runs at once."""
    problem, mine = search.problem, found.rollout
    others = [option for option in search.engine_options(mine.layout, mine.units)
              if option.layout.max_num_seqs != mine.layout.max_num_seqs]
    pinned = "rollout.max_num_seqs pins it: " if problem.pins.max_num_seqs else ""
    return Choice(key="rollout.max_num_seqs", value=str(mine.layout.max_num_seqs),
                  reason=f"{pinned}rollout {_pace(mine)}", alternatives=tuple(
                      Alternative(value=str(option.layout.max_num_seqs),
                                  rejected_by=f"rollout {_pace(option)} against {_pace(mine)}") for option in others))


def _pace(option: RolloutOption) -> str:
    """The seconds that rank engines: the rollout of a step and, if staleness is bounded, its longest response."""
    longest = f", longest completion {option.longest_s:.1f} s" if option.longest_s else ""
    return f"{option.seconds:.2f} s{longest}"


def _route(sync: SyncPrediction) -> Choice:
    return Choice(key="weight_sync.route", value=sync.chosen, reason=sync.reason, alternatives=tuple(
        Alternative(value=kind, rejected_by=f"{cost.expected_s:.2f} s") for kind, cost in sync.routes.items()
        if kind != sync.chosen))


def _staging(found: Candidate) -> Choice:
    """Where the engines receive weights, and the cost of the alternative: seconds against KV cache."""
    mine = found.rollout
    copy, per_token = mine.memory.weights, mine.memory.kv_bytes_per_token
    pauses = {"in_place": f"engines stop {found.sync_s:.2f} s for a sync",
              "shadow": (f"engines stop {mine.swap_s:.2f} s for a sync, for {copy / GB:.1f} GB of KV cache per GPU "
                         f"({copy // per_token:,} tokens of an engine)")}
    if not found.problem.shadow:
        return Choice(key="weight_sync.staging", value="in_place", reason=pauses["in_place"],
                      alternatives=(Alternative(value="shadow", rejected_by=pauses["shadow"]),))
    best = Search(replace(found.problem, shadow=False), found.mode).best()
    assert best is not None, "the found plan fits without its second copy too"
    other = Alternative(value="in_place", rejected_by=f"{pauses['in_place']}; {_per_hour(best)}",
                        prompts_per_hour=best.prompts_per_hour)
    return Choice(key="weight_sync.staging", value="shadow", alternatives=(other,),
                  reason=f"the configuration asks for it: {pauses['shadow']}; {_per_hour(found)}")


def _running_kv(found: Candidate) -> Choice:
    """Whether running requests keep their KV cache at a sync, and the cost of the alternative."""
    keeps = found.problem.running_kv == "kept"
    other = Search(replace(found.problem, running_kv="dropped" if keeps else "kept"), found.mode).best()
    assert other is not None, "what happens to the cache takes no memory"
    said = {each is found: (f"engines prefill again for {each.rollout.prefill_again_s:.1f} s after a sync"
                            if each.rollout.prefill_again_s else
                            "tokens after a sync read keys and values of older weights") + f"; {_per_hour(each)}"
            for each in (found, other)}
    return Choice(key="rollout.keep_kv", value=str(keeps).lower(), reason=said[True], alternatives=(
        Alternative(value=str(not keeps).lower(), rejected_by=said[False], prompts_per_hour=other.prompts_per_hour),))


def _recipe(found: Candidate) -> Choice:
    """The lean recipe and the careful one, compared on the same problem."""
    problem = found.problem
    workload, rows = problem.workload, []
    for name, logprob, reference in (("lean: no log-prob pass, no KL term", False, False),
                                     ("old log-probs recomputed", True, False),
                                     ("careful: old log-probs recomputed, KL term (reference)", True, True)):
        if (logprob, reference) == (workload.logprob_pass, workload.reference):
            mine = name
            continue
        other = replace(problem, workload=replace(workload, logprob_pass=logprob, reference=reference))
        best = Search(other, found.mode).best()
        rows.append(Alternative(value=name, rejected_by="nothing fits" if best is None else _per_hour(best),
                                prompts_per_hour=None if best is None else best.prompts_per_hour))
    if workload.reference and not workload.logprob_pass:
        mine = "KL term (reference), no log-prob pass"
    return Choice(key="algorithm", value=mine, reason=f"the configuration asks for it: {_per_hour(found)}",
                  alternatives=tuple(rows))
