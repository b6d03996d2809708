"""The chosen candidate computed once more, with the book open: the same functions as in the search, so that the
explanation is the computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields

from launch.model.shape import ModelShape
from launch.plan.book import NO_BOOK, Book
from launch.planner.explain import givens
from launch.planner.parameters import count, lora_count
from launch.planner.search.candidate import Candidate, candidate, rollout_option, training_option
from launch.planner.search.problem import Problem
from launch.planner.time.reliability import Reliability, disk_seconds, reliability


def evaluate(found: Candidate, sources: Mapping[str, str]) -> tuple[Candidate, Reliability, Book]:
    """The candidate, its reliability, and the book of every number.

    Args:
        sources: key of a given number, or a prefix of it (`model`, `trainer.tp`) -> where it came from.
    """
    problem, book = found.problem, Book()
    source = _source_of(sources)
    write_givens(problem, book, source)
    givens.write_trainer(book, found.training.layout, source)
    book.given("trainer.token_budget", problem.token_budget, "tokens", source("trainer.token_budget"))
    givens.write_rollout(book, found.rollout.layout, source)
    training = training_option(problem, found.training.layout, found.training.units, book)
    rollout = rollout_option(problem, found.rollout.layout, found.rollout.units, book, must_fit=False)
    again = candidate(problem, found.mode, training, rollout, book)
    nodes = nodes_used(again)
    book.given("plan.nodes", sum(nodes), "nodes", "planner")
    book.given("plan.training_nodes", nodes[0], "nodes", "planner")
    trained, key = count(problem.shape), "model.parameters"
    if problem.lora_rank:
        trained, key = lora_count(problem.shape, problem.lora_rank, book), "parameters.adapters"
    trust = reliability(trained, again.step_s, sum(nodes), nodes[0], problem.cluster,
                        problem.coefficients.reliability, precision=again.training.layout.precision, parameters_key=key,
                        book=book)
    if problem.disk_every:
        version_to_disk_s(again, book)
    return again, trust, book


def version_to_disk_s(found: Candidate, book: Book = NO_BOOK) -> float:
    """Seconds until a version of the weights is on disk, read back."""
    problem = found.problem
    return disk_seconds(count(problem.shape), nodes_used(found)[0], problem.coefficients.reliability,
                        precision=found.training.layout.precision, book=book)


def write_givens(problem: Problem, book: Book, source: Callable[[str], str]) -> None:
    """What does not depend on the layouts."""
    givens.write_model(book, problem.shape, source)
    book.computed("model.parameters", count(problem.shape), "parameters", "L x layer + V h (twice unless tied) + h",
                  _counted(problem.shape))
    if problem.lora_rank:
        book.given("model.lora_rank", problem.lora_rank, "", source("model.lora_rank"))
    cluster = problem.cluster
    givens.write_gpu(book, cluster.gpu, source)
    for key, value, unit in (("nodes", len(cluster.nodes), "nodes"), ("gpus_per_node", cluster.gpus_per_node, "GPUs"),
                             ("nics_per_node", cluster.nics_per_node, "NICs"), ("rails", cluster.rails, "rails"),
                             ("nic_bandwidth", cluster.nic_bandwidth, "bytes/s"),
                             ("node_mtbf_hours", cluster.node_mtbf_hours, "h")):
        book.given(f"cluster.{key}", value, unit, source(f"cluster.{key}"))
    book.given("sync.bucket_bytes", problem.bucket_bytes, "bytes", source("weight_sync.bucket_mb"))
    if problem.shadow:
        book.given("sync.shadow", 1, "", source("weight_sync.staging"))
    if problem.max_staleness is not None:
        book.given("algorithm.max_staleness", problem.max_staleness, "versions", source("algorithm.max_staleness"))
    if problem.kv_tokens is not None:
        book.given("rollout.kv_tokens", problem.kv_tokens, "tokens", source("rollout.kv_cache_gb"))
    problem.workload.write(book, source("workload"))
    problem.coefficients.write(book, cluster.sources)


def _counted(shape: ModelShape) -> list[str]:
    """Fields that the number of parameters depends on."""
    unused = {"name", "experts_per_token", *(("ffn",) if shape.experts else ("moe_ffn", "shared_ffn"))}
    return [f"model.{each.name}" for each in fields(shape) if each.name not in unused]


def nodes_used(found: Candidate) -> tuple[int, int]:
    """(nodes that train, nodes that only roll out); a single node that does both counts as a training node. Without GPUs
    an engine fills no slots of a node: each has a node to itself as far as the nodes go (`launch.planner.seats.local`)."""
    problem = found.problem
    if len(problem.cluster.nodes) == 1:
        return 1, 0
    training, rollout = found.training.units, found.rollout.units if found.mode == "disaggregated" else 0
    if problem.cluster.gpu.device == "cpu":
        left = len(problem.cluster.nodes) - problem.spare_nodes - training
        rollout = max(rollout, min(found.rollout.layout.replicas, left))
    return training, rollout


def _source_of(sources: Mapping[str, str]) -> Callable[[str], str]:
    def source(key: str) -> str:
        parts = key.split(".")
        for end in range(len(parts), 0, -1):
            name = ".".join(parts[:end])
            if name in sources:
                return sources[name]
        return "planner"
    return source
