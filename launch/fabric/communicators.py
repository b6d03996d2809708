"""The number of NCCL communicators that a route needs, their memory on a GPU, and how long opening them takes.

There is one per pair of GPUs and direction, shared by all streams between the two
(`megatron_rl.weight_sync.wire.transport`). NCCL allocates its buffers outside torch's and vLLM's pools for its
lifetime, which is the whole run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from launch.coefficients.sync import SyncCoefficients
from launch.fabric.rounds import rounds
from launch.fabric.routes import Links

MOST_LINKS = 32
"""Communicators that a GPU can use at the same time. Torch deals CUDA streams from a pool of this many for each
priority, in turn, and two links with one stream cannot move at the same time: they may wait for each other forever.
Nothing else takes the high priority."""


@dataclass(frozen=True)
class Communicators:
    """The communicators of a route over GPUs."""

    links: Links
    coefficients: SyncCoefficients

    @property
    def total(self) -> int:
        """In the whole job."""
        return len(self.links.nic) + len(self.links.nvlink)

    @property
    def training(self) -> int:
        """Maximum on a training GPU."""
        return max((count for gpu, count in self._counts.items() if gpu not in self._receivers), default=0)

    @property
    def rollout(self) -> int:
        """Maximum on a rollout GPU."""
        return max((self._counts[gpu] for gpu in self._receivers), default=0)

    @property
    def busiest(self) -> int:
        """Maximum on one GPU."""
        return max(self._counts.values(), default=0)

    @property
    def training_bytes(self) -> int:
        """Most memory that they take on a training GPU, which sends over its NIC only."""
        return round(self.training * self.coefficients.communicator_nic_bytes)

    @property
    def rollout_bytes(self) -> int:
        """Most memory that they take on a rollout GPU."""
        c, fast = self.coefficients, Counter(chain.from_iterable(self.links.nvlink))
        return round(max((fast[gpu] * c.communicator_nvlink_bytes
                          + (self._counts[gpu] - fast[gpu]) * c.communicator_nic_bytes for gpu in self._receivers),
                         default=0))

    @property
    def bytes(self) -> int:
        """Most memory that they take on one GPU."""
        return max(self.training_bytes, self.rollout_bytes)

    @cached_property
    def rounds(self) -> int:
        """In which they are opened, one at a time on each GPU."""
        return len(set(rounds(sorted([*self.links.nic, *self.links.nvlink])).values()))

    @property
    def opening_s(self) -> float:
        return self.rounds * self.coefficients.communicator_open_s

    @cached_property
    def _counts(self) -> Counter[int]:
        """Communicators of each GPU."""
        return Counter(chain.from_iterable(chain(self.links.nic, self.links.nvlink)))

    @cached_property
    def _receivers(self) -> set[int]:
        """Rollout GPUs. Training GPUs receive nothing."""
        return {receiver for _, receiver in chain(self.links.nic, self.links.nvlink)}
