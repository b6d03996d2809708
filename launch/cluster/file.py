"""Reads a cluster file (`configs/clusters/*.yaml`) into a `ClusterSpec` that records the line of every figure."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launch.cluster import gpus, hostlist, schema, tree
from launch.cluster.known_coefficients import PREFIX, faults
from launch.cluster.spec import ClusterSpec, Gpu, Switch
from launch.config import typed_file, yaml_file
from launch.errors import Problems, UserError

GB = 10**9
GBIT = 10**9 / 8
KIND, EXAMPLE = "cluster file", "configs/clusters/h100x32.yaml"


def load_cluster(path: str | os.PathLike[str]) -> ClusterSpec:
    """Read and check a cluster file.

    Raises:
        UserError: the file is missing, is not valid YAML, has unknown keys (with the nearest valid one), or has
            figures that are zero, negative or contradictory. Reports all problems at once, each with its line.
    """
    file = os.fspath(path)
    return parse_cluster(read_text(file), file)


def parse_cluster(text: str, file: str) -> ClusterSpec:
    """As `load_cluster`, for the text of a file named `file`."""
    document = yaml_file.parse(text, file)
    content = typed_file.validated(schema.ClusterFile, document, file, KIND, EXAMPLE, special=_mixed_kinds)
    return _Builder(content, document, file, Problems(file)).build()


class _Builder:
    """Builds a `ClusterSpec` from the typed content, and collects all problems."""

    def __init__(self, content: schema.ClusterFile, document: yaml_file.Document, file: str,
                 problems: Problems) -> None:
        self.content, self.document, self.file, self.problems = content, document, file, problems
        self.sources: dict[str, str] = {}

    def where(self, *path: str | int) -> str:
        return typed_file.line_of(self.document, self.file, path)

    def build(self) -> ClusterSpec:
        content, network = self.content, self.content.network
        nodes = self._nodes()
        gpu = self._gpu()
        self._check_network(nodes)
        switches = self._switches(nodes)
        coefficients = self._coefficients()
        self.problems.raise_if_any()
        assert gpu is not None      # otherwise a problem was raised above
        spec = ClusterSpec(
            name=content.name or Path(self.file).stem, nodes=nodes, gpus_per_node=content.gpus.per_node, gpu=gpu,
            nics_per_node=network.nics_per_node, nic_bandwidth=network.nic_gbit_per_s * GBIT, rails=network.rails,
            host_memory_bytes=round(content.host.memory_gb * GB), switches=switches,
            node_mtbf_hours=content.node_mtbf_hours or 0.0, nvlink_nodes=network.nvlink_nodes,
            coefficients=coefficients)
        for key, path in (("nodes", ("nodes",)), ("gpus_per_node", ("gpus", "per_node")),
                          ("nics_per_node", ("network", "nics_per_node")),
                          ("nic_bandwidth", ("network", "nic_gbit_per_s")), ("rails", ("network", "rails")),
                          ("host_memory_bytes", ("host", "memory_gb")), ("switches", ("network", "switches")),
                          ("node_mtbf_hours", ("node_mtbf_hours",)), ("nvlink_nodes", ("network", "nvlink_nodes"))):
            if path in self.document.lines:
                self.sources[f"cluster.{key}"] = f"{self.file}:{self.document.lines[path]}"
            else:
                self.sources[f"cluster.{key}"] = "default"
        return replace(spec, sources=self.sources)

    def _nodes(self) -> tuple[str, ...]:
        given, where = self.content.nodes, self.where("nodes")
        if given.names is None:
            if given.count is None:
                self.problems.add("the cluster has no nodes", where=where, fix="add nodes.count or nodes.names")
                return ()
            width = max(3, len(str(given.count)))
            return tuple(f"node{number:0{width}d}" for number in range(1, given.count + 1))
        names = self._expand(given.names, self.where("nodes", "names"))
        if not names:
            self.problems.add("nodes.names is empty", where=self.where("nodes", "names"),
                              fix='list the nodes: names: "node[001-032]"')
        elif given.count is not None and given.count != len(names):
            self.problems.add(f"nodes.count = {given.count}, but nodes.names lists {len(names)} nodes", where=where,
                              fix="correct one of them, or remove nodes.count")
        repeated = [name for name, times in Counter(names).items() if times > 1]
        if repeated:
            self.problems.add(f"nodes.names lists {', '.join(repeated[:6])} more than once",
                              where=self.where("nodes", "names"), fix="name each node once")
        return names

    def _expand(self, names: schema.Names, where: str) -> tuple[str, ...]:
        texts = [names] if isinstance(names, str) else names
        try:
            return tuple(name for text in texts if text.strip() for name in hostlist.expand(text, where))
        except UserError as error:
            self.problems.errors.append(error)
            return ()

    def _gpu(self) -> Gpu | None:
        given = self.content.gpus
        try:
            gpu = gpus.find(given.kind, self.where("gpus", "kind"))
        except UserError as error:
            self.problems.errors.append(error)
            return None
        self.sources.update({f"gpu.{name}": gpu.source for name in gpus.FIGURES})
        for key, fields in (("memory_gb", ("hbm_bytes", "usable_bytes")), ("memory_gb_per_s", ("hbm_bandwidth",)),
                            ("nvlink_gb_per_s", ("nvlink_bandwidth",))):
            value = getattr(given, key)
            if value is not None:
                gpu = replace(gpu, **{name: round(value * GB) if name.endswith("_bytes") else value * GB
                                      for name in fields})
                self.sources.update({f"gpu.{name}": self.where("gpus", key) for name in fields})
        return gpu

    def _check_network(self, nodes: Sequence[str]) -> None:
        per_node, network = self.content.gpus.per_node, self.content.network
        nics, rails, domain = network.nics_per_node, network.rails, network.nvlink_nodes
        if rails not in (1, nics):
            what = ("there are more rails than NICs" if rails > nics else
                    "each NIC of a node has its own rail, or all NICs share one")
            self.problems.add(f"network.rails = {rails} with network.nics_per_node = {nics}: {what}",
                              where=self.where("network", "rails"),
                              fix=f"use rails: {nics} for a rail-optimised fabric, rails: 1 for any other")
        if per_node % nics and nics % per_node:
            self.problems.add(f"network.nics_per_node = {nics} does not divide gpus.per_node = {per_node}: some GPUs "
                              "would get more of a NIC than others", where=self.where("network", "nics_per_node"),
                              fix="count only the NICs that serve GPUs, not the one for storage and login")
        if nodes and len(nodes) % domain:
            self.problems.add(f"network.nvlink_nodes = {domain} does not divide the {len(nodes)} nodes",
                              where=self.where("network", "nvlink_nodes"),
                              fix="list whole NVLink domains, or write 1")

    def _switches(self, nodes: Sequence[str]) -> tuple[Switch, ...]:
        entries = self.content.network.switches
        named: list[tuple[str, ...] | None] = []
        for index, entry in enumerate(entries):
            where = self.where("network", "switches", index, "nodes")
            named.append(self._expand(entry.nodes, where) if isinstance(entry.nodes, (str, list)) else None)
        taken = {node for names in named if names for node in names}
        free = [node for node in nodes if node not in taken]
        switches, at = [], 0
        for index, (entry, names) in enumerate(zip(entries, named, strict=True)):
            if isinstance(entry.nodes, int):
                names = tuple(free[at:at + entry.nodes])
                if len(names) < entry.nodes:
                    self.problems.add(f"switch {entry.name} has {entry.nodes} nodes, but only {len(names)} are left",
                                      where=self.where("network", "switches", index, "nodes"),
                                      fix="make the counts of all leaf switches add up to the number of nodes")
                    return ()
                at += entry.nodes
            below = () if entry.switches is None else self._expand(
                entry.switches, self.where("network", "switches", index, "switches"))
            switches.append(Switch(entry.name, below, names or ()))
        if not self.problems.errors:
            index_of = {entry.name: index for index, entry in enumerate(entries)}
            for name, what, fix in tree.faults(switches, nodes):
                path = ("network", "switches") + ((index_of[name],) if name else ())
                self.problems.add(what, where=self.where(*path), fix=fix)
        return tuple(switches)

    def _coefficients(self) -> dict[str, float]:
        given = self.content.coefficients
        values = {f"{PREFIX}{key}": coefficient.value for key, coefficient in given.items()}
        for fault in faults(values):
            where = self.where("coefficients", fault.key.removeprefix(PREFIX))
            self.problems.add(fault.what, where=where, fix=fault.fix)
        self.sources.update({
            f"{PREFIX}{key}": f"{coefficient.source} ({self.file}:{self.document.lines[('coefficients', key)]})"
            for key, coefficient in given.items()})
        return values


def read_text(file: str) -> str:
    """The text of a cluster file, with its line ends unchanged. Raises UserError."""
    return typed_file.read_text(file, KIND, EXAMPLE)


def _mixed_kinds(key: str, error: dict) -> tuple[str, str] | None:
    if error["type"] != "extra_forbidden" and key in ("gpus", "gpus.kind") and isinstance(error["input"], list):
        return ("a cluster file describes nodes with one kind of GPU; mixed kinds would run at the pace of the "
                "slowest", "write one file for each kind and plan for each")
    return None
