"""The number of NCCL communicators that a route needs, their memory on a GPU, and how long opening them takes.

There is one per pair of GPUs and direction, shared by all streams between the two
(`megatron_rl.weight_sync.wire.transport`). NCCL allocates its buffers outside torch's and vLLM's pools for its
lifetime, which is the whole run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from launch.coefficients.sync import SyncCoefficients
from launch.fabric.lanes import Place
from launch.fabric.rounds import rounds
from launch.fabric.routes import ROOT, Route


class Communicators(NamedTuple):
    training: int
    """Maximum on a training GPU."""
    rollout: int
    """Maximum on a rollout GPU."""
    training_bytes: int
    rollout_bytes: int
    total: int
    """In the whole job."""
    rounds: int
    """In which they are opened, one at a time on each GPU."""
    opening_s: float


def communicators(route: Route, coefficients: SyncCoefficients) -> Communicators:
    """Communicators of a route over GPUs."""
    size = {"nic": coefficients.communicator_nic_bytes, "nvlink": coefficients.communicator_nvlink_bytes}
    counts: dict[Place, int] = defaultdict(int)
    taken: dict[Place, float] = defaultdict(float)
    links = sorted({(edge.source, edge.destination, edge.via) for edge in route.edges})
    for source, destination, via in links:
        for place in (source, destination):
            counts[place] += 1
            taken[place] += size[via]
    training = {edge.source for edge in route.edges if edge.parent == ROOT}
    rollout = counts.keys() - training

    def most(of: Mapping[Place, float], places: set[Place]) -> int:
        return round(max((of[place] for place in places), default=0))

    opened = len(set(rounds((source, destination) for source, destination, _ in links).values()))
    return Communicators(most(counts, training), most(counts, rollout), most(taken, training), most(taken, rollout),
                         len(links), opened, opened * coefficients.communicator_open_s)
