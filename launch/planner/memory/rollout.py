"""Memory of a rollout rank, and of a GPU that trainer and engine use in turns.

The engine takes `memory_utilization` of the GPU. The KV cache gets what weights, graphs, workspace and staging leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from launch.cluster.spec import Gpu
from launch.coefficients.memory import DEFAULT, MemoryCoefficients
from launch.fabric.estimate import STAGED_BUCKETS
from launch.model.architecture import Architecture
from launch.model.padding import VLLM_VOCAB_MULTIPLE, round_up
from launch.plan.book import line, nonzero, part
from launch.plan.layouts import PRECISION_BYTES, RolloutLayout, wide_bytes
from launch.planner import parameters
from launch.planner.memory.training import TrainingMemory, Verdict, verdict

PROFILE_TOKENS = 8192
"""Default number of tokens per engine iteration (chunked prefill)."""
SCALE_BYTES, BUFFER_ALIGN = 4, 256
"""Bytes of an output channel's scale in an FP8 engine, and of the unit in which its buffers are cut."""
COMPONENTS = ("weights", "shadow", "received", "graphs", "workspace", "sync", "context", "kv_cache")


@dataclass(eq=False)
class RolloutMemory:
    """Memory of one rank of an engine and the capacity of its cache, in bytes per GPU."""

    PREFIX = "memory.rollout"

    shape: Architecture
    layout: RolloutLayout
    gpu: Gpu
    coefficients: MemoryCoefficients = DEFAULT
    max_tokens: int = 0
    """Tokens of the longest sequence, prompt and completion. The engine fits if its cache holds one such sequence."""
    sync_bytes: int = 0
    """Staging buffers of the weight sync on this rank."""
    sync_room: int = 0
    """Memory that the cache leaves to them, if that is more."""
    second_copy: bool = False
    """The engine receives the next version into a second copy of the weights."""
    layer_buffers: int = 0
    """Buffers through which a quantised engine receives its matrices in bf16; 0 if it is not quantised."""
    batched_tokens: int = PROFILE_TOKENS
    """Maximum tokens of one iteration."""

    @line("bytes", "layers x (matrices/TP, KV heads at least 1 a rank) x bytes + padded V h/TP, twice unless tied; "
                   "FP8: 4 more per output channel", written=nonzero)
    @part
    def weights(self) -> int:
        return weights_on_rank(self.shape, self.layout)

    @line("bytes", "second copy of the weights, which receives the next version", written=nonzero)
    def shadow(self) -> int:
        return self.weights if self.second_copy else 0

    @line("bytes", "buffers x the largest matrix that the engine quantises at once / TP x 2", written=nonzero)
    def received(self) -> int:
        return self.layer_buffers * layer_buffer_bytes(self.shape, self.layout)

    @line("bytes", "CUDA graphs", written=nonzero)
    def graphs(self) -> int:
        return int(self.coefficients.graph_bytes) if self.layout.cuda_graphs and self.gpu.device == "gpu" else 0

    @line("bytes", "profiling pass of one iteration, and the sampler's fp32 logits", written=nonzero)
    def workspace(self) -> int:
        """Peak of the engine's profiling pass: two residual streams and an MLP for all its tokens, and two fp32 copies
        of the sampler's logits for `max_num_seqs` sequences."""
        shape, layout = self.shape, self.layout
        width = shape.moe_ffn * shape.experts_per_token + shape.shared_ffn if shape.experts else shape.ffn
        stream = self.batched_tokens * (2 * 2 * shape.hidden + 2 * shape.mlp_matrices * width // layout.tp)
        return stream + 2 * 4 * layout.max_num_seqs * shape.vocab

    @line("bytes", "staging of the weight sync", written=nonzero)
    def sync(self) -> int:
        return self.sync_bytes

    @line("bytes", "CUDA context and NCCL", written=nonzero)
    def context(self) -> int:
        c = self.coefficients
        return int(c.engine_context_bytes if self.gpu.device == "gpu" else c.process_bytes)

    @line("bytes", "memory_utilization x usable bytes")
    @part
    def limit(self) -> int:
        return int(self.gpu.usable_bytes * self.layout.memory_utilization)

    @line("bytes", lambda self: "limit - all other components" + (
        f", with {STAGED_BUCKETS} buckets for the sync" if self.sync_room > self.sync_bytes else ""))
    @part
    def kv_cache(self) -> int:
        """KV cache on one rank."""
        return max(0, self.limit - self.fixed - max(0, self.sync_room - self.sync_bytes))

    @line("bytes", "2 x layers/PP x ceil(n_kv/TP) x d x bytes, on one rank")
    @part
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.shape, self.layout)

    @line("tokens", "cache / bytes per token, of one replica")
    @part
    def kv_tokens(self) -> int:
        """Tokens that the cache of one replica holds."""
        return self.kv_cache // self.kv_bytes_per_token

    @line("bytes", "sum of the components")
    def total(self) -> int:
        """Memory that the engine takes: `memory_utilization` of the GPU."""
        return self.fixed + self.kv_cache

    @part
    def fixed(self) -> int:
        """All memory except the cache."""
        return (self.weights + self.shadow + self.received + self.graphs + self.workspace + self.sync + self.context)

    @property
    def components(self) -> dict[str, int]:
        """The components that are not 0; their sum is `total`."""
        sizes = {name: getattr(self, name) for name in COMPONENTS}
        return {name: size for name, size in sizes.items() if size}

    @property
    def verdict(self) -> Verdict:
        return "fits" if self.fits else "no"

    @property
    def fits(self) -> bool:
        return self.kv_tokens >= max(1, self.max_tokens)


@dataclass(eq=False)
class ColocatedMemory:
    """Memory of a GPU on which trainer and engine take turns, in bytes.

    While the engine generates, the trainer has emptied its allocator cache and keeps its resident state, or only its
    context if it is offloaded. While the trainer trains, the engine sleeps: it keeps graphs and context, but neither
    weights nor cache.
    """

    PREFIX = "memory.colocated"

    trainer: TrainingMemory
    engine: RolloutMemory
    gpu: Gpu
    coefficients: MemoryCoefficients = DEFAULT
    trainer_offloaded: bool = False

    @line("bytes", lambda self: f"trainer's context{'' if self.trainer_offloaded else ' and largest resident state'}"
                                " + engine's total")
    def generating(self) -> int:
        """The trainer's resident state and the engine's memory."""
        resident = 0 if self.trainer_offloaded else max(stage.resident for stage in self.trainer.stages)
        return self.trainer.context + resident + self.engine.total

    @line("bytes", "trainer's total + sleeping engine's graphs and context")
    def training(self) -> int:
        """The trainer's peak and the memory that a sleeping engine keeps."""
        return self.trainer.total + self.engine.graphs + self.engine.context

    @line("bytes", "usable bytes x (1 - margin)")
    @part
    def limit(self) -> int:
        return int(self.gpu.usable_bytes * (1 - self.coefficients.margin_share))

    @property
    def verdict(self) -> Verdict:
        return verdict(max(self.generating, self.training), self.limit, self.coefficients)

    @property
    def fits(self) -> bool:
        return self.verdict != "no"


def weights_on_rank(shape: Architecture, layout: RolloutLayout) -> int:
    """Bytes of the engine's weights on its largest rank. KV heads are replicated if TP exceeds their number. Embedding,
    head and norms stay in bf16 if the matrices are FP8, and every output channel then has a scale. With PP, the first
    and last stage hold embedding and head."""
    tp, each = layout.tp, parameters.layer(shape)
    layers, matrices = -(-shape.layers // layout.pp), _matrices(shape, tp)
    rows = round_up(shape.vocab, VLLM_VOCAB_MULTIPLE * tp) // tp
    copies = 1 if shape.tied or layout.pp > 1 else 2
    wide = wide_bytes(layout.weight_precision)
    scales = sum(matrix.channels for matrix in matrices) if layout.weight_precision == "fp8" else 0
    return (layers * (sum(matrix.elements for matrix in matrices) * PRECISION_BYTES[layout.weight_precision]
                      + SCALE_BYTES * scales + wide * (each.split // tp + each.replicated))
            + wide * (copies * rows * shape.hidden + shape.hidden))


def layer_buffer_bytes(shape: Architecture, layout: RolloutLayout) -> int:
    """Bytes of a buffer that holds any matrix of a quantised engine's rank in bf16."""
    largest = max(matrix.elements for matrix in _matrices(shape, layout.tp))
    return round_up(largest * PRECISION_BYTES["bf16"], BUFFER_ALIGN)


class _Matrix(NamedTuple):
    """What the engine multiplies with, and quantises, as one."""

    elements: int
    channels: int
    """Output channels, of all experts."""


def _matrices(shape: Architecture, tp: int) -> list[_Matrix]:
    """One layer's matrices on the largest rank: q, k and v are one, gate and up are one, and all experts are one."""
    h, q = shape.hidden, shape.q_width // tp
    qkv = q + 2 * kv_heads_on_rank(shape, tp) * shape.head_dim
    found = [_Matrix(h * qkv, qkv), _Matrix(h * q, h)]
    inner = shape.mlp_matrices - 1
    if width := (shape.shared_ffn if shape.experts else shape.ffn) // tp:
        found += [_Matrix(inner * h * width, inner * width), _Matrix(h * width, h)]
    if shape.experts:
        width = shape.moe_ffn // tp
        found.append(_Matrix(shape.experts * (inner + 1) * h * width, shape.experts * (inner * width + h)))
    return found


def kv_heads_on_rank(shape: Architecture, tp: int) -> int:
    return max(1, -(-shape.kv_heads // tp))


def kv_bytes_per_token(shape: Architecture, layout: RolloutLayout) -> int:
    """Bytes of K and V of one token on one rank."""
    layers = -(-shape.layers // layout.pp)
    return 2 * layers * kv_heads_on_rank(shape, layout.tp) * shape.head_dim * PRECISION_BYTES[layout.kv_precision]
