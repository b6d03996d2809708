"""Time of an inference engine's steps: decode (a roofline with what the host, the layers and the all-reduces add) and
prefill.

    decode   t = t0 + L t_layer + max(weights / HBM, 2 M b / FLOPs) + KV(b, context) / HBM + 2 L t_allreduce(b) + c b
    prefill  t = 2 M s / FLOPs + 2 L A s^2 / FLOPs + all-reduces of s tokens

all per GPU of a TP group; b: sequences of the step. With PP the b sequences run as PP micro-batches one after another
through the stages, so that a token takes the time of the whole model on b / PP sequences. A mixture reads, of its
experts, those that b tokens picked: E (1 - (1 - k/E)^b) on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from launch.cluster.spec import ClusterSpec, Gpu
from launch.coefficients.rollout import RolloutCoefficients
from launch.model.shape import ModelShape
from launch.plan.book import NO_BOOK, Book
from launch.plan.layouts import RolloutLayout

EngineClass = Literal["vllm", "trtllm", "vllm_2024"]
"""vllm: versions since 2025 (the V1 engine), trtllm: TensorRT-LLM, vllm_2024: versions to 0.6, bound by the host."""
Limit = Literal["weights bandwidth", "KV bandwidth", "compute", "host", "all-reduce"]

BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Engine:
    """One replica's engine, as the numbers of the formulas: seconds, of one micro-batch through all stages."""

    pp: int
    fixed_s: float
    """Host and layers: what a step takes whatever it computes."""
    weights_s: float
    """Reading the weights that every step needs."""
    experts_s: float
    """Reading all routed experts."""
    picked: float
    """k / E; 0 for a dense model."""
    compute_s: float
    """Matrix products of one sequence."""
    kv_s: float
    """Reading one token of KV cache."""
    sequence_s: float
    """Host and sampling, of one sequence."""
    reduce_s: float
    """Latency of the all-reduces of a step, and of the hops between stages."""
    reduce_token_s: float
    """Bandwidth term of the all-reduces, of one token."""
    prefill_token_s: float
    prefill_pair_s: float
    """Attention of one (query, key) pair of a causal prefill, counted as s^2 / 2 pairs."""

    def step_s(self, batch: float, context: float) -> float:
        """Seconds an output token at `batch` running sequences of mean length `context`."""
        rows = batch / self.pp
        weights = self.weights_s
        if self.picked:
            weights += self.experts_s * (1.0 - (1.0 - self.picked) ** rows)
        compute = self.compute_s * rows
        return (self.fixed_s + max(weights, compute) + self.reduce_s
                + rows * (self.kv_s * context + self.sequence_s + self.reduce_token_s))

    def prefill_s(self, prompt: float) -> float:
        """Seconds that the prefill of one prompt adds to the engine's work."""
        return prompt * (self.prefill_token_s + prompt / 2 * self.prefill_pair_s) / self.pp

    def terms(self, batch: float, context: float) -> dict[Limit, float]:
        """Seconds of a step by what they are spent on."""
        rows = batch / self.pp
        weights = self.weights_s + self.experts_s * (1.0 - (1.0 - self.picked) ** rows)
        compute = self.compute_s * rows
        return {"weights bandwidth": weights if weights > compute else 0.0,
                "compute": 0.0 if weights > compute else compute,
                "KV bandwidth": rows * self.kv_s * context,
                "host": self.fixed_s + rows * self.sequence_s,
                "all-reduce": self.reduce_s + rows * self.reduce_token_s}

    def limit(self, batch: float, context: float) -> Limit:
        """What most of a step is spent on."""
        terms = self.terms(batch, context)
        return max(terms, key=terms.__getitem__)


def engine_of(shape: ModelShape, layout: RolloutLayout, cluster: ClusterSpec,
              coefficients: RolloutCoefficients | None = None, engine: EngineClass = "vllm", *,
              book: Book = NO_BOOK) -> Engine:
    """The engine of one replica of `layout` on GPUs of `cluster`."""
    c = coefficients or RolloutCoefficients()
    gpu, tp, precision = cluster.gpu, layout.tp, layout.weight_precision
    sizes = _sizes(shape)
    fp32_rate = gpu.fp32_flops or gpu.bf16_flops / 16
    body_rate = {"fp8": gpu.fp8_flops, "fp32": fp32_rate}.get(precision, gpu.bf16_flops)
    head_rate = fp32_rate if precision == "fp32" else gpu.bf16_flops
    decode = c.decode_gemm_fp8 if precision == "fp8" and gpu.fp8_flops > gpu.bf16_flops else c.gemm
    head_bytes = max(2, BYTES[precision])       # engines leave the head of an FP8 model in BF16
    bandwidth = gpu.hbm_bandwidth * c.hbm
    host_s, sequence_s = _host(c, engine)
    reduces = 2 * shape.layers if tp > 1 else 0
    latency_s, bus = _all_reduce(cluster, tp, c)
    reduce_token_s = reduces * shape.hidden * 2 * 2 * (tp - 1) / tp / bus
    result = Engine(
        pp=layout.pp, fixed_s=host_s + shape.layers * c.layer_s,
        weights_s=(sizes.dense * BYTES[precision] + sizes.head * head_bytes) / tp / bandwidth,
        experts_s=sizes.experts * BYTES[precision] / tp / bandwidth,
        picked=shape.experts_per_token / shape.experts if shape.experts else 0.0,
        compute_s=2 * (sizes.active / (body_rate * decode) + sizes.head / (head_rate * c.gemm)) / tp,
        # with more ranks than KV heads, each head is held by several
        kv_s=2 * shape.layers * shape.kv_width * BYTES[layout.kv_precision] / min(tp, shape.kv_heads) / bandwidth,
        sequence_s=sequence_s, reduce_s=reduces * latency_s + (layout.pp - 1) * c.node_hop_s,
        reduce_token_s=reduce_token_s,
        prefill_token_s=2 * sizes.active / body_rate / tp / c.gemm + reduce_token_s,
        prefill_pair_s=4 * shape.layers * shape.q_width / tp / (gpu.bf16_flops * c.gemm))
    if book.keeps:
        _write(result, engine, shape, layout, cluster, book)
    return result


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Matrix elements of a model."""

    dense: int
    """Read by every step, head left out."""
    experts: int
    """All routed experts."""
    active: int
    """Of one token, head left out."""
    head: int


@lru_cache(maxsize=256)
def _sizes(shape: ModelShape) -> _Sizes:
    attention = 2 * shape.hidden * (shape.q_width + shape.kv_width)
    width = shape.shared_ffn if shape.experts else shape.ffn
    dense = shape.layers * (attention + shape.mlp_matrices * shape.hidden * width + shape.experts * shape.hidden)
    experts = shape.layers * shape.experts * shape.mlp_matrices * shape.hidden * shape.moe_ffn
    active = dense + (experts // shape.experts * shape.experts_per_token if shape.experts else 0)
    return _Sizes(dense, experts, active, shape.vocab * shape.hidden)


def _host(c: RolloutCoefficients, engine: EngineClass) -> tuple[float, float]:
    """Host seconds of a step, and of each sequence in it."""
    return {"vllm": (c.vllm_step_s, c.vllm_sequence_s), "trtllm": (c.trtllm_step_s, 0.0),
            "vllm_2024": (c.vllm2024_step_s, c.vllm2024_sequence_s)}[engine]


def _all_reduce(cluster: ClusterSpec, tp: int, c: RolloutCoefficients) -> tuple[float, float]:
    """Latency of one all-reduce over a TP group, and its bus bandwidth in bytes/s. Over several nodes the ring passes
    the NICs."""
    inside = cluster.gpu.nvlink_bandwidth * c.nvlink
    nodes = -(-tp // cluster.gpus_per_node)
    if nodes <= 1:
        return c.allreduce_s, inside
    nics = cluster.nics_per_node * cluster.nic_bandwidth * c.nic_share
    return c.allreduce_s + 2 * (nodes - 1) * c.node_hop_s, min(inside, nics)


_HOST = {"vllm": ("vllm_step_s", "vllm_sequence_s"), "trtllm": ("trtllm_step_s", "trtllm_step_s"),
         "vllm_2024": ("vllm2024_step_s", "vllm2024_sequence_s")}


def _write(e: Engine, engine: EngineClass, shape: ModelShape, layout: RolloutLayout, cluster: ClusterSpec,
           book: Book) -> None:
    """The engine's numbers, for the book."""
    c = RolloutCoefficients.PREFIX
    step, sequence = (f"{c}.{name}" for name in _HOST[engine])
    hbm = ("gpu.hbm_bandwidth", f"{c}.hbm")
    mlp = _keys("mlp_matrices", "shared_ffn") if shape.shared_ffn else _keys("shared_ffn")
    dense = (*_keys("layers", "hidden", "heads", "kv_heads", "head_dim"),
             *((*mlp, "model.experts") if shape.experts else _keys("mlp_matrices", "ffn", "experts")))
    experts = _keys("layers", "hidden", "experts", "moe_ffn", "mlp_matrices")
    active = (*dense, *_keys("mlp_matrices", "moe_ffn", "experts_per_token")) if shape.experts else dense
    held = (*experts, "rollout.weight_bytes", "rollout.tp", *hbm) if shape.experts else _keys("experts")
    body = ("rollout.weight_bytes", *_body_rate(layout, cluster.gpu), f"{c}.gemm")
    faster = (f"{c}.decode_gemm_fp8",) if layout.weight_precision == "fp8" else ()
    latency, bus = _reduce_keys(layout, cluster)
    hops = (f"{c}.node_hop_s",) if layout.pp > 1 else ()
    for name, value, formula, inputs in (
            ("fixed_s", e.fixed_s, "t0 + L t_layer", (step, "model.layers", f"{c}.layer_s")),
            ("weights_s", e.weights_s, "bytes of the weights that every step reads / (TP HBM)",
             (*dense, "model.vocab", "rollout.weight_bytes", "rollout.tp", *hbm)),
            ("experts_s", e.experts_s, "bytes of all routed experts / (TP HBM)", held),
            ("picked", e.picked, "k / E", _keys("experts", *(["experts_per_token"] if shape.experts else []))),
            ("compute_s", e.compute_s, "2 M / (TP FLOP/s), one sequence",
             (*active, "model.vocab", *body, *faster, *_head_rate(layout, cluster.gpu), "rollout.tp")),
            ("kv_s", e.kv_s, "2 L n_kv d bytes / (min(TP, n_kv) HBM), one token of cache",
             ("model.layers", "model.kv_heads", "model.head_dim", "rollout.kv_bytes", "rollout.tp", *hbm)),
            ("sequence_s", e.sequence_s, "c, one sequence", (sequence,) if e.sequence_s else (step,)),
            ("reduce_s", e.reduce_s, "2 L t_allreduce, and (PP - 1) hops",
             ("rollout.tp", "rollout.pp", *hops, *latency)),
            ("reduce_token_s", e.reduce_token_s, "2 L x 2 h x 2 (TP - 1)/TP / bus bandwidth, one token",
             ("rollout.tp", *bus)),
            ("prefill_token_s", e.prefill_token_s, "2 M / (TP FLOP/s) and its all-reduce, one token of a prompt",
             (*active, *body, "rollout.tp", *bus)),
            ("prefill_pair_s", e.prefill_pair_s, "4 L n_h d / (TP FLOP/s), a (query, key) pair; s^2 / 2 of a prompt",
             ("model.layers", "model.heads", "model.head_dim", "rollout.tp", "gpu.bf16_flops", f"{c}.gemm"))):
        unit = "" if name == "picked" else "s"
        book.computed(f"rollout.engine.{name}", value, unit, formula, dict.fromkeys(inputs))


def _keys(*names: str) -> tuple[str, ...]:
    """Book keys of fields of the shape."""
    return tuple(f"model.{name}" for name in names)


def _body_rate(layout: RolloutLayout, gpu: Gpu) -> tuple[str, ...]:
    """The rate of the layers' products: its datasheet figure."""
    if layout.weight_precision == "fp32":
        return _head_rate(layout, gpu)
    return ("gpu.fp8_flops",) if layout.weight_precision == "fp8" else ("gpu.bf16_flops",)


def _head_rate(layout: RolloutLayout, gpu: Gpu) -> tuple[str, ...]:
    if layout.weight_precision == "fp32":
        return ("gpu.fp32_flops",) if gpu.fp32_flops else ("gpu.fp32_flops", "gpu.bf16_flops")
    return ("gpu.bf16_flops",)


def _reduce_keys(layout: RolloutLayout, cluster: ClusterSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the latency of the all-reduces rests on, and their bandwidth; nothing at TP 1."""
    if layout.tp == 1:
        return (), ()
    c, inside = RolloutCoefficients.PREFIX, layout.tp <= cluster.gpus_per_node
    latency = ("model.layers", "cluster.gpus_per_node", f"{c}.allreduce_s", *(() if inside else (f"{c}.node_hop_s",)))
    bus = ("model.layers", "model.hidden", "gpu.nvlink_bandwidth", "cluster.gpus_per_node", f"{c}.nvlink")
    nics = ("cluster.nics_per_node", "cluster.nic_bandwidth", f"{c}.nic_share")
    return latency, bus if inside else (*bus, *nics)
