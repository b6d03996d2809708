"""Routes that are carried out: real processes on real gloo links, receivers that pass buckets on to receivers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from launch.fabric.lanes import Place
from launch.fabric.routes import Route
from launch.fabric.seated import Seats, apart, one_card
from launch.fabric.staging import Staging, staging
from megatron_rl.weight_sync.plan.copies import intersect_sides
from megatron_rl.weight_sync.plan.manifest import SyncManifest, route_of
from megatron_rl.weight_sync.plan.streams import turns
from tests.patience import patient
from tests.weight_sync.routed import World, two_checkpoints, world


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return two_checkpoints(tmp_path_factory.mktemp("routes"))


@pytest.mark.parametrize("route, engines, tp, trainer, hops, tags", [
    ("chain", 3, 1, {"tp": 2, "pp": 2}, 3, True),
    ("chain", 2, 2, {"tp": 2, "pp": 2}, 2, True),
    ("tree", 6, 1, {"tp": 2}, 3, True),
    ("tree", 5, 1, {"pp": 2}, 3, False),
    ("chain", 4, 1, {"tp": 2, "dp": 2}, 2, True),
    ("direct", 3, 2, {"dp": 2}, 1, True),
])
def test_every_receiver_holds_the_weights(folders, route, engines, tp, trainer, hops, tags):
    """Without tags: links as NCCL's, which match messages in the order of issue."""
    async def run(one: World) -> None:
        if not tags:
            await asyncio.gather(*(source.call("without_tags") for source in one.sources),
                                 *(engine.rpc("without_tags") for engine in one.engines))
        manifest = await one.coordinator.setup()
        assert max(_depth(stream) for stream in manifest.streams) == hops
        assert max(len(stream.buckets) for stream in manifest.streams) >= 4
        assert await _allocated(one) == staging(_route(one, manifest))
        shared = [pair for pair, streams in turns(manifest.streams).items() if len(set(streams)) > 1]
        assert tags or len(shared) >= 3, "streams of both ranks and of both trees are to go over one link"
        for version, which in enumerate((1, 0, 1)):
            await one.train_to(which)
            before = await one.received()
            report = await one.coordinator.sync(version)
            await one.assert_hold(which, version)
            assert report.nbytes == manifest.total_bytes and report.lost == ()
            _assert_travelled(manifest, await one.received() - before)

    with world(folders, route, engines, tp=tp, trainer=trainer) as one:
        asyncio.run(run(one))


def test_twins_of_a_node_are_fed_from_one_copy(folders):
    """Two engines on each of two hosts: half of what each holds comes from its twin, whatever the route."""
    seats = Seats(one_card(2), (Place(0, 0), Place(0, 1)),
                  {(replica, 0): Place(1 + replica // 2, replica % 2) for replica in range(4)})

    async def run(one: World) -> None:
        manifest = await one.coordinator.setup()
        await one.train_to(1)
        before = await one.received()
        await one.coordinator.sync(0)
        await one.assert_hold(1, 0)
        _assert_travelled(manifest, await one.received() - before)
        node = {key: place.node for key, place in seats.rollout.items()}
        into: Counter = Counter()
        for (sender, receiver), size in manifest.bytes_per_hop().items():
            into[node[receiver], sender in node and node[sender] == node[receiver]] += size
        whole = manifest.total_bytes // 4
        assert into == {(1, False): whole, (1, True): whole, (2, False): whole, (2, True): whole}

    with world(folders, "chain", 4, trainer={"tp": 2}, seats=seats) as one:
        asyncio.run(run(one))


def test_a_second_set_up_closes_the_first(folders):
    """No member is left with a thread, a socket or a buffer of it, and the sync that follows is right."""
    async def held(one: World) -> list:
        members = [*(source.call("held") for source in one.sources), *(engine.rpc("held") for engine in one.engines)]
        return [await asyncio.gather(*members), await _allocated(one)]

    async def run(one: World) -> None:
        await one.coordinator.setup()
        await asyncio.sleep(1.0)                # the threads that formed the links end
        first, deadline = await held(one), time.monotonic() + patient(20)
        for _ in range(3):
            await one.coordinator.setup()
        while (again := await held(one)) != first and time.monotonic() < deadline:
            await asyncio.sleep(0.1)            # the kernel and gloo close a connection a moment later
        assert again == first
        await one.train_to(1)
        await one.coordinator.sync(0)
        await one.assert_hold(1, 0)

    with world(folders, "chain", 2, trainer={"tp": 2}) as one:
        asyncio.run(run(one))


def _route(one: World, manifest: SyncManifest) -> Route:
    """The route from which the planner computes the staging: every rank and every engine on a node of its own."""
    described = [each for found in one.coordinator._destinations.values() for each in found]
    seats = apart(len(one.sources), [(each.replica, each.worker) for each in described])
    return route_of(intersect_sides(one.coordinator._sources, described), manifest.kind, manifest.bucket_bytes, seats)


async def _allocated(one: World) -> Staging:
    sent = await asyncio.gather(*(source.call("staging_bytes") for source in one.sources))
    received = await asyncio.gather(*(engine.rpc("staging_bytes") for engine in one.engines))
    return Staging(max(sent), max(max(of_engine) for of_engine in received))


def _depth(stream) -> int:
    depth = {None: 0}
    for hop in stream.hops:
        depth[hop.receiver] = depth[hop.sender] + 1
    return max(depth.values())


AROUND_A_BUCKET = 300
"""Bytes at most: its header, and what gloo says before it and back."""


def _assert_travelled(manifest: SyncManifest, found: Counter) -> None:
    """Between every two members what the manifest says, and nothing else: by the kernel's counters."""
    planned, messages = manifest.bytes_per_hop(), turns(manifest.streams)
    for sender, receiver in {*planned, *found}:
        around = sum(len(messages.get(pair, ())) for pair in ((sender, receiver), (receiver, sender)))
        low = planned.get((sender, receiver), 0)
        assert low <= found[sender, receiver] <= low + AROUND_A_BUCKET * around, (
            f"{sender} -> {receiver}: {found[sender, receiver]} bytes came, {low} in {around} buckets were planned")
