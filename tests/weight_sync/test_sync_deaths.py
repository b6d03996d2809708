"""Members die, stop or send nonsense in the middle of a sync. The others get the weights or an answer within the
deadline, and no engine serves a version that it does not hold whole."""

from __future__ import annotations

import asyncio
import time

import pytest

from launch.model.hf_config import from_hf_config
from megatron_rl.weight_sync.protocol import EngineState, NotServing, SyncError
from tests.weight_sync.plain import plain_engines
from tests.weight_sync.routed import TIMEOUT_S, World, two_checkpoints, world


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return two_checkpoints(tmp_path_factory.mktemp("deaths"))


@pytest.mark.parametrize("route, engines, victim, children", [
    ("chain", 3, 0, 1),          # the first of a chain feeds all others
    ("chain", 3, 2, 0),          # the last feeds nobody
    ("tree", 5, 3, 2),           # an inner node of one of the two trees
])
def test_a_receiver_dies_at_a_bucket_in_the_middle(folders, route, engines, victim, children):
    """Its children hang on another parent, the others commit, and after its restart it is healed by the next sync."""
    async def run(one: World) -> None:
        manifest = await one.coordinator.setup()
        assert max(len(stream.receivers_from((victim, 0))) for stream in manifest.streams) == children
        await one.train_to(0)
        await one.coordinator.sync(0)
        await one.train_to(1)
        await one.engines[victim].rpc("strike", "die", 3)
        started = time.monotonic()
        report = await one.coordinator.sync(1)
        assert time.monotonic() - started < TIMEOUT_S, "the survivors waited for their deadline"
        assert report.lost == (f"engine {victim}",) and report.epoch == 3
        with pytest.raises(NotServing):
            one.engines[victim].check_serving()
        survivors = [engine for engine in one.engines if engine is not one.engines[victim]]
        await one.assert_hold(1, 1, survivors)
        left = {receiver[0] for stream in one.coordinator.manifest.streams for receiver in stream.receivers}
        assert left == set(range(engines)) - {victim}

        with plain_engines(from_hf_config(folders[0]), 1, first=victim) as (again,):
            await one.coordinator.admit(victim, again)
            with pytest.raises(NotServing, match="empty"):
                again.check_serving()
            await one.train_to(0)
            assert (await one.coordinator.sync(2)).lost == ()
            await one.assert_hold(0, 2, [*survivors, again])

    with world(folders, route, engines, trainer={"tp": 2}) as one:
        asyncio.run(run(one))


def test_a_receiver_that_stops_is_left_out_after_the_deadline(folders):
    """It is alive and silent: nobody's connection breaks."""
    async def run(one: World) -> None:
        await one.coordinator.setup()
        await one.train_to(1)
        await one.engines[0].rpc("strike", "stop", 3)
        try:
            started = time.monotonic()
            report = await one.coordinator.sync(0)
            assert report.lost == ("engine 0",) and time.monotonic() - started < 15
            await one.assert_hold(1, 0, one.engines[1:])
        finally:
            one.engines[0].kill()

    with world(folders, "chain", 3, timeout_s=2.0) as one:
        asyncio.run(run(one))


def test_a_source_dies_and_the_sync_ends_at_once(folders):
    """Its replica could send in its place, but the run cannot train without it."""
    async def run(one: World) -> None:
        await one.coordinator.setup()
        await one.train_to(1)
        await one.sources[2].call("strike", "die", 3)
        started = time.monotonic()
        with pytest.raises(SyncError, match="^trainer rank 2 died during the sync of version 0"):
            await one.coordinator.sync(0)
        assert time.monotonic() - started < TIMEOUT_S, "the survivors waited for their deadline"
        assert one.coordinator.version is None
        for engine in one.engines:
            with pytest.raises(NotServing, match="discarded"):
                engine.check_serving()

    with world(folders, "chain", 2, trainer={"tp": 2, "dp": 2}) as one:
        asyncio.run(run(one))


PATIENT_S = 90.0
"""So long that nobody can have waited for a deadline."""


def test_another_receiver_dies_while_the_lanes_are_opened_again(folders):
    """Those who wait for it on their lanes are told, and the third attempt goes through."""
    async def run(one: World) -> None:
        await one.coordinator.setup()
        await one.train_to(1)
        await one.engines[0].rpc("strike", "die", 3)
        _dies_in_opening(one.engines[2])
        started = time.monotonic()
        report = await one.coordinator.sync(0)
        assert report.lost == ("engine 0", "engine 2") and time.monotonic() - started < PATIENT_S / 2
        await one.assert_hold(1, 0, [one.engines[1], one.engines[3]])

    with world(folders, "chain", 4, timeout_s=PATIENT_S) as one:
        asyncio.run(run(one))


def test_a_receiver_dies_while_the_lanes_are_opened_for_the_first_time(folders):
    """The others do not stay on lanes that will never be whole; set up again, they go on without it."""
    async def run(one: World) -> None:
        _dies_in_opening(one.engines[1])
        started = time.monotonic()
        with pytest.raises(SyncError, match="^engine 1 died while the lanes were opened"):
            await one.coordinator.setup()
        assert time.monotonic() - started < PATIENT_S / 2
        await one.train_to(1)
        await one.coordinator.setup()
        assert (await one.coordinator.sync(0)).lost == ()
        await one.assert_hold(1, 0, [one.engines[0], one.engines[2]])

    with world(folders, "chain", 3, trainer={"tp": 2}, timeout_s=PATIENT_S) as one:
        asyncio.run(run(one))


def _dies_in_opening(engine) -> None:
    opened = engine.sync_open

    async def dying(part):
        engine.kill()
        return await opened(part)

    engine.sync_open = dying


@pytest.mark.parametrize("phase", ["prepare", "commit"])
def test_an_engine_dies_in_another_phase(folders, phase):
    async def run(one: World) -> None:
        await one.coordinator.setup()
        await one.train_to(1)
        method = getattr(one.engines[1], f"sync_{phase}")

        async def dying(*args):
            one.engines[1].kill()
            return await method(*args)

        setattr(one.engines[1], f"sync_{phase}", dying)
        report = await one.coordinator.sync(0)
        assert report.lost == ("engine 1",)
        await one.assert_hold(1, 0, [one.engines[0], one.engines[2]])

    with world(folders, "chain", 3) as one:
        asyncio.run(run(one))


def test_all_engines_die_and_the_sync_says_so(folders):
    async def run(one: World) -> None:
        await one.coordinator.setup()
        for engine in one.engines:
            await engine.rpc("strike", "die", 3)
        with pytest.raises(SyncError, match="engine [01]: "):
            await one.coordinator.sync(0)
        assert one.coordinator.version is None

    with world(folders, "chain", 2) as one:
        asyncio.run(run(one))


def test_the_coordinator_dies_and_the_members_return(folders, tmp_path):
    """Its connections end with it: nobody waits for a deadline, nobody serves, and another coordinator heals all."""
    async def run(one: World) -> None:
        await one.coordinator.setup()
        await one.train_to(1)
        await one.sources[0].call("strike", "hold", 3, str(tmp_path / "released"), str(tmp_path / "reached"))
        sending = asyncio.gather(*[source.sync_send(1) for source in one.sources])
        for engine in one.engines:
            await engine.sync_prepare(1)
        receiving = asyncio.gather(*[engine.sync_receive(1) for engine in one.engines])
        while not (tmp_path / "reached").exists():
            await asyncio.sleep(0.01)
        started = time.monotonic()
        one.coordinator.close()                 # what the kernel does to the sockets of a process that ends
        (tmp_path / "released").touch()
        reports = [*await sending, *[report for (report,) in await receiving]]
        assert time.monotonic() - started < 5
        errors = [report.error for report in reports]       # who hears first breaks the links of others
        assert all(errors) and any("the coordinator is gone" in error for error in errors), errors
        for engine in one.engines:
            with pytest.raises(NotServing):
                engine.check_serving()
        await one.assert_healed_by_another_coordinator(1)

    with world(folders, "chain", 3) as one:
        asyncio.run(run(one))


@pytest.mark.parametrize("fault, message", [
    ("drop", "engine 1 worker 0: .*from engine 0 worker 0: expected bucket 2 of epoch 2.*received bucket 3 of epoch 2"),
    ("duplicate", "engine 1 worker 0: .*from engine 0 worker 0: expected bucket 3 of epoch 2.*received bucket 2 of"),
    ("late", "engine 1 worker 0: .*from engine 0 worker 0: expected bucket 2 of epoch 2.*bucket 2 of epoch 1"),
    ("flip", "trainer rank 0 -> engine 1 worker 0: source [0-9a-f]{16}, live [0-9a-f]{16}"),
])
def test_what_a_forwarder_does_to_a_bucket_is_caught_and_named(folders, fault, message):
    """At its receiver, before anything is committed; nobody died, so nothing starts again by itself, and the next sync
    heals."""
    async def run(one: World) -> None:
        await one.coordinator.setup()
        await one.train_to(0)
        await one.coordinator.sync(0)
        await one.train_to(1)
        await one.engines[0].rpc("strike", fault, 2)
        with pytest.raises(SyncError, match=f"(?s){message}") as caught:
            await one.coordinator.sync(1)
        if fault == "flip":
            assert "-> engine 0" not in str(caught.value) and "-> engine 2" in str(caught.value)
        assert one.coordinator.version == 0
        assert {engine.state for engine in one.engines} == {EngineState.DISCARDED}
        await one.engines[0].rpc("strike", "none")
        assert (await one.coordinator.sync(1)).lost == ()
        await one.assert_hold(1, 1)

    with world(folders, "chain", 3) as one:
        asyncio.run(run(one))


def test_the_last_bucket_of_a_stream_is_dropped(folders):
    """No later one shows the gap: the deadline does."""
    async def run(one: World) -> None:
        manifest = await one.coordinator.setup()
        last = len(manifest.streams[0].buckets) - 1
        await one.engines[0].rpc("strike", "drop", last)
        with pytest.raises(SyncError, match="engine 1 worker 0: .*receive from engine 0 worker 0"):
            await one.coordinator.sync(0)
        assert one.coordinator.version is None

    with world(folders, "chain", 2, timeout_s=2.0) as one:
        asyncio.run(run(one))


def test_a_bucket_that_is_late_within_the_deadline_does_no_harm(folders):
    async def run(one: World) -> None:
        await one.coordinator.setup()
        await one.train_to(1)
        await one.engines[0].rpc("strike", "delay", 2)
        await one.coordinator.sync(0)
        await one.assert_hold(1, 0)

    with world(folders, "chain", 2) as one:
        asyncio.run(run(one))
