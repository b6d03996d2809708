"""Steps of an inference engine: closed forms on ideal hardware, counting of experts, the measured development points,
and the book."""

from __future__ import annotations

import copy
import random
from dataclasses import fields, replace

import pytest

from launch.accuracy import decode as validation
from launch.accuracy.fit import median
from launch.accuracy.score import development_points
from launch.cluster import gpus
from launch.plan.layouts import RolloutLayout
from launch.planner.memory.rollout import kv_bytes_per_token
from launch.planner.parameters import matrix_parameters
from launch.planner.time.decode import Engine
from tests.planner.engines import H100, LLAMA_8B, LLAMA_70B, MOE, C

IDEAL = C.changed({"hbm": 1.0, "gemm": 1.0, "decode_gemm_fp8": 1.0, "nvlink": 1.0, "allreduce_s": 0.0,
                   "node_hop_s": 0.0, "nic_share": 1.0, "layer_s": 0.0, "vllm_step_s": 0.0, "vllm_sequence_s": 0.0})
FAST_LINKS = replace(H100, gpu=replace(H100.gpu, nvlink_bandwidth=1e30))
GPU = H100.gpu


@pytest.fixture(scope="module")
def points():
    return [point for point in development_points() if point.kind == "decode"]


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_an_ideal_gpu_is_a_roofline(tp):
    """One sequence reads the matrices and its cache; a large batch multiplies at the peak."""
    engine = Engine(LLAMA_70B, RolloutLayout(tp=tp), FAST_LINKS, IDEAL)
    matrices, cache = matrix_parameters(LLAMA_70B), kv_bytes_per_token(LLAMA_70B, RolloutLayout(tp=tp))
    assert engine.step_s(1, 1000) == pytest.approx((2 * matrices / tp + 1000 * cache) / GPU.hbm_bandwidth)
    compute = 4096 * 2 * matrices / tp / GPU.bf16_flops
    assert engine.step_s(4096, 0) == pytest.approx(compute)
    assert engine.limit(1, 100) == "weights bandwidth" and engine.limit(4096, 0) == "compute"
    assert engine.limit(64, 100_000) == "KV bandwidth"


def test_prefill_of_an_ideal_gpu():
    """2 FLOPs a matrix element and token (the head runs for the last token only), 2 L A s^2 of causal attention."""
    engine = Engine(LLAMA_8B, RolloutLayout(), FAST_LINKS, IDEAL)
    body = matrix_parameters(LLAMA_8B) - LLAMA_8B.vocab * LLAMA_8B.hidden
    flops = 2 * body * 4096 + 2 * LLAMA_8B.layers * LLAMA_8B.q_width * 4096 ** 2
    assert engine.prefill_s(4096) == pytest.approx(flops / GPU.bf16_flops)


def test_fp8_halves_the_body_and_leaves_the_head():
    bf16, fp8 = (Engine(LLAMA_8B, RolloutLayout(weight_precision=each), H100, IDEAL) for each in ("bf16", "fp8"))
    head_s = 2 * LLAMA_8B.vocab * LLAMA_8B.hidden / GPU.hbm_bandwidth
    assert fp8.weights_s - head_s == pytest.approx((bf16.weights_s - head_s) / 2)
    halved = Engine(LLAMA_8B, RolloutLayout(kv_precision="fp8"), H100, IDEAL)
    assert halved.kv_s == pytest.approx(bf16.kv_s / 2)


def test_a_gpu_without_fp8_reads_less_and_computes_no_faster():
    a100 = replace(H100, gpu=gpus.find("a100"))
    bf16, fp8 = (Engine(LLAMA_8B, RolloutLayout(weight_precision=each), a100) for each in ("bf16", "fp8"))
    assert fp8.weights_s < 0.6 * bf16.weights_s and fp8.compute_s == bf16.compute_s


def test_a_batch_reads_the_experts_that_its_tokens_picked():
    """E (1 - (1 - k/E)^b), by drawing."""
    engine = Engine(MOE, RolloutLayout(), FAST_LINKS, IDEAL)
    chance = random.Random(0)
    for batch in (1, 8, 64):
        drawn = [len({expert for _ in range(batch) for expert in chance.sample(range(128), 8)}) for _ in range(200)]
        expert_s = 2 * 48 * 3 * 2048 * 768 / GPU.hbm_bandwidth
        read_s = engine.step_s(batch, 0) - engine.weights_s
        assert read_s == pytest.approx(sum(drawn) / len(drawn) * expert_s, rel=0.02)


def test_pipeline_stages_take_turns():
    """A token passes all stages: the whole model's weights, b / PP sequences at a time, and the hops between."""
    flat, deep = (Engine(LLAMA_70B, RolloutLayout(tp=8, pp=pp), H100) for pp in (1, 4))
    assert deep.step_s(64, 1000) == pytest.approx(flat.step_s(16, 1000) + 3 * C.node_hop_s)
    assert deep.prefill_s(1000) == pytest.approx(flat.prefill_s(1000) / 4)


def test_tensor_parallel_groups_across_nodes_pay_for_the_nics():
    inside, across = (Engine(LLAMA_70B, RolloutLayout(tp=tp), H100) for tp in (8, 16))
    assert across.reduce_s > inside.reduce_s and across.weights_s == pytest.approx(inside.weights_s / 2)
    assert across.kv_s == inside.kv_s       # eight KV heads: sixteen ranks hold each twice
    slow = Engine(LLAMA_70B, RolloutLayout(tp=16), replace(H100, nic_bandwidth=5e9))
    assert slow.reduce_token_s > 5 * across.reduce_token_s


def test_a_step_grows_with_batch_and_context():
    for shape, layout in ((LLAMA_70B, RolloutLayout(tp=8)), (MOE, RolloutLayout(tp=2)),
                          (LLAMA_8B, RolloutLayout(pp=2))):
        engine = Engine(shape, layout, H100)
        steps = [engine.step_s(batch, 1000) for batch in (1, 2, 8, 64, 512, 2048)]
        assert steps == sorted(steps)
        assert engine.step_s(64, 2000) > engine.step_s(64, 1000)
        for batch in (1, 64, 2048):
            assert sum(engine.terms(batch, 1000).values()) == pytest.approx(engine.step_s(batch, 1000))


def test_bounds_hold_on_the_development_points(points):
    """Median error of each regime of eight and more, and of all with each regime left out of the calibration."""
    for regime, count in (("decode_tpot_vllm", 60), ("decode_tpot_vllm_h200", 10), ("decode_tpot_trtllm", 14),
                          ("max_throughput_trtllm", 20)):
        errors = [row.error for point in points if point.regime == regime for row in validation.predict(point, C)]
        assert len(errors) == count and None not in errors
        assert median([abs(error) for error in errors]) <= 0.10 and abs(median(errors)) <= 0.04, regime


def test_the_shipped_coefficients_are_the_calibration(points):
    found = validation.calibrate(points, C)
    assert {each.name: getattr(found, each.name) for each in fields(found)} == pytest.approx(
        {each.name: getattr(C, each.name) for each in fields(C)}, rel=0.02)


@pytest.mark.parametrize("held_out", ["llama3-70b", "qwen3-32b"])
def test_a_model_that_took_no_part_is_predicted(points, held_out):
    found = validation.calibrate([point for point in points if point.model_name != held_out], C)
    errors = [row.error for point in points if point.model_name == held_out
              for row in validation.predict(point, found)]
    assert len(errors) > 30 and median([abs(error) for error in errors]) <= 0.06


def test_predictions_look_at_no_names(points):
    for point in points:
        data = copy.deepcopy(dict(point.data)) | {"id": "x", "regime": "x", "source": {"repo": "x"}, "notes": "x"}
        renamed = replace(point, id="x", regime="x", source="x", data=data)
        assert validation.predict(renamed, C) == validation.predict(point, C)


@pytest.mark.parametrize("path, value, reason", [
    ("precision", {"weights": "nvfp4"}, "nvfp4"), ("workload", None, "lengths"),
    ("workload", {"input_tokens": "many"}, ""), ("workload", {"input_tokens": 1000, "output_tokens": 10**9}, ""),
    ("parallelism", {"tp": 1}, "cache"),
    ("hardware", {"gpu": "H100-SXM-80GB"}, "number of GPUs"),
    ("workload", {"input_tokens": -5, "output_tokens": 3}, "")])
def test_what_cannot_be_predicted_has_a_reason(points, path, value, reason):
    point = next(each for each in points if each.id == "dec-qwen3-32b-bf16-h100-tp2-1024x1024-c8-vllm")
    if path == "parallelism":       # 70B in bf16 on one GPU
        point = replace(point, model=LLAMA_70B)
    changed = replace(point, data={**point.data, path: value})
    [row] = validation.predict(changed, C)
    assert row.predicted is None and reason in row.reason and row.reason


def test_null_fields_are_tolerated(points):
    for point in points:
        for name in ("engine", "precision", "parallelism", "workload", "hardware", "measured", "derived"):
            for value in (None, "not_stated", {}, 3, []):
                for row in validation.predict(replace(point, data={**point.data, name: value}), C):
                    assert row.predicted is None or row.predicted > 0


@pytest.mark.parametrize("name, version, expected", [
    ("vLLM", "0.12.0", "vllm"), ("vLLM", "0.6.0 (10 scheduler steps)", "vllm_2024"), ("vLLM", "v0.5.4", "vllm_2024"),
    ("vLLM", "not_stated, measured 2025-10-29", "vllm"), ("TensorRT-LLM", "0.17", "trtllm"),
    ("TRT-LLM", "", "trtllm"), ("SGLang", "0.4.6", "vllm"), ("", "", "vllm")])
def test_engine_classes(name, version, expected):
    assert validation.engine_class(name, version) == expected
