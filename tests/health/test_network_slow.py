"""A slow node and a slow path are named by a real measurement, see `slow_network`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from launch import envvars, processes
from launch.health.network import Member, Result, Task, judge_network
from launch.health.verdict import judge
from launch.ports import allocate
from tests.health.conftest import named
from tests.patience import patient

NODES = ("a", "b", "c", "d")
SLOW, PLANNED = 4e6, 12e6
"""Bytes/s: what `slow_network` makes of the connections from a to c and of all of d's; and what is judged by. Loopback
does a hundred times that, on a loaded machine ten times."""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_a_slow_node_and_a_slow_path_are_named(tmp_path):
    verdict = judge(judge_network(measured(tmp_path), NODES, PLANNED), 3, 1)

    node, = verdict.excluded.values()
    slow, = node.checks
    assert verdict.ok and (node.node, slow.name, slow.severity) == ("d", "fabric.bandwidth", "critical")
    assert slow.value < 1.5 * SLOW and "with its best partner, the plan expects 0.012 GB/s" in slow.evidence
    assert slow.remedy.startswith("check the node's cables")
    path = named(verdict.findings["a"], "fabric.path")
    assert path.value < 2 * SLOW and " to c, while both reach " in path.evidence
    assert path.remedy.startswith("check the fabric's counters")
    assert [each for each in NODES if any(check.severity != "ok" for check in verdict.findings[each])] == ["a", "d"]


def measured(folder: Path) -> Result:
    """By processes that the kernel slows down."""
    ports = allocate(8, address="127.0.0.1")
    Task(tuple(Member(node, None, "127.0.0.1") for node in NODES), "gloo", ports.rendezvous, allreduce_bytes=2 ** 15,
         pair_bytes=2 ** 19, repeats=3, timeout_s=patient(60.0)).write(folder)
    child = processes.start("members", [sys.executable, "-m", "tests.health.slow_network", str(folder)],
                            log=folder / "log", cwd=Path(__file__).parents[2],
                            environment={**envvars.inherited(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    try:
        assert child.wait(patient(90)) == 0, (folder / "log").read_text()
    finally:
        child.end()
        ports.release()
    return Result.read(folder)
