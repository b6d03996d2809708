"""Warnings whose threshold is a number of the plan."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from launch.plan.forecast import DiskForecast
from launch.planner.explain.evaluate import book_of
from launch.planner.explain.forecast import forecast
from launch.planner.explain.warnings import MAX_HOST, cautions
from launch.planner.parameters import count
from launch.planner.search.candidate import Candidate
from launch.planner.search.space import Pins
from launch.planner.workload.lengths import LogNormal
from tests.planner.problems import best, builtin, h100, problem, with_numbers, workload


def _messages(found: Candidate) -> dict[str, str]:
    return {each.code: each.message for each in cautions(found, 1.0, 2.0)}


def test_a_full_cache_without_room_for_a_long_completion():
    """At the real length of the step: what is free of an engine's cache against the longest prompt and completion."""
    work = workload(prompts=512, group=16, lengths=LogNormal(2000, 0.9, 7000))
    pins = Pins(training_nodes=3, rollout_tp=1, max_num_seqs=1024)
    found = best(problem(builtin("llama3-8b"), nodes=4, pins=pins, asynchronous=True, work=work))
    assert found.rollout.time.limit == "KV capacity" and found.rollout_load > 0.9
    free = found.rollout.memory.kv_tokens * (1 - found.rollout_load)
    assert free > work.longest and "W002" not in _messages(found)
    memory = with_numbers(found.rollout.memory, kv_tokens=int(0.9 * work.longest / (1 - found.rollout_load)))
    small = with_numbers(found, rollout=with_numbers(found.rollout, memory=memory, time=found.rollout.time))
    assert f"{work.longest:,}" in _messages(small)["W002"]
    waiting = with_numbers(small, training=with_numbers(small.training, train_s=10 * small.rollout.seconds))
    assert "W002" not in _messages(waiting)          # engines that wait for the trainer are not full


def test_an_offloaded_reference_needs_a_host_that_holds_it():
    """Each GPU's host copy of its weights: one copy of the model for each TP x PP ranks of a node. And the copy of a
    checkpoint, of which the training node holds the whole."""
    shape = builtin("llama3-8b")
    work = workload(reference=True, reference_offload=True)
    found = best(problem(shape, nodes=2, work=work))
    layout = found.training.layout
    copies = 8 / (layout.tp * layout.pp)
    book = book_of(found, {})
    checkpoint = 14 * count(shape)
    assert book["memory.host.needed"].value == pytest.approx(copies * 2 * count(shape) + checkpoint, rel=0.02)
    assert "W013" not in _messages(found)
    small = replace(h100(2), host_memory_bytes=int(book["memory.host.needed"].value / MAX_HOST) - 1)
    message = _messages(replace(found, problem=replace(found.problem, cluster=small)))["W013"]
    assert "the reference's weights, the copy of a checkpoint" in message
    assert f"{small.host_memory_bytes / 1e9:,.0f} GB" in message


def test_a_colocated_trainer_sleeps_in_host_memory():
    found = best(problem(builtin("llama3-8b"), nodes=2), "colocated")
    stage = max(each.resident for each in found.training.memory.stages)
    assert book_of(found, {})["memory.host.needed"].value == 8 * stage + found.failures.host_bytes
    tight = replace(h100(2), host_memory_bytes=8 * stage)
    assert "the trainer's state" in _messages(replace(found, problem=replace(found.problem, cluster=tight)))["W013"]


def test_nothing_lies_in_the_host_where_nothing_is_offloaded_or_copied():
    assert "memory.host.needed" not in book_of(best(replace(problem(nodes=2), async_save=False)), {})


def test_a_second_copy_that_saves_nothing_is_told():
    """It is worth its memory only where engines generate while the sync runs."""
    found = best(problem(nodes=2, asynchronous=True, shadow=True))
    assert "W015" not in _messages(found)
    message = _messages(replace(found, problem=replace(found.problem, asynchronous=False)))["W015"]
    assert f"{found.rollout.memory.components['shadow'] / 1e9:.1f} GB per GPU" in message
    assert "W015" not in _messages(replace(found, problem=replace(found.problem, asynchronous=False, shadow=False)))


def test_a_bound_beside_the_plans_need_is_told_with_both_numbers():
    """The need: how many steps, as long as without a bound, the longest completion spans."""
    free = best(problem(nodes=3, asynchronous=True))
    needed = math.ceil(free.rollout.time.latency_max_s / free.step_s)
    assert needed > 1 and "W018" not in _messages(free)

    def told(bound: int) -> str:
        return _messages(bounded(free, bound)).get("W018", "")

    def bounded(found: Candidate, bound: int) -> Candidate:
        posed = replace(found.problem, max_staleness=bound)
        return replace(found, problem=posed, rollout=replace(found.rollout, problem=posed))

    spans = f"the longest completion spans {needed} steps of {free.step_s:.1f} s"
    assert told(needed) == "" and bounded(free, needed).step_s == free.step_s
    assert told(1).startswith(f"algorithm.max_staleness = 1, and {spans}: the trainer waits")
    assert f"a step takes {bounded(free, 1).step_s:.1f} s" in told(1) and bounded(free, 1).step_s > free.step_s
    assert f"= {needed + 2}, and {spans}: with a bound of {needed}, samples are fresher" in told(needed + 2)


def test_the_cost_of_swaps_at_borders_is_told():
    """The same engines, with a step that waits for the longest completion of its batch."""
    flying = best(problem(nodes=3, asynchronous=True))
    posed = replace(flying.problem, border=True)
    found = replace(flying, problem=posed, rollout=replace(flying.rollout, problem=posed))
    c = found.problem.coefficients.rl
    assert found.step_s == pytest.approx(
        (max(found.rollout.seconds + found.reward.seconds, found.training.seconds) + found.sync_s)
        * (1 + c.other_share))
    lengths, work = found.problem.workload.lengths, found.problem.workload
    assert found.rollout.seconds > lengths.expected_max(work.sequences) * found.rollout.engine.step_s(1, 0)
    assert found.step_s > flying.step_s and found.staleness == 1
    message = _messages(found)["W019"]
    assert f"{found.step_s:.1f} s" in message and f"in_flight takes {flying.step_s:.1f} s" in message
    assert "W019" not in _messages(flying)


def test_a_cap_that_cuts_most_groups_is_told():
    """The share of the notes' worked table: of 16 log-normal completions, one or more at the cap."""
    found = best(problem(nodes=2, work=workload(group=16, lengths=LogNormal(2048, 1.0, 4096))))
    capped = found.problem.workload.lengths.capped_share
    message = _messages(found)["W014"]
    assert 1 - (1 - capped) ** 16 > 0.5 and f"{capped:.0%} of the completions" in message
    alone = replace(found, problem=replace(found.problem, workload=replace(found.problem.workload, group=1)))
    assert "W014" not in _messages(alone)


def test_communicators_that_may_not_fit_beside_the_rest_are_told():
    found = best(problem(builtin("llama3-8b"), nodes=2))
    needed = found.sync.needs[found.sync.chosen]
    gpu = found.problem.cluster.gpu
    assert needed.rollout_bytes > 0 and "W016" not in _messages(found)
    total = gpu.usable_bytes - needed.rollout_bytes + 1
    full = with_numbers(found.rollout, memory=with_numbers(found.rollout.memory, fixed=total, kv_cache=0))
    message = _messages(replace(found, rollout=full))["W016"]
    assert message.startswith(f"{needed.rollout} communicators") and "rollout.memory_utilization" in message


def test_versions_on_disk_that_come_faster_than_they_can_be_written():
    """Written and read back at the file system's rate: 2 x 2 bytes a parameter over the training nodes' 2 GB/s each."""
    shape = builtin("llama3-8b")
    found = best(problem(shape, nodes=2, disk_every=1))
    assert "W017" not in _messages(replace(found, problem=replace(found.problem, disk_every=0)))
    seconds = book_of(found, {})["sync.disk_s"].value
    assert seconds == pytest.approx(4 * count(shape) / 2e9)
    assert forecast(None, found, {}).sync.disk == DiskForecast(every=1, bytes=2 * count(shape), seconds=seconds)
    slow = replace(found.problem.coefficients.reliability, checkpoint_bandwidth=2e9 * seconds / (3.5 * found.step_s))
    waits = replace(found.problem, coefficients=replace(found.problem.coefficients, reliability=slow))
    assert "use 4 or more" in _messages(replace(found, problem=waits))["W017"]
    assert "W017" not in _messages(replace(found, problem=replace(waits, disk_every=4)))


def test_old_logprobs_of_the_engine_are_told_over_all_updates():
    told = {}
    for name, changes in (("one", {}), ("epochs", {"epochs": 2}), ("pass", {"epochs": 2, "logprob_pass": True}),
                          ("interpolated", {"epochs": 2, "interpolated": True})):
        told[name] = _messages(best(problem(builtin("llama3-8b"), nodes=2, work=workload(**changes)))).get("W009")
    assert told["epochs"].startswith("2 updates per batch without a log-prob pass")
    assert told["one"] is None and told["pass"] is None and told["interpolated"] is None
