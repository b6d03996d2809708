"""The rollout side of a sync, inside vLLM's workers: a worker extension and a registered weight transfer engine.

Named as `worker_extension_cls`, this module is imported by every worker before its model is loaded. The transfer
engine receives packed buckets from several trainer ranks, each on a lane of its own, and writes them straight into
the live parameters.

No exception may leave a worker RPC: at TP >= 2 vLLM's executor raises at the first failing rank without draining the
others, and every later answer is off by one. Failures are recorded and reported by `sync_status`.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from megatron_rl.weight_sync.digest import digest_layouts
from megatron_rl.weight_sync.manifest import Edge
from megatron_rl.weight_sync.protocol import LaneSpec
from megatron_rl.weight_sync.tiles import CanonicalTensor
from megatron_rl.weight_sync.transport import Deadline, Lane, Pending, TransportError, open_lane
from megatron_rl.weight_sync.vllm_internals import end_update, keep_cpu_weights_in_place, live_model
from megatron_rl.weight_sync.vllm_layout import assert_not_empty, encode_layout, trace_layout, write_padding
from megatron_rl.weight_sync.wire import HEADER_BYTES, buffer_bytes, destination_tiles, poison, unpack_bucket

BACKEND = "megatron_rl"
POSTED = 2
"""Receives posted ahead on each lane: one bucket is unpacked while the next arrives."""

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
    """Sent once. Lanes in the global order, and for each worker of the engine its edges (plain forms)."""

    replica: int
    lanes: list
    edges: list
    timeout_s: float
    address: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    epoch: int


class LaneReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives the edges of one worker and writes them into live parameters."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._lanes: dict[int, Lane] = {}
        self._edges: list[Edge] = []
        self._status: dict[str, Any] = {"epoch": -1, "error": None}

    def status(self) -> dict:
        """`epoch`, `error` (a message or None); after the lanes were opened `fingerprints` [[rank, fingerprint]] of
        the edges; after a transfer `digests` [[rank, digest]], `nbytes`, `seconds`."""
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
        if self._status["error"]:
            self.shutdown()                  # the sources see it now, not at their deadline

    def finish_weight_update(self) -> None:
        """Nothing is staged; the version is set by the engine's COMMIT."""

    def shutdown(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._lanes = {}

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        started = time.perf_counter()
        epoch = update_info.epoch
        if self._edges and not self._lanes:
            raise TransportError("its lanes are closed")
        deadline = Deadline(self._timeout_s)
        streams = [_Stream(self._lanes[edge.rank], edge, self._buffers[edge.rank]) for edge in self._edges]
        unpacking = 0.0
        for number in range(max((len(edge.buckets) for edge in self._edges), default=0)):
            for stream in streams:
                if number < len(stream.edge.buckets):
                    buffer = stream.next(deadline)
                    began = time.perf_counter()
                    unpack_bucket(stream.edge.buckets[number], number, epoch, buffer, self._parameters)
                    unpacking += time.perf_counter() - began
                    stream.post(buffer)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        received = time.perf_counter()
        digests = [[edge.rank, digest_layouts(tiles, self._parameters)] for edge, tiles in self._digest_tiles]
        self._status |= {
            "digests": digests, "nbytes": sum(edge.nbytes for edge in self._edges),
            "seconds": {"receive": received - started, "unpack": unpacking,
                        "live_digest": time.perf_counter() - received}}

    def _open(self, info: InitInfo) -> None:
        self.shutdown()
        worker = self.parallel_config.rank
        self._timeout_s = info.timeout_s
        self._parameters = dict(self.model.named_parameters())
        assert_not_empty(self._parameters)
        self._edges = [Edge.decode(edge) for edge in info.edges[worker]]
        self._digest_tiles = [(edge, destination_tiles(edge)) for edge in self._edges]
        self._buffers = {edge.rank: [torch.empty(buffer_bytes([edge]), dtype=torch.uint8, device=self.device)
                                     for _ in range(min(POSTED, len(edge.buckets)))] for edge in self._edges}
        name = f"engine {info.replica} worker {worker}"
        for plain in info.lanes:             # the global order: by source
            spec = LaneSpec.from_plain(plain)
            if name in spec.members:
                self._lanes[spec.source] = open_lane(spec, spec.members.index(name), info.timeout_s,
                                                     address=info.address, device=self.device)
        self._status["fingerprints"] = [[edge.rank, edge.fingerprint()] for edge in self._edges]

    def _guard(self, epoch: int, action: Callable[[], None]) -> None:
        self._status = {"epoch": epoch, "error": None}
        try:
            action()
        except Exception as error:
            traceback.print_exc()            # into the engine's log
            self._status["error"] = f"{type(error).__name__}: {error}"


class _Stream:
    """The buckets of one edge as they arrive, with receives posted ahead."""

    def __init__(self, lane: Lane, edge: Edge, buffers: list[torch.Tensor]) -> None:
        self.edge = edge
        self._lane, self._posted = lane, 0
        self._pending: deque[tuple[Pending, torch.Tensor]] = deque()
        for buffer in buffers:
            self.post(buffer)

    def post(self, buffer: torch.Tensor) -> None:
        """Receive the next bucket that no receive is posted for into `buffer`, if there is one."""
        if self._posted < len(self.edge.buckets):
            part = poison(buffer)[:HEADER_BYTES + self.edge.buckets[self._posted].nbytes]
            self._pending.append((self._lane.receive(part, 0), buffer))
            self._posted += 1

    def next(self, deadline: Deadline) -> torch.Tensor:
        pending, buffer = self._pending.popleft()
        pending.wait(deadline)
        return buffer


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
