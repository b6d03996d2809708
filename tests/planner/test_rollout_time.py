"""Generation of a step: closed forms, a step-by-step simulation of engines with queues, Little's law, the book."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.plan.book import Book
from launch.plan.layouts import RolloutLayout
from launch.planner.time.decode import Engine, engine_of
from launch.planner.time.rollout import Demand, asynchronous, minimum_staleness, needed_in_flight, slots, synchronous
from launch.planner.workload.lengths import Counted, Lengths, LogNormal
from tests.planner.engines import H100, LLAMA_70B, given_book

LAYOUT = RolloutLayout(tp=8, replicas=4)
ENGINE = engine_of(LLAMA_70B, LAYOUT, H100)
FREE = Engine(pp=1, fixed_s=0.0, weights_s=0.0, experts_s=0.0, picked=0.0, compute_s=0.0, kv_s=0.0, sequence_s=0.0,
              reduce_s=0.0, reduce_token_s=0.0, prefill_token_s=0.0, prefill_pair_s=0.0)
SHORT, LONG = LogNormal(300, 0.6, 1200), LogNormal(300, 1.1, 1200)


def demand(prompts: int = 64, group: int = 8, lengths: Lengths = SHORT, **changes) -> Demand:
    return replace(Demand(prompts, group, 100, lengths, 4, 256, 1e9), **changes)


def simulated(engine: Engine, wanted: Demand, seed: int) -> float:
    """Seconds of a synchronous step, token by token: first come, first served; a slot is taken as it becomes free."""
    chance, held, ends = random.Random(seed), int(slots(wanted)), []
    for _ in range(wanted.replicas):
        waiting = [max(1, round(wanted.lengths.quantile(chance.random())))
                   for _ in range(wanted.responses // wanted.replicas)]
        running: list[list[int]] = []
        seconds = len(waiting) / wanted.group * engine.prefill_s(wanted.prompt_tokens)
        while waiting or running:
            while waiting and len(running) < held:
                running.append([0, waiting.pop()])
            context = wanted.prompt_tokens + sum(age for age, _ in running) / len(running)
            seconds += engine.step_s(len(running), context)
            for each in running:
                each[0] += 1
            running = [each for each in running if each[0] < each[1]]
        ends.append(seconds)
    return max(ends)


@pytest.mark.parametrize("lengths", [SHORT, LONG, Counted.of({50: 3, 400: 1})])
@pytest.mark.parametrize("max_num_seqs", [256, 100, 48, 20])
def test_against_a_simulation(lengths, max_num_seqs):
    """128 responses an engine, from all at once to seven turns of a queue."""
    wanted = demand(lengths=lengths, max_num_seqs=max_num_seqs)
    measured = sum(simulated(ENGINE, wanted, seed) for seed in range(6)) / 6
    assert synchronous(ENGINE, wanted).total_s == pytest.approx(measured, rel=0.1)


def test_equal_lengths_have_no_tail():
    lengths = Counted.fixed(1000)
    wanted = demand(lengths=lengths)
    found = synchronous(ENGINE, wanted)
    steps = sum(ENGINE.step_s(128, 100 + age) for age in range(1000))
    assert found.total_s - found.prefill_s == pytest.approx(steps, rel=1e-3)
    assert found.prefill_s == pytest.approx(16 * ENGINE.prefill_s(100))
    assert found.tail_s == 0
    assert found.in_flight == pytest.approx(512, rel=1e-3)


def test_one_step_a_token_whatever_the_batch():
    """With a constant step the time is E[longest of all] steps; of a deep queue, all tokens over the slots."""
    constant = replace(FREE, fixed_s=0.01)
    wanted = demand(lengths=LONG)
    assert synchronous(constant, wanted).total_s == pytest.approx(0.01 * LONG.expected_max(512), rel=0.03)
    queued = synchronous(constant, demand(prompts=4096, lengths=LONG, max_num_seqs=64))
    full = 4096 * 8 / 4 * LONG.mean / 64 * 0.01
    assert full < queued.total_s < full + 0.01 * 1200
    assert queued.limit == "host"


def test_tokens_are_conserved():
    """A step that costs 1 s a running sequence takes as many seconds as an engine has tokens, queue or not."""
    counting = replace(FREE, sequence_s=1.0)
    for max_num_seqs in (1000, 128, 100, 64, 10):
        wanted = Demand(16, 8, 100, LONG, 1, max_num_seqs, 1e9)
        found = synchronous(counting, wanted)
        assert found.total_s == pytest.approx(128 * LONG.mean, rel=1e-6)


def test_the_cache_limits_the_slots():
    """Prompts shared by eight completions count once; a response holds half of what its token-weighted length is."""
    roomy, tight = demand(kv_tokens=1e9), demand(kv_tokens=20_000)
    assert slots(roomy) == 256
    assert slots(tight) == pytest.approx(20_000 / (100 / 8 + SHORT.second_moment / (2 * SHORT.mean)))
    assert slots(demand(kv_tokens=1)) == 1
    assert synchronous(ENGINE, tight).limit == "KV capacity"
    assert synchronous(ENGINE, tight).total_s > synchronous(ENGINE, roomy).total_s
    assert asynchronous(ENGINE, tight).limit == "KV capacity"


def test_few_long_responses_are_bound_by_their_tail():
    found = synchronous(ENGINE, demand(prompts=4, lengths=LogNormal(300, 1.1, 12000)))
    assert found.limit == "tail" and found.tail_s > found.total_s / 2


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 600), st.integers(1, 32), st.integers(1, 64), st.floats(0.2, 1.4), st.integers(1, 1024))
def test_orderings(prompts, group, replicas, sigma, max_num_seqs):
    """More engines, or fewer prompts, never take longer; a longer tail never less; no time below either bound."""
    lengths, longer = LogNormal(300, sigma, 1200), LogNormal(300, sigma * 1.3, 1200)
    wanted = Demand(prompts, group, 100, lengths, replicas, max_num_seqs, 60_000)
    seconds = synchronous(ENGINE, wanted).total_s
    slack = 1 + 1e-9
    assert synchronous(ENGINE, replace(wanted, replicas=2 * replicas)).total_s <= seconds * 1.02
    assert synchronous(ENGINE, replace(wanted, prompts=2 * prompts)).total_s >= seconds / slack
    assert seconds * 1.02 >= lengths.expected_max(wanted.responses) * ENGINE.step_s(1, 100)
    full = asynchronous(ENGINE, wanted)
    assert seconds * 1.02 >= wanted.responses / full.tokens_per_s * lengths.mean * 0.9
    assert asynchronous(ENGINE, replace(wanted, lengths=longer)).total_s >= full.total_s / slack


def test_littles_law():
    """In flight = rate x latency, at any pace that the engines can keep."""
    wanted = demand(prompts=512)
    fastest = asynchronous(ENGINE, wanted)
    assert fastest.load == 1 and fastest.in_flight == 1024
    for pace in (1.2, 2, 10):
        paced = asynchronous(ENGINE, wanted, step_s=pace * fastest.total_s)
        assert paced.total_s == pytest.approx(pace * fastest.total_s, rel=1e-6)
        assert paced.in_flight == pytest.approx(4096 / paced.total_s * paced.latency_mean_s, rel=1e-6)
        assert paced.load < 1 and paced.latency_max_s / paced.latency_mean_s == pytest.approx(1200 / 300)
        assert needed_in_flight(ENGINE, wanted, paced.total_s) == pytest.approx(paced.in_flight, rel=1e-6)
    late = asynchronous(ENGINE, wanted, step_s=fastest.total_s / 2)
    assert late.total_s == fastest.total_s and late.load == 1
    assert needed_in_flight(ENGINE, wanted, 1e-6) == math.inf


def test_prefill_of_others_slows_an_asynchronous_token():
    """Every response that starts adds its share of a prompt's prefill: G completions share one."""
    slow = replace(FREE, fixed_s=0.01, prefill_token_s=1e-4)
    wanted = demand(prompts=512, lengths=Counted.fixed(100))
    found = asynchronous(slow, wanted)
    assert found.tpot_s == pytest.approx(0.01 + 256 / 100 * (100 * 1e-4) / 8)
    assert found.total_s == pytest.approx(4096 / 4 * 100 * found.tpot_s / 256)


def test_staleness_of_a_fifo():
    found = asynchronous(ENGINE, demand(prompts=512))
    assert minimum_staleness(found, found.latency_max_s) == 1
    assert minimum_staleness(found, found.latency_max_s * 0.999) == 2
    assert minimum_staleness(found, found.latency_max_s / 4.5) == 5


@pytest.mark.parametrize("generate", [synchronous, asynchronous])
def test_the_book_names_all_inputs(generate):
    """A changed input changes nothing but what the book says rests on it; and the book's numbers are the result's."""
    lengths = LogNormal(2048, 0.9, 8192)
    base = {"prompts": 1024, "group": 16, "prompt_tokens": 512, "lengths": lengths, "replicas": 4,
            "max_num_seqs": 512, "kv_tokens": 1_000_000}
    keys = {"prompts": ["workload.prompts"], "group": ["workload.group"], "prompt_tokens": ["workload.prompt_tokens"],
            "replicas": ["rollout.replicas"], "max_num_seqs": ["rollout.max_num_seqs"],
            "kv_tokens": ["memory.rollout.kv_tokens"],
            "lengths": ["workload.response_mean", "workload.response_second_moment", "workload.response_cap"]}

    def written(values: dict) -> tuple[Book, object]:
        book = given_book(LAYOUT, H100)
        for name in ("prompts", "group", "prompt_tokens"):
            book.given(f"workload.{name}", values[name], "", "test")
        for name in ("mean", "second_moment", "cap"):
            book.given(f"workload.response_{name}", getattr(values["lengths"], name), "", "test")
        book.given("memory.rollout.kv_tokens", values["kv_tokens"], "", "test")
        engine = engine_of(LLAMA_70B, LAYOUT, H100, book=book)
        return book, generate(engine, Demand(**values), book=book)

    book, result = written(base)
    assert book["rollout.total_s"].value == result.total_s and book["rollout.tpot_s"].value == result.tpot_s
    assert book["rollout.in_flight"].value == result.in_flight
    for name, changed in (("prompts", 900), ("group", 12), ("prompt_tokens", 400), ("replicas", 5),
                          ("max_num_seqs", 300), ("kv_tokens", 500_000), ("lengths", LogNormal(1800, 0.7, 8000))):
        other, _ = written(base | {name: changed})
        allowed = {each for key in keys[name] for each in (key, *book.dependents(key))}
        differing = {entry.key for entry in book if other[entry.key].value != entry.value}
        assert differing - {"rollout.replicas", "rollout.max_num_seqs"} <= allowed, name
        assert "rollout.total_s" in differing or name == "max_num_seqs"


def test_a_result_is_a_value():
    assert copy.deepcopy(synchronous(ENGINE, demand())) == synchronous(ENGINE, demand())
