"""The book of the chosen candidate: its given numbers, and all lines of its models. The lines are read from the same
objects that the search compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from launch.plan.book import Book
from launch.plan.layouts import PRECISION_BYTES
from launch.planner.search.candidate import Candidate

RECOMPUTE_SHARE = {(): 0.0, ("full",): 1.0}
"""Recomputation as a number in the book: 0 none, 1 full, 0.5 some modules."""
NOT_PLANNED = ("post_norm", "family", "norm_eps", "max_positions", "initializer_range", "rope", "names")
"""Fields of the model that affect no number."""
UNITS = {"hbm_bytes": "bytes", "usable_bytes": "bytes", "hbm_bandwidth": "bytes/s", "nvlink_bandwidth": "bytes/s",
         "bf16_flops": "FLOP/s", "fp8_flops": "FLOP/s", "fp32_flops": "FLOP/s", "weight_bytes": "bytes",
         "kv_bytes": "bytes", "grad_bytes": "bytes", "precision": "bytes"}

Source = Callable[[str], str]
"""Key -> source of its value."""


def book_of(found: Candidate, sources: Mapping[str, str]) -> Book:
    """Every number of the candidate.

    Args:
        sources: key of a given number, or a prefix of it (`model`, `trainer.tp`) -> its source.
    """
    book = Book()
    write_givens(book, found, _source_of(sources))
    found = book.view(found)
    training, rollout = found.training, found.rollout
    held, memory, engine = training.held, training.memory, rollout.memory
    _ = found.parameters    # reading it writes its lines, which must come first
    passes = [training.time, training.forward]
    book.write(training.work, held, *held.stages)
    if found.problem.teacher:
        book.write(training.teacher, *training.teacher.stages)
        passes.append(training.teacher_forward)
    book.write(memory, *memory.stages)
    for time in passes:
        book.write(time.layer, time.head, time)
    book.write(training, engine, rollout.engine, rollout.time, rollout)
    if found.sync is not None:
        book.write(*found.sync.routes.values(), found.sync.limits, found.sync)
    if found.colocated is not None:
        book.write(found.colocated)
    book.write(found.reward, found, found.failures)
    return book


def write_givens(book: Book, found: Candidate, source: Source) -> None:
    """Write the given numbers: all numeric fields of the model's shape, the GPU, the layouts and the coefficients, and
    the numbers of the cluster, the workload and the configuration that formulas read."""
    problem, cluster, workload = found.problem, found.problem.cluster, found.problem.workload

    def given(target: object, attribute: str, key: str, unit: str, origin: str = "",
              value: float | None = None) -> None:
        number = getattr(target, attribute) if value is None else value
        book.given(key, number, unit, source(origin or key))
        book.name(target, attribute, key)

    def given_fields(prefix: str, target: Any, **renamed: str) -> None:
        for each in fields(target):
            key, number = renamed.get(each.name, each.name), _number(each.name, getattr(target, each.name))
            if number is not None and each.name not in NOT_PLANNED:
                given(target, each.name, f"{prefix}.{key}", UNITS.get(key, ""), value=number)

    given_fields("model", problem.shape)
    if problem.teacher:
        given_fields("teacher", problem.teacher)
    if problem.lora_rank:
        given(problem, "lora_rank", "model.lora_rank", "")
    given_fields("gpu", cluster.gpu)
    given(cluster, "nodes", "cluster.nodes", "nodes", value=len(cluster.nodes))
    for name, unit in (("gpus_per_node", "GPUs"), ("nics_per_node", "NICs"), ("rails", "rails"),
                       ("nic_bandwidth", "bytes/s"), ("node_mtbf_hours", "h")):
        given(cluster, name, f"cluster.{name}", unit)
    given(problem, "bucket_bytes", "sync.bucket_bytes", "bytes", "weight_sync.bucket_mb")
    if problem.shadow:
        given(problem, "shadow", "sync.shadow", "", "weight_sync.staging", value=1)
    if problem.border:
        given(problem, "border", "rollout.border", "", "rollout.swap", value=1)
    if problem.max_staleness is not None:
        given(problem, "max_staleness", "algorithm.max_staleness", "versions")
    if problem.running_kv == "dropped" and not problem.border:
        given(problem, "running_kv", "rollout.drops_kv", "", "rollout.keep_kv", value=1)
    if problem.kv_tokens is not None:
        given(problem, "kv_tokens", "rollout.kv_tokens", "tokens", "rollout.kv_cache_gb")
    for name, unit in (("prompts", "prompts"), ("group", "completions per prompt"), ("updates", "optimizer steps"),
                       ("prompt_tokens", "tokens"), ("prompt_copies", "copies per completion"),
                       ("max_prompt_tokens", "tokens")):
        given(workload, name, f"workload.{name}", unit, "workload")
    if workload.epochs > 1:
        given(workload, "epochs", "workload.epochs", "passes", "workload")
    given(problem, "reward_workers", "reward.workers", "processes per node")
    for name in ("math_rewards", "text_rewards", "own_rewards"):
        if getattr(workload, name):
            given(workload, name, f"workload.{name}", "functions", "reward.functions")
    if workload.reward_s is not None:
        given(workload, "reward_s", "workload.reward_s", "s", "workload")
    if workload.flat_groups:
        given(workload, "flat_groups", "workload.flat_groups", "share", "workload")
    for name, unit in (("cap", "tokens"), ("mean", "tokens"), ("second_moment", "tokens^2")):
        given(workload.lengths, name, f"workload.response_{name}", unit, "workload")
    book.describe(workload.lengths, *(f"workload.response_{name}" for name in ("mean", "second_moment", "cap")))
    for group in problem.coefficients.groups:
        for each in fields(group):
            key = f"{group.PREFIX}.{each.name}"
            book.given(key, getattr(group, each.name), each.metadata["unit"],
                       cluster.sources.get(key, each.metadata["source"]))
            book.name(group, each.name, key)
    given_fields("trainer", found.training.layout)
    given(problem, "token_budget", "trainer.token_budget", "tokens")
    given_fields("rollout", found.rollout.layout, weight_precision="weight_bytes", kv_precision="kv_bytes")
    given(found, "nodes", "plan.nodes", "nodes", "planner")
    given(found, "training_nodes", "plan.training_nodes", "nodes", "planner")


def _number(name: str, value: Any) -> float | None:
    """A field as a number in the book: a precision in bytes, recomputation as a share, the layers of the first stage
    for all stages. None: the book does not show the field."""
    if name == "recompute":
        return RECOMPUTE_SHARE.get(value, 0.5)
    if name == "layers_of_stage":
        return value[0] if value else None
    if isinstance(value, str):
        return PRECISION_BYTES.get(value)
    return int(value) if isinstance(value, bool) else value


def _source_of(sources: Mapping[str, str]) -> Source:
    def source(key: str) -> str:
        parts = key.split(".")
        for end in range(len(parts), 0, -1):
            name = ".".join(parts[:end])
            if name in sources:
                return sources[name]
        return "planner"
    return source
