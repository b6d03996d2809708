"""What the wire refuses. tests/weight_sync/test_sync_matrix.py compares what arrives with vLLM's own loading."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.weight_sync.plan.manifest import build_manifest
from megatron_rl.weight_sync.wire.packing import WireError, buffer_bytes, pack_bucket, poison, unpack_bucket
from tests.weight_sync.worlds import architecture, destinations, megatron_shards, numbered, sources, training_plan


def test_a_buffer_that_nobody_wrote_or_that_is_late_is_refused():
    a = architecture()
    training, to_rollout = training_plan(a), destinations(a, 1)
    held = megatron_shards(a, training, 0, numbered(a))
    live = {layout.name: torch.full(layout.shape, 7.0) for layout in to_rollout[0].layouts}
    (edge,) = build_manifest(sources(a, training), to_rollout, 5_000).edges
    first, second = edge.buckets[:2]
    buffer = torch.empty(buffer_bytes([edge]), dtype=torch.uint8)

    with pytest.raises(WireError, match="never arrived"):
        unpack_bucket(first, 0, 5, poison(buffer), live)
    pack_bucket(first, 0, 4, held, buffer)
    with pytest.raises(WireError, match="bucket 0 of epoch 5.*received bucket 0 of epoch 4"):
        unpack_bucket(first, 0, 5, buffer, live)
    pack_bucket(second, 1, 5, held, buffer)
    with pytest.raises(WireError, match="bucket 0 of epoch 5.*received bucket 1 of epoch 5"):
        unpack_bucket(first, 0, 5, buffer, live)
    assert all((parameter == 7.0).all() for parameter in live.values()), "a refused bucket was written"
    pack_bucket(first, 0, 5, held, buffer)
    unpack_bucket(first, 0, 5, buffer, live)
    assert any((parameter != 7.0).any() for parameter in live.values())
