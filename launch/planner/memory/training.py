"""Memory of a training rank, by component and pipeline stage: Megatron's distributed optimizer, published FSDP runs.

    weights        2 bytes a parameter (FP8: 1 + 1, the transpose that Hopper's matrix products need)
    gradients      grad_bytes a parameter
    optimizer      12 bytes a parameter / (DP x CP): fp32 master copy and two Adam moments; experts over their own DP
    activations    chunks in flight x layers of a chunk x bytes a token and layer x tokens/CP (`activations`)
    logits         (tokens/CP)(V/TP) x the copies that the loss makes, + the head's input and its gradient
    workspace      what a layer's backward needs beyond the bytes of the logits: the two are never alive together
    allocator      reserved by the caching allocator, but not allocated
    context        outside the allocator
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launch.cluster.spec import Gpu
from launch.coefficients.memory import DEFAULT, MemoryCoefficients
from launch.model.shape import ModelShape
from launch.plan.book import NO_BOOK, Book
from launch.plan.layouts import TrainingLayout
from launch.planner import parameters
from launch.planner.memory.activations import TrainerEngine, in_flight, of_layout
from launch.planner.memory.book import TrainingNotes

Verdict = Literal["fits", "tight", "no"]
Reference = Literal["none", "device", "offloaded"]

WEIGHT_BYTES = {"bf16": 2, "fp8": 2, "fp32": 4}
"""Of the copy that computes. FP8 weights lie there twice, as they are and transposed."""
MASTER_BYTES = {"bf16": 12, "fp8": 12, "fp32": 8}
"""Optimizer state: two fp32 Adam moments, and an fp32 master copy where the weights are not fp32 themselves."""
RESIDENT = ("weights", "gradients", "optimizer", "adapters", "sync", "reference")
"""Components that stay allocated from step to step (an offloaded reference does not)."""
MANY = 1 << 30
"""Micro-batches enough to fill any pipeline."""
LOGPROB_CHUNKS = {"gpu": 3 * 64 * 2**20, "cpu": 3 * 2 * 2**20}
"""Three fp32 buffers of one chunk: what `vocab_parallel_logprobs` of this repository's trainer needs."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """A rank of one pipeline stage; bytes."""

    stage: int
    components: dict[str, int]
    """Those that are not 0; they sum to `total`."""
    allocated: int
    """Peak that `torch.cuda.max_memory_allocated` reports."""
    reserved: int
    """Peak that `torch.cuda.max_memory_reserved` reports."""
    total: int
    """What the GPU must have."""
    resident: int
    """Allocated between steps."""


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Memory of a training layout; bytes a GPU."""

    stages: tuple[StageMemory, ...]
    worst: int
    """Stage with the largest total."""
    limit: int
    """Usable bytes of the GPU less the margin."""
    verdict: Verdict

    @property
    def fits(self) -> bool:
        return self.verdict != "no"

    @property
    def total(self) -> int:
        """Of the worst stage."""
        return self.stages[self.worst].total


def training_memory(shape: ModelShape, layout: TrainingLayout, micro_batch_tokens: int, gpu: Gpu,
                    coefficients: MemoryCoefficients = DEFAULT, *, micro_batches: int = MANY,
                    engine: TrainerEngine = "megatron-rl", reference: Reference = "none",
                    sync_bucket_bytes: int = 0, lora_rank: int = 0, dropout: bool = False,
                    expandable_segments: bool = True, tokens_key: str = "work.micro_batch_tokens",
                    book: Book = NO_BOOK) -> TrainingMemory:
    """Memory of every pipeline stage.

    Args:
        micro_batch_tokens: tokens of a micro-batch over its CP ranks together, padding included.
        micro_batches: of one DP rank in a step; fewer than the pipeline is deep leave less in flight.
        engine: what kind of program trains: decides the copies of the logits, and the sharding (`fsdp`).
        reference: where the frozen reference policy of the KL term lies while the policy trains.
        sync_bucket_bytes: staging buffers of the weight sync that stay allocated.
        lora_rank: > 0 trains adapters of this rank on all dense matrices; the weights are frozen.
        dropout: masks are kept (GPT style).
        expandable_segments: the allocator runs with PYTORCH_ALLOC_CONF=expandable_segments:True.
        tokens_key: where the book has `micro_batch_tokens`.
    """
    held = parameters.stage_parameters(shape, layout, book=book)
    layers = parameters.stage_layers(shape, layout)
    tokens = -(-micro_batch_tokens // layout.cp)
    each = of_layout(shape, layout, engine, dropout)
    last = len(held) - 1
    head = _logits(shape, layout, engine, tokens, gpu.device)
    working = int(each.working * tokens)
    context = int(coefficients.process_bytes if gpu.device == "cpu" else coefficients.context_bytes)
    slack_share = coefficients.expandable_share if expandable_segments else coefficients.slack_share
    lost_share = coefficients.fragmentation_share if last > 0 and not expandable_segments else 0.0
    notes = None
    if book.keeps and engine != "fsdp":
        notes = TrainingNotes(book, shape, layout, gpu, reference, expandable_segments, last, tokens_key)
    if notes:
        notes.common(tokens, each, head, working)
    stages = []
    for number, parts in enumerate(held):
        components = _state(shape, layout, engine, parts, layers[number], lora_rank)
        components["sync"] = sync_bucket_bytes
        resident = sum(components.values())
        if engine == "fsdp":
            # Of the gathered bf16 weights the root group (embedding and head) and two layers are alive at a time,
            # with their gradients.
            gathered = parts.embedding + parts.head + 2 * (parts.layers + parts.experts) / layers[number]
            components["unsharded"] = int((2 if lora_rank else 4) * gathered)
        chunks = in_flight(number, layout.pp, layout.vpp, micro_batches)
        kept = int(chunks * layers[number] / layout.vpp * each.kept * tokens)
        if reference != "none":
            # Offloaded, it is on the device during its own pass only, when no activations are kept.
            copy = WEIGHT_BYTES[layout.precision] * parts.total
            components["reference"] = copy if reference == "device" else max(0, copy - kept)
            resident += copy if reference == "device" else 0
        components["activations"] = kept
        logits = head if number == last else 0
        components["logits"] = logits
        components["workspace"] = max(0, working - logits)
        allocated = sum(components.values())
        slack = int(slack_share * allocated + lost_share * kept)
        components["allocator"] = slack
        components["context"] = context
        stages.append(StageMemory(number, {name: value for name, value in components.items() if value}, allocated,
                                  allocated + slack, allocated + slack + context, resident))
        if notes:
            notes.stage(stages[-1], chunks)
    worst = max(range(len(stages)), key=lambda number: stages[number].total)
    limit = int(gpu.usable_bytes * (1 - coefficients.margin_share))
    if notes:
        notes.whole(worst, stages[worst].total, limit)
    return TrainingMemory(tuple(stages), worst, limit, verdict(stages[worst].total, limit, coefficients))


def verdict(total: int, limit: int, coefficients: MemoryCoefficients) -> Verdict:
    """`no` above the limit, `tight` just below it."""
    if total > limit:
        return "no"
    return "tight" if total > coefficients.tight_share * limit else "fits"


def _state(shape: ModelShape, layout: TrainingLayout, engine: TrainerEngine, held: parameters.StageParameters,
           layers: int, lora_rank: int) -> dict[str, int]:
    """What does not depend on the micro-batch."""
    if engine == "fsdp":
        shard = held.total / layout.fsdp
        if lora_rank:
            trained = layers * lora_parameters(shape, lora_rank, layout.tp) / layout.fsdp
            return {"weights": int(2 * shard), "adapters": int(16 * trained)}
        # FSDP2 keeps fp32 shards of parameters, gradients and moments
        return {"weights": int(4 * shard), "gradients": int(4 * shard), "optimizer": int(8 * shard)}
    shards, expert_shards = optimizer_shards(layout)
    weights = {"weights": WEIGHT_BYTES[layout.precision] * held.total}
    masters = MASTER_BYTES[layout.precision]
    if lora_rank:
        trained = layers * lora_parameters(shape, lora_rank, layout.tp)
        wide = 4 if layout.precision == "fp32" else 2
        return weights | {"adapters": int(trained * (wide + layout.grad_bytes + masters / shards))}
    return weights | {"gradients": layout.grad_bytes * held.total,
                      "optimizer": int(masters * (held.dense / shards + held.experts / expert_shards))}


def optimizer_shards(layout: TrainingLayout) -> tuple[int, float]:
    """Ranks over which the optimizer state of (dense parameters, experts) is split: a part of an expert has
    TP x DP x CP / (EP x ETP) copies."""
    if not layout.distributed_optimizer:
        return 1, 1
    return layout.dp * layout.cp, max(1, layout.tp * layout.dp * layout.cp / (layout.ep * layout.etp))


def lora_parameters(shape: ModelShape, rank: int, tp: int) -> int:
    """Adapter parameters of one layer on one TP rank: A [rank, in] and B [out, rank] on q, k, v, o and the MLP's
    matrices (Hu et al., arXiv 2106.09685). The side that faces the model's width is on every TP rank, the other is
    split. Routed experts have none."""
    h, q, kv = shape.hidden, shape.q_width, shape.kv_width
    width = shape.shared_ffn if shape.experts else shape.ffn
    matrices = 4 + (shape.mlp_matrices if width else 0)
    return rank * (matrices * h + (2 * q + 2 * kv + shape.mlp_matrices * width) // tp)


def logit_bytes(engine: TrainerEngine, precision: str, tp: int) -> int:
    """Bytes per logit at the peak of the loss.

    megatron-rl: the logits alone, overwritten by their gradient. megatron: the logits and an fp32 copy, exponentiated
    in place (vocab-parallel cross entropy). fsdp: log-softmax's fp32 output, the loss's and its own gradient; with
    the vocabulary split over TP the exponential too (torch.distributed.tensor.parallel.loss).
    """
    if engine == "fsdp":
        return 16 if tp > 1 else 12
    wide = 4 if precision == "fp32" else 2
    return wide if engine == "megatron-rl" else wide + 4


def _logits(shape: ModelShape, layout: TrainingLayout, engine: TrainerEngine, tokens: int, device: str) -> int:
    """Logits with their copies, the input of the head (gathered over TP) and its gradient."""
    columns = parameters.padded_vocab(shape, layout.tp) // layout.tp
    wide = 4 if layout.precision == "fp32" else 2
    chunks = LOGPROB_CHUNKS[device] if engine == "megatron-rl" else 0
    return tokens * (columns * logit_bytes(engine, layout.precision, layout.tp) + 2 * wide * shape.hidden) + chunks
