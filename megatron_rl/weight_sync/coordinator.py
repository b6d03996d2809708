"""The driver's side of a sync: proves the manifest, opens the lanes, and runs PREPARE, TRANSFER, VERIFY, COMMIT.

It knows trainer ranks and engines only as handles with awaitable methods, so it runs on Ray actors and on plain
objects alike. One RPC a member and phase; no call per tensor.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.weight_sync.coverage import prove_coverage
from megatron_rl.weight_sync.manifest import EdgeKey, SyncManifest, build_manifest
from megatron_rl.weight_sync.protocol import (
    Backend, EngineHandle, LaneSpec, SyncError, SyncReport, TrainerHandle, TransferReport,
)
from megatron_rl.weight_sync.tiles import CanonicalTensor


@dataclass(frozen=True)
class Endpoint:
    """Where a trainer rank's lane listens."""

    address: str
    port: int


class SyncCoordinator:
    """Owner of all weight syncs of a run: nobody else touches an engine's weights.

    Args:
        trainers: one handle a training rank, by rank.
        engines: one handle a rollout engine, by replica.
        endpoints: for each training rank, where its lane's store listens.
        canonical: the tensors of the checkpoint.
        backend: `gloo` on CPUs, `nccl` on GPUs.
        bucket_bytes: most bytes of a packed bucket.
        timeout_s: deadline of opening the lanes, and of each sync.
        aliases: see `build_manifest`.
    """

    def __init__(self, trainers: Sequence[TrainerHandle], engines: Sequence[EngineHandle],
                 endpoints: Sequence[Endpoint], canonical: Sequence[CanonicalTensor], *, backend: Backend,
                 bucket_bytes: int, timeout_s: float, aliases: Mapping[str, str] | None = None) -> None:
        self._trainers = {f"trainer rank {rank}": handle for rank, handle in enumerate(trainers)}
        self._engines = {f"engine {replica}": handle for replica, handle in enumerate(engines)}
        self._endpoints, self._canonical = endpoints, canonical
        self._backend, self._bucket_bytes, self._timeout_s = backend, bucket_bytes, timeout_s
        self._aliases = aliases
        self._epoch = 0
        self._broken: str | None = None
        self._lock = asyncio.Lock()
        self.version: int | None = None
        """The committed version; None before the first sync."""
        self.manifest: SyncManifest | None = None
        """What travels where; None before `setup`."""

    async def setup(self) -> SyncManifest:
        """Collect the layouts of both sides, prove that every destination element is written exactly once, hand
        every member its part and open the lanes in one global order. Every member answers with the fingerprints of
        the edges it was handed, and both ends of every edge must have the one that was proved.

        Raises:
            SyncError, CoverageError, UserError: nothing was sent.
        """
        deadline = time.monotonic() + self._timeout_s
        self._broken = "a set-up that did not finish"
        sources, described = await asyncio.gather(
            self._all({name: handle.sync_describe() for name, handle in self._trainers.items()}, deadline),
            self._all({name: handle.sync_describe(self._canonical) for name, handle in self._engines.items()},
                      deadline))
        destinations = [worker for workers in described for worker in workers]
        manifest = build_manifest(sources, destinations, self._bucket_bytes, self._aliases)
        prove_coverage(manifest, sources, destinations)

        lanes = lane_specs(manifest, self._endpoints, self._backend)
        opening: dict[str, Awaitable] = {}
        for rank, (name, trainer) in enumerate(self._trainers.items()):
            opening[name] = trainer.sync_open(lanes.get(rank), manifest.from_rank(rank), self._timeout_s)
        for replica, (name, engine) in enumerate(self._engines.items()):
            edges = [edge for edge in manifest.edges if edge.replica == replica]
            joined = [lanes[rank] for rank in sorted({edge.rank for edge in edges})]
            opening[name] = engine.sync_open(joined, edges, self._timeout_s)
        # The members' own deadline names who is absent: let it speak first.
        held = await self._all(opening, time.monotonic() + 1.5 * self._timeout_s)
        compare_fingerprints(manifest.edge_fingerprints(), held[:len(self._trainers)], held[len(self._trainers):])
        self._broken = None
        self.manifest = manifest
        return manifest

    async def sync(self, version: int) -> SyncReport:
        """Bring every engine to the trainer's weights and commit them as `version`.

        Raises:
            SyncError: nothing was committed; the engines are DISCARDED and serve nothing. After a digest mismatch
                another `sync` may heal them; after a failed transfer the lanes are gone and `setup` must run first.
        """
        async with self._lock:
            if self.manifest is None:
                raise SyncError("no lanes are open: set them up first")
            if self._broken:
                raise SyncError(f"the lanes are gone since {self._broken}; set them up again first")
            if self.version is not None and version <= self.version:
                raise SyncError(f"version {version} does not follow the committed version {self.version}")
            self._epoch += 1
            try:
                return await self._run_epoch(self._epoch, version)
            except Exception as error:
                await self._discard(self._epoch, str(error))
                raise

    async def _run_epoch(self, epoch: int, version: int) -> SyncReport:
        marks = [time.monotonic()]
        deadline = marks[0] + 1.5 * self._timeout_s
        await self._all({name: e.sync_prepare(epoch) for name, e in self._engines.items()}, deadline)
        marks.append(time.monotonic())

        sent, received = await self._transfer(epoch, deadline)
        marks.append(time.monotonic())

        compare_digests(self.manifest.bytes_per_edge().keys(), sent, received)
        marks.append(time.monotonic())

        await self._all({name: e.sync_commit(epoch, version) for name, e in self._engines.items()}, deadline)
        self.version = version
        marks.append(time.monotonic())

        phases = ("prepare", "transfer", "verify", "commit")
        seconds = {name: end - start for name, start, end in zip(phases, marks, marks[1:])}
        seconds["total"] = marks[-1] - marks[0]
        for report in (*sent, *received):
            for name, value in report.seconds.items():
                seconds[name] = max(seconds.get(name, 0.0), value)
        return SyncReport(version, epoch, sum(report.nbytes for report in received), seconds)

    async def _transfer(self, epoch: int, deadline: float) -> tuple[list[TransferReport], list[TransferReport]]:
        members = {name: t.sync_send(epoch) for name, t in self._trainers.items()}
        members |= {name: e.sync_receive(epoch) for name, e in self._engines.items()}
        try:
            # All answers, not the first failure: a member that fails leaves its lanes, and the others fail with it.
            answers = await self._all(members, deadline, return_when=asyncio.ALL_COMPLETED)
        except SyncError as error:
            self._broken = f"epoch {epoch} failed ({error})"
            raise
        sent, by_engine = answers[:len(self._trainers)], answers[len(self._trainers):]
        received = [report for reports in by_engine for report in reports]
        failed = [f"{report.member}: {report.error}" for report in (*received, *sent) if report.error]
        if failed:
            # A lane that broke names only a neighbour; what broke it comes first.
            failed.sort(key=lambda message: "TransportError" in message or ": lane " in message)
            self._broken = f"epoch {epoch} failed ({failed[0]})"
            raise SyncError("the transfer failed\n" + "\n".join(failed))
        return sent, received

    async def _discard(self, epoch: int, reason: str) -> None:
        """Tell every engine that its weights are a mixture; engines that do not answer serve nothing anyway, since
        they are past PREPARE."""
        calls = {name: e.sync_discard(epoch, reason) for name, e in self._engines.items()}
        try:
            await self._all(calls, time.monotonic() + self._timeout_s)
        except SyncError as error:
            self._broken = f"{self._broken or f'epoch {epoch} failed'}; {error}"

    async def _all(self, calls: dict[str, Awaitable | Any], deadline: float,
                   return_when: str = asyncio.FIRST_EXCEPTION) -> list[Any]:
        """The answers in order. Failures are raised with their members' names; at the deadline, the names of those
        that did not answer."""
        tasks = {asyncio.ensure_future(_awaitable(call)): name for name, call in calls.items()}
        try:
            done, waiting = await asyncio.wait(tasks, timeout=max(0.0, deadline - time.monotonic()),
                                               return_when=return_when)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        failed = {tasks[task]: task.exception() for task in done if task.exception() is not None}
        for task in waiting:
            task.cancel()
        if failed:
            first = next(iter(failed.values()))
            raise SyncError("; ".join(f"{name}: {error}" for name, error in failed.items())) from first
        if waiting:
            raise SyncError(f"no answer in time from {', '.join(sorted(tasks[task] for task in waiting))}")
        return [task.result() for task in tasks]


def lane_specs(manifest: SyncManifest, endpoints: Sequence[Endpoint], backend: Backend) -> dict[int, LaneSpec]:
    """One lane a sending rank, with its receivers in the order of its edges."""
    specs = {}
    for rank in sorted({edge.rank for edge in manifest.edges}):
        receivers = tuple(f"engine {edge.replica} worker {edge.worker}" for edge in manifest.from_rank(rank))
        specs[rank] = LaneSpec(rank, endpoints[rank].address, endpoints[rank].port, receivers, backend)
    return specs


def compare_digests(edges: Collection[EdgeKey], sent: Sequence[TransferReport],
                    received: Sequence[TransferReport]) -> None:
    """VERIFY: for every edge of the manifest, what the source holds is what the destination holds live.

    Raises:
        SyncError: naming every edge whose digests differ, of which a side did not report, or which the manifest does
            not have.
    """
    sources: dict[EdgeKey, int] = {key: value for report in sent for key, value in report.digests.items()}
    live: dict[EdgeKey, int] = {key: value for report in received for key, value in report.digests.items()}
    wrong = []
    for key in sorted({*edges, *sources, *live}):
        if key not in edges:
            wrong.append(f"{_edge(key)}: a digest of an edge that the manifest does not have")
        elif sources.get(key) is None or sources.get(key) != live.get(key):
            found = [f"{d:016x}" if d is not None else "no digest" for d in (sources.get(key), live.get(key))]
            wrong.append(f"{_edge(key)}: source {found[0]}, live {found[1]}")
    if wrong:
        raise SyncError("the engines do not hold what the trainer sent\n" + "\n".join(wrong))


def compare_fingerprints(expected: Mapping[EdgeKey, str], sources: Sequence[Mapping[EdgeKey, str] | None],
                         destinations: Sequence[Mapping[EdgeKey, str] | None]) -> None:
    """Before the first byte: both ends of every edge hold the copies that were proved.

    Raises:
        SyncError: naming every edge of which an end reports another fingerprint or none.
    """
    wrong = []
    for end, answers in (("source", sources), ("destination", destinations)):
        held = {key: value for answer in answers for key, value in (answer or {}).items()}
        for key in sorted({*expected, *held}):
            ours, theirs = expected.get(key, "none"), held.get(key, "nothing")
            if ours != theirs:
                wrong.append(f"{_edge(key)}: the {end} holds {theirs}, the manifest {ours}")
    if wrong:
        raise SyncError("the members do not hold the manifest that was proved\n" + "\n".join(wrong))


def _edge(key: EdgeKey) -> str:
    rank, replica, worker = key
    return f"trainer rank {rank} -> engine {replica} worker {worker}"


def _awaitable(call: Awaitable | Any) -> Awaitable:
    if inspect.isawaitable(call):
        return call
    raise TypeError(f"a handle's method must return an awaitable, not {type(call).__name__}")
