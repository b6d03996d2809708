"""The first error of an attempt over all its processes, by time. Later errors are mostly consequences: the other
processes wait for the one that failed until their collectives time out, or find their connections closed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from launch.files.waiting import listed
from launch.report.diagnose import log_lines
from launch.report.diagnose.log_lines import LogFile, LogLine
from launch.report.diagnose.logs import Filter, sources
from launch.report.lines import WIDTH, field
from launch.run.attempts import Attempt
from launch.run.components import components, dismissed, errors, was_dismissed
from launch.run.find import read_json
from launch.run.outcome import read_outcome

SCHEMA_VERSION = 1
FOLLOWS = re.compile(
    r"watchdog caught collective|collective operation timeout|ProcessGroupNCCL.*(?:timeout|timed out|terminat)|"
    r"NCCL communicator was aborted|ncclRemoteError|remote process (?:exited|has terminated)|"
    r"connection (?:closed by|reset by|was closed)|closed by remote peer|broken pipe|socketProgress|"
    r"gloo.*(?:timed out|timeout|connection)|TCPStore|DistNetworkError|DistStoreError|recvValue failed|"
    r"ActorDiedError|RayActorError|ActorUnavailableError|WorkerCrashedError|NodeDiedError|EngineDeadError|"
    r"actor (?:died|is dead)|keyboardinterrupt|systemexit|CANCELLED AT|srun: (?:error: .*: task|Job step aborted|"
    r"Terminating)|SIGTERM", re.IGNORECASE)
"""Errors that only report that another process died or did not arrive."""
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Za-z_]\w*"
                        r"(?:Error|Exception|Exit|Interrupt|Warning|Timeout|Killed)\b.*")
_FATAL = re.compile(r"Fatal Python error: |terminate called (?:after|without)|Segmentation fault|std::bad_alloc|"
                    r"\bOut of memory: Killed process|oom[-_]kill event|Bus error")
_PREFIX = re.compile(r"^(?:\[rank\d+\]: ?|"
                     r"\([^)]*pid=\d+[^)]*\) ?(?:(?:ERROR|INFO|WARNING) [\d-]+ [\d:]+ \[[^\]]*\] ?)?|"
                     r"(?:ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)+")
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
MOST_LINES = 400
"""Lines of a traceback in a log. Beyond this, its end was missed."""
SHOWN = 40
"""Lines of the traceback that are printed."""


@dataclass(frozen=True)
class LoggedError:
    """One recorded or logged error."""

    time: float
    component: str
    node: str
    summary: str
    """The line of the exception."""
    text: str
    """The traceback, or the single line."""
    file: str
    line: int = 0
    users: bool = False
    """Whether the user can fix it."""

    @property
    def follows(self) -> bool:
        """Whether it only reports the end of another process."""
        return not self.users and bool(FOLLOWS.search(self.summary))

    @property
    def who(self) -> str:
        return f"{self.component} on {self.node}" if self.node not in ("", "local") else self.component


@dataclass(frozen=True)
class FirstError:
    """The first error and the errors after it."""

    first: LoggedError | None
    others: tuple[LoggedError, ...]
    outcome: str = ""
    """The message of outcome.json."""

    def as_json(self) -> dict:
        return {"schema_version": SCHEMA_VERSION, "first": asdict(self.first) if self.first else None,
                "others": [asdict(each) for each in self.others], "outcome": self.outcome}


def first_error(attempt: Path, wanted: Filter | None = None) -> FirstError:
    """Find the first error. Errors that the user can fix come first, then the others by time, and consequences last. A
    process that fails after the outcome was written was being ended, so its error is never the first."""
    found = [each for each in failures(attempt)
             if wanted is None or wanted.takes(LogFile(Path(each.file), each.component, each.node))]
    outcome = read_outcome(attempt)
    end = (attempt / "outcome.json").stat().st_mtime if outcome else float("inf")   # later errors: the clean-up
    ordered = sorted((each for each in found if each.users or each.time <= end),
                     key=lambda each: (not each.users, each.follows, each.time))
    message = outcome.message if outcome and outcome.status not in ("finished", "stopped") else ""
    first = ordered[0] if ordered else None
    others = tuple(sorted((each for each in found if each is not first), key=lambda each: each.time))
    return FirstError(first, others, message)


def failures(attempt: Path) -> list[LoggedError]:
    """Every recorded or logged error. An error that a component recorded is not counted again from its log. Errors
    of engines that the run continued without do not count."""
    records = {record.name: record for record in components(Attempt(attempt))}
    began = {name: records[name].process.started if name in records else float("inf")
             for name in {record.name for record in dismissed(Attempt(attempt))}}
    found = []
    for error in errors(Attempt(attempt)):
        node = records[error.name].node if error.name in records else ""
        file = records[error.name].log if error.name in records else str(attempt / "errors" / f"{error.name}.json")
        last = error.summary.strip().splitlines()[0] if error.user_error else error.summary.strip()
        found.append(LoggedError(error.time, error.name, node, last, error.traceback.rstrip(), file, 0,
                                 error.user_error))
    for path in sorted(attempt.glob("nodes/*/lost.json")):
        lost, node = read_json(path), path.parent.name
        name = str(lost.get("component") or "supervisor")
        if not (any(each.component == name for each in found)
                or was_dismissed(Attempt(attempt), name, lost.get("pid"))):
            message = str(lost.get("message") or "lost").strip()
            at = float(lost.get("time") or path.stat().st_mtime)
            found.append(LoggedError(at, name, node, message.splitlines()[0], message, str(lost.get("log") or path)))
    recorded = {(each.component, _key(each.summary)) for each in found}
    for source in sources(attempt):
        for each in in_log(source, log_lines.read(source)):
            if (each.component, _key(each.summary)) not in recorded and each.time >= began.get(each.component, 0.0):
                recorded.add((each.component, _key(each.summary)))
                found.append(each)
    return found


def in_log(source: LogFile, lines: Iterable[LogLine]) -> list[LoggedError]:
    """Tracebacks and fatal lines of one log. A chain of exceptions is one failure, named after its last exception."""
    found: list[LoggedError] = []
    block: list[LogLine] = []
    chained = False
    for line in lines:
        text = _PREFIX.sub("", line.text)
        if block:
            block.append(line)
            if _EXCEPTION.match(text) and len(block) > 1 or len(block) > MOST_LINES:
                if chained:
                    before = found.pop()
                    found.append(_failure(source, block, text, before))
                else:
                    found.append(_failure(source, block, text))
                block = []
                chained = False
        elif text.startswith(_TRACEBACK) or text.rstrip().endswith(_TRACEBACK):
            block = [line]
        elif text.startswith(_CHAINED) and found:
            chained = True
        elif _FATAL.search(text):
            found.append(_failure(source, [line], text))
    return found


def text_of(found: FirstError, attempt: Path) -> str:
    """The first error for people: its process, its time, the end of its traceback, and the number of later errors."""
    if found.first is None:
        parts = ["no error was recorded or logged"]
        if found.outcome:
            parts.append(field("outcome", found.outcome))
        if found.others:
            parts.append(field("after that", f"{len(found.others)} errors of processes that were being ended"))
        parts.append(field("looked in", f"{attempt}/errors, {len(sources(attempt))} logs"))
        return "\n".join(parts)
    first = found.first
    at = datetime.fromtimestamp(first.time)
    said = first.text.splitlines()
    shown = ([f"... {len(said) - SHOWN} more lines in the log"] if len(said) > SHOWN else []) + said[-SHOWN:]
    parts = [field("first error", f"{first.who} at {at:%Y-%m-%d %H:%M:%S}"),
             field("", first.summary), field("log", first.file + (f":{first.line}" if first.line else ""))]
    parts += [f"  | {piece}" for line in shown for piece in _cut(line)]
    if first.follows:
        parts.append(field("caution", "this error only reports that another process was gone or late, and nothing was "
                                      "logged before it: look for a process that was killed"))
    if found.outcome and found.outcome.splitlines()[0] not in (first.summary, ""):
        parts.append(field("outcome", found.outcome.splitlines()[0]))
    if found.others:
        parts.append(field("then", _then(found.others, first.time)))
    return "\n".join(parts)


def _then(others: Sequence[LoggedError], start: float) -> str:
    """`12 more: trainer-0, trainer-1 and 10 more (DistBackendError ...), 31 s later`."""
    later = [each.time - start for each in others]
    kinds: dict[str, list[str]] = {}
    for each in others:
        kinds.setdefault(re.split(r"[:(]", each.summary)[0].strip()[:40], []).append(each.component)
    parts = [f"{kind}: {listed(list(dict.fromkeys(names)), 4)}" for kind, names in list(kinds.items())[:4]]
    return f"{len(others)} more, {min(later):.1f} to {max(later):.1f} s later; " + "; ".join(parts)


def _failure(source: LogFile, block: list[LogLine], summary: str, before: LoggedError | None = None) -> LoggedError:
    """One failure. With `before`, it ends that chain of exceptions."""
    text = "\n".join(_PREFIX.sub("", line.text) for line in block)
    if before is not None:
        return replace(before, summary=summary.strip(), text=f"{before.text}\n\n{text}")
    first = block[0]
    return LoggedError(first.time, source.name, source.node, summary.strip(), text, str(source.path), first.number)


def _key(summary: str) -> str:
    """Key that is equal for an error as an actor records it and as a log prints it, with or without its module."""
    return re.sub(r"^[\w.]*\.", "", summary.strip().splitlines()[-1] if summary.strip() else "")[:120]


def _cut(line: str) -> list[str]:
    width = WIDTH - 4
    return [line[start:start + width] for start in range(0, max(1, len(line)), width)]
