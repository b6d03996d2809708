"""A run as input of the calibration: its plan, its measurements, and the plan computed again for other coefficients."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from launch.cluster import gpus
from launch.cluster.spec import ClusterSpec
from launch.errors import UserError
from launch.plan.forecast import Forecast
from launch.plan.plan import ForecastPlan, read_plan
from launch.planner.calibrate.measured import KINDS, WARM_UP, mean_of, seconds, steady
from launch.planner.from_config import problem_of_attempt
from launch.planner.here import pinned_candidate
from launch.planner.search.candidate import Candidate
from launch.planner.search.problem import Problem
from launch.run.metrics import attempt_dirs, metric_rows

FEWEST_TO_FIT = 4
"""Minimum number of steps after the warm-up."""


@dataclass(frozen=True)
class CalibrationRun:
    """One attempt."""

    name: str
    """The path that the user gave: the source of the measurements."""
    problem: Problem
    """The problem on the cluster of the run's plan, without coefficients, with the lengths of the run."""
    plan: ForecastPlan
    steps: int
    measured: dict[str, float]
    """Median seconds by the names of `launch.planner.calibrate.measured.KINDS`."""
    transfer_s: float | None
    """Median seconds of the sync's transfer alone."""
    response_tokens: float
    prompt_tokens: float
    """Means."""

    def candidate(self, spec: ClusterSpec) -> Candidate:
        """The run's plan with the coefficients of `spec`, on the machine of the run's plan."""
        own = self.problem.cluster
        same = len(own.nodes) == len(spec.nodes)
        machine = replace(spec, nodes=spec.nodes if same else own.nodes, switches=spec.switches if same else (),
                          gpus_per_node=own.gpus_per_node, gpu=own.gpu, nics_per_node=own.nics_per_node,
                          rails=own.rails, nic_bandwidth=own.nic_bandwidth)
        return pinned_candidate(self.problem.on(machine), self.plan, self.plan.forecast.split.mode)


def read_run(path: Path) -> CalibrationRun:
    """Read the only attempt of a run, or the attempt at `path`.

    Raises:
        UserError: `path` is not a run, has several attempts, no plan or no metrics, is asynchronous, or has too few
            steps.
    """
    attempt = _attempt(path)
    plan = _plan(attempt)
    if plan.forecast.asynchronous:
        raise UserError(f"{path} is asynchronous: its phases overlap, so the time of a phase is not its work",
                        where=str(attempt), fix="calibrate with a synchronous run of the same model")
    metrics = attempt / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"{path} has measured nothing: it holds no metrics.jsonl", where=str(metrics),
                        fix="calibrate with a run that has finished several steps")
    rows = steady(metric_rows(metrics))
    if len(rows) < FEWEST_TO_FIT:
        raise UserError(f"{path} has {len(rows)} steps after the {WARM_UP} of the warm-up, a calibration needs "
                        f"{FEWEST_TO_FIT}", where=str(metrics),
                        fix=f"calibrate with a run of at least {WARM_UP + FEWEST_TO_FIT} steps, better 20")
    response, prompt = mean_of(rows, "response/length_mean"), mean_of(rows, "prompt/length_mean")
    if not response or not prompt:
        raise UserError(f"{path} does not say how long its prompts and responses were", where=str(metrics),
                        fix="calibrate with a run that logs response/length_mean and prompt/length_mean")
    problem = problem_of_attempt(attempt / "config.yaml", plan, _machine(plan.forecast))
    measured = {kind.name: median(times) for kind in KINDS
                if (times := seconds(rows, kind.metrics)) and median(times) > 0}
    transfers = seconds(rows, ("sync/seconds",))
    return CalibrationRun(
        name=str(path), problem=replace(problem, workload=problem.workload.with_means(response, prompt)), plan=plan,
        steps=len(rows), measured=measured, transfer_s=median(transfers) if transfers else None,
        response_tokens=response, prompt_tokens=prompt)


def _attempt(path: Path) -> Path:
    if path.parent.name == "attempts" and path.name.isdecimal() and path.is_dir():
        return path
    attempts = attempt_dirs(path)
    if len(attempts) > 1:
        held = ", ".join(f"{each.name}: {len(metric_rows(each / 'metrics.jsonl'))} steps" for each in attempts)
        raise UserError(f"{path} has {len(attempts)} attempts, each with a plan of its own ({held})", where=str(path),
                        fix=f"name one of them: {attempts[-1]}")
    return attempts[0]


def _machine(forecast: Forecast) -> ClusterSpec:
    """The cluster that a plan describes."""
    facts, numbers = forecast.cluster, {each.key: each.value for each in forecast.numbers}
    gpu = gpus.find(facts.gpu)
    rates = {each.name: type(getattr(gpu, each.name))(numbers[f"gpu.{each.name}"]) for each in fields(gpu)
             if f"gpu.{each.name}" in numbers}
    return ClusterSpec(name=facts.name, nodes=tuple(f"node{number}" for number in range(facts.nodes)),
                       gpus_per_node=facts.gpus_per_node, gpu=replace(gpu, **rates), nics_per_node=facts.nics_per_node,
                       nic_bandwidth=facts.nic_bandwidth, rails=facts.rails, host_memory_bytes=0)


def _plan(attempt: Path) -> ForecastPlan:
    file = attempt / "plan.json"
    fix = "calibrate with a run that this version of the program made"
    try:
        plan = read_plan(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"{attempt} holds no plan.json", where=str(file), fix=fix) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}", where=str(file), fix="make it readable") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{file} is not a plan that this program reads: {'.'.join(map(str, first['loc']))}: "
                        f"{first['msg']}", where=str(file), fix=fix) from error
    if not isinstance(plan, ForecastPlan):
        raise UserError(f"{file} predicts nothing", where=str(file), fix=fix)
    return plan
