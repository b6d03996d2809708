"""The network tier on the nodes of a step: when a job wants it, who measures, how a node takes part, and what the
leader makes of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launch import envvars, processes
from launch.cluster.spec import ClusterSpec
from launch.config.schema import RunConfig
from launch.errors import UserError
from launch.files.waiting import wait_until
from launch.health import network, rails
from launch.health.check import Check, worst
from launch.health.expected import Expected
from launch.ports import Ports
from launch.run.attempt_log import PastAttempt
from launch.run.attempts import Attempt
from launch.run.faults import trains
from launch.run.node_files import Hello
from launch.slurm.profiles import Profile

GRACE_S = 30.0
"""Beyond the measurement's own deadline: processes start, files appear."""
LEAST_S, NODE_S = 180.0, 10.0
"""Deadline of the measurement: torch is imported from a shared file system, and rounds of pairs grow with the nodes."""
SMALL = {"allreduce_bytes": 16 * network.MIB, "pair_bytes": 8 * network.MIB}
"""For gloo on CPUs."""
COLLECTIVE = re.compile(r"(?i)nccl|gloo|collective|timed? ?out")


def wanted(config: RunConfig, before: Sequence[PastAttempt]) -> str:
    """Why it is measured; "" if it is not. A hang, or a collective that timed out, with no node to blame may be a link
    that no node sees by itself."""
    if config.run.preflight == "fabric":
        return "run.preflight = fabric"
    last = before[-1] if before and trains(config) else None
    if last is None:
        return ""
    # Of a crash, `nodes` says where the component ran that failed first: it waited for a bad link, it is no culprit.
    if last.status == "hang" and not last.nodes or last.status == "crash" and COLLECTIVE.search(last.message):
        return f"attempt {last.attempt} ended with a {last.status} and no node to blame"
    return ""


def with_network(attempt: Attempt, config: RunConfig, before: Sequence[PastAttempt], reports: Mapping[str, list[Check]],
                hellos: Mapping[str, Hello], cluster: ClusterSpec, profile: Profile, say: Callable[[str], None],
                check: Callable[[], None]) -> dict[str, list[Check]]:
    """The reports, with the checks of the network of all nodes that are fit so far, where they are wanted."""
    why = wanted(config, before)
    if not why:
        return dict(reports)
    say(f"the network is measured: {why}")
    found = measure(attempt.folder, reports, hellos, Expected.read(attempt.folder), cluster, profile, say,
                                check)
    if config.run.preflight != "fabric" and found and all(worst(checks) == "critical" for checks in found.values()):
        # Nobody asked for it, and it says nothing of one node or another: no reason to end a run.
        say("the network could not be measured: going on without")
        found = {node: [replace(each, severity="warning") if each.severity == "critical" else each for each in checks]
                 for node, checks in found.items()}
    return {node: [*checks, *found.get(node, ())] for node, checks in reports.items()}



def measure(folder: Path, reports: Mapping[str, Sequence[Check]], hellos: Mapping[str, Hello], expected: Expected,
            cluster: ClusterSpec | None, profile: Profile, say: Callable[[str], None],
            check: Callable[[], None]) -> dict[str, list[Check]]:
    """Have the nodes that are fit so far, whose agents wait for a task in `folder`, measure; their checks, {} where
    fewer than two are fit. Simulated GPUs have no NCCL: one process a node then, by gloo.

    Args:
        reports: of all nodes, what was found until now.
    """
    nodes = [node for node, checks in reports.items() if worst(checks) != "critical"]
    if len(nodes) < 2:
        return {}
    nics = rails.for_nccl(reports, nodes, expected.nics, profile)
    on_gpus = expected.device == "gpu" and expected.gpus > 0 and not envvars.get(envvars.SIMULATED_GPUS)
    members = tuple(network.Member(node, gpu, hellos[node].address) for node in nodes
                    for gpu in (range(expected.gpus) if on_gpus else (None,)))
    task = network.Task(members, "nccl" if on_gpus else "gloo", Ports(hellos[nodes[0]].ports).rendezvous,
                       dict(nics), timeout_s=LEAST_S + NODE_S * len(nodes), **({} if on_gpus else SMALL))
    task.write(folder)
    planned = network.expected_bytes_per_s(cluster) if cluster and on_gpus else None
    return result(folder, task, nodes, planned, say, check)


def result(folder: Path, task: network.Task, nodes: Sequence[str], speed: float | None, say: Callable[[str], None],
           check: Callable[[], None] = lambda: None) -> dict[str, list[Check]]:
    """Wait for the measurement; without a result in time every node's check says so."""
    say(f"network: {len(task.members)} processes on {len(nodes)} nodes, {task.backend}")
    try:
        wait_until(lambda: network.Result.read(folder) is not None, "the measurement of the network",
                   task.timeout_s + GRACE_S, say=say, check=check)
    except UserError as error:
        return network.judge_network(network.Result(0, 0.0, errors=dict.fromkeys(nodes, error.what)), nodes)
    measured = network.Result.read(folder)
    assert measured is not None         # it has just been seen
    return network.judge_network(measured, nodes, speed)


def start(folder: Path, node: str, interface: str) -> list[processes.Child]:
    """Start this node's members of the task that lies in `folder`, the attempt's, whose mark they carry: they are found
    again, whatever becomes of their parent."""
    task, mark = network.Task.read(folder), Attempt(folder).mark
    assert task is not None
    search = ":".join(filter(None, [str(Path(__file__).parents[2]), envvars.get("PYTHONPATH")]))
    return [processes.start(f"network-{rank}", network.command(folder, rank),
                            log=folder / network.FOLDER / f"{rank}.log",
                            environment={**envvars.inherited(), **network.variables(task, member, interface, mark),
                                         "PYTHONPATH": search})
            for rank, member in enumerate(task.members) if member.node == node]
