"""The state machine of an engine's weights: what the engine may serve, and its part in every sync."""

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
from megatron_rl.weight_sync.plan.layers import plan_layers
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
"""Interval at which workers with background work are polled, and at which unfinished requests are counted."""


class EngineWeights:
    """State and version of one engine, and the calls to its workers. It is a `weight_sync.protocol.EngineHandle`.

    vLLM's own `weight_version` is an unchecked label. Here the version advances only on COMMIT, and requests are
    rejected unless the state is SERVING. `staging` is where the workers write (`weight_sync.protocol`). `in_flight` is
    what happens to running requests (`weight_sync.in_flight`), and `keep_kv` whether they keep their KV cache.
    """

    def __init__(self, vllm: VllmEngine, replica: int, tp: int, dtype: str, address: str | None,
                 staging: Staging = "in_place", in_flight: InFlight = "keep", keep_kv: bool = False,
                 timeout_s: float = 120.0) -> None:
        self._vllm, self._replica, self._tp, self._dtype, self._address = vllm, replica, tp, dtype, address
        self.shadow = staging == "shadow"
        self._requantised: tuple[str, ...] = ()
        """Names of the parameters that workers hold quantised."""
        self.in_flight, self.keep_kv = in_flight, keep_kv
        self._timeout_s = timeout_s
        self._serving = asyncio.Event()
        self.state = EngineState.EMPTY
        self.version: int | None = None
        self._admission = asyncio.Lock()
        self._paused = False
        self._epoch: int | None = None
        """The epoch that the engine is prepared for."""
        self._written: int | None = None
        """The epoch that may have changed the live weights since the last PREPARE."""
        self._stopped_at: float | None = None
        """When the engine stopped serving, on the monotonic clock in seconds. None while it serves."""
        self._reason = "no weights were synced yet"

    def check_serving(self) -> None:
        """Raise NotServing unless a committed version is live."""
        if self.state is not EngineState.SERVING:
            raise NotServing(f"engine {self._replica} is {self.state.value}: {self._reason}")

    async def until_serving(self) -> None:
        """Return once a committed version is live.

        Raises:
            NotServing: none is live after four deadlines: a sync that a silent member delays, and the one without it.
        """
        try:
            async with asyncio.timeout(4 * self._timeout_s):
                await self._serving.wait()
        except TimeoutError:
            self.check_serving()

    @asynccontextmanager
    async def admission(self) -> AsyncIterator[None]:
        """Hold this while submitting requests to vLLM, so that no sync begins between the check and the submission.

        Raises NotServing unless a committed version is live.
        """
        async with self._admission:
            self.check_serving()
            yield

    async def sync_describe(self, canonical: Sequence[CanonicalTensor]) -> list[Destination]:
        """Return the traced layout of each worker.

        Raises:
            SyncError: vLLM's loading of this model cannot be expressed as tiles.
        """
        plain = [[tensor.name, list(tensor.shape)] for tensor in canonical]
        answers = await self._vllm.rpc("sync_layout", plain, self._dtype)
        self._raise_errors(answers)
        self._requantised = tuple(answers[0]["requantised"])
        return [Destination(self._replica, worker, tuple(map(decode_layout, answer["layouts"])), answer["dtypes"],
                            answer["padding"], tuple(answer["requantised"])) for worker, answer in enumerate(answers)]

    async def compare(self, folder: Path, canonical: Sequence[CanonicalTensor]) -> list[str]:
        """One line for each piece of a live parameter that differs in any bit from a Hugging Face folder. A quantised
        parameter is compared with vLLM's quantisation of the folder's weights."""
        plain = [[tensor.name, list(tensor.shape)] for tensor in canonical]
        answers = await self._vllm.rpc("sync_compare", str(folder), plain, self._dtype)
        self._raise_errors(answers)
        return [f"worker {worker}: {line}" for worker, answer in enumerate(answers) for line in answer["lines"]]

    async def adopt(self, folder: Path, version: int, canonical: Sequence[CanonicalTensor]) -> None:
        """Serve the weights that vLLM loaded from `folder` as `version`, if they equal the files bit for bit.

        Raises:
            SyncError: they differ.
        """
        lines = await self.compare(folder, canonical)
        if lines:
            raise SyncError("\n".join([f"engine {self._replica} did not load the weights in {folder}", *lines[:20]]))
        async with self._admission:
            await self._vllm.label_version(str(version))
            self._serve(version)

    async def sync_open(self, part: SyncPart) -> list[Held]:
        """Let every worker join its lanes in the given order and keep its streams. Returns what each then holds."""
        outlines = [each.outline() for each in part.streams]
        on = [set(each.receivers) for each in part.streams]
        ranks = [(self._replica, worker) for worker in range(self._tp)]
        layers = plan_layers([[each for each, receivers in zip(part.streams, on, strict=True) if mine in receivers]
                              for mine in ranks], self._requantised)
        parts = []
        for mine in ranks:
            streams = tuple(whole if mine in receivers else outline
                            for whole, outline, receivers in zip(part.streams, outlines, on, strict=True))
            parts.append(replace(part, streams=streams, layers=layers[mine[1]]).plain())
        await self._vllm.open_transfer({"replica": self._replica, "parts": parts, "address": self._address})
        answers = await self._settled()
        self._raise_errors(answers)
        return [Held(**answer["held"]) for answer in answers]

    async def sync_prepare(self, epoch: int) -> None:
        """Stop serving, unless the workers write to a shadow of the live weights."""
        async with self._admission:
            self._epoch, self._written = epoch, None
            if not self.shadow:
                await self._stop_serving(epoch)
        self._raise_errors(await self._vllm.rpc("sync_begin"))

    async def sync_receive(self, epoch: int) -> list[TransferReport]:
        """Receive the buckets of this epoch. A worker's failure is not raised but stored in its report."""
        if not self.shadow:
            self._written = epoch
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
                arrivals=dict(status.get("arrivals", []))))
        return reports

    async def sync_commit(self, epoch: int, version: int) -> float:
        """Make the live weights `version`, drop the cache of the old version unless `keep_kv`, then serve. Returns the
        seconds for which nothing was served.

        The coordinator may give up during this call and discard the epoch. The engine then serves nothing, however late
        this call ends. Only an engine whose swap had not begun continues to serve its old version.
        """
        async with self._admission:     # the next PREPARE waits until this commit has ended or failed
            self._check_prepared(epoch)
            if self.shadow:
                await self._swap(epoch)
            self._written = epoch
            self._raise_errors(await self._vllm.rpc("sync_end"))
            await self._vllm.label_version(str(version))
            # vLLM keeps the prefix cache across an update and does not drop it while requests hold blocks.
            if not self.keep_kv and not await self._vllm.reset_prefix_cache(preempt=self._paused):
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
            self._check_prepared(epoch)                             # the epoch may have been discarded meanwhile
        except SyncError:
            if self.version is not None:                            # the old version is intact
                await self._serve_again(self.version)
            raise
        self._written, self.version = epoch, None                   # from here on the old version is not intact
        self._raise_errors(await self._vllm.rpc("sync_swap", epoch))

    async def _serve_again(self, version: int) -> None:
        """Serve the version that is still live."""
        await self._resume()
        self._stopped_at = None
        self._serve(version)

    def _serve(self, version: int) -> None:
        self.state, self.version = EngineState.SERVING, version
        self._serving.set()

    async def _stop_serving(self, epoch: int) -> None:
        """Accept no new request, and drain, abort or pause the running ones."""
        self._serving.clear()
        if self.state is not EngineState.DISCARDED:
            self.state, self._reason = EngineState.UPDATING, f"epoch {epoch} is not committed yet"
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        if not self._vllm.unfinished or self._paused:
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
            await asyncio.sleep(LOOK_EVERY_S)       # vLLM notifies only the caller awaiting the request, so poll

    async def _resume(self) -> None:
        if self._paused:
            await self._vllm.resume()
            self._paused = False

    def _check_prepared(self, epoch: int) -> None:
        if self._epoch != epoch:
            raise SyncError(f"engine {self._replica} is {self.state.value}: it cannot commit epoch {epoch}, which it "
                            "is not prepared for")

    async def sync_discard(self, epoch: int, reason: str) -> None:
        """Discard a failed epoch. The workers leave their lanes. If the epoch may have changed the live weights, they
        are a mixture, and the engine serves nothing until a full sync. Before the transfer, and with a shadow before
        the swap, the old version is intact and served."""
        self._epoch = None
        intact = self.version if self._written != epoch else None
        if intact is None:
            self.state, self.version = EngineState.DISCARDED, None
            self._serving.clear()
            if self._vllm.unfinished and not self._paused:      # it had committed, and others failed to
                self._paused = True
                await self._vllm.freeze(clear_cache=False)
        if self.state is not EngineState.SERVING:
            self._reason = f"epoch {epoch} failed: {reason}"
        self._raise_errors(await self._vllm.rpc("sync_leave", f"epoch {epoch} failed"))
        if intact is not None and self.state is EngineState.UPDATING and not self._admission.locked():
            await self._serve_again(intact)

    async def _settled(self) -> list[dict]:
        """Return the workers' reports once their background work has ended. Their own deadlines bound the wait."""
        while True:
            answers = await self._vllm.rpc("sync_status")
            if not any(answer.get("running") for answer in answers):
                return answers
            await asyncio.sleep(LOOK_EVERY_S)       # poll: a call waiting in a worker would block its engine

    def _raise_errors(self, answers: Sequence[dict]) -> None:
        failed = [f"engine {self._replica} worker {worker}: {answer['error']}"
                  for worker, answer in enumerate(answers) if answer.get("error")]
        if failed:
            raise SyncError("\n".join(failed))
