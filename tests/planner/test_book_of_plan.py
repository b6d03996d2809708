"""The book of a plan names every input and no other: change one given number, and exactly the lines that rest on it
change."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from functools import lru_cache

import pytest

from launch.coefficients.site import SiteCoefficients
from launch.plan.book import Book
from launch.plan.layouts import TrainingLayout
from launch.planner.explain.evaluate import evaluate
from launch.planner.search.candidate import Candidate
from launch.planner.search.problem import Mode, Problem
from launch.planner.search.space import Pins
from launch.planner.workload.lengths import LogNormal
from tests.planner.problems import best, builtin, problem, workload

LONG = workload(prompt_tokens=300, lengths=LogNormal(1024, 0.9, 4096))


def _pinned(mode: Mode, found: Problem, training: dict, rollout: dict | None = None) -> Candidate:
    """The best candidate with layouts replaced, so that every formula has something to do."""
    at = best(found, mode)
    layout = replace(at.training.layout, **training)
    stages = () if "pp" not in training else tuple(found.shape.layers // layout.pp for _ in range(layout.pp))
    return replace(at, training=replace(at.training, layout=replace(layout, layers_of_stage=stages or
                                                                     layout.layers_of_stage)),
                   rollout=replace(at.rollout, layout=replace(at.rollout.layout, **(rollout or {}))))


@pytest.fixture(autouse=True)
def without_ticks(monkeypatch):
    """A sync in whole milliseconds hides what a small model's dimensions change."""
    monkeypatch.setattr("launch.planner.search.candidate.SYNC_TICK_S", 1e-12)


@lru_cache(maxsize=16)
def case(name: str) -> Candidate:
    layout = {"tp": 2, "pp": 2, "vpp": 2, "cp": 2, "dp": 4, "sequence_parallel": True}
    if name == "async":
        return _pinned("disaggregated", problem(nodes=6, asynchronous=True), layout | {"pp": 4, "dp": 2}, {"tp": 2})
    if name == "async, second copy":
        return _pinned("disaggregated", problem(nodes=6, asynchronous=True, shadow=True), layout, {"tp": 2})
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


CASES = ("async", "async, second copy", "sync", "many updates", "lora", "fp8", "fp32", "reference", "offloaded reference, recomputation",
         "experts", "TP over nodes", "colocated", "hybrid", "cache of a CPU", "one node")


def book_of(candidate: Candidate) -> Book:
    return evaluate(candidate, {})[2]


PRECISIONS = ("bf16", "fp8", "fp32")
FAR = 30
MODEL_SIZES = {"layers": lambda n: 2 * n, "hidden": lambda n: 2 * n, "ffn": lambda n: 2 * n, "heads": lambda n: 2 * n,
               "kv_heads": lambda n: 2 * n, "head_dim": lambda n: 2 * n, "vocab": lambda n: 3 * n,
               "tied": lambda on: not on, "mlp_matrices": lambda n: 5 - n, "qkv_bias": lambda on: not on,
               "qk_norm": lambda on: not on, "all_biases": lambda on: not on, "learned_positions": lambda n: n + 4096,
               "experts": lambda n: 2 * n, "experts_per_token": lambda n: n and n + 1, "moe_ffn": lambda n: 2 * n,
               "shared_ffn": lambda n: n + 512}
TRAINER = {"tp": lambda n: [2 * n], "pp": None, "vpp": lambda n: [3 - n if n < 3 else 1], "cp": lambda n: [2 * n],
           "dp": lambda n: [2 * n, max(1, n // 2)], "ep": lambda n: [2 * n], "etp": lambda n: [2 * n], "fsdp": None,
           "sequence_parallel": lambda on: [not on], "recompute": lambda names: [() if names else ("full",)],
           "precision": lambda kind: [each for each in PRECISIONS if each != kind], "grad_bytes": lambda n: [6 - n],
           "distributed_optimizer": lambda on: [not on], "fused_attention": lambda on: [not on],
           "layers_of_stage": lambda counts: [moved for at in range(1, len(counts)) if counts[0] > 1 for moved in [
               (counts[0] - 1, *(n + (i == at) for i, n in enumerate(counts) if i))]]}
ROLLOUT = {"tp": lambda n: [2 * n], "pp": lambda n: [2 * n], "replicas": lambda n: [2 * n],
           "weight_bytes": lambda kind: [each for each in PRECISIONS if each != kind],
           "kv_bytes": lambda kind: [each for each in PRECISIONS if each != kind],
           "max_num_seqs": lambda n: [max(1, n // 8), 8 * n], "memory_utilization": lambda share: [0.9 * share, 1.0],
           "cuda_graphs": lambda on: [not on]}
"""Field -> other values of it; None: no value of it alone makes sense."""


def changed(at: Candidate, key: str) -> list[Candidate]:
    """The candidate with the given number `key` changed; [] where it cannot be changed alone."""
    section, _, name = key.partition(".")
    found = at.problem
    if section == "model":
        if name == "lora_rank":
            return [_with(at, lora_rank=2 * found.lora_rank)]
        if not found.shape.experts and name in ("experts", "experts_per_token", "moe_ffn"):
            return []
        value = MODEL_SIZES[name](getattr(found.shape, name))
        other = _with(at, shape=replace(found.shape, **{name: value}))
        if name == "layers" and at.training.layout.layers_of_stage:      # the two go together
            other = _layout(other, layers_of_stage=tuple(2 * n for n in at.training.layout.layers_of_stage))
        return [other]
    if section == "gpu":
        value = getattr(found.cluster.gpu, name)
        return [_with(at, cluster=replace(found.cluster, gpu=replace(found.cluster.gpu, **{
            name: round(factor * value) if isinstance(value, int) else factor * value})))
            for factor in (1 / FAR, 0.5, 2, FAR)]
    if section == "cluster":
        if name == "nodes":     # a single node is divided by GPUs, several by nodes
            more = (*found.cluster.nodes, "one-more")
            return [_with(at, cluster=replace(found.cluster, nodes=more))] if len(more) > 2 else []
        value = getattr(found.cluster, name)
        values = {"node_mtbf_hours": [12345.0], "rails": [1], "nic_bandwidth": [value * 2, value / FAR]}.get(
            name, [1, value // 2, 16 * value])
        return [_with(at, cluster=replace(found.cluster, **{name: each})) for each in values]
    if section == "trainer":
        return _other_trainer(at, name)
    if key == "rollout.kv_tokens":
        return [_with(at, kv_tokens=factor * found.kv_tokens // 16) for factor in (1, 256)]
    if section == "rollout":
        field = {"weight_bytes": "weight_precision", "kv_bytes": "kv_precision"}.get(name, name)
        return [replace(at, rollout=replace(at.rollout, layout=replace(at.rollout.layout, **{field: value})))
                for value in ROLLOUT[name](getattr(at.rollout.layout, field))]
    if key == "sync.shadow":
        return [_with(at, shadow=False)]
    if section == "sync":
        return [_with(at, bucket_bytes=8 * found.bucket_bytes), _with(at, bucket_bytes=found.bucket_bytes // 64)]
    if section == "workload":
        return [_with(at, workload=each) for each in _other_workload(found, name)]
    if section == "plan":
        return []
    assert section == "coefficients", key
    group, _, name = name.partition(".")
    for member in fields(SiteCoefficients):
        values = getattr(found.coefficients, member.name)
        if values.PREFIX == f"coefficients.{group}":
            return [_with(at, coefficients=replace(found.coefficients, **{
                member.name: values.changed({name: factor * getattr(values, name)})})) for factor in (1 / FAR, 0.5, 1.7, FAR)]
    raise AssertionError(key)


def _with(at: Candidate, **changes) -> Candidate:
    return replace(at, problem=replace(at.problem, **changes))


def _other_trainer(at: Candidate, name: str) -> list[Candidate]:
    if name == "token_budget":
        return [_with(at, token_budget=2 * at.problem.token_budget), _with(at, token_budget=at.problem.token_budget // 4)]
    layout: TrainingLayout = at.training.layout
    change = TRAINER[name]
    if change is None or (name in ("ep", "etp") and not at.problem.shape.experts):
        return []
    return [_layout(at, **{name: value}) for value in change(getattr(layout, name))]


def _layout(at: Candidate, **changes) -> Candidate:
    return replace(at, training=replace(at.training, layout=replace(at.training.layout, **changes)))


def _other_workload(found: Problem, name: str) -> list:
    work = found.workload
    if name in ("prompts", "group", "updates", "prompt_tokens", "max_prompt_tokens"):
        value = getattr(work, name)
        return [replace(work, **{name: value // 2 or 2}), replace(work, **{name: 8 * value})]
    lengths = work.lengths
    if name == "response_cap":
        return []           # the cap alone cannot change: the second moment goes with it
    if name == "response_second_moment":
        return [replace(work, lengths=replace(lengths, sigma=sigma)) for sigma in (0.3, 1.3)]
    return []


HIDDEN = {
    r"(training|logprob)\.slowest_stage|memory\.training\.worst_stage": "the number of a stage: another only if order changes",
    r"memory\.training\.total": "the largest stage's",
    r"memory\.training\.stage\d\.allocated": "workspace: max(0, layer - logits); reference: max(0, copy - activations)",
    r"memory\.training\.stage\d\.chunks": "the smaller of what the pipeline and the micro-batches allow",
    r"memory\.training\.stage\d\.(activations|optimizer)": "cancels: chunks of 1/VPP; EP's fewer experts, fewer copies",
    r"memory\.host\.needed": "the ranks that one node holds",
    r"memory\.rollout\.total": "what weights take more, the cache takes less",
    r"memory\.rollout\.kv_tokens|training\.pp_bubble_s|logprob\.(pp_bubble_s|layer_s|total_s)|phase\.pass_s":
        "smaller than a rounding of integers or floats",
    r"memory\.rollout\.(weights|kv_bytes_per_token)|rollout\.engine\.kv_s": "no rank holds less than a KV head",
    r"(training|logprob)\.layer\.cp_s": "max(0, ring - attention)",
    r"training\.dp_s": "the smaller of traffic and compute is hidden",
    r"training\.optimizer_s": "cancels: EP's fewer experts, fewer copies",
    r"work\.micro_batch(es|_tokens)": "rounded up to whole micro-batches",
    r"phase\.imbalance": "max(1, longest / share)",
    r"rollout\.slots": "the smaller of max_num_seqs and the cache",
    r"rollout\.(queued_tokens|steady_s)": "0 where no request queues",
    r"rollout\.prefill_s": "a prompt is prefilled once, whatever G",
    r"rollout\.tail_s": "max(weights, compute)",
    r"rollout\.engine\.(reduce_s|reduce_token_s|prefill_token_s)": "the slower of NVLink and NICs; whether TP leaves a node",
    r"step\.total_s": "the slower partition of an asynchronous step",
    r"reliability\.every_steps": "whole steps",
    r"sync\.(seconds|floor_s)": "the fastest route; the largest floor",
    r"sync\.transfers|sync\.(chain|tree)\.hops": "a count",
    r"sync\.\w+\.(chunk_bytes|rollout_staging_bytes)": "whole MiB, at most a bucket",
    r"sync\.\w+\.(trainer_nic_out|rollout_nic_in|rollout_nic_out|nvlink)_bytes": "of the busiest only",
    r"sync\.\w+\.(wire_s|lower_bound_s)": "of the busier of NIC and NVLink",
    r"sync\.floor\.(egress|source)_s|sync\.replica_bytes": "of the busiest shard; KV heads repeated over TP",
    r"sync\.(natural_)?cross_rail_bytes": "of transfers without a holder on their rail only"}
"""Entries that a number below them need not move, and why. Everything else moves whenever an input does."""


def _given(book: Book) -> dict[str, float]:
    return {entry.key: entry.value for entry in book if not entry.inputs}


@pytest.mark.parametrize("name", CASES)
def test_exactly_the_lines_that_rest_on_a_changed_number_change(name):
    """Up and down, far: no other line moves; of the dependents all do, but those that a maximum or a rounding hides."""
    at = case(name)
    before = book_of(at)
    given = _given(before)
    unnamed, stuck, tried = [], [], 0
    for key in given:
        ever = set()
        others = changed(at, key)
        for other in others:
            tried += 1
            after = book_of(other)
            keys = {key, *(each for each, value in _given(after).items() if given.get(each, value) != value)}
            moved = {entry.key for entry in before if entry.key not in after or after[entry.key].value != entry.value}
            unnamed += [f"{key}: {each}" for each in sorted(moved - keys - {
                each for source in keys for each in before.dependents(source)})]
            ever |= moved | {key}
        if others:
            stuck += [f"{key}: {each}" for each in before.dependents(key) if each not in ever
                      and ever.intersection(before[each].inputs)
                      and not any(re.fullmatch(pattern, each) for pattern in HIDDEN)]
    assert tried > 100
    assert not unnamed, f"{len(unnamed)} inputs that no entry names\n" + "\n".join(unnamed)
    assert not stuck, f"{len(stuck)} inputs that change nothing\n" + "\n".join(stuck)


TRAINING = ("model.hidden", "gpu.bf16_flops", "workload.prompts", "trainer.tp", "trainer.dp",
            "trainer.recompute", "trainer.token_budget", "coefficients.training.gemm_bf16",
            "coefficients.rl.train_efficiency")
ROLLING = ("rollout.tp", "rollout.replicas", "workload.response_second_moment", "workload.prompt_tokens",
           "gpu.hbm_bandwidth", "coefficients.rl.rollout_efficiency", "coefficients.rollout.hbm")


@pytest.mark.parametrize("name, line, keys", [
    ("async", "phase.train_s", TRAINING), ("async", "phase.rollout_s", ROLLING),
    ("sync", "step.total_s", (*TRAINING, *ROLLING, "cluster.nic_bandwidth", "coefficients.sync.pause_s")),
    ("experts", "phase.train_s", ("model.experts", "model.moe_ffn", "model.experts_per_token", "trainer.ep",
                                  "coefficients.rl.mixture_efficiency")),
    ("reference", "phase.reference_s", (*TRAINING, "coefficients.rl.logprob_factor")),
    ("lora", "phase.train_s", TRAINING), ("lora", "sync.replica_bytes", ("model.lora_rank",)),
    ("fp8", "phase.train_s", ("gpu.fp8_flops", "coefficients.training.gemm_fp8", "trainer.precision")),
    ("colocated", "step.total_s", ("coefficients.rl.refit_bandwidth", *TRAINING)),
    ("hybrid", "phase.sync_s", ("gpu.nvlink_bandwidth", "rollout.tp", "coefficients.sync.digest_rate"))])
def test_what_matters_moves_the_line(name, line, keys):
    at = case(name)
    before = book_of(at)[line].value
    for key in keys:
        moved = [book_of(other)[line].value for other in changed(at, key)]
        assert moved and any(value != before for value in moved), key


def test_slots_name_the_cache_that_they_count():
    """On a CPU the configuration says how large the cache is; memory there is not predicted."""
    inputs = book_of(case("cache of a CPU"))["rollout.slots"].inputs
    assert "rollout.kv_tokens" in inputs and "memory.rollout.kv_tokens" not in inputs
    assert "memory.rollout.kv_tokens" in book_of(case("sync"))["rollout.slots"].inputs


@pytest.mark.parametrize("key, lines", [
    ("coefficients.rl.response_s", {"phase.rollout_s"}),
    ("coefficients.rl.update_s", {"phase.train_s", "phase.pass_s"}),
    ("coefficients.rl.other_share", set()),
    ("coefficients.sync.pause_s", {"sync.direct.seconds", "sync.chain.seconds", "sync.tree.seconds", "sync.seconds",
                                   "phase.sync_s", "sync.swap_s"})])
def test_exactly_these_lines_change(key, lines):
    """Of a synchronous plan; the step and what is made from it change as well."""
    at = case("sync")
    before = book_of(at)
    always = {key, "step.total_s", "step.prompts_per_hour", "reliability.every_steps",
              "reliability.effective_time_ratio"}
    for other in changed(at, key):
        after = book_of(other)
        moved = {entry.key for entry in before if after[entry.key].value != entry.value}
        assert moved | always == lines | always and moved >= lines | {"step.total_s"}


def test_a_computed_number_names_only_lines_above_it():
    for name in CASES:
        seen: set[str] = set()
        for entry in book_of(case(name)):
            assert seen.issuperset(entry.inputs), entry.key
            assert entry.formula if entry.inputs else entry.source, entry.key
            seen.add(entry.key)


def test_the_search_and_the_explanation_compute_the_same():
    """With the book open, every number of the candidate is the one that the search compared."""
    for found in (problem(nodes=3), problem(nodes=3, asynchronous=True),
                  problem(nodes=2, work=workload(logprob_pass=True, reference=True))):
        candidate = best(found)
        again, _, book = evaluate(candidate, {})
        assert again.step_s == candidate.step_s == book["step.total_s"].value
        assert (again.training, again.rollout, again.sync_s) == (candidate.training, candidate.rollout,
                                                                 candidate.sync_s)
