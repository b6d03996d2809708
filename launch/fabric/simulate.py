"""Chunk-level simulation of a route: NICs in both directions, NVLink, packing and unpacking.

A chunk occupies its sender's outgoing NIC and its receiver's incoming NIC for c/B + a each. Both start together unless
the receiver's NIC is busy; then the chunk queues there. (Packets of concurrent transfers interleave, so the queue of
one receiver does not stop a sender from serving another.) With slots (`direct`), a NIC handles its transfers in order.
Without, the chunk that can start first starts first, and a tie goes to the lower chunk number, so transfers through one
NIC alternate. A forwarded chunk can leave once it has arrived. The simulation is deterministic.

Equal rails are simulated once: the graph splits into components, and of components with the same structure and bytes
(within 2 %) only the one with the busiest port is simulated. Transfers of a few bytes between components (vocabulary
rows at the border of two ranks) occupy both NICs without coupling them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from launch.coefficients.sync import SyncCoefficients
from launch.fabric.estimate import MINOR
from launch.fabric.routes import ROOT, Edge, Route

Port = tuple
"""(kind, node, NIC or GPU). The kind is "out" or "in" for a NIC, "nvout" or "nvin" for a GPU."""
ALIKE = 0.02
"""Relative difference of bytes up to which two transfers count as equal."""


class Simulation(NamedTuple):
    """Result of a simulation."""

    wire_s: float
    """Arrival of the last byte."""
    done_s: float
    """Unpacking of the last byte."""
    total_s: float
    """The whole sync: pause, barriers, transfer, digest, quantising."""
    chunks: int
    """Chunks that were simulated."""
    components: int
    """Components of the graph. Of equal ones, only one is simulated."""


def simulate(route: Route, coefficients: SyncCoefficients, *, quantise: bool = False,
             trainer_digested_bytes: float = 0.0) -> Simulation:
    """Seconds of a route on an otherwise idle fabric.

    Args:
        trainer_digested_bytes: see `RouteCost`.
    """
    ports = [_ports(route, edge) for edge in route.edges]
    parts = _components(route, ports)
    wire = done = 0.0
    chunks = 0
    for members in _representatives(route, parts):
        part_wire, part_done, part_chunks = _Run(route, coefficients, members).run()
        wire, done, chunks = max(wire, part_wire), max(done, part_done), chunks + part_chunks
    held: dict = defaultdict(int)
    for edge in route.edges:
        held[edge.destination] += edge.bytes
    most = max(held.values(), default=0)
    beside, after = max(done, trainer_digested_bytes / coefficients.digest_rate), most / coefficients.digest_rate
    if quantise:        # layer by layer, while others arrive
        beside = max(beside, most / coefficients.quantise_rate)
        after += route.chunk_bytes / coefficients.quantise_rate
    total = coefficients.pause_s + coefficients.barrier_s + beside + after
    return Simulation(wire, done, total, chunks, len(parts))


def arrivals(route: Route, coefficients: SyncCoefficients) -> tuple[float, ...]:
    """Arrival of each edge's last byte in seconds, by the edge's number. Every component is simulated, because similar
    rails may differ by a few per cent."""
    last = [0.0] * len(route.edges)
    for members in _components(route, [_ports(route, edge) for edge in route.edges]):
        run = _Run(route, coefficients, members)
        run.run()
        for member, arrived in zip(members, run.arrived, strict=True):   # a cut transfer has two members: out and in
            last[member.edge] = max(last[member.edge], arrived[-1])
    return tuple(last)


def _ports(route: Route, edge: Edge) -> tuple[Port, Port]:
    if edge.via == "nvlink":
        return ("nvout", *edge.source), ("nvin", *edge.destination)
    return ("out", *route.nic(edge.source)), ("in", *route.nic(edge.destination))


class _Member(NamedTuple):
    """An edge in a component. A port outside the component is None."""

    edge: int
    out: Port | None
    into: Port | None


def _components(route: Route, ports: list[tuple[Port, Port]]) -> list[list[_Member]]:
    """Edges that share ports or forward each other's bytes are in one component."""
    into = route.nic_bytes[1]
    minor = [edge.via == "nic" and edge.parent == ROOT and edge.bytes * MINOR < into[route.nic(edge.destination)]
             for edge in route.edges]
    above: dict[Port, Port] = {}

    def find(port: Port) -> Port:
        root = port
        while above.setdefault(root, root) != root:
            root = above[root]
        while above[port] != root:
            above[port], port = root, above[port]
        return root

    for number, edge in enumerate(route.edges):
        out, inward = ports[number]
        if not minor[number]:
            above[find(inward)] = find(out)
        if edge.parent != ROOT:
            above[find(out)] = find(ports[edge.parent][1])
    parts: dict[Port, list[_Member]] = defaultdict(list)
    for number in range(len(route.edges)):
        out, inward = ports[number]
        source, target = find(out), find(inward)
        if source == target:
            parts[source].append(_Member(number, out, inward))
        else:
            parts[target].append(_Member(number, None, inward))
            parts[source].append(_Member(number, out, None))
    return list(parts.values())


def _representatives(route: Route, parts: list[list[_Member]]) -> list[list[_Member]]:
    """The component with the busiest port of each class."""
    classes: dict[tuple, list[tuple[list[int], float, list[_Member]]]] = defaultdict(list)
    for members in parts:
        structure, sizes, busiest = _outline(route, members)
        alike = classes[structure]
        for number, (known, load, _) in enumerate(alike):
            if all(abs(mine - theirs) <= ALIKE * theirs for mine, theirs in zip(sizes, known, strict=True)):
                if busiest > load:
                    alike[number] = known, busiest, members
                break
        else:
            alike.append((sizes, busiest, members))
    return [members for alike in classes.values() for _, _, members in alike]


def _outline(route: Route, members: list[_Member]) -> tuple[tuple, list[int], float]:
    """(structure, bytes of the large transfers, load of the busiest port in NIC bytes) of a component. Small transfers
    differ from rail to rail and count only for the load."""
    large = max(route.edges[member.edge].bytes for member in members) / MINOR
    labels: dict[Port, int] = {}
    faster = route.fabric.nvlink_bandwidth / route.fabric.nic_bandwidth
    structure, sizes, load = [], [], defaultdict[Port, float](float)
    for member in members:
        edge = route.edges[member.edge]
        for port in (member.out, member.into):
            if port is not None:
                load[port] += edge.bytes / (1 if edge.via == "nic" else faster)
        if edge.bytes >= large:
            structure.append((labels.setdefault(member.out or (), len(labels)),
                              labels.setdefault(member.into or (), len(labels)), edge.slot, edge.hop))
            sizes.append(edge.bytes)
    return tuple(structure), sizes, max(load.values())


class _Run:
    """Simulates one component."""

    def __init__(self, route: Route, coefficients: SyncCoefficients, members: list[_Member]) -> None:
        fabric = route.fabric
        self.edges = [route.edges[member.edge] for member in members]
        self.out = [member.out for member in members]
        self.into = [member.into for member in members]
        self.count = [max(1, ceil(edge.bytes / route.chunk_bytes)) for edge in self.edges]
        self.size = [edge.bytes / count for edge, count in zip(self.edges, self.count, strict=True)]
        nic = fabric.nic_bandwidth * coefficients.nic_efficiency
        nvlink = fabric.nvlink_bandwidth * coefficients.nvlink_efficiency
        self.seconds = [size / nic + coefficients.chunk_latency_s if edge.via == "nic" else size / nvlink
                        for edge, size in zip(self.edges, self.size, strict=True)]
        self.copy = [size / coefficients.copy_rate for size in self.size]
        self.free: dict[Port | None, float] = defaultdict(float)
        self.unpacked: dict[Port, float] = defaultdict(float)
        self.next = [0] * len(members)
        self.arrived: list[list[float]] = [[] for _ in members]
        numbers: dict[int, int] = {}
        for number, member in enumerate(members):
            if member.into is not None:          # the incoming half of a cut transfer is the parent
                numbers[member.edge] = number
        self.parent = [numbers.get(edge.parent, ROOT) for edge in self.edges]
        self.children: list[list[int]] = [[] for _ in members]
        for number, parent in enumerate(self.parent):
            if parent != ROOT:
                self.children[parent].append(number)
        self.after, self.waits = self._order(bool(route.slots))
        self.heap: list[tuple[float, int, int]] = []

    def _order(self, slots: bool) -> tuple[list[list[int]], list[int]]:
        """(for each edge, the edges that follow it at a NIC; the number of edges before it)."""
        after: list[list[int]] = [[] for _ in self.edges]
        waits = [0] * len(self.edges)
        if not slots:
            return after, waits
        at: dict[Port, list[int]] = defaultdict(list)
        for number, edge in enumerate(self.edges):
            if edge.via == "nic":
                for port in (self.out[number], self.into[number]):
                    if port is not None:
                        at[port].append(number)
        for numbers in at.values():
            numbers.sort(key=lambda number: (self.edges[number].slot, number))
            for before, number in pairwise(numbers):
                after[before].append(number)
                waits[number] += 1
        return after, waits

    def run(self) -> tuple[float, float, int]:
        """(last arrival, last unpacking, chunks)."""
        for number in range(len(self.edges)):
            if self.parent[number] == ROOT and not self.waits[number]:
                self._offer(number, self.copy[number])
        wire = done = 0.0
        chunks = 0
        free, heap = self.free, self.heap
        while heap:
            start, chunk, number = heapq.heappop(heap)
            out, into = self.out[number], self.into[number]
            possible = max(start, free[out] if out else 0.0)
            if possible > start:
                heapq.heappush(heap, (possible, chunk, number))
                continue
            end = start + self.seconds[number]
            if out:
                free[out] = end
            if into:
                end = max(start, free[into]) + self.seconds[number]
                free[into] = end
            chunks += 1
            wire = max(wire, end)
            done = max(done, self._unpack(number, end))
            self._proceed(number, start, end)
        return wire, done, chunks

    def _offer(self, number: int, ready: float) -> None:
        heapq.heappush(self.heap, (ready, self.next[number], number))

    def _unpack(self, number: int, arrival: float) -> float:
        if self.into[number] is None:
            return arrival
        place = self.edges[number].destination
        self.unpacked[place] = max(self.unpacked[place], arrival) + self.copy[number]
        return self.unpacked[place]

    def _proceed(self, number: int, start: float, end: float) -> None:
        """After a chunk: offer the edge's next chunk and the chunks that waited for this one."""
        chunk = self.next[number]
        self.next[number] += 1
        self.arrived[number].append(end)
        if self.next[number] < self.count[number]:
            parent = self.parent[number]
            if parent == ROOT:
                self._offer(number, start + self.copy[number])      # packed while this one was on the wire
            elif len(self.arrived[parent]) > self.next[number]:
                self._offer(number, self.arrived[parent][self.next[number]])
        else:
            for later in self.after[number]:
                self.waits[later] -= 1
                if not self.waits[later]:
                    self._offer(later, start + self.copy[later])
        for child in self.children[number]:
            if self.next[child] == chunk:
                self._offer(child, end)
