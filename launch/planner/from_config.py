"""The planner's door: turns a configuration into a `Problem`, and a candidate into values of the configuration's open
keys and into the plan. Only this module and `launch.planner.prepare` know configurations."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from launch.cluster.spec import ClusterSpec
from launch.coefficients.site import SiteCoefficients
from launch.config import auto
from launch.config.load import LoadedConfig, ResolvedLoaded, load_config
from launch.config.resolved import ResolvedConfig, open_keys, value
from launch.config.schema import Trainer
from launch.errors import UserError
from launch.model.architecture import VOCAB_MULTIPLE, Architecture
from launch.model.padding import round_up, sequence_multiple
from launch.plan.layouts import layers_of_stage, rank_coordinates
from launch.plan.plan import BatchPlan, EnginePlan, Plan, RolloutPlan, TeacherPlan, TrainingPlan
from launch.planner.search.candidate import Candidate
from launch.planner.search.options import FEWEST_SEQUENCES
from launch.planner.search.problem import MODES, Origin, Problem, with_token_budget
from launch.planner.search.space import KEY_OF_PIN, RECOMPUTE, Pins
from launch.planner.workload.lengths import Counted, Lengths
from launch.planner.workload.workload import Workload, assumed_lengths

MIB, GIB = 1 << 20, 1 << 30
TEXT_REWARDS = ("exact_match", "format", "length")
"""Built-in rewards that only read the text (`megatron_rl.rewards.functions`)."""
ASYNCHRONOUS_FROM = 1_000_000
"""Sampled tokens per step below which `algorithm.max_staleness: auto` is 0: so small a step ends soon, and on-policy
samples are worth more than the seconds."""


def problem_of(loaded: LoadedConfig, shape: Architecture, cluster: ClusterSpec,
               teacher: Architecture | None = None) -> Problem:
    """The problem that a configuration poses for a cluster.

    Args:
        teacher: the model of `algorithm.distillation.teacher`, if there is one.

    Raises:
        UserError: the response lengths are impossible.
    """
    config, mode = loaded.config, loaded.config.placement.mode
    opened = open_keys(config)
    workload, bound = workload_of(loaded), config.algorithm.max_staleness
    asynchronous = workload.sequences * workload.lengths.mean >= ASYNCHRONOUS_FROM if bound == "auto" else bound > 0
    given = {"model": loaded.where("model.path"), "workload": f"{loaded.path}, workload", "cluster": config.cluster}
    given |= {"reward": f"{loaded.path}, reward"}
    given |= {"teacher": loaded.where("algorithm.distillation.teacher")} if teacher else {}
    given |= {key: str(source) for key, source in loaded.sources.items() if source.kind in ("file", "override")
              and key.startswith(("trainer.", "rollout.")) and key not in opened}
    return with_token_budget(Problem(
        shape=shape, workload=workload, cluster=cluster, pins=pins_of(loaded, cluster.gpu.device),
        coefficients=SiteCoefficients.of(cluster.coefficients), modes=MODES if mode == "auto" else (mode,),
        asynchronous=asynchronous, border=asynchronous and config.rollout.swap == "border",
        lora_rank=config.model.lora_rank or 0,
        route=config.weight_sync.route, bucket_bytes=int(config.weight_sync.bucket_mb * MIB),
        shadow=config.weight_sync.staging == "shadow",
        max_staleness=bound if asynchronous and bound != "auto" else None, overlap=config.algorithm.overlap,
        running_kv="none" if not asynchronous or config.weight_sync.in_flight == "drain" else
        "kept" if config.rollout.keep_kv else "dropped",
        # A copy, since the book tells objects apart by their identity.
        teacher=replace(teacher) if teacher else None,
        reward_workers=config.reward.workers,
        spare_nodes=config.placement.spare_nodes, disk_every=config.weight_sync.disk.every,
        async_save=config.checkpoint.async_save,
        origin=Origin(loaded.path, {key: loaded.where(key) for key in loaded.sources}, given)))


def problem_of_attempt(config_yaml: Path, plan: Plan, cluster: ClusterSpec) -> Problem:
    """The problem of an attempt, with all its chosen values pinned."""
    resolved = load_config(config_yaml).resolved(plan.chosen)
    return problem_of(resolved, plan.architecture, cluster, plan.teacher.architecture if plan.teacher else None)


def pins_of(loaded: LoadedConfig, device: Literal["cpu", "gpu"]) -> Pins:
    """The sizes that the configuration fixes."""
    config = loaded.config
    trainer, rollout = config.trainer, config.rollout
    sizes = {name: value(config, key) for name, key in KEY_OF_PIN.items()}
    whole = trainer.share_prompts == "on"        # a prompt that completions share cannot be split
    return Pins(
        **{name: None if size == "auto" else size for name, size in sizes.items()},
        precision=trainer.dtype, rollout_precision=rollout.dtype, distributed_optimizer=trainer.distributed_optimizer,
        overlap_grad_reduce=trainer.overlap_grad_reduce,
        hidden_gathers=_hidden_gathers(trainer, config.algorithm.optimizer_steps),
        fused_gradients=trainer.gradient_accumulation_fusion in (True, "auto") and device == "gpu",
        memory_utilization=rollout.memory_utilization, cuda_graphs=not rollout.enforce_eager,
        tp_across_nodes=config.placement.tp_across_nodes, max_num_batched_tokens=rollout.max_num_batched_tokens,
        kv_cache_bytes=int(rollout.kv_cache_gb * GIB) if device == "cpu" else None,
        allow_cp=not whole and not (device == "gpu" and trainer.dtype == "fp32"), allow_sequence_parallel=not whole)


def _hidden_gathers(trainer: Trainer, updates: int) -> float:
    """The weight sync follows the last of the updates. Without the distributed optimizer, the gather is the second half
    of an all-reduce of gradients."""
    if not trainer.distributed_optimizer:
        return float(trainer.overlap_grad_reduce)
    return (updates - 1) / updates if trainer.gathers_overlap else 0.0


def least(loaded: LoadedConfig, problem: Problem, architecture: Architecture) -> ResolvedLoaded:
    """The configuration with open keys at their least demanding values, so that a check finds only wrong fixed values.
    """
    config, pins = loaded.config, problem.pins
    values = {key: auto.LOCAL[key] for key in open_keys(config) if key in auto.LOCAL}
    values |= {"trainer.token_budget": problem.token_budget}
    if pins.max_num_seqs is None:
        values["rollout.max_num_seqs"] = FEWEST_SEQUENCES
    if pins.sequence_parallel is None:
        values["trainer.sequence_parallel"] = pins.allow_sequence_parallel and (pins.tp or 1) > 1
    elif pins.sequence_parallel and pins.tp is None:
        values["trainer.tp"] = 2            # the search tries only TP > 1
    if pins.pp is None and (pins.vpp or 1) > 1:
        models = [architecture, *([problem.teacher] if problem.teacher else [])]
        fitting = (pp for pp in range(2, architecture.layers + 1)
                   if all(each.layers % (pp * (pins.vpp or 1)) == 0 for each in models))
        values["trainer.pp"] = next(fitting, 2)
    return loaded.resolved(values)


def chosen_values(found: Candidate, loaded: LoadedConfig) -> dict[str, Any]:
    """Values of the configuration's open keys, and of keys that the chosen mode does not allow as written."""
    config = loaded.config
    training, rollout, pins = found.training.layout, found.rollout.layout, found.problem.pins
    names = {modules: name for name, modules in RECOMPUTE.items()}
    values: dict[str, Any] = {
        "trainer.tp": training.tp, "trainer.pp": training.pp, "trainer.vpp": training.vpp, "trainer.cp": training.cp,
        "trainer.dp": training.dp, "trainer.sequence_parallel": training.sequence_parallel,
        "trainer.recompute": names[training.recompute], "trainer.token_budget": found.problem.token_budget,
        "rollout.replicas": rollout.replicas, "rollout.tp": rollout.tp, "rollout.max_num_seqs": rollout.max_num_seqs,
        "placement.training_nodes": found.training.units, "placement.mode": found.mode,
        "algorithm.max_staleness": found.staleness}
    chosen = {key: values[key] for key in open_keys(config)}
    if found.mode != "disaggregated" and config.algorithm.max_staleness:
        chosen["algorithm.max_staleness"] = 0           # trainer and engine take turns on a GPU
    if found.mode != "disaggregated" and config.algorithm.overlap:
        chosen["algorithm.overlap"] = False
    if found.mode != "disaggregated" and config.weight_sync.staging == "shadow":
        chosen["weight_sync.staging"] = "in_place"
    if rollout.memory_utilization != pins.memory_utilization:
        chosen["rollout.memory_utilization"] = rollout.memory_utilization
    return chosen


def plan_of(config: ResolvedConfig, architecture: Architecture, device: Literal["cpu", "gpu"],
            chosen: Mapping[str, Any] | None = None, teacher: Architecture | None = None) -> Plan:
    """The plan of a run, without a forecast. Pure: the same inputs give the same bytes. Run
    `launch.config.checks.check` first, since it explains values that contradict each other.

    Args:
        chosen: the values of the configuration that the user did not write.
        teacher: the model of `algorithm.distillation.teacher`, if there is one.

    Raises:
        UserError: the layers cannot be laid out over the pipeline.
    """
    trainer, rollout, algorithm = config.trainer, config.rollout, config.algorithm
    training = TrainingPlan(
        tp=trainer.tp, pp=trainer.pp, vpp=trainer.vpp, cp=trainer.cp, dp=trainer.dp,
        sequence_parallel=trainer.sequence_parallel,
        **_of_model(architecture, config),
        ranks=rank_coordinates(trainer.tp, trainer.cp, trainer.dp, trainer.pp))
    engines = tuple(EnginePlan(replica=replica, tp=rollout.tp) for replica in range(rollout.replicas))
    shared = trainer.share_prompts != "off" and auto.can_share_prompts(trainer.cp, trainer.sequence_parallel, device)
    batch = BatchPlan(
        prompts_per_step=algorithm.prompts_per_step, group_size=algorithm.group_size,
        samples_per_step=algorithm.prompts_per_step * algorithm.group_size,
        updates_per_batch=algorithm.optimizer_steps, token_budget=trainer.token_budget,
        sequence_multiple=sequence_multiple(trainer.tp, trainer.cp, trainer.sequence_parallel), share_prompts=shared)
    return Plan(config_hash=config_hash(config), architecture=architecture, device=device, training=training,
                rollout=RolloutPlan(tp=rollout.tp, engines=engines), batch=batch,
                teacher=TeacherPlan(architecture=teacher, **_of_model(teacher, config)) if teacher else None,
                chosen=dict(chosen or {}))


def _of_model(architecture: Architecture, config: ResolvedConfig) -> dict[str, Any]:
    """What the trainer's sizes make of a model."""
    trainer = config.trainer
    return {"padded_vocab": round_up(architecture.vocab, VOCAB_MULTIPLE * trainer.tp),
            "layers_of_stage": layers_of_stage(architecture.layers, trainer.pp, trainer.vpp)}


def config_hash(config: ResolvedConfig) -> str:
    """Hash of the values. The text of the file, such as comments, does not count."""
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]


def workload_of(loaded: LoadedConfig) -> Workload:
    """The workload of a configuration.

    Raises:
        UserError: the lengths are impossible, for example a mean above the cap, or a file has no lengths.
    """
    config = loaded.config
    asked, longest_prompt = config.workload.response, config.rollout.max_prompt_tokens
    prompt = config.workload.prompt_tokens or longest_prompt / 2
    if prompt > longest_prompt:
        raise UserError(f"workload.prompt_tokens = {prompt:g} is a mean above rollout.max_prompt_tokens = "
                        f"{longest_prompt}", where=loaded.where("workload.prompt_tokens", "rollout.max_prompt_tokens"),
                        fix=f"use a mean of at most {longest_prompt}, or a higher limit")
    kl, rewards = config.algorithm.kl, [each.function for each in config.reward.functions]
    return Workload(
        prompts=config.algorithm.prompts_per_step, group=config.algorithm.group_size,
        updates=config.algorithm.updates_per_batch, epochs=config.algorithm.epochs, prompt_tokens=prompt,
        max_prompt_tokens=longest_prompt,
        lengths=_lengths(loaded), logprob_pass=config.algorithm.old_logprobs == "recompute",
        interpolated=config.algorithm.old_logprobs == "interpolate",
        flat_groups=config.workload.flat_groups if config.algorithm.dynamic_sampling.enabled else 0.0,
        reference=kl.beta > 0, reference_offload=kl.reference_offload,
        teacher_offload=config.algorithm.distillation.offload,
        math_rewards=rewards.count("math"), text_rewards=sum(name in TEXT_REWARDS for name in rewards),
        own_rewards=sum(":" in name for name in rewards), reward_s=config.workload.reward_s,
        target=config.workload.target_prompts_per_hour, measured_lengths=asked.distribution == "file",
        assumed_sigma=asked.sigma if asked.distribution == "lognormal" else None,
        assumed_mean=asked.distribution == "lognormal" and asked.mean is None)


def _lengths(loaded: LoadedConfig) -> Lengths:
    asked, cap = loaded.config.workload.response, loaded.config.rollout.max_new_tokens
    where = loaded.where("workload.response.distribution", "rollout.max_new_tokens")
    try:
        if asked.distribution == "lognormal":
            return assumed_lengths(asked.mean, asked.sigma, cap)
        if asked.distribution == "fixed":
            return Counted.of({round(asked.mean or cap): 1.0}, cap=cap)
        if asked.distribution == "histogram":
            return Counted.of(_pairs(loaded), cap=cap)
        if asked.path is None:
            raise UserError("workload.response.distribution = file needs workload.response.path",
                            fix="name a JSONL of completions")
        return Counted.from_file(asked.path, cap)
    except UserError as error:
        raise UserError(error.what, where=error.where or where, fix=error.fix) from error


def _pairs(loaded: LoadedConfig) -> dict[int, float]:
    asked = loaded.config.workload.response
    values, counts = asked.values or [], asked.counts or []
    if not values or len(values) != len(counts):
        raise UserError(f"a histogram needs as many counts as values: {len(values)} values, {len(counts)} counts",
                        where=loaded.where("workload.response.values", "workload.response.counts"),
                        fix="write both lists with one entry per length")
    return dict(zip(values, counts, strict=True))
