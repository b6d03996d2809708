"""The loop's one object for metrics: it passes a step's metrics to every writer and detector."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from launch.config.resolved import ResolvedConfig
from launch.run.metrics import attempt_dirs, metric_history
from megatron_rl.data.batch import Group
from megatron_rl.monitor.divergence import Detectors, TrainingWarning
from megatron_rl.monitor.metrics import check_names
from megatron_rl.monitor.samples import RolloutWriter, SampleWriter
from megatron_rl.monitor.writers import JsonlWriter, TensorBoardWriter, WandbWriter, Writer, json_number
from megatron_rl.rewards.sample import Score

log = logging.getLogger(__name__)


class Monitor:
    """Metrics, samples and warnings of one attempt.

    It writes metrics.jsonl, samples.jsonl, rollouts/ and warnings.jsonl in `attempt_dir` (runs/<name>/attempts/<n>).
    TensorBoard's files are in runs/<name>/tensorboard, shared by all attempts. `first_step` is the first step this
    attempt will log.
    """

    def __init__(self, config: ResolvedConfig, attempt_dir: Path, *, first_step: int = 1) -> None:
        run_dir = attempt_dir.parent.parent
        attempt_dir.mkdir(parents=True, exist_ok=True)
        earlier = [row for row in metric_history(attempt_dirs(run_dir)) if row["step"] < first_step]
        self._warned: set[str] = set()
        self._step = first_step - 1
        self._warnings = attempt_dir / "warnings.jsonl"
        self._detectors = Detectors(earlier)
        self._samples = SampleWriter(attempt_dir / "samples.jsonl", config.monitor.samples_every)
        self._rollouts = RolloutWriter(attempt_dir / "rollouts", config.monitor.rollouts_every)
        self._writers: list[Writer] = [JsonlWriter(attempt_dir / "metrics.jsonl")]
        if config.monitor.tensorboard:
            self._writers.append(TensorBoardWriter(run_dir / "tensorboard", first_step,
                                                   {"config": config.model_dump_json(indent=2)}))
        if config.monitor.wandb_project:
            self._writers.append(WandbWriter(config.monitor.wandb_project, config.run.name, run_dir,
                                             config.model_dump(mode="json")))

    def log(self, step: int, metrics: Mapping[str, float]) -> list[TrainingWarning]:
        """Write one step, with rising step numbers. Returns the new warnings, which are already logged and written. A
        name outside the table is logged once."""
        check_names(metrics, self._warned)
        self._step = step
        for writer in self._writers:
            writer.write(step, metrics)
        warnings = self._detectors.check({"step": step, **metrics})
        for warning in warnings:
            self._tell(warning)
        return warnings

    def note(self, code: str, message: str, evidence: Mapping[str, float] | None = None, *,
             step: int | None = None) -> TrainingWarning:
        """Record a warning that no detector made, such as a setting changed by a resume. It is logged, written and
        shown like a detector's, at `step`. Default: the last logged step, or the one that the attempt continues from.
        """
        warning = TrainingWarning(code, self._step if step is None else step, message, dict(evidence or {}))
        self._tell(warning)
        return warning

    def _tell(self, warning: TrainingWarning) -> None:
        log.warning("%s", warning)
        evidence = {name: json_number(value) for name, value in warning.evidence.items()}
        with self._warnings.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(warning) | {"evidence": evidence}, allow_nan=False) + "\n")

    def samples(self, step: int, groups: Sequence[Group], rewards: Sequence[np.ndarray]) -> None:
        """Write trajectories for people, on the steps selected by `monitor.samples_every`."""
        self._samples.write(step, groups, rewards)

    async def rollouts(self, step: int, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> None:
        """Write the whole rollout batch, on the steps selected by `monitor.rollouts_every`. A batch has millions of
        tokens, and generation goes on meanwhile: a thread writes it."""
        if self._rollouts.due(step):
            await asyncio.to_thread(self._rollouts.write, step, groups, scores)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
