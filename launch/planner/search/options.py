"""Options of the two partitions, with their costs.

A *unit* is what the search divides between the partitions: a node, or a GPU if the cluster has only one node.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.fabric.estimate import SENDING, STAGED_BUCKETS, swap_seconds
from launch.plan.book import line, made, nonzero, part
from launch.plan.layouts import RolloutLayout, TrainingLayout, layers_of_stage, stage_layers
from launch.planner.memory.rollout import RolloutMemory
from launch.planner.memory.training import Reference, StageMemory, TrainingMemory
from launch.planner.parameters import rank_parameters, teacher_parameters
from launch.planner.search.problem import Mode, Problem
from launch.planner.time import step as rl_step
from launch.planner.time.decode import Engine
from launch.planner.time.rollout import AsynchronousRollout, Demand, RolloutTime, SynchronousRollout
from launch.planner.time.training import LogprobTime, TeacherTime, TrainingTime
from launch.planner.workload.work import PackedWork

FEWEST_SEQUENCES, MOST_SEQUENCES = 16, 1024
"""Range of the concurrent sequences of an engine if the search chooses them."""
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


def max_num_seqs_to_try(problem: Problem, replicas: int) -> tuple[int, ...]:
    """Values of `max_num_seqs` to try: the pinned one, or powers of two up to the tokens of an iteration. Engines that
    drain need no more than their share of a step; the others run completions of several steps at once."""
    if problem.pins.max_num_seqs:
        return (problem.pins.max_num_seqs,)
    tokens = problem.pins.max_num_batched_tokens or MOST_SEQUENCES
    asked = MOST_SEQUENCES if problem.in_flight else -(-problem.workload.sequences // replicas)
    return tuple(limit for limit in (FEWEST_SEQUENCES << power for power in range(7))
                 if limit == FEWEST_SEQUENCES or limit < 2 * asked and limit <= tokens)
