"""The reward side of the loop: a pool, and the handling of samples whose reward failed."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from launch.config.schema import Reward as RewardConfig
from launch.errors import UserError
from megatron_rl.rewards.pool import RewardFailure, RewardPool
from megatron_rl.rewards.sample import ABORTED, Sample, Score

log = logging.getLogger(__name__)

SAVED_AT_MOST = 50
"""Maximum number of failed samples that a worker saves with `reward.on_error: zero`."""


class RewardWorker:
    """Scores samples as configured. It is a plain class; the driver puts one into a Ray actor on each training node.
    Several threads may call `score`.

    Args:
        config: the `reward` section.
        attempt_dir: failed samples are saved in `<attempt_dir>/failed_samples/`.
        index: number of this worker among those of the attempt.
        log_dir: folder for the output of the worker processes; default `<attempt_dir>/logs`.
        columns: names of the data's further columns, if known.
    """

    def __init__(self, config: RewardConfig, attempt_dir: str | Path, *, index: int = 0,
                 log_dir: str | Path | None = None, columns: Sequence[str] | None = None) -> None:
        self._config, self._index = config, index
        self._failed_dir = Path(attempt_dir) / "failed_samples"
        self._log_dir = Path(log_dir) if log_dir else Path(attempt_dir) / "logs"
        self._columns = columns
        self._pool: RewardPool | None = None
        self._saved, self._lock = 0, threading.Lock()

    def start(self) -> None:
        """Load the rewards, run their guards and start the processes.

        Raises:
            UserError: see `RewardPool.start`.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._pool = RewardPool(self._config, columns=self._columns, log_dir=self._log_dir,
                                first=self._index * self._config.workers)
        self._pool.start()

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """The score of every sample, in the given order.

        A sample without a reward (NaN) keeps its status, so that the caller can leave it out and count it: one whose
        reward failed, with `on_error: zero`, and one that an engine aborted, which no reward sees.

        Raises:
            UserError: with `on_error: stop`, at the first sample whose reward raises or hangs.
        """
        if self._pool is None:
            raise RuntimeError("RewardWorker.score before start, or after close")
        whole = [sample for sample in samples if sample.finish_reason != "abort"]
        try:
            scores = self._pool.score(whole, stop_on_failure=self._config.on_error == "stop")
        except RewardFailure as failure:
            sample = whole[failure.index]
            raise self._stop(sample, failure.score, self._save(sample, failure.score)) from None
        failed = [i for i, score in enumerate(scores) if score.reward_failed]
        for i in failed:
            if self._saved < SAVED_AT_MOST:
                path = self._save(whole[i], scores[i])
                log.warning("reward of %s: %s: %s (saved as %s)", whole[i].name, scores[i].status,
                            scores[i].detail, path)
        if failed:
            log.warning("the reward of %d of %d samples failed: they are left out", len(failed), len(samples))
        of_whole = iter(scores)
        return [ABORTED if sample.finish_reason == "abort" else next(of_whole) for sample in samples]

    def close(self) -> None:
        """End the worker processes. May be called twice."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _save(self, sample: Sample, score: Score) -> Path:
        self._failed_dir.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._saved += 1
            name = f"reward-{self._index}-{self._saved:03d}"
        path = self._failed_dir / f"{name}-prompt{sample.prompt_index}-sample{sample.sample_index}.json"
        content = {"function": score.function, "status": score.status, "detail": score.detail,
                   "components": score.components, "sample": dataclasses.asdict(sample)}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=repr) + "\n", encoding="utf-8")
        return path

    def _stop(self, sample: Sample, score: Score, path: Path) -> UserError:
        function = score.function or "/".join(entry.function for entry in self._config.functions)
        what = "hangs" if score.status == "timeout" else "fails"
        return UserError(
            f"reward {function!r} {what} on {sample.name}: {score.detail}",
            where=f"reward.functions: {function}; the sample is saved as {path}",
            fix="correct the reward or the data row"
                + (f", raise reward.timeout_s (now {self._config.timeout_s:g})" if score.status == "timeout" else "")
                + ", or set reward.on_error: zero to leave such samples out")
