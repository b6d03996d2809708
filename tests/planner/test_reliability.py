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


def test_the_default_is_what_llama_3_saw():
    """419 unexpected interruptions in 54 days on 16,384 GPUs: one in 3.1 hours."""
    job = Failures(LLAMA_70B, 60.0, 2048, 2048, h100(8), C).job_mtbf_hours
    assert job == pytest.approx(54 * 24 / 419, rel=1e-3)


def test_young():
    made = Failures(LLAMA_70B, 60.0, 32, 16, h100(8), C)
    assert made.job_mtbf_hours == C.node_mtbf_hours / 32
    assert made.checkpoint_s == pytest.approx(14 * LLAMA_70B / (16 * C.checkpoint_bandwidth))
    interval = math.sqrt(2 * made.checkpoint_s * made.job_mtbf_hours * 3600)
    assert made.every_steps == round(interval / 60.0)


def test_the_clusters_own_figure_counts():
    cluster = replace(h100(8), node_mtbf_hours=100.0)
    assert Failures(LLAMA_70B, 60.0, 10, 5, cluster, C).job_mtbf_hours == 10


def test_more_nodes_fail_more_often():
    ratios = [Failures(LLAMA_70B, 60.0, nodes, nodes // 2, h100(8), C).effective_time_ratio
              for nodes in (8, 64, 512, 4096)]
    assert ratios == sorted(ratios, reverse=True) and 0 < ratios[-1] < ratios[0] < 1


def test_a_step_longer_than_the_interval_is_followed_by_a_checkpoint():
    assert Failures(LLAMA_70B, 1e6, 32, 16, h100(8), C).every_steps == 1


def test_the_share_of_progress_is_what_a_simulation_gives():
    made = Failures(LLAMA_70B, 60.0, 2048, 1024, h100(8), C)
    interval, mtbf = made.every_steps * 60.0, made.job_mtbf_hours * 3600
    drawn, clock, progress = random.Random(0), 0.0, 0.0
    for _ in range(20_000):                 # failures; between two, whole intervals with their checkpoints count
        life = drawn.expovariate(1 / mtbf)
        clock += life + C.restart_s
        progress += life // (interval + made.checkpoint_s) * interval
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


def test_fp32_weights_need_no_master_copy():
    whole = Failures(LLAMA_70B, 60.0, 32, 16, h100(8), C, precision="fp32").checkpoint_s
    assert whole == pytest.approx(12 * LLAMA_70B / (16 * C.checkpoint_bandwidth))
