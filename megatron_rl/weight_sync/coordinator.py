"""The driver's side of a sync: it proves the manifest, opens the lanes, and runs PREPARE, TRANSFER, VERIFY, COMMIT.

It knows trainer ranks and engines only as handles with awaitable methods, so it works with Ray actors and with plain
objects. There is one RPC per member and phase, and no call per tensor. An engine that dies is left out: the epoch is
aborted, the others get a new route and new lanes, and the transfer starts again. The death of a training rank ends the
sync.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from launch.errors import UserError
from launch.fabric.communicators import MOST_LINKS
from launch.fabric.estimate import Kind
from launch.fabric.rounds import rounds
from launch.fabric.seated import Seats
from megatron_rl.layouts.tiles import CanonicalTensor
from megatron_rl.weight_sync.calls import answers, outcomes, raise_failures
from megatron_rl.weight_sync.compare import compare_digests, compare_held, compare_replicas
from megatron_rl.weight_sync.plan.copies import Destination, Holding, Source, held_alike
from megatron_rl.weight_sync.plan.coverage import prove_coverage
from megatron_rl.weight_sync.plan.manifest import SyncManifest, build_manifest
from megatron_rl.weight_sync.plan.streams import Pair, Stream
from megatron_rl.weight_sync.protocol import (
    CONNECT_S,
    TAGGED,
    Backend,
    EngineHandle,
    LaneSpec,
    Link,
    SyncError,
    SyncPart,
    SyncReport,
    TrainerHandle,
    TransferReport,
    engine_name,
    member_name,
    trainer_name,
)
from megatron_rl.weight_sync.wire.abort import AbortLine

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

OPENING = 2.0
"""Time limit for opening lanes, in transfer deadlines: a member may first wait for another lane until its deadline."""


@dataclass(frozen=True)
class Endpoint:
    """Where a trainer rank's lane listens."""

    address: str
    port: int


class SyncCoordinator:
    """Owner of all weight syncs of a run. Nothing else writes an engine's weights.

    Args:
        trainers: one handle per training rank, by rank.
        engines: one handle per rollout engine, by replica.
        endpoints: where the store of each training rank's lane listens.
        canonical: the tensors of the checkpoint.
        backend: `gloo` on CPUs, `nccl` on GPUs.
        bucket_bytes: maximum size of a packed bucket.
        timeout_s: deadline of a transfer. Opening lanes may take twice as long.
        aliases: see `build_manifest`.
        route: `direct`, `chain` or `tree`.
        seats: see `build_manifest`.
        address: this process's address in the job, where members listen for aborts. None: there is no abort line, so
            the neighbours of a failed member notice the failure at once and the others at their deadline.
    """

    def __init__(self, trainers: Sequence[TrainerHandle], engines: Sequence[EngineHandle],
                 endpoints: Sequence[Endpoint], canonical: Sequence[CanonicalTensor], *, backend: Backend,
                 bucket_bytes: int, timeout_s: float, aliases: Mapping[str, str] | None = None, route: Kind = "direct",
                 seats: Seats | None = None, address: str | None = None) -> None:
        self._trainers = dict(enumerate(trainers))
        self._engines = dict(enumerate(engines))
        self._endpoints, self._canonical = endpoints, canonical
        self._backend, self._bucket_bytes, self._timeout_s = backend, bucket_bytes, timeout_s
        self._opening_s = 1.5 * OPENING * timeout_s
        self._aliases, self._route, self._seats = aliases, route, seats
        self._line = AbortLine(address) if address else None
        self._sources: list[Source] = []
        self._alike: list[tuple[Holding, ...]] = []
        """Parameters that several training ranks hold."""
        self._destinations: dict[int, list[Destination]] = {}
        self._epoch = 0
        self._open = self._handed_out = False
        """Whether all members are on their lanes, and whether some may be."""
        self._lock = asyncio.Lock()
        self.version: int | None = None
        """The committed version; None before the first sync."""
        self.manifest: SyncManifest | None = None
        """The plan of what is sent where; None before `setup`."""

    async def setup(self) -> SyncManifest:
        """Collect the layouts of both sides, prove that every destination element is written exactly once, give every
        member its part, and open the lanes. Every member answers with the fingerprints of the route and of its streams,
        which must equal the proved ones.

        Raises:
            SyncError, CoverageError, UserError: nothing was sent, and all have left their lanes. The message names the
                members that died; the next `setup` leaves such engines out.
        """
        async with self._lock:
            deadline = time.monotonic() + self._timeout_s
            sources, described = await asyncio.gather(
                answers({trainer_name(rank): t.sync_describe() for rank, t in self._trainers.items()}, deadline,
                        first_failure=True),
                answers(self._on_engines(lambda engine: engine.sync_describe(self._canonical)), deadline,
                        first_failure=True))
            self._sources, self._destinations = sources, dict(zip(self._engines, described, strict=True))
            self._alike = held_alike(sources)
            had_lanes = self._handed_out
            try:
                await self._close_lanes()
                return await self._open_lanes(self._epoch)
            except Exception as error:
                if had_lanes or self._handed_out:
                    self._epoch += 1            # members leave the lanes that they opened before it
                    died = await self._discard(self._epoch, str(error))
                    if died:
                        raise SyncError(f"{', '.join(died)} died while the lanes were opened: {error}") from error
                raise

    async def admit(self, replica: int, engine: EngineHandle) -> None:
        """Replace a lost engine by one that was restarted. It serves once the next sync, over new lanes, has committed.

        Raises:
            SyncError: the engine does not answer, or its workers cannot describe their layouts.
        """
        async with self._lock:
            call = {engine_name(replica): engine.sync_describe(self._canonical)}
            (described,) = await answers(call, time.monotonic() + self._timeout_s)
            await self._close_lanes()
            self._engines[replica] = engine
            self._destinations[replica] = described

    async def leave(self, replicas: Collection[int]) -> None:
        """Leave engines out of all later syncs, which use new lanes. Engines that are already out do not matter."""
        async with self._lock:
            if self._engines.keys() & set(replicas):
                await self._close_lanes()
                self._engines = {replica: each for replica, each in self._engines.items() if replica not in replicas}

    async def sync(self, version: int, again: Callable[[], None] = lambda: None) -> SyncReport:
        """Bring every engine to the trainer's weights and commit them as `version`. Engines that die meanwhile are left
        out of this and all later syncs, and the report names them. `again` is called before the transfer starts again
        without them.

        Raises:
            SyncError: nothing was committed: the transfer failed although all engines live, or a training rank or the
                last engine died. The engines are DISCARDED and serve nothing until another `sync` succeeds.
        """
        async with self._lock:
            if self.manifest is None:
                raise SyncError("no lanes are open: set them up first")
            if self.version is not None and version <= self.version:
                raise SyncError(f"version {version} does not follow the committed version {self.version}")
            lost: list[str] = []
            while True:
                self._epoch += 1
                try:
                    manifest = self.manifest if self._open else await self._open_lanes(self._epoch - 1)
                    return replace(await self._run_epoch(manifest, self._epoch, version), lost=tuple(lost))
                except Exception as error:
                    died = await self._discard(self._epoch, str(error))
                    lost += died
                    if not died or not self._engines or set(map(trainer_name, self._trainers)) & set(died):
                        if lost:
                            raise SyncError(f"{', '.join(lost)} died during the sync of version {version}: {error}"
                                            ) from error
                        raise
                    log.warning("weight sync: epoch %d aborted, %s died; the others start again", self._epoch,
                                ", ".join(died))
                    again()

    def close(self) -> None:
        """End the run: members leave their lanes."""
        if self._line is not None:
            self._line.close()

    async def _open_lanes(self, last_epoch: int) -> SyncManifest:
        if not self._engines:
            raise SyncError("no engine is left")
        destinations = [each for replica in self._engines for each in self._destinations[replica]]
        try:
            manifest = build_manifest(self._sources, destinations, self._bucket_bytes, self._aliases,
                                      route=self._route, seats=self._seats)
        except ValueError as error:
            raise SyncError(str(error)) from error
        prove_coverage(manifest, self._sources, destinations)
        if self._backend not in TAGGED:
            check_links(manifest)
        part = SyncPart(lane_specs(manifest, self._endpoints, self._backend), (), self._timeout_s,
                        OPENING * self._timeout_s, last_epoch,
                        *((self._line.endpoint, self._line.token) if self._line else ()))
        self._handed_out = True
        shared: dict[int, list[str]] = defaultdict(list)
        for rank, name in itertools.chain.from_iterable(self._alike):
            shared[rank].append(name)
        calls: dict[str, Awaitable[Any]] = {
            trainer_name(rank): trainer.sync_open(replace(part, streams=manifest.part_of_rank(rank),
                                                          shared=tuple(shared[rank])))
            for rank, trainer in self._trainers.items()}
        calls |= {engine_name(replica): engine.sync_open(replace(part, streams=manifest.part_of_engine(replica)))
                  for replica, engine in self._engines.items()}
        # The members' own deadline names the absent ones, so it must pass first.
        held = await answers(calls, time.monotonic() + self._opening_s, first_failure=True)
        trainers = len(self._trainers)
        members = [trainer_name(rank) for rank in self._trainers]
        members += [engine_name(each.replica, each.worker) for each in destinations]
        compare_held(manifest, members, [*held[:trainers], *(each for workers in held[trainers:] for each in workers)])
        self.manifest, self._open = manifest, True
        return manifest

    async def _close_lanes(self) -> None:
        """Close the lanes, so that their stores end before others listen on the same ports."""
        if self._handed_out:
            self._open = self._handed_out = False
            await answers({trainer_name(rank): trainer.sync_discard(self._epoch, "new lanes are opened")
                           for rank, trainer in self._trainers.items()},
                          time.monotonic() + self._opening_s)

    async def _run_epoch(self, manifest: SyncManifest, epoch: int, version: int) -> SyncReport:
        marks = [time.monotonic()]
        deadline = marks[0] + 1.5 * self._timeout_s
        await answers(self._on_engines(lambda engine: engine.sync_prepare(epoch)), deadline)
        marks.append(time.monotonic())

        sent, received = await self._transfer(epoch, deadline)
        marks.append(time.monotonic())

        compare_digests([edge.key for edge in manifest.edges], sent, received)
        compare_replicas(self._alike, sent)
        marks.append(time.monotonic())

        # COMMIT has its own deadline, so that a slow transfer does not fail because of what follows it.
        pauses = await answers(self._on_engines(lambda engine: engine.sync_commit(epoch, version)),
                               time.monotonic() + self._timeout_s)
        self.version = version
        marks.append(time.monotonic())

        phases = ("prepare", "transfer", "verify", "commit")
        seconds = {name: end - start for name, (start, end) in zip(phases, itertools.pairwise(marks), strict=True)}
        seconds |= {"total": marks[-1] - marks[0], "pause": max(pauses)}
        for report in (*sent, *received):
            for name, value in report.seconds.items():
                seconds[name] = max(seconds.get(name, 0.0), value)
        arrivals = {(sender, report.member): value for report in received for sender, value in report.arrivals.items()}
        return SyncReport(version, epoch, sum(report.nbytes for report in received), seconds, arrivals=arrivals,
                          requantised=manifest.requantised_bytes)

    async def _transfer(self, epoch: int, deadline: float) -> tuple[list[TransferReport], list[TransferReport]]:
        calls: dict[str, Awaitable[Any]] = {trainer_name(rank): t.sync_send(epoch)
                                            for rank, t in self._trainers.items()}
        calls |= self._on_engines(lambda engine: engine.sync_receive(epoch))
        aborted = False

        def arrived(name: str, outcome: object) -> None:
            nonlocal aborted
            if not aborted and self._line is not None and (isinstance(outcome, BaseException) or _errors(outcome)):
                aborted = True
                self._line.abort(epoch)         # so that the others need not wait for their deadline

        found = await outcomes(calls, deadline, arrived=arrived)
        errors = [error for outcome in found.values() for error in _errors(outcome)]
        if errors:
            # A broken lane names only a neighbour, and an abort names no member, so errors with a cause come first.
            errors.sort(key=lambda message: (": the coordinator aborted" in message,
                                             "TransportError" in message or ": lane " in message))
            deaths = [f"{name}: {outcome}" for name, outcome in found.items() if isinstance(outcome, Exception)]
            raise SyncError("the transfer failed\n" + "\n".join(deaths + errors))
        raise_failures(found)
        reports = list(found.values())
        return (reports[:len(self._trainers)],
                [report for of_engine in reports[len(self._trainers):] for report in of_engine])

    async def _discard(self, epoch: int, reason: str) -> list[str]:
        """Make every member leave its lanes. Engines that were written in place count as a mixture. Members that do not
        answer are lost, and their names are returned; such engines are left out from now on."""
        patience = self._timeout_s
        if not self._open:          # a member that is opening lanes returns soon after the abort, or at its deadline
            patience = self._opening_s if self._line is None else patience + CONNECT_S
        self._open = self._handed_out = False
        if self._line is not None:
            self._line.abort(epoch)
        calls = {trainer_name(rank): t.sync_discard(epoch, reason) for rank, t in self._trainers.items()}
        calls |= self._on_engines(lambda engine: engine.sync_discard(epoch, reason))
        found = await outcomes(calls, time.monotonic() + patience)
        lost = [name for name, outcome in found.items() if isinstance(outcome, Exception)]
        self._engines = {replica: e for replica, e in self._engines.items() if engine_name(replica) not in lost}
        return lost

    def _on_engines(self, call: Callable[[EngineHandle], Awaitable[Answer]]) -> dict[str, Awaitable[Answer]]:
        return {engine_name(replica): call(engine) for replica, engine in self._engines.items()}


def check_links(manifest: SyncManifest) -> None:
    """Refuse a route with more links than a GPU can use at the same time (`MOST_LINKS`)."""
    links = Counter(member for pair in {pair for stream in manifest.streams for pair in stream.pairs}
                    for member in pair)
    member, most = max(links.items(), key=lambda item: item[1], default=(0, 0))
    if most > MOST_LINKS:
        raise UserError(f"with the {manifest.kind} route {member_name(member)} has {most} links of the weight sync, "
                        f"and a GPU can use {MOST_LINKS} at the same time", where="weight_sync.route",
                        fix="set weight_sync.route to chain or tree: receivers then pass the weights on")


def lane_specs(manifest: SyncManifest, endpoints: Sequence[Endpoint], backend: Backend) -> tuple[LaneSpec, ...]:
    """One lane per sending rank, by rank, with its receivers in the order of its streams. A lane has the links that no
    earlier lane has. All links are opened in rounds, so that a member waits for few others."""
    specs: list[LaneSpec] = []
    linked: set[Pair] = set()
    turn = rounds(pair for stream in manifest.streams for pair in stream.pairs)
    by_rank: dict[int, list[Stream]] = {}
    for stream in manifest.streams:
        by_rank.setdefault(stream.rank, []).append(stream)
    for rank, streams in sorted(by_rank.items()):
        receivers = dict.fromkeys(receiver for stream in streams for receiver in stream.receivers)
        numbers = {member: number for number, member in enumerate((rank, *receivers))}
        pairs = dict.fromkeys(pair for stream in streams for pair in stream.pairs if pair not in linked)
        linked.update(pairs)
        specs.append(LaneSpec(rank, endpoints[rank].address, endpoints[rank].port, tuple(map(member_name, receivers)),
                              backend, tuple(Link(numbers[pair[0]], numbers[pair[1]], turn[frozenset(pair)])
                                             for pair in pairs)))
    return tuple(specs)


def _errors(outcome: object) -> list[str]:
    """Errors in one member's report or reports."""
    reports = outcome if isinstance(outcome, list) else [outcome]
    return [f"{report.member}: {report.error}" for report in reports
            if isinstance(report, TransferReport) and report.error]
