"""The network tier on the nodes of a step: who measures, how a node takes part, and what the leader makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launch import envvars, processes
from launch.cluster.spec import ClusterSpec
from launch.errors import UserError
from launch.files.waiting import wait_until
from launch.health import network, rails
from launch.health.check import Check, worst
from launch.health.expected import Expected
from launch.ports import Ports
from launch.run.attempts import Attempt
from launch.run.node_files import Hello
from launch.slurm.profiles import Profile

GRACE_S = 30.0
"""Beyond the measurement's own deadline: processes start, files appear."""
LEAST_S, NODE_S = 180.0, 10.0
"""Deadline of the measurement: torch is imported from a shared file system, and rounds of pairs grow with the nodes."""
SMALL = {"allreduce_bytes": 16 * network.MIB, "pair_bytes": 8 * network.MIB}
"""For gloo on CPUs."""


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
    return result(folder, task, nodes, network.expected_bytes_per_s(cluster) if cluster and on_gpus else None, say,
                  check)


def result(folder: Path, task: network.Task, nodes: Sequence[str], speed: float | None, say: Callable[[str], None],
           check: Callable[[], None] = lambda: None) -> dict[str, list[Check]]:
    """Wait for the measurement; without a result in time every node's check says so."""
    say(f"network: {len(task.members)} processes on {len(nodes)} nodes, {task.backend}")
    try:
        wait_until(lambda: network.Result.read(folder) is not None, "the measurement of the network",
                   task.timeout_s + GRACE_S,
                   say=say, check=check)
    except UserError as error:
        return network.judge_network(network.Result(0, 0.0, errors=dict.fromkeys(nodes, error.what)), nodes)
    return network.judge_network(network.Result.read(folder), nodes, speed)


def start(folder: Path, node: str, interface: str) -> list[processes.Child]:
    """Start this node's members of the task in `folder`, the attempt's, whose mark they carry: they are found again,
    whatever becomes of their parent."""
    task, mark = network.Task.read(folder), Attempt(folder).mark
    search = ":".join(filter(None, [str(Path(__file__).parents[2]), envvars.get("PYTHONPATH")]))
    return [processes.start(f"network-{rank}", network.command(folder, rank),
                            log=folder / network.FOLDER / f"{rank}.log",
                            environment={**envvars.inherited(), **network.variables(task, member, interface, mark),
                                         "PYTHONPATH": search})
            for rank, member in enumerate(task.members) if member.node == node]
