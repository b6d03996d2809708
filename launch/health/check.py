"""One finding of the preflight, and the file that carries a node's findings to the leader."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from launch.files.shared import read_shared, write_atomically

SCHEMA_VERSION = 1
REPORT = "preflight.json"
"""A node's report, in `attempts/<n>/nodes/<node>/`."""
Severity = Literal["ok", "warning", "critical"]
RANK: dict[Severity, int] = {"ok": 0, "warning": 1, "critical": 2}


@dataclass(frozen=True)
class Check:
    """The result of one check on one node. All fields are JSON values."""

    name: str
    """`<subject>.<what>`, such as `gpu.ecc`; the subject is a column of the table."""
    severity: Severity
    value: Any = None
    """The measured value. Some values are compared across nodes (`launch.health.compare`)."""
    evidence: str = ""
    """One readable line: the observed and the expected value."""
    remedy: str = ""
    """What to do; empty if the check passes."""

    @property
    def subject(self) -> str:
        return self.name.partition(".")[0]


def ok(name: str, value: Any = None, evidence: str = "") -> Check:
    return Check(name, "ok", value, evidence)


def warning(name: str, value: Any, evidence: str, remedy: str) -> Check:
    return Check(name, "warning", value, evidence, remedy)


def critical(name: str, value: Any, evidence: str, remedy: str) -> Check:
    return Check(name, "critical", value, evidence, remedy)


def worst(checks: Iterable[Check]) -> Severity:
    """The highest severity among the checks; `ok` if there are none."""
    return max((check.severity for check in checks), key=RANK.__getitem__, default="ok")


def checks_to_json(checks: Iterable[Check]) -> list[dict[str, Any]]:
    return [{"check" if key == "name" else key: value for key, value in asdict(check).items()} for check in checks]


def checks_from_json(rows: Sequence[dict[str, Any]]) -> list[Check]:
    return [Check(row["check"], row["severity"], row["value"], row["evidence"], row["remedy"]) for row in rows]


def write_report(folder: Path, node: str, checks: Iterable[Check]) -> Path:
    """Write `folder/preflight.json` atomically. `folder` is the node's folder on the shared file system. The time is
    that of the node's own clock."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / REPORT
    document = {"schema_version": SCHEMA_VERSION, "node": node, "time": time.time(), "checks": checks_to_json(checks)}
    write_atomically(file, json.dumps(document, indent=1, allow_nan=False))
    return file


def read_report(folder: Path) -> list[Check] | None:
    """The checks in the report of a node's folder; None while it does not exist."""
    document = read_shared(folder / REPORT)
    if document is None:
        return None
    if document["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"{folder / REPORT} has schema version {document['schema_version']}, not {SCHEMA_VERSION}")
    return checks_from_json(document["checks"])
