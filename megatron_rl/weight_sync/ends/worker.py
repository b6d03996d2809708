"""The receiving side of a rollout worker as its engine calls it, without vLLM: open, receive, swap, leave, status.

In place, a transfer is written into the live parameters, and a call returns when it has ended. With a shadow, it is
written into a second copy: opening and receiving run in a thread while the worker computes, and `swap` brings the live
parameters to what was received. The copy is by value, because CUDA graphs and the engine hold the live parameters'
addresses.

Quantised layers are received in place only, through `LayerBuffers`.

No exception leaves a call that vLLM's executor makes (see `vllm_plugin`); `status` reports the result.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from megatron_rl.weight_sync.ends.layer_buffers import LayerBuffers
from megatron_rl.weight_sync.ends.receiver import WeightReceiver
from megatron_rl.weight_sync.plan.streams import EngineRank
from megatron_rl.weight_sync.protocol import SyncPart, TransferReport
from megatron_rl.weight_sync.wire.transport import TransportError


class SwapError(RuntimeError):
    """The live parameters are not what was received."""


class WorkerSync:
    """One worker's part of all syncs.

    Args:
        live: the parameters that the engine computes with and that may be written in place, by the names of the
            destination layouts.
        shadow: receive into a second copy. It is allocated here, before vLLM measures the memory for its KV cache.
        layers: takes the parameters of quantised layers. Not with a shadow.
    """

    def __init__(self, live: Mapping[str, torch.Tensor], *, shadow: bool, layers: LayerBuffers | None = None) -> None:
        self._live, self._layers = live, layers
        self._shadow = {name: torch.empty_like(each.detach()) for name, each in live.items()} if shadow else {}
        self._receiver: WeightReceiver | None = None
        self._received: TransferReport | None = None
        self._status: dict[str, Any] = {"epoch": -1, "error": None}
        self._background = ThreadPoolExecutor(1, thread_name_prefix="shadow") if shadow else None
        """One thread: a call waits for the running one, so the copy never has two writers."""
        self._running: Future | None = None

    def status(self) -> dict[str, Any]:
        """`epoch`, `error` (a message or None), and `running` during a transfer or the opening. After the lanes were
        opened: `held` (`Held` as a dict of plain values). After a transfer: `digests` [[rank, digest]], `nbytes`,
        `forwarded`, `seconds`, `arrivals` [[sender, s]]."""
        if self._running is not None:
            if not self._running.done():
                return {"epoch": -1, "error": None, "running": True}
            self._status, self._running = self._running.result(), None
        return self._status

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers for buckets."""
        return 0 if self._receiver is None else self._receiver.staging_bytes

    def begin(self) -> None:
        """Start an update session, in which nothing has been received yet."""
        self._running = self._received = None
        self._status = {"epoch": -1, "error": "no transfer has run since the update started"}

    def open(self, part: Callable[[], tuple[EngineRank, SyncPart, str | None]]) -> None:
        """Leave all lanes and join those of the part: (replica, worker), lanes and streams, own address in the job."""
        self.leave("")
        self._run(-1, lambda: self._open(*part()))

    def receive(self, epoch: int) -> None:
        """Receive an epoch's buckets."""
        self._run(epoch, lambda: self._receive(epoch))

    @torch.no_grad()
    def swap(self, epoch: int) -> None:
        """Bring the live parameters to what epoch `epoch` received into the shadow, and prove it: all digests are
        computed again. The engine must not compute meanwhile.

        Raises:
            SwapError: nothing complete was received, and nothing was written; or the live parameters are now a
                mixture.
        """
        report, receiver = self._received, self._receiver
        status = self.status()
        if not self._shadow or report is None or receiver is None or status["epoch"] != epoch or status["error"]:
            raise SwapError(f"epoch {epoch} was not received")
        self._received = None
        _wait_for_device(self._live)                    # kernels launched before still read them
        for name, value in self._shadow.items():
            self._live[name].detach().copy_(value)
        found, received = receiver.digests(self._live), report.digests
        wrong = sorted(key[0] for key in received.keys() | found.keys() if received.get(key) != found.get(key))
        if wrong:
            raise SwapError(f"epoch {epoch}: after the swap the live parameters are not what was received from trainer "
                            f"rank {', '.join(map(str, wrong))}")

    def leave(self, reason: str) -> None:
        """Close all lanes. A running transfer ends with an error, and what was received is never swapped in."""
        self._received = None
        if self._receiver is not None:
            self._receiver.close(reason)

    def _open(self, me: EngineRank, part: SyncPart, address: str | None) -> dict[str, Any]:
        self.leave("")
        for name, copy in self._shadow.items():         # including the rows that pad the vocabulary, which are not sent
            copy.copy_(self._live[name].detach())
        if self._shadow:
            _wait_for_device(self._live)                # buckets are written on other streams
        self._receiver = WeightReceiver(me, self._shadow or self._live, layers=self._layers, address=address)
        return {"held": asdict(self._receiver.open(part))}

    def _receive(self, epoch: int) -> dict[str, Any]:
        if self._receiver is None:
            raise TransportError("its lanes were never opened")
        report = self._receiver.receive(epoch)
        self._received = report
        return {"digests": [[key[0], digest] for key, digest in report.digests.items()], "nbytes": report.nbytes,
                "forwarded": report.forwarded, "seconds": report.seconds,
                "arrivals": [list(each) for each in report.arrivals.items()]}

    def _run(self, epoch: int, action: Callable[[], dict[str, Any]]) -> None:
        if self._background is None:
            self._status = _outcome(epoch, action)
        else:
            self._running = self._background.submit(_outcome, epoch, action)


def _outcome(epoch: int, action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"epoch": epoch, "error": None, **action()}
    except Exception as error:
        traceback.print_exc()                           # into the engine's log
        return {"epoch": epoch, "error": f"{type(error).__name__}: {error}"}


def _wait_for_device(tensors: Mapping[str, torch.Tensor]) -> None:
    device = next(iter(tensors.values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
