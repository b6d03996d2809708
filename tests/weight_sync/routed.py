"""A world for the tests of routes and deaths: trainer ranks, engines of plain workers, and their coordinator."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launch.fabric.estimate import Kind
from launch.fabric.seated import Seats
from launch.model.hf_config import from_hf_config
from megatron_rl.layouts.digest import add
from megatron_rl.layouts.hf_read import CheckpointReader
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.weight_sync.coordinator import SyncCoordinator
from megatron_rl.weight_sync.protocol import EngineState, Staging
from tests.tiny_models import make_tiny
from tests.weight_sync.members import start_all
from tests.weight_sync.plain import plain_engines
from tests.weight_sync.sockets import received
from tests.weight_sync.sources import endpoints, source_ranks
from tests.weight_sync.worlds import training_plan

BUCKET = 20_000
TIMEOUT_S = 20.0


def two_checkpoints(base: Path) -> list[Path]:
    """Of one architecture: before and after an update."""
    return [make_tiny(base / str(seed), "qwen3", seed, vocab_size=321, num_hidden_layers=4, hidden_size=64,
                      intermediate_size=128, num_key_value_heads=4) for seed in (0, 1)]


class World:
    """Trainer ranks, engines and their coordinator, driven from one event loop."""

    def __init__(self, folders: Sequence[Path], sources: list, engines: list, route: Kind, seats: Seats | None,
                 timeout_s: float) -> None:
        self.folders, self.sources, self.engines = folders, sources, engines
        a = from_hf_config(folders[0])
        self.truth = [_tensors(folder, a) for folder in folders]
        self._endpoints = endpoints(len(sources))
        self._make = lambda: SyncCoordinator(
            sources, engines, self._endpoints, canonical_tensors(a), backend="gloo", bucket_bytes=BUCKET,
            timeout_s=timeout_s, route=route, seats=seats, address="127.0.0.1")
        self.coordinator = self._make()

    async def train_to(self, which: int) -> None:
        await asyncio.gather(*[source.call("load", str(self.folders[which])) for source in self.sources
                               if source.member._process.is_alive()])

    async def received(self) -> Counter:
        """(sender, receiver) -> bytes that came over their connections since these were made, as the kernel counts."""
        ends: dict = {rank: await source.call("connections") for rank, source in enumerate(self.sources)}
        for replica, engine in enumerate(self.engines):
            ends |= {(replica, worker): found for worker, found in enumerate(await engine.rpc("connections"))}
        return received(ends)

    async def assert_healed_by_another_coordinator(self, which: int) -> None:
        self.coordinator = self._make()
        await self.coordinator.setup()
        await self.coordinator.sync(0)
        await self.assert_hold(which, 0)

    async def assert_hold(self, which: int, version: int, engines=None) -> None:
        """All elements of every worker are those of a checkpoint, and the committed version is served."""
        for engine in engines or self.engines:
            assert (engine.state, engine.version) == (EngineState.SERVING, version)
            engine.check_serving()
            assert await engine.rpc("differences", self.truth[which]) == [[]] * len(engine.members)
            statuses = await engine.rpc("sync_status")
            assert [add(*(digest for _, digest in status["digests"])) for status in statuses] == (
                await engine.rpc("digest"))


def _tensors(folder, a) -> dict:
    with CheckpointReader(folder) as reader:
        return {tensor.name: reader.read(tensor.name, (0,) * len(tensor.shape), tensor.shape)
                for tensor in canonical_tensors(a)}


@contextmanager
def world(folders: Sequence[Path], route: Kind, engines: int, *, tp: int = 1, trainer: dict | None = None,
          seats: Seats | None = None, timeout_s: float = TIMEOUT_S, staging: Staging = "in_place") -> Iterator[World]:
    a = from_hf_config(folders[0])
    with (source_ranks(folders[0], training_plan(a, **(trainer or {}))) as sources,
          plain_engines(a, engines, tp, staging=staging) as made):
        start_all(member for engine in made for member in engine.members)
        one = World(folders, sources, made, route, seats, timeout_s)
        try:
            yield one
        finally:
            one.coordinator.close()
