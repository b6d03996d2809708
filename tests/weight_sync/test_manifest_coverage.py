"""The proof accepts a right manifest and names what is wrong with a broken one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.model.architecture import Architecture
from megatron_rl.layouts.megatron import megatron_layout
from megatron_rl.layouts.tiles import ParamLayout, Tile, contiguous_stride
from megatron_rl.weight_sync.plan.buckets import Bucket
from megatron_rl.weight_sync.plan.copies import Destination, Source
from megatron_rl.weight_sync.plan.coverage import CoverageError, prove_coverage
from megatron_rl.weight_sync.plan.manifest import SyncManifest, build_manifest
from megatron_rl.weight_sync.plan.streams import Hop
from tests.weight_sync.worlds import architecture, destinations, sources, training_plan

NORM = "model.layers.0.input_layernorm.weight"
QKV = "model.layers.0.self_attn.qkv_proj.weight"


@pytest.fixture(scope="module")
def world():
    a = architecture()
    return sources(a, training_plan(a, tp=2)), destinations(a, 2)


@pytest.fixture(scope="module")
def manifest(world):
    return build_manifest(*world, bucket_bytes=1 << 20)


def edit(manifest: SyncManifest, change, *, edge: int = 0) -> SyncManifest:
    """Replace the copies of one edge's only bucket by `change(copies)`, laid out again without gaps."""
    streams = list(manifest.streams)
    number = _stream(manifest, edge)
    (bucket,) = streams[number].buckets
    copies, at = [], 0
    for copy in change(list(bucket.copies)):
        copies.append(replace(copy, at=at))
        at += copy.nbytes
    streams[number] = replace(streams[number], buckets=(Bucket(at, tuple(copies)),))
    return replace(manifest, streams=tuple(streams))


def _stream(manifest: SyncManifest, edge: int) -> int:
    """Number of the one stream that is an edge."""
    (number,) = [stream.number for stream in manifest.streams if stream.edges == (manifest.edges[edge].key,)]
    return number


def test_a_right_manifest_passes(world, manifest):
    prove_coverage(manifest, *world)


def test_a_dropped_copy_is_a_gap_with_its_region(world, manifest):
    broken = edit(manifest, lambda copies: [c for c in copies if c.destination != NORM])
    with pytest.raises(CoverageError, match=rf"engine 0 worker 0: nothing writes {NORM} at \[0:7\]"):
        prove_coverage(broken, *world)


def test_a_doubled_copy_is_a_double_write(world, manifest):
    broken = edit(manifest, lambda copies: [*copies, *(c for c in copies if c.destination == NORM)])
    with pytest.raises(CoverageError, match=rf"{NORM} is written twice at \[0:7\]"):
        prove_coverage(broken, *world)


def test_two_ranks_that_write_one_norm_are_caught(world, manifest):
    to_worker_1 = {edge.rank: i for i, edge in enumerate(manifest.edges) if edge.worker == 1}
    (bucket,) = manifest.edges[to_worker_1[1]].buckets
    norm = next(c for c in bucket.copies if c.destination == NORM)
    broken = edit(manifest, lambda copies: [*copies, norm], edge=to_worker_1[0])
    with pytest.raises(CoverageError, match=rf"engine 0 worker 1: {NORM} is written twice"):
        prove_coverage(broken, *world)


def test_a_gap_beside_a_double_write_of_the_same_size_is_caught(world, manifest):
    """Volumes alone would add up."""
    def shift(copies):
        qkv = [c for c in copies if c.destination == QKV]
        return [c for c in copies if c is not qkv[1]] + [qkv[0]]

    with pytest.raises(CoverageError, match=f"{QKV}"):
        prove_coverage(edit(manifest, shift), *world)


def test_a_copy_that_lands_elsewhere_is_caught(world, manifest):
    def move(copies):
        return [replace(c, destination_tile=replace(c.destination_tile, offset=c.destination_tile.offset + 7))
                if c.destination == QKV else c for c in copies]

    with pytest.raises(CoverageError, match=rf"{QKV} does not hold .*q_proj.weight"):
        prove_coverage(edit(manifest, move), *world)


def test_a_copy_that_reads_elsewhere_is_caught(world, manifest):
    """K and V have one shape: volumes and destinations are right, the values are not."""
    def swap(copies):
        k = next(i for i, c in enumerate(copies) if c.source_tile.tensor.endswith("0.self_attn.k_proj.weight"))
        v = next(i for i, c in enumerate(copies) if c.source_tile.tensor.endswith("0.self_attn.v_proj.weight"))
        copies[k], copies[v] = (
            replace(copies[k], source_tile=replace(copies[k].source_tile, offset=copies[v].source_tile.offset)),
            replace(copies[v], source_tile=replace(copies[v].source_tile, offset=copies[k].source_tile.offset)))
        return copies

    with pytest.raises(CoverageError, match="source rank 0.*does not hold .*k_proj"):
        prove_coverage(edit(manifest, swap), *world)


def test_boxes_that_differ_between_the_sides_are_caught(world, manifest):
    def swap(copies):
        k = next(i for i, c in enumerate(copies) if c.source_tile.tensor.endswith("0.self_attn.k_proj.weight"))
        v = next(i for i, c in enumerate(copies) if c.source_tile.tensor.endswith("0.self_attn.v_proj.weight"))
        copies[k], copies[v] = (replace(copies[k], source=copies[v].source, source_tile=copies[v].source_tile),
                                replace(copies[v], source=copies[k].source, source_tile=copies[k].source_tile))
        return copies

    broken = edit(manifest, swap)
    # Same start and shape: only the tensor's name tells them apart.
    with pytest.raises(CoverageError, match="receives .*v_proj.weight.* as .*k_proj.weight"):
        prove_coverage(broken, *world)


@pytest.mark.parametrize("field, value, message", [
    ("at", 1, "aligned offset"), ("nbytes", 10**6, "copies end at byte")])
def test_a_bucket_whose_offsets_are_wrong_is_caught(world, manifest, field, value, message):
    (bucket,) = manifest.edges[0].buckets
    if field == "at":
        bucket = Bucket(bucket.nbytes, (replace(bucket.copies[0], at=value), *bucket.copies[1:]))
    else:
        bucket = Bucket(value, bucket.copies)
    streams = list(manifest.streams)
    streams[_stream(manifest, 0)] = replace(streams[_stream(manifest, 0)], buckets=(bucket,))
    broken = replace(manifest, streams=tuple(streams))
    with pytest.raises(CoverageError, match=message):
        prove_coverage(broken, *world)


def test_a_bucket_over_the_limit_and_an_unknown_worker_or_rank_are_caught(world, manifest):
    with pytest.raises(CoverageError, match="at most 16"):
        prove_coverage(replace(manifest, bucket_bytes=16), *world)
    with pytest.raises(CoverageError, match="workers that do not exist"):
        prove_coverage(manifest, world[0], world[1][:1])
    with pytest.raises(CoverageError, match="rank 1 send"):
        prove_coverage(manifest, world[0][:1], world[1])


@pytest.mark.parametrize("hops, message", [
    ((Hop((0, 1), (0, 0)), Hop(None, (0, 1))), r"\(0, 0\) receives from \(0, 1\), which has none"),
    ((Hop(None, (0, 0)), Hop((0, 0), (0, 0))), r"\(0, 0\) has the bytes already"),
])
def test_a_hop_before_the_bytes_are_there_or_a_second_one_is_caught(world, manifest, hops, message):
    streams = (replace(manifest.streams[0], hops=hops), *manifest.streams[1:])
    with pytest.raises(CoverageError, match=message):
        prove_coverage(replace(manifest, streams=streams), *world)


def test_types_and_padding_are_part_of_the_proof(world, manifest):
    trainer, rollout = world
    other_type = [replace(rollout[0], dtypes={**rollout[0].dtypes, NORM: "bfloat16"}), rollout[1]]
    with pytest.raises(CoverageError, match=f"{NORM} is bfloat16, the copy is float32"):
        prove_coverage(manifest, trainer, other_type)
    unpadded = [replace(rollout[0]), replace(rollout[1], padding={})]
    with pytest.raises(CoverageError, match="the tiles of model.embed_tokens.weight hold"):
        prove_coverage(manifest, trainer, unpadded)


def test_a_trainer_tensor_that_an_engine_does_not_take_is_named():
    """One that no worker of it has, and rows that only a missing worker would take. The second engine is whole."""
    a = architecture()
    trainer = sources(a, training_plan(a, tp=2))
    whole = destinations(a, 2, 2)
    without = [replace(each, layouts=tuple(layout for layout in each.layouts if layout.name != NORM))
               if each.replica == 0 else each for each in whole]
    with pytest.raises(CoverageError, match=rf"engine 0 does not take {NORM}\[0:7\], which training rank 0 holds in "
                                            r"chunk0.decoder.layers.0.input_layernorm.weight"):
        prove_coverage(build_manifest(trainer, without), trainer, without)
    alone = [each for each in whole if (each.replica, each.worker) != (1, 1)]
    with pytest.raises(CoverageError, match=r"engine 1 does not take model.embed_tokens.weight\[160:256, 0:7\].* more"):
        prove_coverage(build_manifest(trainer, alone), trainer, alone)


def test_an_empty_parameter_of_an_engine_is_named(world, manifest):
    trainer, rollout = world
    empty = ParamLayout("model.layers.0.packed", (0, 4), ())
    with pytest.raises(CoverageError, match="engine 0 worker 1: model.layers.0.packed is empty"):
        prove_coverage(manifest, trainer, [rollout[0], replace(rollout[1], layouts=(*rollout[1].layouts, empty))])


def _llama_70b_worker(a: Architecture, tp: int, worker: int) -> tuple[ParamLayout, ...]:
    """vLLM's parameters at TP 8, written down: rows and columns of its share."""
    def share(tensor: str, rows: int, columns: int, *, cut: int = 0) -> ParamLayout:
        shape = (rows // tp, columns) if cut == 0 else (rows, columns // tp)
        start = (worker * shape[0], 0) if cut == 0 else (0, worker * shape[1])
        return ParamLayout(tensor, shape, (Tile(tensor, start, shape, contiguous_stride(shape), 0),))

    def norm(tensor: str) -> ParamLayout:
        return ParamLayout(tensor, (a.hidden,), (Tile(tensor, (0,), (a.hidden,), (1,), 0),))

    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    layouts = [share("model.embed_tokens.weight", a.vocab, a.hidden), share("lm_head.weight", a.vocab, a.hidden),
               norm("model.norm.weight")]
    for layer in range(a.layers):
        hf = f"model.layers.{layer}."
        layouts += [share(f"{hf}self_attn.q_proj.weight", q, a.hidden),
                    share(f"{hf}self_attn.k_proj.weight", kv, a.hidden),
                    share(f"{hf}self_attn.v_proj.weight", kv, a.hidden),
                    share(f"{hf}self_attn.o_proj.weight", a.hidden, q, cut=1),
                    share(f"{hf}mlp.gate_proj.weight", a.ffn, a.hidden),
                    share(f"{hf}mlp.up_proj.weight", a.ffn, a.hidden),
                    share(f"{hf}mlp.down_proj.weight", a.hidden, a.ffn, cut=1),
                    norm(f"{hf}input_layernorm.weight"), norm(f"{hf}post_attention_layernorm.weight")]
    return tuple(layouts)


def test_llama_70b_on_128_ranks_and_128_workers():
    """TP8 PP4 DP4 to sixteen engines of TP8: the figures of the published 70B, the edges of rail-aligned routes."""
    a = architecture(family="llama", layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128,
                     vocab=128256, qkv_bias=False, qk_norm=False)
    training = training_plan(a, tp=8, pp=4, dp=4)
    trainer = []
    for at in training.ranks:
        layouts = tuple(megatron_layout(a, training, at.rank, "transformer_engine"))
        trainer.append(Source(at, layouts, {layout.name: "bfloat16" for layout in layouts}))
    rollout = []
    for worker in range(8):
        layouts = _llama_70b_worker(a, 8, worker)
        rollout += [Destination(replica, worker, layouts, {layout.name: "bfloat16" for layout in layouts}, {})
                    for replica in range(16)]
    manifest = build_manifest(trainer, rollout)
    prove_coverage(manifest, trainer, rollout)
    parameters = 70_553_706_496
    norms = (2 * a.layers + 1) * a.hidden
    assert manifest.total_bytes == 16 * 2 * (parameters + 7 * norms)
    aligned = [edge for edge in manifest.edges if edge.rank % 8 == edge.worker]
    crossing = [edge for edge in manifest.edges if edge.rank % 8 != edge.worker]
    assert len(aligned) == 16 * 8 * 4
    assert sum(edge.nbytes for edge in crossing) < 0.03 * manifest.total_bytes, "only the vocabulary crosses rails"
