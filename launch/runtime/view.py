"""Feeds the display of a launcher from what the job writes into its attempt's folder."""

from __future__ import annotations

from pathlib import Path

from launch.run.metrics import JsonlTail, MetricsTail
from launch.report.run.progress import Progress
from launch.run import progress as progress_file


class View:
    """Shows phases, steps and warnings as they appear."""

    def __init__(self, folder: Path, display: Progress) -> None:
        self._folder, self._display, self._said = folder, display, ""
        self._metrics, self._warnings = MetricsTail(folder / "metrics.jsonl"), JsonlTail(folder / "warnings.jsonl")

    def update(self) -> None:
        """Show what is new."""
        progress = progress_file.read_progress(self._folder)
        if progress and (progress.step == 0 or progress.phase in progress_file.AFTER_THE_STEP):
            text = f"{progress.phase}: {progress.detail}"
            if text != self._said:
                self._display.phase(text)
            self._said = text
        for row in self._metrics.poll():
            self._display.step(int(row["step"]), row)
        for warning in self._warnings.poll():
            self._display.message(f"warning {warning['code']}: {warning['message']}")
