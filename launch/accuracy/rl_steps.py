"""Compares measured RL jobs with `launch.planner.time.step`: each phase, and the whole step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.accuracy.decode import MOST_GPUS
from launch.accuracy.fit import log_error, robust_mean, rounded, search
from launch.accuracy.interface import Predicted, measured
from launch.accuracy.machine import plain_cluster
from launch.accuracy.points import Point
from launch.cluster.spec import Gpu
from launch.coefficients.rl import RlCoefficients
from launch.coefficients.training import TrainingCoefficients
from launch.errors import UserError
from launch.model.architecture import Architecture
from launch.plan.layouts import Precision, RolloutLayout, TrainingLayout
from launch.planner.memory.activations import TrainerEngine
from launch.planner.memory.rollout import RolloutMemory
from launch.planner.memory.training import training_memory
from launch.planner.parameters import count, tensor_count
from launch.planner.time.decode import Engine
from launch.planner.time.rollout import AsynchronousRollout, Demand, SynchronousRollout
from launch.planner.time.step import (
    Phases,
    StepMode,
    imbalance,
    refit_seconds,
    rollout_seconds,
    step_seconds,
    training_passes,
)
from launch.planner.time.training import logprob_time, training_time
from launch.planner.workload.lengths import Lengths, LogNormal
from launch.planner.workload.work import TrainingWork

QUANTITIES: Mapping[str, str] = {
    "step_time_s": "s", "rollout_time_s": "s", "generate_time_s": "s", "train_time_s": "s", "logprob_time_s": "s",
    "reference_logprob_time_s": "s", "refit_time_s": "s"}

SIGMA = 0.6
"""Shape of the response lengths, which no source states. A short tail fits these points best."""
RESPONSE = 1050
"""Mean response tokens if not stated. Sources that state it have 395 to 5,698, and this value fits the points without a
length best. Such a point is predicted, its reason says so, and it is not used to calibrate."""
PROMPT = 130
"""Mean prompt tokens if not stated: the middle of the stated values (103 to 174)."""
MAX_NUM_SEQS = 1024
"""Default of vLLM's V1 engine on GPUs with 70 GB and more."""
UTILIZATION = {"colocated_sync": 0.6, "one_step_off": 0.85, "fully_async": 0.85}
"""Share of the GPU's memory that engines take if not stated: next to a trainer, and alone."""
MODES: Mapping[str, StepMode] = {
    "colocated_sync": "synchronous", "one_step_off": "one_step_off", "fully_async": "fully_async"}

TYPICAL = {"train_efficiency": 0.7, "mixture_efficiency": 0.5, "update_s": 1.0, "logprob_factor": 1.2,
           "rollout_efficiency": 0.9, "response_s": 2e-3, "other_share": 0.03, "refit_s": 2.0, "refit_tensor_s": 3e-4,
           "refit_bandwidth": 1e10}
LIMITS = {"train_efficiency": (0.2, 1.0), "mixture_efficiency": (0.1, 1.0), "rollout_efficiency": (0.4, 1.1),
          "other_share": (0.005, 0.1), "update_s": (0.05, 4.0), "response_s": (1e-4, 1e-2)}
SPREAD = 0.15
"""Minimum half-width of a range."""
HOLD = 0.003
"""Weight of staying near `TYPICAL`, as in `launch.accuracy.decode`."""


def default() -> RlCoefficients:
    return RlCoefficients()


def predict(point: Point, coefficients: RlCoefficients) -> list[Predicted]:
    """Predict the step and each phase that the source lists."""
    values = _measured(point)
    if not values:
        return []
    job = _job(point)
    if isinstance(job, str):
        return [measured(quantity, value, None, job) for quantity, value in values.items()]
    predicted = _phases(job, coefficients)
    return [measured(quantity, value, predicted[quantity], job.assumed) for quantity, value in values.items()]


def calibrate(points: Sequence[Point], start: RlCoefficients) -> RlCoefficients:
    """Fit the coefficients in `TYPICAL` to all phases and steps, with equal weight per point, then the ranges."""
    found = [(job, _measured(point)) for point in points if point.calibrates
             for job in [_job(point)] if not isinstance(job, str) and not job.assumed]
    if not found:
        return start

    def cost(values: Mapping[str, float]) -> float:
        coefficients = start.changed(dict(values))
        errors = []
        for job, seconds in found:
            predicted = _phases(job, coefficients)
            errors.append(robust_mean([log_error(predicted[name], value) for name, value in seconds.items()]))
        return sum(errors) / len(errors) + HOLD * sum(log_error(values[name], TYPICAL[name]) ** 2 for name in values)

    best = start.changed(rounded(search(cost, TYPICAL, bounds=LIMITS, step=0.3, evaluations=600)))
    return best.changed(rounded(_ranges(found, best), 2))


def _ranges(found: Sequence[tuple[_Job, Mapping[str, float]]], c: RlCoefficients) -> dict[str, float]:
    """Quartiles of the values that fit single points, at least `SPREAD` on either side of the fitted value."""
    wanted: dict[str, list[float]] = {"train_efficiency": [], "logprob_factor": [], "rollout_efficiency": []}
    for job, seconds in found:
        predicted = _phases(job, c)
        for name, quantity, direction in (
                ("train_efficiency", "train_time_s", -1), ("logprob_factor", "logprob_time_s", 1),
                ("rollout_efficiency", "rollout_time_s", -1)):
            if quantity in seconds:
                ratio = seconds[quantity] / predicted[quantity]
                wanted[name].append(getattr(c, name) * ratio ** direction)
    ranges = {}
    for name, values in wanted.items():
        values, fitted = sorted(values), getattr(c, name)
        ranges[f"{name}_low"] = min([fitted * (1 - SPREAD), *values[len(values) // 4:][:1]])
        ranges[f"{name}_high"] = max([fitted * (1 + SPREAD), *values[:len(values) - len(values) // 4][-1:]])
    return ranges


def _measured(point: Point) -> dict[str, float]:
    """Quantity -> seconds. Waiting times (`rollout_wait_s`) are differences of overlapping phases and are left out.

    Some sources list the reference's pass separately and some include it in the log-probs. `logprob_time_s` is the time
    of both, so that its prediction does not depend on how they are listed.
    """
    listed = {name: point.number(f"measured.{name}") for name in QUANTITIES}
    values = {name: value for name, value in listed.items() if value is not None and value > 0}
    if "logprob_time_s" in values and _keeps_reference(point):
        values["logprob_time_s"] += values.get("reference_logprob_time_s", 0.0)
    return values


@dataclass(frozen=True)
class _Job:
    """A point in the model's terms, with the parts that do not depend on this model's coefficients."""

    mode: StepMode
    mixture: bool
    updates: int
    responses: int
    training_s: float
    forward_s: float
    uneven: float
    generation_s: float
    waits_for_all: bool
    passes: tuple[int, int]
    """Log-prob passes over the policy and over the reference."""
    model_bytes: float
    tensors: int
    assumed: str
    """Assumption of the prediction about something that the source does not state."""


def _phases(job: _Job, c: RlCoefficients) -> dict[str, float]:
    trainer = training_passes(job.training_s, job.forward_s, job.updates, uneven=job.uneven, mixture=job.mixture,
                              coefficients=c)
    phases = Phases(rollout_seconds(job.generation_s, job.responses, c), trainer.train_s,
                    job.passes[0] * trainer.pass_s, job.passes[1] * trainer.pass_s,
                    refit_seconds(job.model_bytes, job.tensors, c))
    mode = "synchronous" if job.waits_for_all else job.mode
    return {"step_time_s": step_seconds(mode, phases, c), "rollout_time_s": phases.rollout_s,
            "generate_time_s": job.generation_s / c.rollout_efficiency, "train_time_s": phases.train_s,
            "logprob_time_s": max(1, sum(job.passes)) * trainer.pass_s, "reference_logprob_time_s": trainer.pass_s,
            "refit_time_s": phases.refit_s}


def _job(point: Point) -> _Job | str:
    """The point in the model's terms, or the reason why there is none."""
    if point.model is None or point.gpu is None:
        return point.model_problem or point.gpu_problem
    mode = MODES.get(point.text("mode") or "")
    if mode is None:
        return f"mode {point.text('mode', 'not stated')} is not modelled"
    responses, longest = point.integer("rollouts_per_step", 0), point.integer("max_seq_len")
    train_gpus = point.integer("num_gpus_train") or point.num_gpus or 0
    rollout_gpus = point.integer("num_gpus_rollout") or point.num_gpus or 0
    if not all(0 < count <= most for count, most in (
            (responses, 1 << 24), (train_gpus, MOST_GPUS), (rollout_gpus, MOST_GPUS))):
        return "responses of a step, or the number of GPUs, are not stated"
    found = _lengths(point, longest)
    if isinstance(found, str):
        return found
    prompt, lengths, assumed = found
    updates = point.integer("optimizer_steps_per_batch") or max(
        1, responses // (point.integer("global_batch") or responses))
    group = point.integer("samples_per_prompt") or 1
    budget = longest or round(prompt + lengths.cap)
    cluster = plain_cluster(point, point.gpu, max(train_gpus, rollout_gpus))
    layout = _trainer_layout(point, point.model, point.gpu, train_gpus, budget)
    if layout is None:
        return "no training layout fits"
    work = _work(responses // updates, prompt, lengths, layout, budget)
    training_s = training_time(point.model, layout, work, cluster, TrainingCoefficients()).total_s
    forward_s = logprob_time(point.model, layout, work, cluster, TrainingCoefficients()).total_s
    engines = _engines(point, point.model, point.gpu, rollout_gpus, budget)
    stale = mode == "fully_async" and point.number("staleness", 1.0)
    generate = AsynchronousRollout if stale else SynchronousRollout
    times = [generate(Engine(point.model, engine, cluster),
                      Demand(max(1, responses // group), group, prompt, lengths, engine.replicas, MAX_NUM_SEQS, cache)
                      ).total_s for engine, cache in engines]
    if not times:
        return "no engine layout holds one sequence"
    return _Job(mode, bool(point.model.experts), updates, responses, training_s, forward_s,
                imbalance(lengths, prompt, responses / updates, layout.dp), min(times),
                mode == "fully_async" and point.number("staleness") == 0, _passes(point), 2.0 * count(point.model),
                tensor_count(point.model), assumed)


def _lengths(point: Point, longest: int | None) -> tuple[float, Lengths, str] | str:
    """(mean prompt, lengths of the responses, assumption about them), or the reason why there are none."""
    mean, total = point.number("mean_generated_tokens"), point.number("derived.mean_total_tokens")
    prompt = total - mean if mean and total and total > mean else PROMPT
    if mean is None and total is not None:
        mean = total - prompt
    assumed = ""
    if mean is None:
        mean = RESPONSE
        assumed = f"mean response length not stated, {mean} tokens assumed"
        if longest is not None:
            mean = min(mean, (longest - prompt) / 2)
    cap = round((longest or 8 * (mean + prompt)) - prompt)
    try:
        return prompt, LogNormal(mean, SIGMA, cap), assumed
    except UserError as error:
        return error.what


def _trainer_layout(point: Point, model: Architecture, gpu: Gpu, gpus: int, budget: int) -> TrainingLayout | None:
    """The stated layout, or the smallest one that fits if TP or PP is not stated."""
    sizes, fsdp = point.sizes(), _is_fsdp(point.text("framework") or "")
    cp = sizes.get("cp", 1) * sizes.get("sp", 1)        # Ulysses splits sequences like CP
    stated = "tp" in sizes and "pp" in sizes
    tps, pps = ([sizes["tp"]], [sizes["pp"]]) if stated else ([1, 2, 4, 8], [1, 2, 4, 8, 16])
    tried = sorted((tp * pp, pp, tp) for tp in tps for pp in pps if gpus % (tp * pp * cp) == 0)
    for _, pp, tp in tried:
        dp = gpus // (tp * pp * cp)
        ep = sizes.get("ep", 1 if not model.experts else min(8, dp * cp))
        layout = TrainingLayout(tp=tp, pp=pp, vpp=sizes.get("vpp", 1), cp=cp, dp=dp, ep=ep, fsdp=dp if fsdp else 1,
                                recompute=point.recompute(), precision=_precision(point, "train"))
        engine: TrainerEngine = "fsdp" if fsdp else "megatron"
        if stated or training_memory(model, layout, budget, gpu, engine=engine).fits:
            return layout
    return None


def _precision(point: Point, role: str) -> Precision:
    return "fp8" if (point.text(f"precision.{role}") or "").lower().startswith("fp8") else "bf16"


def _is_fsdp(framework: str) -> bool:
    """Whether the trainer's engine class is `fsdp` (PyTorch's, NeMo's DTensor), not Megatron."""
    return re.search(r"fsdp|dtensor", framework, re.IGNORECASE) is not None


def _work(sequences: int, prompt: float, lengths: Lengths, layout: TrainingLayout, budget: int) -> TrainingWork:
    """The work of sequences packed into micro-batches of at most `budget` tokens."""
    mean = prompt + lengths.mean
    tokens = round(sequences * mean)
    fill = max(0.5, 1 - mean / (2 * budget)) if sequences > layout.dp else 1.0
    micro_batches = max(1, round(tokens / (layout.dp * budget * fill) + 0.499))
    return TrainingWork(sequences=sequences, tokens=tokens, attention_length=lengths.attention_length(prompt),
                        micro_batch_tokens=max(1, round(tokens / (layout.dp * micro_batches))),
                        micro_batches=micro_batches, longest=budget)


def _engines(point: Point, model: Architecture, gpu: Gpu, gpus: int, longest: int) -> list[tuple[RolloutLayout, int]]:
    """Engines as stated, with the capacity of their KV cache in tokens. If their TP is not stated, all sizes that hold
    one sequence."""
    sizes = point.sizes("rollout_parallelism")
    pp = sizes.get("pp", 1)
    share = point.number("rollout_gpu_memory_utilization", UTILIZATION[point.text("mode") or ""])
    found = []
    for tp in [sizes["tp"]] if "tp" in sizes else [1, 2, 4, 8]:
        layout = RolloutLayout(tp=tp, pp=pp, replicas=max(1, gpus // (tp * pp)),
                               weight_precision=_precision(point, "rollout"), max_num_seqs=MAX_NUM_SEQS,
                               memory_utilization=share)
        cache = RolloutMemory(model, layout, gpu).kv_tokens
        if cache >= longest:
            found.append((layout, cache))
    return found


def _passes(point: Point) -> tuple[int, int]:
    """Log-prob passes of a step over the policy and over the reference, from the configuration alone. Fully
    asynchronous runs use the engine's log-probs."""
    return int(point.text("mode") != "fully_async"), int(_keeps_reference(point))


def _keeps_reference(point: Point) -> bool:
    """GRPO as published has a KL term (arXiv 2402.03300), DAPO has none (arXiv 2503.14476)."""
    return (point.text("algorithm") or "").upper() == "GRPO"
