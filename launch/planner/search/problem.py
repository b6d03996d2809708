"""The problem that the search solves: a model, the work of a step, a cluster, the pinned sizes, and where each of them
was written.

`launch.planner.from_config` makes a `Problem` from a configuration. Code that has a `Problem` never reads the
configuration. A remedy changes the `Problem` and names the keys of the configuration that would do the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from launch.cluster.spec import ClusterSpec
from launch.coefficients.site import SiteCoefficients
from launch.fabric.communicators import MOST_LINKS
from launch.model.architecture import Architecture
from launch.model.padding import token_budget
from launch.planner.search.space import Pins
from launch.planner.workload.workload import Workload

Mode = Literal["disaggregated", "colocated", "hybrid"]
MODES: tuple[Mode, ...] = ("disaggregated", "colocated", "hybrid")


@dataclass(frozen=True)
class Origin:
    """Where a problem was written, for messages and for the sources in the book."""

    path: str = "the problem"
    """The configuration's file."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> `configs/7b/grpo.yaml:14, trainer.tp`."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Key of a number in the book, or a prefix of it -> its source. It holds what the user wrote."""

    def where(self, *keys: str) -> str:
        """The places of these keys, joined for a message."""
        return "; ".join(self.places.get(key, f"{self.path}, {key}") for key in keys)


@dataclass(frozen=True)
class Problem:
    """The input of the planner."""

    shape: Architecture
    workload: Workload
    cluster: ClusterSpec
    pins: Pins
    coefficients: SiteCoefficients
    modes: tuple[Mode, ...] = ("disaggregated",)
    """The modes to search; several if the user asks for the fastest."""
    asynchronous: bool = False
    border: bool = False
    """Asynchronous engines take new weights after every batch that they have (`rollout.swap`)."""
    lora_rank: int = 0
    token_budget: int = 8192
    """Tokens of a micro-batch: the pinned number, or the one of `with_token_budget`."""
    bucket_bytes: int = 256 << 20
    route: str = "auto"
    shadow: bool = False
    """Engines receive new weights into a second copy, and stop only for the swap."""
    max_staleness: int | None = None
    """Maximum age of a sample in versions, for asynchronous runs. The trainer waits instead of using an older one."""
    running_kv: Literal["none", "dropped", "kept"] = "none"
    """The KV cache of the requests that a sync finds running in an asynchronous run; none: it finds none. It finds none
    either with `border`, which `prefill_again_s` knows."""
    overlap: bool = False
    """The trainer works on complete groups while others of the same batch are generated."""
    kv_tokens: int | None = None
    """Tokens in the KV cache of an engine if the configuration fixes it (CPU); None: the GPU's memory decides."""
    reward_workers: int = 1
    """Reward processes on each node that trains."""
    spare_nodes: int = 0
    """Nodes that the plan does not use."""
    disk_every: int = 0
    """Steps between two versions of the weights on disk; 0: none is written."""
    async_save: bool = True
    """Checkpoints are written beside the steps, from a copy in host memory."""
    teacher: Architecture | None = None
    """The frozen teacher of on-policy distillation, on the training ranks."""
    origin: Origin = field(default=Origin(), compare=False)

    @property
    def in_flight(self) -> bool:
        """Engines run full over the borders of steps."""
        return self.asynchronous and not self.border

    @property
    def swaps(self) -> bool:
        """Engines stop only for the swap into a second copy. At a border they have nothing to do, and the next batch
        waits for the whole sync."""
        return self.shadow and not self.border

    @property
    def most_links(self) -> int:
        """Communicators of the weight sync that a GPU may have. Connections of CPUs have no such limit."""
        return MOST_LINKS if self.cluster.gpu.device == "gpu" else sys.maxsize

    @property
    def unit_gpus(self) -> int:
        return 1 if len(self.cluster.nodes) == 1 else self.cluster.gpus_per_node

    @property
    def units(self) -> int:
        return (len(self.cluster.nodes) - self.spare_nodes) * self.cluster.gpus_per_node // self.unit_gpus

    def sources(self, chosen: Collection[str] = ()) -> dict[str, str]:
        """The sources of the book's given numbers, by key or prefix of a key.

        Args:
            chosen: keys with values that the user did not write.
        """
        given = {key: source for key, source in self.origin.given.items() if key not in chosen}
        return {**given, "gpu": self.cluster.gpu.source, **self.cluster.sources}

    def on(self, cluster: ClusterSpec) -> Problem:
        """The same problem on another cluster."""
        return replace(self, cluster=cluster, coefficients=SiteCoefficients.of(cluster.coefficients))


def with_token_budget(problem: Problem) -> Problem:
    """The problem with the pinned token budget, or with one that is a multiple of every padding in the search."""
    pins, node = problem.pins, problem.cluster.gpus_per_node
    tp, cp = pins.tp or 1, pins.cp or 1
    fitting = token_budget(problem.workload.longest, math.lcm(64, 2 * tp * cp, 2 * node * cp))
    return replace(problem, token_budget=pins.token_budget or fitting)


def in_mode(problem: Problem, mode: Mode) -> Problem:
    """The problem in one mode. If trainer and engine take turns on a GPU, the run is synchronous without any overlap,
    and the engine receives no weights while it serves."""
    return problem if mode == "disaggregated" else replace(
        problem, asynchronous=False, border=False, shadow=False, overlap=False)
