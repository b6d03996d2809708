"""Runs the network tier on the nodes of a step: when a job needs it, which nodes measure, how a node takes part, and
how the leader uses the result."""

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
"""Seconds beyond the measurement's own deadline, for process start and file visibility."""
LEAST_S, NODE_S = 180.0, 10.0
"""Deadline, minimum and per node: torch is imported from a shared file system, and rounds grow with the nodes."""
SMALL = {"allreduce_bytes": 16 * network.MIB, "pair_bytes": 8 * network.MIB}
"""For gloo on CPUs."""
COLLECTIVE = re.compile(r"(?i)nccl|gloo|collective|timed? ?out")


def wanted(config: RunConfig, before: Sequence[PastAttempt]) -> str:
    """Why the network is measured; "" if it is not. A hang or a timed-out collective without a node to blame may come
    from a link fault that no single node can see."""
    if config.run.preflight == "fabric":
        return "run.preflight = fabric"
    last = before[-1] if before and trains(config) else None
    if last is None:
        return ""
    # For a crash, `nodes` is where the first failing component ran. It may only have waited on a bad link.
    if last.status == "hang" and not last.nodes or last.status == "crash" and COLLECTIVE.search(last.message):
        return f"attempt {last.attempt} ended with a {last.status} and no node to blame"
    return ""


def with_network(attempt: Attempt, config: RunConfig, before: Sequence[PastAttempt], reports: Mapping[str, list[Check]],
                hellos: Mapping[str, Hello], cluster: ClusterSpec, profile: Profile, say: Callable[[str], None],
                check: Callable[[], None]) -> dict[str, list[Check]]:
    """The reports, extended by the network checks of all nodes that are fit so far, if the network is measured."""
    why = wanted(config, before)
    if not why:
        return dict(reports)
    say(f"measuring the network: {why}")
    found = measure(attempt.folder, reports, hellos, Expected.read(attempt.folder), cluster, profile, say, check)
    if config.run.preflight != "fabric" and found and all(worst(checks) == "critical" for checks in found.values()):
        # The user did not request it, and it does not single out a node: not a reason to end the run.
        say("the network could not be measured: continuing without it")
        found = {node: [replace(each, severity="warning") if each.severity == "critical" else each for each in checks]
                 for node, checks in found.items()}
    return {node: [*checks, *found.get(node, ())] for node, checks in reports.items()}



def measure(folder: Path, reports: Mapping[str, Sequence[Check]], hellos: Mapping[str, Hello], expected: Expected,
            cluster: ClusterSpec | None, profile: Profile, say: Callable[[str], None],
            check: Callable[[], None]) -> dict[str, list[Check]]:
    """Measure the network on the nodes that are fit so far, whose agents wait for a task in `folder`. Returns their
    checks, or {} if fewer than two are fit. With simulated GPUs there is no NCCL: one process per node uses gloo.

    Args:
        reports: the findings of all nodes so far.
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
    """Wait for the measurement. If no result arrives in time, every node gets a check that reports it."""
    say(f"network: {len(task.members)} processes on {len(nodes)} nodes, {task.backend}")
    try:
        wait_until(lambda: network.Result.read(folder) is not None, "the measurement of the network",
                   task.timeout_s + GRACE_S, say=say, check=check)
    except UserError as error:
        return network.judge_network(network.Result(0, 0.0, errors=dict.fromkeys(nodes, error.what)), nodes)
    measured = network.Result.read(folder)
    assert measured is not None         # the wait above has seen it
    return network.judge_network(measured, nodes, speed)


def start(folder: Path, node: str, interface: str) -> list[processes.Child]:
    """Start this node's members of the task in `folder`, the attempt's folder. They carry the attempt's mark, so that
    they can be found even if their parent dies."""
    task, mark = network.Task.read(folder), Attempt(folder).mark
    assert task is not None
    search = ":".join(filter(None, [str(Path(__file__).parents[2]), envvars.get("PYTHONPATH")]))
    return [processes.start(f"network-{rank}", network.command(folder, rank),
                            log=folder / network.FOLDER / f"{rank}.log",
                            environment={**envvars.inherited(), **network.variables(task, member, interface, mark),
                                         "PYTHONPATH": search})
            for rank, member in enumerate(task.members) if member.node == node]
