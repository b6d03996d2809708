"""Memory of a training rank by component and pipeline stage, for Megatron's distributed optimizer and for published
FSDP runs.

    weights        2 bytes per parameter (FP8: 1 + 1, since Hopper's matrix products need the transpose too)
    gradients      grad_bytes per parameter
    optimizer      12 bytes per parameter / (DP x CP): fp32 master copy and two Adam moments; experts over their own DP
    activations    chunks in flight x layers of a chunk x bytes per token and layer x tokens/CP (`activations`)
    logits         (tokens/CP)(V/TP) x the copies that the loss makes, + the head's input and its gradient
    workspace      bytes that a layer's backward pass needs beyond those of the logits; the two are never live together
    allocator      bytes that the caching allocator reserves but does not allocate
    context        bytes outside the allocator
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launch.cluster.spec import Gpu
from launch.coefficients.memory import DEFAULT, MemoryCoefficients
from launch.model.architecture import Architecture
from launch.plan.book import line, made, nonzero, part
from launch.plan.layouts import TrainingLayout, wide_bytes
from launch.planner.memory.activations import TrainerEngine, in_flight, layer_activations
from launch.planner.parameters import RankParameters, StageParameters, padded_vocab, parameters_of

Verdict = Literal["fits", "tight", "no"]
Reference = Literal["none", "device", "offloaded"]

WEIGHT_BYTES = {"bf16": 2, "fp8": 2, "fp32": 4}
"""Bytes per parameter of the compute weights. FP8 weights are stored twice, as they are and transposed."""
MASTER_BYTES = {"bf16": 12, "fp8": 12, "fp32": 8}
"""Bytes per parameter of the optimizer state: two fp32 Adam moments, and an fp32 master copy unless weights are
fp32."""
COMPONENTS = ("weights", "gradients", "optimizer", "adapters", "sync", "unsharded", "reference", "teacher",
              "activations", "logits", "workspace", "allocator")
"""Components of a stage, besides the context."""
MANY = 1 << 30
"""Enough micro-batches to fill any pipeline."""
LOGPROB_CHUNKS = {"gpu": 3 * 64 * 2**20, "cpu": 3 * 2 * 2**20}
"""Bytes of the three fp32 buffers of one chunk that `vocab_parallel_logprobs` of this repository's trainer needs."""


@dataclass(eq=False)
class TrainingMemory:
    """Memory of a training layout, in bytes per GPU."""

    PREFIX = "memory.training"

    shape: Architecture
    layout: TrainingLayout
    held: RankParameters
    gpu: Gpu
    coefficients: MemoryCoefficients
    micro_batch_tokens: int
    """Tokens of a micro-batch on all its CP ranks together, including padding."""
    micro_batches: int = MANY
    """Micro-batches of one DP rank per step. If they are fewer than the stages, less is in flight."""
    reference: Reference = "none"
    """Where the frozen reference policy of the KL term is kept while the policy trains."""
    sync_bucket_bytes: int = 0
    """Staging buffers of the weight sync that stay allocated."""
    lora_rank: int = 0
    """> 0: adapters of this rank are trained on all dense matrices; the weights are frozen."""
    teacher: RankParameters | None = None
    """Of the frozen teacher of on-policy distillation; not read if `teacher_kept` is `none`."""
    teacher_kept: Reference = "none"
    """Where the teacher is kept while the policy trains."""
    engine: TrainerEngine = "megatron-rl"
    """Decides the number of copies of the logits, and the sharding (`fsdp`)."""
    dropout: bool = False
    """Dropout masks are kept (GPT style)."""
    expandable_segments: bool = True
    """The allocator runs with PYTORCH_ALLOC_CONF=expandable_segments:True."""

    activations = made(layer_activations, shape="shape", tp="layout.tp", sequence_parallel="layout.sequence_parallel",
                       precision="layout.precision", recompute="layout.recompute", engine="engine", dropout="dropout",
                       etp="layout.etp")
    """Bytes of one layer per token."""

    @line("tokens", "tokens of a micro-batch on a CP rank")
    @part
    def tokens(self) -> int:
        return -(-self.micro_batch_tokens // self.layout.cp)

    @line("bytes", "bytes per token and layer that the backward pass needs: 12 h + 4 kv + 6 ffn in bf16, over TP "
                   "(arXiv 2205.05198 with GQA and SwiGLU)")
    @part
    def layer_bytes(self) -> float:
        return self.activations.kept

    @line("bytes", "tokens x (tensors that one layer's backward recomputes + gradient of its widest tensor + inputs "
                   "gathered over TP)")
    @part
    def layer_working(self) -> int:
        return int(self.activations.working * self.tokens)

    @line("bytes", "tokens x (padded V/TP x bytes of the loss's copies + head's input and gradient)")
    @part
    def head(self) -> int:
        """Bytes of the logits with their copies, of the head's input (gathered over TP) and of its gradient."""
        layout = self.layout
        columns = padded_vocab(self.shape, layout.tp) // layout.tp
        wide = wide_bytes(layout.precision)
        chunks = LOGPROB_CHUNKS[self.gpu.device] if self.engine == "megatron-rl" else 0
        return self.tokens * (columns * logit_bytes(self.engine, layout.precision, layout.tp)
                              + 2 * wide * self.shape.hidden) + chunks

    @part
    def stages(self) -> tuple[StageMemory, ...]:
        kind = FsdpMemory if self.engine == "fsdp" else StageMemory
        return tuple(kind(self, number, held) for number, held in enumerate(self.held.stages))

    @part
    def context(self) -> int:
        c = self.coefficients
        return int(c.process_bytes if self.gpu.device == "cpu" else c.context_bytes)

    @line("", "stage with the largest total")
    @part
    def worst_stage(self) -> int:
        return max(range(self.layout.pp), key=lambda number: self.stages[number].total)

    @line("bytes", "of the worst stage")
    @part
    def total(self) -> int:
        return self.stages[self.worst_stage].total

    @line("bytes", "usable bytes x (1 - margin)")
    @part
    def limit(self) -> int:
        """Usable bytes of the GPU minus the margin."""
        return int(self.gpu.usable_bytes * (1 - self.coefficients.margin_share))

    @property
    def verdict(self) -> Verdict:
        return verdict(self.total, self.limit, self.coefficients)

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


@dataclass(eq=False)
class StageMemory:
    """Memory of a rank of one pipeline stage, in bytes."""

    of: TrainingMemory
    stage: int
    held: StageParameters

    @property
    def PREFIX(self) -> str:
        return f"memory.training.stage{self.stage}"

    @line("chunks", "1F1B: min(m, PP - i); interleaved: min(m v, 2 (PP - i - 1) + (v - 1) PP + 1) (arXiv 2104.04473)")
    def chunks(self) -> int:
        layout = self.of.layout
        return in_flight(self.stage, layout.pp, layout.vpp, self.of.micro_batches)

    @line("bytes", "2 bytes per parameter (fp32: 4; FP8: twice 1)", written=nonzero)
    def weights(self) -> int:
        return WEIGHT_BYTES[self.of.layout.precision] * self.held.total

    @line("bytes", "grad_bytes per parameter", written=nonzero)
    def gradients(self) -> int:
        return 0 if self.of.lora_rank else self.of.layout.grad_bytes * self.held.total

    @line("bytes", "12 bytes per parameter (fp32: 8) / (DP x CP)", written=nonzero)
    def optimizer(self) -> int:
        if self.of.lora_rank:
            return 0
        layout, held = self.of.layout, self.held
        own = held.dense / optimizer_shards(layout) + (held.experts / expert_shards(layout) if held.experts else 0)
        return int(MASTER_BYTES[layout.precision] * own)

    @line("bytes", "layers x r (in + out) x (2 + gradients + 12 / (DP x CP))", written=nonzero)
    def adapters(self) -> int:
        layout = self.of.layout
        if not self.of.lora_rank:
            return 0
        trained = self.held.layers * lora_parameters(self.of.shape, self.of.lora_rank, layout.tp)
        wide = wide_bytes(layout.precision)
        return int(trained * (wide + layout.grad_bytes + MASTER_BYTES[layout.precision] / optimizer_shards(layout)))

    @line("bytes", "staging of the weight sync", written=nonzero)
    def sync(self) -> int:
        return self.of.sync_bucket_bytes

    unsharded = 0

    @line("bytes", lambda self: "weights again" + ("" if self.of.reference == "device" else
                                                   ", beyond the activations' bytes"), written=nonzero)
    def reference(self) -> int:
        """An offloaded reference is on the device only during its own pass, when no activations are kept."""
        if self.of.reference == "none":
            return 0
        copy = WEIGHT_BYTES[self.of.layout.precision] * self.held.total
        return copy if self.of.reference == "device" else max(0, copy - self.activations)

    @line("bytes", lambda self: "bytes per parameter x the teacher's parameters" + (
        "" if self.of.teacher_kept == "device" else ", beyond the bytes of activations and of an offloaded reference"),
        written=nonzero)
    def teacher(self) -> int:
        """An offloaded teacher is on the device only during its own pass, as an offloaded reference during its."""
        if self.of.teacher_kept == "device":
            return self.teacher_weights
        free = self.activations + (self.reference if self.of.reference == "offloaded" else 0)
        return max(0, self.teacher_weights - free)

    @part
    def teacher_weights(self) -> int:
        if self.of.teacher_kept == "none" or self.of.teacher is None:
            return 0
        return WEIGHT_BYTES[self.of.layout.precision] * self.of.teacher.stages[self.stage].total

    @line("bytes", "chunks x layers / VPP x tokens x bytes per token and layer", written=nonzero)
    def activations(self) -> int:
        of = self.of
        return int(self.chunks * self.held.layers / of.layout.vpp * of.layer_bytes * of.tokens)

    @line("bytes", "of the head, last stage", written=nonzero)
    def logits(self) -> int:
        return self.of.head if self.last else 0

    @line("bytes", "max(0, layer's working set - logits)", written=nonzero)
    def workspace(self) -> int:
        return max(0, self.of.layer_working - self.logits)

    @line("bytes", "sum of the components")
    @part
    def allocated(self) -> int:
        """Peak, as reported by `torch.cuda.max_memory_allocated`."""
        return (self.weights + self.gradients + self.optimizer + self.adapters + self.sync + self.unsharded
                + self.reference + self.teacher + self.activations + self.logits + self.workspace)

    @line("bytes", lambda self: "share x allocated" + (" + fragmentation x activations" if self.fragments else ""))
    def allocator(self) -> int:
        """Bytes that the caching allocator reserves but does not allocate."""
        c = self.of.coefficients
        if self.of.expandable_segments:
            return int(c.expandable_share * self.allocated)
        return int(c.slack_share * self.allocated + (c.fragmentation_share * self.activations if self.fragments else 0))

    @line("bytes", "allocated + allocator + context")
    @part
    def total(self) -> int:
        """Bytes that the GPU must have."""
        return self.allocated + self.allocator + self.of.context

    @property
    def last(self) -> bool:
        return self.stage == self.of.layout.pp - 1

    @property
    def fragments(self) -> bool:
        """Whether activations leave gaps: in a pipeline, if segments cannot grow."""
        return not self.of.expandable_segments and self.of.layout.pp > 1

    @property
    def reserved(self) -> int:
        """Peak, as reported by `torch.cuda.max_memory_reserved`."""
        return self.allocated + self.allocator

    @part
    def resident(self) -> int:
        """Bytes that stay allocated between steps."""
        return (self.weights + self.gradients + self.optimizer + self.adapters + self.sync
                + (self.reference if self.of.reference == "device" else 0)
                + (self.teacher if self.of.teacher_kept == "device" else 0))

    @part
    def pinned(self) -> int:
        """Bytes of frozen weights in host memory."""
        return ((self.weights if self.of.reference == "offloaded" else 0)
                + (self.teacher_weights if self.of.teacher_kept == "offloaded" else 0))

    @property
    def components(self) -> dict[str, int]:
        """The components that are not 0; their sum is `total`."""
        sizes = {name: getattr(self, name) for name in COMPONENTS} | {"context": self.of.context}
        return {name: size for name, size in sizes.items() if size}

    @property
    def verdict(self) -> Verdict:
        return verdict(self.total, self.of.limit, self.of.coefficients)


class FsdpMemory(StageMemory):
    """Memory of a rank of a published FSDP run. These runs are compared with measurements and never planned."""

    @part
    def weights(self) -> int:
        """FSDP2 keeps fp32 shards of parameters, gradients and moments, and bf16 shards of frozen weights."""
        return int((2 if self.of.lora_rank else 4) * self.shard)

    @part
    def gradients(self) -> int:
        return 0 if self.of.lora_rank else int(4 * self.shard)

    @part
    def optimizer(self) -> int:
        return 0 if self.of.lora_rank else int(8 * self.shard)

    @part
    def adapters(self) -> int:
        layout, rank = self.of.layout, self.of.lora_rank
        return int(16 * (self.held.layers * lora_parameters(self.of.shape, rank,
                                                            layout.tp) / layout.fsdp)) if rank else 0

    @part
    def unsharded(self) -> int:
        """Gathered bf16 weights that are live at once, with their gradients: the root group (embedding and head) and
        two layers."""
        held = self.held
        ends = held.embedding + held.head
        return int((2 if self.of.lora_rank else 4) * (ends + 2 * (held.total - ends) / held.layers))

    @property
    def shard(self) -> float:
        return self.held.total / self.of.layout.fsdp


def training_memory(shape: Architecture, layout: TrainingLayout, micro_batch_tokens: int, gpu: Gpu,
                    coefficients: MemoryCoefficients = DEFAULT, *, micro_batches: int = MANY,
                    engine: TrainerEngine = "megatron-rl", reference: Reference = "none",
                    sync_bucket_bytes: int = 0, lora_rank: int = 0, teacher: RankParameters | None = None,
                    teacher_kept: Reference = "none", dropout: bool = False,
                    expandable_segments: bool = True) -> TrainingMemory:
    """Memory of every pipeline stage; see `TrainingMemory`."""
    return TrainingMemory(shape, layout, parameters_of(shape, layout), gpu, coefficients, micro_batch_tokens,
                          micro_batches, reference, sync_bucket_bytes, lora_rank, teacher, teacher_kept, engine,
                          dropout, expandable_segments)


def verdict(total: int, limit: int, coefficients: MemoryCoefficients) -> Verdict:
    """`no` above the limit, `tight` just below it, otherwise `fits`."""
    if total > limit:
        return "no"
    return "tight" if total > coefficients.tight_share * limit else "fits"


def optimizer_shards(layout: TrainingLayout) -> int:
    """Number of ranks that share the optimizer state of dense parameters."""
    return layout.dp * layout.cp if layout.distributed_optimizer else 1


def expert_shards(layout: TrainingLayout) -> float:
    """Number of ranks that share the optimizer state of experts. An expert has TP x DP x CP / (EP x ETP) copies."""
    if not layout.distributed_optimizer:
        return 1
    return max(1, layout.tp * layout.dp * layout.cp / (layout.ep * layout.etp))


def lora_parameters(shape: Architecture, rank: int, tp: int) -> int:
    """Adapter parameters of one layer on one TP rank: A [rank, in] and B [out, rank] on q, k, v, o and the MLP's
    matrices (Hu et al., arXiv 2106.09685). The side of the model's width is on every TP rank, the other side is split.
    Routed experts have none."""
    h, q, kv = shape.hidden, shape.q_width, shape.kv_width
    width = shape.shared_ffn if shape.experts else shape.ffn
    matrices = 4 + (shape.mlp_matrices if width else 0)
    return rank * (matrices * h + (2 * q + 2 * kv + shape.mlp_matrices * width) // tp)


def logit_bytes(engine: TrainerEngine, precision: str, tp: int) -> int:
    """Bytes per logit at the peak of the loss.

    megatron-rl keeps only the logits, which their gradient overwrites. megatron keeps the logits and an fp32 copy,
    which is exponentiated in place (vocab-parallel cross entropy). fsdp keeps the fp32 output of log-softmax and two
    gradients, and the exponential too if TP splits the vocabulary (torch.distributed.tensor.parallel.loss).
    """
    if engine == "fsdp":
        return 16 if tp > 1 else 12
    wide = wide_bytes(precision)
    return wide if engine == "megatron-rl" else wide + 4
