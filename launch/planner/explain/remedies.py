"""No plan fits: the smallest changes to the configuration or the cluster that would make one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from launch.cluster.spec import ClusterSpec
from launch.config import auto
from launch.config.load import LoadedConfig
from launch.errors import UserError
from launch.model.architecture import Architecture
from launch.model.shape import ModelShape
from launch.planner.search.pins import check_pins
from launch.planner.search.problem import modes, problem_of
from launch.planner.search.search import Search

MOST = 3
MOST_NODES = 1024
LORA_RANK = 32


@dataclass(frozen=True)
class Remedy:
    """A change that makes a plan, and what the plan then is."""

    change: str
    """As overrides, or a change of the cluster."""
    prompts_per_hour: float


def remedies(loaded: LoadedConfig, architecture: Architecture, shape: ModelShape, cluster: ClusterSpec) -> list[Remedy]:
    """At most three, the smallest change first; each was planned with."""
    found: list[Remedy] = []
    for _, change in sorted(_changes(loaded), key=lambda pair: pair[0]):
        if len(found) < MOST:
            found += _remedy(change, loaded, architecture, shape, cluster)
    return found


def _remedy(change: dict[str, Any], loaded: LoadedConfig, architecture: Architecture, shape: ModelShape,
            cluster: ClusterSpec) -> Iterator[Remedy]:
    """The change as a remedy, if it is one; no change stands for more nodes."""
    if not change:
        larger = _more_nodes(loaded, architecture, shape, cluster)
        if larger is not None:
            rate = _rate(loaded, architecture, shape, larger)
            if rate:
                yield Remedy(f"{len(larger.nodes)} nodes instead of {len(cluster.nodes)}", rate)
        return
    rate = _rate(loaded.with_values(change, "planner"), architecture, shape, cluster)
    if rate:
        yield Remedy(" ".join(f"{key}={_word(value)}" for key, value in change.items()), rate)


def _rate(loaded: LoadedConfig, architecture: Architecture, shape: ModelShape, cluster: ClusterSpec) -> float:
    """Prompts an hour of the best plan; 0 without one."""
    try:
        check_pins(loaded, architecture, cluster)
        problem = problem_of(loaded, shape, cluster)
    except UserError:
        return 0.0
    rates = [best.prompts_per_hour for mode in modes(loaded) if (best := Search(problem, mode).best()) is not None]
    return max(rates, default=0.0)


def _word(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)


def with_nodes(cluster: ClusterSpec, nodes: int) -> ClusterSpec:
    """The cluster with another number of nodes: the first ones, or more of the same kind. Switches are kept where they
    still describe it; nodes that no switch knows stand under one."""
    if nodes == len(cluster.nodes):
        return cluster
    names = cluster.nodes[:nodes] + tuple(f"{cluster.name}-more{number}" for number in
                                          range(1, nodes - len(cluster.nodes) + 1))
    kept = {switch.name: replace(switch, nodes=tuple(node for node in switch.nodes if node in names))
            for switch in cluster.switches}
    switches = tuple(kept.values()) if nodes < len(cluster.nodes) else ()
    return replace(cluster, nodes=names, switches=tuple(_without_empty(switches)))


def _without_empty(switches) -> list:
    """Drop switches that connect nothing any more, from the leaves up."""
    left = list(switches)
    while True:
        names = {switch.name for switch in left if switch.nodes or switch.switches}
        trimmed = [replace(switch, switches=tuple(name for name in switch.switches if name in names))
                   for switch in left if switch.name in names]
        if len(trimmed) == len(left) and trimmed == left:
            return left
        left = trimmed


def _changes(loaded: LoadedConfig) -> Iterator[tuple[float, dict[str, Any]]]:
    """(size, key -> value). `{}` is more nodes."""
    config = loaded.config
    algorithm, rollout = config.algorithm, config.rollout
    pinned = [key for key in auto.KEYS if key not in auto.open_keys(config)
              and key not in ("placement.mode", "trainer.token_budget", "rollout.max_num_seqs")]
    for key in pinned:
        yield 1.0, {key: "auto"}
    if len(pinned) > 1:
        yield 6.0, dict.fromkeys(pinned, "auto")
    if config.weight_sync.staging == "shadow":
        yield 1.1, {"weight_sync.staging": "in_place"}
    if config.placement.spare_nodes:
        yield 1.2, {"placement.spare_nodes": 0}
    if algorithm.kl.beta > 0 and not algorithm.kl.reference_offload:
        yield 1.5, {"algorithm.kl.reference_offload": True}
    for divisor in (2, 4):
        yield 1.5 + divisor / 4, {"rollout.max_new_tokens": max(1, rollout.max_new_tokens // divisor)}
    if not config.placement.tp_across_nodes:
        yield 2.6, {"placement.tp_across_nodes": True}
    if rollout.dtype == "fp8":          # what they receive in bf16 lies beside their weights: bf16 engines take less
        yield 2.7, {"rollout.dtype": "bf16"}
    yield 4.0, {}
    if config.placement.mode == "disaggregated":
        yield 4.5, {"placement.mode": "colocated", **({"algorithm.asynchronous": False} if algorithm.asynchronous else {})}
    if config.model.lora_rank is None:
        yield 5.0, {"model.lora_rank": LORA_RANK}


def _more_nodes(loaded: LoadedConfig, architecture: Architecture, shape: ModelShape,
                cluster: ClusterSpec) -> ClusterSpec | None:
    """The fewest more that make a plan: twice as many until one fits, then halved back."""
    problem, mode = problem_of(loaded, shape, cluster), modes(loaded)[0]

    def fits(count: int) -> bool:
        return Search(replace(problem, cluster=with_nodes(cluster, count)), mode).feasible()

    have = nodes = len(cluster.nodes)
    while nodes < MOST_NODES and not fits(nodes):
        nodes *= 2
    if nodes == have or not fits(nodes):
        return None
    low = nodes // 2
    while nodes - low > 1:
        middle = (low + nodes) // 2
        low, nodes = (low, middle) if fits(middle) else (middle, nodes)
    return with_nodes(cluster, nodes)
