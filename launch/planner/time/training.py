"""Time of one optimizer step of the trainer, and of a forward pass that only computes log-probs.

    slot      layers of a stage x (forward + backward + recomputed), + head on the last: one micro-batch on one rank
    pipeline  m x slowest slot + (sum of slots - slowest) / v      (1F1B, interleaved for v > 1; Narayanan et al.
              2021, arXiv 2104.04473: (p - 1)/(v m) of the compute where all slots are equal)
    step      pipeline + exposed sends between stages + exposed gradient and parameter collectives + optimizer

Communication that runs behind compute costs `overlap_cost` of its time, since it takes SMs and HBM bandwidth; what
does not fit behind it shows in full. `layer_time` has the arithmetic of a layer, `collectives` that of the network.

The result is the rate of pre-training, all micro-batches full. What RL training keeps of it (eta) and the ratio of
the log-prob pass beyond its arithmetic (rho) belong to the RL model.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.cluster.spec import ClusterSpec
from launch.coefficients.collectives import CollectiveCoefficients
from launch.coefficients.training import TrainingCoefficients
from launch.model.shape import ModelShape
from launch.plan.book import NO_BOOK, Book
from launch.plan.layouts import TrainingLayout, TrainingWork, stage_layers
from launch.planner.parameters import padded_vocab, stage_parameters
from launch.planner.time import training_book
from launch.planner.time.collectives import Fabric, group
from launch.planner.time.layer import LayerCost, PassCost, Rates, head_cost, layer_cost

BUCKET_ELEMENTS = 40e6
"""Megatron's smallest gradient bucket."""
BUCKET_ELEMENTS_PER_RANK = 1e6
"""By which it grows with the data-parallel size."""
OPTIMIZER_BYTES = 30
"""Adam over fp32 state, a parameter: reads master, two moments and gradient, writes three and the bf16 parameter."""
DEFAULT_COLLECTIVES = CollectiveCoefficients()


@dataclass(frozen=True, slots=True)
class TrainingTime:
    """One optimizer step, or one forward pass, in seconds. The parts add up to `total_s`; those of the compute are
    the slowest stage's, all micro-batches together."""

    total_s: float
    matmul_s: float
    attention_s: float
    elementwise_s: float
    gaps_s: float
    """Between kernels."""
    tp_s: float
    """Exposed part of the tensor-parallel collectives."""
    cp_s: float
    """Exposed part of the ring that carries keys and values."""
    ep_s: float
    """Tokens to their experts and back."""
    pp_bubble_s: float
    """The pipeline fills and drains."""
    pp_p2p_s: float
    """Exposed sends between stages."""
    dp_s: float
    """Exposed gradient and parameter collectives, FSDP's gathers included."""
    optimizer_s: float
    """With the fixed part of a step."""
    slowest_stage: int
    layer_s: float
    """One layer, one micro-batch, all passes."""
    head_s: float
    """Head and loss, one micro-batch, all passes."""

    @property
    def compute_s(self) -> float:
        """Kernels and the gaps between them."""
        return self.matmul_s + self.attention_s + self.elementwise_s + self.gaps_s


def training_time(shape: ModelShape, layout: TrainingLayout, work: TrainingWork, cluster: ClusterSpec,
                  coefficients: TrainingCoefficients, *, collectives: CollectiveCoefficients = DEFAULT_COLLECTIVES,
                  lora_rank: int = 0, book: Book = NO_BOOK) -> TrainingTime:
    """One optimizer step.

    Args:
        work: `micro_batches` of `micro_batch_tokens` (padding included) on each DP rank.
        lora_rank: > 0: frozen weights, no weight gradients, adapters of this rank.
        book: takes the numbers as `training.*`.
    """
    return _Step(shape, layout, work, cluster, coefficients, collectives, lora_rank).train(book)


def logprob_time(shape: ModelShape, layout: TrainingLayout, work: TrainingWork, cluster: ClusterSpec,
                 coefficients: TrainingCoefficients, *, collectives: CollectiveCoefficients = DEFAULT_COLLECTIVES,
                 book: Book = NO_BOOK) -> TrainingTime:
    """One forward pass over the same micro-batches, for old or reference log-probs: a third of the FLOPs, but all
    of the gaps, fixed costs and fill of a pass. The book takes the numbers as `logprob.*`."""
    return _Step(shape, layout, work, cluster, coefficients, collectives, 0).logprob(book)


class _Step:
    """The arithmetic of a step, one method a part."""

    def __init__(self, shape: ModelShape, layout: TrainingLayout, work: TrainingWork, cluster: ClusterSpec,
                 coefficients: TrainingCoefficients, collectives: CollectiveCoefficients, lora_rank: int) -> None:
        self.shape, self.layout, self.work, self.cluster = shape, layout, work, cluster
        self.c, self.lora_rank = coefficients, lora_rank
        self.fabric = Fabric(cluster, collectives)
        self.rates = Rates(cluster.gpu, layout, coefficients)
        self.tokens = work.micro_batch_tokens / layout.cp
        self.layers = stage_layers(shape, layout)
        self.layer: LayerCost = layer_cost(shape, layout, self.tokens, work.attention_length, self.rates, self.fabric,
                                           cluster.gpus_per_node, coefficients, lora_rank)
        self.head: tuple[PassCost, PassCost] = head_cost(shape, layout, padded_vocab(shape, layout.tp), self.tokens,
                                                         self.rates, trained=not lora_rank)

    def train(self, book: Book) -> TrainingTime:
        layer = self.layer.forward.plus(self.layer.backward).plus(self.layer.recompute)
        return self._step(layer, self.head[0].plus(self.head[1]), True, book)

    def logprob(self, book: Book) -> TrainingTime:
        return self._step(self.layer.forward, self.head[0], False, book)

    def _step(self, layer: PassCost, head: PassCost, trains: bool, book: Book) -> TrainingTime:
        m, layer_s, head_s = self.work.micro_batches, layer.total_s, head.total_s
        slots = [layer_s * number for number in self.layers]
        slots[-1] += head_s
        slot_s = max(slots)
        slowest = slots.index(slot_s)
        slot = layer.scaled(self.layers[slowest])
        if slowest == len(slots) - 1:
            slot = slot.plus(head)
        bubble = (sum(slots) - slot_s) / self.layout.vpp
        p2p = self._sends(2 if trains else 1)
        dp = self._gathers(slot_s, trains) if self.layout.fsdp > 1 else self._data_parallel(slot_s) if trains else 0.0
        optimizer = self._optimizer() if trains else self.c.step_s
        result = TrainingTime(
            total_s=m * slot_s + bubble + p2p + dp + optimizer, matmul_s=m * slot.matmul_s,
            attention_s=m * slot.attention_s, elementwise_s=m * slot.elementwise_s, gaps_s=m * slot.gaps_s,
            tp_s=m * slot.tp_s, cp_s=m * slot.cp_s, ep_s=m * slot.ep_s, pp_bubble_s=bubble, pp_p2p_s=p2p, dp_s=dp,
            optimizer_s=optimizer, slowest_stage=slowest, layer_s=layer_s, head_s=head_s)
        if book.keeps:
            training_book.write(book, "training" if trains else "logprob", self.shape, self.layout, self.work,
                                self.cluster, self.lora_rank, layer, head, result)
        return result

    def _sends(self, passes: int) -> float:
        """1F1B waits for its neighbours in every micro-batch; the interleaved schedule sends while it computes
        another chunk, and waits only while the pipeline fills."""
        pp, v, m = self.layout.pp, self.layout.vpp, self.work.micro_batches
        if pp == 1:
            return 0.0
        gpus = self.layout.tp * self.layout.cp * self.layout.dp * pp
        size = self.tokens * self.shape.hidden * self.rates.element_bytes / self.layout.tp
        each = passes * self.fabric.p2p(size, gpus <= self.cluster.gpus_per_node)
        return each * (m + pp - 1 if v == 1 else self.c.overlap_cost * m * v + pp - 1)

    def _data_parallel(self, slot_s: float) -> float:
        """Gradients reduce-scattered, parameters gathered, over DP x CP (experts over their share of it)."""
        if self.lora_rank:
            return 0.0
        layout = self.layout
        stages = stage_parameters(self.shape, layout)
        n = layout.dp * layout.cp
        exposed = self._buckets(max(stage.dense for stage in stages), n, layout.tp, slot_s)
        if self.shape.experts:
            experts = max(stage.experts for stage in stages)
            exposed += self._buckets(experts, n * layout.tp // layout.ep, layout.ep, slot_s)
        return exposed

    def _buckets(self, parameters: float, n: int, stride: int, slot_s: float) -> float:
        """Exposed time of one reduce-scatter and one all-gather, bucket by bucket.

        The last bucket has nothing to hide behind. The others have the last backward and the first forward pass of
        the rank; the interleaved schedule runs PP micro-batches through a chunk before the next, so its window is
        PP slots.
        """
        if n <= 1:
            return 0.0
        ranks = group(n, stride, self.cluster.gpus_per_node)
        buckets = max(1.0, parameters / max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * n))
        each = parameters / buckets
        turns = min(self.layout.pp, self.work.micro_batches) if self.layout.vpp > 1 else 1
        exposed = 0.0
        reduced = self.fabric.reduce_scatter(each * self.layout.grad_bytes, ranks)
        gathered = self.fabric.all_gather(each * self.rates.element_bytes, ranks)
        for last, window in ((reduced, turns * slot_s * 2 / 3), (gathered, turns * slot_s / 3)):
            hidden = min(last * (buckets - 1), window)
            exposed += last * buckets - hidden + self.c.overlap_cost * hidden
        return exposed

    def _gathers(self, slot_s: float, trains: bool) -> float:
        """FSDP gathers the parameters for each pass of each micro-batch and scatters the gradients, one layer ahead
        of the compute. With a pipeline they stay gathered over the step."""
        layout, c = self.layout, self.c
        size = max(stage.total for stage in stage_parameters(self.shape, layout)) * self.rates.element_bytes
        ranks = group(layout.fsdp, layout.tp * layout.cp, self.cluster.gpus_per_node)
        comm = (2 if trains else 1) * self.fabric.all_gather(size, ranks)
        if trains and not self.lora_rank:
            comm += self.fabric.reduce_scatter(size * layout.grad_bytes / self.rates.element_bytes, ranks)
        times = self.work.micro_batches if layout.pp == 1 else 1
        return times * (max(0.0, comm - slot_s) + c.overlap_cost * min(comm, slot_s))

    def _optimizer(self) -> float:
        if self.lora_rank:
            return self.c.step_s
        layout = self.layout
        n = layout.fsdp if layout.fsdp > 1 else layout.dp * layout.cp if layout.distributed_optimizer else 1
        experts = n if layout.fsdp > 1 or n == 1 else max(1, n * layout.tp // layout.ep)
        own = max(stage.dense / n + stage.experts / experts for stage in stage_parameters(self.shape, layout))
        return OPTIMIZER_BYTES * own / self.rates.stream + self.c.step_s
