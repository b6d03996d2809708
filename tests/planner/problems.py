"""Small planning problems, and the whole space of a small one searched without any bound."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from launch.cluster.file import load_cluster
from launch.cluster.spec import ClusterSpec
from launch.coefficients.site import SiteCoefficients
from launch.config.load import LoadedConfig, load_config
from launch.model.architecture import Architecture
from launch.model.builtin import from_builtin
from launch.planner.explain.remedies import with_nodes
from launch.planner.search.candidate import Candidate
from launch.planner.search.problem import Mode, Problem
from launch.planner.search.search import Search
from launch.planner.search.space import Pins
from launch.planner.workload.lengths import LogNormal
from launch.planner.workload.workload import Workload

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SMALL = Architecture(layers=8, hidden=1024, ffn=2816, heads=16, kv_heads=8, head_dim=64, vocab=32000, tied=True)


@lru_cache(maxsize=32)
def builtin(name: str) -> Architecture:
    return from_builtin(name, "here")


@lru_cache(maxsize=32)
def h100(nodes: int) -> ClusterSpec:
    return with_nodes(load_cluster(CONFIGS / "clusters" / "h100x8.yaml"), nodes)


def workload(**changes) -> Workload:
    return replace(Workload(prompts=64, group=8, updates=1, prompt_tokens=256, max_prompt_tokens=512,
                            lengths=LogNormal(1024, 0.9, 4096), logprob_pass=False, reference=False,
                            reference_offload=False, target=None), **changes)


FREE = Pins()


def problem(shape: Architecture = SMALL, nodes: int = 2, pins: Pins = FREE, work: Workload | None = None,
            **changes) -> Problem:
    return replace(Problem(shape=shape, workload=work or workload(), cluster=h100(nodes), pins=pins,
                           coefficients=SiteCoefficients()), **changes)


def loaded(name: str, *words: str) -> LoadedConfig:
    """A shipped configuration, such as `70b/grpo.yaml`, with overrides."""
    return load_config(CONFIGS / name, [f"data.train={CONFIGS / 'tiny' / 'train.jsonl'}", *words])


def best(found: Problem, mode: Mode = "disaggregated") -> Candidate:
    candidate = Search(found, mode).best()
    assert candidate is not None
    return candidate


def with_numbers(target, **numbers):
    """A copy of a model in which fields or parts have these values, whatever its formulas say."""
    other = replace(target)
    other.__dict__.update(numbers)
    return other
