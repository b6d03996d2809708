"""Routes that are carried out: real processes on real gloo links, receivers that pass buckets on to receivers."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from launch.fabric.lanes import Place
from launch.fabric.seated import Seats, one_card
from tests.weight_sync.routed import World, two_checkpoints, world


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return two_checkpoints(tmp_path_factory.mktemp("routes"))


@pytest.mark.parametrize("route, engines, tp, trainer, hops", [
    ("chain", 3, 1, {"tp": 2, "pp": 2}, 3),
    ("chain", 2, 2, {"tp": 2, "pp": 2}, 2),
    ("tree", 6, 1, {"tp": 2}, 3),
    ("tree", 3, 2, {"tp": 1, "pp": 2}, 2),
    ("chain", 4, 1, {"tp": 2, "dp": 2}, 2),
    ("direct", 3, 2, {"dp": 2}, 1),
])
def test_every_receiver_holds_the_weights(folders, route, engines, tp, trainer, hops):
    async def run(one: World) -> None:
        manifest = await one.coordinator.setup()
        assert max(_depth(stream) for stream in manifest.streams) == hops
        assert max(len(stream.buckets) for stream in manifest.streams) >= 4
        for version, which in enumerate((1, 0, 1)):
            await one.train_to(which)
            report = await one.coordinator.sync(version)
            await one.assert_hold(which, version)
            assert report.nbytes == manifest.total_bytes and report.lost == ()
        assert await _sent_by(one) == _planned(manifest)

    with world(folders, route, engines, tp=tp, trainer=trainer) as one:
        asyncio.run(run(one))


def test_twins_of_a_node_are_fed_from_one_copy(folders):
    """Two engines on each of two hosts: half of what each holds comes from its twin, whatever the route."""
    seats = Seats(one_card(2), (Place(0, 0), Place(0, 1)),
                  {(replica, 0): Place(1 + replica // 2, replica % 2) for replica in range(4)})

    async def run(one: World) -> None:
        manifest = await one.coordinator.setup()
        await one.train_to(1)
        await one.coordinator.sync(0)
        await one.assert_hold(1, 0)
        node = {key: place.node for key, place in seats.rollout.items()}
        into: Counter = Counter()
        for (sender, receiver), size in manifest.bytes_per_hop().items():
            into[node[receiver], sender in node and node[sender] == node[receiver]] += size
        whole = manifest.total_bytes // 4
        assert into == {(1, False): whole, (1, True): whole, (2, False): whole, (2, True): whole}
        assert await _sent_by(one) == _planned(manifest)

    with world(folders, "chain", 4, trainer={"tp": 2}, seats=seats) as one:
        asyncio.run(run(one))


def _depth(stream) -> int:
    depth = {None: 0}
    for hop in stream.hops:
        depth[hop.receiver] = depth[hop.sender] + 1
    return max(depth.values())


async def _sent_by(one: World) -> dict:
    """Bytes that each engine passed on in its last sync, by replica."""
    return {replica: sum(status["forwarded"] for status in await engine.rpc("sync_status"))
            for replica, engine in enumerate(one.engines)}


def _planned(manifest) -> dict:
    sent: Counter = Counter({replica: 0 for replica in {receiver[0] for _, receiver in manifest.bytes_per_hop()}})
    for (sender, _), size in manifest.bytes_per_hop().items():
        if not isinstance(sender, int):
            sent[sender[0]] += size
    return dict(sent)
