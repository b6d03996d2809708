"""Why a run or job failed or waits. Slurm's record, the outcome, the logs and the ledger are compared with the table of
known failures. If none fits, the diagnosis says so, and gives the first error and places to look."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launch.exit_codes import MEANINGS, ExitCode
from launch.health.ledger import FILE as LEDGER
from launch.health.ledger import Ledger
from launch.report.diagnose import log_lines
from launch.report.diagnose.known import BY_CODE, IN_ANY_LOG, SYMPTOMS, Symptom
from launch.report.diagnose.log_lines import LogFile
from launch.report.diagnose.logs import sources
from launch.report.diagnose.logs_first_error import LoggedError, first_error
from launch.run.attempt_log import read_history
from launch.run.find import Found, read_json
from launch.run.outcome import Outcome, read_outcome
from launch.slurm.records import JobRecord

SCHEMA_VERSION = 1
PENDING = "PENDING"
PAGE = "docs/troubleshooting.md"


@dataclass(frozen=True)
class Finding:
    """A row of the table that fits, with its evidence."""

    code: str
    cause: str
    remedy: str
    evidence: str
    """The line that matched."""
    where: str
    """`file:line`, or the source of the line."""
    page: str
    weight: int
    time: float = 0.0
    times: int = 1
    """Number of log lines that matched."""


@dataclass(frozen=True)
class Diagnosis:
    run: str
    attempt: int | None
    job: str | None
    slurm: str
    """`FAILED NonZeroExitCode exit=1:0 restarts=0`; "" if Slurm was not asked or does not know the job."""
    why_no_slurm: str
    exit_meaning: str
    """Meaning of the job's exit code in this project."""
    outcome: str
    findings: tuple[Finding, ...]
    """The most specific cause first."""
    first: LoggedError | None
    """The first error of all processes."""
    look_at: tuple[str, ...]
    """Files and commands to look at for failures that are not in the table."""

    @property
    def causes(self) -> tuple[Finding, ...]:
        """Findings that are causes. If there are none, the findings that are consequences."""
        best = min((finding.weight for finding in self.findings), default=0)
        return tuple(finding for finding in self.findings if finding.weight <= max(1, best))

    @property
    def known(self) -> bool:
        return any(finding.weight < 2 for finding in self.findings)

    def as_json(self) -> dict:
        return {"schema_version": SCHEMA_VERSION, **asdict(self), "known": self.known}


def diagnose(found: Found, record: JobRecord | None = None, accounted: str = "", why_no_slurm: str = "") -> Diagnosis:
    """Compare everything known about a run's attempt, or about a job that never wrote anything, with the table.

    Args:
        record: Slurm's record of the job, if it has one.
        accounted: used without a record: a line of the same form from accounting (`FAILED exit=1:0`).
    """
    line = slurm_line(record) if record else accounted
    outcome = read_outcome(found.attempt) if found.attempt else None
    findings = [*_by_slurm(line, record), *_by_outcome(outcome, _decided(found)), *_by_logs(_logs(found, record)),
                *_by_ledger(found)]
    merged = _merged(findings)
    first = first_error(found.attempt).first if found.attempt else None
    return Diagnosis(
        run=found.name, attempt=int(found.attempt.name) if found.attempt else None, job=found.job, slurm=line,
        why_no_slurm=why_no_slurm, exit_meaning=exit_meaning(line),
        outcome=f"{outcome.status}: {outcome.message}".strip(": ") if outcome else "",
        findings=merged, first=first, look_at=_look_at(found, record))


def slurm_line(record: JobRecord) -> str:
    """A record in one line, the text for the table's `slurm` patterns."""
    reason = record.reason or "None"
    return f"{record.state} {reason} exit={record.exit_code}:{record.signal} restarts={record.restarts}"


def exit_meaning(line: str) -> str:
    """Meaning of the job's exit status in this project (docs/exit-codes.md)."""
    if "exit=" not in line or line.startswith((PENDING, "RUNNING")):
        return ""
    status, _, number = line.partition("exit=")[2].split()[0].partition(":")
    if status.isdecimal() and int(status) in set(ExitCode) and number == "0":
        return MEANINGS[ExitCode(int(status))]
    return f"ended by signal {number}" if number not in ("", "0", "53") else ""


def _by_slurm(line: str, record: JobRecord | None) -> Iterable[Finding]:
    for symptom in SYMPTOMS:
        if line and symptom.slurm and re.search(symptom.slurm, line):
            absent = ""
            if symptom.code == "output-folder" and record is not None and not Path(record.stdout).exists():
                absent = f"; {record.stdout} does not exist"
            yield _finding(symptom, line, f"Slurm{absent}")


def _by_outcome(outcome: Outcome | None, decided: str) -> Iterable[Finding]:
    if outcome is None or outcome.status in ("finished", "stopped"):
        return
    said = f"{outcome.status}: {outcome.message}"
    text = f"{said}\n{decided}"
    for symptom in SYMPTOMS:
        if symptom.outcome and (match := re.search(symptom.outcome, text)):
            line = text[text.rfind("\n", 0, match.start()) + 1:].splitlines()[0]
            yield _finding(symptom, line, outcome.log or "outcome.json")


def _decided(found: Found) -> str:
    """Why no attempt follows this one."""
    if found.attempt is None or found.folder is None:
        return ""
    attempt = int(found.attempt.name)
    return next((past.why for past in read_history(found.folder) if past.attempt == attempt), "")


def _by_logs(logs: Iterable[LogFile]) -> Iterable[Finding]:
    for source in logs:
        for line in log_lines.read(source):
            if IN_ANY_LOG.search(line.text):
                for symptom in SYMPTOMS:
                    if symptom.in_logs and symptom.in_logs.search(line.text):
                        where = f"{source.path}:{line.number}" if line.number else str(source.path)
                        yield _finding(symptom, line.text.strip(), where, line.time)


def _by_ledger(found: Found) -> Iterable[Finding]:
    """Nodes of this attempt that the run's ledger excludes by now."""
    if found.attempt is None or found.folder is None or not (found.folder / LEDGER).exists():
        return
    ledger = Ledger(found.folder / LEDGER)
    nodes = read_json(found.attempt / "job.json").get("nodes") or ()
    for entry in ledger.entries(time.time()) if ledger.readable(lambda line: None) else ():
        if entry.node in nodes:
            evidence = f"{entry.node}: {entry.reason}"
            yield _finding(BY_CODE["bad-node"], evidence, entry.evidence or str(ledger.path), entry.time)


def _merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding per row, with its earliest evidence and the number of matches. The most specific cause is first."""
    by_code: dict[str, list[Finding]] = {}
    for finding in findings:
        by_code.setdefault(finding.code, []).append(finding)
    kept = [replace(min(same, key=lambda each: each.time), times=len(same)) for same in by_code.values()]
    return tuple(sorted(kept, key=lambda each: (each.weight, each.time)))


def _finding(symptom: Symptom, evidence: str, where: str, at: float = 0.0) -> Finding:
    return Finding(symptom.code, symptom.cause, symptom.remedy, evidence[:400], where, f"{PAGE}#{symptom.code}",
                   symptom.weight, at)


def _logs(found: Found, record: JobRecord | None) -> list[LogFile]:
    logs = sources(found.attempt, ray_too=True) if found.attempt else []
    written = {source.path for source in logs}
    if record and record.stdout and Path(record.stdout).is_file() and Path(record.stdout) not in written:
        logs.append(LogFile(Path(record.stdout), "job"))
    return logs


def _look_at(found: Found, record: JobRecord | None) -> tuple[str, ...]:
    places = []
    if found.attempt is not None:
        places += [f"megatron-rl logs {found.name} --first-error", str(found.attempt / "logs")]
        filled = [name for name in ("stacks", "errors") if any((found.attempt / name).glob("*"))]
        places += [str(found.attempt / name) for name in filled]
    if record is not None and record.stdout:
        there = "" if Path(record.stdout).exists() else " (does not exist)"
        places.append(f"{record.stdout}{there}")
    if found.job is not None:
        places.append(f"scontrol show job {found.job}")
    return tuple(places)
