"""Time of one optimizer step of the trainer, and of a forward pass that only computes log-probs.

    slot      layers of a stage x (forward + backward + recomputed), + head on the last: one micro-batch on one rank
    pipeline  m x slowest slot + (sum of slots - slowest) / v      (1F1B, interleaved for v > 1; Narayanan et al.
              2021, arXiv 2104.04473: (p - 1)/(v m) of the compute where all slots are equal)
    step      pipeline + exposed sends between stages + exposed gradient and parameter collectives + optimizer

Communication that is hidden behind compute costs `overlap_cost` of its time, since it uses SMs and HBM bandwidth. The
rest counts in full. `layer` has the arithmetic of a layer, `collectives` that of the network.

The result is the rate of pre-training with full micro-batches. The RL model (`step`) adds the share of it that RL
training reaches (eta), and the measured ratio of the log-prob pass (rho).
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.cluster.spec import ClusterSpec
from launch.coefficients.collectives import CollectiveCoefficients
from launch.coefficients.training import TrainingCoefficients
from launch.model.architecture import Architecture
from launch.plan.book import line, part
from launch.plan.layouts import TrainingLayout
from launch.planner.parameters import matrix_parameters, parameters_of
from launch.planner.time.collectives import group
from launch.planner.time.layer import Pass
from launch.planner.workload.work import Work

BUCKET_ELEMENTS = 40e6
"""Megatron's smallest gradient bucket."""
BUCKET_ELEMENTS_PER_RANK = 1e6
"""Growth of the bucket with the data-parallel size."""
OPTIMIZER_BYTES = 30
"""Bytes per parameter of Adam with fp32 state: reads master, two moments and gradient, writes three and the bf16
parameter."""
DEFAULT_COLLECTIVES = CollectiveCoefficients()
_ALL = "micro-batches x (layers x layer's part + head's) of the slowest stage"


@dataclass(eq=False)
class TrainingTime(Pass):
    """One optimizer step, or one forward pass, in seconds. The parts add up to `total_s`. The compute parts are those
    of the slowest stage, all micro-batches together."""

    @line("s", "sum of the parts: one layer, one micro-batch")
    @part
    def layer_s(self) -> float:
        """Seconds of one layer, one micro-batch, all passes."""
        layer = self.layer
        return (layer.matmul_s + layer.attention_s + layer.elementwise_s + layer.tp_s + layer.cp_s + layer.ep_s
                + layer.gaps_s)

    @line("s", "head and loss, one micro-batch")
    @part
    def head_s(self) -> float:
        """Seconds of head and loss, one micro-batch, all passes."""
        return self.head.matmul_s + self.head.elementwise_s

    @part
    def slots(self) -> list[float]:
        """Seconds of one micro-batch on one rank, by stage. The head is on the last stage."""
        slots = [self.layer_s * stage.layers for stage in self.held.stages]
        slots[-1] += self.head_s
        return slots

    @part
    def slot_s(self) -> float:
        """Slot of the slowest stage."""
        return max(self.slots)

    @line("", "stage with the largest layers x layer_s (+ head_s)")
    @part
    def slowest_stage(self) -> int:
        return self.slots.index(self.slot_s)

    @line("s", _ALL)
    def matmul_s(self) -> float:
        return self._all(self.layer.matmul_s) if self.headless else self._all(self.layer.matmul_s, self.head.matmul_s)

    @line("s", _ALL)
    def attention_s(self) -> float:
        return self._all(self.layer.attention_s)

    @line("s", _ALL)
    def elementwise_s(self) -> float:
        parts = (self.layer.elementwise_s,) if self.headless else (self.layer.elementwise_s, self.head.elementwise_s)
        return self._all(*parts)

    @line("s", _ALL)
    def gaps_s(self) -> float:
        """Gaps between kernels."""
        return self._all(self.layer.gaps_s)

    @line("s", _ALL)
    def tp_s(self) -> float:
        """Exposed part of the tensor-parallel collectives."""
        return self._all(self.layer.tp_s)

    @line("s", _ALL)
    def cp_s(self) -> float:
        """Exposed part of the ring that carries keys and values."""
        return self._all(self.layer.cp_s)

    @line("s", _ALL)
    def ep_s(self) -> float:
        """Dispatch of tokens to their experts and back."""
        return self._all(self.layer.ep_s)

    def _all(self, of_layer: float, of_head: float = 0.0) -> float:
        if not of_layer:
            return self.work.micro_batches * of_head
        return self.work.micro_batches * (self.held.stages[self.slowest_stage].layers * of_layer + of_head)

    @property
    def headless(self) -> bool:
        """Whether the slowest stage is not the last."""
        return self.slowest_stage < self.layout.pp - 1

    @line("s", "(sum of slots - slowest) / v (arXiv 2104.04473)")
    def pp_bubble_s(self) -> float:
        """Time in which the pipeline fills and drains."""
        if self.layout.pp == 1:
            return 0.0
        return (sum(self.slots) - self.slot_s) / self.layout.vpp

    @line("s", "T h bytes / TP per send; v = 1: all sends, else overlap_cost x sends + fill; 0 without a pipeline")
    def pp_p2p_s(self) -> float:
        """Exposed sends between stages. 1F1B waits for its neighbours in every micro-batch. The interleaved schedule
        sends while it computes another chunk, and waits only while the pipeline fills."""
        layout = self.layout
        pp, v = layout.pp, layout.vpp
        if pp == 1:
            return 0.0
        m = self.work.micro_batches
        size = self.tokens_per_rank * self.shape.hidden * self.rates.element_bytes / layout.tp
        each = (2 if self.trains else 1) * self.comm.p2p(size, layout.gpus <= self.cluster.gpus_per_node)
        return each * (m + pp - 1 if v == 1 else self.c.overlap_cost * m * v + pp - 1)

    @line("s", "gradients and parameters over DP x CP: exposed part + overlap_cost x hidden part; before a weight sync "
               "nothing hides the parameters; 0 if no weight has a gradient")
    def dp_s(self) -> float:
        """Exposed collectives over DP x CP (for experts, over their share of it): reduce-scatter of gradients,
        all-gather of parameters, and FSDP's gathers."""
        layout = self.layout
        if layout.fsdp > 1:
            return self._gathers()
        if not self.trains or self.lora_rank:
            return 0.0
        n = layout.dp * layout.cp
        exposed = self._buckets(max(stage.dense for stage in self.held.stages), n, layout.tp) if n > 1 else 0.0
        if self.shape.experts and n * layout.tp // layout.ep > 1:
            experts = max(stage.experts for stage in self.held.stages)
            exposed += self._buckets(experts, n * layout.tp // layout.ep, layout.ep)
        return exposed

    @line("s", "30 bytes per parameter of the shard / HBM + step_s; only step_s if no weight is updated")
    def optimizer_s(self) -> float:
        """Optimizer, including the fixed part of a step."""
        if not self.trains or self.lora_rank:
            return self.c.step_s
        layout = self.layout
        n = layout.fsdp if layout.fsdp > 1 else layout.dp * layout.cp if layout.distributed_optimizer else 1
        experts = 0
        if self.shape.experts:
            experts = n if layout.fsdp > 1 or n == 1 else max(1, n * layout.tp // layout.ep)
        own = max(stage.dense / n + (stage.experts / experts if experts else 0.0) for stage in self.held.stages)
        return OPTIMIZER_BYTES * own / self.rates.stream + self.c.step_s

    @line("s", "micro-batches x slot of the slowest stage + bubble + sends + gradients and parameters + optimizer")
    @part
    def total_s(self) -> float:
        return (self.work.micro_batches * self.slot_s + self.pp_bubble_s + self.pp_p2p_s + self.dp_s + self.optimizer_s)

    @line("tokens/s", "real tokens / (total x GPUs)")
    def tokens_per_s_per_gpu(self) -> float:
        return self.work.tokens / (self.total_s * self.layout.gpus)

    @line("", "L (2 h q + 2 h kv + 3 h ffn) + V h; of experts, k", key="parameters.matrices",
          written=lambda self, value: self.trains)
    def matrices(self) -> int:
        return matrix_parameters(self.shape)

    @line("FLOP", "6 M + 6 L A l (training, causal, no recompute)", key="parameters.flops_per_token",
          written=lambda self, value: self.trains)
    def flops_per_token(self) -> float:
        return 6.0 * self.matrices + 6 * (self.shape.layers * self.shape.q_width * self.work.attention_length)

    @line("FLOP/s", "FLOPs per token (causal, nothing recomputed) x real tokens / (total x GPUs)",
          written=lambda self, value: self.trains)
    def model_flops_per_s_per_gpu(self) -> float:
        return self.flops_per_token * self.work.tokens / (self.total_s * self.layout.gpus)

    @property
    def compute_s(self) -> float:
        """Kernels and the gaps between them."""
        return self.matmul_s + self.attention_s + self.elementwise_s + self.gaps_s

    def _buckets(self, parameters: float, n: int, stride: int) -> float:
        """Exposed time of one reduce-scatter and one all-gather over `n` ranks, bucket by bucket.

        Nothing hides the last bucket. The last backward and the first forward pass of the rank hide the others, as far
        as the layout says (`overlap_grad_reduce`, `hidden_gathers`). The interleaved schedule runs PP micro-batches
        through a chunk before the next, so its window is PP slots.
        """
        layout = self.layout
        ranks = group(n, stride, self.cluster.gpus_per_node)
        buckets = max(1.0, parameters / max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * n))
        each = parameters / buckets
        turns = min(layout.pp, self.work.micro_batches) if layout.vpp > 1 else 1
        exposed = 0.0
        reduced = self.comm.reduce_scatter(each * layout.grad_bytes, ranks)
        gathered = self.comm.all_gather(each * self.rates.element_bytes, ranks)
        for last, window, share in ((reduced, turns * self.slot_s * 2 / 3, float(layout.overlap_grad_reduce)),
                                    (gathered, turns * self.slot_s / 3, layout.hidden_gathers)):
            hidden = share * min(last * (buckets - 1), window)
            exposed += last * buckets - hidden + self.c.overlap_cost * hidden
        return exposed

    def _gathers(self) -> float:
        """Exposed collectives of FSDP. It gathers parameters for each pass of each micro-batch and scatters gradients,
        one layer ahead of the compute. With a pipeline, parameters stay gathered during the step."""
        layout = self.layout
        size = max(stage.total for stage in self.held.stages) * self.rates.element_bytes
        ranks = group(layout.fsdp, layout.tp * layout.cp, self.cluster.gpus_per_node)
        comm = (2 if self.trains else 1) * self.comm.all_gather(size, ranks)
        if self.trains and not self.lora_rank:
            comm += self.comm.reduce_scatter(size * layout.grad_bytes / self.rates.element_bytes, ranks)
        times = self.work.micro_batches if layout.pp == 1 else 1
        return times * (max(0.0, comm - self.slot_s) + self.c.overlap_cost * min(comm, self.slot_s))


class LogprobTime(TrainingTime):
    """One forward pass over the same micro-batches, for old or reference log-probs. It takes a third of the FLOPs, but
    all gaps, fixed costs and pipeline fill of a pass."""

    PREFIX = "logprob"
    trains = False


class TeacherTime(LogprobTime):
    """One forward pass of the teacher over the same micro-batches."""

    PREFIX = "teacher.logprob"


def training_time(shape: Architecture, layout: TrainingLayout, work: Work, cluster: ClusterSpec,
                  coefficients: TrainingCoefficients, *, collectives: CollectiveCoefficients = DEFAULT_COLLECTIVES,
                  lora_rank: int = 0) -> TrainingTime:
    """One optimizer step.

    Args:
        work: `micro_batches` of `micro_batch_tokens` (including padding) on each DP rank.
        lora_rank: > 0: adapters of this rank are trained; the weights are frozen and have no gradients.
    """
    return TrainingTime(shape, layout, parameters_of(shape, layout), work, cluster, coefficients, collectives,
                        lora_rank)


def logprob_time(shape: Architecture, layout: TrainingLayout, work: Work, cluster: ClusterSpec,
                 coefficients: TrainingCoefficients, *,
                 collectives: CollectiveCoefficients = DEFAULT_COLLECTIVES) -> LogprobTime:
    """One forward pass over the same micro-batches."""
    return LogprobTime(shape, layout, parameters_of(shape, layout), work, cluster, coefficients, collectives)
