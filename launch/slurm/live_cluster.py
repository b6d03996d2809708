"""Reads the live cluster from Slurm: nodes and GPUs from `scontrol show node`, switches from `scontrol show topology`.

Slurm does not know NICs and rails. They come from a cluster file (`base`) or are assumed: one NIC per GPU at the usual
rate of such machines, rail-optimised. `ClusterSpec.sources` records which.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch import envvars
from launch.cluster import gpus, hostlist, inventory
from launch.cluster.file import GBIT
from launch.cluster.inventory import NodeFacts
from launch.cluster.spec import ClusterSpec, Gpu, Switch
from launch.cluster.tree import faults, restrict
from launch.errors import UserError, nearest
from launch.slurm.client import Slurm
from launch.slurm.show import SHOW_NODES, SHOW_TOPOLOGY, Node

NIC_GBIT = {"A100-SXM-40GB": 200, "A100-SXM-80GB": 200}
"""NIC rate of a DGX A100 in Gbit/s. Every later machine in the table has 400."""


@dataclass(frozen=True)
class Survey:
    """The nodes to plan for, and the nodes left out with the reason."""

    nodes: tuple[Node, ...]
    left_out: tuple[tuple[str, str], ...]
    """(node, why): `DRAIN (bad GPU)`, `no GPU`."""


def read_cluster(slurm: Slurm, *, partition: str | None = None, nodelist: str | None = None, gpu: str | None = None,
                 base: ClusterSpec | None = None, base_file: str = "the cluster file",
                 facts: NodeFacts | None = None, node: str | None = None) -> ClusterSpec:
    """The cluster that Slurm describes.

    Args:
        partition: only its nodes.
        nodelist: only these nodes (`node[001-008]`).
        gpu: only nodes with this kind of GPU; required if kinds are mixed.
        base: content of a cluster file, for facts that Slurm does not know.
        base_file: its path, for messages.
        facts, node: NVML's facts and the Slurm name of their node. None: those of this machine, if it is a node of the
            cluster with a driver.

    Raises:
        SlurmError: Slurm does not answer.
        UserError: no node is left, kinds of GPUs are mixed, the topology is invalid, or Slurm, the cluster file and
            NVML contradict each other.
    """
    found = survey(slurm.nodes(), partition=partition, nodelist=nodelist)
    spec = assemble(found, slurm.topology(), gpu=gpu, base=base, base_file=base_file)
    if facts is None:
        node = envvars.get("SLURMD_NODENAME") or _this_host()
        facts = inventory.read() if node in spec.nodes else None
    described_by = "Slurm" if base is None else f"Slurm with {base_file}"
    return spec if facts is None else inventory.join(spec, facts, node or _this_host(), described_by)


def survey(nodes: Sequence[Node], *, partition: str | None = None, nodelist: str | None = None) -> Survey:
    """Choose among Slurm's nodes. Nodes that run a job count: it will end.

    Raises:
        UserError: a name is unknown, or no node is left; the message tells why nodes were left out.
    """
    chosen = list(nodes)
    if partition is not None:
        known = sorted({name for node in nodes for name in node.partitions})
        if partition not in known:
            raise UserError(f"Slurm has no partition {partition!r}", where="--partition",
                            fix=_did_you_mean(partition, known))
        chosen = [node for node in chosen if partition in node.partitions]
    if nodelist is not None:
        wanted = hostlist.expand(nodelist, "--nodelist") if nodelist.strip() else ()
        names = {node.name for node in chosen}
        for name in wanted:
            if name not in names:
                within = f" in partition {partition}" if partition else ""
                raise UserError(f"Slurm has no node {name!r}{within}", where="--nodelist",
                                fix=_did_you_mean(name, sorted(names)))
        chosen = [node for node in chosen if node.name in set(wanted)]
    kept = tuple(node for node in chosen if node.gpus and not node.unfit)
    left_out = [(node.name, node.unfit or "no GPU") for node in chosen if node.unfit or not node.gpus]
    if not kept:
        raise UserError("Slurm offers no node" + (f"; left out: {_listed(left_out)}" if left_out else ""),
                        where=SHOW_NODES, fix="choose another --partition or --nodelist, or repair nodes (sinfo -R)")
    return Survey(kept, tuple(left_out))


def assemble(found: Survey, switches: Sequence[Switch], *, gpu: str | None = None, base: ClusterSpec | None = None,
             base_file: str = "the cluster file") -> ClusterSpec:
    """A `ClusterSpec` of the surveyed nodes. Pure."""
    kind, per_node, nodes, left_out = _one_kind(found, gpu, base)
    names = tuple(node.name for node in nodes)
    tree = restrict(switches, set(names))
    misfits = faults(tree, names)
    if misfits:
        raise UserError("Slurm's topology does not fit its nodes: " + "; ".join(what for _, what, _ in misfits[:3]),
                        where=SHOW_TOPOLOGY,
                        fix="correct topology.conf, or plan for a part with --nodelist or --partition")
    memory = min(node.memory_bytes for node in nodes)
    sources = {f"gpu.{name}": kind.source for name in gpus.FIGURES}
    sources |= {"cluster.nodes": f"{SHOW_NODES}: {len(names)} nodes" +
                                 (f"; left out: {_listed(left_out)}" if left_out else ""),
                "cluster.gpus_per_node": f"{SHOW_NODES}, Gres", "cluster.switches": SHOW_TOPOLOGY,
                "cluster.host_memory_bytes": f"{SHOW_NODES}, RealMemory"}
    if base is not None:
        for what, ours, theirs in (("gpus.kind", kind.name, base.gpu.name),
                                   ("gpus.per_node", per_node, base.gpus_per_node)):
            if ours != theirs:
                raise UserError(f"Slurm and {base_file} disagree: {what} is {ours} in Slurm but {theirs} in the file",
                                where=f"{base_file}, {what}; {SHOW_NODES}, {names[0]}", fix="correct one of them")
        return replace(base, name="slurm", nodes=names, host_memory_bytes=memory, switches=tree,
                       sources={**base.sources, **{key: text for key, text in sources.items() if key[:4] != "gpu."}})
    gbit = NIC_GBIT.get(kind.name, 400)
    for key in ("nics_per_node", "nic_bandwidth", "rails"):
        sources[f"cluster.{key}"] = (f"{inventory.ASSUMED}: a {gbit} Gbit/s NIC on a rail of its own for each GPU; "
                                     "Slurm does not know the network; give a cluster file (--cluster)")
    return ClusterSpec(name="slurm", nodes=names, gpus_per_node=per_node, gpu=kind, nics_per_node=per_node,
                       nic_bandwidth=gbit * GBIT, rails=per_node, host_memory_bytes=memory, switches=tree,
                       sources=sources)


def _one_kind(found: Survey, wanted: str | None,
              base: ClusterSpec | None) -> tuple[Gpu, int, tuple[Node, ...], list[tuple[str, str]]]:
    """The nodes of the one kind to plan for."""
    wish = gpus.find(wanted, "--gpu") if wanted is not None else None
    left_out = list(found.left_out)
    by_kind: dict[tuple[str, int], list[tuple[Node, Gpu]]] = {}
    for node in found.nodes:
        if len(node.gpus) > 1:
            mixed = " and ".join(f"{count} {kind or 'gpu'}" for kind, count in node.gpus)
            left_out.append((node.name, f"mixes {mixed}"))
            continue
        label, count = node.gpus[0]
        where = f"{SHOW_NODES}, {node.name}, Gres"
        kind = _kind_of(label, where, wish) if label else wish or (base.gpu if base else None)
        if kind is None and not label:
            raise UserError(f"Slurm does not say which GPUs {node.name} has: Gres=gpu:{count} names no type",
                            where=where,
                            fix="give it with --gpu, for example --gpu h100, or give a cluster file with --cluster")
        if kind is None or wish is not None and kind.name != wish.name:
            left_out.append((node.name, f"has {label}, not {wish.name if wish else 'a known kind'}"))
            continue
        by_kind.setdefault((kind.name, count), []).append((node, kind))
    if not by_kind:
        raise UserError(f"no node is left; left out: {_listed(left_out)}", where=SHOW_NODES,
                        fix="choose another --partition, --nodelist or --gpu")
    if len(by_kind) > 1:
        parts = "; ".join(f"{len(nodes)} nodes with {count} x {name} ({nodes[0][0].name}, ...)"
                          for (name, count), nodes in by_kind.items())
        raise UserError(f"Slurm offers several kinds of nodes, and a step runs at the pace of the slowest: {parts}",
                        where=SHOW_NODES,
                        fix="plan for each kind separately: choose with --partition, --nodelist or --gpu")
    (name, count), pairs = next(iter(by_kind.items()))
    return pairs[0][1], count, tuple(node for node, _ in pairs), left_out


def _kind_of(label: str, where: str, wish: Gpu | None) -> Gpu | None:
    """The kind that a gres type names. If the user requested one kind, the table need not contain the others."""
    try:
        return gpus.find(label, where)
    except UserError:
        if wish is None:
            raise
        return None


def _this_host() -> str:
    return socket.gethostname().split(".")[0]


def _listed(left_out: Sequence[tuple[str, str]]) -> str:
    """`cpu-001, cpu-002: no GPU; h100-003: DRAIN (bad GPU)`, grouped by reason to keep large clusters readable."""
    texts = []
    for why, count in Counter(why for _, why in left_out).items():
        names = [name for name, other in left_out if other == why]
        more = f" and {count - 4} more" if count > 4 else ""
        texts.append(f"{', '.join(names[:4])}{more}: {why}")
    return "; ".join(texts[:8]) + (f"; and {len(texts) - 8} other reasons" if len(texts) > 8 else "")


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    close = nearest(name, known, alike=0.5)
    shown = ", ".join(known[:8]) + (" ..." if len(known) > 8 else "")
    return (f"did you mean {close}? " if close else "") + f"there are: {shown or 'none'}"
