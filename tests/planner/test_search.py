"""The search finds the optimum of its model: every division and every layout, tried one by one, gives nothing
better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from launch.plan.layouts import RolloutLayout, TrainingLayout
from launch.planner.search.candidate import Candidate
from launch.planner.search.options import RolloutOption, TrainingOption, max_num_seqs_to_try
from launch.planner.search.problem import Mode, Problem
from launch.planner.search.search import Search
from launch.planner.search.space import Pins
from tests.planner.problems import SMALL, builtin, problem, workload

LLAMA_8B = builtin("llama3-8b")


def _trainers(found: Problem, units: int) -> Iterator[TrainingLayout]:
    """By trial: all sizes up to the number of GPUs, those kept that Megatron could run."""
    shape, pins, node, gpus = found.shape, found.pins, found.cluster.gpus_per_node, units * found.unit_gpus
    sizes = range(1, node + 1)
    for tp in sizes:
        for cp in sizes:
            for pp in range(1, 17):
                if tp * cp > node or node % tp or (node // tp) % cp:
                    continue
                dp = pins.dp or gpus // (tp * cp * pp)
                if not gpus - found.unit_gpus < dp * tp * cp * pp <= gpus or (not pins.dp and gpus % (tp * cp * pp)):
                    continue
                if shape.heads % tp or shape.kv_heads % tp or (shape.moe_ffn or shape.ffn) % tp:
                    continue
                for vpp in range(1, shape.layers + 1):
                    if shape.layers % (pp * vpp) or (vpp > 1 and pp == 1):
                        continue
                    sequences = found.workload.sequences // found.workload.updates
                    if sequences < dp * (pp if vpp > 1 else 1):
                        continue
                    for ep in sizes if shape.experts else (1,):
                        if ep > 1 and (shape.experts % ep or node // tp % ep or dp * cp % ep):
                            continue
                        for recompute in ((), ("full",)):
                            layout = TrainingLayout(
                                tp=tp, pp=pp, vpp=vpp, cp=cp, dp=dp, ep=ep, sequence_parallel=tp > 1,
                                recompute=recompute, layers_of_stage=(shape.layers // pp,) * pp)
                            if _obeys(pins, tp=tp, pp=pp, vpp=vpp, cp=cp, dp=dp):
                                yield layout


def _obeys(pins: Pins, **sizes: int) -> bool:
    return all(getattr(pins, name) in (None, size) for name, size in sizes.items())


def _engines(found: Problem, units: int) -> Iterator[RolloutLayout]:
    shape, pins, node, gpus = found.shape, found.pins, found.cluster.gpus_per_node, units * found.unit_gpus
    for tp in range(1, node + 1):
        replicas = pins.replicas or gpus // tp
        if not gpus - found.unit_gpus < replicas * tp <= gpus or (not pins.replicas and gpus % tp):
            continue
        if node % tp or shape.heads % tp or not 0 < replicas <= found.workload.prompts:
            continue
        if (shape.kv_heads % tp and tp % shape.kv_heads) or (shape.moe_ffn or shape.ffn) % tp:
            continue
        if _obeys(pins, rollout_tp=tp, replicas=replicas):
            for limit in max_num_seqs_to_try(found, replicas):
                yield RolloutLayout(tp=tp, replicas=replicas, weight_precision=pins.rollout_precision,
                                    max_num_seqs=limit,
                                    memory_utilization=pins.memory_utilization, cuda_graphs=pins.cuda_graphs)


def _all(found: Problem, mode: Mode) -> Iterator[Candidate]:
    units = found.units
    for training_units in range(1, units + 1):
        if found.pins.training_nodes not in (None, training_units) and mode == "disaggregated":
            continue
        options = (TrainingOption(found, layout, training_units) for layout in _trainers(found, training_units))
        trainers = [option for option in options if option.memory.fits]
        rollout_units = range(1, units - training_units + 1) if mode == "disaggregated" else (training_units,)
        for number in rollout_units:
            for layout in _engines(found, number):
                if mode == "disaggregated":
                    engines = RolloutOption(found, layout, number)
                    yield from (Candidate(mode, trainer, engines, found) for trainer in trainers if engines.memory.fits)
                    continue
                for trainer in trainers:
                    both = _largest_that_fits(found, mode, trainer, layout, number)
                    if both is not None:
                        yield both


def _largest_that_fits(found: Problem, mode: Mode, trainer: TrainingOption, layout: RolloutLayout,
                       number: int) -> Candidate | None:
    """With the largest share of the memory, in steps of 0.05, with which both are at home on a GPU."""
    allowed = found.pins.memory_utilization
    for share in (allowed, *(step / 20 for step in range(20, 0, -1) if step / 20 < allowed)):
        engines = RolloutOption(found, replace(layout, memory_utilization=share), number)
        both = Candidate(mode, trainer, engines, found)
        if both.colocated is not None and both.colocated.fits:
            return both if engines.memory.fits else None
    return None


TINY = workload(prompts=16, group=4)
GRADED = workload(reward_s=0.6)
CASES: dict[str, tuple[Problem, Mode]] = {
    "one node": (problem(nodes=1, work=TINY), "disaggregated"),
    "one node, asynchronous": (problem(nodes=1, work=TINY, asynchronous=True), "disaggregated"),
    "two nodes": (problem(nodes=2, work=TINY), "disaggregated"),
    "three nodes, asynchronous": (problem(nodes=3, work=TINY, asynchronous=True), "disaggregated"),
    "8B, two nodes": (problem(LLAMA_8B, nodes=2, asynchronous=True), "disaggregated"),
    "8B, three nodes, passes": (problem(LLAMA_8B, nodes=3, work=workload(
        logprob_pass=True, reference=True)), "disaggregated"),
    "70B, four nodes, LoRA": (problem(builtin("llama3-70b"), nodes=4, asynchronous=True, lora_rank=16,
                                      pins=Pins(tp=8)), "disaggregated"),
    "70B, six nodes, pinned TP and CP": (problem(builtin("llama3-70b"), nodes=6, asynchronous=True, pins=Pins(
        tp=8, cp=1)), "disaggregated"),
    "experts": (problem(builtin("qwen3-30b-a3b"), nodes=4, pins=Pins(pp=1)), "disaggregated"),
    "pinned sizes": (problem(LLAMA_8B, nodes=3, asynchronous=True, pins=Pins(tp=4, pp=2, rollout_tp=2)),
                     "disaggregated"),
    "pinned nodes": (problem(LLAMA_8B, nodes=3, asynchronous=True, pins=Pins(training_nodes=1)), "disaggregated"),
    "pinned replicas": (problem(LLAMA_8B, nodes=3, pins=Pins(replicas=4, dp=4)), "disaggregated"),
    "pins that leave GPUs idle": (problem(LLAMA_8B, nodes=4, pins=Pins(replicas=3, dp=3, tp=2)), "disaggregated"),
    "two nodes, second copy": (problem(nodes=2, work=TINY, asynchronous=True, shadow=True), "disaggregated"),
    "staleness bounded": (problem(LLAMA_8B, nodes=3, asynchronous=True, max_staleness=3), "disaggregated"),
    "rewards bind": (problem(nodes=3, work=GRADED, reward_workers=4), "disaggregated"),
    "rewards bind, asynchronous": (problem(nodes=3, work=GRADED, asynchronous=True), "disaggregated"),
    "overlap": (problem(LLAMA_8B, nodes=3, overlap=True), "disaggregated"),
    "colocated": (problem(LLAMA_8B, nodes=2), "colocated"),
    "colocated, fits with recomputation only": (problem(LLAMA_8B, nodes=1, token_budget=38400, pins=Pins(
        tp=4, cp=1, pp=1, memory_utilization=0.8)), "colocated"),
    "hybrid, 8B": (problem(LLAMA_8B, nodes=1, pins=Pins(memory_utilization=0.87, cp=1)), "hybrid"),
    "hybrid": (problem(SMALL, nodes=2, work=TINY, pins=Pins(memory_utilization=0.5)), "hybrid"),
    "spare nodes": (problem(SMALL, nodes=4, work=TINY, spare_nodes=2), "disaggregated")}


@pytest.mark.parametrize("name", CASES)
def test_the_best_of_all(name):
    found, mode = CASES[name]
    everything = list(_all(found, mode))
    assert len(everything) > 3
    mine = Search(found, mode).best()
    assert mine is not None
    least = min(everything, key=lambda each: (each.step_s, each.units))
    assert (mine.step_s, mine.units) == (least.step_s, least.units), (mine.training.layout, least.training.layout)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_division_has_its_own_best(asynchronous):
    found = problem(LLAMA_8B, nodes=3, asynchronous=asynchronous)
    search = Search(found)
    everything = list(_all(found, "disaggregated"))
    for training in (1, 2):
        mine = search.best(training_units=training)
        assert mine is not None and mine.training.units == training
        assert mine.step_s == min(each.step_s for each in everything if each.training.units == training)


def test_fewer_units_are_searched_with_what_is_known():
    """Searching sizes one after the other gives what a search of each size alone gives."""
    found = problem(LLAMA_8B, nodes=5, asynchronous=True)
    search = Search(found)
    for units in (5, 3, 4, 2):
        alone = Search(problem(LLAMA_8B, nodes=units, asynchronous=True)).best()
        together = search.best(units)
        assert alone is not None and together is not None
        assert (alone.step_s, alone.training.layout) == (together.step_s, together.training.layout)


def test_nothing_fits_is_none():
    assert Search(problem(builtin("llama3-70b"), nodes=1)).best() is None


def test_the_space_says_why_a_size_is_left_out():
    search = Search(problem(SMALL, nodes=2, pins=Pins(tp=16)))
    assert search.best() is None
    assert "a node has 8 GPUs" in search.space.rejected["TP 16"]
    uneven = Search(problem(replace(SMALL, layers=7), nodes=2))
    assert uneven.best() is not None and "7 layers" in uneven.space.rejected["PP 2"]


def test_the_engine_takes_what_a_hybrid_trainer_leaves():
    """Of the configured share as much as fits beside the trainer's resident state, in steps of 0.05."""
    found = problem(LLAMA_8B, nodes=2, pins=Pins(memory_utilization=0.9))
    mine = Search(found, "hybrid").best()
    assert mine is not None and mine.colocated is not None and mine.colocated.fits
    share = mine.rollout.layout.memory_utilization
    assert share < 0.9
    more = RolloutOption(found, replace(mine.rollout.layout, memory_utilization=share + 0.05), mine.rollout.units)
    roomier = Candidate("hybrid", mine.training, more, found).colocated
    assert roomier is not None and not roomier.fits


@pytest.mark.parametrize("mode", ["colocated", "hybrid"])
def test_partitions_that_take_turns_are_synchronous(mode):
    """Whatever the configuration says: their phases add up."""
    mine = Search(problem(LLAMA_8B, nodes=2, asynchronous=True, pins=Pins(memory_utilization=0.6)), mode).best()
    assert mine is not None and mine.staleness == 0
    assert mine.step_s > mine.rollout.seconds + mine.training.seconds


def test_a_limit_on_the_staleness_makes_the_trainer_wait():
    free = Search(problem(LLAMA_8B, nodes=3, asynchronous=True)).best()
    assert free is not None and free.staleness > 1
    for limit in range(1, free.staleness + 2):
        mine = Search(problem(LLAMA_8B, nodes=3, asynchronous=True, max_staleness=limit)).best()
        assert mine is not None and mine.staleness <= limit
        update_s = (mine.training.seconds + mine.sync_s) * (1 + mine.problem.coefficients.rl.other_share)
        pace_s = (mine.rollout.time.latency_max_s + mine.reward.last_s + update_s) / (limit + 1)
        assert mine.step_s >= max(free.step_s, pace_s) * (1 - 1e-12)
        assert mine.waits == (mine.step_s == pytest.approx(pace_s, rel=1e-9) and limit < free.staleness)
    assert mine.step_s == free.step_s


def test_feasible_says_whether_there_is_a_best():
    for nodes in (1, 2, 4, 5, 6):
        search = Search(problem(builtin("llama3-70b"), nodes=nodes))
        assert search.feasible() == (search.best() is not None)


@pytest.mark.parametrize("lora", [0, 16])
@pytest.mark.parametrize("nics", [8, 4])
def test_the_bound_of_the_sync_is_one(lora, nics):
    """No pair of layouts syncs faster than the search takes for possible; with senders enough, some do as fast."""
    found = problem(LLAMA_8B, nodes=6, lora_rank=lora, work=workload(prompts=256))
    found = replace(found, cluster=replace(found.cluster, nics_per_node=nics, rails=nics))
    search, tight = Search(found), 0
    for training in (1, 3, 5):
        for trainer in search.training_options(training)[::5]:
            for engines in search.rollout_options(6 - training):
                least = search._least_sync_s(trainer.layout, engines.layout)
                seconds = Candidate("disaggregated", trainer, engines, found).sync_s
                assert least <= seconds
                tight += least == seconds
    assert tight or nics < 8
