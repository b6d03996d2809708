"""Time of an inference engine's decode and prefill steps. Decode is a roofline plus host time, time per layer and
all-reduces.

    decode   t = t0 + L t_layer + max(weights / HBM, 2 M b / FLOPs) + KV(b, context) / HBM + 2 L t_allreduce(b) + c b
    prefill  t = 2 M s / FLOPs + 2 L A s^2 / FLOPs + all-reduces of s tokens

All terms are per GPU of a TP group; b is the number of sequences in the step. With PP, the b sequences run through the
stages as PP micro-batches, so a token takes the time of the whole model on b / PP sequences. A mixture of experts reads
the experts that b tokens pick: E (1 - (1 - k/E)^b) on average.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from launch.cluster.spec import ClusterSpec
from launch.coefficients.rollout import RolloutCoefficients
from launch.model.architecture import Architecture
from launch.plan.book import line, part
from launch.plan.layouts import PRECISION_BYTES, RolloutLayout

EngineClass = Literal["vllm", "trtllm", "vllm_2024"]
"""vllm: versions since 2025 (the V1 engine); trtllm: TensorRT-LLM; vllm_2024: versions up to 0.6, bound by the host."""
Limit = Literal["weights bandwidth", "KV bandwidth", "compute", "host", "all-reduce"]


@dataclass(frozen=True)
class Engine:
    """The engine of one replica. The numbers are the terms of the formulas, in seconds for one micro-batch through all
    stages."""

    PREFIX = "rollout.engine"

    shape: Architecture
    layout: RolloutLayout
    cluster: ClusterSpec
    c: RolloutCoefficients = RolloutCoefficients()
    program: EngineClass = "vllm"

    @part
    def pp(self) -> int:
        return self.layout.pp

    @line("s", "t0 + L t_layer")
    def fixed_s(self) -> float:
        """Fixed time of a step: host and layers."""
        c = self.c
        host_s = (c.vllm_step_s if self.program == "vllm" else c.trtllm_step_s if self.program == "trtllm" else
                  c.vllm2024_step_s)
        return host_s + self.shape.layers * c.layer_s

    @line("s", "bytes of the weights that every step reads / (TP HBM)")
    def weights_s(self) -> float:
        """Time to read the weights that every step needs."""
        each = PRECISION_BYTES[self.layout.weight_precision]
        head_bytes = max(2, each)       # engines leave the head of an FP8 model in BF16
        return (self.sizes.dense * each + self.sizes.head * head_bytes) / self.layout.tp / self.bandwidth

    @line("s", "bytes of all routed experts / (TP HBM)")
    def experts_s(self) -> float:
        """Time to read all routed experts."""
        if not self.shape.experts:
            return 0.0
        return self.sizes.experts * PRECISION_BYTES[self.layout.weight_precision] / self.layout.tp / self.bandwidth

    @line("", "k / E")
    def picked(self) -> float:
        """Share of the experts that a token picks; 0 for a dense model."""
        return self.shape.experts_per_token / self.shape.experts if self.shape.experts else 0.0

    @line("s", "2 M / (TP FLOP/s), one sequence")
    def compute_s(self) -> float:
        """Time of the matrix products of one sequence."""
        c, gpu, fp8 = self.c, self.cluster.gpu, self.layout.weight_precision == "fp8"
        decode = c.decode_gemm_fp8 if fp8 and gpu.fp8_flops > gpu.bf16_flops else c.gemm
        head_rate = self.fp32_rate if self.layout.weight_precision == "fp32" else gpu.bf16_flops
        return 2 * (self.sizes.active / (self.body_rate * decode)
                    + self.sizes.head / (head_rate * c.gemm)) / self.layout.tp

    @line("s", "2 L n_kv d bytes / (min(TP, n_kv) HBM), one token of cache")
    def kv_s(self) -> float:
        """Time to read one token of the KV cache. If TP exceeds the number of KV heads, several ranks hold each
        head."""
        shape, layout = self.shape, self.layout
        size = 2 * shape.layers * shape.kv_width * PRECISION_BYTES[layout.kv_precision]
        return size / min(layout.tp, shape.kv_heads) / self.bandwidth

    @line("s", "c, one sequence")
    def sequence_s(self) -> float:
        """Host and sampling time of one sequence."""
        c = self.c
        return (c.vllm_sequence_s if self.program == "vllm" else 0.0 if self.program == "trtllm" else
                c.vllm2024_sequence_s)

    @line("s", "2 L t_allreduce, and (PP - 1) hops")
    def reduce_s(self) -> float:
        """Latency of a step's all-reduces and of the hops between stages."""
        c, tp, pp = self.c, self.layout.tp, self.layout.pp
        hops_s = (pp - 1) * c.node_hop_s if pp > 1 else 0.0
        if tp == 1:
            return hops_s
        nodes = -(-tp // self.cluster.gpus_per_node)
        latency_s = c.allreduce_s if nodes <= 1 else c.allreduce_s + 2 * (nodes - 1) * c.node_hop_s
        return 2 * self.shape.layers * latency_s + hops_s

    @line("s", "2 L x 2 h x 2 (TP - 1)/TP / bus bandwidth, one token")
    def reduce_token_s(self) -> float:
        """Bandwidth term of the all-reduces of one token. Across nodes the ring passes the NICs."""
        c, cluster, tp = self.c, self.cluster, self.layout.tp
        if tp == 1:
            return 0.0
        bus = cluster.gpu.nvlink_bandwidth * c.nvlink
        if tp > cluster.gpus_per_node:
            bus = min(bus, cluster.nics_per_node * cluster.nic_bandwidth * c.nic_share)
        return 2 * self.shape.layers * self.shape.hidden * 2 * 2 * (tp - 1) / tp / bus

    @line("s", "2 M / (TP FLOP/s) and its all-reduce, one token of a prompt")
    def prefill_token_s(self) -> float:
        return 2 * self.sizes.active / self.body_rate / self.layout.tp / self.c.gemm + self.reduce_token_s

    @line("s", "4 L n_h d / (TP FLOP/s), a (query, key) pair; s^2 / 2 of a prompt")
    def prefill_pair_s(self) -> float:
        """Attention time of one (query, key) pair. A causal prefill of s tokens has s^2 / 2 pairs."""
        shape = self.shape
        return 4 * shape.layers * shape.q_width / self.layout.tp / (self.cluster.gpu.bf16_flops * self.c.gemm)

    @part
    def sizes(self) -> MatrixSizes:
        return _sizes(self.shape)

    @property
    def bandwidth(self) -> float:
        return self.cluster.gpu.hbm_bandwidth * self.c.hbm

    @property
    def fp32_rate(self) -> float:
        return self.cluster.gpu.fp32_flops or self.cluster.gpu.bf16_flops / 16

    @property
    def body_rate(self) -> float:
        """FLOP/s of the layers' matrix products."""
        gpu, precision = self.cluster.gpu, self.layout.weight_precision
        return self.fp32_rate if precision == "fp32" else gpu.fp8_flops if precision == "fp8" else gpu.bf16_flops

    @part
    def step_s(self) -> Callable[[float, float], float]:
        """(running sequences, their mean context) -> seconds per output token. A search calls it a million times."""
        pp, fixed_s, weights_s, experts_s, picked = self.pp, self.fixed_s, self.weights_s, self.experts_s, self.picked
        compute_s, reduce_s, kv_s, sequence_s = self.compute_s, self.reduce_s, self.kv_s, self.sequence_s
        reduce_token_s = self.reduce_token_s

        def step_s(batch: float, context: float) -> float:
            rows = batch / pp
            weights = weights_s
            if picked:
                weights += experts_s * (1.0 - (1.0 - picked) ** rows)
            compute = compute_s * rows
            return (fixed_s + max(weights, compute) + reduce_s
                    + rows * (kv_s * context + sequence_s + reduce_token_s))
        return step_s

    def prefill_s(self, prompt: float) -> float:
        """Seconds that the prefill of one prompt takes."""
        return prompt * (self.prefill_token_s + prompt / 2 * self.prefill_pair_s) / self.pp

    def terms(self, batch: float, context: float) -> dict[Limit, float]:
        """Seconds of a step by resource."""
        rows = batch / self.pp
        weights = self.weights_s + self.experts_s * (1.0 - (1.0 - self.picked) ** rows)
        compute = self.compute_s * rows
        return {"weights bandwidth": weights if weights > compute else 0.0,
                "compute": 0.0 if weights > compute else compute,
                "KV bandwidth": rows * self.kv_s * context,
                "host": self.fixed_s + rows * self.sequence_s,
                "all-reduce": self.reduce_s + rows * self.reduce_token_s}

    def limit(self, batch: float, context: float) -> Limit:
        """The resource that takes most of a step."""
        terms = self.terms(batch, context)
        return max(terms, key=terms.__getitem__)


@dataclass(eq=False)
class MatrixSizes:
    """Matrix elements of a model."""

    shape: Architecture

    @part
    def dense(self) -> int:
        """Elements that every step reads, without the head."""
        shape = self.shape
        attention = 2 * shape.hidden * (shape.q_width + shape.kv_width)
        width = shape.shared_ffn if shape.experts else shape.ffn
        return shape.layers * (attention + shape.mlp_matrices * shape.hidden * width + shape.experts * shape.hidden)

    @part
    def experts(self) -> int:
        """Elements of all routed experts."""
        shape = self.shape
        return shape.layers * shape.experts * shape.mlp_matrices * shape.hidden * shape.moe_ffn

    @part
    def active(self) -> int:
        """Elements that one token is multiplied with, without the head."""
        shape = self.shape
        return self.dense + (self.experts // shape.experts * shape.experts_per_token if shape.experts else 0)

    @part
    def head(self) -> int:
        return self.shape.vocab * self.shape.hidden


_sizes = lru_cache(maxsize=256)(MatrixSizes)
