"""An engine's weights as a state machine: what may be served, and the engine's part of every sync."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.weight_sync.copies import Destination
from megatron_rl.weight_sync.protocol import (
    EngineState, Held, NotServing, SyncError, SyncPart, TransferReport, engine_name,
)
from megatron_rl.weight_sync.tiles import CanonicalTensor
from megatron_rl.weight_sync.vllm_layout import decode_layout


class EngineWeights:
    """State and version of one engine, and the calls into its workers.

    vLLM's own `weight_version` is a label nobody checks; here the version advances on COMMIT only, and a request is
    refused unless the state is SERVING.
    """

    def __init__(self, vllm: VllmEngine, replica: int, tp: int, dtype: str, address: str | None) -> None:
        self._vllm, self._replica, self._tp, self._dtype, self._address = vllm, replica, tp, dtype, address
        self.state = EngineState.EMPTY
        self.version: int | None = None
        self._admission = asyncio.Lock()
        self._paused = False
        self._epoch: int | None = None
        """The one that it is prepared for."""
        self._reason = "no weights were synced yet"

    def check_serving(self) -> None:
        """Raise NotServing unless a committed version is live."""
        if self.state is not EngineState.SERVING:
            raise NotServing(f"engine {self._replica} is {self.state.value}: {self._reason}")

    @asynccontextmanager
    async def admission(self) -> AsyncIterator[None]:
        """Hold it while handing requests to vLLM: a sync does not begin between the check and the hand-over.

        Raises NotServing unless a committed version is live.
        """
        async with self._admission:
            self.check_serving()
            yield

    async def describe(self, canonical: Sequence[CanonicalTensor]) -> list[Destination]:
        """Each worker's traced layout.

        Raises:
            SyncError: vLLM's loading of this model cannot be written as tiles.
        """
        plain = [[tensor.name, list(tensor.shape)] for tensor in canonical]
        answers = await self._vllm.rpc("sync_layout", plain, self._dtype)
        self._raise_errors(answers)
        return [Destination(self._replica, worker, tuple(map(decode_layout, answer["layouts"])), answer["dtypes"],
                            answer["padding"]) for worker, answer in enumerate(answers)]

    async def open(self, part: SyncPart) -> list[Held]:
        """Every worker joins its lanes, in the order given, and keeps its streams. Returns what each holds then."""
        parts = []
        for worker in range(self._tp):
            mine = (self._replica, worker)
            streams = tuple(each if mine in each.receivers else each.outline() for each in part.streams)
            parts.append(replace(part, streams=streams).plain())
        await self._vllm.open_transfer({"replica": self._replica, "parts": parts, "address": self._address})
        answers = await self._vllm.rpc("sync_status")
        self._raise_errors(answers)
        return [Held(**answer["held"]) for answer in answers]

    async def prepare(self, epoch: int) -> None:
        """Stop serving. Requests that are running are frozen in their place and go on with the new weights."""
        async with self._admission:
            self._epoch = epoch
            if self.state is not EngineState.DISCARDED:
                self.state, self._reason = EngineState.UPDATING, f"epoch {epoch} is not committed yet"
            if self._vllm.unfinished:
                await self._vllm.freeze(clear_cache=False)
                self._paused = True
        self._raise_errors(await self._vllm.rpc("sync_begin"))

    async def receive(self, epoch: int) -> list[TransferReport]:
        """Take in this epoch's buckets; a worker's failure is in its report, it is not raised."""
        await self._vllm.update({"epoch": epoch})
        reports = []
        for worker, status in enumerate(await self._vllm.rpc("sync_status")):
            member = engine_name(self._replica, worker)
            error = status["error"]
            if error is None and status["epoch"] != epoch:
                error = f"reports epoch {status['epoch']} instead of {epoch}"
            reports.append(TransferReport(
                member, {(rank, self._replica, worker): digest for rank, digest in status.get("digests", [])},
                status.get("nbytes", 0), status.get("seconds", {}), error, status.get("forwarded", 0),
                dict(status.get("arrivals", []))))
        return reports

    async def commit(self, epoch: int, version: int) -> None:
        """The live weights are `version`: drop what was cached under the old ones, then serve.

        The coordinator may give up meanwhile and discard the epoch; nothing is served then, however late this ends.
        """
        async with self._admission:     # the next PREPARE waits until this has ended, one way or the other
            self._check_prepared(epoch)
            self._raise_errors(await self._vllm.rpc("sync_end"))
            await self._vllm.label_version(str(version))
            # vLLM keeps the prefix cache over an update, and refuses to drop it while requests hold blocks.
            if not await self._vllm.reset_prefix_cache(preempt=self._paused):
                raise SyncError(f"engine {self._replica} did not drop its prefix cache: it would mix two versions")
            self._check_prepared(epoch)
            if self._paused:
                await self._vllm.resume()
                self._paused = False
            self._check_prepared(epoch)
            self.state, self.version, self._epoch = EngineState.SERVING, version, None

    def _check_prepared(self, epoch: int) -> None:
        if self._epoch != epoch:
            raise SyncError(f"engine {self._replica} is {self.state.value}: it cannot commit epoch {epoch}, which it "
                            "is not prepared for")

    async def discard(self, epoch: int, reason: str) -> None:
        """An epoch failed after PREPARE: the weights are a mixture, serve nothing until a full sync. The workers leave
        their lanes."""
        self.state, self._reason = EngineState.DISCARDED, f"epoch {epoch} failed: {reason}"
        self.version = self._epoch = None
        self._raise_errors(await self._vllm.rpc("sync_leave", f"epoch {epoch} failed"))

    def _raise_errors(self, answers: Sequence[dict]) -> None:
        failed = [f"engine {self._replica} worker {worker}: {answer['error']}"
                  for worker, answer in enumerate(answers) if answer.get("error")]
        if failed:
            raise SyncError("\n".join(failed))
