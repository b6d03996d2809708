"""The weight routes as pictures: nodes as points, traffic as lines, and the routes' times next to each other."""

from __future__ import annotations

from collections.abc import Sequence

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


def route(forecast: Forecast, which: SyncRoute) -> str:
    """Senders above, receivers below, and a line for each pair of nodes that exchange weights, wider for more bytes."""
    training = _count(which.edges, "training", forecast.split.training)
    rollout = max(_count(which.edges, "rollout", forecast.split.rollout),
                  *(each.target + 1 for each in which.edges), 0)
    groups = {"training": -(-training // MOST_POINTS) or 1, "rollout": -(-rollout // MOST_POINTS) or 1}
    points = {"training": _points(training, groups["training"]), "rollout": _points(rollout, groups["rollout"])}
    rows = {"training": TOP, "rollout": TOP + BETWEEN}
    merged: dict[tuple[str, int, int, int], list[int]] = {}
    for each in which.edges:
        key = each.partition, each.source // groups[each.partition], each.target // groups["rollout"], each.hop
        merged.setdefault(key, []).append(each.bytes)
    heaviest = max((sum(sizes) for sizes in merged.values()), default=1) or 1
    opacity = max(0.25, min(0.8, 30 / max(1, len(merged))))
    shapes, depth = [], 0.0
    for (partition, source, target, hop), sizes in sorted(merged.items()):
        start, end = points[partition][source], points["rollout"][target]
        width = 0.8 + 2.2 * (sum(sizes) / heaviest) ** 0.5
        colour = HOP_COLOURS[min(hop, len(HOP_COLOURS) - 1)]
        words = (
            f"{partition} {_nodes(source, groups[partition], training if partition == 'training' else rollout)} to "
            f"rollout {_nodes(target, groups['rollout'], rollout)}: {human(sum(sizes), 'bytes')}, hop {hop + 1}"
            + (f", {plural(len(sizes), 'pair')} of nodes" if len(sizes) > 1 else "")
        )
        if partition == "training":
            y1, y2 = rows["training"] + 7, rows["rollout"] - 7
            shapes.append(svg.path(("M", start, y1, "C", start, y1 + 45, end, y2 - 45, end, y2), colour, width=width,
                                   opacity=opacity, title=words, kind="edge"))
        else:
            y, sag = rows["rollout"] + 7, 14 + min(70.0, abs(end - start) * 0.22)
            depth = max(depth, sag)
            shapes.append(svg.path(("M", start, y, "Q", (start + end) / 2, y + 2 * sag, end, y), colour, width=width,
                                   opacity=max(0.5, opacity), title=words, kind="edge"))
    for partition, y in rows.items():
        colour = TRAINING[0] if partition == "training" else ROLLOUT[0]
        count, size = {"training": training, "rollout": rollout}[partition], groups[partition]
        shapes += [
            svg.text(0, y, partition, bold=True),
            svg.text(
                0, y + 13, plural(count, "node") + (f", {size} per point" if size > 1 else ""), size=10.5, fill=svg.SOFT
            ),
        ]
        every = -(-len(points[partition]) // 24)
        for index, x in enumerate(points[partition]):
            shapes.append(svg.circle(x, y, 6, colour, title=f"{partition} {_nodes(index, size, count)}", kind="node"))
            if index % every == 0:
                below = partition == "rollout" and not depth
                shapes.append(svg.text(x, y + 20 if below else y - 10, str(index * size), size=10, anchor="middle",
                                       fill=svg.SOFT, halo=True))
    hops = sorted({each.hop for each in which.edges})
    entries = (
        [
            (
                HOP_COLOURS[hop],
                f"hop {hop + 1}" + (" and later" if hop == len(HOP_COLOURS) - 1 and hops[-1] > hop else ""),
            )
            for hop in range(min(len(HOP_COLOURS), hops[-1] + 1))
        ]
        if len(hops) > 1
        else []
    )
    height = TOP + BETWEEN + max(depth + 14, 28)
    if entries:
        keys, taken = svg.legend(LEFT, height, entries, width=WIDTH - LEFT, size=11)
        shapes, height = shapes + keys, height + taken
    return svg.picture(WIDTH, height, shapes, f"weight sync: {which.route}")


def _count(edges: Sequence[SyncEdge], partition: str, nodes: int) -> int:
    return max([nodes, *(each.source + 1 for each in edges if each.partition == partition)])


def _points(nodes: int, size: int) -> list[float]:
    count = -(-nodes // size)
    pitch = (WIDTH - LEFT - 20) / max(1, count)
    return [LEFT + pitch * (index + 0.5) for index in range(count)]


def _nodes(point: int, size: int, count: int) -> str:
    last = min(count, (point + 1) * size) - 1
    return f"node {point}" if size == 1 else f"nodes {point * size} to {last}"
