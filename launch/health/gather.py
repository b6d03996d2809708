"""The leader's side of the preflight: answers the canaries, collects all reports, and names the missing nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.files.waiting import wait_for
from launch.health import canary
from launch.health.check import Check, critical, read_report

TIMEOUT_S = 180.0


def gather_reports(attempt: Path, nodes: Sequence[str], timeout_s: float = TIMEOUT_S,
                   say: Callable[[str], None] = lambda line: None,
                   check: Callable[[], None] = lambda: None) -> dict[str, list[Check]]:
    """The checks of every node, in the order of `nodes`. A node that does not report in time gets one critical check.

    Args:
        attempt: the attempt's folder, which contains the reports as `nodes/<node>/preflight.json`.
        say: receives a line with the missing nodes every half minute.
        check: called at every poll. An exception that it raises ends the wait.
    """
    found: dict[str, list[Check]] = {}
    answers, began = canary.Answers(attempt), time.monotonic()

    def missing() -> list[str]:
        answers.give()
        for node in nodes:
            if node not in found and (checks := read_report(attempt / "nodes" / node)) is not None:
                found[node] = checks
        return [node for node in nodes if node not in found]

    wait_for(missing, "to report its preflight", timeout_s, say=say, check=check)
    waited = time.monotonic() - began
    return {node: found.get(node) or [_missing(node, waited)] for node in nodes}


def _missing(node: str, waited_s: float) -> Check:
    return critical("report.missing", None, f"no preflight report within {waited_s:.0f} s",
                    f"see the log of {node}'s supervisor: it did not start, or a file system hangs there")
