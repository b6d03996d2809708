"""Memory of training and rollout ranks: against published formulas, a worked table, a simulated schedule and measured
runs."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.accuracy import memory as validation
from launch.accuracy.score import development_points
from launch.cluster import gpus
from launch.coefficients.memory import MemoryCoefficients
from launch.model.architecture import Architecture
from launch.model.builtin import from_builtin
from launch.plan.layouts import RolloutLayout, TrainingLayout
from launch.planner.memory.activations import in_flight, layer_activations
from launch.planner.memory.rollout import (
    ColocatedMemory,
    RolloutMemory,
    kv_bytes_per_token,
    layer_buffer_bytes,
    weights_on_rank,
)
from launch.planner.memory.training import lora_parameters, training_memory
from launch.planner.parameters import count, parameters_of

H100 = gpus.find("h100")
LLAMA70, QWEN7, QWEN_MOE = from_builtin("llama-3.1-70b"), from_builtin("qwen2.5-7b"), from_builtin("qwen3-30b-a3b")
GPT = Architecture(24, 1024, 4096, 16, 16, 64, 50304, True, mlp_matrices=2, all_biases=True)
STATE = ("weights", "gradients", "optimizer")
C = MemoryCoefficients()


def gb(value: float) -> float:
    return value / 1e9


def bare(stage) -> float:
    """GB without what the allocator adds."""
    return gb(stage.total - stage.components["allocator"])


WORKED = [
    (dict(tp=4, pp=4, cp=2, vpp=5, dp=5), 32.7, (27.5, 20.3), (64.7, 58.9)),
    (dict(tp=4, pp=4, cp=2, dp=5), 32.7, (23.9, 6.0), (61.1, 44.6)),
    (dict(tp=4, pp=4, cp=2, vpp=5, dp=6), 31.8, (27.5, 20.3), (63.8, 58.0)),
    (dict(tp=4, pp=4, dp=10), 32.7, (47.8, 11.9), (85.0, 51.9)),
    (dict(tp=8, pp=2, dp=10), 31.7, (23.9, 11.9), (60.1, 49.6)),
    (dict(tp=4, pp=2, cp=2, dp=10), 58.2, (23.9, 11.9), (86.6, 76.1)),
    (dict(tp=4, pp=8, vpp=5, dp=5), 20.2, (56.1, 39.4), (80.8, 66.9)),
    (dict(tp=8, pp=4, dp=5), 19.1, (23.9, 6.0), (47.5, 30.9))]
"""Llama-70B, micro-batches of 8,704 tokens, fp32 gradients, by hand with 4.5 GB fixed and 10 bytes a logit.
Layout; state, activations and totals of the first and the last stage, in GB a GPU."""


@pytest.mark.parametrize("sizes, state, activations, totals", WORKED)
def test_the_worked_table(sizes, state, activations, totals):
    memory = training_memory(LLAMA70, TrainingLayout(**sizes), 8704, H100, C, engine="megatron")
    for stage, kept, total in zip((memory.stages[0], memory.stages[-1]), activations, totals, strict=True):
        assert gb(sum(stage.components[name] for name in STATE)) == pytest.approx(state, rel=0.01)
        assert gb(stage.components["activations"]) == pytest.approx(kept, rel=0.01)
        # The table has no workspace of a layer's backward; the loss here makes 6 bytes a logit, not 10.
        assert bare(stage) == pytest.approx(total, rel=0.035)
    assert memory.worst_stage == 0


def test_worked_verdicts():
    def verdict(**sizes):
        return training_memory(LLAMA70, TrainingLayout(**sizes), 8704, H100).verdict

    assert verdict(tp=4, pp=4, cp=2, vpp=5, dp=5) == "fits"
    assert verdict(tp=4, pp=4, dp=10) == verdict(tp=4, pp=2, cp=2, dp=10) == "no"
    assert verdict(tp=4, pp=4, dp=10, grad_bytes=2) == "tight"
    assert verdict(tp=4, pp=8, vpp=5, dp=5) in ("tight", "no")
    assert verdict(tp=8, pp=4, dp=5) == "fits"


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_korthikanti_activations(tp):
    """arXiv 2205.05198: 34 s b h a layer with flash attention; 34/t with sequence parallelism, 10 + 24/t without."""
    with_sp = layer_activations(GPT, tp, True, "bf16", (), "megatron", True)
    without = layer_activations(GPT, tp, False, "bf16", (), "megatron", True)
    assert with_sp.kept == pytest.approx(34 * GPT.hidden / tp)
    assert without.kept == pytest.approx((10 + 24 / tp) * GPT.hidden)


def test_llama_activations():
    def kept(precision="bf16", *recompute):
        return layer_activations(LLAMA70, 1, True, precision, recompute, "megatron", False).kept

    assert kept() == 274_432
    assert kept("bf16", "full") == 2 * 8192
    assert kept("bf16", "core_attn") == kept()                      # flash attention keeps no scores
    assert kept() - kept("bf16", "mlp") == 6 * 28672
    assert kept() - kept("bf16", "layernorm") == 4 * 8192
    assert kept("fp8") / 8192 == pytest.approx(28, abs=1.5)         # "about 27 h in FP8"


def simulated_in_flight(rank: int, pp: int, vpp: int, micro_batches: int) -> int:
    """Peak of alive chunks while the rank runs warm-up, one forward one backward, and cool-down."""
    total = micro_batches * vpp
    warm = (pp - rank - 1) if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp
    warm = min(warm, total)
    actions = "F" * warm + "FB" * (total - warm) + "B" * warm
    alive = peak = 0
    for action in actions:
        alive += 1 if action == "F" else -1
        peak = max(peak, alive)
    assert alive == 0
    return peak


def test_in_flight_against_the_schedule():
    for pp in (1, 2, 4, 8):
        for vpp in (1,) if pp == 1 else (1, 2, 5):
            for micro_batches in (pp, 2 * pp, 64) if vpp > 1 else (1, 2, pp, 64):
                for rank in range(pp):
                    case = rank, pp, vpp, micro_batches
                    assert in_flight(*case) == simulated_in_flight(*case), case


LAYOUTS = st.builds(TrainingLayout, tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4]),
                    vpp=st.sampled_from([1, 5]), cp=st.sampled_from([1, 2]), dp=st.integers(1, 8),
                    sequence_parallel=st.booleans(), precision=st.sampled_from(["bf16", "fp8", "fp32"]),
                    recompute=st.sampled_from([(), ("full",), ("mlp",), ("core_attn", "layernorm")]))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([LLAMA70, QWEN7, QWEN_MOE]), LAYOUTS, st.integers(1, 20_000),
       st.sampled_from(["none", "device", "offloaded"]), st.sampled_from([0, 16]), st.integers(1, 40))
def test_components_sum_and_more_never_takes_less(shape, layout, tokens, reference, rank, micro_batches):
    if layout.pp == 1:
        layout = replace(layout, vpp=1)

    def total(layout=layout, tokens=tokens, **more):
        given = dict(reference=reference, lora_rank=rank, micro_batches=micro_batches) | more
        return training_memory(shape, layout, tokens, H100, C, **given)

    memory = total()
    for stage in memory.stages:
        assert sum(stage.components.values()) == stage.total
        assert stage.resident < stage.allocated < stage.reserved < stage.total
    assert memory.total == max(stage.total for stage in memory.stages)
    assert memory.fits == (memory.total <= memory.limit)
    assert total(tokens=tokens + 500).total >= memory.total
    assert total(micro_batches=micro_batches + 1).total >= memory.total
    assert total(layout=replace(layout, dp=layout.dp + 1)).total <= memory.total
    # (beside an offloaded reference the activations that are kept are not the peak, but what a layer recomputes may be)
    assert (total(layout=replace(layout, recompute=())).total >= memory.total or "full" in layout.recompute
            or reference == "offloaded")
    assert total(expandable_segments=False).total > memory.total


def test_state_of_each_kind_of_optimizer():
    """Bytes a parameter: bf16 6 + 12/d (4 + 12/d with bf16 gradients), fp32 8 + 8/d, without sharding 18."""
    def per_parameter(**layout):
        layout = TrainingLayout(**{"dp": 4, "cp": 2} | layout)
        memory = training_memory(QWEN7, layout, 1000, H100)
        return sum(memory.stages[0].components[name] for name in STATE) / count(QWEN7)

    assert per_parameter() == pytest.approx(6 + 12 / 8, rel=1e-3)
    assert per_parameter(grad_bytes=2) == pytest.approx(4 + 12 / 8, rel=1e-3)
    assert per_parameter(precision="fp32") == pytest.approx(8 + 8 / 8, rel=1e-3)
    assert per_parameter(distributed_optimizer=False) == pytest.approx(18, rel=1e-3)


def test_experts_are_sharded_over_their_own_ranks():
    layout = TrainingLayout(dp=16, ep=16)
    held = parameters_of(QWEN_MOE, layout).stages[0]
    assert held.experts == 48 * 128 * 3 * 2048 * 768 // 16
    memory = training_memory(QWEN_MOE, layout, 4096, H100).stages[0]
    assert memory.components["optimizer"] == pytest.approx(12 * (held.experts + held.dense / 16), rel=1e-6)


def test_reference_policy():
    layout = TrainingLayout(tp=2, dp=4)
    none, device, offloaded = (training_memory(QWEN7, layout, 4096, H100, reference=where).stages[0]
                               for where in ("none", "device", "offloaded"))
    assert device.components["reference"] == device.components["weights"]
    assert device.resident - none.resident == device.components["weights"]
    assert offloaded.resident == none.resident and none.total <= offloaded.total < device.total


def test_lora_trains_adapters_only():
    layout = TrainingLayout(dp=4)
    memory = training_memory(QWEN7, layout, 4096, H100, lora_rank=16).stages[0]
    # q, k, v, o, gate, up, down: r (in + out)
    h, q, kv, ffn = 3584, 3584, 512, 18944
    adapters = 16 * ((h + q) * 2 + (h + kv) * 2 + (h + ffn) * 3)
    assert lora_parameters(QWEN7, 16, 1) == adapters
    assert memory.components["adapters"] == pytest.approx(28 * adapters * (2 + 4 + 12 / 4), rel=1e-6)
    assert "gradients" not in memory.components and "optimizer" not in memory.components


def test_log_probs_of_this_trainer_hold_the_logits_once():
    layout = TrainingLayout(tp=4, dp=2)
    ours, theirs = (training_memory(LLAMA70, layout, 8192, H100, engine=engine).stages[0].components["logits"]
                    for engine in ("megatron-rl", "megatron"))
    padded = -(-128256 // 512) * 512
    assert theirs - ours == 8192 * padded // 4 * 4 - 3 * 64 * 2**20


def test_kv_tokens_of_a_70b_replica():
    def tokens(tp, utilization=0.85):
        return RolloutMemory(LLAMA70, RolloutLayout(tp=tp, memory_utilization=utilization, max_num_seqs=512), H100,
                             max_tokens=8704)

    assert tokens(8).kv_tokens == pytest.approx(1.254e6, rel=0.03)
    assert tokens(4).kv_tokens == pytest.approx(412e3, rel=0.05)
    assert not tokens(1).fits and tokens(1).kv_tokens == 0
    assert kv_bytes_per_token(LLAMA70, RolloutLayout(tp=1)) == 327_680
    eight = tokens(8)
    assert sum(eight.components.values()) == eight.total <= eight.limit


def test_rollout_fits_if_one_longest_sequence_fits():
    layout = RolloutLayout(tp=2, memory_utilization=0.98, max_num_seqs=8)
    held = RolloutMemory(LLAMA70, layout, H100).kv_tokens
    assert 0 < held < 100_000
    assert RolloutMemory(LLAMA70, layout, H100, max_tokens=held).fits
    assert not RolloutMemory(LLAMA70, layout, H100, max_tokens=held + 1).fits


def test_a_second_copy_of_the_weights_takes_its_bytes_from_the_cache():
    """70B at TP 8: an eighth of the model, 17.6 GB a GPU, and the tokens that fitted there."""
    layout = RolloutLayout(tp=8, max_num_seqs=512)
    alone, beside = (RolloutMemory(LLAMA70, layout, H100, max_tokens=8704, second_copy=each) for each in (False, True))
    copy = beside.components["shadow"]
    assert copy == beside.components["weights"] == pytest.approx(2 * count(LLAMA70) / 8, rel=1e-3)
    assert copy / 1e9 == pytest.approx(17.6, abs=0.05) and "shadow" not in alone.components
    assert alone.kv_cache - beside.kv_cache == copy and alone.total == beside.total
    # K and V of 80 layers of one head of 128 in bf16.
    assert alone.kv_tokens - beside.kv_tokens == pytest.approx(copy / (2 * 80 * 128 * 2), abs=1)
    assert not RolloutMemory(LLAMA70, RolloutLayout(tp=4), H100, max_tokens=8704, second_copy=True).fits


def test_a_quantised_engine_receives_its_layers_through_buffers():
    """70B at TP 8: each holds a layer's gate and up in bf16. With six, the engine needs half of what a bf16 engine
    does; the scales are 4 bytes an output channel."""
    layout = RolloutLayout(tp=8, max_num_seqs=512, weight_precision="fp8")
    alone, ours = (RolloutMemory(LLAMA70, layout, H100, layer_buffers=each) for each in (0, 6))
    assert ours.components["received"] == 6 * 2 * 2 * 28672 * 8192 // 8 and "received" not in alone.components
    assert alone.kv_cache - ours.kv_cache == ours.components["received"] and alone.total == ours.total
    wide = weights_on_rank(LLAMA70, replace(layout, weight_precision="bf16"))
    matrices = 80 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672) // 8
    channels = 80 * ((8192 + 2 * 1024 + 2 * 28672) // 8 + 2 * 8192)
    assert ours.weights == wide - matrices + 4 * channels
    assert 0.55 * wide < ours.weights + ours.received < 0.6 * wide


def test_a_quantised_mixture_of_experts_has_one_buffer_for_all_experts():
    layout = RolloutLayout(tp=2, weight_precision="fp8")
    each = QWEN_MOE.experts * 3 * QWEN_MOE.hidden * QWEN_MOE.moe_ffn // 2
    assert layer_buffer_bytes(QWEN_MOE, layout) == 2 * each


def test_rollout_weights():
    # Qwen2.5-7B has 4 KV heads: 8 ranks hold each of them twice.
    assert kv_bytes_per_token(QWEN7, RolloutLayout(tp=4)) == kv_bytes_per_token(QWEN7, RolloutLayout(tp=8))
    assert kv_bytes_per_token(QWEN7, RolloutLayout(tp=8, kv_precision="fp8")) * 2 == kv_bytes_per_token(
        QWEN7, RolloutLayout(tp=8))
    assert weights_on_rank(QWEN7, RolloutLayout()) == pytest.approx(2 * count(QWEN7), rel=1e-3)
    assert weights_on_rank(LLAMA70, RolloutLayout(tp=8)) == pytest.approx(2 * count(LLAMA70) / 8, rel=1e-3)
    fp8 = weights_on_rank(LLAMA70, RolloutLayout(weight_precision="fp8"))
    assert fp8 == pytest.approx(count(LLAMA70) + 2 * 128256 * 8192, rel=1e-3)      # embedding and head stay bf16
    tied = from_builtin("qwen3-4b")
    assert weights_on_rank(tied, RolloutLayout()) == pytest.approx(2 * count(tied), rel=1e-3)


def test_colocated_takes_turns():
    training = training_memory(QWEN7, TrainingLayout(tp=2, dp=4), 10240, H100)
    engine = RolloutMemory(QWEN7, RolloutLayout(memory_utilization=0.6), H100, max_tokens=10240)
    both = ColocatedMemory(training, engine, H100)
    assert both.generating - engine.total - C.context_bytes == training.stages[0].resident
    assert not both.fits
    assert ColocatedMemory(training, engine, H100, trainer_offloaded=True).fits


def test_a_cpu_has_no_context_and_no_graphs():
    tiny = Architecture(2, 64, 128, 4, 2, 16, 512, True)
    memory = training_memory(tiny, TrainingLayout(dp=2), 512, gpus.find("cpu"))
    assert memory.verdict == "fits" and memory.stages[0].components["context"] == C.process_bytes
    engine = RolloutMemory(tiny, RolloutLayout(), gpus.find("cpu"), max_tokens=512)
    assert engine.fits and "graphs" not in engine.components


def development():
    return [point for point in development_points() if point.kind == "memory"]


def test_measured_runs():
    """Median absolute error at most 8 %; nothing fits that ran out of memory."""
    errors = []
    for point in development():
        for each in validation.predict(point, validation.default()):
            if each.quantity == "fits":
                assert each.error == 0, point.id
            elif each.error is not None:
                errors.append(abs(each.error))
            else:
                assert "not modelled" in each.reason
    assert len(errors) >= 15 and sorted(errors)[len(errors) // 2] <= 0.05 and max(errors) <= 0.10


def test_shipped_coefficients_are_the_calibration_s_result():
    start = validation.default().changed({"slack_share": 0.05, "fragmentation_share": 0.5})
    found = validation.calibrate(development(), start)
    for each in fields(MemoryCoefficients):
        shipped = getattr(validation.default(), each.name)
        assert getattr(found, each.name) == pytest.approx(shipped, rel=0.01), each.name


@pytest.mark.parametrize("missing", ["recompute", "grad_dtype", "global_batch", "micro_batch", "reported_rank",
                                     "outcome", "seq_len", "parallelism", "precision", "distributed_optimizer"])
def test_points_that_leave_things_out(missing):
    for value in (None, "not_stated"):
        for point in development():
            changed = replace(point, data={**point.data, missing: value})
            for each in validation.predict(changed, validation.default()):
                assert each.predicted is not None or each.reason
