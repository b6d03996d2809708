"""The rollout side of a sync, inside vLLM's workers: a worker extension and registered weight transfer engines.

Named as `worker_extension_cls`, this module is imported by every worker before its model is loaded. A transfer engine
is a `WorkerSync` over the live parameters. There is one per staging: `megatron_rl_in_place` and `megatron_rl_shadow`.

No exception may leave a worker RPC: at TP >= 2, vLLM's executor raises at the first failing rank without draining the
others, and every later answer is off by one. Failures are recorded, and `sync_status` reports them.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from megatron_rl.layouts.disk_check import differences, read_tiles
from megatron_rl.layouts.tiles import CanonicalTensor
from megatron_rl.layouts.vllm import (
    LayoutError,
    assert_not_empty,
    decode_layout,
    encode_layout,
    trace_layout,
    write_padding,
)
from megatron_rl.weight_sync.ends.layer_buffers import LayerBuffers
from megatron_rl.weight_sync.ends.quantised import Quantised
from megatron_rl.weight_sync.ends.vllm_internals import (
    end_update,
    in_vllms_config,
    keep_cpu_weights_in_place,
    least_over_tp,
    live_model,
)
from megatron_rl.weight_sync.ends.worker import WorkerSync
from megatron_rl.weight_sync.plan.streams import EngineRank
from megatron_rl.weight_sync.protocol import SyncPart, vllm_backend

if current_platform.is_cpu():
    keep_cpu_weights_in_place()


def never_raises(method: Callable[..., dict | None]) -> Callable[..., dict]:
    """A worker method that returns {"error": ...} instead of raising, and {} instead of None."""
    @functools.wraps(method)
    def guarded(*args) -> dict:
        try:
            return method(*args) or {}
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}

    return guarded


class WeightSyncWorker:
    """Methods that vLLM adds to its workers (`worker_extension_cls`), called through `collective_rpc`."""

    # Of vLLM's worker. Declared only: vLLM refuses an extension that defines what the worker has.
    weight_transfer_engine: InPlaceTransferEngine
    start_weight_update: Callable[[], None]

    @never_raises
    def sync_layout(self, canonical: list, dtype: str) -> dict:
        """Trace this worker's layout. Returns plain layouts, types and padding, and the names of the parameters that
        are quantised."""
        return _trace(self, canonical, dtype)

    @never_raises
    def sync_begin(self) -> None:
        """Open an update session, whatever the state of the last one."""
        end_update(self)
        self.start_weight_update()

    @never_raises
    def sync_end(self) -> None:
        """Close the update session, if one is open."""
        end_update(self)

    @never_raises
    def sync_leave(self, reason: str) -> None:
        """Close the update session, if one is open, and all lanes."""
        end_update(self)
        self.weight_transfer_engine.sync.leave(reason)

    @never_raises
    def sync_swap(self, epoch: int) -> None:
        """Bring the live parameters to what was received into the shadow."""
        self.weight_transfer_engine.sync.swap(epoch)

    def sync_status(self) -> dict:
        """Result of the transfer engine's last action, see `WorkerSync.status`."""
        return self.weight_transfer_engine.sync.status()

    @never_raises
    def sync_compare(self, folder: str, canonical: list, dtype: str) -> dict:
        """Differences between live parameters and the weights in a folder: `lines`, see `disk_check.differences`."""
        engine = self.weight_transfer_engine
        layouts = {each.name: each for each in map(decode_layout, _trace(self, canonical, dtype)["layouts"])}
        in_place = [layout for name, layout in layouts.items() if name in engine.quantised.in_place]
        lines = differences(engine.quantised.in_place, in_place, folder)
        with in_vllms_config(self):
            for layer in engine.layers.layers:
                values = engine.layers.scratch(layer)
                read_tiles(values, [layouts[name] for name in values], folder)
                lines += [f"{name}: not what vLLM makes of the weights on disk"
                          for name in engine.quantised.unlike(layer, values)]
        return {"lines": lines}

    @never_raises
    def sync_probe(self, names: list[str]) -> dict:
        """Whole live parameters as bytes, for tests and debugging: name -> [dtype, shape, bytes]."""
        parameters = dict(live_model(self).named_parameters())
        return {name: [_dtype(parameters[name]), list(parameters[name].shape), _bytes(parameters[name])]
                for name in names}


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Sent once: the part of the sync (`SyncPart.plain`) of each worker of the engine."""

    replica: int
    parts: list
    address: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    epoch: int


class InPlaceTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives the streams of one worker and writes them into live parameters. vLLM creates it when the model is
    loaded, before it measures the remaining memory."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    shadow = False

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.quantised = Quantised(self.model)
        if self.shadow and self.quantised.forms:
            raise LayoutError("weight_sync.staging = shadow holds no second copy of quantised weights: use in_place")
        device = next(iter(self.quantised.in_place.values())).device
        self.layers = LayerBuffers(self.quantised.forms, device, self.quantised.quantise, least_over_tp)
        self.sync = WorkerSync(self.quantised.in_place, shadow=self.shadow,
                               layers=self.layers if self.quantised.forms else None)

    # vLLM's worker calls these. Each of them always returns.

    def parse_init_info(self, init_dict: dict) -> dict:
        return init_dict                     # parsed inside the guard of WorkerSync.open

    def init_transfer_engine(self, init_info: dict) -> None:
        worker = self.parallel_config.rank

        def part() -> tuple[EngineRank, SyncPart, str | None]:
            info = self.init_info_cls(**init_info)
            assert_not_empty(self.quantised.in_place)
            return (info.replica, worker), SyncPart.from_plain(info.parts[worker]), info.address

        self.sync.open(part)

    def start_weight_update(self) -> None:
        self.sync.begin()

    def update_weights(self, update_info: dict) -> None:
        # The base class would call torch.accelerator.synchronize(), which does not exist on a CPU.
        with in_vllms_config(self):      # vLLM quantises in it
            self.sync.receive(update_info.get("epoch", -1))

    def finish_weight_update(self) -> None:
        """vLLM stages nothing; the engine's COMMIT sets the version."""

    def shutdown(self) -> None:
        self.sync.leave("")

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.sync.receive(update_info.epoch)


class ShadowTransferEngine(InPlaceTransferEngine):
    """Writes the streams into a second copy while the engine serves."""

    shadow = True


def _trace(worker: WeightSyncWorker, canonical: list, dtype: str) -> dict:
    tensors = [CanonicalTensor(name, tuple(shape)) for name, shape in canonical]
    quantised = worker.weight_transfer_engine.quantised
    with quantised.as_loaded():
        traced = trace_layout(live_model(worker), tensors, getattr(torch, dtype))
    padded = sorted({pad.name for pad in traced.padding} & quantised.forms.keys())
    if padded:
        raise LayoutError(f"vLLM pads parameters that it quantises: {', '.join(padded[:4])}")
    write_padding(quantised.in_place, traced.padding)
    parameters = quantised.parameters
    return {"layouts": [encode_layout(layout) for layout in traced.layouts],
            "dtypes": {name: _dtype(parameter) for name, parameter in parameters.items()},
            "padding": traced.padded_elements(), "requantised": sorted(quantised.forms)}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()


WeightTransferEngineFactory.register_engine(vllm_backend("in_place"), InPlaceTransferEngine)
WeightTransferEngineFactory.register_engine(vllm_backend("shadow"), ShadowTransferEngine)
