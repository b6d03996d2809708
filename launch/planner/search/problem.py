"""What the search solves: a model, the work of a step, a cluster, what is fixed, and where all that was written down.

`launch.planner.from_config` makes a `Problem` from a configuration. Nothing that reads one asks the configuration
again: what a remedy would change, it changes here, and says by which words of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from launch.cluster.spec import ClusterSpec
from launch.coefficients.site import SiteCoefficients
from launch.model.architecture import Architecture
from launch.model.padding import token_budget
from launch.planner.search.space import Pins
from launch.planner.workload.workload import Workload

Mode = Literal["disaggregated", "colocated", "hybrid"]
MODES: tuple[Mode, ...] = ("disaggregated", "colocated", "hybrid")


@dataclass(frozen=True)
class Origin:
    """Where a problem was written down: for messages, and for the sources of the book."""

    path: str = "the problem"
    """The configuration's file."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> `configs/7b/grpo.yaml:14, trainer.tp`."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Key of a number in the book, or a prefix of it -> its source, of what the user wrote."""

    def where(self, *keys: str) -> str:
        """For messages; several keys are joined."""
        return "; ".join(self.places.get(key, f"{self.path}, {key}") for key in keys)


@dataclass(frozen=True)
class Problem:
    """What is to be planned."""

    shape: Architecture
    workload: Workload
    cluster: ClusterSpec
    pins: Pins
    coefficients: SiteCoefficients
    modes: tuple[Mode, ...] = ("disaggregated",)
    """To search; several where the fastest is asked for."""
    asynchronous: bool = False
    lora_rank: int = 0
    token_budget: int = 8192
    """Of a micro-batch: the pinned one, or that of `with_token_budget`."""
    bucket_bytes: int = 256 << 20
    route: str = "auto"
    shadow: bool = False
    """Engines receive new weights into a second copy, and stop for the swap only."""
    max_staleness: int | None = None
    """Versions that a sample may be old, when asynchronous; the trainer waits rather than use an older one."""
    kv_tokens: int | None = None
    """Cache of an engine where the configuration fixes it (CPU); None: what the GPU's memory leaves."""
    spare_nodes: int = 0
    """Nodes that the plan leaves alone."""
    disk_every: int = 0
    """Steps between versions of the weights that are written to disk; 0: none is."""
    origin: Origin = field(default=Origin(), compare=False)

    @property
    def unit_gpus(self) -> int:
        return 1 if len(self.cluster.nodes) == 1 else self.cluster.gpus_per_node

    @property
    def units(self) -> int:
        return (len(self.cluster.nodes) - self.spare_nodes) * self.cluster.gpus_per_node // self.unit_gpus

    def sources(self, chosen: Collection[str] = ()) -> dict[str, str]:
        """Where the given numbers of the book came from, by key or a prefix of it.

        Args:
            chosen: keys whose values the user did not write.
        """
        given = {key: source for key, source in self.origin.given.items() if key not in chosen}
        return {**given, "gpu": self.cluster.gpu.source, **self.cluster.sources}

    def on(self, cluster: ClusterSpec) -> Problem:
        """The same on another cluster."""
        return replace(self, cluster=cluster, coefficients=SiteCoefficients.of(cluster.coefficients))


def with_token_budget(problem: Problem) -> Problem:
    """With the pinned budget, or one that every multiple divides to which a layout of the search pads sequences."""
    pins, node = problem.pins, problem.cluster.gpus_per_node
    tp, cp = pins.tp or 1, pins.cp or 1
    fitting = token_budget(problem.workload.longest, math.lcm(64, 2 * tp * cp, 2 * node * cp))
    return replace(problem, token_budget=pins.token_budget or fitting)


def in_mode(problem: Problem, mode: Mode) -> Problem:
    """The problem as a mode has it: trainer and engine that take turns on a GPU are synchronous, and nothing is
    received while an engine serves."""
    return problem if mode == "disaggregated" else replace(problem, asynchronous=False, shadow=False)
