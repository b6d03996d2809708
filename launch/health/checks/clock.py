"""Checks the shared file system and the clock, with the canary's question to the leader."""

from __future__ import annotations

from pathlib import Path

from launch.health import canary
from launch.health.check import Check, critical, ok, warning

SLOW_WRITE_S = 1.0
SLOW_ROUND_TRIP_S = 10.0
SKEW_WARNING_S = 1.0
SKEW_CRITICAL_S = 5.0
"""The times of the last heartbeats decide which node failed first (`node_files.vanished`), and logs of all ranks are
ordered by time. Clocks must therefore differ by less than the heartbeats do."""


def check(attempt: Path | None, node: str, timeout_s: float) -> list[Check]:
    """The checks; [] if there is no leader to answer."""
    if attempt is None:
        return []
    try:
        measured = canary.ask(attempt, node, timeout_s)
    except OSError as error:
        return [critical("fs.canary", None, f"cannot write {error.filename or attempt}: {error.strerror}",
                         "mount the file system of run.dir on this node, writable for you")]
    if measured is None:
        return [critical("fs.canary", None, f"the leader's answer did not appear within {timeout_s:g} s in {attempt}",
                         "put run.dir on a file system that all nodes of the job share")]
    return [_canary(measured), ok("fs.round_trip", round(measured.round_trip_s, 4), ""), skew(measured)]


def _canary(measured: canary.Canary) -> Check:
    value = {"write_s": round(measured.write_s, 4), "round_trip_s": round(measured.round_trip_s, 4)}
    told = f"write {measured.write_s * 1e3:.0f} ms, question and answer {measured.round_trip_s:.2f} s"
    if measured.write_s > SLOW_WRITE_S or measured.round_trip_s > SLOW_ROUND_TRIP_S:
        return warning("fs.canary", value, told, "a slow file system slows checkpoints and hides files from other "
                       "nodes: put run.dir on a faster one")
    return ok("fs.canary", value, told)


def skew(measured: canary.Canary) -> Check:
    """Judges the smallest offset that the measurement error allows."""
    least = max(0.0, abs(measured.offset_s) - measured.error_s)
    told = f"{measured.offset_s:+.2f} s to the leader's clock (within {measured.error_s:.2f} s)"
    if least > SKEW_WARNING_S:
        return (critical if least > SKEW_CRITICAL_S else warning)(
            "clock.skew", round(measured.offset_s, 3), told, "start chrony or ntpd on the node")
    return ok("clock.skew", round(measured.offset_s, 3), told)
