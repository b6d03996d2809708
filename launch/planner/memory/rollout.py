"""Memory of a rollout rank: weights, KV cache and what an engine needs beside them; and of a GPU that trainer and
engine share in turns.

The engine takes `memory_utilization` of the GPU; what weights, graphs, workspace and staging leave of it is KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.cluster.spec import Gpu
from launch.coefficients.memory import DEFAULT, MemoryCoefficients
from launch.config.auto import round_up
from launch.model.shape import ModelShape
from launch.plan.book import NO_BOOK, Book
from launch.plan.layouts import RolloutLayout
from launch.planner import parameters
from launch.planner.memory.book import write_colocated, write_rollout
from launch.planner.memory.training import TrainingMemory, Verdict, verdict

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this (and of TP)."""
WEIGHT_BYTES = {"bf16": 2, "fp8": 1, "fp32": 4}
PROFILE_TOKENS = 8192
"""Tokens of one engine iteration (chunked prefill) unless set otherwise."""


@dataclass(frozen=True, slots=True)
class RolloutMemory:
    """Memory of one engine; bytes a GPU."""

    components: dict[str, int]
    """Weights, shadow, received, kv_cache, graphs, workspace, sync, context; they sum to `total`."""
    total: int
    """What the engine takes of the GPU: memory_utilization of it."""
    limit: int
    kv_bytes_per_token: int
    """On one rank."""
    kv_tokens: int
    """Tokens that the cache of one replica holds."""
    verdict: Verdict

    @property
    def fits(self) -> bool:
        return self.verdict != "no"

    @property
    def kv_bytes(self) -> int:
        """Cache on one rank."""
        return self.components.get("kv_cache", 0)


@dataclass(frozen=True, slots=True)
class ColocatedMemory:
    """A GPU whose trainer and engine take turns; bytes."""

    generating: int
    """Trainer's resident state and the engine's share."""
    training: int
    """Trainer's peak and what a sleeping engine keeps."""
    limit: int
    verdict: Verdict

    @property
    def fits(self) -> bool:
        return self.verdict != "no"


def weights_on_rank(shape: ModelShape, layout: RolloutLayout) -> int:
    """Bytes of the engine's weights on its largest rank. Fewer KV heads than TP ranks are replicated; embedding, head
    and norms stay in bf16 where the matrices are FP8. With PP the first and last stage hold embedding and head."""
    tp, each = layout.tp, parameters.layer(shape)
    layers, matrices = -(-shape.layers // layout.pp), _matrices(shape, tp)
    rows = round_up(shape.vocab, VOCAB_MULTIPLE * tp) // tp
    copies = 1 if shape.tied or layout.pp > 1 else 2
    wide = 4 if layout.weight_precision == "fp32" else 2
    return (layers * (matrices * WEIGHT_BYTES[layout.weight_precision] + wide * (each.split // tp + each.replicated))
            + wide * (copies * rows * shape.hidden + shape.hidden))


def received_on_rank(shape: ModelShape, layout: RolloutLayout) -> int:
    """Bytes of what a quantised engine keeps beside its weights for the sync: the layers' matrices in bf16."""
    return -(-shape.layers // layout.pp) * _matrices(shape, layout.tp) * WEIGHT_BYTES["bf16"]


def _matrices(shape: ModelShape, tp: int) -> int:
    """Elements of one layer's matrices on the largest rank."""
    each = parameters.layer(shape)
    kv_matrices = 2 * shape.hidden * kv_heads_on_rank(shape, tp) * shape.head_dim
    return 2 * shape.hidden * shape.q_width // tp + kv_matrices + (each.mlp + each.experts) // tp


def kv_heads_on_rank(shape: ModelShape, tp: int) -> int:
    return max(1, -(-shape.kv_heads // tp))


def kv_bytes_per_token(shape: ModelShape, layout: RolloutLayout) -> int:
    """Of K and V of one token, on one rank."""
    layers = -(-shape.layers // layout.pp)
    return 2 * layers * kv_heads_on_rank(shape, layout.tp) * shape.head_dim * WEIGHT_BYTES[layout.kv_precision]


def rollout_memory(shape: ModelShape, layout: RolloutLayout, gpu: Gpu,
                   coefficients: MemoryCoefficients = DEFAULT, *, max_tokens: int = 0,
                   sync_bytes: int = 0, shadow: bool = False, requantised: bool = False,
                   batched_tokens: int = PROFILE_TOKENS, book: Book = NO_BOOK) -> RolloutMemory:
    """Memory of an engine's rank, and what its cache holds.

    Args:
        max_tokens: longest sequence, prompt and completion; the engine fits if its cache holds one.
        sync_bytes: staging buffers of the weight sync on this rank.
        shadow: the next version is received into a second copy of the weights.
        requantised: the engine is quantised, and receives the layers' matrices in bf16 beside its weights.
        batched_tokens: most tokens of one iteration.
    """
    weights = weights_on_rank(shape, layout)
    components = {
        "weights": weights,
        "shadow": weights if shadow else 0,
        "received": received_on_rank(shape, layout) if requantised else 0,
        "graphs": int(coefficients.graph_bytes) if layout.cuda_graphs and gpu.device == "gpu" else 0,
        "workspace": _workspace(shape, layout, batched_tokens),
        "sync": sync_bytes,
        "context": int(coefficients.engine_context_bytes if gpu.device == "gpu" else coefficients.process_bytes)}
    limit = int(gpu.usable_bytes * layout.memory_utilization)
    left = limit - sum(components.values())
    per_token = kv_bytes_per_token(shape, layout)
    tokens = max(0, left // per_token)
    components["kv_cache"] = max(0, left)
    total = sum(components.values())
    outcome: Verdict = "no" if tokens < max(1, max_tokens) else "fits"
    memory = RolloutMemory({name: value for name, value in components.items() if value}, total, limit, per_token,
                           tokens, outcome)
    if book.keeps:
        write_rollout(book, shape, gpu, memory)
    return memory


def _workspace(shape: ModelShape, layout: RolloutLayout, tokens: int) -> int:
    """Peak of the engine's profiling pass: the residual stream twice and an MLP of `tokens` tokens, and the sampler's
    fp32 logits with one copy for `max_num_seqs` sequences."""
    width = shape.moe_ffn * shape.experts_per_token + shape.shared_ffn if shape.experts else shape.ffn
    stream = tokens * (2 * 2 * shape.hidden + 2 * shape.mlp_matrices * width // layout.tp)
    return stream + 2 * 4 * layout.max_num_seqs * shape.vocab


def colocated_memory(training: TrainingMemory, rollout: RolloutMemory, gpu: Gpu,
                     coefficients: MemoryCoefficients = DEFAULT, *, trainer_offloaded: bool = False,
                     book: Book = NO_BOOK) -> ColocatedMemory:
    """Whether trainer and engine fit on the same GPUs when they take turns.

    While the engine generates, the trainer has emptied its cache and keeps its resident state (only the context, with
    `trainer_offloaded`); while the trainer trains, the engine sleeps: weights and cache are gone, graphs and context
    stay.
    """
    resident = max(stage.resident for stage in training.stages)
    generating = training.stages[0].components["context"] + (0 if trainer_offloaded else resident) + rollout.total
    asleep = rollout.components.get("graphs", 0) + rollout.components.get("context", 0)
    peak = training.total + asleep
    limit = int(gpu.usable_bytes * (1 - coefficients.margin_share))
    memory = ColocatedMemory(generating, peak, limit, verdict(max(generating, peak), limit, coefficients))
    if book.keeps:
        write_colocated(book, memory, gpu, training, rollout, trainer_offloaded)
    return memory
