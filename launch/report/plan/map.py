"""The cluster as a picture: leaves, nodes and GPUs, coloured by role, with the coordinates of each GPU's rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from launch.plan.plan import ForecastPlan, Placement, Plan, RankCoordinates
from launch.planner.seats.cluster import Seating
from launch.report import svg
from launch.report.quantities import plural

WIDTH = 1120.0
TRAINING = ("#1e40af", "#93c5fd")
"""Colours of the first and the last pipeline stage."""
ROLLOUT = ("#f59e0b", "#d97706")
"""Colours of the engines, alternating."""
DARK = "#111827"


@dataclass
class Slot:
    """What runs on one GPU, or on a CPU, as one process of a node."""

    name: str
    nic: int | None = None
    training: RankCoordinates | None = None
    engine: tuple[int, int] | None = None
    """Number of the engine and the rank in it."""


def draw(plan: Plan, placement: Placement | Seating, leaves: Sequence[Sequence[str]] = ()) -> str:
    """The picture as `<svg>`. Each GPU is one element of class `gpu`, with its coordinates as a tooltip.

    Args:
        leaves: names of the nodes under each leaf switch; () if there is one leaf. Nodes under them that run nothing
            are drawn too.
    """
    groups = _grouped(slots(plan, placement, leaves), leaves)
    nodes = [node for _, members in groups for node in members]
    most = max((len(each) for _, each in nodes), default=1)
    columns = _columns(most)
    per_row, cell = _density(len(nodes), most)
    pitch = WIDTH / per_row
    shapes, top = _legend(plan, nodes)
    label = cell >= 10
    for title, members in groups:
        if title:
            shapes.append(svg.text(0, top + 12, title, fill=svg.SOFT))
            top += 20
        lines = max(-(-len(each) // columns) for _, each in members)
        height = lines * (cell + 2) + (34 if label else 6) + 8
        for index, (name, gpus) in enumerate(members):
            x, y = index % per_row * pitch, top + index // per_row * height
            shapes += _node(name, gpus, x, y, pitch - 6, height - 8, columns, cell, plan, label)
        top += -(-len(members) // per_row) * height + 8
    return svg.picture(WIDTH, top, shapes, "nodes and GPUs by role")


Nodes = list[tuple[str, list[Slot]]]


def slots(plan: Plan, placement: Placement | Seating, leaves: Sequence[Sequence[str]] = ()) -> Nodes:
    """Nodes with their GPUs: nodes that run something, spares, and all other nodes under the leaves. Each process
    without a GPU gets its own slot."""
    kind = "GPU" if plan.device == "gpu" else "core"
    names, ranks, engines = _seats(plan, placement)
    names += [name for leaf in leaves for name in leaf]
    found: dict[str, dict[int, Slot]] = {name: {} for name in names}

    def slot(node: str, gpu: int | None, nic: int | None) -> Slot:
        row = found.setdefault(node, {})
        index = len(row) if gpu is None else gpu
        return row.setdefault(index, Slot(f"{node}, {kind} {index}", nic))

    coordinates = {each.rank: each for each in plan.training.ranks}
    for rank, seat in ranks:
        slot(*seat).training = coordinates[rank]
    for replica, seats in engines:
        for rank, seat in enumerate(seats):
            slot(*seat).engine = (replica, rank)
    for node, row in found.items():
        for index in range(plan.forecast.cluster.gpus_per_node if isinstance(plan, ForecastPlan) else 0):
            row.setdefault(index, Slot(f"{node}, {kind} {index}"))
    return [(node, [row[index] for index in sorted(row)]) for node, row in found.items()]


Where = tuple[str, int | None, int | None]
"""Node, GPU, NIC."""


def _seats(plan: Plan, placement: Placement | Seating) -> tuple[list[str], list[tuple[int, Where]],
                                                               list[tuple[int, list[Where]]]]:
    """Nodes, and the seats of all training ranks and of all ranks of the engines."""
    if isinstance(placement, Seating):
        return ([*placement.training_nodes, *placement.rollout_nodes, *placement.spares],
                [(rank, (seat.node, seat.gpu, seat.nic)) for rank, seat in enumerate(placement.training)],
                [(replica, [(seat.node, seat.gpu, seat.nic) for seat in each])
                 for replica, each in enumerate(placement.rollout)])
    sizes = {engine.replica: engine.tp for engine in plan.rollout.engines}
    ranks: list[tuple[int, Where]] = [(each.rank, (each.node, each.gpu, each.nic)) for each in placement.training]
    engines: list[tuple[int, list[Where]]] = []
    for each in placement.rollout:
        gpus = each.gpus or (None,) * sizes.get(each.replica, 1)
        nodes, nics = each.nodes or (each.node,) * len(gpus), each.nics or (None,) * len(gpus)
        engines.append((each.replica, list(zip(nodes, gpus, nics, strict=True))))
    return [*placement.nodes, *placement.spares], ranks, engines


def _grouped(nodes: Nodes, leaves: Sequence[Sequence[str]]) -> list[tuple[str, Nodes]]:
    """(heading, nodes) of each leaf; one group without a heading if there is one leaf."""
    if len(leaves) < 2:
        return [("", nodes)] if nodes else []
    by_name = dict(nodes)
    groups = [(f"leaf {index}: {plural(len(leaf), 'node')}", [(name, by_name.pop(name)) for name in leaf])
              for index, leaf in enumerate(leaves) if leaf]
    return groups + ([("under no leaf", list(by_name.items()))] if by_name else [])


def _columns(gpus: int) -> int:
    return -(-gpus // 2) if gpus > 3 else gpus


def _density(nodes: int, gpus: int) -> tuple[int, float]:
    """Nodes per row, and the side length of a GPU in the picture."""
    per_row = next((row for limit, row in ((4, 4), (32, 8), (128, 16), (512, 32)) if nodes <= limit), 48)
    return per_row, min(34.0, (WIDTH / per_row - 6 - 10) / _columns(gpus) - 2)


def _node(name: str, gpus: Sequence[Slot], x: float, y: float, width: float, height: float, columns: int, cell: float,
          plan: Plan, label: bool) -> list[str]:
    role = _role(gpus)
    edge = {"training": TRAINING[0], "rollout": ROLLOUT[0], "both": TRAINING[0]}.get(role, svg.LINE)
    shapes = [svg.rect(x, y, width, height, "none", stroke=edge, radius=min(7, height / 6))]
    head = 0.0
    if label:
        size = 11 if width > 90 else 8.5
        shapes += [
            svg.text(x + 6, y + 13, svg.shortened(name, width - 12, size), size=size, title=name, bold=width > 90),
            svg.text(x + 6, y + 26, svg.shortened(_what(gpus, role), width - 12, size), size=size, fill=svg.SOFT),
        ]
        head = 31.0
    inset = (width - columns * (cell + 2) + 2) / 2
    for index, gpu in enumerate(gpus):
        shapes.append(_gpu(gpu, x + inset + index % columns * (cell + 2), y + head + 3 + index // columns * (cell + 2),
                           cell, plan))
    return shapes


def _gpu(slot: Slot, x: float, y: float, cell: float, plan: Plan) -> str:
    """One GPU. If both roles share it, each gets half."""
    title = "\n".join([slot.name, *_coordinates(slot)])
    radius = min(4, cell / 5)
    fills = []
    if slot.training:
        fills.append((_stage_colour(slot.training.pp, plan.training.pp), f"{slot.training.rank}"))
    if slot.engine:
        fills.append((ROLLOUT[slot.engine[0] % 2], f"e{slot.engine[0]}"))
    if not fills:
        return svg.rect(x, y, cell, cell, "none", stroke=svg.LINE, radius=radius, title=f"{title}\nspare", kind="gpu")
    part = cell / len(fills)
    inner = [f"<title>{escape(title)}</title>"]
    for index, (fill, words) in enumerate(fills):
        inner.append(svg.rect(x, y + index * part, cell, part, fill, radius=radius if len(fills) == 1 else 0))
        size = min(11.0, part * 0.75, cell / max(2, len(words)) * 1.35)
        if cell >= 20 and size >= 6:
            inner.append(svg.text(x + cell / 2, y + index * part + part / 2 + size * 0.36, words, size=size,
                                  anchor="middle", fill="#ffffff" if _is_dark(fill) else DARK))
    return f'<g class="gpu">{"".join(inner)}</g>'


def _coordinates(slot: Slot) -> list[str]:
    lines = [] if slot.nic is None else [f"NIC {slot.nic}"]
    if slot.training:
        at = slot.training
        lines.append(f"training rank {at.rank}: tp {at.tp}, cp {at.cp}, dp {at.dp}, pp {at.pp}")
    if slot.engine:
        lines.append(f"rollout engine {slot.engine[0]}: rank {slot.engine[1]}")
    return lines


def _role(gpus: Sequence[Slot]) -> str:
    training, engine = any(each.training for each in gpus), any(each.engine for each in gpus)
    return "both" if training and engine else "training" if training else "rollout" if engine else "spare"


def _what(gpus: Sequence[Slot], role: str) -> str:
    """`stage 0, dp 3`, `engine 5`, `spare`."""
    words = []
    if role in ("training", "both"):
        coordinates = [each.training for each in gpus if each.training]
        words.append(f"pp{_range(each.pp for each in coordinates)} dp{_range(each.dp for each in coordinates)}")
    if role in ("rollout", "both"):
        words.append(f"engine {_range(each.engine[0] for each in gpus if each.engine)}")
    return ", ".join(words) or "spare"


def _range(values: Iterable[int]) -> str:
    known = sorted(set(values))
    return str(known[0]) if len(known) == 1 else f"{known[0]}-{known[-1]}"


def _stage_colour(stage: int, stages: int) -> str:
    return svg.mixed(*TRAINING, stage / (stages - 1)) if stages > 1 else svg.mixed(*TRAINING, 0.3)


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[i:i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _legend(plan: Plan, nodes: Sequence[tuple[str, list[Slot]]]) -> tuple[list[str], float]:
    stages = plan.training.pp
    shown = range(stages) if stages <= 8 else (0, stages - 1)
    entries = [(_stage_colour(stage, stages), f"training, stage {stage}" if stages > 1 else "training")
               for stage in shown]
    entries.append((ROLLOUT[0], "rollout"))
    if any(_role(gpus) == "spare" for _, gpus in nodes):
        entries.append((svg.LINE, "spare"))
    shapes, height = svg.legend(0, 2, entries, width=WIDTH)
    return shapes, height + 8
