"""Compares measured training runs with `launch.planner.time.training`: step time, or tokens per second per GPU.

Fields that a point omits get the defaults of published recipes: micro-batches of one sequence, no recomputation,
gradients in bf16 (FSDP programs: fp32), two chunks per pipeline rank, and many micro-batches if no batch size is given.

Engine classes, besides FSDP programs, which are recognised by their layout:
    fp16 runs         Megatron without fused attention, so that it stores the scores, and without sequence parallelism
                      in runs with full recomputation (arXiv 2205.14135, 2205.05198)
    fine-tuning       short sequences are packed and attend only to themselves, see `PACKED`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from launch.accuracy.fit import fit_regimes, log_error
from launch.accuracy.interface import Predicted, measured
from launch.accuracy.machine import cluster_of
from launch.accuracy.memory import GRADIENT_BYTES, LORA_RANK
from launch.accuracy.points import Point
from launch.cluster.spec import ClusterSpec
from launch.coefficients.training import TrainingCoefficients
from launch.model.architecture import Architecture
from launch.plan.layouts import Precision, TrainingLayout
from launch.planner.parameters import FlopsConvention, flops_per_token
from launch.planner.time.training import TrainingTime, training_time
from launch.planner.workload.work import TrainingWork

QUANTITIES: Mapping[str, str] = {"step_time_s": "s", "tokens_per_s_per_gpu": "tokens/s"}

TYPICAL = {"gemm_bf16": 0.85, "gemm_fp8": 0.75, "gemm_memory": 0.5, "attention": 0.5,
           "hbm": 0.8, "tp_exposed": 0.4, "overlap_cost": 0.2, "layer_s": 1e-4, "step_s": 0.03, "fsdp_rate": 0.9}
"""Start of the search, and the values of coefficients that no point constrains. A deviation of e^1 costs `HOLD`."""
LIMITS = {"gemm_bf16": (0.5, 1.0), "gemm_fp8": (0.4, 1.0), "gemm_memory": (0.05, 1.0), "attention": (0.3, 0.75),
          "hbm": (0.4, 0.95), "tp_exposed": (0.05, 1.0), "overlap_cost": (0.02, 0.6),
          "layer_s": (1e-5, 1e-3), "step_s": (1e-3, 0.2), "fsdp_rate": (0.5, 1.0)}
HOLD = 0.003

PACKED = 0.25
"""E[t^2]/E[t] of packed fine-tuning samples over the length of the pack. This is an assumption: samples of
question-and-answer sets are far shorter than their packs, those of document sets nearly as long."""
MANY = 32
"""Micro-batches per rank if no batch size is given."""
UNKNOWN_CHUNKS = 2
"""Chunks of a pipeline rank whose schedule is not stated: between 1F1B and one layer per chunk."""
PRECISIONS: Mapping[str, Precision] = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "fp32": "fp32"}
CONVENTIONS: Mapping[str, FlopsConvention] = {name: name for name in get_args(FlopsConvention)}


@dataclass(frozen=True)
class Run:
    """A point in the model's terms."""

    shape: Architecture
    layout: TrainingLayout
    work: TrainingWork
    cluster: ClusterSpec
    lora_rank: int
    quantity: str
    measured: float


def default() -> TrainingCoefficients:
    return TrainingCoefficients()


def predict(point: Point, coefficients: TrainingCoefficients) -> list[Predicted]:
    """Predict the step time, or the rate if the size of the step is not known."""
    known = _measured(point)
    if not known:
        return []
    run = run_of(point)
    if isinstance(run, str):
        return [measured(*known, None, run)]
    return [measured(run.quantity, run.measured, _value(run, coefficients))]


def calibrate(points: Sequence[Point], start: TrainingCoefficients) -> TrainingCoefficients:
    """Fit the coefficients in `TYPICAL`."""
    regimes: dict[str, list[Run]] = {}
    for point in points:
        if point.calibrates and _measured(point):
            run = run_of(point)
            if not isinstance(run, str):
                regimes.setdefault(point.regime, []).append(run)
    return fit_regimes(start, regimes, lambda run, c: log_error(_value(run, c), run.measured), TYPICAL, LIMITS,
                       hold=HOLD, scale=0.05, evaluations=700)


def time_of(run: Run, coefficients: TrainingCoefficients) -> TrainingTime:
    """The step time of a run."""
    return training_time(run.shape, run.layout, run.work, run.cluster, coefficients, lora_rank=run.lora_rank)


def _value(run: Run, coefficients: TrainingCoefficients) -> float:
    seconds = time_of(run, coefficients).total_s
    return seconds if run.quantity == "step_time_s" else run.work.tokens / (seconds * run.layout.gpus)


def _measured(point: Point) -> tuple[str, float] | None:
    """The value to compare: the step time, or else the rate; measured values before derived ones."""
    for quantity in QUANTITIES:
        for place in ("measured", "derived"):
            value = point.number(f"{place}.{quantity}")
            if value is not None and value > 0 and (quantity != "step_time_s" or _batch(point)):
                return quantity, value
    rate = point.number("measured.model_tflops_per_gpu")
    convention = CONVENTIONS.get(point.text("flops_convention", ""))
    if rate is None or rate <= 0:
        return None
    length = point.integer("seq_len")
    if point.model is None or convention is None or not length:
        return "tokens_per_s_per_gpu", rate * 1e12      # run_of gives the reason why it cannot be compared
    return "tokens_per_s_per_gpu", rate * 1e12 / flops_per_token(point.model, length, convention=convention)


def _batch(point: Point) -> int | None:
    batch = point.integer("global_batch")
    return batch if batch is not None and batch > 0 else None


def run_of(point: Point) -> Run | str:
    """The point in the model's terms, or the reason why there is none."""
    if point.model is None or point.gpu is None:
        return point.model_problem or point.gpu_problem
    length, gpus = point.integer("seq_len"), point.num_gpus
    if not length or length < 1 or not gpus or gpus < 1:
        return "sequence length or number of GPUs is not stated"
    precision = PRECISIONS.get(point.text("precision", "bf16"))
    if precision is None:
        return f"precision {point.text('precision')} is not modelled"
    if point.number("measured.step_time_s") is None and point.number("measured.tokens_per_s_per_gpu") is None \
            and point.get("derived") is None and point.text("flops_convention") is None:
        return "the FLOP convention of its TFLOP/s is not stated"
    layout, micro = _layout(point, point.model, gpus, precision)
    if isinstance(layout, str):
        return layout
    batch = _batch(point) or layout.dp * micro * MANY
    micro_batches = max(1, -(-batch // (layout.dp * micro)))
    if layout.fsdp > 1 and 1 < layout.pp and micro_batches < layout.pp and micro % layout.pp == 0:
        micro, micro_batches = micro // layout.pp, micro_batches * layout.pp     # they state what a rank loads
    tuned = point.text("task") in ("sft", "lora")
    work = TrainingWork(sequences=batch, tokens=batch * length, attention_length=length * (PACKED if tuned else 1.0),
                        micro_batch_tokens=micro * length, micro_batches=micro_batches, longest=length)
    quantity, value = _measured(point) or ("step_time_s", 0.0)
    lora_rank = LORA_RANK if point.text("task") == "lora" else 0
    return Run(point.model, layout, work, cluster_of(point, point.gpu), lora_rank, quantity, value)


def _layout(point: Point, model: Architecture, gpus: int, precision: Precision) -> tuple[TrainingLayout | str, int]:
    """The layout, and the number of sequences per micro-batch."""
    sizes = point.sizes()
    tp, pp, cp = (sizes.get(name, 1) for name in ("tp", "pp", "cp"))
    if "dp" not in sizes and gpus % (tp * pp * cp):
        return f"tp x pp x cp = {tp * pp * cp} does not divide {gpus} GPUs", 1
    dp = sizes.get("dp") or gpus // (tp * pp * cp)
    if tp * pp * cp * dp != gpus:
        return f"tp x pp x cp x dp is {tp * pp * cp * dp}, not the {gpus} GPUs", 1
    if pp > model.layers:
        return f"{pp} pipeline stages for {model.layers} layers", 1
    fsdp, ep = sizes.get("fsdp", 1), sizes.get("ep", 1)
    if fsdp > dp * cp or (tp * dp * cp) % ep:
        return "fsdp does not lie inside dp x cp, or ep inside tp x cp x dp", 1
    recompute = point.recompute()
    if fsdp > 1 and point.get("recompute") == "selective":
        recompute = ("selective_op",)
    stored = point.text("precision") == "fp16"
    parallel = point.flag("sequence_parallel")
    if parallel is None:
        parallel = not (stored and "full" in recompute)
    gradients = point.text("grad_dtype") or ("fp32" if fsdp > 1 else "bf16")
    micro = point.integer("micro_batch", 1)
    return TrainingLayout(
        tp=tp, pp=pp, vpp=sizes.get("vpp", UNKNOWN_CHUNKS if pp > 1 else 1), cp=cp, dp=dp, ep=ep, fsdp=fsdp,
        sequence_parallel=parallel, recompute=recompute, precision=precision,
        grad_bytes=GRADIENT_BYTES.get(gradients, 4), fused_attention=not stored), max(1, micro or 1)
