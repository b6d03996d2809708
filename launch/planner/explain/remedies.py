"""If no plan fits: the smallest changes to the problem that make one fit, with the overrides that apply them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from launch.cluster.spec import ClusterSpec, Switch
from launch.errors import UserError
from launch.planner.search.pins import check_pins
from launch.planner.search.problem import Problem, with_token_budget
from launch.planner.search.search import Search
from launch.planner.search.space import KEY_OF_PIN

MOST = 3
MOST_NODES = 1024
LORA_RANK = 32


@dataclass(frozen=True)
class Remedy:
    """A change that makes a plan fit, and the throughput of that plan."""

    change: str
    """Overrides, or a change of the cluster."""
    prompts_per_hour: float


def remedies(problem: Problem) -> list[Remedy]:
    """At most three remedies, the smallest change first. Each was planned."""
    found: list[Remedy] = []
    for change in sorted(_changes(problem), key=lambda change: change.size):
        rate = _rate(changed) if len(found) < MOST and (changed := change.make(problem)) is not None else 0.0
        if rate and changed is not None:
            words = change.words or f"{len(changed.cluster.nodes)} nodes instead of {len(problem.cluster.nodes)}"
            found.append(Remedy(words, rate))
    return found


def _rate(problem: Problem) -> float:
    """Prompts per hour of the best plan; 0 if none fits."""
    try:
        check_pins(problem)
    except UserError:
        return 0.0
    rates = [best.prompts_per_hour for mode in problem.modes if (best := Search(problem, mode).best()) is not None]
    return max(rates, default=0.0)


def with_nodes(cluster: ClusterSpec, nodes: int) -> ClusterSpec:
    """The cluster with another number of nodes: its first nodes, or more of the same kind. A smaller cluster keeps its
    switches. A larger one has none, which puts all nodes under one leaf."""
    if nodes == len(cluster.nodes):
        return cluster
    names = cluster.nodes[:nodes] + tuple(f"{cluster.name}-more{number}" for number in
                                          range(1, nodes - len(cluster.nodes) + 1))
    kept = {switch.name: replace(switch, nodes=tuple(node for node in switch.nodes if node in names))
            for switch in cluster.switches}
    switches = tuple(kept.values()) if nodes < len(cluster.nodes) else ()
    return replace(cluster, nodes=names, switches=tuple(_without_empty(switches)))


def _without_empty(switches: Iterable[Switch]) -> list[Switch]:
    """Drop switches that no longer connect anything, from the leaves up."""
    left = list(switches)
    while True:
        names = {switch.name for switch in left if switch.nodes or switch.switches}
        trimmed = [replace(switch, switches=tuple(name for name in switch.switches if name in names))
                   for switch in left if switch.name in names]
        if len(trimmed) == len(left) and trimmed == left:
            return left
        left = trimmed


@dataclass(frozen=True)
class _Change:
    """A change of a problem, and the overrides that apply it."""

    size: float
    """Remedies are sorted by size, the smallest first."""
    words: str
    """Overrides; "" for more nodes."""
    make: Callable[[Problem], Problem | None]
    """Returns None if the change is impossible."""


def _changes(problem: Problem) -> Iterator[_Change]:
    pins, work = problem.pins, problem.workload
    pinned = [name for name in KEY_OF_PIN if getattr(pins, name) is not None
              and name not in ("token_budget", "max_num_seqs")]
    for name in pinned:
        yield _unpinned(1.0, name)
    if len(pinned) > 1:
        yield _unpinned(6.0, *pinned)
    if problem.shadow:
        yield _Change(1.1, "weight_sync.staging=in_place", lambda it: replace(it, shadow=False))
    if problem.spare_nodes:
        yield _Change(1.2, "placement.spare_nodes=0", lambda it: replace(it, spare_nodes=0))
    if problem.teacher and not work.teacher_offload:
        yield _Change(1.5, "algorithm.distillation.offload=true",
                      lambda it: replace(it, workload=replace(it.workload, teacher_offload=True)))
    if work.reference and not work.reference_offload:
        yield _Change(1.5, "algorithm.kl.reference_offload=true",
                      lambda it: replace(it, workload=replace(it.workload, reference_offload=True)))
    for divisor in (2, 4):
        yield _shorter(1.5 + divisor / 4, max(1, work.lengths.cap // divisor))
    if not pins.tp_across_nodes:
        yield _Change(2.6, "placement.tp_across_nodes=true",
                      lambda it: replace(it, pins=replace(it.pins, tp_across_nodes=True)))
    yield _Change(4.0, "", _more_nodes)
    # The configuration's check rejects a second copy of the weights together with either of the next two changes.
    if problem.modes == ("disaggregated",) and not problem.shadow:
        synchronous = " algorithm.max_staleness=0" if problem.max_staleness else ""
        yield _Change(4.5, f"placement.mode=colocated{synchronous}",
                      lambda it: replace(it, modes=("colocated",), asynchronous=False, max_staleness=None))
    if not problem.lora_rank and not problem.shadow:
        yield _Change(5.0, f"model.lora_rank={LORA_RANK}", lambda it: replace(it, lora_rank=LORA_RANK))


def _unpinned(size: float, *names: str) -> _Change:
    return _Change(size, " ".join(f"{KEY_OF_PIN[name]}=auto" for name in names), lambda it: with_token_budget(
        replace(it, pins=it.pins.without(*names))))


def _shorter(size: float, cap: int) -> _Change:
    def make(problem: Problem) -> Problem | None:
        try:
            return with_token_budget(replace(problem, workload=problem.workload.capped(cap)))
        except UserError:       # the given mean is longer than the cap
            return None

    return _Change(size, f"rollout.max_new_tokens={cap}", make)


def _more_nodes(problem: Problem) -> Problem | None:
    """The fewest additional nodes that make a plan fit: doubled until one fits, then bisected."""
    def fits(count: int) -> bool:
        return Search(replace(problem, cluster=with_nodes(problem.cluster, count)), problem.modes[0]).feasible()

    have = nodes = len(problem.cluster.nodes)
    while nodes < MOST_NODES and not fits(nodes):
        nodes *= 2
    if nodes == have or not fits(nodes):
        return None
    low = nodes // 2
    while nodes - low > 1:
        middle = (low + nodes) // 2
        low, nodes = (low, middle) if fits(middle) else (middle, nodes)
    return replace(problem, cluster=with_nodes(problem.cluster, nodes))
