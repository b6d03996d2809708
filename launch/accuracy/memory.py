"""Compares measured memory of training runs, and whether they fitted, with `launch.planner.memory.training`.

Fields that a point omits get the default of the engine class: no recomputation (FSDP programs: per-operator selective),
gradients accumulated in fp32 (bf16 in FP8 runs), sequence parallelism with TP, the distributed optimizer, whole experts
(expert TP 1), no expandable segments. GELU models are GPT-2 blocks: biases everywhere, and as many learned positions as
the sequence is long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launch.accuracy.fit import log_error, robust_mean, rounded, search
from launch.accuracy.interface import Predicted, measured
from launch.accuracy.points import Point
from launch.cluster.gpus import H100
from launch.cluster.spec import Gpu
from launch.coefficients.memory import MemoryCoefficients
from launch.model.architecture import Architecture
from launch.plan.layouts import Precision, RolloutLayout, TrainingLayout
from launch.planner.memory.activations import TrainerEngine
from launch.planner.memory.rollout import ColocatedMemory, RolloutMemory
from launch.planner.memory.training import MANY, StageMemory, TrainingMemory, training_memory

QUANTITIES: Mapping[str, str] = {"peak_memory_bytes": "bytes", "peak_reserved_bytes": "bytes",
                                 "steady_allocated_bytes": "bytes", "fits": ""}
STAGE_BYTES = {"peak_memory_bytes": "allocated", "peak_reserved_bytes": "reserved",
               "steady_allocated_bytes": "resident"}
"""Quantity -> field of `StageMemory`."""
TYPICAL = {"slack_share": 0.05, "fragmentation_share": 0.1}
"""Start of the search, and the value of a share that no point constrains."""
GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
LORA_RANK = 16
"""Rank of a LoRA run that does not state it."""
ENOUGH = 1.5
"""The fragmentation share is this many times the smallest one that explains the known out-of-memory runs, because a
bound is not an estimate."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A point in the model's terms."""

    shape: Architecture
    layout: TrainingLayout
    engine: TrainerEngine
    tokens: int
    """Tokens of a micro-batch, over all its CP ranks."""
    micro_batches: int


def default() -> MemoryCoefficients:
    return MemoryCoefficients()


def predict(point: Point, coefficients: MemoryCoefficients) -> list[Predicted]:
    """Predict each measured quantity of a memory point."""
    listed = {name: point.number(f"measured.{name}") for name in STAGE_BYTES}
    known = {name: value for name, value in listed.items() if value is not None}
    fitted = _fitted(point)
    setup, problem = _setup(point)
    if setup is None:
        return [measured(name, value, None, problem) for name, value in known.items()] + (
            [measured("fits", int(fitted), None, problem)] if fitted is not None else [])
    memory = _memory(point, setup, coefficients)
    found = [measured(name, value, _reported(point, memory, STAGE_BYTES[name], value))
             for name, value in known.items()]
    if fitted is not None:
        fits = None if point.gpu is None else int(_fits(point, point.gpu, setup, memory, coefficients))
        found.append(measured("fits", int(fitted), fits, point.gpu_problem))
    return found


def calibrate(points: Sequence[Point], start: MemoryCoefficients) -> MemoryCoefficients:
    """Fit `slack_share` to the reserved peaks without a pipeline, then `fragmentation_share` to the pipelined runs that
    are known to have run out of memory. A coefficient without points keeps its value from `start`."""
    used = [point for point in points if point.calibrates and point.gpu and _setup(point)[0] is not None]

    def cost(values: Mapping[str, float]) -> float:
        tried = start.changed(dict(values))
        return robust_mean([log_error(each.predicted, each.measured_low) for point in reserved
                            for each in predict(point, tried)
                            if each.quantity == "peak_reserved_bytes" and each.predicted is not None])

    reserved = [point for point in used if point.number("measured.peak_reserved_bytes") is not None
                and point.sizes().get("pp", 1) == 1]
    if reserved:
        slack = search(cost, {"slack_share": TYPICAL["slack_share"]}, bounds={"slack_share": (0.01, 0.3)})
        start = start.changed(rounded(slack))
    shares = [share for point in used if _fitted(point) is False and not _colocated(point)
              and (share := _least_fragmentation(point, start)) is not None]
    if shares:
        start = start.changed(rounded({"fragmentation_share": max(0.0, ENOUGH * max(shares))}))
    return start


def _least_fragmentation(point: Point, coefficients: MemoryCoefficients) -> float | None:
    """Smallest share of the activations whose loss explains that the run does not fit."""
    setup = _setup(point)[0]
    if setup is None or setup.layout.pp == 1:
        return None
    memory = _memory(point, setup, coefficients.changed({"fragmentation_share": 0.0}))
    return min((memory.limit - stage.total) / stage.components["activations"] for stage in memory.stages)


def _memory(point: Point, setup: Setup, coefficients: MemoryCoefficients) -> TrainingMemory:
    # The memory of a run does not depend on the GPU; only whether it fits does.
    return training_memory(
        setup.shape, setup.layout, setup.tokens, point.gpu or H100, coefficients, micro_batches=setup.micro_batches,
        engine=setup.engine, dropout=bool(point.number("dropout")),
        lora_rank=point.integer("lora_rank", LORA_RANK) if point.text("task") == "lora" else 0,
        expandable_segments=bool(point.flag("expandable_segments")))


def _setup(point: Point) -> tuple[Setup | None, str]:
    """The point in the model's terms, or the reason why there is none."""
    if point.model is None:
        return None, point.model_problem
    sizes, length = point.sizes(), point.integer("seq_len")
    micro, budget = point.integer("micro_batch"), point.integer("max_tokens_per_micro_batch")
    tokens = micro * length if micro and length else budget or length
    if not tokens:
        return None, "neither seq_len nor max_tokens_per_micro_batch is stated"
    if not sizes:
        return None, "the parallel layout is not stated"
    engine: TrainerEngine = "fsdp" if sizes.get("fsdp", 1) > 1 else "megatron"
    precision = _precision(point)
    layout = TrainingLayout(
        tp=sizes.get("tp", 1), pp=sizes.get("pp", 1), vpp=sizes.get("vpp", 1), cp=sizes.get("cp", 1),
        dp=_dp(point, sizes), ep=sizes.get("ep", 1), etp=sizes.get("etp", 1), fsdp=sizes.get("fsdp", 1),
        sequence_parallel=point.flag("sequence_parallel", True), recompute=_recompute(point, engine),
        precision=precision,
        grad_bytes=GRADIENT_BYTES.get(point.text("grad_dtype") or "", 2 if precision == "fp8" else 4),
        distributed_optimizer=point.flag("distributed_optimizer", True))
    if layout.pp > point.model.layers:
        return None, f"PP {layout.pp} exceeds the {point.model.layers} layers"
    sequences = point.integer("global_batch")
    per_rank = sequences * (length or tokens) // (layout.dp * tokens) if sequences else MANY
    return Setup(_shape(point, point.model), layout, engine, tokens, max(1, per_rank)), ""


def _precision(point: Point) -> Precision:
    text = (point.text("precision") or "bf16").lower()
    return "fp8" if "fp8" in text or "fp4" in text else "fp32" if text in ("fp32", "tf32") else "bf16"


def _dp(point: Point, sizes: Mapping[str, int]) -> int:
    replica = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    return sizes.get("dp") or max(1, (point.num_gpus or replica) // replica)


def _recompute(point: Point, engine: TrainerEngine) -> tuple[str, ...]:
    if engine == "fsdp" and point.text("recompute", "selective").startswith("selective"):
        return ("selective_op",)
    return point.recompute()


def _shape(point: Point, model: Architecture) -> Architecture:
    if point.model_data.get("mlp") != "gelu":
        return model
    return replace(model, all_biases=True, learned_positions=point.integer("seq_len", 0))


def _reported(point: Point, memory: TrainingMemory, field: str, value: float) -> int:
    """The stage that the source's number refers to. If it does not say, the pipeline's end closer to the number."""
    first, last = memory.stages[0], memory.stages[-1]
    rank = (point.text("reported_rank") or "").lower()
    stated: list[StageMemory] = [first, last]
    if not rank.startswith("not stated"):
        stated = [last] if "last" in rank else [first] if "rank 0" in rank or "first" in rank else stated
    return min((getattr(stage, field) for stage in stated), key=lambda predicted: abs(predicted - value))


def _fitted(point: Point) -> bool | None:
    """Whether the run fitted, if the point says so."""
    if (point.text("outcome") or "").startswith("oom"):
        return False
    return point.flag("measured.fits")


def _colocated(point: Point) -> bool:
    return point.number("rollout_gpu_memory_utilization") is not None


def _fits(point: Point, gpu: Gpu, setup: Setup, memory: TrainingMemory, coefficients: MemoryCoefficients) -> bool:
    share = point.number("rollout_gpu_memory_utilization")
    if share is None:       # not colocated
        return memory.fits
    engine = RolloutLayout(tp=point.integer("rollout_tp", 1), memory_utilization=min(1.0, share))
    rollout = RolloutMemory(setup.shape, engine, gpu, coefficients, max_tokens=point.integer("seq_len", 0))
    both = ColocatedMemory(memory, rollout, gpu, coefficients,
                           trainer_offloaded=bool(point.flag("trainer_offload")))
    return both.fits and rollout.fits
