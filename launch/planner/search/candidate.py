"""Candidates, which combine an option of each partition into a plan with its costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.fabric.choose import SyncPrediction
from launch.fabric.lanes import ClusterFabric
from launch.fabric.staging import staging
from launch.plan.book import line, made, nonzero, part
from launch.plan.layouts import RolloutLayout, TrainingLayout, wide_bytes
from launch.planner.memory.rollout import ColocatedMemory
from launch.planner.parameters import count, lora_count
from launch.planner.search.options import RolloutOption, TrainingOption
from launch.planner.search.problem import Mode, Problem
from launch.planner.time import step as rl_step
from launch.planner.time.handover import handover_seconds
from launch.planner.time.reliability import Failures, disk_seconds
from launch.planner.time.reward import RewardTime
from launch.planner.time.rollout import minimum_staleness

SYNC_TICK_S = 1e-3
"""Resolution of a predicted sync over the network. Plans that differ by less have equal syncs, so microseconds decide
nothing."""

HANDOVER = {"colocated": "fixed + tensors x time of one + bytes / rate, as in published colocated systems",
            "hybrid": "pause + barriers + what a node lacks / its NICs + an engine rank's weights (1 / NVLink + 1 / "
                      "digest rate)"}
"""Formula of a hand-over of weights on the same GPUs."""


@dataclass(eq=False)
class Candidate:
    """A complete plan in numbers."""

    mode: Mode
    training: TrainingOption
    rollout: RolloutOption
    problem: Problem

    network = made(SyncPrediction, shape="problem.shape", training="training.layout", rollout="rollout.layout",
                   fabric="wires.fabric", coefficients="problem.coefficients.sync", weight_bytes="weight_bytes",
                   rollout_precision="rollout.layout.weight_precision", lora_rank="problem.lora_rank",
                   route="problem.route", bucket_bytes="problem.bucket_bytes", most_links="problem.most_links")
    """Weights over the network; see `sync`."""
    shared = made(ColocatedMemory, trainer="training.memory", engine="rollout.memory", gpu="problem.cluster.gpu",
                  coefficients="problem.coefficients.memory", trainer_offloaded="trainer_offloaded")
    """Memory of GPUs that both partitions use; see `colocated`."""
    reward = made(RewardTime, workload="problem.workload", workers="problem.reward_workers", nodes="training_nodes",
                  rollout_s="rollout.seconds", completions="rollout.time.completions",
                  c="problem.coefficients.reward")
    """Grading of the completions."""
    failures = made(Failures, parameters="trained_parameters", step_s="step_s", nodes="nodes",
                    training_nodes="training_nodes", training_gpus="training.layout.gpus", cluster="problem.cluster",
                    c="problem.coefficients.reliability", precision="training.layout.precision",
                    async_save="problem.async_save", distributed_optimizer="training.layout.distributed_optimizer")

    @part
    def wires(self) -> ClusterFabric:
        return ClusterFabric(self.problem.cluster)

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element on the wire."""
        return wide_bytes(self.training.layout.precision)

    @property
    def trainer_offloaded(self) -> bool:
        """Whether the trainer's state is on the host while engines generate."""
        return self.mode == "colocated"

    @property
    def trained_parameters(self) -> int:
        return self.adapters or self.parameters

    @property
    def sync(self) -> SyncPrediction | None:
        """The sync over the network; None if trainer and engines share GPUs."""
        return self.network if self.mode == "disaggregated" else None

    def staged(self) -> Candidate:
        """The candidate with the staging buffers of its route. Nothing but the memory of its parts changes."""
        if self.sync is None:
            return self
        buffers = staging(self.sync.build())
        return replace(self, training=replace(self.training, staging=buffers.training),
                       rollout=replace(self.rollout, staging=buffers.rollout))

    @property
    def colocated(self) -> ColocatedMemory | None:
        return None if self.mode == "disaggregated" else self.shared

    @line("parameters", "L x layer + V h (twice unless tied) + h", key="model.parameters")
    def parameters(self) -> int:
        return count(self.problem.shape)

    @line("parameters", "L r (in + out) of q, k, v, o and the MLP's matrices", key="parameters.adapters",
          written=nonzero)
    def adapters(self) -> int:
        return lora_count(self.problem.shape, self.problem.lora_rank) if self.problem.lora_rank else 0

    @line("s", lambda self: HANDOVER[self.mode], key="sync.in_place_s", written=nonzero)
    @part
    def handover_s(self) -> float:
        if self.mode == "disaggregated":
            return 0.0
        problem = self.problem
        return handover_seconds(self.mode, problem.shape, self.training.layout, self.rollout.layout, problem.cluster,
                                problem.coefficients, lora_rank=problem.lora_rank)

    @line("s", lambda self: "hand-over inside the GPUs" if self.sync is None else "the chosen route" + (
        "" if self.sync_s == self.sync.seconds else ", in whole milliseconds"), key="phase.sync_s")
    @part
    def sync_s(self) -> float:
        return self.handover_s if self.sync is None else in_ticks(self.problem, self.sync.seconds)

    @line("bytes", "ranks of a node x (weights of reference and teacher, where offloaded + resident state, where "
                   "colocated), largest stage, + the copy of a checkpoint", key="memory.host.needed", written=nonzero)
    @part
    def host_bytes(self) -> int:
        """Pinned bytes on the host of the fullest node: the weights of an offloaded reference or teacher, the trainer's
        state while a colocated engine generates, and the copy of the checkpoint that is written beside the steps.
        Pinned pages cannot be swapped out."""
        stages = self.training.memory.stages
        offloaded = max(stage.pinned for stage in stages)
        asleep = max(stage.resident for stage in stages) if self.mode == "colocated" else 0
        ranks = min(self.problem.cluster.gpus_per_node, self.training.layout.gpus)
        return ranks * (offloaded + asleep) + self.failures.host_bytes

    @line("s", lambda self: self.formula, key="step.total_s")
    @part
    def step_s(self) -> float:
        return step_seconds(self.problem, self.scored_s, self.training.seconds, self.sync_s, self.longest_s,
                            self.rollout.swap_s if self.problem.swaps else 0.0, self.rollout.completions)

    @part
    def scored_s(self) -> float:
        """Seconds of a step in which its completions are generated and graded."""
        return self.rollout.seconds + (self.reward.behind_s if self.problem.in_flight else self.reward.seconds)

    @part
    def longest_s(self) -> float:
        """Seconds of the longest completion and its reward, which a bound on the staleness limits; 0 without a
        bound."""
        return self.rollout.longest_s + self.reward.last_s if self.rollout.longest_s else 0.0

    @property
    def formula(self) -> str:
        """The formula of the step, in words."""
        problem = self.problem
        training = "train + log-prob + reference" + (" + teacher" if problem.teacher else "")
        ready = "max(rollout, grading)" if problem.in_flight else "rollout + reward"
        formula = ("(max over parts j of c_j + what j and later parts train, + sync)" if self.rollout.completions else
                   f"(rollout + reward + {training} + sync)" if not problem.asynchronous else
                   f"max({ready} + swap, {training} + sync)" if problem.swaps else
                   f"(max({ready}, {training}) + sync)")
        floor = (f", at least (longest completion + {training} + sync) / (staleness allowed + 1)"
                 if self.rollout.longest_s else "")
        return f"{formula} x (1 + other){floor}"

    @line("prompts/h", "3600 x prompts / step", key="step.prompts_per_hour")
    def prompts_per_hour(self) -> float:
        return 3600 * self.problem.workload.prompts / self.step_s

    @line("s", lambda self: f"written and read back: 2 x {wide_bytes(self.training.layout.precision)} bytes x "
                            "parameters / min(bandwidth of a node x training nodes, bandwidth of the file system)",
          key="sync.disk_s", written=nonzero)
    @part
    def disk_s(self) -> float:
        """Seconds until a version of the weights is on disk and read back; 0 if none is written."""
        if not self.problem.disk_every:
            return 0.0
        return disk_seconds(self.parameters, self.training_nodes, self.problem.coefficients.reliability,
                            precision=self.training.layout.precision)

    @property
    def nodes(self) -> int:
        """Nodes in use."""
        return sum(self.nodes_used)

    @property
    def training_nodes(self) -> int:
        return self.nodes_used[0]

    @property
    def nodes_used(self) -> tuple[int, int]:
        """(nodes that train, nodes that only roll out). A single node that does both counts as a training node. Without
        GPUs, each engine gets its own node as long as there are nodes left (`launch.planner.seats.local`)."""
        nodes = len(self.problem.cluster.nodes)
        if nodes == 1:
            return 1, 0
        training, rollout = self.training.units, self.rollout.units if self.mode == "disaggregated" else 0
        if self.problem.cluster.gpu.device == "cpu":
            rollout = max(rollout, min(self.rollout.layout.replicas, nodes - self.problem.spare_nodes - training))
        return training, rollout

    @property
    def waits(self) -> bool:
        """Whether the limit on staleness sets the length of the step."""
        return self.step_s > self.unbounded_s

    @property
    def rollout_busy(self) -> float:
        """Fraction of the step in which the engines generate. In the rest they wait for the trainer."""
        return min(1.0, self.rollout.seconds / self.step_s) if self.problem.asynchronous else 1.0

    @property
    def rollout_load(self) -> float:
        """Completions in flight divided by the number that the engines can hold, over the whole step."""
        return self.rollout.time.load * self.rollout_busy

    @property
    def units(self) -> int:
        """Units in use."""
        if self.mode == "disaggregated":
            return self.training.units + self.rollout.units
        return self.training.units

    @property
    def pauses(self) -> dict[str, float]:
        """Staging -> seconds of a sync in which the engines serve nothing. Engines never receive adapters, or weights
        that they quantise, into a second copy."""
        shadow = not self.problem.lora_rank and self.rollout.layout.weight_precision != "fp8"
        return {"in_place": self.sync_s} | ({"shadow": self.rollout.swap_s} if shadow else {})

    @property
    def staleness(self) -> int:
        """The bound on the staleness that the step needs: ceil(longest completion / step), at most the given bound. 0
        if synchronous, 1 if engines drain at the border of a batch."""
        if not self.problem.asynchronous:
            return 0
        spanned, bound = self.needed_staleness(self.step_s), self.problem.max_staleness
        return spanned if bound is None else min(spanned, bound)

    def needed_staleness(self, step_s: float) -> int:
        """The bound with which no step of this length waits for a completion."""
        if self.problem.border:
            return 1
        return max(1, minimum_staleness(self.rollout.time, step_s - self.rollout.prefill_again_s))

    @property
    def in_flight_s(self) -> float:
        """Seconds of the step if these engines took new weights while completions run."""
        problem = replace(self.problem, border=False)
        return replace(self, problem=problem, rollout=replace(self.rollout, problem=problem)).step_s

    @property
    def unbounded_s(self) -> float:
        """Seconds of the step without a bound on the staleness."""
        return step_seconds(self.problem, self.scored_s, self.training.seconds, self.sync_s, 0.0,
                            self.rollout.swap_s if self.problem.swaps else 0.0, self.rollout.completions)


def step_seconds(problem: Problem, rollout_s: float, training_s: float, sync_s: float, longest_s: float,
                 swap_s: float, completions: Sequence[float]) -> float:
    """Seconds of a whole step; see `rl_step.combined_seconds`. For `longest_s`, `swap_s` and `completions` see
    `RolloutOption`."""
    return rl_step.combined_seconds(problem.asynchronous, rollout_s, training_s, sync_s,
                                    problem.coefficients.rl.other_share, longest_s, problem.max_staleness or 0,
                                    swap_s if problem.swaps else None, completions)


def in_ticks(problem: Problem, seconds: float) -> float:
    """`seconds` rounded up to `SYNC_TICK_S`; unchanged on a cluster of one node."""
    if len(problem.cluster.nodes) == 1:
        return seconds
    return math.ceil(seconds / SYNC_TICK_S - 1e-9) * SYNC_TICK_S


def sync_arguments(problem: Problem, training: TrainingLayout, rollout: RolloutLayout) -> dict[str, Any]:
    """The arguments of `launch.fabric` for a sync, besides the layouts."""
    return {"weight_bytes": wide_bytes(training.precision), "lora_rank": problem.lora_rank,
            "rollout_precision": rollout.weight_precision, "bucket_bytes": problem.bucket_bytes}
