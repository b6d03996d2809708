"""Engines without vLLM: one real process a worker, which holds plain tensors cut as vLLM cuts them, and the project's
own `WorkerSync`. The engine's state machine in front of them is the real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from launch.model.architecture import Architecture
from megatron_rl.weight_sync.protocol import Staging
from tests.weight_sync.members import Observed, processes_of
from tests.weight_sync.receivers import ReceivingEngine


@contextmanager
def plain_engines(a: Architecture, engines: int, tp: int = 1, first: int = 0,
                  staging: Staging = "in_place") -> Iterator[list[ReceivingEngine]]:
    """`engines` engines of `tp` workers, numbered from `first`, every parameter full of NaN."""
    workers = [(a, tp, worker, staging == "shadow") for _ in range(engines) for worker in range(tp)]
    with processes_of("tests.weight_sync.plain:PlainWorker", workers) as made:
        yield [ReceivingEngine(made[tp * at:tp * at + tp], first + at, staging) for at in range(engines)]


class PlainWorker(Observed):
    """The worker methods that `EngineWeights` calls."""

    def __init__(self, a: Architecture, tp: int, rank: int, shadow: bool) -> None:
        import torch

        from megatron_rl.weight_sync.ends.worker import WorkerSync
        from tests.weight_sync.worlds import layouts_from_numbers, numbered, vllm_shards

        torch.set_num_threads(1)
        self.a, self.tp, self.rank = a, tp, rank
        shards = vllm_shards(a, tp, rank, numbered(a))
        self.layouts = layouts_from_numbers(a, shards)
        self.live = {name: torch.full(value.shape, torch.nan) for name, value in shards.items()}
        self.receiver = WorkerSync(self.live, shadow=shadow)

    def sync_layout(self, canonical: list, dtype: str) -> dict:
        from megatron_rl.layouts.vllm import encode_layout

        return {"layouts": [encode_layout(layout) for layout in self.layouts],
                "dtypes": dict.fromkeys(self.live, dtype),
                "padding": {layout.name: layout.padding for layout in self.layouts}, "requantised": []}

    def init_weight_transfer_engine(self, info: dict) -> None:
        from megatron_rl.weight_sync.protocol import SyncPart

        self.receiver.open(lambda: ((info["replica"], self.rank), SyncPart.from_plain(info["parts"][self.rank]),
                                    info["address"]))

    def update_weights(self, info: dict) -> None:
        self.receiver.receive(info["epoch"])

    def staging_bytes(self) -> int:
        return self.receiver.staging_bytes

    def sync_status(self) -> dict:
        return self.receiver.status()

    def sync_begin(self) -> dict:
        self.receiver.begin()
        return {}

    def sync_swap(self, epoch: int) -> dict:
        from megatron_rl.weight_sync.ends.worker import SwapError

        try:
            self.receiver.swap(epoch)
        except SwapError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {}

    def sync_end(self) -> dict:
        return {}

    def sync_leave(self, reason: str) -> dict:
        self.receiver.leave(reason)
        return {}

    def differences(self, tensors: dict) -> list[str]:
        """Parameters whose elements are not those of `tensors`, cut by torch; padding may be anything."""
        import torch

        from tests.weight_sync.worlds import vllm_shards

        wrong = []
        expected = vllm_shards(self.a, self.tp, self.rank, tensors)
        for name, value in expected.items():
            real = value != -1.0
            if not torch.equal(self.live[name][real], value[real]):
                wrong.append(name)
        return wrong

    def digest(self) -> int:
        from megatron_rl.layouts.digest import digest_layouts

        return digest_layouts(self.layouts, self.live)
