"""The manifest over random models and parallel sizes, carried out on numbered tensors, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from math import lcm, prod

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.errors import UserError
from launch.fabric.estimate import KINDS
from megatron_rl.layouts.digest import add, digest_layouts, digest_tiles
from megatron_rl.layouts.tiles import ParamLayout, Tile, tile_view
from megatron_rl.weight_sync.plan.buckets import ITEM_BYTES, Copy, pack, part_of
from megatron_rl.weight_sync.plan.copies import Destination
from megatron_rl.weight_sync.plan.coverage import prove_coverage
from megatron_rl.weight_sync.plan.manifest import SyncManifest, build_manifest
from megatron_rl.weight_sync.plan.streams import Stream
from tests.weight_sync.worlds import (
    PADDING,
    architecture,
    destinations,
    execute,
    megatron_shards,
    numbered,
    sources,
    training_plan,
    vllm_shards,
)


@st.composite
def worlds(draw):
    """(architecture, training plan, rollout TP, rollout replicas): whatever both sides accept."""
    tp, pp, rollout_tp = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    kv_heads = tp * draw(st.sampled_from([1, 2]))
    if kv_heads % rollout_tp and rollout_tp % kv_heads:
        kv_heads = lcm(kv_heads, rollout_tp)
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    a = architecture(
        layers=pp * vpp if vpp > 1 else draw(st.integers(pp, pp + 2)), hidden=draw(st.sampled_from([5, 7, 11])),
        ffn=lcm(tp, rollout_tp) * draw(st.sampled_from([1, 3, 5])), heads=lcm(heads, rollout_tp), kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 2, 3, 5])), vocab=draw(st.integers(60, 300)),
        tied=draw(st.booleans()), qkv_bias=draw(st.booleans()), qk_norm=draw(st.booleans()),
        qk_norm_whole=draw(st.booleans()), post_norm=draw(st.booleans()))
    dp, cp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    return a, training_plan(a, tp, pp, vpp, cp, dp), rollout_tp, draw(st.sampled_from([1, 3]))


@given(worlds(), st.sampled_from([100, 1000, 1 << 20]), st.sampled_from(KINDS))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_trainer_layout_arrives_in_any_rollout_layout(world, bucket_bytes, route):
    a, training, rollout_tp, replicas = world
    tensors = numbered(a)
    from_trainer, to_rollout = sources(a, training), destinations(a, rollout_tp, replicas)
    manifest = build_manifest(from_trainer, to_rollout, bucket_bytes, route=route)
    prove_coverage(manifest, from_trainer, to_rollout)

    trainer = {at.rank: megatron_shards(a, training, at.rank, tensors) for at in training.ranks}
    expected = {(d.replica, d.worker): vllm_shards(a, rollout_tp, d.worker, tensors) for d in to_rollout}
    rollout = {key: {name: torch.full_like(value, PADDING) for name, value in worker.items()}
               for key, worker in expected.items()}
    execute(manifest, trainer, rollout)

    for d in to_rollout:
        received = rollout[d.replica, d.worker]
        for name, truth in expected[d.replica, d.worker].items():
            assert torch.equal(received[name], truth), name
        edges = [edge for edge in manifest.edges if (edge.replica, edge.worker) == (d.replica, d.worker)]
        sent = [digest_tiles(trainer[edge.rank][copy.source], [copy.source_tile])
                for edge in edges for bucket in edge.buckets for copy in bucket.copies]
        assert add(*sent) == digest_layouts(d.layouts, received)
        payload = sum(tile.numel for layout in d.layouts for tile in layout.tiles) * 4
        assert sum(edge.nbytes for edge in edges) == payload, "padding or duplicates travel"
    assert manifest.total_bytes == sum(edge.nbytes for edge in manifest.edges)


def test_replicas_share_the_engines_and_tied_embeddings_travel_from_the_first_stage():
    a = architecture(tied=True)
    training = training_plan(a, tp=2, pp=2, cp=2, dp=2)
    manifest = build_manifest(sources(a, training), destinations(a, 2, replicas=8))
    for edge in manifest.edges:
        at = training.ranks[edge.rank]
        assert at.dp * training.cp + at.cp == edge.replica // 2
    senders = {edge.rank: {copy.source for bucket in edge.buckets for copy in bucket.copies}
               for edge in manifest.edges}
    assert all(name != "chunk0.output_layer.weight" for names in senders.values() for name in names)
    assert sorted(senders) == list(range(16)), "a replica sends nothing"
    sent = {rank: sum(edge.nbytes for edge in manifest.edges if edge.rank == rank) for rank in senders}
    for replica in range(1, 4):
        for tp in range(2):
            for pp in range(2):
                rank, first = pp * 8 + replica * 2 + tp, pp * 8 + tp
                assert sent[rank] == sent[first], "the replicas do unequal work"


def test_replicated_norms_are_sent_by_the_rank_that_sends_the_matrices():
    a = architecture()
    manifest = build_manifest(sources(a, training_plan(a, tp=2)), destinations(a, 4))
    for edge in manifest.edges:
        names = {copy.source for bucket in edge.buckets for copy in bucket.copies}
        assert ("chunk0.decoder.layers.0.input_layernorm.weight" in names) == (edge.rank == edge.worker // 2)


def test_equal_tp_needs_no_cut_of_the_mlp_and_only_rail_aligned_edges():
    a = architecture(vocab=512)
    manifest = build_manifest(sources(a, training_plan(a, tp=4)), destinations(a, 4))
    assert {(edge.rank, edge.worker) for edge in manifest.edges} == {(w, w) for w in range(4)}


def test_an_engine_with_a_head_of_its_own_gets_the_tied_embedding():
    tied = architecture(tied=True)
    with_head = destinations(replace(tied, tied=False), 2)
    training = training_plan(tied, tp=2, pp=2)
    with pytest.raises(ValueError, match="lm_head.weight"):
        build_manifest(sources(tied, training), with_head)
    manifest = build_manifest(sources(tied, training), with_head,
                              aliases={"lm_head.weight": "model.embed_tokens.weight"})
    tensors = numbered(tied)
    trainer = {at.rank: megatron_shards(tied, training, at.rank, tensors) for at in training.ranks}
    rollout = {(0, d.worker): {layout.name: torch.full(layout.shape, PADDING) for layout in d.layouts}
               for d in with_head}
    execute(manifest, trainer, rollout)
    for worker in rollout.values():
        assert torch.equal(worker["lm_head.weight"], worker["model.embed_tokens.weight"])


def test_types_that_differ_are_refused_with_both_values():
    a = architecture()
    with pytest.raises(UserError, match=r"float32.*bfloat16"):
        build_manifest(sources(a, training_plan(a), "float32"), destinations(a, 1, dtype="bfloat16"))


def test_replicas_that_differ_are_refused():
    a = architecture()
    ranks = sources(a, training_plan(a, dp=2))
    ranks[1] = type(ranks[1])(ranks[1].coordinates, ranks[1].layouts[:-1], ranks[1].dtypes)
    with pytest.raises(ValueError, match="replicas"):
        build_manifest(ranks, destinations(a, 1))


def test_the_plain_form_travels_and_the_fingerprint_sees_any_change():
    a = architecture()
    world = sources(a, training_plan(a, tp=2, pp=2)), destinations(a, 4)
    manifest = build_manifest(*world, bucket_bytes=128)
    plain = json.loads(json.dumps([stream.encode() for stream in manifest.streams]))

    def received() -> SyncManifest:
        return replace(manifest, streams=tuple(map(Stream.decode, plain)))

    assert received() == manifest and received().fingerprint() == manifest.fingerprint()
    assert build_manifest(*world, bucket_bytes=128).fingerprint() == manifest.fingerprint()
    assert build_manifest(*world, bucket_bytes=132).fingerprint() != manifest.fingerprint()
    plain[0]["buckets"][0]["copies"][0][-1] += 1
    assert received().fingerprint() != manifest.fingerprint()


def _copy(shape: tuple[int, ...], dtype: str = "float32", name: str = "w") -> Copy:
    stride = tuple(torch.empty(shape).stride())
    tile = Tile(name, (0,) * len(shape), shape, stride, 0)
    return Copy(f"source.{name}", tile, f"destination.{name}", tile, dtype)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=6), st.integers(1, 40))
@settings(max_examples=80, deadline=None)
def test_buckets_are_full_and_hold_every_element_once(shapes, elements):
    copies = [_copy(shape, name=f"w{i}") for i, shape in enumerate(shapes)]
    buckets = pack(copies, elements * 4)
    total = sum(a * b for a, b in shapes)
    assert [bucket.nbytes for bucket in buckets[:-1]] == [elements * 4] * (len(buckets) - 1)
    assert len(buckets) == -(-total // elements)
    seen = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in
            ((f"w{i}", shape) for i, shape in enumerate(shapes))}
    for bucket in buckets:
        for copy in bucket.copies:
            seen[copy.source_tile.tensor][copy.source_tile.slices] += 1
    assert all((count == 1).all() for count in seen.values())


def test_bucket_sizes_at_the_edges():
    assert len(pack([_copy((4, 8))], 128)) == 1, "a bucket exactly as large as the tensor"
    assert len(pack([_copy((4, 8))], 40)) == 4, "a tensor larger than three buckets"
    assert pack([_copy((0, 8)), _copy((0,))], 128) == (), "tensors without elements"
    with pytest.raises(ValueError, match="cannot hold an element"):
        pack([_copy((1,))], 3)


def test_each_type_lies_at_a_multiple_of_its_size():
    (bucket,) = pack([_copy((3,), "float8_e4m3fn"), _copy((1,), "bfloat16"), _copy((2,), "float32")], 64)
    assert [(copy.at, copy.nbytes) for copy in bucket.copies] == [(0, 3), (4, 2), (8, 8)]
    assert all(copy.at % ITEM_BYTES[copy.dtype] == 0 for copy in bucket.copies)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4),
       st.lists(st.integers(1, 60), max_size=5))
@settings(max_examples=80, deadline=None)
def test_parts_of_copies_follow_one_another(shapes, sizes):
    """Cut anywhere between elements: in order, nothing missing, nothing twice."""
    copies = [_copy(shape, name=f"w{i}") for i, shape in enumerate(shapes)]
    whole = [torch.arange(prod(shape)) for shape in shapes]
    total, first, seen = sum(copy.nbytes for copy in copies), 0, []
    for size in (*(4 * size for size in sizes), total):
        size = min(size, total - first)
        part = part_of(copies, first, size)
        assert sum(copy.nbytes for copy in part) == size
        for copy in part:
            number = int(copy.source_tile.tensor[1:])
            seen += [(number, int(e)) for e in tile_view(whole[number], copy.source_tile).reshape(-1)]
            assert copy.source_tile == copy.destination_tile
        first += size
    assert seen == [(number, e) for number, shape in enumerate(shapes) for e in range(prod(shape))]


def test_a_destination_that_needs_more_than_the_trainer_holds_is_named():
    a = architecture()
    tile = Tile("model.norm.weight", (0,), (a.hidden + 1,), (1,), 0)
    wide = Destination(0, 0, (ParamLayout("norm", (a.hidden + 1,), (tile,)),), {"norm": "float32"}, {})
    with pytest.raises(ValueError, match="norm of rollout worker 0 needs 8 elements"):
        build_manifest(sources(a, training_plan(a)), [wide])


def test_the_manifest_says_what_is_quantised_and_refuses_engines_that_differ_in_it():
    """Bytes over all hops, of every replica; the same copies with and without are not the same manifest."""
    a = architecture()
    names = ("model.layers.0.mlp.down_proj.weight", "model.layers.3.mlp.down_proj.weight")
    training = training_plan(a, tp=2, pp=2, dp=2)
    plain = destinations(a, tp=2, replicas=3)
    quantising = [replace(each, requantised=names) for each in plain]
    for route in KINDS:
        manifest = build_manifest(sources(a, training), quantising, 200, route=route)
        assert manifest.requantised == names and manifest.requantised_bytes == 3 * len(names) * 4 * a.hidden * a.ffn
        without = build_manifest(sources(a, training), plain, 200, route=route)
        assert (without.requantised, without.requantised_bytes) == ((), 0)
        assert without.fingerprint() != manifest.fingerprint()
        assert [replace(stream, slot=0) for stream in without.streams] == [
            replace(stream, slot=0) for stream in manifest.streams]
    with pytest.raises(ValueError, match="not all quantise the same parameters: model.layers.0.*weight; none"):
        build_manifest(sources(a, training), [*quantising[1:], plain[0]], 200)
