"""The routes of a weight sync as text and as JSON: a table that compares the three, and who forwards what to whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from launch.coefficients.sync import SyncCoefficients
from launch.fabric.choose import SyncPrediction
from launch.fabric.communicators import Communicators
from launch.fabric.estimate import KINDS, Kind
from launch.fabric.paths import Branch, trees
from launch.fabric.simulate import arrivals
from launch.report.quantities import human, plural, seconds

MOST_LINES = 32
"""Lines of a route's drawing, unless all are asked for."""
FEW = 4
"""Number of equal receivers that are still drawn one by one."""


class Drawn(NamedTuple):
    """A route, simulated chunk by chunk."""

    kind: Kind
    fingerprint: str
    wire_s: float
    total_s: float
    trees: list[Branch]


class Names(NamedTuple):
    """Names of the nodes in the plan's order; () if the plan has no seats (this machine)."""

    training: Sequence[str]
    rollout: Sequence[str]
    training_nodes: int
    """Number of training nodes in the fabric's numbering. Rollout nodes come after them."""

    def of(self, node: int) -> str:
        """`training 3 (h100-004)`."""
        partition, names, number = ("training", self.training, node) if node < self.training_nodes else \
            ("rollout", self.rollout, node - self.training_nodes)
        return f"{partition} {number}" + (f" ({names[number]})" if number < len(names) else "")


def simulated(sync: SyncPrediction, coefficients: SyncCoefficients, kinds: Sequence[Kind] = KINDS) -> list[Drawn]:
    """The trees of each route, with the time at which each node has received its part."""
    drawn = []
    for kind in kinds:
        route = sync.build(kind)
        result = sync.simulate(coefficients, kind)
        drawn.append(Drawn(kind, route.fingerprint(), result.wire_s, result.total_s,
                           trees(route, arrivals(route, coefficients))))
    return drawn


def as_text(sync: SyncPrediction, drawn: Sequence[Drawn], names: Names, needed: Mapping[Kind, Communicators], *,
            every_line: bool = False) -> str:
    """A table of the routes, the choice with its reason, and each route's drawing. `needed`: communicators on GPUs."""
    lines = [*_table(sync, needed), "", f"{sync.chosen}: {sync.reason}"]
    if needed:
        chosen_needs = needed[sync.chosen]
        lines.append(f"{chosen_needs.total} communicators, opened at the start in {chosen_needs.rounds} rounds, about "
                     f"{seconds(chosen_needs.opening_s)}")
    lines += [f"one copy of the weights: {human(sync.replica_bytes, 'bytes')} in {sync.wire_precision}; no route can "
              f"be faster than {seconds(sync.floor_s)} ({sync.floor_by})", *sync.notes]
    for each in drawn:
        chosen = " (chosen)" if each.kind == sync.chosen else ""
        lines += ["", f"{each.kind}{chosen}: the last byte arrives after {seconds(each.wire_s)}; route "
                      f"{each.fingerprint}"]
        drawing = [line for tree in each.trees for line in _draw(tree, names)]
        shown = drawing if every_line or len(drawing) <= MOST_LINES + 1 else drawing[:MOST_LINES]
        lines += [f"  {line}" for line in shown]
        if len(shown) < len(drawing):
            lines.append(f"  ... {plural(len(drawing) - len(shown), 'line')} more (--all)")
    return "\n".join(lines)


def _table(sync: SyncPrediction, needed: Mapping[Kind, Communicators]) -> Iterator[str]:
    """One row per route, all predicted and readable without the drawing. Communicators: the largest number on a
    training GPU and on a rollout GPU, and the most memory that they take on one GPU."""
    yield (f"  {'route':<8}{'whole sync':>12}{'wire':>10}{'at least':>10}{'hops':>6}{'chunk':>10}"
           f"{'trainer NIC out':>18}{'rollout NIC in':>17}{'forwards':>11}"
           + (f"{'communicators a GPU':>22}" if needed else ""))
    for kind in KINDS:
        cost = sync.routes[kind]
        mark = ">" if kind == sync.chosen else " "
        yield (f"{mark} {kind:<8}{seconds(cost.expected_s):>12}{seconds(cost.wire_s):>10}"
               f"{seconds(cost.lower_bound_s):>10}{cost.hops:>6}{human(cost.chunk_bytes, 'bytes'):>10}"
               f"{human(cost.trainer_nic_out_bytes, 'bytes'):>18}{human(cost.rollout_nic_in_bytes, 'bytes'):>17}"
               f"{human(cost.rollout_nic_out_bytes, 'bytes') if cost.rollout_nic_out_bytes else '-':>11}"
               + (f"{_needs(needed[kind]):>22}" if needed else ""))


def _needs(needed: Communicators) -> str:
    """`16 + 22, 2.0 GB`: number on a training GPU, number on a rollout GPU, and their memory."""
    size = human(needed.bytes, "bytes")
    return f"{needed.training} + {needed.rollout}, {size}"


def _draw(branch: Branch, names: Names, indent: str = "", joint: str = "") -> Iterator[str]:
    if branch.via is None:
        yield names.of(branch.node)
    else:
        yield f"{indent}{joint}{_told([branch], names)}"
        indent += {"├─ ": "│  ", "└─ ": "   "}.get(joint, "")
    groups = _folded(branch.children)
    for group in groups:
        # A chain is drawn straight down, because it may have as many links as there are nodes.
        link = "↓ " if len(groups) == 1 and branch.via is not None else "└─ " if group is groups[-1] else "├─ "
        if len(group) == 1:
            yield from _draw(group[0], names, indent, link)
        else:
            yield f"{indent}{link}{_told(group, names)}"


def _folded(branches: Sequence[Branch]) -> list[list[Branch]]:
    """Group neighbours that receive the same and forward nothing, if there are many. All others stay alone."""
    groups: list[list[Branch]] = []
    for each in branches:
        last = groups[-1] if groups else None
        if last and not each.children and not last[0].children and each.node == last[-1].node + 1 \
                and human(each.bytes, "bytes") == human(last[0].bytes, "bytes"):
            last.append(each)
        else:
            groups.append([each])
    return [part for group in groups for part in ([group] if len(group) > FEW else [[each] for each in group])]


def _told(group: Sequence[Branch], names: Names) -> str:
    size, last = human(group[0].bytes, "bytes"), max(each.seconds for each in group)
    if len(group) > 1:
        first = min(each.seconds for each in group)
        return (f"{names.of(group[0].node)} to {names.of(group[-1].node)}  {size} each, {seconds(first)} to "
                f"{seconds(last)}")
    where = "its twins (NVLink)" if group[0].via == "nvlink" else names.of(group[0].node)
    return f"{where}  {size}, {seconds(last)}"


COSTS = ("kind", "lower_bound_s", "wire_s", "expected_s", "trainer_nic_out_bytes", "rollout_nic_in_bytes",
         "rollout_nic_out_bytes", "nvlink_bytes", "sent_bytes", "hops", "chunk_bytes", "transfers")
"""The numbers of a route in the JSON document."""
NEEDS = ("training", "rollout", "training_bytes", "rollout_bytes", "total", "rounds", "opening_s")
"""Those of its communicators."""


def as_document(sync: SyncPrediction, drawn: Sequence[Drawn], names: Names,
                needed: Mapping[Kind, Communicators]) -> dict:
    """For `--json`: bytes as integers, seconds as floats, nodes by their number in the plan and by name."""
    costs = {kind: {name: getattr(sync.routes[kind], name) for name in COSTS}
             | {"trainer_staging_bytes": sync.staging[kind].training,
                "rollout_staging_bytes": sync.staging[kind].rollout}
             | ({"communicators": {name: getattr(needed[kind], name) for name in NEEDS}} if needed else {})
             for kind in KINDS}
    return {"predicted": True, "chosen": sync.chosen, "reason": sync.reason, "floor_s": sync.floor_s,
            "floor_by": sync.floor_by, "replica_bytes": sync.replica_bytes, "wire_precision": sync.wire_precision,
            "gpu_order": list(sync.gpu_order), "notes": list(sync.notes), "routes": costs,
            "drawn": [{"route": each.kind, "fingerprint": each.fingerprint, "wire_s": each.wire_s,
                       "total_s": each.total_s, "trees": [_plain(tree, names) for tree in each.trees]}
                      for each in drawn]}


def _plain(branch: Branch, names: Names) -> dict:
    plain = {"node": branch.node, "name": names.of(branch.node)}
    if branch.via is not None:
        plain |= {"via": branch.via, "bytes": branch.bytes, "seconds": branch.seconds}
    return plain | {"children": [_plain(child, names) for child in branch.children]}
