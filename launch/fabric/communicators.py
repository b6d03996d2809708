"""How many communicators of NCCL a route needs, and what they take of a GPU's memory.

One for each pair of GPUs and direction, whatever streams go between the two (`megatron_rl.weight_sync.wire.transport`).
NCCL allocates a communicator's buffers beside torch's and vLLM's pools, for as long as it lives: the whole run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from launch.coefficients.sync import SyncCoefficients
from launch.fabric.lanes import Place
from launch.fabric.routes import ROOT, Route


class Communicators(NamedTuple):
    """Of the GPU that has most, on either side; bytes of the one whose communicators take most."""

    training: int
    rollout: int
    training_bytes: int
    rollout_bytes: int


def communicators(route: Route, coefficients: SyncCoefficients) -> Communicators:
    """Of a route over GPUs."""
    size = {"nic": coefficients.communicator_nic_bytes, "nvlink": coefficients.communicator_nvlink_bytes}
    counts: dict[Place, int] = defaultdict(int)
    taken: dict[Place, float] = defaultdict(float)
    for source, destination, via in {(edge.source, edge.destination, edge.via) for edge in route.edges}:
        for place in (source, destination):
            counts[place] += 1
            taken[place] += size[via]
    training = {edge.source for edge in route.edges if edge.parent == ROOT}
    rollout = counts.keys() - training

    def most(of: Mapping[Place, float], places: set[Place]) -> int:
        return round(max((of[place] for place in places), default=0))

    return Communicators(most(counts, training), most(counts, rollout), most(taken, training), most(taken, rollout))
