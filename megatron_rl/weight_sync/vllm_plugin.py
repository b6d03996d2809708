"""The rollout side of a sync, inside vLLM's workers: a worker extension and a registered weight transfer engine.

Named as `worker_extension_cls`, this module is imported by every worker before its model is loaded. The transfer
engine is a `WeightReceiver` over the live parameters.

No exception may leave a worker RPC: at TP >= 2 vLLM's executor raises at the first failing rank without draining the
others, and every later answer is off by one. Failures are recorded and reported by `sync_status`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from megatron_rl.weight_sync.protocol import SyncPart
from megatron_rl.weight_sync.receiver import WeightReceiver
from megatron_rl.weight_sync.tiles import CanonicalTensor
from megatron_rl.weight_sync.transport import TransportError
from megatron_rl.weight_sync.vllm_internals import end_update, keep_cpu_weights_in_place, live_model
from megatron_rl.weight_sync.vllm_layout import assert_not_empty, encode_layout, trace_layout, write_padding

BACKEND = "megatron_rl"

if current_platform.is_cpu():
    keep_cpu_weights_in_place()


class WeightSyncWorker:
    """Methods that vLLM adds to its workers (`worker_extension_cls`); called through `collective_rpc`."""

    def sync_layout(self, canonical: list, dtype: str) -> dict:
        """Trace this worker's layout. Returns plain layouts, types and padding, or {"error": ...}."""
        return _never_raise(lambda: _trace(live_model(self), canonical, dtype))

    def sync_begin(self) -> dict:
        """Open an update session, whatever became of the last one."""
        def begin() -> dict:
            end_update(self)
            self.start_weight_update()
            return {}

        return _never_raise(begin)

    def sync_end(self) -> dict:
        """Close the update session, if one is open."""
        return _never_raise(lambda: end_update(self) or {})

    def sync_leave(self, reason: str) -> dict:
        """Close the update session, if one is open, and all lanes."""
        def leave() -> dict:
            end_update(self)
            self.weight_transfer_engine.leave(reason)
            return {}

        return _never_raise(leave)

    def sync_status(self) -> dict:
        """What the transfer engine did last; see `LaneReceiver.status`."""
        return self.weight_transfer_engine.status()

    def sync_probe(self, names: list[str]) -> dict:
        """Whole live parameters as bytes, for tests and debugging: name -> [dtype, shape, bytes]."""
        parameters = dict(live_model(self).named_parameters())
        return _never_raise(lambda: {name: [_dtype(parameters[name]), list(parameters[name].shape),
                                            _bytes(parameters[name])] for name in names})


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Sent once: for each worker of the engine its part of the sync (`SyncPart.plain`)."""

    replica: int
    parts: list
    address: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    epoch: int


class LaneReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives the streams of one worker and writes them into live parameters."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._receiver: WeightReceiver | None = None
        self._status: dict[str, Any] = {"epoch": -1, "error": None}

    def status(self) -> dict:
        """`epoch`, `error` (a message or None); after the lanes were opened `held` (`Held` as a dict of plain values);
        after a transfer `digests` [[rank, digest]], `nbytes`, `forwarded`, `seconds`, `arrivals` [[sender, s]]."""
        return self._status

    # vLLM's worker calls these five; each returns whatever happens.

    def parse_init_info(self, init_dict: dict) -> dict:
        return init_dict                     # parsed inside the guard of init_transfer_engine

    def init_transfer_engine(self, init_info: dict) -> None:
        self._guard(-1, lambda: self._open(self.init_info_cls(**init_info)))

    def start_weight_update(self) -> None:
        self._status = {"epoch": -1, "error": "no transfer has run since the update started"}

    def update_weights(self, update_info: dict) -> None:
        # The base class would call torch.accelerator.synchronize(), which a CPU has not.
        self._guard(update_info.get("epoch", -1), lambda: self.receive_weights(self.update_info_cls(**update_info)))

    def finish_weight_update(self) -> None:
        """Nothing is staged; the version is set by the engine's COMMIT."""

    def shutdown(self) -> None:
        self.leave("")

    def leave(self, reason: str) -> None:
        """Close all lanes."""
        if self._receiver is not None:
            self._receiver.close(reason)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self._receiver is None:
            raise TransportError("its lanes were never opened")
        report = self._receiver.receive(update_info.epoch)
        self._status |= {"digests": [[key[0], digest] for key, digest in report.digests.items()],
                         "nbytes": report.nbytes, "forwarded": report.forwarded, "seconds": report.seconds,
                         "arrivals": [list(each) for each in report.arrivals.items()]}

    def _open(self, info: InitInfo) -> None:
        self.shutdown()
        worker = self.parallel_config.rank
        parameters = dict(self.model.named_parameters())
        assert_not_empty(parameters)
        self._receiver = WeightReceiver((info.replica, worker), parameters, address=info.address)
        self._status["held"] = asdict(self._receiver.open(SyncPart.from_plain(info.parts[worker])))

    def _guard(self, epoch: int, action: Callable[[], None]) -> None:
        self._status = {"epoch": epoch, "error": None}
        try:
            action()
        except Exception as error:
            traceback.print_exc()            # into the engine's log
            self._status["error"] = f"{type(error).__name__}: {error}"


def _trace(model: torch.nn.Module, canonical: list, dtype: str) -> dict:
    tensors = [CanonicalTensor(name, tuple(shape)) for name, shape in canonical]
    traced = trace_layout(model, tensors, getattr(torch, dtype))
    parameters = dict(model.named_parameters())
    write_padding(parameters, traced.padding)
    return {"layouts": [encode_layout(layout) for layout in traced.layouts],
            "dtypes": {name: _dtype(parameter) for name, parameter in parameters.items()},
            "padding": traced.padded_elements()}


def _never_raise(action: Callable[[], dict]) -> dict:
    try:
        return action()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()


WeightTransferEngineFactory.register_engine(BACKEND, LaneReceiver)
