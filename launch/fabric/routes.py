"""Routes: edges with bytes, slots, hops and parents. Routes are deterministic: every rank builds the same one and
compares its fingerprint.

    direct  Every receiver receives from holders of the shards. Slots form a Latin square: within a slot, no NIC sends
            or receives twice, so a receiver has one stage at a time. Small transfers come last.
    chain   The holders of a shard divide the receivers among themselves. Each sends to its first receiver, which
            forwards chunk by chunk to the second, and so on.
    tree    The same groups, each as two binary trees with half the bytes. A node that forwards in one tree is a leaf of
            the other, so no node sends more than it receives.

Receivers under other leaf switches come before those under the sender's. Inside a node, the bytes from the NIC are
forwarded to twins over NVLink.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple

from launch.fabric.estimate import MINOR, Kind, dealt_whole
from launch.fabric.lanes import Fabric, NodeKind, Piece, Place, Traffic
from launch.fabric.shards import ALIGN, Shard, Worker, share

ROOT = -1
"""Parent of an edge whose source is a training GPU."""


class Edge(NamedTuple):
    """A range of a flow (shard -> worker), sent from one GPU to another."""

    source: Place
    destination: Place
    shard: Shard
    worker: Worker
    first_byte: int
    bytes: int
    via: Literal["nic", "nvlink"]
    hop: int
    """1 from a training GPU, plus 1 for each time the bytes are forwarded."""
    slot: int
    """Order at both NICs (`direct`); 0 for other routes."""
    parent: int
    """Number of the edge that brings these bytes to the source; ROOT if the source is a training GPU."""


@dataclass(frozen=True)
class Route:
    """All edges. A parent comes before its children."""

    kind: Kind
    fabric: Fabric
    edges: tuple[Edge, ...]
    chunk_bytes: int
    slots: int
    """Number of slots; 0 if transfers are not ordered by slots."""

    @property
    def hops(self) -> int:
        """NIC hops to the last receiver."""
        return max((edge.hop for edge in self.edges if edge.via == "nic"), default=0)

    @cached_property
    def nic_bytes(self) -> tuple[dict[Place, int], dict[Place, int]]:
        """(out, in): bytes through each NIC, as Place(node, NIC)."""
        out: dict[Place, int] = defaultdict(int)
        into: dict[Place, int] = defaultdict(int)
        for edge in self.edges:
            if edge.via == "nic":
                out[self.nic(edge.source)] += edge.bytes
                into[self.nic(edge.destination)] += edge.bytes
        return dict(out), dict(into)

    @property
    def links(self) -> Links:
        """The pairs of GPUs between which something is sent."""
        each = self.fabric.gpus_per_node
        pairs: dict[str, set[tuple[int, int]]] = {"nic": set(), "nvlink": set()}
        for edge in self.edges:
            pairs[edge.via].add((edge.source.node * each + edge.source.gpu,
                                 edge.destination.node * each + edge.destination.gpu))
        return Links(frozenset(pairs["nic"]), frozenset(pairs["nvlink"]))

    def nic(self, place: Place) -> Place:
        return Place(place.node, self.fabric.nic(place.gpu))

    def fingerprint(self) -> str:
        """Hash of the route, for comparison between ranks."""
        text = f"{self.kind} {self.chunk_bytes} {[tuple(edge) for edge in self.edges]}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Lane(NamedTuple):
    """A piece, its senders and its receiving nodes."""

    piece: Piece
    senders: tuple[Place, ...]
    nodes: tuple[int, ...]
    number: int
    """Number among the lanes into the same GPU, minor ones last."""
    lanes: int
    """Number of large lanes into the same GPU."""
    minor: bool
    whole: bool
    """Whether the senders divide the receivers among themselves (`direct`)."""


class Links(NamedTuple):
    """Pairs of GPUs of which the first sends to the second. A GPU is node x GPUs of a node + index."""

    nic: frozenset[tuple[int, int]]
    nvlink: frozenset[tuple[int, int]]


def links(traffic: Traffic, kind: Kind) -> Links:
    """`Route.links` of `build`, in a fraction of its time: for a search, which asks only how many there are."""
    fabric, each = traffic.fabric, traffic.fabric.gpus_per_node
    nic: set[tuple[int, int]] = set()
    nvlink: set[tuple[int, int]] = set()
    for lane in _lanes(traffic):
        piece, gpu, count = lane.piece, lane.piece.gpu, len(lane.senders)
        if kind != "direct":
            for sender, nodes in _dealt(fabric, lane):
                gpus = [sender.node * each + sender.gpu, *(node * each + gpu for node in nodes)]
                for up, _, _ in _shapes(kind, len(nodes), piece.bytes):
                    nic.update([(gpus[above], gpus[position]) for position, above in up.items()])
        else:
            blocks = _blocks(lane.nodes, count) if lane.whole else [
                lane.nodes if high > low else () for low, high in (share(piece.bytes, count, number)
                                                                   for number in range(count))]
            for sender, block in zip(lane.senders, blocks, strict=True):
                source = sender.node * each + sender.gpu
                nic.update([(source, node * each + gpu) for node in block])
        for copy in piece.copies:
            nvlink.update([(node * each + gpu, node * each + copy) for node in lane.nodes])
    return Links(frozenset(nic), frozenset(nvlink))


def build(traffic: Traffic, kind: Kind, chunk_bytes: int) -> Route:
    """The edges of a route."""
    lanes = list(_lanes(traffic))
    if kind == "direct":
        edges, slots = _direct(traffic.fabric, lanes)
    else:
        edges, slots = _forwarded(traffic.fabric, lanes, kind), 0
    return Route(kind, traffic.fabric, tuple(edges), chunk_bytes, slots)


def _lanes(traffic: Traffic) -> Iterator[_Lane]:
    for kind, demands in zip(traffic.kinds, traffic.demands, strict=True):
        into, whole = _numbered(kind, traffic.fabric), dealt_whole(kind, demands)
        for piece in kind.pieces:
            number, lanes, minor = into[piece]
            rail = traffic.fabric.rail(piece.gpu)
            yield _Lane(piece, traffic.sender_places(piece.shard, rail), kind.nodes, number, lanes, minor,
                        whole or minor)


def _numbered(kind: NodeKind, fabric: Fabric) -> dict[Piece, tuple[int, int, bool]]:
    by_gpu: dict[int, list[Piece]] = defaultdict(list)
    for piece in kind.pieces:
        by_gpu[piece.gpu].append(piece)
    numbered = {}
    for gpu, pieces in by_gpu.items():
        ingress = kind.ingress[fabric.nic(gpu)]
        large = [piece for piece in pieces if piece.bytes * MINOR >= ingress]
        small = [piece for piece in pieces if piece.bytes * MINOR < ingress]
        for number, piece in enumerate(large + small):
            numbered[piece] = number, max(1, len(large)), piece.bytes * MINOR < ingress
    return numbered


def _direct(fabric: Fabric, lanes: Sequence[_Lane]) -> tuple[list[Edge], int]:
    """Edges in slot order. In the order of the Latin square's offsets, each edge gets the first slot in which both its
    NICs are free. For equal stages and receivers, the result is the square itself."""
    wanted = []
    for lane in lanes:
        piece, count = lane.piece, len(lane.senders)
        if lane.whole:
            for sender, block in zip(lane.senders, _blocks(lane.nodes, count), strict=True):
                modulus = max(len(block), lane.lanes)
                for index, node in enumerate(block):
                    wanted.append((lane.minor, (index - lane.number) % modulus, sender, Place(node, piece.gpu), piece,
                                   0, piece.bytes))
        else:
            modulus = max(len(lane.nodes), lane.lanes * count)
            for number, sender in enumerate(lane.senders):
                low, high = share(piece.bytes, count, number)
                for index, node in enumerate(lane.nodes):
                    offset = (index - lane.number - lane.lanes * number) % modulus
                    wanted.append((lane.minor, offset, sender, Place(node, piece.gpu), piece, low, high))
    wanted.sort()
    taken_out: dict[Place, int] = defaultdict(int)      # slots in use, as a bit mask
    taken_in: dict[Place, int] = defaultdict(int)
    slotted = []
    for number, (_, _, source, destination, _, low, high) in enumerate(wanted):
        if high == low:
            continue
        out, into = Place(source.node, fabric.nic(source.gpu)), Place(destination.node, fabric.nic(destination.gpu))
        free = ~(taken_out[out] | taken_in[into])
        bit = free & -free
        taken_out[out] |= bit
        taken_in[into] |= bit
        slotted.append((bit.bit_length() - 1, number))
    edges: list[Edge] = []
    for slot, number in sorted(slotted):
        _, _, source, destination, piece, low, high = wanted[number]
        _add(edges, piece, source, destination, low, high, hop=1, slot=slot, parent=ROOT)
    return edges, max((slot for slot, _ in slotted), default=-1) + 1


def _forwarded(fabric: Fabric, lanes: Sequence[_Lane], kind: Kind) -> list[Edge]:
    edges: list[Edge] = []
    for lane in lanes:
        piece = lane.piece
        for sender, nodes in _dealt(fabric, lane):
            for up, low, high in _shapes(kind, len(nodes), piece.bytes):
                added: dict[int, tuple[int, int]] = {0: (ROOT, 0)}       # position -> its edge's number and hop
                for position in up:
                    parent, hop = added[up[position]]
                    source = Place(nodes[up[position] - 1], piece.gpu) if up[position] else sender
                    number = _add(edges, piece, source, Place(nodes[position - 1], piece.gpu), low, high, hop=hop + 1,
                                  slot=0, parent=parent)
                    added[position] = number, hop + 1
    return edges


def _dealt(fabric: Fabric, lane: _Lane) -> Iterator[tuple[Place, list[int]]]:
    """Each sender with the nodes behind it, those under other leaf switches first."""
    for sender, block in zip(lane.senders, _blocks(lane.nodes, len(lane.senders)), strict=True):
        leaf = fabric.leaf(sender.node)
        yield sender, sorted(block, key=lambda node: (fabric.leaf(node) == leaf, fabric.leaf(node), node))


def _add(edges: list[Edge], piece: Piece, source: Place, destination: Place, low: int, high: int, *, hop: int,
         slot: int, parent: int) -> int:
    """Append an edge and the edges to the twins of its destination. Returns the edge's number."""
    number = len(edges)
    edges.append(Edge(source, destination, piece.shard, piece.worker, piece.first_byte + low, high - low, "nic", hop,
                      slot, parent))
    for gpu in piece.copies:
        edges.append(Edge(destination, Place(destination.node, gpu), piece.shard, piece.worker,
                          piece.first_byte + low, high - low, "nvlink", hop + 1, slot, number))
    return number


def _shapes(kind: Kind, receivers: int, size: int) -> list[tuple[dict[int, int], int, int]]:
    """[(position -> position of its parent, parents first; first byte, last byte)]. Position 0 is the sender."""
    if kind == "chain" or receivers < 2 or size < 2 * ALIGN:
        return [({position: position - 1 for position in range(1, receivers + 1)}, 0, size)]
    return [(tree, *share(size, 2, half)) for half, tree in enumerate(_two_trees(receivers))]


@cache
def _two_trees(receivers: int) -> tuple[dict[int, int], dict[int, int]]:
    first = binary_tree(receivers)
    return _parents_first(first), _parents_first(second_tree(first))


def binary_tree(receivers: int) -> dict[int, int]:
    """Parent of each of 1..receivers in the in-order binary tree, whose odd positions are leaves. 0 has one child."""
    parents = {}
    for position in range(1, receivers + 1):
        bit = position & -position
        up = (position ^ bit) | bit << 1
        parents[position] = up if up <= receivers else position ^ bit
    return parents


def second_tree(first: dict[int, int]) -> dict[int, int]:
    """A tree on the same positions, in which no position forwards that forwards in the first tree: mirrored for an even
    number of receivers, shifted by one for an odd number."""
    count = len(first)

    def moved(position: int) -> int:
        if position == 0:
            return 0
        return count + 1 - position if count % 2 == 0 else position % count + 1

    return {moved(position): moved(up) for position, up in first.items()}


def _parents_first(parents: dict[int, int]) -> dict[int, int]:
    children: dict[int, list[int]] = defaultdict(list)
    for position in sorted(parents):
        children[parents[position]].append(position)
    ordered: dict[int, int] = {}
    front = [0]
    while front:
        front = [child for position in front for child in children[position]]
        ordered.update((position, parents[position]) for position in front)
    return ordered


def _blocks(nodes: Sequence[int], count: int) -> list[Sequence[int]]:
    """`nodes` in `count` contiguous blocks of nearly equal size, one per sender."""
    return [nodes[len(nodes) * block // count:len(nodes) * (block + 1) // count] for block in range(count)]
