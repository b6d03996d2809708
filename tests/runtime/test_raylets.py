"""A job on three simulated nodes of one host, without Slurm: Ray's nodes with their own names and ports, one token,
one after the other; actors where the placement puts them; deaths on another node than the driver's, of rewards, which
the run survives, and of a rank."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from launch.errors import UserError
from launch.planner.prepare import prepare
from launch.planner.seats.local import place_cpu
from launch.ports import BLOCK, Ports
from launch.processes import marked
from launch.run.components import components, dismissed, lost
from launch.run.metrics import metric_rows
from launch.run.node_files import NodeFiles
from launch.run.outcome import read_outcome
from tests.patience import patient
from tests.runtime.played_job import CONFIG, PlayedJob, played

NODES = ["h100-001", "h100-002", "h100-003", "h100-004"]
OF_RAY = ("raylet/raylet", "gcs/gcs_server", "dashboard/agent.py", "runtime_env/agent/main.py")
"""Ends of the programs of Ray's daemons."""


def test_a_job_on_three_raylets_of_one_host(tmp_path):
    gate = tmp_path / "gate"
    with played(tmp_path, NODES[:3], 2, "run.steps=1000", "trainer.tp=1", "trainer.pp=2",
                "reward.functions.0.function=tests.job.graders:held", f"reward.functions.0.args={{gate: {gate}}}",
                f"reward.timeout_s={patient(100)}") as job:
        job.at_step(1)
        gate.touch()        # it waits, and leaves the cores to the test
        _raylets_came_one_after_the_other(job)
        _actors_are_pinned(job)
        _ray_keeps_to_the_nodes_ports(job)
        _temporary_files_lie_in_the_folder_that_is_removed(job)
        _term_reaches_nobody(job)
        assert _joins_without_token(job) != 0
        where = {record.name: record for record in components(job.attempt)}
        assert {name: record.node for name, record in where.items()} == {
            "driver": NODES[0], "trainer-0": NODES[0], "reward-0": NODES[0], "trainer-1": NODES[1],
            "reward-1": NODES[1], "rollout-0": NODES[2]}
        for record in where.values():
            assert psutil.Process(record.process.pid).environ()["MEGATRON_RL_NODE"] == record.node

        os.kill(where["reward-1"].process.pid, signal.SIGKILL)      # with groups that it has not scored
        job.until(lambda: any(each.name == "reward-1" for each in dismissed(job.attempt)), "the loss of reward-1", 30)
        steps = len(metric_rows(job.attempt.folder / "metrics.jsonl"))
        gate.unlink()
        job.at_step(steps + 2)
        assert "REWARD" in (job.attempt.folder / "warnings.jsonl").read_text() and not lost(job.attempt)

        os.kill(where["trainer-1"].process.pid, signal.SIGKILL)
        job.until(lambda: read_outcome(job.attempt.folder) is not None, "the outcome", 30)
        outcome = read_outcome(job.attempt.folder)
        assert (outcome.status, outcome.component) == ("crash", "trainer-1"), outcome
        assert f"node {NODES[1]}" in outcome.message and outcome.log.endswith("trainer-1.log")


def test_where_a_cpu_job_sits_and_what_does_not_divide():
    plan = prepare(CONFIG, ("rollout.replicas=2",), "cpu").plan
    addresses = {node: f"10.0.0.{index}" for index, node in enumerate(NODES)}
    ports = {node: Ports(12288 + BLOCK * index) for index, node in enumerate(NODES)}
    placement = place_cpu(plan, 1, NODES, 2, addresses, ports, dict.fromkeys(NODES, "ib0"))
    assert [rank.node for rank in placement.training] == [NODES[0]] * 2 + [NODES[1]] * 2     # TP inside a node
    assert [engine.node for engine in placement.rollout] == NODES[2:] and placement.rewards == tuple(NODES[:2])
    assert [rank.port for rank in placement.training] == [
        ports[NODES[0]].lane(0), ports[NODES[0]].lane(1), ports[NODES[1]].lane(0), ports[NODES[1]].lane(1)]
    assert placement.master_port == ports[NODES[0]].rendezvous and placement.interface(NODES[3]) == "ib0"
    one = place_cpu(plan, 1, NODES[:1], 1, addresses, ports)
    assert one.nodes == one.rewards == (NODES[0],) and {engine.node for engine in one.rollout} == {NODES[0]}
    spare = place_cpu(prepare(CONFIG, (), "cpu").plan, 1, NODES, 2, addresses, ports)
    assert spare.nodes == tuple(NODES[:3]) and spare.spares == (NODES[3],)
    for wrong in (0, 3, 5):
        with pytest.raises(UserError, match="do not divide"):
            place_cpu(plan, 1, NODES, wrong, addresses, ports)


def _raylets_came_one_after_the_other(job: PlayedJob) -> None:
    files = {node: NodeFiles(job.attempt, node).folder / "ray.json" for node in job.placement.nodes}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as now:      # creation times are off by up to a second
        skew = time.time() - psutil.Process(now.pid).create_time()
        now.stdin.close()
    for earlier, later in itertools.pairwise(files):
        started = psutil.Process(json.loads(files[later].read_text())["pid"]).create_time() + skew
        assert started > files[earlier].stat().st_mtime - 0.1, f"{later} did not wait for {earlier}"


def _actors_are_pinned(job: PlayedJob) -> None:
    with _census(job) as told:
        assert len(set(told["ids"].values())) == len(job.placement.nodes)
        for node in job.placement.nodes:
            seen = told["seen"][node]
            assert (seen["raylet"], seen["node"], seen["id"]) == (node, node, told["ids"][node])
            assert seen["mark"] == job.attempt.mark and seen["extra"] == f"for {node}"
            assert seen["pid"] in {process.pid for process in marked(job.attempt.mark, node)}


@contextmanager
def _census(job: PlayedJob) -> Iterator[dict]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.census", str(job.attempt.folder)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env={**os.environ, **job.variables()})
    line = process.stdout.readline()
    assert line, f"the census failed with status {process.wait()}"
    yield json.loads(line)
    process.communicate("done\n", timeout=patient(30))


def _ray_keeps_to_the_nodes_ports(job: PlayedJob) -> None:
    """What Ray's daemons of a node listen on lies in the block that the node holds. (The sockets that gloo opens
    inside a worker, and vLLM's, do not: see `launch.ports`.)"""
    assert len(set(job.placement.ports.values())) == len(job.placement.nodes)
    for node, base in job.placement.ports.items():
        daemons = [process for process in marked(job.attempt.mark, node)
                   if any(word.endswith(OF_RAY) for word in process.cmdline()[:3])]
        ports = {connection.laddr.port for process in daemons for connection in process.net_connections("tcp")
                 if connection.status == psutil.CONN_LISTEN}
        assert all(base <= port < base + BLOCK for port in ports), (node, base, ports)
        assert {Ports(base).ray_node_manager, Ports(base).ray_object_manager} <= ports
    first = job.placement.training[0]
    assert job.placement.master_port == Ports(job.placement.ports[first.node]).rendezvous


def _temporary_files_lie_in_the_folder_that_is_removed(job: PlayedJob) -> None:
    """Such as vLLM's sockets, of which it removes none."""
    node = job.placement.rollout[0].node
    folder = Path(NodeFiles(job.attempt, node).log.read_text().partition("Ray in ")[2].partition(",")[0])
    engine = next(record for record in components(job.attempt) if record.name == "rollout-0")
    paths = [Path(connection.laddr) for connection in psutil.Process(engine.process.pid).net_connections("unix")
             if connection.laddr]
    assert folder in {path.parent for path in paths}
    assert all(path.is_relative_to(folder) for path in paths), paths


def _term_reaches_nobody(job: PlayedJob) -> None:
    """A preemption's TERM goes to every process of the step. Ray's daemons, its workers and vLLM's processes have
    handlers that would end them: every thread of theirs has it blocked, or ignores it."""
    open_to_it = set()
    for process in marked(job.attempt.mark):
        for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
            blocked, ignored = (int(status.read_text().partition(f"{name}:")[2].split()[0], 16)
                                for name in ("SigBlk", "SigIgn"))
            if not (blocked | ignored) & 1 << signal.SIGTERM - 1:
                open_to_it.add(" ".join(process.cmdline())[:120])
    assert not open_to_it


def _joins_without_token(job: PlayedJob) -> int:
    """Exit status of a client that does not know the token."""
    address = job.variables()["MEGATRON_RL_RAY_ADDRESS"]
    code = f"import ray; ray.init(address={address!r}, log_to_driver=False)"
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=patient(60),
                          check=False).returncode
