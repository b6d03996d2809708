"""Warnings of a plan, each with a code. docs/plan.md explains the codes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from launch.coefficients.cpu import MEASURED
from launch.plan.forecast import Warned
from launch.planner.search.candidate import Candidate

MIN_CROSSING = 0.01
"""Bytes that leave their rail (norms, vocabulary rows on a border) are reported above this share of the weights."""
MAX_HOST = 0.8
"""Maximum share of a host's memory that may be pinned. Data, checkpoints in flight and page cache need the rest."""
MAX_BEHIND = 0.02
"""Maximum share of the step for which grading may outlast generation."""
MAX_CAPPED_GROUPS = 0.5
"""Maximum share of groups with a truncated completion. Above it, the reward at the cap teaches more than the task."""
DOCUMENTED: dict[str, str] = {
    "W001": "a training stage fills almost all of its GPU",
    "W002": "an engine's KV cache has no room for one more completion of maximum length",
    "W003": "samples are several versions old",
    "W004": "the target is within the uncertainty of the prediction, or out of reach",
    "W005": "one partition waits for the other during a large part of the step",
    "W006": "weights cross rails",
    "W007": "engine and trainer have different precisions",
    "W008": "nodes or GPUs stay idle",
    "W009": "the engine's log-probs are used as the old log-probs",
    "W010": "weight sync takes a noticeable part of the step",
    "W011": "response lengths are assumed",
    "W012": "no coefficient was measured at this site",
    "W013": "the plan nearly fills a node's host memory",
    "W014": "most groups have a truncated completion",
    "W015": "a second copy of the weights saves no time",
    "W016": "the communicators of the weight sync may not fit in GPU memory",
    "W017": "writing a version to disk takes longer than the steps between two versions",
    "W018": "the bound on the staleness is not the plan's",
    "W019": "engines finish all batches at every weight sync",
    "W020": "rewards take longer than the generation that they should hide behind",
    "W021": "the time of a reward function of yours is assumed",
}
"""Code -> meaning."""


def cautions(found: Candidate, low: float, high: float) -> tuple[Warned, ...]:
    """All warnings of a plan.

    Args:
        low, high: range of the throughput in prompts per hour.
    """
    return tuple(Warned(code=code, message=message) for code, message in
                 sorted(_all(found, low, high)))


def _all(found: Candidate, low: float, high: float) -> Iterator[tuple[str, str]]:
    problem, training, rollout = found.problem, found.training, found.rollout
    workload = problem.workload
    if training.memory.verdict == "tight":
        worst = training.worst
        yield "W001", (f"stage {worst.stage} needs {worst.total / 1e9:.1f} GB of {training.memory.limit / 1e9:.1f} GB "
                       "per GPU: a lower trainer.token_budget, or trainer.recompute=full, would leave room")
    if problem.in_flight and rollout.time.limit == "KV capacity":
        # A request starts when another ends, so the queue does not grow without end, unlike that of a service near
        # full load. What matters is whether a long completion finds room or evicts others from the cache.
        cache = problem.kv_tokens or rollout.memory.kv_tokens
        free = cache * (1 - found.rollout_load)
        if free < workload.longest:
            yield "W002", (f"caches are {found.rollout_load:.0%} full: {free:,.0f} of an engine's {cache:,} tokens are "
                           f"free, and one completion to the cap takes {workload.longest:,}; engines will evict and "
                           "recompute sequences. A larger rollout.tp, or more rollout nodes, makes room")
    if found.staleness > 1:
        yield "W003", (f"a completion of {workload.lengths.cap:,} tokens spans {found.staleness} steps: weights change "
                       "while it is generated; keep algorithm.importance_cap, or use more prompts per step")
    yield from _bound(found)
    yield from _rewards(found)
    if problem.border:
        yield "W019", ("rollout.swap = border: engines finish all batches before they take new weights, so that a step "
                       f"takes {found.step_s:.1f} s, where rollout.swap=in_flight takes {found.in_flight_s:.1f} s with "
                       "the same engines; it repeats bit for bit with rollout.deterministic")
    target = workload.target
    if target is not None and low < target:
        where = "within the uncertainty of the prediction" if high >= target else "out of reach"
        yield "W004", f"{target:,.0f} prompts/h is {where}: {low:,.0f} to {high:,.0f} predicted"
    if problem.asynchronous and found.mode == "disaggregated":
        slow, fast = sorted((training.seconds, rollout.seconds), reverse=True)
        if fast < 0.75 * slow:
            waits = "rollout" if rollout.seconds < training.seconds else "training"
            yield "W005", f"{waits} idles {1 - fast / slow:.0%} of the step: no other division of the nodes is faster"
    if found.sync is not None and found.sync.cross_rail_bytes > MIN_CROSSING * found.sync.replica_bytes:
        yield "W006", (f"{found.sync.cross_rail_bytes / 1e9:.1f} GB of a sync change rails in any order of the GPUs")
    if rollout.layout.weight_precision != training.layout.precision:
        yield "W007", (f"engines compute in {rollout.layout.weight_precision}, the trainer in "
                       f"{training.layout.precision}: watch mismatch/*, keep algorithm.importance_cap")
    idle = problem.units - found.units
    if idle > 0:
        name = "nodes" if len(problem.cluster.nodes) > 1 else "GPUs"
        yield "W008", f"{idle} {name if idle > 1 else name[:-1]} left over: no layout makes the step shorter with them"
    steps = workload.updates * workload.epochs
    if not workload.logprob_pass and not workload.interpolated and steps > 1:
        yield "W009", (f"{steps} updates per batch without a log-prob pass: the engine's log-probs are "
                       "used as the old ones (docs/corrections.md)")
    if found.sync_s > 0.05 * found.step_s:
        yield "W010", f"the weight sync is {found.sync_s / found.step_s:.0%} of the step ({found.sync_s:.2f} s)"
    if not workload.measured_lengths:
        yield "W011", ("response lengths are assumed: workload.response.distribution=file with the samples of a run "
                       "measures them")
    host, installed = found.host_bytes, problem.cluster.host_memory_bytes
    if installed and host > MAX_HOST * installed:
        yield "W013", (f"a node's host must hold {host / 1e9:,.0f} GB of {_offloaded(found)}, of "
                       f"{installed / 1e9:,.0f} GB that it has: more than {MAX_HOST:.0%} leaves too little for the "
                       "rest")
    capped = workload.lengths.group_capped(workload.group)
    if workload.lengths.capped_share < 1 and capped > MAX_CAPPED_GROUPS:       # 1: the length is fixed, at the cap
        yield "W014", (f"{workload.lengths.capped_share:.0%} of the completions run into the cap of "
                       f"{workload.lengths.cap:,} tokens, and with them {capped:.0%} of the groups of "
                       f"{workload.group}: use a larger rollout.max_new_tokens, or no penalty for truncation")
    yield from _communicators(found)
    if problem.shadow and not problem.in_flight:
        copy = rollout.memory.weights
        yield "W015", (f"weight_sync.staging = shadow takes {copy / 1e9:.1f} GB per GPU from the KV cache, and a step "
                       "that generates with the newest weights waits for the sync all the same: "
                       "weight_sync.staging=in_place, or algorithm.max_staleness of at least 1 with "
                       "rollout.swap=in_flight")
    if problem.disk_every and (disk := found.disk_s) > problem.disk_every * found.step_s:
        yield "W017", (f"a version of the weights takes {disk:,.0f} s to disk, and weight_sync.disk.every = "
                       f"{problem.disk_every} asks for one every {problem.disk_every * found.step_s:,.0f} s, so that "
                       f"training waits for it: use {math.ceil(disk / found.step_s)} or more")
    if problem.cluster.coefficients.items() <= MEASURED.items():       # none, or those that are shipped for a CPU
        of = "a run on another machine" if problem.cluster.coefficients else "published runs"
        yield "W012", f"efficiencies are those of {of}: `megatron-rl plan calibrate RUN` measures yours"


def _bound(found: Candidate) -> Iterator[tuple[str, str]]:
    bound, needed = found.problem.max_staleness, found.needed_staleness(found.unbounded_s)
    if bound is None:
        return
    spans = (f"algorithm.max_staleness = {bound}, and the longest completion spans {needed} "
             f"step{'s' * (needed > 1)} of {found.unbounded_s:.1f} s")
    if found.waits:
        yield "W018", (f"{spans}: the trainer waits for it, and a step takes {found.step_s:.1f} s; a higher bound, or "
                       "auto, makes the step shorter")
    elif bound > needed:
        yield "W018", f"{spans}: with a bound of {needed}, samples are fresher and no step is longer"


def _rewards(found: Candidate) -> Iterator[tuple[str, str]]:
    reward, most_s = found.reward, MAX_BEHIND * found.step_s
    if reward.behind_s > most_s:
        paced = reward.busy_s > found.rollout.seconds
        yield "W020", (f"{reward.processes} reward processes take {reward.busy_s:.1f} s for the completions of a step"
                       + (f", and the engines {found.rollout.seconds:.1f} s: rewards set the pace" if paced else
                          f", {reward.behind_s:.1f} s of it after the last one, since many end together")
                       + f". reward.workers={reward.workers_needed(most_s)} hides it, if the nodes have the cores; "
                         "else use more training nodes or a faster reward (workload.reward_s)")
    if found.problem.workload.own_rewards and found.problem.workload.reward_s is None:
        yield "W021", (f"{reward.sample_s:.2g} s for the rewards of a completion is assumed, since the time of a "
                       "function of yours is not known: set workload.reward_s to the time/reward_sample of a run")


def _communicators(found: Candidate) -> Iterator[tuple[str, str]]:
    gpu, training, rollout = found.problem.cluster.gpu, found.training.memory, found.rollout
    if found.sync is None or gpu.device != "gpu":
        return
    needed = found.sync.needs[found.sync.chosen]
    for side, count, size, free, fix in (
            ("training", needed.training, needed.training_bytes, gpu.usable_bytes - training.total,
             "a lower trainer.token_budget"),
            ("rollout", needed.rollout, needed.rollout_bytes, gpu.usable_bytes - rollout.memory.total,
             "a lower rollout.memory_utilization")):
        if size > free:
            yield "W016", (f"{count} communicators of the sync take {size / 1e9:.1f} GB of a {side} GPU in addition to "
                           f"the planned memory, and {max(0, free) / 1e9:.1f} GB are free: {fix}, or another "
                           "weight_sync.route")


def _offloaded(found: Candidate) -> str:
    work = found.problem.workload
    what = ["the reference's weights"] if work.reference and work.reference_offload else []
    what += ["the teacher's weights"] if found.problem.teacher and work.teacher_offload else []
    what += ["the trainer's state while engines generate"] if found.mode == "colocated" else []
    what += ["the copy of a checkpoint"] if found.failures.host_bytes else []
    return ", ".join(what)
