"""The weight routes as pictures: nodes as points, traffic as lines, and the routes' times next to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launch.plan.forecast import Forecast, SyncEdge, SyncForecast, SyncRoute
from launch.report import svg
from launch.report.plan.map import ROLLOUT, TRAINING
from launch.report.quantities import human, plural, seconds

WIDTH = 1120.0
MOST_POINTS = 48
"""Points per row. With more nodes, several share a point."""
LEFT = 110.0
TOP, BETWEEN = 22.0, 104.0
"""Top of the training row, and distance from it to the rollout row."""
HOP_COLOURS = ("#3b82f6", "#a855f7", "#ec4899", "#f97316", "#14b8a6")


def times(sync: SyncForecast) -> str:
    """One bar per route: solid up to the lower bound of the network, lighter up to the expected time."""
    left, right, pitch = 110.0, 330.0, 34.0
    scale = (WIDTH - left - right) / max([1e-9, *(route.expected_s for route in sync.routes)])
    shapes = []
    for index, route in enumerate(sync.routes):
        y, chosen = 4 + index * pitch, route.route == sync.chosen
        colour = svg.PALETTE[0] if chosen else svg.PALETTE[-1]
        words = (f"{seconds(route.expected_s)} expected, at least {seconds(route.lower_bound_s)}; "
                 f"{plural(route.hops, 'hop')}")
        shapes += [
            svg.text(0, y + 16, route.route + (" (chosen)" if chosen else ""), bold=chosen),
            svg.rect(left, y, route.expected_s * scale, 24, colour, opacity=0.35, radius=3, title=words),
            svg.rect(left, y, min(route.lower_bound_s, route.expected_s) * scale, 24, colour, radius=3, title=words),
            svg.text(left + route.expected_s * scale + 10, y + 16, words, bold=chosen),
        ]
    return svg.picture(WIDTH, 8 + len(sync.routes) * pitch, shapes, "weight sync by route")


class NodeRow(NamedTuple):
    """The nodes of one partition, drawn as points in a row."""

    partition: str
    colour: str
    y: float
    nodes: int

    @property
    def size(self) -> int:
        """Number of nodes that share a point."""
        return -(-self.nodes // MOST_POINTS) or 1

    @property
    def points(self) -> list[float]:
        """x of each point."""
        count = -(-self.nodes // self.size)
        pitch = (WIDTH - LEFT - 20) / max(1, count)
        return [LEFT + pitch * (index + 0.5) for index in range(count)]

    def name(self, point: int) -> str:
        """`training nodes 4 to 7`."""
        last = min(self.nodes, (point + 1) * self.size) - 1
        return f"{self.partition} " + (f"node {point}" if self.size == 1 else f"nodes {point * self.size} to {last}")


def route(forecast: Forecast, which: SyncRoute) -> str:
    """Senders above, receivers below, and a line for each pair of nodes that exchange weights, wider for more bytes."""
    training = NodeRow("training", TRAINING[0], TOP, _count(which.edges, "training", forecast.split.training))
    rollout = NodeRow("rollout", ROLLOUT[0], TOP + BETWEEN, max(
        _count(which.edges, "rollout", forecast.split.rollout), *(each.target + 1 for each in which.edges), 0))
    rows = {"training": training, "rollout": rollout}
    merged: dict[tuple[str, int, int, int], list[int]] = {}
    for each in which.edges:
        key = each.partition, each.source // rows[each.partition].size, each.target // rollout.size, each.hop
        merged.setdefault(key, []).append(each.bytes)
    heaviest = max((sum(sizes) for sizes in merged.values()), default=1) or 1
    opacity = max(0.25, min(0.8, 30 / max(1, len(merged))))
    shapes, depth = [], 0.0
    for (partition, source, target, hop), sizes in sorted(merged.items()):
        start, end = rows[partition].points[source], rollout.points[target]
        width = 0.8 + 2.2 * (sum(sizes) / heaviest) ** 0.5
        colour = HOP_COLOURS[min(hop, len(HOP_COLOURS) - 1)]
        words = (f"{rows[partition].name(source)} to {rollout.name(target)}: {human(sum(sizes), 'bytes')}, "
                 f"hop {hop + 1}" + (f", {plural(len(sizes), 'pair')} of nodes" if len(sizes) > 1 else ""))
        if partition == "training":
            y1, y2 = training.y + 7, rollout.y - 7
            shapes.append(svg.path(("M", start, y1, "C", start, y1 + 45, end, y2 - 45, end, y2), colour, width=width,
                                   opacity=opacity, title=words, kind="edge"))
        else:
            y, sag = rollout.y + 7, 14 + min(70.0, abs(end - start) * 0.22)
            depth = max(depth, sag)
            shapes.append(svg.path(("M", start, y, "Q", (start + end) / 2, y + 2 * sag, end, y), colour, width=width,
                                   opacity=max(0.5, opacity), title=words, kind="edge"))
    for row in (training, rollout):
        counted = plural(row.nodes, "node") + (f", {row.size} per point" if row.size > 1 else "")
        shapes += [svg.text(0, row.y, row.partition, bold=True),
                   svg.text(0, row.y + 13, counted, size=10.5, fill=svg.SOFT)]
        every = -(-len(row.points) // 24)
        for index, x in enumerate(row.points):
            shapes.append(svg.circle(x, row.y, 6, row.colour, title=row.name(index), kind="node"))
            if index % every == 0:
                y = row.y + 20 if row is rollout and not depth else row.y - 10
                shapes.append(svg.text(x, y, str(index * row.size), size=10, anchor="middle", fill=svg.SOFT, halo=True))
    height = TOP + BETWEEN + max(depth + 14, 28)
    hops = {each.hop for each in which.edges}
    if len(hops) > 1:
        entries = [(colour, f"hop {hop + 1}") for hop, colour in enumerate(HOP_COLOURS[:max(hops) + 1])]
        if max(hops) >= len(HOP_COLOURS):
            entries[-1] = HOP_COLOURS[-1], f"hop {len(HOP_COLOURS)} and later"
        keys, taken = svg.legend(LEFT, height, entries, width=WIDTH - LEFT, size=11)
        shapes, height = shapes + keys, height + taken
    return svg.picture(WIDTH, height, shapes, f"weight sync: {which.route}")


def _count(edges: Sequence[SyncEdge], partition: str, nodes: int) -> int:
    return max([nodes, *(each.source + 1 for each in edges if each.partition == partition)])
