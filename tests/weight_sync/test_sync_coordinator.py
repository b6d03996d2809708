"""The protocol's promises when a member fails: nobody commits alone, the failing and the absent are named."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.weight_sync.coordinator import Endpoint, SyncCoordinator, compare_digests
from megatron_rl.weight_sync.protocol import SyncError, TransferReport

EDGES = {0: (0, 0, 0), 1: (0, 1, 0)}
"""Trainer rank 0 sends to worker 0 of engines 0 and 1."""


class _Trainer:
    def __init__(self) -> None:
        self.error: str | None = None

    async def sync_send(self, epoch):
        return TransferReport("trainer rank 0", dict.fromkeys(EDGES.values(), 77), 10, {"send": 0.1}, self.error)


class _Engine:
    """Remembers the phases it was told of. `fails` names a phase that raises, `hangs` one that never answers."""

    def __init__(self, replica: int) -> None:
        self.replica, self.phases = replica, []
        self.digest, self.fails, self.hangs = 77, None, None

    async def _phase(self, name: str) -> None:
        self.phases.append(name)
        if self.fails == name:
            raise RuntimeError(f"no {name} today")
        if self.hangs == name:
            await asyncio.Event().wait()

    async def sync_prepare(self, epoch):
        await self._phase("prepare")

    async def sync_receive(self, epoch):
        await self._phase("receive")
        return [TransferReport(f"engine {self.replica} worker 0", {EDGES[self.replica]: self.digest}, 10)]

    async def sync_commit(self, epoch, version):
        await self._phase("commit")

    async def sync_discard(self, epoch, reason):
        await self._phase("discard")


def _world(timeout_s: float = 5.0):
    trainer, engines = _Trainer(), [_Engine(0), _Engine(1)]
    coordinator = SyncCoordinator([trainer], engines, [Endpoint("127.0.0.1", 1)], [], backend="gloo",
                                  bucket_bytes=1, timeout_s=timeout_s)
    return trainer, engines, coordinator


def test_a_sync_goes_through_its_phases_once_and_reports_them():
    _, engines, coordinator = _world()
    report = asyncio.run(coordinator.sync(4))
    assert [engine.phases for engine in engines] == [["prepare", "receive", "commit"]] * 2
    assert (report.version, coordinator.version, report.nbytes) == (4, 4, 20)
    assert {"prepare", "transfer", "verify", "commit", "total", "send"} <= report.seconds.keys()


def test_one_wrong_digest_and_no_engine_commits():
    """dynamo#9131: an update that is not atomic over the workers."""
    _, engines, coordinator = _world()
    engines[1].digest = 78
    with pytest.raises(SyncError, match="trainer rank 0 -> engine 1 worker 0: source 0{14}4d, live 0{14}4e"):
        asyncio.run(coordinator.sync(0))
    assert [engine.phases for engine in engines] == [["prepare", "receive", "discard"]] * 2
    assert coordinator.version is None


def test_a_missing_digest_is_not_an_equal_one():
    """miles: a write failure was logged and the version stamped all the same."""
    sent = [TransferReport("trainer rank 0", {(0, 0, 0): 5, (0, 1, 0): 5})]
    with pytest.raises(SyncError, match="engine 1 worker 0: source 0{15}5, live no digest"):
        compare_digests(sent, [TransferReport("engine 0 worker 0", {(0, 0, 0): 5})])
    with pytest.raises(SyncError, match="source no digest"):
        compare_digests([], [TransferReport("engine 0 worker 0", {(0, 0, 0): 5})])


def test_who_does_not_answer_is_named_and_everyone_discards():
    _, engines, coordinator = _world(timeout_s=0.2)
    engines[1].hangs = "receive"
    with pytest.raises(SyncError, match="no answer in time from engine 1$"):
        asyncio.run(coordinator.sync(0))
    assert all(engine.phases[-1] == "discard" and "commit" not in engine.phases for engine in engines)
    with pytest.raises(SyncError, match="set them up again"):
        asyncio.run(coordinator.sync(0))


@pytest.mark.parametrize("phase", ["prepare", "receive", "commit"])
def test_a_failure_in_any_phase_ends_the_epoch(phase):
    """reef#62, trl#5937: the version stays what it was."""
    _, engines, coordinator = _world()
    asyncio.run(coordinator.sync(1))
    engines[0].fails = phase
    with pytest.raises(SyncError, match=f"engine 0: no {phase} today"):
        asyncio.run(coordinator.sync(2))
    assert coordinator.version == 1
    assert [engine.phases[-1] for engine in engines] == ["discard", "discard"]


def test_a_trainer_that_failed_to_send_is_named():
    trainer, engines, coordinator = _world()
    trainer.error = "lane 0, trainer rank 0: send to engine 1 worker 0 failed"
    with pytest.raises(SyncError, match="trainer rank 0: lane 0, trainer rank 0: send to engine 1 worker 0 failed"):
        asyncio.run(coordinator.sync(0))
    assert all("commit" not in engine.phases for engine in engines)


def test_a_stopped_engine_does_not_keep_the_others_from_discarding():
    _, engines, coordinator = _world(timeout_s=0.2)
    engines[0].fails, engines[1].hangs = "prepare", "discard"
    with pytest.raises(SyncError, match="no prepare today"):
        asyncio.run(coordinator.sync(0))
    assert engines[0].phases[-1] == "discard"
