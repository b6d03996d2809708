"""The protocol's promises when a member fails: nobody commits alone, the failing and the absent are named."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from launch.errors import UserError
from launch.plan.plan import RankCoordinates
from megatron_rl.layouts.tiles import CanonicalTensor, ParamLayout, Tile
from megatron_rl.weight_sync.compare import compare_digests
from megatron_rl.weight_sync.coordinator import Endpoint, SyncCoordinator
from megatron_rl.weight_sync.plan.copies import Destination, Source
from megatron_rl.weight_sync.plan.coverage import CoverageError
from megatron_rl.weight_sync.plan.streams import route_fingerprint
from megatron_rl.weight_sync.protocol import Held, SyncError, TransferReport

EDGES = {0: (0, 0, 0), 1: (0, 1, 0)}
"""Trainer rank 0 sends to worker 0 of engines 0 and 1."""
LAYOUT = ParamLayout("w", (4,), (Tile("w", (0,), (4,), (1,), 0),))


def _held(member, part):
    """What an honest member answers."""
    return Held(member, route_fingerprint(part.streams),
                {stream.number: stream.fingerprint() for stream in part.streams
                 if member == f"trainer rank {stream.rank}"
                 or member in [f"engine {replica} worker {worker}" for replica, worker in stream.receivers]})


class _Trainer:
    def __init__(self) -> None:
        self.error: str | None = None
        self.opened: list[int] = []
        self.discarded: list[int] = []
        """Epochs."""
        self.digests = dict.fromkeys(EDGES.values(), 77)
        self.holds = _held

    async def sync_describe(self):
        return Source(RankCoordinates(rank=0, tp=0, pp=0, cp=0, dp=0), (LAYOUT,), {"w": "float32"})

    async def sync_open(self, part):
        self.opened.append(part.epoch)
        self.digests = {key: 77 for stream in part.streams for key in stream.edges}
        return self.holds("trainer rank 0", part)

    async def sync_send(self, epoch):
        return TransferReport("trainer rank 0", self.digests, 10, {"send": 0.1}, self.error)

    async def sync_discard(self, epoch, reason):
        self.discarded.append(epoch)


class _Engine:
    """Remembers the phases it was told of. `fails` names a phase that raises, `hangs` one that never answers."""

    def __init__(self, replica: int) -> None:
        self.replica, self.phases = replica, []
        self.digests = {EDGES[replica]: 77}
        self.fails, self.hangs = None, None
        self.holds = _held

    async def sync_describe(self, canonical):
        return [Destination(self.replica, 0, (LAYOUT,), {"w": "float32"}, {})]

    async def sync_open(self, part):
        return [self.holds(f"engine {self.replica} worker 0", part)]

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
        return [TransferReport(f"engine {self.replica} worker 0", self.digests, 10)]

    async def sync_commit(self, epoch, version):
        await self._phase("commit")
        return 0.1 + self.replica

    async def sync_discard(self, epoch, reason):
        await self._phase("discard")


def _world(timeout_s: float = 5.0, *, set_up: bool = True):
    trainer, engines = _Trainer(), [_Engine(0), _Engine(1)]
    coordinator = SyncCoordinator([trainer], engines, [Endpoint("127.0.0.1", 1)], [CanonicalTensor("w", (4,))],
                                  backend="gloo", bucket_bytes=16, timeout_s=timeout_s)
    if set_up:
        asyncio.run(coordinator.setup())
    return trainer, engines, coordinator


def test_without_a_set_up_nothing_is_synced():
    _, engines, coordinator = _world(set_up=False)
    with pytest.raises(SyncError, match="set them up first"):
        asyncio.run(coordinator.sync(0))
    assert [engine.phases for engine in engines] == [[], []]


def test_more_links_than_a_gpu_can_use_are_refused():
    """NCCL's run on CUDA streams, of which torch has 32. gloo's do not."""
    engines = [_Engine(0) for _ in range(33)]
    for number, engine in enumerate(engines):
        engine.replica = number
    for backend in ("nccl", "gloo"):
        coordinator = SyncCoordinator([_Trainer()], engines, [Endpoint("127.0.0.1", 1)], [CanonicalTensor("w", (4,))],
                                      backend=backend, bucket_bytes=16, timeout_s=5.0)
        if backend == "nccl":
            with pytest.raises(UserError, match="with the direct route trainer rank 0 has 33 links"):
                asyncio.run(coordinator.setup())
        else:
            asyncio.run(coordinator.setup())


@pytest.mark.parametrize("holds, message", [
    (lambda member, part: None, "{member}: holds nothing, the manifest has route [0-9a-f]{{16}}"),
    (lambda member, part: replace(_held(member, part), route="0" * 16),
     "{member}: holds route 0{{16}}, the manifest [0-9a-f]{{16}}"),
    (lambda member, part: replace(_held(member, part), streams={1: "0" * 16}),
     "{member}: of stream 1 .trainer rank 0 -> engine 1 worker 0. it holds 0{{16}}, the manifest [0-9a-f]{{16}}"),
    (lambda member, part: replace(_held(member, part), streams={}), "{member}: of stream 1 .* it holds nothing"),
    (lambda member, part: replace(_held(member, part), streams={**_held(member, part).streams, 7: "0" * 16}),
     "{member}: of stream 7 it holds 0{{16}}, the manifest none"),
], ids=["nothing", "another route", "another stream", "one too few", "one too many"])
@pytest.mark.parametrize("end", ["source", "destination"])
def test_a_member_that_holds_another_manifest_is_named_before_the_first_byte(end, holds, message):
    trainer, engines, coordinator = _world(set_up=False)
    member, name = (trainer, "trainer rank 0") if end == "source" else (engines[1], "engine 1 worker 0")
    member.holds = holds
    with pytest.raises(SyncError, match=message.format(member=name)):
        asyncio.run(coordinator.setup())
    assert [engine.phases for engine in engines] == [["discard"], ["discard"]], "nobody stays on those lanes"
    assert trainer.opened[0] < trainer.discarded[0], "members do not listen to the end of what was before them"
    with pytest.raises(SyncError, match="set them up"):
        asyncio.run(coordinator.sync(0))
    member.holds = _held
    asyncio.run(coordinator.setup())
    assert asyncio.run(coordinator.sync(0)).version == 0


def test_lanes_are_not_opened_for_a_manifest_that_leaves_a_gap():
    """The last element of a worker's parameter has no source, and is no padding either."""
    trainer, engines, coordinator = _world(set_up=False)
    three = replace(LAYOUT, tiles=(Tile("w", (0,), (3,), (1,), 0),))

    async def describe(canonical):
        return [Destination(1, 0, (three,), {"w": "float32"}, {})]

    engines[1].sync_describe = describe
    with pytest.raises(CoverageError, match=r"engine 1 worker 0: .*w"):
        asyncio.run(coordinator.setup())
    assert trainer.opened == [] and [engine.phases for engine in engines] == [[], []]


def test_a_sync_in_which_nobody_reports_a_digest_is_not_verified():
    """An empty comparison must not pass."""
    trainer, engines, coordinator = _world()
    trainer.digests = engines[0].digests = engines[1].digests = {}
    with pytest.raises(SyncError, match="engine 0 worker 0: source no digest, live no digest"):
        asyncio.run(coordinator.sync(0))
    assert coordinator.version is None and all("commit" not in engine.phases for engine in engines)


def test_a_sync_goes_through_its_phases_once_and_reports_them():
    _, engines, coordinator = _world()
    report = asyncio.run(coordinator.sync(4))
    assert [engine.phases for engine in engines] == [["prepare", "receive", "commit"]] * 2
    assert (report.version, coordinator.version, report.nbytes) == (4, 4, 20)
    assert {"prepare", "transfer", "verify", "commit", "total", "send"} <= report.seconds.keys()
    assert report.seconds["pause"] == 1.1


def test_one_wrong_digest_and_no_engine_commits():
    """dynamo#9131: an update that is not atomic over the workers."""
    _, engines, coordinator = _world()
    engines[1].digests = {EDGES[1]: 78}
    with pytest.raises(SyncError, match="trainer rank 0 -> engine 1 worker 0: source 0{14}4d, live 0{14}4e"):
        asyncio.run(coordinator.sync(0))
    assert [engine.phases for engine in engines] == [["prepare", "receive", "discard"]] * 2
    assert coordinator.version is None


def test_a_missing_digest_is_not_an_equal_one():
    """miles: a write failure was logged and the version stamped all the same."""
    both = dict.fromkeys(EDGES.values(), 5)
    sent, received = [TransferReport("trainer rank 0", both)], [TransferReport("engine 0 worker 0", both)]
    compare_digests(both.keys(), sent, received)
    first = [TransferReport("engine 0 worker 0", {EDGES[0]: 5})]
    with pytest.raises(SyncError, match="engine 1 worker 0: source 0{15}5, live no digest"):
        compare_digests(both.keys(), sent, first)
    with pytest.raises(SyncError, match="engine 0 worker 0: source no digest"):
        compare_digests(both.keys(), [], received)
    with pytest.raises(SyncError, match="(?s)engine 0 .*no digest.*engine 1 .*no digest"):
        compare_digests(both.keys(), [], [])
    with pytest.raises(SyncError, match="engine 1 worker 0: source no digest, live no digest"):
        compare_digests(both.keys(), first, first)
    with pytest.raises(SyncError, match="engine 1 worker 0: a digest of an edge that the manifest does not have"):
        compare_digests([EDGES[0]], sent, received)


def test_who_does_not_answer_is_named_and_everyone_discards():
    _, engines, coordinator = _world(timeout_s=0.2)
    engines[1].hangs = "receive"
    with pytest.raises(SyncError, match="no answer in time from engine 1$"):
        asyncio.run(coordinator.sync(0))
    assert all(engine.phases[-1] == "discard" and "commit" not in engine.phases for engine in engines)
    engines[1].hangs = None
    assert asyncio.run(coordinator.sync(0)).epoch == 2, "the next sync opens new lanes by itself"


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


def test_a_call_that_was_cancelled_is_a_failure_of_its_member():
    """A cancelled task has no answer, and to ask for its exception raises."""
    _, engines, coordinator = _world()

    async def cancelled(epoch):
        raise asyncio.CancelledError

    engines[1].sync_receive = cancelled
    with pytest.raises(SyncError, match="^engine 1: the call was cancelled$"):
        asyncio.run(coordinator.sync(0))
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


def test_a_member_that_answers_nothing_any_more_is_left_out_and_the_others_commit():
    _, engines, coordinator = _world(timeout_s=0.2)
    engines[1].fails = "receive"

    async def gone(epoch, reason):
        raise ConnectionError("gone")

    engines[1].sync_discard = gone
    again: list[int] = []
    report = asyncio.run(coordinator.sync(0, lambda: again.append(1)))
    assert (report.version, report.epoch, report.lost, again) == (0, 2, ("engine 1",), [1])
    assert engines[0].phases == ["prepare", "receive", "discard", "prepare", "receive", "commit"]
    assert "commit" not in engines[1].phases

    back = _Engine(1)
    asyncio.run(coordinator.admit(1, back))
    assert back.phases == []
    assert asyncio.run(coordinator.sync(1)).lost == () and back.phases == ["prepare", "receive", "commit"]


def test_the_death_of_a_training_rank_ends_the_sync_at_once():
    """The run cannot continue without it, so the engines are not synced again."""
    trainer, engines, coordinator = _world(timeout_s=0.2)

    async def gone(epoch, *reason):
        raise ConnectionError("gone")

    trainer.sync_send = trainer.sync_discard = engines[1].sync_discard = gone
    with pytest.raises(SyncError, match="(?s)^trainer rank 0, engine 1 died during the sync of version 4: .*gone"):
        asyncio.run(coordinator.sync(4))
    assert engines[0].phases == ["prepare", "receive", "discard"]
    assert len(trainer.opened) == 1 and coordinator.version is None


def test_an_engine_that_failed_between_two_syncs_is_not_asked_any_more():
    trainer, engines, coordinator = _world()
    asyncio.run(coordinator.sync(0))
    asyncio.run(coordinator.leave({1}))
    again = []
    report = asyncio.run(coordinator.sync(1, lambda: again.append(1)))
    assert (report.epoch, report.lost, again) == (2, (), []) and len(trainer.opened) == 2
    assert len(engines[0].phases) == 6 and len(engines[1].phases) == 3
    asyncio.run(coordinator.leave({1}))         # it is out already, and the lanes stay
    asyncio.run(coordinator.sync(2))
    assert len(trainer.opened) == 2
    asyncio.run(coordinator.admit(1, back := _Engine(1)))
    asyncio.run(coordinator.sync(3))
    assert back.phases == ["prepare", "receive", "commit"] and len(trainer.opened) == 3


def test_without_an_engine_there_is_nothing_to_set_up():
    _, engines, coordinator = _world(set_up=False)

    async def gone(*args):
        raise ConnectionError("gone")

    for engine in engines:
        engine.sync_open = engine.sync_discard = gone
    with pytest.raises(SyncError, match="^engine 0, engine 1 died while the lanes were opened"):
        asyncio.run(coordinator.setup())
    with pytest.raises(SyncError, match="no engine is left"):
        asyncio.run(coordinator.setup())
