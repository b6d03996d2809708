"""Where the nodes of a job hang in the switch tree: as they say themselves, else as Slurm says when it is asked,
once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from launch.cluster.spec import Switch
from launch.cluster.tree import FLAT, faults, path_of, restrict, switches_of
from launch.errors import UserError
from launch.run.node_files import Hello
from launch.slurm.client import Slurm


def switches_of_job(hellos: Mapping[str, Hello], nodes: Sequence[str], slurm: Slurm,
                    say: Callable[[str], None] = lambda line: None) -> tuple[Switch, ...]:
    """The tree over these nodes; () where Slurm knows none, or what it says is no tree over them: then a warning."""
    paths = {node: path_of(hellos[node].topology, hellos[node].topology_pattern) for node in nodes}
    if tree := switches_of(paths):
        return tree
    silent = [node for node in nodes if not paths[node] and hellos[node].topology_pattern != FLAT]
    if not silent or len(nodes) == 1:
        return ()       # Slurm has no topology plug-in, and all nodes say so
    try:
        found = restrict(slurm.topology(blocks=True), set(nodes))
        misfits = [what for _, what, _ in faults(found, list(nodes))]
        why = misfits[0] if misfits else "" if found else "Slurm knows no switches"
    except UserError as error:
        found, why = (), error.what
    if not why:
        return found
    topology = hellos[silent[0]].topology
    told = f"{silent[0]} says {repr(topology) if topology else 'nothing'}"
    say(f"warning topology.unknown: of its switches (SLURM_TOPOLOGY_ADDR) {told}, and of `scontrol show topology`: "
        f"{why}. The job is placed without regard to switches; see TopologyPlugin and TopologyParam of slurm.conf")
    return ()
