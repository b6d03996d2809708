"""Options of the two partitions, and candidates, which combine one option of each into a plan with its costs.

A *unit* is what the search divides between the partitions: a node, or a GPU if the cluster has only one node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.fabric.choose import SyncPrediction
from launch.fabric.estimate import SENDING, STAGED_BUCKETS, swap_seconds
from launch.fabric.lanes import ClusterFabric
from launch.fabric.staging import staging
from launch.plan.book import line, made, nonzero, part
from launch.plan.layouts import RolloutLayout, TrainingLayout, layers_of_stage, stage_layers, wide_bytes
from launch.planner.memory.rollout import ColocatedMemory, RolloutMemory
from launch.planner.memory.training import Reference, StageMemory, TrainingMemory
from launch.planner.parameters import count, lora_count, rank_parameters, teacher_parameters
from launch.planner.search.problem import Mode, Problem
from launch.planner.time import step as rl_step
from launch.planner.time.decode import Engine
from launch.planner.time.handover import handover_seconds
from launch.planner.time.reliability import Failures, disk_seconds
from launch.planner.time.reward import RewardTime
from launch.planner.time.rollout import AsynchronousRollout, Demand, RolloutTime, SynchronousRollout, minimum_staleness
from launch.planner.time.training import LogprobTime, TeacherTime, TrainingTime
from launch.planner.workload.work import PackedWork

FEWEST_SEQUENCES, MOST_SEQUENCES = 16, 1024
"""Range of the concurrent sequences of an engine if the search chooses them."""
SYNC_TICK_S = 1e-3
"""Resolution of a predicted sync over the network. Plans that differ by less have equal syncs, so microseconds decide
nothing."""

HANDOVER = {"colocated": "fixed + tensors x time of one + bytes / rate, as in published colocated systems",
            "hybrid": "pause + barriers + what a node lacks / its NICs + an engine rank's weights (1 / NVLink + 1 / "
                      "digest rate)"}
"""Formula of a hand-over of weights on the same GPUs."""
_PASS = {"shape": "problem.shape", "layout": "layout", "held": "held", "work": "work", "cluster": "problem.cluster",
         "c": "problem.coefficients.training", "collectives": "problem.coefficients.collectives"}


@dataclass(eq=False)
class TrainingOption:
    """A layout (including DP) of the training partition on `units` units, with its costs. It need not fit."""

    PREFIX = "phase"

    problem: Problem
    layout: TrainingLayout
    units: int
    staging: int | None = None
    """Buffers of the weight sync on a rank. None: no route is chosen yet, so they may be as large as with any."""

    held = made(rank_parameters, shape="problem.shape", tp="layout.tp", ep="layout.ep", etp="layout.etp",
                pp="layout.pp", layers="stage_layers")
    teacher = made(teacher_parameters, shape="problem.teacher", tp="layout.tp", ep="layout.ep", etp="layout.etp",
                   pp="layout.pp", layers="teacher_layers")
    """Read only if the problem has a teacher."""
    work = made(PackedWork, workload="problem.workload", layout="layout", token_budget="problem.token_budget")
    memory = made(TrainingMemory, shape="problem.shape", layout="layout", held="held", gpu="problem.cluster.gpu",
                  coefficients="problem.coefficients.memory", micro_batch_tokens="problem.token_budget",
                  micro_batches="work.micro_batches", reference="reference", sync_bucket_bytes="sync_bytes",
                  lora_rank="problem.lora_rank", teacher="teacher", teacher_kept="teacher_kept")
    time = made(TrainingTime, **_PASS, lora_rank="problem.lora_rank")
    """One optimizer step."""
    forward = made(LogprobTime, **_PASS)
    """One forward pass over the same sequences."""
    teacher_forward = made(TeacherTime, **{**_PASS, "shape": "problem.teacher", "held": "teacher"})
    """One forward pass of the teacher over the same sequences; read only if the problem has one."""

    @line("", "max(1, (prompt + E[longest of a step]) / (tokens / DP))")
    @part
    def imbalance(self) -> float:
        workload = self.problem.workload
        return rl_step.imbalance(workload.lengths, workload.prompt_tokens, self.work.sequences, self.layout.dp)

    @line("s", "epochs x updates x (pre-training time x imbalance / eta + t_update)")
    @part
    def train_s(self) -> float:
        """Seconds of all optimizer steps of a GRPO step."""
        problem = self.problem
        return problem.workload.epochs * rl_step.train_seconds(
            self.time.total_s, problem.workload.updates, self.imbalance, bool(problem.shape.experts),
            problem.coefficients.rl)

    @line("s", "train x forward / training x factor")
    @part
    def pass_s(self) -> float:
        """Seconds of a log-prob pass over all completions of a GRPO step."""
        return rl_step.pass_seconds(self.train_s / self.problem.workload.epochs, self.time.total_s,
                                    self.forward.total_s, self.problem.coefficients.rl)

    @line("s", "one pass", written=nonzero)
    @part
    def logprob_s(self) -> float:
        return self.pass_s if self.problem.workload.logprob_pass else 0.0

    @line("s", "one pass", written=nonzero)
    @part
    def reference_s(self) -> float:
        return self.pass_s if self.problem.workload.reference else 0.0

    @line("s", "train x teacher's forward / training x factor", written=nonzero)
    @part
    def teacher_s(self) -> float:
        if self.problem.teacher is None:
            return 0.0
        return rl_step.pass_seconds(self.train_s / self.problem.workload.epochs, self.time.total_s,
                                    self.teacher_forward.total_s, self.problem.coefficients.rl)

    @property
    def passes_s(self) -> float:
        """Seconds of all passes without gradients in a GRPO step."""
        return self.logprob_s + self.reference_s + self.teacher_s

    @property
    def seconds(self) -> float:
        """Seconds of training in a GRPO step: all optimizer steps and log-prob passes."""
        return self.train_s + self.passes_s

    @property
    def reference(self) -> Reference:
        workload = self.problem.workload
        return "none" if not workload.reference else "offloaded" if workload.reference_offload else "device"

    @property
    def teacher_kept(self) -> Reference:
        problem = self.problem
        return "none" if problem.teacher is None else "offloaded" if problem.workload.teacher_offload else "device"

    @property
    def teacher_layers(self) -> tuple[int, ...]:
        teacher, layout = self.problem.teacher, self.layout
        if teacher is None:
            return ()
        return tuple(sum(map(len, stage)) for stage in layers_of_stage(teacher.layers, layout.pp, layout.vpp))

    @property
    def stage_layers(self) -> tuple[int, ...]:
        return stage_layers(self.problem.shape, self.layout)

    @property
    def sync_bytes(self) -> int:
        """Staging buffers of the weight sync on a rank."""
        return SENDING * self.problem.bucket_bytes if self.staging is None else self.staging

    @property
    def worst(self) -> StageMemory:
        return self.memory.stages[self.memory.worst_stage]


@dataclass(eq=False)
class RolloutOption:
    """Engines of one layout (including replicas) on `units` units, with their costs."""

    PREFIX = "rollout"

    problem: Problem
    layout: RolloutLayout
    units: int
    staging: int | None = None
    """As in `TrainingOption`."""

    memory = made(RolloutMemory, shape="problem.shape", layout="layout", gpu="problem.cluster.gpu",
                  coefficients="problem.coefficients.memory", max_tokens="problem.workload.longest",
                  sync_bytes="sync_bytes", sync_room="sync_room", second_copy="problem.shadow",
                  layer_buffers="layer_buffers")
    demand = made(Demand, prompts="problem.workload.generated_prompts", group="problem.workload.group",
                  prompt_tokens="problem.workload.prompt_tokens", lengths="problem.workload.lengths",
                  replicas="layout.replicas", max_num_seqs="layout.max_num_seqs", kv_tokens="kv_tokens")

    @part
    def engine(self) -> Engine:
        problem = self.problem
        return Engine(problem.shape, self.layout, problem.cluster, problem.coefficients.rollout)

    @part
    def time(self) -> RolloutTime:
        kind = AsynchronousRollout if self.problem.in_flight else SynchronousRollout
        return kind(self.engine, self.demand)

    @line("tokens", "at least one sequence of the longest",
          written=lambda self, value: self.problem.kv_tokens is None and value > self.memory.kv_tokens)
    @part
    def kv_tokens(self) -> int:
        """Tokens in the KV cache of one engine."""
        if self.problem.kv_tokens is not None:
            return self.problem.kv_tokens
        return max(self.memory.kv_tokens, self.problem.workload.longest)

    @line("s", "running responses x (prompt/G + E[l^2]/2E[l]) tokens x prefill of a token at the active context",
          written=nonzero)
    @part
    def prefill_again_s(self) -> float:
        """Seconds in which an engine prefills its running responses again after a sync, which dropped their KV cache
        (`rollout.keep_kv`)."""
        if not self.problem.asynchronous or self.problem.border or self.problem.running_kv != "dropped":
            return 0.0
        context = self.demand.lengths.active_context(self.demand.prompt_tokens)
        running = self.time.in_flight / self.layout.replicas
        return running * self.demand.cache_tokens * self.engine.prefill_s(context) / context

    @part
    def engine_s(self) -> float:
        """Seconds of a GRPO step in which the engines work."""
        return self.time.total_s + self.prefill_again_s

    @line("s", lambda self: f"{'(generation + prefill again)' if self.prefill_again_s else 'generation'} / eta_rollout "
                            "+ responses x t_response", key="phase.rollout_s")
    @part
    def seconds(self) -> float:
        """Seconds of the rollout of a GRPO step. Synchronous: until the longest completion ends. Asynchronous: the
        number of completions divided by their rate, and what the engines prefill again after the sync."""
        return rl_step.rollout_seconds(self.engine_s, self.demand.responses, self.problem.coefficients.rl)

    @part
    def longest_s(self) -> float:
        """Seconds of the longest completion and of the syncs that it may see, which a bound on the staleness limits; 0
        without a bound."""
        bound = self.problem.max_staleness
        if bound is None or not self.problem.in_flight:
            return 0.0
        return self.time.latency_max_s + bound * self.prefill_again_s

    @part
    def completions(self) -> tuple[float, ...]:
        """See `RolloutTime.completions`; empty if the trainer does not start before the rollout ends."""
        return self.time.completions if self.problem.overlap else ()

    @property
    def sync_bytes(self) -> int:
        """Staging buffers of the weight sync on a rank."""
        return self.sync_room if self.staging is None else self.staging

    @property
    def sync_room(self) -> int:
        """Memory that is kept free for them, because the search chooses engines before a route."""
        return STAGED_BUCKETS * self.problem.bucket_bytes

    @property
    def layer_buffers(self) -> int:
        """Buffers through which the weight sync brings a quantised engine's layers; 0 if it is not quantised. Engines
        of one node divide what comes from a training stage, so as many streams arrive at a time, with a layer each,
        and one between two of them. Trees and the borders of stages need up to four more."""
        if self.layout.weight_precision != "fp8" or self.problem.lora_rank:
            return 0
        return 2 * max(1, self.problem.cluster.gpus_per_node // (self.layout.tp * self.layout.pp)) + 4

    @line("s", "pause + barriers/3 + weights/copy rate + weights/digest rate", key="sync.swap_s")
    @part
    def swap_s(self) -> float:
        """Seconds for which the engines stop at a sync into a second copy of the weights."""
        return swap_seconds(self.memory.weights, self.problem.coefficients.sync)


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
                    async_save="problem.async_save")

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


def shares(problem: Problem) -> tuple[float, ...]:
    """Shares of a GPU's memory for an engine beside a trainer: the configured one, then less in steps of 0.05."""
    most = problem.pins.memory_utilization
    return (most, *(step / 20 for step in range(19, 0, -1) if step / 20 < most))


def share_left(problem: Problem, mode: Mode, memory: TrainingMemory) -> float:
    """The largest of `shares` that fits beside a sleeping trainer; 0 if none fits. The trainer's context stays in
    memory, and in mode hybrid its resident state too."""
    resident = max(stage.resident for stage in memory.stages) if mode == "hybrid" else 0
    left = memory.limit - memory.context - resident
    usable = problem.cluster.gpu.usable_bytes
    return next((share for share in shares(problem) if int(share * usable) <= left), 0.0)


def step_seconds(problem: Problem, rollout_s: float, training_s: float, sync_s: float, longest_s: float,
                 swap_s: float, completions: Sequence[float]) -> float:
    """Seconds of a whole step; see `rl_step.combined_seconds`. For `longest_s`, `swap_s` and `completions` see
    `RolloutOption`."""
    return rl_step.combined_seconds(problem.asynchronous, rollout_s, training_s, sync_s,
                                    problem.coefficients.rl.other_share, longest_s, problem.max_staleness or 0,
                                    swap_s if problem.swaps else None, completions)


def max_num_seqs_to_try(problem: Problem, replicas: int) -> tuple[int, ...]:
    """Values of `max_num_seqs` to try: the pinned one, or powers of two up to the tokens of an iteration. Engines that
    drain need no more than their share of a step; the others run completions of several steps at once."""
    if problem.pins.max_num_seqs:
        return (problem.pins.max_num_seqs,)
    tokens = problem.pins.max_num_batched_tokens or MOST_SEQUENCES
    asked = MOST_SEQUENCES if problem.in_flight else -(-problem.workload.sequences // replicas)
    return tuple(limit for limit in (FEWEST_SEQUENCES << power for power in range(7))
                 if limit == FEWEST_SEQUENCES or limit < 2 * asked and limit <= tokens)


def in_ticks(problem: Problem, seconds: float) -> float:
    """`seconds` rounded up to `SYNC_TICK_S`; unchanged on a cluster of one node."""
    if len(problem.cluster.nodes) == 1:
        return seconds
    return math.ceil(seconds / SYNC_TICK_S - 1e-9) * SYNC_TICK_S


def sync_arguments(problem: Problem, training: TrainingLayout, rollout: RolloutLayout) -> dict[str, Any]:
    """The arguments of `launch.fabric` for a sync, besides the layouts."""
    return {"weight_bytes": wide_bytes(training.precision), "lora_rank": problem.lora_rank,
            "rollout_precision": rollout.weight_precision, "bucket_bytes": problem.bucket_bytes}
