"""Bytes of shards and workers against parameter counts and brute force."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.fabric.shards import Worker, adapter_bytes, flows
from launch.model.architecture import Architecture, expert_tensors, layer_tensors
from launch.model.padding import round_up
from launch.plan.layouts import RolloutLayout, TrainingLayout
from launch.planner.parameters import count, parameters_of
from tests.fabric.cases import LLAMA_70B, MIXTURE, SHAPES, SMALL, TIED


def held_bytes(shape: Architecture, rollout: RolloutLayout, lora_rank: int = 0) -> dict[Worker, int]:
    """bf16 bytes that each worker of an engine holds without padding, tensor by tensor."""
    units = {"heads": shape.heads, "kv_heads": shape.kv_heads, "ffn": shape.shared_ffn if shape.experts else shape.ffn}
    held = {}
    for pp, tp in itertools.product(range(rollout.pp), range(rollout.tp)):
        def part(size: int, number: int, tp: int = tp) -> int:
            return size // number * (number * (tp + 1) // rollout.tp - number * tp // rollout.tp)

        layer = 0
        for tensor in layer_tensors(shape):
            whole = not tensor.cut or shape.qk_norm_whole and tensor.role in ("q_norm", "k_norm")
            repeated = tensor.cut == "kv_heads" and rollout.tp > shape.kv_heads
            layer += (tensor.size if whole else tensor.size // shape.kv_heads if repeated else
                      part(tensor.size, units[tensor.cut]))
        layer += shape.experts * sum(part(tensor.size, shape.moe_ffn) for tensor in expert_tensors(shape))
        first, last = pp == 0, pp == rollout.pp - 1
        rows = -(-round_up(shape.vocab, 64) // rollout.tp)
        real = min(shape.vocab, rows * (tp + 1)) - min(shape.vocab, rows * tp)
        ends = real * (1 if first and last and shape.tied else first + last)
        ends += shape.learned_positions * first + (2 if shape.all_biases else 1) * last
        layers = shape.layers * (pp + 1) // rollout.pp - shape.layers * pp // rollout.pp
        held[Worker(pp, tp)] = layers * adapter_bytes(shape, lora_rank) if lora_rank else \
            2 * (layers * layer + ends * shape.hidden)
    return held


@pytest.mark.parametrize("shape", SHAPES, ids=("small", "tied", "mixture", "gpt", "whole-norms"))
def test_one_rank_takes_the_whole_model(shape):
    assert held_bytes(shape, RolloutLayout()) == {Worker(0, 0): 2 * count(shape)}


@settings(max_examples=60, deadline=None)
@given(shape=st.sampled_from(SHAPES), tp=st.sampled_from((1, 2, 4, 8)), pp=st.sampled_from((1, 2, 4)),
       ep=st.sampled_from((1, 2, 4)), etp=st.sampled_from((1, 2)), engine_tp=st.sampled_from((1, 2, 4, 8, 16)),
       engine_pp=st.sampled_from((1, 2)), lora=st.sampled_from((0, 4)))
def test_a_worker_gets_what_it_holds(shape, tp, pp, ep, etp, engine_tp, engine_pp, lora):
    rollout = RolloutLayout(tp=engine_tp, pp=engine_pp)
    got: Counter = Counter()
    training = TrainingLayout(tp=tp, pp=pp, dp=8, ep=ep if shape.experts else 1, etp=etp if shape.experts else 1)
    for flow in flows(shape, training, rollout, lora_rank=lora):
        got[flow.worker] += flow.bytes
    assert dict(got) == held_bytes(shape, rollout, lora_rank=lora)


@pytest.mark.parametrize("tp, pp, ep", [(1, 1, 1), (4, 2, 1), (8, 4, 4)])
@pytest.mark.parametrize("shape", SHAPES, ids=("small", "tied", "mixture", "gpt", "whole-norms"))
def test_no_shard_sends_more_than_its_rank_holds(shape, tp, pp, ep):
    training = TrainingLayout(tp=tp, pp=pp, dp=4, ep=ep if shape.experts else 1)
    sent: Counter = Counter()
    for flow in flows(shape, training, RolloutLayout()):
        sent[flow.shard] += flow.bytes
    for shard, size in sent.items():
        held = parameters_of(shape, training).stages[shard.pp]
        if shard.routed:
            assert size == 2 * held.experts
        elif shape.heads % tp == 0 and shape.kv_heads % tp == 0:
            assert size <= 2 * held.dense


def test_figures_of_llama_70b():
    """Notes: 141.1 GB in bf16; stages of 36.3 and 34.2 GB; TP16 repeats KV heads, 143.8 GB an engine."""
    training = TrainingLayout(tp=8, pp=4, dp=4)
    stages: Counter = Counter()
    for flow in flows(LLAMA_70B, training, RolloutLayout(tp=8)):
        stages[flow.shard.pp] += flow.bytes
    assert [round(stages[stage] / 1e9, 1) for stage in range(4)] == [36.3, 34.2, 34.2, 36.3]
    assert sum(stages.values()) == pytest.approx(141.1e9, rel=0.001)
    assert sum(held_bytes(LLAMA_70B, RolloutLayout(tp=16)).values()) == pytest.approx(143.8e9, rel=0.001)


def test_linear_layers_map_one_to_one_and_vocabulary_crosses():
    """Megatron pads 128,256 rows to 129,024, vLLM does not pad them further: 15 pairs on the end stages, 8 within."""
    pairs = Counter(flow.shard.pp for flow in flows(LLAMA_70B, TrainingLayout(tp=8, pp=4), RolloutLayout(tp=8)))
    assert pairs == {0: 15, 1: 8, 2: 8, 3: 15}


@pytest.mark.parametrize("tp, engine_tp", [(1, 8), (8, 1), (2, 8), (8, 2), (8, 8)])
def test_vocabulary_rows_by_brute_force(tp, engine_tp):
    """Difference of a model with and without a vocabulary, against rows counted one by one."""
    padded = -(-SMALL.vocab // (128 * tp)) * 128 * tp // tp
    engine_padded = -(-SMALL.vocab // 64) * 64 // engine_tp
    expected = Counter((row // padded, row // engine_padded) for row in range(SMALL.vocab))
    bare = SMALL.__class__(**{**{name: getattr(SMALL, name) for name in SMALL.__slots__}, "vocab": 0})
    training, rollout = TrainingLayout(tp=tp), RolloutLayout(tp=engine_tp)
    with_rows = {(flow.shard.tp, flow.worker.tp): flow.bytes for flow in flows(SMALL, training, rollout)}
    without = {(flow.shard.tp, flow.worker.tp): flow.bytes for flow in flows(bare, training, rollout)}
    found = {pair: size - without.get(pair, 0) for pair, size in with_rows.items()}
    row_bytes = 2 * 2 * SMALL.hidden                  # embedding and head
    assert {pair: size // row_bytes for pair, size in found.items() if size} == dict(expected)


def test_kv_heads_are_repeated_beyond_their_number():
    """4 KV heads on TP 16: every rank holds one, so K and V weigh four times as much over the engine."""
    kv = 2 * (SMALL.hidden + 1) * SMALL.kv_width * 2 * SMALL.layers
    one, sixteen = (sum(held_bytes(SMALL, RolloutLayout(tp=tp)).values()) for tp in (1, 16))
    replicated = SMALL.hidden * 2 * (2 * SMALL.layers + 1)
    assert sixteen - one == 3 * kv + 15 * replicated


def test_a_tied_head_travels_once():
    training = TrainingLayout(tp=2, pp=3)
    rows = TIED.vocab * TIED.hidden * 2
    both = sum(flow.bytes for flow in flows(TIED, training, RolloutLayout(tp=2)) if flow.shard.pp == 0)
    last = sum(flow.bytes for flow in flows(TIED, training, RolloutLayout(tp=2)) if flow.shard.pp == 2)
    assert both - last == rows - 2 * TIED.hidden * 2          # the last stage sends the final norm to two ranks


def test_interleaved_stages_send_as_much():
    plain = flows(LLAMA_70B, TrainingLayout(tp=4, pp=4), RolloutLayout(tp=8))
    assert flows(LLAMA_70B, TrainingLayout(tp=4, pp=4, vpp=5), RolloutLayout(tp=8)) == plain
    cut = RolloutLayout(tp=4, pp=2)
    interleaved = flows(LLAMA_70B, TrainingLayout(tp=4, pp=4, vpp=5), cut)
    assert {(flow.shard.pp, flow.worker.pp) for flow in interleaved} == {(p, q) for p in range(4) for q in range(2)}
    assert sum(flow.bytes for flow in interleaved) == sum(
        flow.bytes for flow in flows(LLAMA_70B, TrainingLayout(tp=4, pp=4), cut))


def test_adapters():
    """Rank 16 on every linear layer of the 70B: 16 (in + out) of seven matrices."""
    each = 16 * 2 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))
    assert adapter_bytes(LLAMA_70B, 16) == each
    training, rollout = TrainingLayout(tp=8, pp=4), RolloutLayout(tp=8)
    assert sum(flow.bytes for flow in flows(LLAMA_70B, training, rollout, lora_rank=16)) == 8 * 80 * each < 4e9
    assert not any(flow.shard.routed for flow in flows(MIXTURE, TrainingLayout(dp=4, ep=4), RolloutLayout(),
                                                        lora_rank=4))
