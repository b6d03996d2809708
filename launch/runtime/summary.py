"""The final output of a job: how it ended, the reward curve, the paths of its results, plan against measured, or the
first error and its log."""

from __future__ import annotations

import sys
from pathlib import Path

from launch.files.shared import write_atomically
from launch.report.run.html import write_report
from launch.report.run.plan_vs_measured import FILE, comparison_text, of_attempt
from launch.report.run.terminal import closing_summary
from launch.run.attempts import Attempt
from launch.run.metrics import attempt_dirs, metric_history
from launch.run.outcome import Outcome

LOG_TAIL_LINES = 15
REHEARSAL = "rehearsal.txt"
"""The result of a rehearsal (`launch.runtime.rehearsal`), which trains no model."""


def print_end(attempt: Attempt, outcome: Outcome) -> None:
    """Write the report and print the end of an attempt: the summary to stdout, a failure to stderr."""
    history = metric_history(attempt_dirs(attempt.run_folder))
    compared = of_attempt(attempt.folder)
    if compared is not None:
        write_atomically(attempt.folder / FILE, compared.model_dump_json(indent=2) + "\n")
    if history:
        report = write_report(attempt.run_folder)
        print(closing_summary(attempt.run_folder, history, report))
        if compared is not None:
            print(comparison_text(compared))
    if outcome.groups is not None:
        print(f"groups       {outcome.groups}")
    rehearsal = attempt.folder / REHEARSAL
    if rehearsal.exists():
        print(rehearsal.read_text(encoding="utf-8"))
    if outcome.status == "finished" and rehearsal.exists():
        print(f"rehearsed    {attempt.folder}")
    elif outcome.status == "finished":
        exported = attempt.exported(outcome.step)
        if exported.exists():
            print(f"model        {exported}")
        print(f"finished     {outcome.step} steps")
    elif outcome.status == "stopped" and outcome.message:
        print(f"stopped      {outcome.message}")
    elif outcome.status == "stopped":
        print(f"stopped      after step {outcome.step}, with a checkpoint; `megatron-rl launch` resumes it with "
              f"run.name={attempt.run_folder.name}, without --fresh")
    else:
        sys.stdout.flush()
        print(failure_text(outcome), file=sys.stderr)


def failure_text(outcome: Outcome) -> str:
    """The message of a failed attempt, with the end of the guilty process's log unless it is a user error."""
    head = "error" if outcome.status == "user_error" else outcome.status
    lines = [f"{head}: {outcome.message}"]
    if outcome.log:
        lines.append(f"  log:   {outcome.log}")
        if outcome.status != "user_error":
            lines += [f"    | {line}" for line in _tail(Path(outcome.log))]
    return "\n".join(lines)


def _tail(path: Path) -> list[str]:
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
