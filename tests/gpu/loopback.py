"""A worker extension that takes buckets from an RPC instead of a lane: NCCL wants a GPU of its own for each rank."""

from __future__ import annotations

import torch

from megatron_rl.layouts.digest import add, digest_layouts
from megatron_rl.weight_sync.ends.vllm_internals import live_model
from megatron_rl.weight_sync.ends.vllm_plugin import WeightSyncWorker
from megatron_rl.weight_sync.plan.buckets import Bucket
from megatron_rl.weight_sync.wire.packing import destination_tiles, unpack_bucket


class LoopbackWorker(WeightSyncWorker):
    @torch.no_grad()
    def sync_unpack(self, plain: list[dict], messages: list[bytes], epoch: int) -> int:
        """Write buckets into the live parameters; returns the digest of what these then hold."""
        parameters = dict(live_model(self).named_parameters())
        buckets = list(map(Bucket.decode, plain))
        for number, (bucket, message) in enumerate(zip(buckets, messages, strict=True)):
            buffer = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self.device)
            unpack_bucket(bucket, number, epoch, buffer, parameters)
        return add(*(digest_layouts(destination_tiles(bucket), parameters) for bucket in buckets))
