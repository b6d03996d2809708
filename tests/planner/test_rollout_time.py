"""Generation of a step: closed forms, a step-by-step simulation of engines with queues, Little's law."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.plan.layouts import RolloutLayout
from launch.planner.time.decode import Engine
from launch.planner.time.rollout import AsynchronousRollout, Demand, SynchronousRollout, minimum_staleness
from launch.planner.time.step import overlapped_seconds
from launch.planner.workload.lengths import Counted, Lengths, LogNormal
from tests.planner.engines import H100, LLAMA_70B, C

LAYOUT = RolloutLayout(tp=8, replicas=4)
ENGINE = Engine(LLAMA_70B, LAYOUT, H100)
SHORT, LONG = LogNormal(300, 0.6, 1200), LogNormal(300, 1.1, 1200)


def flat(**numbers: float) -> Engine:
    """An engine that takes no time but for these numbers."""
    free = dict.fromkeys(("fixed_s", "weights_s", "experts_s", "picked", "compute_s", "kv_s", "sequence_s", "reduce_s",
                          "reduce_token_s", "prefill_token_s", "prefill_pair_s"), 0.0)
    return type("Flat", (Engine,), free | {"pp": 1} | numbers)(LLAMA_70B, LAYOUT, H100, C)


def demand(prompts: int = 64, group: int = 8, lengths: Lengths = SHORT, **changes) -> Demand:
    return replace(Demand(prompts, group, 100, lengths, 4, 256, 1e9), **changes)


def simulated(engine: Engine, wanted: Demand, seed: int) -> tuple[float, list[tuple[float, int]]]:
    """Seconds of a synchronous step, token by token: first come, first served; a slot is taken as it becomes free. And
    for each group the time of its last token and its tokens."""
    chance, held, ends = random.Random(seed), int(wanted.slots), []
    groups: dict[tuple[int, int], list[float]] = {}
    for replica in range(wanted.replicas):
        waiting = [(max(1, round(wanted.lengths.quantile(chance.random()))), (replica, number // wanted.group))
                   for number in range(wanted.responses // wanted.replicas)]
        running: list[list] = []
        seconds = len(waiting) / wanted.group * engine.prefill_s(wanted.prompt_tokens)
        while waiting or running:
            while waiting and len(running) < held:
                running.append([0, *waiting.pop()])
            context = wanted.prompt_tokens + sum(age for age, *_ in running) / len(running)
            seconds += engine.step_s(len(running), context)
            for each in running:
                each[0] += 1
                if each[0] == each[1]:
                    ended = groups.setdefault(each[2], [0.0, 0])
                    ended[:] = seconds, ended[1] + each[1]
            running = [each for each in running if each[0] < each[1]]
        ends.append(seconds)
    return max(ends), [(at, int(tokens)) for at, tokens in groups.values()]


def trained_in_parts(groups: list[tuple[float, int]], update_s: float) -> float:
    """When a trainer is done that, whenever it is free, takes all complete groups if they are an eighth or the last
    ones. A group takes its share of the tokens."""
    waiting, per_token_s, now = sorted(groups), update_s / sum(tokens for _, tokens in groups), 0.0
    while waiting:
        ready = [group for group in waiting if group[0] <= now]
        if len(ready) < len(groups) / 8 and len(ready) < len(waiting):
            now = min(at for at, _ in waiting if at > now)
            continue
        now += per_token_s * sum(tokens for _, tokens in ready)
        del waiting[:len(ready)]
    return now


@pytest.mark.parametrize("lengths", [SHORT, LONG, Counted.of({50: 3, 400: 1})])
@pytest.mark.parametrize("max_num_seqs", [256, 100, 48, 20])
def test_against_a_simulation(lengths, max_num_seqs):
    """128 responses an engine, from all at once to seven turns of a queue. The trainer of `algorithm.overlap` beside
    it."""
    wanted = demand(lengths=lengths, max_num_seqs=max_num_seqs)
    runs = [simulated(ENGINE, wanted, seed) for seed in range(6)]
    time = SynchronousRollout(ENGINE, wanted)
    assert time.total_s == pytest.approx(sum(seconds for seconds, _ in runs) / 6, rel=0.1)
    for ratio in (0.1, 0.3, 1.0, 2.0):
        update_s = ratio * time.total_s
        measured = sum(trained_in_parts(groups, update_s) for _, groups in runs) / 6
        assert overlapped_seconds(time.total_s, update_s, time.completions) == pytest.approx(measured, rel=0.13), ratio


def test_equal_lengths_have_no_tail():
    lengths = Counted.fixed(1000)
    wanted = demand(lengths=lengths)
    found = SynchronousRollout(ENGINE, wanted)
    steps = sum(ENGINE.step_s(128, 100 + age) for age in range(1000))
    assert found.total_s - found.prefill_s == pytest.approx(steps, rel=1e-3)
    assert found.prefill_s == pytest.approx(16 * ENGINE.prefill_s(100))
    assert found.tail_s == 0
    assert found.in_flight == pytest.approx(512, rel=1e-3)


def test_one_step_a_token_whatever_the_batch():
    """With a constant step the time is E[longest of all] steps; of a deep queue, all tokens over the slots."""
    constant = flat(fixed_s=0.01)
    wanted = demand(lengths=LONG)
    assert SynchronousRollout(constant, wanted).total_s == pytest.approx(0.01 * LONG.expected_max(512), rel=0.03)
    queued = SynchronousRollout(constant, demand(prompts=4096, lengths=LONG, max_num_seqs=64))
    full = 4096 * 8 / 4 * LONG.mean / 64 * 0.01
    assert full < queued.total_s < full + 0.01 * 1200
    assert queued.limit == "host"


def test_tokens_are_conserved():
    """A step that costs 1 s a running sequence takes as many seconds as an engine has tokens, queue or not."""
    counting = flat(sequence_s=1.0)
    for max_num_seqs in (1000, 128, 100, 64, 10):
        wanted = Demand(16, 8, 100, LONG, 1, max_num_seqs, 1e9)
        found = SynchronousRollout(counting, wanted)
        assert found.total_s == pytest.approx(128 * LONG.mean, rel=1e-6)


def test_the_cache_limits_the_slots():
    """Prompts shared by eight completions count once; a response holds half of what its token-weighted length is."""
    roomy, tight = demand(kv_tokens=1e9), demand(kv_tokens=20_000)
    assert roomy.slots == 256
    assert tight.slots == pytest.approx(20_000 / (100 / 8 + SHORT.second_moment / (2 * SHORT.mean)))
    assert demand(kv_tokens=1).slots == 1
    assert SynchronousRollout(ENGINE, tight).limit == "KV capacity"
    assert SynchronousRollout(ENGINE, tight).total_s > SynchronousRollout(ENGINE, roomy).total_s
    assert AsynchronousRollout(ENGINE, tight).limit == "KV capacity"


def test_few_long_responses_are_bound_by_their_tail():
    found = SynchronousRollout(ENGINE, demand(prompts=4, lengths=LogNormal(300, 1.1, 12000)))
    assert found.limit == "tail" and found.tail_s > found.total_s / 2


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 600), st.integers(1, 32), st.integers(1, 64), st.floats(0.2, 1.4), st.integers(1, 1024))
def test_orderings(prompts, group, replicas, sigma, max_num_seqs):
    """More engines, or fewer prompts, never take longer; a longer tail never less; no time below either bound."""
    lengths, longer = LogNormal(300, sigma, 1200), LogNormal(300, sigma * 1.3, 1200)
    wanted = Demand(prompts, group, 100, lengths, replicas, max_num_seqs, 60_000)
    seconds = SynchronousRollout(ENGINE, wanted).total_s
    slack = 1 + 1e-9
    assert SynchronousRollout(ENGINE, replace(wanted, replicas=2 * replicas)).total_s <= seconds * 1.02
    assert SynchronousRollout(ENGINE, replace(wanted, prompts=2 * prompts)).total_s >= seconds / slack
    assert seconds * 1.02 >= lengths.expected_max(wanted.responses) * ENGINE.step_s(1, 100)
    full = AsynchronousRollout(ENGINE, wanted)
    assert seconds * 1.02 >= wanted.responses / full.tokens_per_s * lengths.mean * 0.9
    assert AsynchronousRollout(ENGINE, replace(wanted, lengths=longer)).total_s >= full.total_s / slack


def test_littles_law():
    """In flight = rate x latency, of engines that are kept full."""
    full = AsynchronousRollout(ENGINE, demand(prompts=512))
    assert full.load == 1 and full.in_flight == 1024
    assert full.in_flight == pytest.approx(4096 / full.total_s * full.latency_mean_s, rel=1e-6)
    assert full.latency_max_s / full.latency_mean_s == pytest.approx(1200 / 300)


def test_prefill_of_others_slows_an_asynchronous_token():
    """Every response that starts adds its share of a prompt's prefill: G completions share one."""
    slow = flat(fixed_s=0.01, prefill_token_s=1e-4)
    wanted = demand(prompts=512, lengths=Counted.fixed(100))
    found = AsynchronousRollout(slow, wanted)
    assert found.tpot_s == pytest.approx(0.01 + 256 / 100 * (100 * 1e-4) / 8)
    assert found.total_s == pytest.approx(4096 / 4 * 100 * found.tpot_s / 256)


def test_staleness_of_a_fifo():
    found = AsynchronousRollout(ENGINE, demand(prompts=512))
    assert minimum_staleness(found, found.latency_max_s) == 1
    assert minimum_staleness(found, found.latency_max_s * 0.999) == 2
    assert minimum_staleness(found, found.latency_max_s / 4.5) == 5
