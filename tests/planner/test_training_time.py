"""Training time: closed forms on an ideal machine, the pipeline's algebra, the measured points."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest

from launch.accuracy import training as validation
from launch.accuracy.fit import median
from launch.accuracy.points import load
from launch.cluster import gpus
from launch.cluster.spec import ClusterSpec
from launch.coefficients.collectives import CollectiveCoefficients
from launch.coefficients.training import TrainingCoefficients
from launch.model.architecture import Architecture
from launch.plan.layouts import TrainingLayout
from launch.planner.parameters import flops_per_token, matrix_parameters
from launch.planner.time.training import TrainingTime, logprob_time, training_time
from launch.planner.workload.work import TrainingWork

MEASURED = Path(__file__).parents[2] / "benchmarks" / "measured"
LLAMA_70B = Architecture(80, 8192, 28672, 64, 8, 128, 128256, False)
LLAMA_8B = Architecture(32, 4096, 14336, 32, 8, 128, 128256, False)
MOE = Architecture(48, 2048, 6144, 32, 4, 128, 151936, False, qk_norm=True, experts=128, experts_per_token=8,
                 moe_ffn=768)
H100 = ClusterSpec("h100", tuple(f"n{number}" for number in range(256)), 8, gpus.find("h100"), 8, 50e9, 8, 10**12)
C = TrainingCoefficients()
IDEAL = C.changed({"gemm_bf16": 1.0, "gemm_fp8": 1.0, "gemm_memory": 1e-12, "attention": 1.0, "hbm": 1.0,
                   "layer_s": 0.0, "step_s": 0.0, "tp_exposed": 0.0, "overlap_cost": 0.0})
IDEAL_GPU = replace(H100.gpu, hbm_bandwidth=1e24, nvlink_bandwidth=1e24, sustained=1.0)
IDEAL_CLUSTER = replace(H100, gpu=IDEAL_GPU, nic_bandwidth=1e24)
FREE = CollectiveCoefficients().changed({"launch_s": 0.0, "hop_s": 0.0, "network_s": 0.0, "node_hop_s": 0.0,
                                         "chunk_s": 0.0})


def work(length: int = 8192, micro_batches: int = 64, dp: int = 2, micro: int = 1) -> TrainingWork:
    sequences = micro * micro_batches * dp
    return TrainingWork(sequences, sequences * length, float(length), micro * length, micro_batches, length)


def ideal(shape: Architecture, layout: TrainingLayout, **changes) -> TrainingTime:
    return training_time(shape, layout, work(dp=layout.dp), IDEAL_CLUSTER, IDEAL, collectives=FREE, **changes)


def test_an_ideal_machine_runs_at_its_peak():
    """6 M + 6 L A l FLOPs a token, of which attention's backward pass costs 5 products where 4 are counted."""
    layout = TrainingLayout(tp=8, dp=2)
    batch = work()
    attention = 6 * LLAMA_70B.layers * LLAMA_70B.q_width * 8192 * 3.5 / 3
    expected = batch.tokens * (6 * matrix_parameters(LLAMA_70B) + attention) / (16 * IDEAL_GPU.bf16_flops)
    assert ideal(LLAMA_70B, layout).total_s == pytest.approx(expected, rel=2e-3)      # the vocabulary is padded


def test_parts_add_up():
    for layout in (TrainingLayout(tp=4, pp=4, vpp=5, cp=2, dp=2), TrainingLayout(tp=8, dp=4, fsdp=4),
                   TrainingLayout(pp=2, dp=8, precision="fp8")):
        time = training_time(LLAMA_70B, layout, work(dp=layout.dp), H100, C)
        parts = (time.compute_s, time.tp_s, time.cp_s, time.ep_s, time.pp_bubble_s, time.pp_p2p_s, time.dp_s,
                 time.optimizer_s)
        assert sum(parts) == pytest.approx(time.total_s)
        assert all(part >= 0 for part in parts)


def test_the_bubble_is_that_of_equal_stages():
    """(p - 1)/(v m) of the compute (arXiv 2104.04473), the head being small here."""
    shape = replace(LLAMA_70B, vocab=128)
    for vpp in (1, 5):
        time = ideal(shape, TrainingLayout(tp=4, pp=4, vpp=vpp, cp=2, dp=2))
        assert time.pp_bubble_s / time.compute_s == pytest.approx(3 / (vpp * 64), rel=0.01)


def test_the_slowest_stage_sets_the_pace():
    layout = TrainingLayout(tp=4, pp=8, vpp=5, dp=2)
    even = ideal(LLAMA_70B, layout)
    assert even.slowest_stage == 7                                  # the head weighs as much as 1.2 layers
    lighter = ideal(LLAMA_70B, replace(layout, layers_of_stage=(10, 10, 10, 10, 11, 10, 10, 9)))
    assert lighter.slowest_stage == 4 and lighter.total_s < even.total_s
    by_hand = 64 * (10 * even.layer_s + even.head_s) + 70 * even.layer_s / 5
    assert even.total_s == pytest.approx(by_hand, rel=1e-6)


def test_recomputation_adds_a_forward_pass_of_the_layers():
    layout = TrainingLayout(tp=8, dp=2)
    plain, full = ideal(LLAMA_8B, layout), ideal(LLAMA_8B, replace(layout, recompute=("full",)))
    assert full.matmul_s - 64 * full.head_s == pytest.approx(4 / 3 * (plain.matmul_s - 64 * plain.head_s), rel=1e-3)
    core = ideal(LLAMA_8B, replace(layout, recompute=("core_attn",)))
    assert core.matmul_s == plain.matmul_s and core.attention_s == pytest.approx(plain.attention_s * 4.5 / 3.5)
    mlp = ideal(LLAMA_8B, replace(layout, recompute=("mlp",)))
    share = 3 * LLAMA_8B.hidden * LLAMA_8B.ffn * LLAMA_8B.layers / matrix_parameters(LLAMA_8B)
    assert mlp.matmul_s == pytest.approx(plain.matmul_s * (1 + share / 3), rel=2e-3)


def test_lora_has_no_weight_gradients():
    layout = TrainingLayout(tp=8, dp=2)
    plain, lora = ideal(LLAMA_8B, layout), ideal(LLAMA_8B, layout, lora_rank=16)
    assert lora.matmul_s == pytest.approx(2 / 3 * plain.matmul_s, rel=1e-3)
    real = training_time(LLAMA_8B, layout, work(), H100, C, lora_rank=16)
    assert real.dp_s == 0 and real.optimizer_s == C.step_s


def test_a_logprob_pass_is_a_third_of_the_arithmetic():
    layout = TrainingLayout(tp=4, pp=4, vpp=5, cp=2, dp=2)
    args = (LLAMA_70B, layout, work(), IDEAL_CLUSTER, IDEAL)
    passed = logprob_time(*args, collectives=FREE)
    trained = training_time(*args, collectives=FREE)
    assert passed.matmul_s == pytest.approx(trained.matmul_s / 3, rel=1e-6)
    assert passed.attention_s == pytest.approx(trained.attention_s / 3.5, rel=1e-6)
    real = logprob_time(LLAMA_70B, layout, work(), H100, C).total_s / training_time(LLAMA_70B, layout, work(), H100,
                                                                                   C).total_s
    assert 1 / 3.3 < real < 1 / 2.5


def test_fp8_speeds_up_the_matrices_only():
    layout = TrainingLayout(tp=4, pp=4, vpp=5, cp=2, dp=2)
    bf16 = training_time(LLAMA_70B, layout, work(), H100, C)
    fp8 = training_time(LLAMA_70B, replace(layout, precision="fp8"), work(), H100, C)
    assert fp8.attention_s == bf16.attention_s and fp8.elementwise_s > bf16.elementwise_s
    assert 1.25 < bf16.total_s / fp8.total_s < 1.7
    a100 = replace(H100, gpu=gpus.find("a100"))      # has no FP8
    bf16, fp8 = (training_time(LLAMA_70B, replace(layout, precision=each), work(), a100, C) for each in ("bf16", "fp8"))
    assert (fp8.total_s, fp8.matmul_s, fp8.elementwise_s) == (bf16.total_s, bf16.matmul_s, bf16.elementwise_s)


def test_longer_sequences_cost_attention():
    layout = TrainingLayout(tp=8, cp=2, dp=2)
    short = replace(work(), attention_length=1024.0)
    a, b = (training_time(LLAMA_70B, layout, each, H100, C) for each in (short, work()))
    assert b.attention_s == pytest.approx(8 * a.attention_s) and b.matmul_s == a.matmul_s


def test_thin_shards_and_small_micro_batches_are_slower_a_token():
    """TP 8 with half the data-parallel size, and micro-batches of a quarter of the tokens."""
    tp4 = training_time(LLAMA_70B, TrainingLayout(tp=4, pp=4, vpp=5, dp=4), work(dp=4, micro_batches=32), H100, C)
    tp8 = training_time(LLAMA_70B, TrainingLayout(tp=8, pp=4, vpp=5, dp=2), work(dp=2, micro_batches=64), H100, C)
    assert tp8.total_s > 1.03 * tp4.total_s
    fine = replace(work(dp=4, micro_batches=128), micro_batch_tokens=2048)
    small = training_time(LLAMA_70B, TrainingLayout(tp=4, pp=4, vpp=5, dp=4), fine, H100, C)
    assert small.total_s > 1.03 * tp4.total_s


def test_weak_scaling_is_flat():
    """Measured: 14.66 s on 64 GPUs and on 2048 (70B, bf16, TP4 PP4 CP2)."""
    times = [training_time(LLAMA_70B, TrainingLayout(tp=4, pp=4, vpp=5, cp=2, dp=dp), work(dp=dp), H100, C).total_s
             for dp in (2, 8, 16, 32, 64)]
    assert max(times) / min(times) < 1.03
    assert times[0] == pytest.approx(14.66, rel=0.08)       # the bound that `validate` holds the regime to


def test_communication_that_does_not_fit_shows():
    """A slow network: the gradients of a step with one micro-batch have nothing to hide behind."""
    layout, slow = TrainingLayout(tp=8, pp=2, dp=16), replace(H100, nic_bandwidth=5e9)
    one = work(dp=16, micro_batches=1)
    fast, exposed = (training_time(LLAMA_70B, layout, one, cluster, C) for cluster in (H100, slow))
    assert exposed.dp_s > 5 * fast.dp_s
    assert exposed.total_s > 2 * fast.total_s


def test_collectives_are_hidden_as_far_as_the_run_hides_them():
    """Nothing hidden: the time of all buckets, whatever the compute. Each of the two hides a part of its own."""
    def layout(reduce: bool, gathers: float) -> TrainingLayout:
        return TrainingLayout(tp=8, dp=16, overlap_grad_reduce=reduce, hidden_gathers=gathers)

    def dp_s(reduce: bool, gathers: float, length: int = 8192) -> float:
        return training_time(LLAMA_70B, layout(reduce, gathers), work(length, dp=16), H100, C).dp_s

    bare = dp_s(False, 0.0)
    assert bare == pytest.approx(dp_s(False, 0.0, length=512)), "no compute hides it"
    parameters = training_time(LLAMA_70B, layout(True, 1.0), work(dp=16), H100, C).held.stages[0].dense
    wire_s = parameters * (4 + 2) * 15 / 16 / H100.nic_bandwidth
    assert wire_s < bare < 2.5 * wire_s, "each gradient and each parameter once through the NIC of the rank"
    assert dp_s(True, 1.0) < min(dp_s(True, 0.0), dp_s(False, 1.0)) and max(dp_s(True, 0.0), dp_s(False, 1.0)) < bare
    assert dp_s(True, 0.75) == pytest.approx(0.75 * dp_s(True, 1.0) + 0.25 * dp_s(True, 0.0))
    assert bare - dp_s(True, 1.0) == pytest.approx(2 * bare - dp_s(True, 0.0) - dp_s(False, 1.0))


def test_a_gradient_that_is_added_by_another_kernel_is_written_and_read_once_more():
    fused, apart = (training_time(LLAMA_70B, TrainingLayout(tp=8, dp=2, fused_gradients=each), work(), H100, C)
                    for each in (True, False))
    weights = matrix_parameters(LLAMA_70B) / 8
    moved_s = 64 * weights * 2 * 2 / fused.rates.operands
    assert apart.matmul_s - fused.matmul_s == pytest.approx(moved_s, rel=2e-3)


def test_experts_cost_what_a_token_visits():
    layout = TrainingLayout(dp=16, ep=8)
    time = training_time(MOE, layout, work(4096, 16, 16), IDEAL_CLUSTER, IDEAL, collectives=FREE)
    expected = 6 * matrix_parameters(MOE) * 4096 * 16 / IDEAL_GPU.bf16_flops
    assert time.matmul_s == pytest.approx(expected, rel=2e-3)
    assert training_time(MOE, layout, work(4096, 16, 16), H100, C).ep_s > 0


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "h800", "h20", "b200", "cpu"])
def test_every_gpu_gives_a_plausible_rate(name):
    gpu = gpus.find(name)
    cluster = replace(H100, gpu=gpu)
    layout = TrainingLayout(dp=2, precision="fp32" if name == "cpu" else "bf16")
    batch = work(4096, 8, 2)
    time = training_time(LLAMA_8B, layout, batch, cluster, C)
    rate = flops_per_token(LLAMA_8B, 4096) * batch.tokens / time.total_s / 2
    peak = gpu.fp32_flops if name == "cpu" else gpu.bf16_flops
    assert 0.2 < rate / peak < 0.9
    if name == "h20":                                     # poor in FLOP/s, rich in bandwidth: nearer to its peak
        h100 = training_time(LLAMA_8B, layout, batch, H100, C)
        assert rate / peak > 1.15 * flops_per_token(LLAMA_8B, 4096) * batch.tokens / h100.total_s / 2 / 989.4e12


# Measured points

@pytest.fixture(scope="module")
def points():
    return [point for point in load(MEASURED) if point.kind == "training"]


def test_errors_on_the_development_points(points):
    """The acceptance bound: 8 % for each regime of eight points and more, and for all together."""
    errors: dict[str, list[float]] = {}
    for point in points:
        for result in validation.predict(point, C):
            if result.error is not None:
                errors.setdefault(point.regime, []).append(abs(result.error))
    large = {regime: median(each) for regime, each in errors.items() if len(each) >= 8}
    assert set(large) >= {"megatron_bf16_dense", "megatron_fp8_dense", "fsdp_dense", "lora"}
    assert {regime: value for regime, value in large.items() if value > 0.08} == {}
    assert median([error for each in errors.values() for error in each]) < 0.05


def test_calibration_reproduces_what_is_shipped(points):
    assert validation.calibrate(points, validation.default()) == validation.default()


def test_a_source_left_out_is_still_predicted(points):
    """The largest source, half of the points, from all others."""
    sources = [point.source for point in points]
    largest = max(sorted(set(sources)), key=sources.count)
    fitted = validation.calibrate([point for point in points if point.source != largest], validation.default())
    errors = [abs(result.error) for point in points if point.source == largest
              for result in validation.predict(point, fitted) if result.error is not None]
    assert median(errors) < 0.09


def test_a_prediction_uses_no_name(points):
    for point in points[::9]:
        source = {**(point.get("source") or {}), "repo": "x/y", "path": "z", "commit": "0" * 40}
        other = replace(point, id="other", source="x/y", regime="none", confidence="read",
                        data={**point.data, "id": "other", "source": source, "notes": "", "regime": "none"})
        assert validation.predict(other, C) == validation.predict(point, C)


def test_points_with_holes_are_told_not_raised(points):
    for point in (points[0], points[-1], next(each for each in points if each.regime == "moe")):
        for key in (*point.data, "hardware.num_gpus", "hardware.gpu", "parallelism.tp", "parallelism.dp",
                    "parallelism.ep", "measured.step_time_s"):
            for value in (None, "not_stated", 0, -1, "many", [], {}):
                data = copy.deepcopy(dict(point.data))
                outer, _, inner = key.partition(".")
                if inner:
                    data[outer][inner] = value
                else:
                    data[outer] = value
                for result in validation.predict(replace(point, data=data), C):
                    assert (result.predicted is None) == bool(result.reason)
                    assert result.predicted is None or 0 < result.predicted < float("inf")


def test_tflops_without_a_convention_are_not_compared(points):
    point = next(each for each in points if each.regime == "large_scale_secondary")
    (result,) = validation.predict(point, C)
    assert result.predicted is None and "convention" in result.reason
