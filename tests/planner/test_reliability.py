"""Failures and checkpoints: Young's interval, and the share of the time that is progress, against a simulation."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from launch.coefficients.reliability import ReliabilityCoefficients
from launch.planner.explain.evaluate import book_of
from launch.planner.parameters import lora_count
from launch.planner.time.reliability import Failures
from tests.planner.problems import best, builtin, h100, problem

C = ReliabilityCoefficients()
LLAMA_70B = 70_553_706_496
CLUSTER = h100(8)


def failures(step_s: float, nodes: int, training_nodes: int, cluster=CLUSTER, **changed) -> Failures:
    return Failures(LLAMA_70B, step_s, nodes, training_nodes, 8 * training_nodes, cluster, C, **changed)


def test_the_default_is_what_llama_3_saw():
    """419 unexpected interruptions in 54 days on 16,384 GPUs: one in 3.1 hours."""
    job = failures(60.0, 2048, 2048).job_mtbf_hours
    assert job == pytest.approx(54 * 24 / 419, rel=1e-3)


def test_young():
    made = failures(60.0, 32, 16, async_save=False)
    assert made.job_mtbf_hours == C.node_mtbf_hours / 32
    assert made.checkpoint_s == pytest.approx(14 * LLAMA_70B / (16 * C.checkpoint_bandwidth))
    assert made.checkpoint_wait_s == made.checkpoint_s and made.host_bytes == 0
    interval = math.sqrt(2 * made.checkpoint_s * made.job_mtbf_hours * 3600)
    assert made.every_steps == round(interval / 60.0)


def test_a_checkpoint_beside_the_steps_costs_the_copy_to_the_host():
    """16 nodes of 8 GPUs: each copies 14 bytes of 1/128 of the parameters, and a node holds 8 such copies."""
    made, waits = failures(60.0, 32, 16), failures(60.0, 32, 16, async_save=False)
    assert made.checkpoint_wait_s == pytest.approx(14 * LLAMA_70B / 128 / C.host_copy_bandwidth)
    assert made.host_bytes == 14 * LLAMA_70B * 8 // 128
    assert made.checkpoint_s == waits.checkpoint_s > 50 * made.checkpoint_wait_s
    assert made.every_steps < waits.every_steps and made.effective_time_ratio > waits.effective_time_ratio
    assert failures(1.0, 32, 16).every_steps * 1.0 >= made.checkpoint_s, "one is written before the next begins"


def test_the_file_system_is_the_limit_of_many_nodes():
    """100 GB/s; 64 nodes could write 128."""
    made = failures(60.0, 128, 64)
    assert made.checkpoint_s == made.load_s == pytest.approx(14 * LLAMA_70B / 100e9)
    assert failures(60.0, 64, 32).checkpoint_s == pytest.approx(14 * LLAMA_70B / 64e9)


def test_the_clusters_own_figure_counts():
    cluster = replace(h100(8), node_mtbf_hours=100.0)
    assert failures(60.0, 10, 5, cluster).job_mtbf_hours == 10


def test_more_nodes_fail_more_often():
    ratios = [failures(60.0, nodes, nodes // 2).effective_time_ratio for nodes in (8, 64, 512, 4096)]
    assert ratios == sorted(ratios, reverse=True) and 0 < ratios[-1] < ratios[0] < 1


def test_a_step_longer_than_the_interval_is_followed_by_a_checkpoint():
    assert failures(1e6, 32, 16).every_steps == 1


@pytest.mark.parametrize("async_save", [True, False])
def test_the_share_of_progress_is_what_a_simulation_gives(async_save):
    """A checkpoint counts from the time at which it is complete."""
    made = failures(60.0, 2048, 256, async_save=async_save)
    beside = made.checkpoint_s if async_save else 0.0
    interval, mtbf = made.every_steps * 60.0, made.job_mtbf_hours * 3600
    drawn, clock, progress = random.Random(0), 0.0, 0.0
    for _ in range(20_000):                 # failures; between two, whole intervals with their checkpoints count
        life = drawn.expovariate(1 / mtbf)
        clock += life + C.restart_s
        progress += max(0.0, life - beside) // (interval + made.checkpoint_wait_s) * interval
    assert made.effective_time_ratio == pytest.approx(progress / clock, abs=0.02)


def test_a_lora_checkpoint_holds_the_adapters_only():
    """Adapters of rank 16 on Llama-3 8B: 41,943,040 parameters (q, k, v, o, gate, up, down of 32 layers)."""
    shape = builtin("llama3-8b")
    assert lora_count(shape, 16) == 41_943_040
    found = best(problem(shape, nodes=2, lora_rank=16))
    book = book_of(found, {})
    assert book["parameters.adapters"].value == 41_943_040
    assert found.failures.checkpoint_s == pytest.approx(14 * 41_943_040 / C.checkpoint_bandwidth)
    assert "model.parameters" not in book["reliability.checkpoint_s"].inputs


@pytest.mark.parametrize(("distributed", "each"), [(True, 16), (False, 12)])
def test_fp32_weights_have_a_master_copy_with_the_distributed_optimizer_only(distributed, each):
    """What tests/trainer/test_checkpoint_parallel.py finds in the files."""
    whole = failures(60.0, 32, 16, precision="fp32", distributed_optimizer=distributed).checkpoint_s
    assert whole == pytest.approx(each * LLAMA_70B / (16 * C.checkpoint_bandwidth))
