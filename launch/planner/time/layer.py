"""Time of one layer, and of the head, for one micro-batch on one rank: forward and backward.

Matrix products take their FLOPs at the rate of a large product plus the time their operands need on the HBM: with few
tokens a micro-batch or thin TP shards the second part shows, which is why efficiency falls there. Forward 2 T n k;
the gradient of the input as much again; the gradient of the weights as much, and it reads and writes the
accumulated gradient of every weight for every micro-batch. LoRA has no third part.

Attention: forward 2 T l A FLOPs when causal (l is the length that costs as much, A = heads x head_dim), backward
2.5 times that, since fused kernels compute the scores a second time (Dao 2022, arXiv 2205.14135). Its exponentials
run beside the products and weigh as much as 64 elements of head_dim (Shah et al. 2024, arXiv 2407.08608).

Element-wise kernels are bound by the HBM: bytes a token and a layer, over TP with sequence parallelism (Korthikanti
et al. 2022, arXiv 2205.05198). TP: two all-gathers and two reduce-scatters each way, or two all-reduces without
sequence parallelism; the part that no product hides counts. CP: keys and values around a ring behind attention. EP:
tokens to their experts and back.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.cluster.spec import Gpu
from launch.coefficients.training import TrainingCoefficients
from launch.model.shape import ModelShape
from launch.plan.layouts import TrainingLayout
from launch.planner.time.collectives import Fabric, group

EXP_WIDTH = 64
"""Elements of head_dim whose products take as long as a score's exponential (FlashAttention-3: half of d = 128)."""
SCORE_BYTES = 13
"""Per stored score and pass: product writes 2, mask and softmax 4, dropout 4 + 1, product reads 2."""
TILE = 128
"""Rows of a tile: what an expert's share of tokens is rounded up to."""
LOGIT_FORWARD_BYTES = 30
"""Per logit: to fp32 2 + 4, maximum 4, subtract 8, exponential 8, sum 4 (Megatron's vocabulary-parallel loss)."""
LOGIT_BACKWARD_BYTES = 16


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one pass of one micro-batch."""

    matmul_s: float = 0.0
    attention_s: float = 0.0
    elementwise_s: float = 0.0
    tp_s: float = 0.0
    """Exposed."""
    cp_s: float = 0.0
    """Exposed."""
    ep_s: float = 0.0
    gaps_s: float = 0.0

    @property
    def total_s(self) -> float:
        return (self.matmul_s + self.attention_s + self.elementwise_s + self.tp_s + self.cp_s + self.ep_s
                + self.gaps_s)

    def plus(self, other: PassCost, times: float = 1.0) -> PassCost:
        return PassCost(self.matmul_s + times * other.matmul_s, self.attention_s + times * other.attention_s,
                        self.elementwise_s + times * other.elementwise_s, self.tp_s + times * other.tp_s,
                        self.cp_s + times * other.cp_s, self.ep_s + times * other.ep_s,
                        self.gaps_s + times * other.gaps_s)

    def scaled(self, factor: float) -> PassCost:
        return PassCost().plus(self, factor)


class Rates:
    """What a GPU gives, in FLOP/s and bytes/s."""

    __slots__ = ("attention", "element_bytes", "fp8", "head", "matmul", "operand_bytes", "operands", "stream")

    def __init__(self, gpu: Gpu, layout: TrainingLayout, c: TrainingCoefficients) -> None:
        engine = c.fsdp_rate if layout.fsdp > 1 else 1.0
        plain = gpu.fp32_flops if layout.precision == "fp32" and gpu.fp32_flops else gpu.bf16_flops
        self.fp8 = layout.precision == "fp8" and gpu.fp8_flops > gpu.bf16_flops
        self.element_bytes = 4 if layout.precision == "fp32" else 2
        self.operand_bytes = 1 if self.fp8 else self.element_bytes
        self.head = plain * gpu.sustained * c.gemm_bf16 * engine
        self.matmul = gpu.fp8_flops * gpu.sustained * c.gemm_fp8 * engine if self.fp8 else self.head
        self.attention = plain * gpu.sustained * c.attention * engine
        self.operands = gpu.hbm_bandwidth / c.gemm_memory
        self.stream = gpu.hbm_bandwidth * c.hbm * engine


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer for one micro-batch on one rank."""

    forward: PassCost
    backward: PassCost
    """Without recomputation."""
    recompute: PassCost
    """Forward work that the backward pass does again."""


def layer_cost(shape: ModelShape, layout: TrainingLayout, tokens: float, attention_length: float, rates: Rates,
               fabric: Fabric, gpus_per_node: int, c: TrainingCoefficients, lora_rank: int = 0) -> LayerCost:
    """Forward, backward and recomputed work of a layer; `tokens` are those of a CP rank."""
    h, tp = shape.hidden, layout.tp
    q, kv = shape.q_width / tp, shape.kv_width / tp
    size = rates.element_bytes

    attention_weights = h * (2 * q + 2 * kv)
    attention_io = tokens * (2 * h + 2 * q + 2 * kv)
    mlp = _mlp(shape, layout, tokens, rates)
    weights, io = attention_weights + mlp.weights, attention_io + mlp.io
    matmul_s = _product(attention_weights, attention_io, 2 * tokens * attention_weights, rates) + mlp.product
    weight_gradient_s = 0.0
    if lora_rank:      # thin products on either side of each matrix: bound by reading its input, adding to its output
        matmul_s += 2 * io * size / rates.stream
    else:
        weight_gradient_s = (2 * (tokens * attention_weights + mlp.rows_weights) / rates.matmul
                             + (io * rates.operand_bytes + 2 * layout.grad_bytes * weights) / rates.operands)

    scores_s, scores_backward_s = _attention(shape, layout, tokens, attention_length, rates)
    forward_bytes, backward_bytes, norm_bytes = _elementwise_bytes(shape, layout, mlp, rates)
    per_byte = tokens / rates.stream
    tp_s = _tensor_parallel(layout, tokens * h * size, fabric, gpus_per_node, c)
    ep_s = _exchange(shape, layout, tokens, fabric, gpus_per_node, size)
    cp_s = cp_backward_s = 0.0
    if layout.cp > 1:
        ring_s = (layout.cp - 1) * fabric.p2p(2 * kv * tokens * size, tp * layout.cp <= gpus_per_node)
        cp_s, cp_backward_s = max(0.0, ring_s - scores_s), max(0.0, 2 * ring_s - scores_backward_s)

    forward = PassCost(matmul_s, scores_s, forward_bytes * per_byte, tp_s, cp_s, ep_s, c.layer_s)
    backward = PassCost(matmul_s + weight_gradient_s, scores_backward_s, backward_bytes * per_byte, tp_s,
                        cp_backward_s, ep_s, c.layer_s)
    again = _recomputed(layout, forward, mlp.product, mlp.forward_bytes * size / 2 * per_byte, norm_bytes * per_byte)
    return LayerCost(forward, backward, again)


def _elementwise_bytes(shape: ModelShape, layout: TrainingLayout, mlp: _Mlp,
                       rates: Rates) -> tuple[float, float, float]:
    """Bytes a token that a layer's element-wise kernels move: forward, backward, and of the forward ones the
    norms'."""
    q, kv = shape.q_width / layout.tp, shape.kv_width / layout.tp
    h = shape.hidden / (layout.tp if layout.sequence_parallel else 1)
    norms, residuals, rotary = 8 * h, 12 * h, 4 * (q + kv)      # read and write; two in, one out; read and write
    forward = norms + residuals + rotary + mlp.forward_bytes
    backward = 24 * h + rotary + mlp.backward_bytes
    if shape.qk_norm:
        forward += 4 * (q + kv)
        backward += 6 * (q + kv)
    wide = rates.element_bytes / 2
    forward, backward, norms = forward * wide, backward * wide, norms * wide
    if layout.cp > 1:      # each step of the ring adds to the fp32 output, and to the gradients on its way back
        forward += 12 * layout.cp * q
        backward += 12 * layout.cp * (q + 2 * kv)
    if rates.fp8:          # casts of the products' inputs: read 2, write the 1-byte copy and its transpose
        forward += 4 * (2 * h + q + mlp.width)
        backward += 4 * (2 * h + q + 2 * kv + (shape.mlp_matrices - 1) * mlp.width)
    return forward, backward, norms


def _tensor_parallel(layout: TrainingLayout, size: float, fabric: Fabric, gpus_per_node: int,
                     c: TrainingCoefficients) -> float:
    """Exposed seconds of one pass's TP collectives over activations of `size` bytes."""
    if layout.tp <= 1:
        return 0.0
    ranks = group(layout.tp, 1, gpus_per_node)
    each = fabric.all_reduce(size, ranks)
    if layout.sequence_parallel:
        each = fabric.all_gather(size, ranks) + fabric.reduce_scatter(size, ranks)
    return 2 * each * (1.0 if layout.fsdp > 1 else c.tp_exposed)      # FSDP engines do not overlap them


def _attention(shape: ModelShape, layout: TrainingLayout, tokens: float, length: float,
               rates: Rates) -> tuple[float, float]:
    """Forward and backward seconds of core attention."""
    q, d = shape.q_width / layout.tp, shape.head_dim
    if layout.fused_attention:
        forward_s = 2 * tokens * length * q * (d + EXP_WIDTH) / (d * 1.5) / rates.attention
        return forward_s, 2.5 * forward_s
    products_s = 4 * tokens * length * q / rates.head      # both halves of the matrix, as plain products
    stored_s = SCORE_BYTES * tokens * length * q / d / rates.stream
    return products_s + stored_s, 2 * products_s + stored_s


@dataclass(frozen=True, slots=True)
class _Mlp:
    """The MLP, or the experts of a rank, of a layer."""

    product: float
    """Seconds of its matrix products, forward."""
    weights: float
    """Elements on the rank."""
    rows_weights: float
    """Rows x elements that they meet: FLOPs of a pass over 2."""
    io: float
    """Elements in and out of the products, all rows."""
    forward_bytes: float
    """Of element-wise work per token of the micro-batch."""
    backward_bytes: float
    width: float
    """Elements of the hidden activation per token, on the rank."""


def _mlp(shape: ModelShape, layout: TrainingLayout, tokens: float, rates: Rates) -> _Mlp:
    h, tp, matrices = shape.hidden, layout.tp, shape.mlp_matrices
    activation = (6, 10) if matrices == 3 else (4, 6)
    if not shape.experts:
        width = shape.ffn / tp
        weights, io = matrices * h * width, tokens * (2 * h + matrices * width)
        return _Mlp(_product(weights, io, 2 * tokens * weights, rates), weights, tokens * weights, io,
                    activation[0] * width, activation[1] * width, width)
    local = shape.experts / layout.ep
    rows = tokens / tp * shape.experts_per_token           # balanced routing; a token's copies are spread over TP
    per_expert = max(1.0, rows / local)
    padded = rows * (-(-per_expert // TILE) * TILE) / per_expert
    each = matrices * h * shape.moe_ffn
    shared = matrices * h * shape.shared_ffn / tp
    weights = local * each + shared + shape.experts * h
    rows_weights = padded * each + tokens * shared + tokens / tp * shape.experts * h
    io = rows * (2 * h + matrices * shape.moe_ffn) + tokens * (2 * h + matrices * shape.shared_ffn / tp)
    width = (rows * shape.moe_ffn + tokens * shape.shared_ffn / tp) / tokens
    moved = 8 * rows * h / tokens                          # permuted to the experts and back: read and write, twice
    return _Mlp(_product(weights, io, 2 * rows_weights, rates), weights, rows_weights, io,
                activation[0] * width + moved, activation[1] * width + moved, width)


def _product(weights: float, io: float, flops: float, rates: Rates) -> float:
    return flops / rates.matmul + (weights + io) * rates.operand_bytes / rates.operands


def _exchange(shape: ModelShape, layout: TrainingLayout, tokens: float, fabric: Fabric, gpus_per_node: int,
              size: int) -> float:
    """Tokens to their experts and back."""
    if not shape.experts or layout.ep <= 1:
        return 0.0
    ranks = group(layout.ep, 1, gpus_per_node)     # EP takes the place of TP in the experts, then of CP and DP
    row = tokens / layout.tp * shape.hidden * size
    return 2 * fabric.dispatch(row, shape.experts_per_token, ranks)


def _recomputed(layout: TrainingLayout, forward: PassCost, mlp_product_s: float, mlp_elementwise_s: float,
                norms_s: float) -> PassCost:
    """Forward work done again. FSDP engines' "selective" keeps every second product (torchtitan)."""
    modules = layout.recompute
    if "full" in modules:
        return forward
    matmul_s = attention_s = elementwise_s = 0.0
    if "selective_op" in modules:
        matmul_s, elementwise_s = forward.matmul_s / 2, forward.elementwise_s
    if "core_attn" in modules:
        attention_s = forward.attention_s
    if "mlp" in modules or "moe" in modules:
        matmul_s += mlp_product_s
        elementwise_s += mlp_elementwise_s
    if "layernorm" in modules:
        elementwise_s += norms_s
    return PassCost(matmul_s, attention_s, elementwise_s)


def head_cost(shape: ModelShape, layout: TrainingLayout, vocab: int, tokens: float, rates: Rates,
              trained: bool = True) -> tuple[PassCost, PassCost]:
    """Forward and backward of the head and the loss, in bf16 (or fp32) in every recipe; `vocab` is the padded one."""
    width = vocab / layout.tp
    weights = shape.hidden * width
    product = (2 * tokens * weights / rates.head
               + (weights + tokens * (shape.hidden + width)) * rates.element_bytes / rates.operands)
    gradients = product + 2 * layout.grad_bytes * weights / rates.operands if trained else 0.0
    per_logit = tokens * width / rates.stream
    return (PassCost(matmul_s=product, elementwise_s=LOGIT_FORWARD_BYTES * per_logit),
            PassCost(matmul_s=product + gradients, elementwise_s=LOGIT_BACKWARD_BYTES * per_logit))
