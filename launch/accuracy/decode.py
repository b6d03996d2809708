"""Compares measured inference runs with `launch.planner.time.decode`: time per output token at a fixed concurrency, or
output tokens per second under full load."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.accuracy.fit import fit_regimes, log_error
from launch.accuracy.interface import Predicted, measured
from launch.accuracy.machine import plain_cluster
from launch.accuracy.points import Point
from launch.cluster.spec import ClusterSpec
from launch.coefficients.rollout import RolloutCoefficients
from launch.model.architecture import Architecture
from launch.plan.layouts import Precision, RolloutLayout
from launch.planner.memory.rollout import RolloutMemory
from launch.planner.time.decode import Engine, EngineClass
from launch.planner.time.rollout import Demand, SynchronousRollout
from launch.planner.workload.lengths import LONGEST, Counted, Lengths, LogNormal

QUANTITIES: Mapping[str, str] = {"tpot_s": "s", "output_tokens_per_s_per_gpu": "tokens/s"}

DATASETS = {"sharegpt": (217, LogNormal(202, 1.0, 1024)), "openorca": (294, LogNormal(290, 0.6, 1024))}
"""Mean prompt and output lengths of data sets that benchmarks name in place of lengths. ShareGPT: 217,393 and 201,847
tokens for 1,000 requests of vLLM's serving benchmark. OpenOrca: the sample of MLPerf Inference, with outputs cut at
1,024. The shapes are assumptions and matter only for runs with a tail."""
FULL_BATCH = {"vllm": 1024, "trtllm": 2048, "vllm_2024": 256}
"""Default number of sequences that an engine runs at once: the batch under full load, if its cache holds them."""
MOST_GPUS = 1 << 17
UTILIZATION = 0.9
"""Default share of the GPU's memory that engines take."""

TYPICAL = {"hbm": 0.9, "gemm": 0.6, "decode_gemm_fp8": 0.4, "nvlink": 0.7, "allreduce_s": 7e-6, "layer_s": 4e-5,
           "vllm_step_s": 1e-3, "vllm_sequence_s": 3e-5, "trtllm_step_s": 5e-4, "vllm2024_step_s": 5e-3,
           "vllm2024_sequence_s": 5e-5}
"""Start of the search, and the values that coefficients keep if no point constrains them (see `HOLD`)."""
LIMITS = {"hbm": (0.5, 0.97), "gemm": (0.2, 0.9), "decode_gemm_fp8": (0.1, 0.9), "nvlink": (0.2, 1.0),
          "allreduce_s": (2e-6, 3e-5), "layer_s": (5e-6, 1e-4)}
HOLD = 0.003
"""Cost of a coefficient that is e times its typical value. The mean robust error of a regime is about 0.005 at the
optimum."""


def default() -> RolloutCoefficients:
    return RolloutCoefficients()


def predict(point: Point, coefficients: RolloutCoefficients) -> list[Predicted]:
    """Time per output token if requests do not wait for cache space, otherwise output tokens per second."""
    values = _measured(point)
    if not values:
        return []
    run = _run(point)
    if isinstance(run, str):
        return [measured(quantity, value, None, run) for quantity, value in values.items()]
    predicted = _predictions(run, coefficients)
    return [measured(quantity, value, predicted[quantity]) for quantity, value in values.items()]


def calibrate(points: Sequence[Point], start: RolloutCoefficients) -> RolloutCoefficients:
    """Fit the coefficients in `TYPICAL`."""
    regimes: dict[str, list[tuple[_Run, str, float]]] = {}
    for point in points:
        run = _run(point)
        if point.calibrates and not isinstance(run, str):
            regimes.setdefault(point.regime, []).extend((run, *each) for each in _measured(point).items())
    return fit_regimes(start, regimes, lambda row, c: log_error(_predictions(row[0], c)[row[1]], row[2]), TYPICAL,
                       LIMITS, hold=HOLD, step=0.3, evaluations=900)


@dataclass(frozen=True)
class _Run:
    """A point in the model's terms. It has several layouts if the source does not name one; the fastest counts."""

    shape: Architecture
    engine: EngineClass
    cluster: ClusterSpec
    layouts: tuple[RolloutLayout, ...]
    kv_tokens: tuple[int, ...]
    """Capacity of the KV cache for each layout."""
    prompt: float
    lengths: Lengths
    """Output lengths."""
    requests: int | None
    """Requests per replica, sent at once and measured to the last one; None for a steady load."""
    concurrency: int | None
    """Concurrent requests per replica; None under full load."""


def _measured(point: Point) -> dict[str, float]:
    """Quantity -> value. A run whose requests wait for cache space is judged by its throughput."""
    tpot = point.number("measured.tpot_s")
    total, gpus = point.number("measured.output_tokens_per_s_total"), point.num_gpus
    rate = point.number("measured.output_tokens_per_s_per_gpu")
    if rate is None and total is not None and gpus:
        rate = total / gpus
    if rate is None and (tpot is None or point.flag("queueing")):
        rate = point.number("derived.output_tokens_per_s_per_gpu")
    values = {"tpot_s": None if point.flag("queueing") else tpot, "output_tokens_per_s_per_gpu": rate}
    return {name: value for name, value in values.items() if value is not None and value > 0}


def _run(point: Point) -> _Run | str:
    """The point in the model's terms, or the reason why there is none."""
    if point.model is None or point.gpu is None:
        return point.model_problem or point.gpu_problem
    engine = engine_class(point.text("engine.name", ""), str(point.get("engine.version", "")))
    weights = _precision(point.text("precision.weights", "bf16"))
    if weights is None:
        return f"weights in {point.text('precision.weights')} are not modelled"
    # TensorRT-LLM's FP8 checkpoints also quantise the cache. vLLM keeps it in the model's type by default.
    usual = "fp8" if engine == "trtllm" and weights == "fp8" else "bf16"
    kv = _precision(point.text("precision.kv", usual)) or "bf16"
    prompt, lengths = _lengths(point)
    if prompt is None or lengths is None:
        return "prompt and output lengths are not stated"
    gpus, sizes = point.num_gpus, point.sizes()
    if not gpus or not 0 < gpus <= MOST_GPUS:
        return "the number of GPUs is not stated"
    cluster = plain_cluster(point, point.gpu, gpus)
    limit = point.integer("workload.max_num_seqs") or FULL_BATCH[engine]
    tps = [sizes["tp"]] if "tp" in sizes else [tp for tp in (1, 2, 4, 8) if tp <= min(gpus, cluster.gpus_per_node)]
    pp = sizes.get("pp", 1)
    layouts = [RolloutLayout(tp=tp, pp=pp, replicas=max(1, gpus // (tp * pp)), weight_precision=weights,
                             kv_precision=kv, max_num_seqs=limit, memory_utilization=UTILIZATION) for tp in tps]
    caches = [RolloutMemory(point.model, layout, point.gpu).kv_tokens for layout in layouts]
    held = [(layout, cache) for layout, cache in zip(layouts, caches, strict=True) if cache >= prompt + lengths.mean]
    if not held:
        return "the cache does not hold one sequence"
    concurrency, requests = point.integer("workload.concurrency"), point.integer("workload.num_prompts")
    if concurrency is not None:
        concurrency, requests = max(1, round(concurrency / held[0][0].replicas)), None
    return _Run(point.model, engine, cluster, tuple(layout for layout, _ in held), tuple(cache for _, cache in held),
                prompt, lengths, requests, concurrency)


def engine_class(name: str, version: str) -> EngineClass:
    """`trtllm` by name, `vllm_2024` for vLLM up to 0.6, and today's vLLM for everything else."""
    if re.search(r"tensorrt|trt-?llm", name, re.IGNORECASE):
        return "trtllm"
    number = re.match(r"v?(\d+)\.(\d+)", version)
    if "vllm" in name.lower() and number and (int(number[1]), int(number[2])) <= (0, 6):
        return "vllm_2024"
    return "vllm"


def _precision(name: str | None) -> Precision | None:
    text = (name or "").lower()
    if text.startswith(("bf16", "bfloat16", "fp16", "float16", "auto")):
        return "bf16"
    return "fp8" if text.startswith("fp8") else "fp32" if text.startswith("fp32") else None


def _lengths(point: Point) -> tuple[float | None, Lengths | None]:
    prompt, output = point.number("workload.input_tokens"), point.number("workload.output_tokens")
    if prompt and output and 0 < prompt <= LONGEST and 1 <= output <= LONGEST:
        return prompt, Counted.fixed(round(output))
    dataset = (point.text("workload.dataset") or "").lower()
    return next((known for name, known in DATASETS.items() if name in dataset), (None, None))


def _predictions(run: _Run, coefficients: RolloutCoefficients) -> dict[str, float]:
    """Predictions for the layout with the highest throughput."""
    found = [_of_layout(run, Engine(run.shape, layout, run.cluster, coefficients, run.engine), layout, cache)
             for layout, cache in zip(run.layouts, run.kv_tokens, strict=True)]
    return max(found, key=lambda each: each["output_tokens_per_s_per_gpu"])


def _of_layout(run: _Run, engine: Engine, layout: RolloutLayout, cache: int) -> dict[str, float]:
    lengths, gpus = run.lengths, layout.tp * layout.pp
    if run.requests is not None:
        all_at_once = SynchronousRollout(engine, Demand(
            prompts=max(1, run.requests // layout.replicas), group=1, prompt_tokens=run.prompt, lengths=lengths,
            replicas=1, max_num_seqs=layout.max_num_seqs, kv_tokens=cache))
        return {"tpot_s": all_at_once.tpot_s, "output_tokens_per_s_per_gpu": all_at_once.tokens_per_s / gpus}
    # Requests are replaced as they end, so the prefills of others delay the tokens of each request.
    context = lengths.active_context(run.prompt)
    batch = min(run.concurrency or layout.max_num_seqs, layout.max_num_seqs, max(1.0, cache / context))
    step_s, prefill_s = engine.step_s(batch, context), engine.prefill_s(run.prompt) / lengths.mean
    return {"tpot_s": step_s + (batch - 1) * prefill_s,
            "output_tokens_per_s_per_gpu": batch / (step_s + batch * prefill_s) / gpus}
