"""`megatron-rl doctor` as text, at most 100 columns."""

from __future__ import annotations

from launch.report.diagnose.doctor import Diagnosis, Finding
from launch.report.lines import WIDTH, field

MOST = 3
"""Causes that are shown in full."""


def doctor_text(diagnosis: Diagnosis) -> str:
    """What is known, the causes with their remedies, and where to look for more."""
    lines = [field("run", _who(diagnosis))]
    if diagnosis.slurm:
        meaning = f": {diagnosis.exit_meaning}" if diagnosis.exit_meaning else ""
        lines.append(field("slurm", diagnosis.slurm + meaning))
    elif diagnosis.job and diagnosis.why_no_slurm:
        lines.append(field("slurm", f"no record: {diagnosis.why_no_slurm}"))
    if diagnosis.outcome:
        lines.append(field("outcome", _first_lines(diagnosis.outcome, 3)))
    if not diagnosis.findings and diagnosis.first is None and _well(diagnosis):
        lines.append(field("cause", "no problem found"))
        return "\n".join(lines)
    if diagnosis.causes:
        for number, finding in enumerate(diagnosis.causes[:MOST]):
            lines += ["", *_finding(finding, "cause" if number == 0 else "also")]
    others = [each for each in diagnosis.findings if each not in diagnosis.causes[:MOST]]
    if others:
        lines += ["", field("also seen", ", ".join(each.code for each in others))]
    if not diagnosis.known:
        unknown = "unknown beyond that: no other entry" if diagnosis.causes else "unknown: no entry"
        lines += ["", field("cause", f"{unknown} in the table of known failures explains this")]
    if diagnosis.first is not None and (not diagnosis.known or _tells_more(diagnosis)):
        lines.append(field("first error", f"{diagnosis.first.who}: {_first_lines(diagnosis.first.summary, 2)}"))
    if not diagnosis.known:
        lines += [field("look at" if number == 0 else "", place) for number, place in enumerate(diagnosis.look_at)]
    return "\n".join(lines)


def _finding(finding: Finding, label: str) -> list[str]:
    seen = f" (seen {finding.times} times)" if finding.times > 1 else ""
    return [field(label, f"{finding.code}: {finding.cause}"), field("remedy", finding.remedy),
            field("evidence", finding.evidence[:2 * WIDTH] + seen), field("", finding.where),
            field("more", finding.page)]


def _who(diagnosis: Diagnosis) -> str:
    parts = [diagnosis.run]
    if diagnosis.attempt is not None:
        parts.append(f"attempt {diagnosis.attempt}")
    if diagnosis.job is not None and diagnosis.job != diagnosis.run:
        parts.append(f"job {diagnosis.job}")
    return ", ".join(parts)


def _well(diagnosis: Diagnosis) -> bool:
    return diagnosis.outcome.startswith(("finished", "stopped")) or diagnosis.slurm.startswith(
        ("RUNNING", "COMPLETED", "PENDING", "COMPLETING")) or not (diagnosis.slurm or diagnosis.outcome)


def _tells_more(diagnosis: Diagnosis) -> bool:
    """Whether the first error is not already the evidence of a cause."""
    summary = diagnosis.first.summary.splitlines()[0][:80] if diagnosis.first and diagnosis.first.summary else ""
    return not any(summary and summary in finding.evidence for finding in diagnosis.causes)


def _first_lines(text: str, count: int) -> str:
    lines = text.strip().splitlines()
    return "\n".join(lines[:count])
