"""Trainer ranks without a trainer: real processes that hold Megatron layouts over plain tensors and send them."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.fabric.estimate import Kind
from launch.model.hf_config import from_hf_config
from launch.plan.plan import TrainingPlan
from megatron_rl.layouts.megatron import canonical_tensors, megatron_layout
from megatron_rl.layouts.step_folder import Exported, Part
from megatron_rl.sync_bench.members import Member
from megatron_rl.sync_bench.world import PipedTrainer
from megatron_rl.weight_sync.coordinator import Endpoint, SyncCoordinator
from megatron_rl.weight_sync.protocol import EngineHandle
from tests.ranks import free_port
from tests.weight_sync.members import NO_DEADLINE_S, Observed, processes_of, start_all


class SourceRank(PipedTrainer):
    """A coordinator's handle of the process of one training rank."""

    def __init__(self, member: Member) -> None:
        super().__init__(member, NO_DEADLINE_S)

    def call(self, method: str, *args: Any) -> Awaitable[Any]:
        """Run a method in the process and return its answer. Raises MemberError."""
        return self.member.call(method, *args, timeout_s=NO_DEADLINE_S)

    def export(self, folder: str, part: Part) -> Awaitable[Exported]:
        return self.call("export", folder, part)


@contextmanager
def source_ranks(folder: Path, training: TrainingPlan, dtype: str = "float32") -> Iterator[list[SourceRank]]:
    """One process a rank of `training`, each holding its share of the model in `folder`."""
    each = [(str(folder), training, rank, dtype) for rank in range(training.world_size)]
    with processes_of("tests.weight_sync.sources:SourceProcess", each) as made:
        start_all(made)
        yield list(map(SourceRank, made))


def endpoints(world: int) -> list[Endpoint]:
    return [Endpoint("127.0.0.1", free_port()) for _ in range(world)]


def coordinator_of(sources: Sequence[SourceRank], engines: Sequence[EngineHandle], folder: Path, timeout_s: float, *,
                   bucket_bytes: int = 60_000, route: Kind = "direct") -> SyncCoordinator:
    """The coordinator of a model's ranks and engines on this machine."""
    return SyncCoordinator(sources, engines, endpoints(len(sources)), canonical_tensors(from_hf_config(folder)),
                           backend="gloo", bucket_bytes=bucket_bytes, timeout_s=timeout_s, route=route,
                           address="127.0.0.1")


class SourceProcess(Observed):
    def __init__(self, folder: str, training: TrainingPlan, rank: int, dtype: str) -> None:
        import torch

        from megatron_rl.weight_sync.ends.sender import WeightSender

        torch.set_num_threads(1)
        self.folder, self.training, self.rank = folder, training, rank
        architecture = from_hf_config(Path(folder))
        self.canonical = canonical_tensors(architecture)
        self.layouts = megatron_layout(architecture, training, rank, "local")
        self.parameters = {layout.name: torch.zeros(layout.shape, dtype=getattr(torch, dtype))
                           for layout in self.layouts}
        self.load(folder)
        sender = WeightSender(training.ranks[rank], self.layouts, self.parameters, address="127.0.0.1")
        self.sync_describe, self.sync_open, self.sync_discard = (
            sender.sync_describe, sender.sync_open, sender.sync_discard)
        self.sender = sender
        self.fault = None

    def load(self, folder: str) -> None:
        """Take the weights of another checkpoint of the same architecture, as an optimizer step would."""
        from megatron_rl.layouts.hf_read import CheckpointReader, load_layout

        with CheckpointReader(folder) as reader:
            load_layout(reader, self.canonical, self.layouts, self.parameters)

    def staging_bytes(self) -> int:
        return self.sender.staging_bytes

    def export(self, folder: str, part: str):
        import torch

        from megatron_rl.layouts.hf_write import Exporter, export_part

        exporter = Exporter(folder, self.canonical, torch.float32)
        return export_part(exporter, part, self.folder, from_hf_config(Path(self.folder)), self.training, self.rank,
                           "local", self.parameters)

    def set_fault(self, fault: str | None) -> None:
        """What goes wrong in the next sends: "flip" one bit of the wire, "swap" two rows of it, "stale" epoch; "late":
        only bucket 3 of the first stream is of the epoch before."""
        import megatron_rl.weight_sync.ends.sender as sender_module
        from megatron_rl.weight_sync.wire import packing as wire

        self.fault = fault
        sender_module.pack_bucket = wire.pack_bucket

    def sync_send(self, epoch: int):
        import megatron_rl.weight_sync.ends.sender as sender_module
        from megatron_rl.weight_sync.wire import packing as wire

        def faulty(bucket, number, epoch_, parameters, buffer, stream):
            if self.fault == "stale" or self.fault == "late" and (stream, number) == (0, 3):
                return wire.pack_bucket(bucket, number, epoch_ - 1, parameters, buffer, stream)
            filled = wire.pack_bucket(bucket, number, epoch_, parameters, buffer, stream)
            payload = filled[wire.HEADER_BYTES:]
            if self.fault == "flip" and number == 0:
                payload[len(payload) // 2] ^= 1
            if self.fault == "swap" and number == 0:
                rows = max((copy for copy in bucket.copies if len(copy.source_tile.shape) == 2),
                           key=lambda copy: copy.nbytes)
                size = rows.nbytes // rows.source_tile.shape[0]
                first, second = payload[rows.at:rows.at + size], payload[rows.at + size:rows.at + 2 * size]
                kept = first.clone()
                first.copy_(second)
                second.copy_(kept)
            return filled

        if self.fault is not None:
            sender_module.pack_bucket = faulty
        return self.sender.sync_send(epoch)
