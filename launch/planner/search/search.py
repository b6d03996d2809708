"""The search over all layouts of both partitions and all divisions of the cluster, with branch and bound.

The search is exact: it finds the best candidate of the model. It skips a candidate only if its lower bound is no better
than a candidate already found. The bound consists of the times of the two partitions and the least time of a sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from launch.fabric.choose import least_seconds, quickest, seconds_of_choice
from launch.fabric.lanes import fabric_of
from launch.model.padding import round_up, sequence_multiple
from launch.plan.forecast import Alternative
from launch.plan.layouts import RolloutLayout, TrainingLayout
from launch.plan.plan import PARTS
from launch.planner.memory.rollout import RolloutMemory
from launch.planner.memory.training import TrainingMemory
from launch.planner.parameters import matrix_parameters
from launch.planner.search.candidate import Candidate, in_ticks, sync_arguments
from launch.planner.search.options import RolloutOption, TrainingOption, max_num_seqs_to_try, share_left, shares
from launch.planner.search.problem import Mode, Problem, in_mode
from launch.planner.search.space import Space
from launch.planner.time.reward import RewardTime
from launch.planner.time.step import combined_seconds


class _Timed(NamedTuple):
    """A training layout that fits, with its time. Everything else is computed later."""

    seconds: float
    layout: TrainingLayout


@dataclass
class Search:
    """The search of one problem, for any number of units. Results for one number are reused for the next."""

    problem: Problem
    mode: Mode = "disaggregated"
    _training: dict[int, list[_Timed]] = field(default_factory=dict)
    _rollout: dict[tuple[int, float], list[RolloutOption]] = field(default_factory=dict)
    _engine_s: dict[int, float] = field(default_factory=dict)
    _sync_s: dict[tuple, float | None] = field(default_factory=dict)
    _least_dp: dict[TrainingLayout, int] = field(default_factory=dict)
    """Layout with DP 1 -> the smallest DP at which it fits."""
    unroutable: bool = False
    """Whether layouts were left out because a run can open no route of their weight sync."""

    def __post_init__(self) -> None:
        self.asked = self.problem
        self.problem = problem = in_mode(self.problem, self.mode)
        self.space = Space(problem.shape, problem.cluster.gpus_per_node, problem.pins, problem.teacher)
        self._layouts = [layout for layout in self.space.training() if self._packs(layout)]
        self._variants = {layout: tuple(self.space.recomputations(layout)) for layout in self._layouts}
        self._engines = list(self.space.rollout())
        self._fabric = fabric_of(problem.cluster)
        self._other_share = problem.coefficients.rl.other_share
        self._sorted: list[RolloutOption] = []
        self._sorted_units = 0

    def best(self, units: int | None = None, training_units: int | None = None) -> Candidate | None:
        """The candidate with the shortest step on at most `units` units (default: all); None if nothing fits. Among
        equal steps, the candidate on fewer units wins, then the one that trains faster.

        Args:
            training_units: search only the division with this many training units.
        """
        units = self.problem.units if units is None else units
        if self.mode != "disaggregated":
            return self._best_together(units)
        found: Candidate | None = None
        for training in self._divisions(units, training_units):
            found = self._best_of_division(training, units - training, found)
        return found

    def feasible(self, units: int | None = None) -> bool:
        """Whether any candidate fits. This is cheaper than `best`."""
        units = self.problem.units if units is None else units
        if self.mode != "disaggregated":
            return self.best(units) is not None
        engines = next((number for number in range(1, units) if self.rollout_options(number)), units)
        return any(self.fitting(training) for training in self._divisions(units, None) if training + engines <= units)

    def fitting(self, units: int) -> bool:
        """Whether any training layout fits on exactly these units."""
        return any(next(self._fitting(layout, units), None) is not None for layout in self._layouts)

    def training_options(self, units: int) -> list[TrainingOption]:
        """Training layouts that fit on exactly these units, the fastest first."""
        return [TrainingOption(self.problem, layout, units) for _, layout in self._timed(units)]

    def rollout_options(self, units: int, share: float | None = None) -> list[RolloutOption]:
        """Engines on exactly these units, the fastest first.

        Args:
            share: fraction of a GPU's memory for an engine; default: the configured one.
        """
        share = self.problem.pins.memory_utilization if share is None else share
        if (units, share) not in self._rollout:
            options = [option for layout in self._engines
                       for option in self._undominated(replace(layout, memory_utilization=share), units)]
            self._rollout[units, share] = sorted(options, key=lambda option: option.seconds)
        return self._rollout[units, share]

    def unfit(self, units: int) -> Iterator[tuple[TrainingLayout, TrainingMemory]]:
        """Training layouts on these units that do not fit, with their memory at the most recomputation allowed."""
        for layout in self._layouts:
            dp = self._dp(layout, units)
            if dp:
                last = replace(self._variants[layout][-1], dp=dp)
                memory = self._memory(last)
                if not memory.fits:
                    yield last, memory

    def engines_without_room(self, units: int) -> list[Alternative]:
        """Engines with a cache that cannot hold the longest sequence."""
        problem, found = self.problem, []
        for layout in self._engines:
            placed = next(iter(self._placed(layout, units)), None)
            if placed is None:
                continue
            memory = RolloutOption(problem, placed, units).memory
            if memory.verdict == "no":
                found.append(Alternative(
                    value=f"TP{layout.tp} x {placed.replicas}",
                    rejected_by=_no_room(memory, problem.workload.longest)))
        return found

    def _divisions(self, units: int, training_units: int | None) -> Iterator[int]:
        """Numbers of training units, the middle ones first: an early good candidate prunes the rest."""
        pinned = training_units or self.problem.pins.training_nodes
        if pinned is not None:
            yield from (pinned,) if 0 < pinned < units else ()
            return
        yield from sorted(range(1, units), key=lambda training: (abs(2 * training - units), training))

    def _best_of_division(self, training: int, most_rollout: int, found: Candidate | None) -> Candidate | None:
        graded_s = self._graded_s(training)
        fastest_s = max(graded_s, self._fastest_engine_s(most_rollout))
        if self._loses(found, fastest_s, self._least_training_s(training), 0.0):
            return found
        rollouts = self._engines_on(most_rollout)
        for seconds, layout in self._timed(training):
            if rollouts and self._loses(found, max(graded_s, rollouts[0].seconds), seconds, rollouts[0].longest_s):
                break               # options are sorted, so no later one is faster
            mine = None
            for engines in rollouts:
                rollout_s = max(graded_s, engines.seconds)
                if self._loses(found, rollout_s, seconds, engines.longest_s):
                    break
                units = training + engines.units
                sync_s: float | None = None
                for seconds_of in (self._least_sync_s, self._quickest_sync_s, self._seconds_of_sync):
                    sync_s = seconds_of(layout, engines.layout)
                    if sync_s is None or self._no_better(found, engines, rollout_s, seconds, units, sync_s):
                        break
                else:
                    mine = mine or TrainingOption(self.problem, layout, training)
                    found = self._better(found, Candidate(self.mode, mine, engines, self.problem))
        return found

    def _best_together(self, units: int) -> Candidate | None:
        """The best candidate with both partitions on the same units. Engines get the memory that the trainer leaves."""
        found: Candidate | None = None
        for number in range(units, 0, -1):
            if self._loses(found, 0.0, self._least_training_s(number), 0.0):
                break               # fewer units train no faster
            fastest_s = min((option.seconds for share in shares(self.problem)
                             for option in self.rollout_options(number, share)[:1]), default=None)
            if fastest_s is None or self._loses(found, fastest_s, self._least_training_s(number), 0.0):
                continue
            for seconds, layout in self._timed(number):
                if self._loses(found, fastest_s, seconds, 0.0):
                    break
                share = share_left(self.problem, self.mode, self._memory(layout))
                mine = None
                for engines in self.rollout_options(number, share) if share else ():
                    if self._loses(found, engines.seconds, seconds, 0.0):
                        break
                    mine = mine or TrainingOption(self.problem, layout, number)
                    both = Candidate(self.mode, mine, engines, self.problem)
                    if both.colocated is None or both.colocated.fits:
                        found = self._better(found, both)
        return found

    def _engines_on(self, units: int) -> list[RolloutOption]:
        """Engines on at most these units, sorted by the step that they alone would allow."""
        if units > self._sorted_units:
            self._sorted_units = units
            self._sorted = [option for number in range(1, units + 1) for option in self.rollout_options(number)]
            self._sorted.sort(key=lambda option: (
                self._step_s(option.seconds, 0.0, 0.0, option.longest_s, ()), option.units))
        return [option for option in self._sorted if option.units <= units]

    def _loses(self, found: Candidate | None, rollout_s: float, training_s: float, longest_s: float) -> bool:
        """Whether two partitions with these times are slower than `found` even if a sync took no time, and if with
        `algorithm.overlap` all groups but the last ones were complete at once."""
        at_once = (0.0,) * (PARTS - 1) + (1.0,) if self.problem.overlap else ()
        return found is not None and self._step_s(rollout_s, training_s, 0.0, longest_s, at_once) > found.step_s

    def _graded_s(self, training_units: int) -> float:
        """Least time in which the rewards on so many training units grade a step: a bound on its rollout."""
        problem, nodes = self.problem, training_units if len(self.problem.cluster.nodes) > 1 else 1
        return RewardTime(problem.workload, problem.reward_workers, nodes, 0.0, (), problem.coefficients.reward).busy_s

    def _no_better(self, found: Candidate | None, rollout: RolloutOption, rollout_s: float, training_s: float,
                   units: int, sync_s: float) -> bool:
        if found is None:
            return False
        step_s = self._step_s(rollout_s, training_s, sync_s, rollout.longest_s, rollout.completions)
        return (step_s, units) >= (found.step_s, found.units)

    def _step_s(self, rollout_s: float, training_s: float, sync_s: float, longest_s: float,
                completions: Sequence[float]) -> float:
        """The step; a lower bound if the engines stop only for the swap, which counts as 0 here."""
        return combined_seconds(self.problem.asynchronous, rollout_s, training_s, sync_s, self._other_share, longest_s,
                                self.problem.max_staleness or 0, 0.0 if self.problem.swaps else None, completions)

    def _better(self, found: Candidate | None, new: Candidate) -> Candidate:
        if found is None or (new.step_s, new.units) < (found.step_s, found.units):
            return new
        return found

    def _fastest_engine_s(self, units: int) -> float:
        """Least rollout time of all engines on at most `units` units."""
        if units not in self._engine_s:
            known = max((number for number in self._engine_s if number < units), default=0)
            least = self._engine_s.get(known, float("inf"))
            for number in range(known + 1, units + 1):
                least = min([least, *(option.seconds for option in self.rollout_options(number)[:1])])
                self._engine_s[number] = least
        return self._engine_s[units]

    def _least_training_s(self, units: int) -> float:
        """Lower bound of the training time: the FLOPs of the matrix products at the rate of a large product."""
        problem, c = self.problem, self.problem.coefficients
        gpu, shape, workload, lora = problem.cluster.gpu, problem.shape, problem.workload, problem.lora_rank
        rate = max(gpu.bf16_flops, gpu.fp32_flops, gpu.fp8_flops if problem.pins.precision == "fp8" else 0.0)
        rate *= gpu.sustained * max(c.training.gemm_bf16, c.training.gemm_fp8)
        experts = c.rl.mixture_efficiency if shape.experts else 1.0
        tokens = workload.sequences // workload.updates * workload.mean_tokens * (1 - 1e-6) - 1
        flops = (4 if lora else 6) * (matrix_parameters(shape) - (shape.vocab * shape.hidden if lora else 0)) * tokens
        seconds = flops / (units * problem.unit_gpus * rate) / (c.rl.train_efficiency * experts)
        return max(0.0, workload.epochs * workload.updates * seconds)

    def _timed(self, units: int) -> list[_Timed]:
        """Training layouts that fit on exactly these units, the fastest first."""
        if units not in self._training:
            fitting = (placed for layout in self._layouts for placed in self._fitting(layout, units))
            self._training[units] = sorted((_Timed(TrainingOption(self.problem, layout, units).seconds, layout)
                                            for layout in fitting), key=lambda each: each.seconds)
        return self._training[units]

    def _fitting(self, layout: TrainingLayout, units: int) -> Iterator[TrainingLayout]:
        """The layout with the least recomputation that fits. If partitions share GPUs, with every one that fits, since
        the engine may need the memory that more recomputation frees."""
        dp = self._dp(layout, units)
        for each in self._variants[layout] if dp else ():
            if dp >= self._smallest_dp(each):
                yield each.at_dp(dp)
                if self.mode == "disaggregated":
                    return

    def _smallest_dp(self, layout: TrainingLayout) -> int:
        """The smallest DP at which the layout fits. More DP never needs more memory, because it only reduces optimizer
        shards and micro-batches in flight."""
        if layout not in self._least_dp:
            low, high = 0, self.problem.cluster.total_gpus // layout.replica_gpus + 1
            while high - low > 1:
                middle = (low + high) // 2
                fits = self._memory(layout.at_dp(middle)).fits
                low, high = (low, middle) if fits else (middle, high)
            self._least_dp[layout] = high
        return self._least_dp[layout]

    def _dp(self, layout: TrainingLayout, units: int) -> int:
        """DP on all GPUs of these units, or the pinned DP if it takes exactly these units; 0 if the units are no whole
        number of replicas, or if there are too few sequences."""
        dp = self._whole(units, layout.replica_gpus, self.problem.pins.dp)
        workload = self.problem.workload
        if not dp or dp * layout.cp % layout.ep:
            return 0
        needed = dp * (layout.pp if layout.vpp > 1 else 1)
        return 0 if workload.sequences // workload.updates < needed else dp

    def _whole(self, units: int, gpus: int, pinned: int | None) -> int:
        """How many groups of `gpus` GPUs fill these units, or the pinned number if it takes exactly these units (it may
        fill the last one in part); else 0."""
        number, rest = divmod(units * self.problem.unit_gpus, gpus)
        if pinned is None:
            return 0 if rest else number
        return pinned if -(-pinned * gpus // self.problem.unit_gpus) == units else 0

    def _packs(self, layout: TrainingLayout) -> bool:
        """Whether the longest sequence, padded for this layout, fits into a micro-batch."""
        multiple = sequence_multiple(layout.tp, layout.cp, layout.sequence_parallel)
        budget, longest = self.problem.token_budget, round_up(self.problem.workload.longest, multiple)
        if longest <= budget and budget % multiple == 0:
            return True
        self.space.rejected.setdefault(
            f"TP {layout.tp} CP {layout.cp}", f"sequences are padded to a multiple of {multiple}, and a micro-batch "
                                              f"has {budget} tokens")
        return False

    def _memory(self, layout: TrainingLayout) -> TrainingMemory:
        return TrainingOption(self.problem, layout, 0).memory

    def engine_options(self, layout: RolloutLayout, units: int) -> list[RolloutOption]:
        """Engines of one layout on these units, with each value of `max_num_seqs`, the fastest first."""
        placed = (RolloutOption(self.problem, each, units) for each in self._placed(layout, units))
        return sorted((option for option in placed if option.memory.fits),
                      key=lambda option: (option.seconds, option.layout.max_num_seqs))

    def _undominated(self, layout: RolloutLayout, units: int) -> Iterator[RolloutOption]:
        """The engine options without those that are slower than another and allow no shorter step. A slower one may
        complete its first groups earlier, which helps the trainer with `algorithm.overlap`, and the rewards by at most
        the time that they take."""
        longest_s, first_s = float("inf"), None
        graded_s = 0.0 if self.problem.in_flight else self._graded_s(1)
        for option in self.engine_options(layout, units):
            first_s = option.seconds if first_s is None else first_s
            if option.longest_s < longest_s or option.completions or option.seconds < first_s + graded_s:
                longest_s = min(longest_s, option.longest_s)
                yield option

    def _placed(self, layout: RolloutLayout, units: int) -> list[RolloutLayout]:
        """The layout on these units with each value of `max_num_seqs`, the smallest first; [] if it does not fit."""
        replicas = self._whole(units, layout.tp * layout.pp, self.problem.pins.replicas)
        if not replicas or replicas > self.problem.workload.prompts:
            return []
        return [replace(layout, replicas=replicas, max_num_seqs=limit)
                for limit in max_num_seqs_to_try(self.problem, replicas)]

    def _least_sync_s(self, training: TrainingLayout, rollout: RolloutLayout) -> float | None:
        """Lower bound of the sync for any DP and any number of engines."""
        full = min(rollout.replicas, max(1, self._fabric.gpus_per_node // (rollout.tp * rollout.pp)))
        return self._sync_seconds(least_seconds, training, rollout, full)

    def _quickest_sync_s(self, training: TrainingLayout, rollout: RolloutLayout) -> float | None:
        """Lower bound of the sync: its fastest route."""
        return self._sync_seconds(quickest, training, rollout, training.cp * training.dp, rollout.replicas)

    def _seconds_of_sync(self, training: TrainingLayout, rollout: RolloutLayout) -> float | None:
        """Seconds of the sync over the route to choose; None if a run can open no route. 0 with a pinned route, which
        `Candidate` computes."""
        if self.problem.route != "auto":
            return 0.0
        found = self._sync_seconds(seconds_of_choice, training, rollout, training.cp * training.dp, rollout.replicas,
                                   most_links=self.problem.most_links)
        self.unroutable = self.unroutable or found is None
        return found

    def _sync_seconds(self, seconds_of: Callable[..., float | None], training: TrainingLayout, rollout: RolloutLayout,
                      *sizes: int, **more: int) -> float | None:
        """The result of `seconds_of` in ticks, from the layouts' sizes and other `sizes` that it depends on."""
        problem, key = self.problem, (seconds_of, *self._moved(training, rollout), *sizes)
        if key not in self._sync_s:
            seconds = seconds_of(problem.shape, training, rollout, self._fabric, problem.coefficients.sync,
                                 **sync_arguments(problem, training, rollout), **more)
            self._sync_s[key] = seconds if seconds is None else in_ticks(problem, seconds)
        return self._sync_s[key]

    @staticmethod
    def _moved(training: TrainingLayout, rollout: RolloutLayout) -> tuple:
        """The sizes that decide which bytes of a shard an engine rank takes. The chunk of a layer matters only to an
        engine with pipeline stages."""
        return (training.tp, training.pp, training.vpp if rollout.pp > 1 else 1, training.ep, training.etp,
                training.layers_of_stage, rollout.tp, rollout.pp)


def _no_room(memory: RolloutMemory, longest: int) -> str:
    """The reason why an engine cannot run, in numbers."""
    fixed = sum(size for name, size in memory.components.items() if name != "kv_cache")
    if not memory.kv_tokens:
        return (f"no room: {memory.components['weights'] / 1e9:.1f} GB of weights, {fixed / 1e9:.1f} GB in total, "
                f"and an engine may take {memory.limit / 1e9:.1f} GB of a GPU")
    return f"no room: the cache of an engine holds {memory.kv_tokens:,} tokens, the longest sequence has {longest:,}"
