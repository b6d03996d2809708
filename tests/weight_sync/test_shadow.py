"""`weight_sync.staging: shadow` on real lanes: the old version is served and whole until the swap, whatever fails
before it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from megatron_rl.weight_sync.ends.worker import SwapError, WorkerSync
from megatron_rl.weight_sync.protocol import EngineState, NotServing, SyncError
from tests.weight_sync.receivers import ReceivingEngine
from tests.weight_sync.routed import World, two_checkpoints, world


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return two_checkpoints(tmp_path_factory.mktemp("shadow"))


async def _at_version_0(one: World) -> None:
    """Everybody serves checkpoint 0 as version 0, and the trainer has gone on to checkpoint 1."""
    await one.coordinator.setup()
    await one.train_to(0)
    await one.coordinator.sync(0)
    await one.train_to(1)


async def _receiving(engine: ReceivingEngine) -> None:
    while not all(status.get("running") for status in await engine.rpc("sync_status")):
        await asyncio.sleep(0.01)


async def _assert_served_and_whole(one: World, which: int, version: int,
                                   engines: Sequence[ReceivingEngine] = ()) -> None:
    for engine in engines or one.engines:
        engine.check_serving()
        assert engine.version == version
        assert await engine.rpc("differences", one.truth[which]) == [[]] * len(engine.members)


def test_what_was_not_received_whole_is_never_swapped_in():
    live = {"w": torch.ones(4)}
    worker = WorkerSync(live, shadow=True)
    worker.begin()
    with pytest.raises(SwapError, match="epoch 3 was not received"):
        worker.swap(3)
    worker.receive(3)                           # over lanes that were never opened
    with pytest.raises(SwapError, match="epoch 3 was not received"):
        worker.swap(3)
    assert torch.equal(live["w"], torch.ones(4))


def test_the_old_version_is_served_while_the_new_one_arrives(folders, tmp_path):
    """Two workers each; the source holds a bucket in the middle. What was received by then is nowhere in what
    is live."""
    async def run(one: World) -> None:
        await _at_version_0(one)
        released = tmp_path / "released"
        await one.sources[0].call("strike", "hold", 3, str(released))
        syncing = asyncio.ensure_future(one.coordinator.sync(1))
        for engine in one.engines:
            await _receiving(engine)
        await _assert_served_and_whole(one, 0, 0)
        assert not syncing.done()
        released.touch()
        report = await syncing
        await one.assert_hold(1, 1)
        assert report.seconds["commit"] >= report.seconds["pause"] > 0

    with world(folders, "chain", 2, tp=2, staging="shadow") as one:
        asyncio.run(run(one))


def test_an_epoch_that_fails_before_the_swap_leaves_the_old_version_served(folders):
    """Damage, a bucket of another epoch, failures before and after the transfer; then a sync that goes through, and a
    coordinator that dies in the next one."""
    async def run(one: World) -> None:
        await _at_version_0(one)

        async def fails(message: str) -> None:
            with pytest.raises(SyncError, match=f"(?s){message}"):
                await one.coordinator.sync(1)
            assert one.coordinator.version == 0
            await _assert_served_and_whole(one, 0, 0)

        for fault, message in (("flip", "engine 1 worker 0: source [0-9a-f]{16}, live"),
                               ("late", "engine 1 worker 0: .*expected bucket 2 of epoch")):
            await one.engines[0].rpc("strike", fault, 2)
            await fails(message)
            await one.engines[0].rpc("strike", "none")

        for phase in ("prepare", "commit"):
            method = getattr(one.engines[1], f"sync_{phase}")

            async def failing(*args):
                raise RuntimeError("not today")

            setattr(one.engines[1], f"sync_{phase}", failing)
            if phase == "prepare":
                await fails("engine 1: not today")
            else:
                with pytest.raises(SyncError, match="engine 1: not today"):
                    await one.coordinator.sync(1)
                await _assert_served_and_whole(one, 0, 0, one.engines[1:])
                # The other one had begun its swap: what it holds was never committed, and it says so.
                assert one.engines[0].state is EngineState.DISCARDED
            setattr(one.engines[1], f"sync_{phase}", method)

        await one.coordinator.sync(1)
        await one.assert_hold(1, 1)

        await one.train_to(0)
        await one.sources[0].call("strike", "delay", 3)
        syncing = asyncio.ensure_future(one.coordinator.sync(2))
        await _receiving(one.engines[1])
        one.coordinator.close()                 # what the kernel does to the sockets of a process that ends
        with pytest.raises(SyncError, match="the coordinator is gone"):
            await syncing
        await _assert_served_and_whole(one, 1, 1)
        await one.assert_healed_by_another_coordinator(0)

    with world(folders, "chain", 2, staging="shadow") as one:
        asyncio.run(run(one))


def test_deaths_in_the_transfer_leave_the_others_serving(folders):
    """First a receiver: the others serve the old version until they commit the new one over new lanes. Then the only
    source: nothing can be sent any more, and they go on with what they have."""
    async def run(one: World) -> None:
        await _at_version_0(one)
        await one.engines[0].rpc("strike", "die", 3)
        opened, seen = one.engines[1].sync_open, []

        async def watched(part):
            seen.append((one.engines[1].state, one.engines[1].version))
            return await opened(part)

        one.engines[1].sync_open = watched
        report = await one.coordinator.sync(1)
        assert report.lost == ("engine 0",) and seen == [(EngineState.SERVING, 0)]
        await one.assert_hold(1, 1, one.engines[1:])

        await one.sources[0].call("strike", "die", 3)
        with pytest.raises(SyncError, match="trainer rank 0"):
            await one.coordinator.sync(2)
        await _assert_served_and_whole(one, 1, 1, one.engines[1:])

    with world(folders, "chain", 3, staging="shadow") as one:
        asyncio.run(run(one))


def test_a_swap_that_fails_is_not_served(folders):
    """What is live is digested again after the copy; a mixture is DISCARDED, and the next sync heals it. A death in the
    swap loses that engine; the others are brought to the version over new lanes."""
    async def run(one: World) -> None:
        await _at_version_0(one)
        await one.engines[0].rpc("strike", "tear")
        with pytest.raises(SyncError, match="engine 0 worker 0: SwapError: epoch 2: after the swap the live parameters "
                                            "are not what was received from trainer rank 0"):
            await one.coordinator.sync(1)
        with pytest.raises(NotServing, match="discarded.*SwapError"):
            one.engines[0].check_serving()
        await one.engines[0].rpc("strike", "none")
        await one.coordinator.sync(1)
        await one.assert_hold(1, 1)

        await one.train_to(0)
        await one.engines[1].rpc("strike", "die in the swap")
        report = await one.coordinator.sync(2)
        assert report.lost == ("engine 1",)
        with pytest.raises(NotServing):
            one.engines[1].check_serving()
        await one.assert_hold(0, 2, [one.engines[0], one.engines[2]])

    with world(folders, "chain", 3, staging="shadow") as one:
        asyncio.run(run(one))
