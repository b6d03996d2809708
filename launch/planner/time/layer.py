"""Time of one layer, and of the head, for one micro-batch on one rank: forward and backward.

Matrix products take the time of their FLOPs at the rate of a large product, plus the time of their operands on the HBM.
The second part matters for small micro-batches and thin TP shards, where efficiency falls. The forward pass takes
2 T n k FLOPs. The gradients of the input and of the weights take as many each. The gradient of the weights also reads
and writes the accumulated gradient of every weight in every micro-batch. LoRA needs no gradient of the weights.

Causal attention takes 2 T l A FLOPs forward (l is the length of equal cost, A = heads x head_dim) and 2.5 times as many
backward, since fused kernels compute the scores a second time (Dao 2022, arXiv 2205.14135). Its exponentials run in
parallel with the products and cost as much as 64 elements of head_dim (Shah et al. 2024, arXiv 2407.08608).

Element-wise kernels are bound by the HBM: bytes per token and layer, divided by TP with sequence parallelism
(Korthikanti et al. 2022, arXiv 2205.05198). TP takes two all-gathers and two reduce-scatters per pass, or two
all-reduces without sequence parallelism; only the part that no product hides counts. CP sends keys and values around a
ring behind attention. EP sends tokens to their experts and back.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.cluster.spec import ClusterSpec, Gpu
from launch.coefficients.collectives import CollectiveCoefficients
from launch.coefficients.training import TrainingCoefficients
from launch.model.architecture import Architecture
from launch.plan.book import line, made, part
from launch.plan.layouts import TrainingLayout, wide_bytes
from launch.planner.parameters import RankParameters, padded_vocab
from launch.planner.time.collectives import CollectiveTime, group
from launch.planner.workload.work import Work

EXP_WIDTH = 64
"""The exponential of a score costs as much as the products of this many elements of head_dim (FlashAttention-3: half of
d = 128)."""
SCORE_BYTES = 13
"""Bytes per stored score and pass: product writes 2, mask and softmax 4, dropout 4 + 1, product reads 2."""
TILE = 128
"""Rows of a tile. The tokens of an expert are rounded up to a multiple."""
LOGIT_FORWARD_BYTES = 30
"""Bytes per logit: to fp32 2 + 4, maximum 4, subtract 8, exponential 8, sum 4 (Megatron's vocabulary-parallel loss)."""
LOGIT_BACKWARD_BYTES = 16


@dataclass(eq=False)
class GpuRates:
    """Achieved rates of a GPU, in FLOP/s and bytes/s."""

    gpu: Gpu
    layout: TrainingLayout
    c: TrainingCoefficients

    @property
    def engine(self) -> float:
        return self.c.fsdp_rate if self.layout.fsdp > 1 else 1.0

    @part
    def plain(self) -> float:
        fp32 = self.layout.precision == "fp32" and self.gpu.fp32_flops
        return self.gpu.fp32_flops if fp32 else self.gpu.bf16_flops

    @part
    def fp8(self) -> bool:
        return self.layout.precision == "fp8" and self.gpu.fp8_flops > self.gpu.bf16_flops

    @part
    def element_bytes(self) -> int:
        return wide_bytes(self.layout.precision)

    @part
    def operand_bytes(self) -> int:
        return 1 if self.fp8 else self.element_bytes

    @part
    def head(self) -> float:
        return self.plain * self.gpu.sustained * self.c.gemm_bf16 * self.engine

    @part
    def matmul(self) -> float:
        return self.gpu.fp8_flops * self.gpu.sustained * self.c.gemm_fp8 * self.engine if self.fp8 else self.head

    @part
    def attention(self) -> float:
        return self.plain * self.gpu.sustained * self.c.attention * self.engine

    @part
    def operands(self) -> float:
        return self.gpu.hbm_bandwidth / self.c.gemm_memory

    @part
    def stream(self) -> float:
        return self.gpu.hbm_bandwidth * self.c.hbm * self.engine


@dataclass(eq=False)
class Pass:
    """A pass of an optimizer step's micro-batches through the model: forward and backward, or forward only."""

    shape: Architecture
    layout: TrainingLayout
    held: RankParameters
    work: Work
    cluster: ClusterSpec
    c: TrainingCoefficients
    collectives: CollectiveCoefficients
    lora_rank: int = 0
    """> 0: adapters of this rank are trained; the weights are frozen and have no gradients."""

    PREFIX = "training"
    trains = True
    """Whether there is a backward pass."""
    comm = made(CollectiveTime, cluster="cluster", c="collectives")
    rates = made(GpuRates, gpu="cluster.gpu", layout="layout", c="c")

    @line("tokens", "tokens of a micro-batch / CP")
    @part
    def tokens_per_rank(self) -> float:
        return self.work.micro_batch_tokens / self.layout.cp

    @property
    def gradient_bytes(self) -> int:
        """Bytes per weight that a micro-batch's gradient moves: the accumulated one is read and written. Unless fused,
        its own is written first, and read again."""
        return 2 * self.layout.grad_bytes + (0 if self.layout.fused_gradients else 2 * self.rates.element_bytes)

    @part
    def layer(self) -> LayerTime:
        return LayerTime(self)

    @part
    def head(self) -> HeadTime:
        return HeadTime(self)


@dataclass(eq=False)
class LayerTime:
    """One layer for one micro-batch on one rank, in seconds of all passes together. Recomputation repeats forward work
    in the backward pass. The "selective" mode of FSDP engines keeps every second product (torchtitan)."""

    of: Pass

    @property
    def PREFIX(self) -> str:
        return f"{self.of.PREFIX}.layer"

    @line("s", "2 T n k / rate + exposed time of operands on the HBM, for each product; twice more backward (once "
               "with LoRA), again if recomputed")
    def matmul_s(self) -> float:
        of, rates, mlp = self.of, self.of.rates, self.mlp
        weights, io, tokens = self.attention_weights, self.attention_io, of.tokens_per_rank
        forward_s = _product(weights, io, 2 * tokens * weights, rates) + mlp.product_s
        # thin products on both sides of each matrix, bound by reading its input and adding to its output
        if of.lora_rank:
            forward_s += 2 * (io + mlp.io) * rates.element_bytes / rates.stream
        if not of.trains:
            return forward_s
        backward_s = forward_s
        if not of.lora_rank:
            backward_s += (2 * (tokens * weights + mlp.rows_weights) / rates.matmul
                           + ((io + mlp.io) * rates.operand_bytes
                              + of.gradient_bytes * (weights + mlp.weights)) / rates.operands)
        again_s, modules = 0.0, of.layout.recompute
        if "full" in modules:
            again_s = forward_s
        else:
            again_s += forward_s / 2 if "selective_op" in modules else 0.0
            again_s += mlp.product_s if "mlp" in modules or "moe" in modules else 0.0
        return forward_s + backward_s + again_s

    @line("s", "2 T l A / rate forward, 2.5 times that backward (arXiv 2205.14135)")
    def attention_s(self) -> float:
        forward_s, backward_s = self.scores_s
        if not self.of.trains:
            return forward_s
        modules = self.of.layout.recompute
        return forward_s + backward_s + (forward_s if "full" in modules or "core_attn" in modules else 0.0)

    @line("s", "bytes of norms, residuals, rotary, activation, FP8 casts / (HBM bandwidth x share)")
    def elementwise_s(self) -> float:
        per_byte = self.of.tokens_per_rank / self.of.rates.stream
        forward, backward, norms = self.elementwise_bytes
        if not self.of.trains:
            return forward * per_byte
        again_s, modules = 0.0, self.of.layout.recompute
        if "full" in modules:
            again_s = forward * per_byte
        else:
            again_s += forward * per_byte if "selective_op" in modules else 0.0
            if "mlp" in modules or "moe" in modules:
                again_s += self.mlp.forward_bytes * self.of.rates.element_bytes / 2 * per_byte
            again_s += norms * per_byte if "layernorm" in modules else 0.0
        return forward * per_byte + backward * per_byte + again_s

    @line("s", "layer_s for each pass")
    def gaps_s(self) -> float:
        return self.each_pass(self.of.c.layer_s)

    @line("s", "(2 all-gathers + 2 reduce-scatters) each way x exposed share")
    def tp_s(self) -> float:
        """Exposed seconds of the TP collectives."""
        of, layout = self.of, self.of.layout
        if layout.tp <= 1:
            return 0.0
        size = of.tokens_per_rank * of.shape.hidden * of.rates.element_bytes
        ranks = group(layout.tp, 1, of.cluster.gpus_per_node)
        if layout.sequence_parallel:
            each_s = of.comm.all_gather(size, ranks) + of.comm.reduce_scatter(size, ranks)
        else:
            each_s = of.comm.all_reduce(size, ranks)
        exposed = 1.0 if layout.fsdp > 1 else of.c.tp_exposed        # FSDP engines do not overlap them
        return self.each_pass(2 * each_s * exposed)

    @line("s", "time of the ring of keys and values beyond that of attention")
    def cp_s(self) -> float:
        of, layout = self.of, self.of.layout
        if layout.cp <= 1:
            return 0.0
        size = 2 * (of.shape.kv_width / layout.tp) * of.tokens_per_rank * of.rates.element_bytes
        ring_s = (layout.cp - 1) * of.comm.p2p(size, layout.tp * layout.cp <= of.cluster.gpus_per_node)
        scores_s, scores_backward_s = self.scores_s
        forward_s = max(0.0, ring_s - scores_s)
        if not of.trains:
            return forward_s
        again_s = forward_s if "full" in layout.recompute else 0.0
        return forward_s + max(0.0, 2 * ring_s - scores_backward_s) + again_s

    @line("s", "tokens to their experts and back, each way")
    def ep_s(self) -> float:
        of, layout = self.of, self.of.layout
        if not of.shape.experts or layout.ep <= 1:
            return 0.0
        # EP takes the place of TP in the experts, then of CP and DP
        ranks = group(layout.ep, 1, of.cluster.gpus_per_node)
        row = of.tokens_per_rank / layout.tp * of.shape.hidden * of.rates.element_bytes
        return self.each_pass(2 * of.comm.dispatch(row, of.shape.experts_per_token, ranks))

    def each_pass(self, seconds: float) -> float:
        """Seconds of all passes, for work that takes `seconds` in each: forward, backward, and full recomputation."""
        if not self.of.trains:
            return seconds
        return seconds + seconds + (seconds if "full" in self.of.layout.recompute else 0.0)

    @part
    def attention_weights(self) -> float:
        """Elements of the attention matrices on the rank."""
        shape, tp = self.of.shape, self.of.layout.tp
        return shape.hidden * (2 * (shape.q_width / tp) + 2 * (shape.kv_width / tp))

    @part
    def attention_io(self) -> float:
        """Input and output elements of the attention's products."""
        shape, tp = self.of.shape, self.of.layout.tp
        return self.of.tokens_per_rank * (2 * shape.hidden + 2 * (shape.q_width / tp) + 2 * (shape.kv_width / tp))

    @part
    def mlp(self) -> Mlp:
        return Experts(self.of) if self.of.shape.experts else Mlp(self.of)

    @part
    def scores_s(self) -> tuple[float, float]:
        """Forward and backward seconds of core attention."""
        shape, layout, rates = self.of.shape, self.of.layout, self.of.rates
        tokens, length = self.of.tokens_per_rank, self.of.work.attention_length
        q, d = shape.q_width / layout.tp, shape.head_dim
        if layout.fused_attention:
            forward_s = 2 * tokens * length * q * (d + EXP_WIDTH) / (d * 1.5) / rates.attention
            return forward_s, 2.5 * forward_s
        products_s = 4 * tokens * length * q / rates.head      # both halves of the matrix, as plain products
        stored_s = SCORE_BYTES * tokens * length * q / d / rates.stream
        return products_s + stored_s, 2 * products_s + stored_s

    @part
    def elementwise_bytes(self) -> tuple[float, float, float]:
        """Bytes per token that a layer's element-wise kernels move: forward, backward, and the norms' part of the
        forward bytes."""
        shape, layout, rates, mlp = self.of.shape, self.of.layout, self.of.rates, self.mlp
        q, kv = shape.q_width / layout.tp, shape.kv_width / layout.tp
        h = shape.hidden / (layout.tp if layout.tp > 1 and layout.sequence_parallel else 1)
        norms, residuals, rotary = 8 * h, 12 * h, 4 * (q + kv)      # read and write; two in, one out; read and write
        forward = norms + residuals + rotary + mlp.forward_bytes
        backward = 24 * h + rotary + mlp.backward_bytes
        if shape.qk_norm:
            forward += 4 * (q + kv)
            backward += 6 * (q + kv)
        wide = rates.element_bytes / 2
        forward, backward, norms = forward * wide, backward * wide, norms * wide
        if layout.cp > 1:      # each ring step adds to the fp32 output, and backward to the gradients
            forward += 12 * layout.cp * q
            backward += 12 * layout.cp * (q + 2 * kv)
        if rates.fp8:          # casts of the products' inputs: read 2 bytes, write a 1-byte copy and its transpose
            forward += 4 * (2 * h + q + mlp.width)
            backward += 4 * (2 * h + q + 2 * kv + (shape.mlp_matrices - 1) * mlp.width)
        return forward, backward, norms


@dataclass(eq=False)
class Mlp:
    """The MLP of a layer."""

    of: Pass

    @part
    def product_s(self) -> float:
        """Seconds of the MLP's matrix products, forward."""
        return _product(self.weights, self.io, 2 * self.rows_weights, self.of.rates)

    @part
    def weights(self) -> float:
        """Elements of the MLP's matrices on the rank."""
        return self.of.shape.mlp_matrices * self.of.shape.hidden * self.width

    @part
    def rows_weights(self) -> float:
        """Rows x matrix elements: half of the FLOPs of a pass."""
        return self.of.tokens_per_rank * self.weights

    @part
    def io(self) -> float:
        """Input and output elements of the products, all rows."""
        shape = self.of.shape
        return self.of.tokens_per_rank * (2 * shape.hidden + shape.mlp_matrices * self.width)

    @part
    def width(self) -> float:
        """Elements of the hidden activation per token on the rank."""
        return self.of.shape.ffn / self.of.layout.tp

    @part
    def forward_bytes(self) -> float:
        """Bytes of element-wise work per token of the micro-batch, forward."""
        return (6 if self.of.shape.mlp_matrices == 3 else 4) * self.width + self.moved

    @part
    def backward_bytes(self) -> float:
        return (10 if self.of.shape.mlp_matrices == 3 else 6) * self.width + self.moved

    @property
    def moved(self) -> float:
        """Bytes per token that are permuted to experts and back."""
        return 0.0


class Experts(Mlp):
    """The experts of a rank, including shared ones."""

    @part
    def rows(self) -> float:
        """Rows of the routed experts, with balanced routing. The copies of a token are spread over TP."""
        return self.of.tokens_per_rank / self.of.layout.tp * self.of.shape.experts_per_token

    @part
    def each(self) -> float:
        """Elements of one expert."""
        return self.of.shape.mlp_matrices * self.of.shape.hidden * self.of.shape.moe_ffn

    @part
    def shared(self) -> float:
        """Elements of the shared experts on the rank."""
        return self.of.shape.mlp_matrices * self.of.shape.hidden * self.of.shape.shared_ffn / self.of.layout.tp

    @part
    def weights(self) -> float:
        shape = self.of.shape
        return shape.experts / self.of.layout.ep * self.each + self.shared + shape.experts * shape.hidden

    @part
    def rows_weights(self) -> float:
        shape, tokens, rows = self.of.shape, self.of.tokens_per_rank, self.rows
        per_expert = max(1.0, rows / (shape.experts / self.of.layout.ep))
        padded = rows * (-(-per_expert // TILE) * TILE) / per_expert
        return padded * self.each + tokens * self.shared + tokens / self.of.layout.tp * shape.experts * shape.hidden

    @part
    def io(self) -> float:
        shape, tokens = self.of.shape, self.of.tokens_per_rank
        return (self.rows * (2 * shape.hidden + shape.mlp_matrices * shape.moe_ffn)
                + tokens * (2 * shape.hidden + shape.mlp_matrices * shape.shared_ffn / self.of.layout.tp))

    @part
    def width(self) -> float:
        shape, tokens = self.of.shape, self.of.tokens_per_rank
        return (self.rows * shape.moe_ffn + tokens * shape.shared_ffn / self.of.layout.tp) / tokens

    @property
    def moved(self) -> float:
        """Each copy is read and written twice."""
        return 8 * self.rows * self.of.shape.hidden / self.of.tokens_per_rank


def _product(weights: float, io: float, flops: float, rates: GpuRates) -> float:
    return flops / rates.matmul + (weights + io) * rates.operand_bytes / rates.operands


@dataclass(eq=False)
class HeadTime:
    """The head and the loss for one micro-batch, in seconds of all passes together. Every recipe computes them in bf16
    or fp32."""

    of: Pass

    @property
    def PREFIX(self) -> str:
        return f"{self.of.PREFIX}.head"

    @part
    def width(self) -> float:
        """Columns of the head on a rank."""
        return padded_vocab(self.of.shape, self.of.layout.tp) / self.of.layout.tp

    @line("s", "2 T h V / TP and its gradients, in bf16")
    def matmul_s(self) -> float:
        of, rates, width, tokens = self.of, self.of.rates, self.width, self.of.tokens_per_rank
        weights = of.shape.hidden * width
        product_s = (2 * tokens * weights / rates.head
                     + (weights + tokens * (of.shape.hidden + width)) * rates.element_bytes / rates.operands)
        if not of.trains:
            return product_s
        gradients_s = 0.0 if of.lora_rank else product_s + of.gradient_bytes * weights / rates.operands
        return product_s + (product_s + gradients_s)

    @line("s", "bytes per logit of loss and log-probs x T V / TP")
    def elementwise_s(self) -> float:
        per_logit = self.of.tokens_per_rank * self.width / self.of.rates.stream
        forward_s = LOGIT_FORWARD_BYTES * per_logit
        return forward_s + LOGIT_BACKWARD_BYTES * per_logit if self.of.trains else forward_s
