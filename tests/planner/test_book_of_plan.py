"""The book of a plan names every input: change one given number, and no line changes that does not rest on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

import pytest

from launch.fabric.estimate import swap_seconds
from launch.plan.book import Book, line
from launch.planner.explain.evaluate import book_of
from launch.planner.search.candidate import Candidate
from launch.planner.search.options import RolloutOption
from launch.planner.search.problem import Mode, Problem
from launch.planner.search.space import Pins
from launch.planner.workload.lengths import LogNormal
from tests.planner.problems import best, builtin, problem, workload

LONG = workload(prompt_tokens=300, lengths=LogNormal(1024, 0.9, 4096))


def _pinned(mode: Mode, found: Problem, training: dict, rollout: dict | None = None) -> Candidate:
    """The best candidate with layouts replaced, so that every formula has something to do."""
    at = best(found, mode)
    layout = replace(at.training.layout, **training)
    if "pp" in training:
        layout = replace(layout, layers_of_stage=(found.shape.layers // layout.pp,) * layout.pp)
    return replace(at, training=replace(at.training, layout=layout),
                   rollout=replace(at.rollout, layout=replace(at.rollout.layout, **(rollout or {}))))


@pytest.fixture(autouse=True)
def without_ticks(monkeypatch):
    """A sync in whole milliseconds hides what a small model's dimensions change."""
    monkeypatch.setattr("launch.planner.search.candidate.SYNC_TICK_S", 1e-12)


@lru_cache(maxsize=16)
def case(name: str) -> Candidate:
    layout = {"tp": 2, "pp": 2, "vpp": 2, "cp": 2, "dp": 4, "sequence_parallel": True}
    if name == "async":
        return _pinned("disaggregated", problem(nodes=6, asynchronous=True, max_staleness=1),
                       layout | {"pp": 4, "dp": 2},
                       {"tp": 2})
    if name == "async, second copy":
        return _pinned("disaggregated", problem(nodes=6, asynchronous=True, shadow=True, disk_every=10), layout,
                       {"tp": 2})
    if name == "sync":
        return _pinned("disaggregated", problem(nodes=6), layout | {"vpp": 1}, {"tp": 2})
    if name == "many updates":
        return _pinned("disaggregated", problem(nodes=6, work=replace(LONG, updates=2, prompts=512)), layout,
                       {"tp": 4, "max_num_seqs": 64})
    if name == "lora":
        return _pinned("disaggregated", problem(builtin("llama3-8b"), nodes=6, asynchronous=True, lora_rank=16),
                       layout)
    if name == "fp8":
        return _pinned("disaggregated", problem(builtin("llama3-8b"), nodes=6, asynchronous=True), layout | {
            "precision": "fp8"}, {"weight_precision": "fp8", "kv_precision": "fp8", "tp": 4})
    if name == "reference":
        return _pinned("disaggregated", problem(nodes=6, work=replace(LONG, logprob_pass=True, reference=True)), layout)
    if name == "offloaded reference, recomputation":
        return _pinned("disaggregated", problem(nodes=6, work=replace(LONG, reference=True, reference_offload=True)),
                       layout | {"recompute": ("full",)})
    if name == "teacher":
        work = replace(LONG, teacher_offload=True, reference=True)
        return _pinned("disaggregated", replace(problem(nodes=6, work=work), teacher=builtin("qwen2.5-7b")),
                       layout | {"vpp": 1})
    if name == "experts":
        return _pinned("disaggregated", problem(builtin("qwen3-30b-a3b"), nodes=8, asynchronous=True),
                       layout | {"ep": 2, "dp": 8}, {"tp": 2})
    if name == "TP over nodes":
        return _pinned("disaggregated", problem(builtin("llama3-70b"), nodes=8), {
            "tp": 8, "pp": 2, "cp": 2, "vpp": 1, "dp": 1}, {"tp": 16, "replicas": 2})
    if name == "fp32":
        return _pinned("disaggregated", problem(nodes=6), layout | {"precision": "fp32"}, {"weight_precision": "fp32",
                                                                                          "kv_precision": "fp32"})
    if name in ("colocated", "hybrid"):
        return _pinned(name, problem(builtin("llama3-8b"), nodes=4, pins=Pins(memory_utilization=0.4)), layout)
    if name == "cache of a CPU":
        return _pinned("disaggregated", problem(nodes=2, kv_tokens=20_000), layout | {"dp": 1}, {"max_num_seqs": 512})
    assert name == "one node"
    return _pinned("disaggregated", problem(nodes=1), {"tp": 2, "pp": 1, "cp": 1, "vpp": 1, "dp": 2, "recompute": ()},
                   {"tp": 2, "replicas": 2})


CASES = ("async", "async, second copy", "sync", "many updates", "lora", "fp8", "fp32", "reference",
         "offloaded reference, recomputation", "teacher", "experts", "TP over nodes", "colocated", "hybrid",
         "cache of a CPU", "one node")
PLACES = ("problem", "problem.shape", "problem.cluster", "problem.cluster.gpu", "problem.workload",
          "problem.workload.lengths", "training.layout", "rollout.layout",
          *(f"problem.coefficients.{name}" for name in (
              "training", "collectives", "memory", "rollout", "sync", "rl", "reliability")))
"""Objects whose fields are given numbers."""
BOTH_WAYS = ("tp", "cp", "dp", "max_num_seqs", "token_budget", "bucket_bytes", "prompts", "group", "prompt_tokens",
             "hbm_bandwidth", "nvlink_bandwidth", "nic_bandwidth", "nics_per_node", "gpus_per_node", "chunk_latency_s")
"""Fields of which a maximum, or a rounding, may hide one direction."""
TOGETHER = ("pp", "fsdp", "layers")
"""Fields that change only with others; `layers_of_stage` says how many layers there are."""


def others(name: str, value: Any) -> Iterator[Any]:
    """Other values of a field, up and down; none of what is no number."""
    if isinstance(value, bool):
        yield not value
    elif value in ("bf16", "fp8", "fp32"):
        yield from {"bf16", "fp8", "fp32"} - {value}
    elif name == "recompute":
        yield () if value else ("full",)
    elif name == "layers_of_stage" and len(value) > 1:
        yield (value[0] - 1, value[1] + 1, *value[2:])
    elif name == "nodes" and len(value) > 1:
        yield (*value, "one-more")
    elif name == "mlp_matrices":
        yield 5 - value
    elif isinstance(value, (int, float)):
        yield 2 * value
        if name in BOTH_WAYS:
            yield value // 2 or 1 if isinstance(value, int) else value / 30


def replaced(at: Any, path: str, **values: Any) -> Any:
    """A copy of a tree of dataclasses with fields of the object at `path` replaced."""
    name, _, rest = path.partition(".")
    return replace(at, **{name: replaced(getattr(at, name), rest, **values)}) if name else replace(at, **values)


def changed(at: Candidate, path: str, name: str) -> Iterator[Candidate]:
    """The candidate with other values of one field."""
    for value in others(name, getattr(attrgetter(path)(at), name)):
        made = replaced(at, path, **{name: value})
        yield replace(made, training=replace(made.training, problem=made.problem),
                      rollout=replace(made.rollout, problem=made.problem))


def dependents(book: Book, keys: set[str]) -> set[str]:
    """The keys, and those of all lines that rest on them."""
    reached = set(keys)
    for each in book:           # inputs are written before what they are used for
        if reached.intersection(each.inputs):
            reached.add(each.key)
    return reached


def unnamed(before: Book, after: Book) -> tuple[set[str], set[str]]:
    """(given numbers that differ, lines that differ and rest on none of them)."""
    given = {each.key for each in before if not each.inputs and (
        each.key not in after or after[each.key].value != each.value)}
    moved = {each.key for each in before if each.key not in after or after[each.key].value != each.value}
    return given, moved - dependents(before, given)


@pytest.mark.parametrize("name", CASES)
def test_no_line_changes_that_is_not_named(name):
    """Every field that is a given number, one after the other, up and down, far."""
    at = case(name)
    before, found, tried = book_of(at, {}), [], 0
    for path in PLACES:
        for field in fields(attrgetter(path)(at)):
            for other in changed(at, path, field.name) if field.name not in TOGETHER else ():
                given, missed = unnamed(before, book_of(other, {}))
                tried += bool(given)
                found += [f"{path}.{field.name}: {each}" for each in sorted(missed) if given]
    assert tried > 100
    assert not found, f"{len(found)} inputs that no line names\n" + "\n".join(found)


def test_a_number_that_is_read_past_the_book_is_found(monkeypatch):
    """One formula takes its coefficients from behind the view: its line is named no more, and the test above says
    so."""
    def hidden(option: Any) -> float:
        return swap_seconds(option.memory.weights, getattr(option, "_target", option).problem.coefficients.sync)

    at = case("async")
    (other, *_) = changed(at, "problem.coefficients.sync", "copy_rate")
    assert unnamed(book_of(at, {}), book_of(other, {}))[1] == set()
    monkeypatch.setattr(RolloutOption, "swap_s", line("s", "as before", key="sync.swap_s")(hidden))
    assert unnamed(book_of(at, {}), book_of(other, {})) == ({"coefficients.sync.copy_rate"}, {"sync.swap_s"})


TRAINING = ("problem.shape.hidden", "problem.cluster.gpu.bf16_flops", "problem.workload.prompts", "training.layout.tp",
            "training.layout.dp", "training.layout.recompute", "problem.token_budget",
            "problem.coefficients.training.gemm_bf16", "problem.coefficients.rl.train_efficiency")
ROLLING = ("rollout.layout.tp", "rollout.layout.replicas", "problem.workload.lengths.sigma",
           "problem.workload.prompt_tokens", "problem.cluster.gpu.hbm_bandwidth",
           "problem.coefficients.rl.rollout_efficiency", "problem.coefficients.rollout.hbm")


@pytest.mark.parametrize("name, key, places", [
    ("async", "phase.train_s", TRAINING), ("async", "phase.rollout_s", ROLLING),
    ("sync", "step.total_s", (*TRAINING, *ROLLING, "problem.cluster.nic_bandwidth",
                              "problem.coefficients.sync.pause_s")),
    ("experts", "phase.train_s", ("problem.shape.experts", "problem.shape.moe_ffn", "problem.shape.experts_per_token",
                                  "training.layout.ep", "problem.coefficients.rl.mixture_efficiency")),
    ("reference", "phase.reference_s", (*TRAINING, "problem.coefficients.rl.logprob_factor")),
    ("lora", "phase.train_s", TRAINING), ("lora", "sync.replica_bytes", ("problem.lora_rank",)),
    ("fp8", "phase.train_s", ("problem.cluster.gpu.fp8_flops", "problem.coefficients.training.gemm_fp8",
                              "training.layout.precision")),
    ("colocated", "step.total_s", ("problem.coefficients.rl.refit_bandwidth", *TRAINING)),
    ("hybrid", "phase.sync_s", ("problem.cluster.gpu.nvlink_bandwidth", "rollout.layout.tp",
                                "problem.coefficients.sync.digest_rate"))])
def test_what_matters_moves_the_line(name, key, places):
    at = case(name)
    before = book_of(at, {})[key].value
    for place in places:
        moved = [book_of(other, {})[key].value for other in changed(at, *place.rsplit(".", 1))]
        assert moved and any(value != before for value in moved), place


def test_slots_name_the_cache_that_they_count():
    """On a CPU the configuration says how large the cache is; memory there is not predicted."""
    inputs = book_of(case("cache of a CPU"), {})["rollout.slots"].inputs
    assert "rollout.kv_tokens" in inputs and "memory.rollout.kv_tokens" not in inputs
    assert "memory.rollout.kv_tokens" in book_of(case("sync"), {})["rollout.slots"].inputs


@pytest.mark.parametrize("place, lines", [
    ("rl.response_s", {"phase.rollout_s"}),
    ("rl.update_s", {"phase.train_s", "phase.pass_s"}),
    ("rl.other_share", set()),
    ("sync.pause_s", {"sync.direct.seconds", "sync.chain.seconds", "sync.tree.seconds", "sync.seconds",
                      "phase.sync_s", "sync.swap_s"})])
def test_exactly_these_lines_change(place, lines):
    """Of a synchronous plan; the step and what is made from it change as well."""
    at = case("sync")
    before = book_of(at, {})
    always = {f"coefficients.{place}", "step.total_s", "step.prompts_per_hour", "reliability.every_steps",
              "reliability.effective_time_ratio"}
    for other in changed(at, *f"problem.coefficients.{place}".rsplit(".", 1)):
        after = book_of(other, {})
        moved = {entry.key for entry in before if after[entry.key].value != entry.value}
        assert moved | always == lines | always and moved >= lines | {"step.total_s"}


def test_a_computed_number_names_only_lines_above_it():
    for name in CASES:
        seen: set[str] = set()
        for entry in book_of(case(name), {}):
            assert seen.issuperset(entry.inputs), entry.key
            assert entry.formula if entry.inputs else entry.source, entry.key
            seen.add(entry.key)


def test_the_search_and_the_explanation_compute_the_same():
    """What the book says of a candidate is what the search compared, although the book computes it anew."""
    for found in (problem(nodes=3), problem(nodes=3, asynchronous=True),
                  problem(nodes=2, work=workload(logprob_pass=True, reference=True))):
        at = best(found)
        book = book_of(at, {})
        for key, value in (("step.total_s", at.step_s), ("phase.train_s", at.training.train_s),
                           ("phase.rollout_s", at.rollout.seconds), ("phase.sync_s", at.sync_s),
                           ("memory.training.total", at.training.memory.total), ("sync.seconds", at.sync.seconds),
                           ("memory.rollout.kv_tokens", at.rollout.memory.kv_tokens)):
            assert book[key].value == value, key
