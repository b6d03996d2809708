"""An engine's weights as a state machine: what may be served, and the engine's part of every sync."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from megatron_rl.layouts.tiles import CanonicalTensor
from megatron_rl.layouts.vllm import decode_layout
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.weight_sync.plan.copies import Destination
from megatron_rl.weight_sync.protocol import (
    EngineState,
    Held,
    NotServing,
    Staging,
    SyncError,
    SyncPart,
    TransferReport,
    engine_name,
)

InFlight = Literal["keep", "drain", "abort"]
LOOK_EVERY_S = 0.02
"""How often workers that are busy in the background are asked, and how many requests are left."""


class EngineWeights:
    """State and version of one engine, and the calls into its workers: a `weight_sync.protocol.EngineHandle`.

    vLLM's own `weight_version` is a label nobody checks; here the version advances on COMMIT only, and a request is
    refused unless the state is SERVING. `staging` says where the workers write (`weight_sync.protocol`), `in_flight`
    what becomes of running requests (`weight_sync.in_flight`).
    """

    def __init__(self, vllm: VllmEngine, replica: int, tp: int, dtype: str, address: str | None,
                 staging: Staging = "in_place", in_flight: InFlight = "keep", timeout_s: float = 120.0) -> None:
        self._vllm, self._replica, self._tp, self._dtype, self._address = vllm, replica, tp, dtype, address
        self.shadow = staging == "shadow"
        self._requantises = False
        """Whether workers hold quantised weights, which they receive beside the live ones with either staging."""
        self.in_flight = in_flight
        self._timeout_s = timeout_s
        self._serving = asyncio.Event()
        self.state = EngineState.EMPTY
        self.version: int | None = None
        self._admission = asyncio.Lock()
        self._paused = False
        self._epoch: int | None = None
        """The one that it is prepared for."""
        self._swapped: int | None = None
        """Shadow: the one whose swap has begun since the last PREPARE."""
        self._stopped_at: float | None = None
        """When it began to serve nothing; None while it serves."""
        self._reason = "no weights were synced yet"

    def check_serving(self) -> None:
        """Raise NotServing unless a committed version is live."""
        if self.state is not EngineState.SERVING:
            raise NotServing(f"engine {self._replica} is {self.state.value}: {self._reason}")

    async def until_serving(self) -> None:
        """Return once a committed version is live.

        Raises:
            NotServing: none is within the deadline of two syncs: one that fails, and the one that heals.
        """
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                await self._serving.wait()
        except TimeoutError:
            self.check_serving()

    @asynccontextmanager
    async def admission(self) -> AsyncIterator[None]:
        """Hold it while handing requests to vLLM: a sync does not begin between the check and the hand-over.

        Raises NotServing unless a committed version is live.
        """
        async with self._admission:
            self.check_serving()
            yield

    async def sync_describe(self, canonical: Sequence[CanonicalTensor]) -> list[Destination]:
        """Each worker's traced layout.

        Raises:
            SyncError: vLLM's loading of this model cannot be written as tiles.
        """
        plain = [[tensor.name, list(tensor.shape)] for tensor in canonical]
        answers = await self._vllm.rpc("sync_layout", plain, self._dtype)
        self._raise_errors(answers)
        self._requantises = any(answer["requantised"] for answer in answers)
        return [Destination(self._replica, worker, tuple(map(decode_layout, answer["layouts"])), answer["dtypes"],
                            answer["padding"], tuple(answer["requantised"])) for worker, answer in enumerate(answers)]

    async def compare(self, folder: Path, canonical: Sequence[CanonicalTensor]) -> list[str]:
        """A line for each piece of a live parameter that is not, bit for bit, what lies in a Hugging Face folder; of a
        quantised one, what vLLM makes of that."""
        plain = [[tensor.name, list(tensor.shape)] for tensor in canonical]
        answers = await self._vllm.rpc("sync_compare", str(folder), plain, self._dtype)
        self._raise_errors(answers)
        return [f"worker {worker}: {line}" for worker, answer in enumerate(answers) for line in answer["lines"]]

    async def adopt(self, folder: Path, version: int, canonical: Sequence[CanonicalTensor]) -> None:
        """vLLM has loaded its weights from `folder`: if they are those, bit for bit, they are `version`.

        Raises:
            SyncError: they are not.
        """
        lines = await self.compare(folder, canonical)
        if lines:
            raise SyncError("\n".join([f"engine {self._replica} did not load what lies in {folder}", *lines[:20]]))
        async with self._admission:
            await self._vllm.label_version(str(version))
            self._serve(version)

    async def sync_open(self, part: SyncPart) -> list[Held]:
        """Every worker joins its lanes, in the order given, and keeps its streams. Returns what each holds then."""
        outlines = [each.outline() for each in part.streams]
        on = [set(each.receivers) for each in part.streams]
        parts = []
        for worker in range(self._tp):
            mine = self._replica, worker
            streams = tuple(whole if mine in receivers else outline
                            for whole, outline, receivers in zip(part.streams, outlines, on, strict=True))
            parts.append(replace(part, streams=streams).plain())
        await self._vllm.open_transfer({"replica": self._replica, "parts": parts, "address": self._address})
        answers = await self._settled()
        self._raise_errors(answers)
        return [Held(**answer["held"]) for answer in answers]

    async def sync_prepare(self, epoch: int) -> None:
        """Stop serving, unless the workers write beside what is served."""
        async with self._admission:
            self._epoch, self._swapped = epoch, None
            if not self.shadow:
                await self._stop_serving(epoch)
        self._raise_errors(await self._vllm.rpc("sync_begin"))

    async def sync_receive(self, epoch: int) -> list[TransferReport]:
        """Take in this epoch's buckets; a worker's failure is in its report, it is not raised."""
        await self._vllm.update({"epoch": epoch})
        reports = []
        for worker, status in enumerate(await self._settled()):
            member = engine_name(self._replica, worker)
            error = status["error"]
            if error is None and status["epoch"] != epoch:
                error = f"reports epoch {status['epoch']} instead of {epoch}"
            reports.append(TransferReport(
                member, {(rank, self._replica, worker): digest for rank, digest in status.get("digests", [])},
                status.get("nbytes", 0), status.get("seconds", {}), error, status.get("forwarded", 0),
                dict(status.get("arrivals", []))))
        return reports

    async def sync_commit(self, epoch: int, version: int) -> float:
        """Make the live weights `version`, drop what was cached under the old ones, then serve. Returns the seconds
        for which nothing was served.

        The coordinator may give up meanwhile and discard the epoch; nothing is served then, however late this ends,
        but by an engine whose swap had not begun: it goes on with the version that it has.
        """
        async with self._admission:     # the next PREPARE waits until this has ended, one way or the other
            self._check_prepared(epoch)
            if self.shadow:
                await self._swap(epoch)
            elif self._requantises:
                self._raise_errors(await self._vllm.rpc("sync_swap", epoch))
            self._raise_errors(await self._vllm.rpc("sync_end"))
            await self._vllm.label_version(str(version))
            # vLLM keeps the prefix cache over an update, and refuses to drop it while requests hold blocks.
            if not await self._vllm.reset_prefix_cache(preempt=self._paused):
                raise SyncError(f"engine {self._replica} did not drop its prefix cache: it would mix two versions")
            self._check_prepared(epoch)
            await self._resume()
            self._check_prepared(epoch)
            self._epoch = None
            self._serve(version)
            stopped_at, self._stopped_at = self._stopped_at, None
            return 0.0 if stopped_at is None else time.monotonic() - stopped_at

    async def _swap(self, epoch: int) -> None:
        try:
            await self._stop_serving(epoch)
            self._check_prepared(epoch)                             # it may have been discarded meanwhile
        except SyncError:
            if self.version is not None:                            # which nothing has touched
                await self._resume()
                self._stopped_at = None
                self._serve(self.version)
            raise
        self._swapped, self.version = epoch, None                   # from here on the old version is not whole
        self._raise_errors(await self._vllm.rpc("sync_swap", epoch))

    def _serve(self, version: int) -> None:
        self.state, self.version = EngineState.SERVING, version
        self._serving.set()

    async def _stop_serving(self, epoch: int) -> None:
        """No new request is taken, and none runs."""
        self._serving.clear()
        if self.state is not EngineState.DISCARDED:
            self.state, self._reason = EngineState.UPDATING, f"epoch {epoch} is not committed yet"
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        if not self._vllm.unfinished:
            return
        if self.in_flight == "drain":
            await self._drained()
        elif self.in_flight == "abort":
            await self._vllm.abort_all()
        else:
            await self._vllm.freeze(clear_cache=False)
            self._paused = True

    async def _drained(self) -> None:
        deadline = time.monotonic() + self._timeout_s / 2
        while left := self._vllm.unfinished:
            if time.monotonic() > deadline:
                raise SyncError(f"engine {self._replica} still runs {left} requests {self._timeout_s / 2:g} s after it "
                                "took the last one: raise weight_sync.timeout_s, or set weight_sync.in_flight to keep "
                                "or abort")
            await asyncio.sleep(LOOK_EVERY_S)       # vLLM tells who waits for a request, and nobody else

    async def _resume(self) -> None:
        if self._paused:
            await self._vllm.resume()
            self._paused = False

    def _check_prepared(self, epoch: int) -> None:
        if self._epoch != epoch:
            raise SyncError(f"engine {self._replica} is {self.state.value}: it cannot commit epoch {epoch}, which it "
                            "is not prepared for")

    async def sync_discard(self, epoch: int, reason: str) -> None:
        """An epoch failed, and the workers leave their lanes. Written in place, the weights are a mixture: serve
        nothing until a full sync. With a shadow the old version is whole and served, unless the swap has begun."""
        self._epoch = None
        if not self.shadow or self._swapped == epoch:
            self.state, self.version = EngineState.DISCARDED, None
        if self.state is not EngineState.SERVING:
            self._reason = f"epoch {epoch} failed: {reason}"
        self._raise_errors(await self._vllm.rpc("sync_leave", f"epoch {epoch} failed"))

    async def _settled(self) -> list[dict]:
        """What the workers report once nothing runs in their background: their own deadlines end that."""
        while True:
            answers = await self._vllm.rpc("sync_status")
            if not any(answer.get("running") for answer in answers):
                return answers
            await asyncio.sleep(LOOK_EVERY_S)       # a call that waits in a worker would stop its engine

    def _raise_errors(self, answers: Sequence[dict]) -> None:
        failed = [f"engine {self._replica} worker {worker}: {answer['error']}"
                  for worker, answer in enumerate(answers) if answer.get("error")]
        if failed:
            raise SyncError("\n".join(failed))
