"""This machine as a cluster of one node, and the candidate of a run on it. The sizes come from the configuration, so
nothing is searched."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Literal

from launch.cluster import gpus, inventory, local
from launch.cluster.spec import ClusterSpec, Gpu
from launch.coefficients import cpu
from launch.plan.layouts import RolloutLayout, TrainingLayout
from launch.plan.plan import Plan
from launch.planner.memory.rollout import kv_bytes_per_token
from launch.planner.search.candidate import Candidate
from launch.planner.search.options import RolloutOption, TrainingOption
from launch.planner.search.problem import Mode, Problem
from launch.planner.search.space import RECOMPUTE

NODE = "localhost"
"""Name of the only node in a cluster file that describes this machine."""


def is_here(cluster: ClusterSpec | None) -> bool:
    """Whether a cluster is this machine: it is None, or its only node is `localhost`."""
    return cluster is None or cluster.nodes == (NODE,)


def this_machine(device: Literal["cpu", "gpu"], plan: Plan, threads: int = 1,
                 described: ClusterSpec | None = None) -> ClusterSpec:
    """The cluster that consists of this machine.

    Its coefficients are those of the file that describes the machine, if the file is for the same kind of GPU. On a CPU
    that no file describes, they are those of `launch.coefficients.cpu`. On a CPU every process counts as a GPU. If
    there are more processes than cores, each has its share of a core.

    Args:
        threads: threads of a training rank on a CPU.
        described: the file that describes this machine, if any.

    Raises:
        UserError: there are no figures for this machine's GPUs.
    """
    ranks, engines = plan.training.world_size, sum(engine.tp for engine in plan.rollout.engines)
    if device == "gpu":
        facts = inventory.read()
        assumed = described.gpu if described and described.gpu.device == "gpu" else gpus.H100
        usable = local.gpus() if facts else ()
        kind = (gpus.find(facts.gpu_names[usable[0]], memory_bytes=facts.gpu_bytes[usable[0]]) if facts and usable
                else assumed)
        count = len(usable) or ranks + engines
    else:
        cores = len(os.sched_getaffinity(0))
        kind, count = _share(gpus.find("cpu"), cores / max(ranks * threads, 1)), ranks + engines
    values, sources = _coefficients(kind, described)
    return ClusterSpec(
        name="this machine", nodes=(NODE,), gpus_per_node=max(count, ranks + engines), gpu=kind, nics_per_node=1,
        nic_bandwidth=2e9, rails=1, host_memory_bytes=0,
        coefficients=values, sources=sources)


def _coefficients(kind: Gpu, described: ClusterSpec | None) -> tuple[dict[str, float], dict[str, str]]:
    """(key -> coefficient, key -> its source)."""
    if described and described.gpu.name == kind.name:
        return described.coefficients, described.sources
    if kind.device == "cpu":
        return dict(cpu.MEASURED), dict.fromkeys(cpu.MEASURED, cpu.SOURCE)
    return {}, {}


def _share(core: Gpu, share: float) -> Gpu:
    """A core that `1 / share` processes share. A process uses at most one core."""
    share = min(1.0, share)
    return replace(core, bf16_flops=core.bf16_flops * share, fp8_flops=core.fp8_flops * share,
                   fp32_flops=core.fp32_flops * share, hbm_bandwidth=core.hbm_bandwidth * share)


def pinned_candidate(problem: Problem, plan: Plan, mode: Mode = "disaggregated") -> Candidate:
    """The candidate with exactly the sizes of a plan. The problem must pin recomputation and `max_num_seqs`, which a
    plan does not hold."""
    sizes, pins = plan.training, problem.pins
    assert pins.recompute is not None and pins.max_num_seqs is not None, "a resolved configuration fixes both"
    engine = RolloutLayout(tp=plan.rollout.tp, replicas=len(plan.rollout.engines),
                           kv_precision="bf16" if pins.rollout_precision == "fp8" else pins.rollout_precision,
                           weight_precision=pins.rollout_precision, max_num_seqs=pins.max_num_seqs,
                           memory_utilization=pins.memory_utilization, cuda_graphs=pins.cuda_graphs)
    if plan.batch.share_prompts:
        problem = replace(problem, workload=replace(problem.workload, prompt_copies=1 / problem.workload.group))
    if pins.kv_cache_bytes is not None:
        cache = pins.kv_cache_bytes // kv_bytes_per_token(problem.shape, engine)
        problem = replace(problem, kv_tokens=cache)
    layout = TrainingLayout(
        tp=sizes.tp, pp=sizes.pp, vpp=sizes.vpp, cp=sizes.cp, dp=sizes.dp, sequence_parallel=sizes.sequence_parallel,
        precision=pins.precision, distributed_optimizer=pins.distributed_optimizer,
        overlap_grad_reduce=pins.overlap_grad_reduce, hidden_gathers=pins.hidden_gathers,
        fused_gradients=pins.fused_gradients, recompute=RECOMPUTE[pins.recompute],
        layers_of_stage=tuple(sum(map(len, stage)) for stage in sizes.layers_of_stage))
    training_units, rollout_units = (-(-each.gpus // problem.unit_gpus) for each in (layout, engine))
    return Candidate(mode, TrainingOption(problem, layout, training_units),
                     RolloutOption(problem, engine, rollout_units), problem).staged()
