"""Whatever a configuration or a cluster file says, planning ends in a plan or in a message."""

from __future__ import annotations

import json

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.cluster.file import load_cluster, parse_cluster
from launch.cluster.spec import ClusterSpec
from launch.config.checks import check
from launch.config.load import load_config
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.planner.prepare import OnCluster, prepare_for
from tests.planner.problems import CONFIGS, h100


def fuzz(examples: int):
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


sizes = st.one_of(st.sampled_from(["auto", 1, 2, 4, 8]), st.integers(1, 40),
                  st.sampled_from([-1, 0, 10**6, 1.5, "null", "x"]))
counts = st.one_of(st.integers(1, 300), st.sampled_from([0, -4, 10**7, 2.5, "null"]))
figures = st.one_of(st.floats(0.01, 1e5), st.sampled_from([0, -1, 1e300, "nan", "inf", ".nan", "null", "x", True]))
KEYS = {
    **dict.fromkeys(("trainer.tp", "trainer.pp", "trainer.vpp", "trainer.cp", "trainer.dp", "rollout.tp",
                     "rollout.replicas", "placement.training_nodes", "rollout.max_num_seqs"), sizes),
    **dict.fromkeys(("algorithm.prompts_per_step", "algorithm.group_size", "algorithm.updates_per_batch",
                     "placement.spare_nodes", "model.lora_rank", "algorithm.max_staleness"), counts),
    **dict.fromkeys(("rollout.max_prompt_tokens", "rollout.max_new_tokens", "trainer.token_budget"),
                    st.one_of(st.integers(1, 40000), counts)),
    **dict.fromkeys(("workload.prompt_tokens", "workload.response.mean", "workload.response.sigma",
                     "workload.target_prompts_per_hour", "weight_sync.bucket_mb", "algorithm.kl.beta"), figures),
    "rollout.memory_utilization": st.one_of(st.floats(0.001, 1), figures),
    "trainer.sequence_parallel": st.sampled_from([True, False, "auto", 3]),
    "trainer.share_prompts": st.sampled_from(["on", "off", "auto"]),
    "rollout.max_num_batched_tokens": st.one_of(st.integers(8, 600), counts),
    "trainer.recompute": st.sampled_from(["none", "selective", "full", "auto", "some"]),
    "trainer.dtype": st.sampled_from(["bf16", "fp32", "fp8"]),
    "rollout.dtype": st.sampled_from(["bf16", "fp32", "fp8"]),
    "trainer.distributed_optimizer": st.booleans(), "rollout.enforce_eager": st.booleans(),
    "algorithm.asynchronous": st.booleans(), "algorithm.old_logprobs": st.sampled_from(["none", "recompute"]),
    "algorithm.kl.reference_offload": st.booleans(), "placement.tp_across_nodes": st.booleans(),
    "placement.mode": st.sampled_from(["disaggregated", "colocated", "hybrid", "auto", "both"]),
    "workload.response.distribution": st.sampled_from(["lognormal", "fixed", "histogram", "file"]),
    "workload.response.values": st.sampled_from(["[100, 200]", "[]", "[0]", "[5, 5]", "null"]),
    "workload.response.counts": st.sampled_from(["[1, 2]", "[0, 0]", "[-1, 2]", "[1]", "null"]),
    "model.path": st.sampled_from(["qwen2.5-7b", "qwen3-30b-a3b", "llama3.1-8b", "llama3-70b", "llama9", ".", "\0"])}


def words(draw_from: dict, most: int):
    return st.lists(st.sampled_from(sorted(draw_from)), max_size=most, unique=True).flatmap(
        lambda keys: st.tuples(*(draw_from[key].map(lambda value, key=key: f"{key}={_yaml(value)}") for key in keys)))


def _yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def outcome(name: str, overrides: tuple[str, ...], cluster: ClusterSpec) -> OnCluster | UserError:
    try:
        return prepare_for(load_config(CONFIGS / name, overrides), cluster)
    except UserError as error:
        assert error.exit_code in (ExitCode.USER_ERROR, ExitCode.NO_FEASIBLE_PLAN)
        return error


@fuzz(40)
@given(st.sampled_from(["7b/grpo.yaml", "70b/grpo.yaml", "70b/grpo_lora.yaml"]), words(KEYS, 6), st.integers(1, 6))
def test_any_configuration(name, overrides, nodes):
    _check(outcome(name, overrides, h100(nodes)))


VALID = {key: KEYS[key] for key in ("trainer.recompute", "algorithm.old_logprobs", "algorithm.asynchronous",
                                    "placement.mode",
                                    "placement.tp_across_nodes", "trainer.distributed_optimizer",
                                    "rollout.enforce_eager")} | {
    **dict.fromkeys(("trainer.tp", "rollout.tp", "trainer.cp"), st.sampled_from([1, 2, 4, 8])),
    "trainer.pp": st.integers(1, 10), "trainer.vpp": st.integers(1, 4), "trainer.dp": st.integers(1, 12),
    "rollout.replicas": st.integers(1, 12), "algorithm.prompts_per_step": st.integers(1, 200),
    "algorithm.group_size": st.integers(2, 20), "algorithm.max_staleness": st.integers(1, 4),
    "placement.training_nodes": st.integers(1, 4), "placement.spare_nodes": st.integers(0, 2),
    "rollout.memory_utilization": st.sampled_from([0.1, 0.5, 0.99, 1.0]), "model.lora_rank": st.sampled_from([1, 64])}


@fuzz(25)
@given(words(VALID, 5), st.integers(1, 5))
def test_any_plausible_configuration(overrides, nodes):
    _check(outcome("7b/grpo.yaml", overrides, h100(nodes)))


def _check(made: OnCluster | UserError) -> None:
    """A plan keeps its promises whatever it was made from."""
    if isinstance(made, UserError):
        return
    forecast, found = made.plan.forecast, made.found
    check(made.loaded.resolved(made.plan.chosen), made.plan.architecture, made.plan.device)
    assert forecast.throughput.nominal > 0
    assert forecast.throughput.low <= forecast.throughput.nominal <= forecast.throughput.high
    assert all(sum(row.components.values()) == row.total <= row.limit for row in forecast.memory)
    assert forecast.split.training + forecast.split.rollout + forecast.split.spare == forecast.cluster.nodes
    limit = made.config.algorithm.max_staleness
    assert limit is None or forecast.staleness.versions <= limit
    assert len(made.seating.training) == found.training.layout.gpus


scalars = st.one_of(st.none(), st.booleans(), st.integers(-5, 200), st.floats(allow_nan=True), st.text(max_size=8),
                    st.sampled_from(["H100-SXM-80GB", "A100", "node[001-004]", "node[1", "a,b,a", "B200"]))
values = st.recursive(scalars, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(
    st.sampled_from(["count", "names", "kind", "per_node", "nics_per_node", "rails", "name", "nodes", "value",
                     "source"]),
    inner, max_size=4)), max_leaves=6)
PLACES = [("nodes",), ("nodes", "count"), ("nodes", "names"), ("gpus",), ("gpus", "kind"), ("gpus", "per_node"),
          ("gpus", "memory_gb"), ("gpus", "nvlink_gb_per_s"), ("network",), ("network", "nics_per_node"),
          ("network", "nic_gbit_per_s"), ("network", "rails"), ("network", "switches"), ("network", "nvlink_nodes"),
          ("host",), ("host", "memory_gb"), ("node_mtbf_hours",), ("coefficients",), ("name",), ("else",)]


@fuzz(150)
@given(st.lists(st.tuples(st.sampled_from(PLACES), values), min_size=1, max_size=3))
def test_any_cluster_file(changes):
    content = yaml.safe_load((CONFIGS / "clusters" / "h100x2.yaml").read_text(encoding="utf-8"))
    for place, value in changes:
        at = content
        for part in place[:-1]:
            at = at.setdefault(part, {}) if isinstance(at, dict) else {}
        if isinstance(at, dict):
            at[place[-1]] = value
    try:
        spec = parse_cluster(yaml.safe_dump(content), "cluster.yaml")
    except UserError:
        return
    if spec.total_gpus <= 64:
        _check(outcome("7b/grpo.yaml", (), spec))


@fuzz(25)
@given(st.integers(1, 5), st.integers(1, 12), st.sampled_from([1, 2, 4, 8, 12]), st.booleans(),
       st.sampled_from(["A100-SXM-40GB", "H20-96GB", "H100-SXM-80GB", "B200"]), st.floats(1, 1600))
def test_any_cluster(nodes, gpus, nics, rails, kind, gbit):
    content = {"nodes": {"count": nodes}, "gpus": {"kind": kind, "per_node": gpus}, "host": {"memory_gb": 512},
               "network": {"nics_per_node": nics, "nic_gbit_per_s": gbit, "rails": nics if rails else 1}}
    try:
        spec = parse_cluster(yaml.safe_dump(content), "cluster.yaml")
    except UserError:
        return
    _check(outcome("7b/grpo.yaml", (), spec))


def test_the_shipped_cluster_files_are_read():
    for path in (CONFIGS / "clusters").glob("*.yaml"):
        assert load_cluster(path).nodes
