"""Faults of a process that takes part in a sync: it strikes once, at one bucket."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Literal

from tests.patience import patient

Fault = Literal["die", "stop", "flip", "drop", "duplicate", "late", "delay", "hold", "die in the swap", "tear", "none"]


def strike(fault: Fault, number: int = 0, until: str = "", reached: str = "") -> None:
    """In this process. `die` and `stop` (for ever) at bucket `number` of a stream, while it is packed or unpacked, the
    others at sending it: `flip` a bit of it, `drop` it, send it twice, label it with the `late` epoch before, `delay`
    it by half a second, `hold` it until a file exists. `die in the swap` after the shadow was copied; `tear` it: one
    element of what is live differs then."""
    from megatron_rl.weight_sync.ends import receiver, sender
    from megatron_rl.weight_sync.wire import packing as wire
    from megatron_rl.weight_sync.wire import transport

    lane = transport.Lane
    send = getattr(lane, "true_send", lane.send)
    lane.true_send, lane.send = send, send
    receiver.unpack_bucket, sender.pack_bucket = wire.unpack_bucket, wire.pack_bucket
    true_digests = getattr(receiver.WeightReceiver, "true_digests", receiver.WeightReceiver.digests)
    receiver.WeightReceiver.true_digests = receiver.WeightReceiver.digests = true_digests
    if fault in ("die in the swap", "tear"):
        receiver.WeightReceiver.digests = lambda self, live: _spoiled(fault, live) or true_digests(self, live)
    elif fault in ("die", "stop"):
        how = signal.SIGKILL if fault == "die" else signal.SIGSTOP
        receiver.unpack_bucket = _ending(wire.unpack_bucket, number, how)
        sender.pack_bucket = _ending(wire.pack_bucket, number, how)
    elif fault != "none":
        lane.send = _Faulty(send, fault, number, until, reached)


def without_tags() -> None:
    """In this process: lanes opened from here on treat gloo as they do NCCL."""
    from megatron_rl.weight_sync.wire import member

    member.TAGGED = ()


def _ending(action: Any, at: int, how: signal.Signals) -> Any:
    def ended(bucket, number, *args):
        if number == at:
            os.kill(os.getpid(), how)
        return action(bucket, number, *args)

    return ended


def _spoiled(fault: Fault, live: Any) -> None:
    if fault == "die in the swap":
        os.kill(os.getpid(), signal.SIGKILL)
    live["model.norm.weight"][0] += 1


class _Faulty:
    def __init__(self, send: Any, fault: Fault, number: int, until: str, reached: str) -> None:
        self._send, self._fault, self._number, self._struck = send, fault, number, False
        self._until, self._reached = until, reached

    def __get__(self, lane: Any, kind: type) -> Any:
        """As a method of the lane."""
        return lambda stream, buffer, peer: self.on(lane, stream, buffer, peer)

    def on(self, lane: Any, stream: int, buffer: Any, peer: int) -> Any:
        import torch

        header = buffer[:64].view(torch.int64)
        if self._struck or int(header[2]) != self._number:
            return self._send(lane, stream, buffer, peer)
        self._struck = True
        if self._fault == "drop":
            return _Nothing()
        if self._fault == "delay":
            time.sleep(0.5)
        if self._fault == "hold":
            if self._reached:
                open(self._reached, "x").close()
            deadline = time.monotonic() + patient(60)
            while not os.path.exists(self._until) and time.monotonic() < deadline:
                time.sleep(0.01)
        if self._fault == "duplicate":
            self._kept = self._send(lane, stream, buffer.clone(), peer)      # a transfer that nobody keeps is cancelled
        if self._fault in ("flip", "late"):
            buffer = buffer.clone()
            if self._fault == "late":
                buffer[:64].view(torch.int64)[1] -= 1
            else:
                buffer[64 + (len(buffer) - 64) // 2] ^= 1
        return self._send(lane, stream, buffer, peer)


class _Nothing:
    def wait(self, deadline: Any) -> None:
        return
