"""All cross-checks of a configuration: keys that must agree with each other or with the model.

Each message gives the key with its value, the conflict, the place in the file, and a valid value.
"""

from __future__ import annotations

import json
import math
from typing import Literal

from launch.config.auto import can_share_prompts
from launch.config.load import LoadedConfig, ResolvedLoaded
from launch.config.schema import Algorithm, Reward, RunConfig
from launch.errors import Problems, divisors, one_of
from launch.model.architecture import Architecture
from launch.model.padding import VLLM_VOCAB_MULTIPLE, round_up, sequence_multiple

VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's CPU attention (`CPUAttentionBackend.get_supported_head_sizes`)."""
CAUTIONS: dict[str, str] = {
    "NO_CLIP": "no clip acts on stale tokens",
    "MATH_STOP": "one answer that hangs the `math` reward ends the job, and Slurm does not requeue it",
}
"""Code -> meaning of a warning that the configuration alone shows."""
KV_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
"""`rollout.dtype` -> bytes of an element of the engine's KV cache."""


def check(loaded: ResolvedLoaded, architecture: Architecture, device: Literal["cpu", "gpu"],
          gpus: int | None = None, teacher: Architecture | None = None) -> None:
    """Run all checks.

    Args:
        teacher: the architecture of `algorithm.distillation.teacher`, if there is one.
        gpus: number of GPUs of the machine, if known. Used only with `device == "gpu"`.

    Raises:
        UserError: with all problems at once.
    """
    checker = _Checker(loaded, architecture, device)
    checker.trainer_parallel_sizes()
    checker.pipeline()
    checker.rollout_parallel_sizes()
    checker.lengths()
    checker.share_prompts()
    checker.gradients()
    checker.batch()
    checker.dynamic_sampling()
    checker.loss()
    checker.overlap()
    checker.old_policy()
    checker.rejection()
    checker.distillation()
    if teacher is not None:
        checker.teacher(teacher)
    checker.optimizer()
    checker.engine()
    checker.staging()
    checker.transformer_engine()
    checker.sections_that_need_each_other()
    if device == "gpu" and gpus is not None:
        checker.gpu_count(gpus)
    checker.problems.raise_if_any()


def cautions(config: RunConfig) -> list[tuple[str, str]]:
    """What a run may do, and its user should know from the start: codes and messages. The plan shows them, and the
    run."""
    return [*_no_clip(config.algorithm), *_math_stop(config.reward)]


def _no_clip(algorithm: Algorithm) -> list[tuple[str, str]]:
    stale = algorithm.max_staleness
    if isinstance(stale, int) and stale >= 2 and algorithm.old_logprobs == "none" and algorithm.optimizer_steps == 1:
        return [("NO_CLIP", f"algorithm.max_staleness = {stale} with algorithm.old_logprobs = none and one optimizer "
                            "step per batch: the ratio is 1, so that no clip acts on stale tokens, and only "
                            "algorithm.importance_cap bounds them; use algorithm.old_logprobs=interpolate or recompute "
                            "(docs/corrections.md)")]
    return []


def _math_stop(reward: Reward) -> list[tuple[str, str]]:
    if reward.on_error == "stop" and any(each.function == "math" for each in reward.functions):
        return [("MATH_STOP", "reward.on_error = stop with the reward math: one answer that SymPy cannot finish, such "
                              "as 9^{9^{9^9}}, ends the job with exit code 2, after which it is not requeued; use "
                              "reward.on_error=zero, which leaves such an answer out (docs/rewards.md)")]
    return []


def check_runnable(loaded: LoadedConfig, here: bool, on: Literal["local", "slurm"] = "local") -> None:
    """Refuse settings that can be planned but not run, and a cluster other than the one the job will run on. Raises
    UserError with all such keys. (A mixture of experts is refused when its folder is read.)

    A rehearsal accepts every plan, because it places processes and computes nothing.

    Args:
        here: whether the cluster is this machine.
        on: where the job will run.
    """
    config, problems = loaded.config, Problems(loaded.path)
    for key, planned_only, instead in (
            ("model.lora_rank", config.model.lora_rank is not None, "null"),
            ("placement.mode", config.placement.mode != "disaggregated", "disaggregated")):
        if planned_only and not (on == "slurm" and config.run.rehearse):
            value = json.dumps(loaded.value(key)).strip('"')
            instead_of_training = ", run.rehearse=true" if on == "slurm" else ""
            problems.add(f"{key} = {value} can be planned, but this version does not run it", where=loaded.where(key),
                         fix=f"use {key}={instead}{instead_of_training}, or `megatron-rl plan` only")
    if on == "local" and not here:
        problems.add(f"cluster = {config.cluster} is not this machine", where=loaded.where("cluster"),
                     fix="use --on slurm, cluster=local, or `megatron-rl plan` only")
    if on == "slurm" and here:
        problems.add(f"cluster = {config.cluster} is this machine, not Slurm's nodes",
                     where=loaded.where("cluster"),
                     fix="name the file that describes the nodes: cluster=configs/clusters/h100x2.yaml")
    if config.run.rehearse and on == "local":
        problems.add(f"run.rehearse = {json.dumps(config.run.rehearse)} is only for Slurm jobs",
                     where=loaded.where("run.rehearse"), fix="leave it out, or use --on slurm")
    problems.raise_if_any()


class _Checker:
    def __init__(self, loaded: ResolvedLoaded, architecture: Architecture, device: Literal["cpu", "gpu"]) -> None:
        self.loaded, self.config = loaded, loaded.config
        self.architecture = architecture
        self.device: Literal["cpu", "gpu"] = device
        self.problems = Problems(loaded.path)

    def add(self, what: str, *keys: str, fix: str) -> None:
        self.problems.add(what, where=self.loaded.where(*keys), fix=fix)

    def trainer_parallel_sizes(self) -> None:
        a, tp = self.architecture, self.config.trainer.tp
        for units, what, hint in (
                (a.heads, "attention heads", ""),
                (a.kv_heads, "KV heads (query groups), which the trainer does not split", "; rollout.tp may be larger"),
                (a.ffn, "columns of the feed-forward layer", "")):
            if units % tp:
                self.add(f"trainer.tp = {tp} does not divide the {units} {what}", "trainer.tp",
                         fix=f"use trainer.tp = {divisors(a.heads, a.kv_heads, a.ffn)}{hint}")
                break
        if self.config.trainer.sequence_parallel and tp == 1:
            self.add("trainer.sequence_parallel = true shards the sequence over a TP group, but trainer.tp = 1",
                     "trainer.sequence_parallel", "trainer.tp", fix="use trainer.tp >= 2 or sequence_parallel: false")

    def pipeline(self) -> None:
        a, t = self.architecture, self.config.trainer
        if t.vpp > 1 and t.pp == 1:
            self.add(f"trainer.vpp = {t.vpp} interleaves pipeline stages, but trainer.pp = 1", "trainer.vpp",
                     "trainer.pp", fix="use trainer.pp >= 2 or trainer.vpp = 1")
        elif t.vpp > 1 and a.layers % (t.pp * t.vpp):
            valid = [n for n in range(1, a.layers // t.pp + 1) if a.layers % (t.pp * n) == 0]
            self.add(f"trainer.pp x trainer.vpp = {t.pp} x {t.vpp} does not divide the {a.layers} layers",
                     "trainer.pp", "trainer.vpp",
                     fix=f"with trainer.pp = {t.pp} use trainer.vpp = {one_of(valid)}" if valid else
                     f"choose trainer.pp from {divisors(a.layers)}, or trainer.vpp = 1")
        elif a.layers < t.pp:
            self.add(f"trainer.pp = {t.pp} has more stages than the model has layers ({a.layers})", "trainer.pp",
                     fix=f"use trainer.pp <= {a.layers}")

    def rollout_parallel_sizes(self) -> None:
        a, tp = self.architecture, self.config.rollout.tp
        wrong = self._not_for_vllm(tp)
        if wrong:
            fitting = one_of(n for n in range(1, a.heads + 1) if not self._not_for_vllm(n))
            self.add(f"rollout.tp = {tp} {wrong}", "rollout.tp", fix=f"use rollout.tp = {fitting}")
        if self.device == "cpu" and a.head_dim not in VLLM_CPU_HEAD_SIZES:
            self.add(f"vLLM's CPU attention does not take the model's head size {a.head_dim}", "model.path",
                     fix=f"use a model with head size {one_of(VLLM_CPU_HEAD_SIZES)}")
        if self.config.rollout.dtype == "fp8" and self.config.trainer.dtype != "bf16":
            self.add(f"rollout.dtype = fp8 with trainer.dtype = {self.config.trainer.dtype}: engines quantise the "
                     f"weights that they receive, which must be bf16", "rollout.dtype", "trainer.dtype",
                     fix="use trainer.dtype = bf16, or the same value for both")
        elif self.config.rollout.dtype not in (self.config.trainer.dtype, "fp8"):
            self.add(f"trainer.dtype = {self.config.trainer.dtype} and rollout.dtype = {self.config.rollout.dtype} "
                     f"differ, but the synced weights are compared bit for bit", "trainer.dtype", "rollout.dtype",
                     fix="give both the same value")

    def _not_for_vllm(self, tp: int) -> str:
        """Why vLLM cannot shard the model over `tp` ranks; "" if it can."""
        a = self.architecture
        padded = round_up(a.vocab, VLLM_VOCAB_MULTIPLE)
        if a.heads % tp:
            return f"does not divide the {a.heads} attention heads"
        if a.kv_heads % tp and tp % a.kv_heads:
            return (f"neither divides the {a.kv_heads} KV heads nor is a multiple of them (vLLM shards or replicates "
                    f"whole heads)")
        if not a.engine_divides_kv_heads(tp):
            return (f"exceeds the {a.kv_heads} KV heads, and this model norms its keys over all heads: vLLM gathers "
                    f"them for the norm, which fails with replicated heads")
        if a.ffn % tp:
            return f"does not divide the {a.ffn} columns of the feed-forward layer"
        return f"does not divide the padded vocabulary of {padded}" if padded % tp else ""

    def lengths(self) -> None:
        r, t = self.config.rollout, self.config.trainer
        longest = r.max_prompt_tokens + r.max_new_tokens
        if longest > self.architecture.max_positions:
            self.add(f"rollout.max_prompt_tokens + max_new_tokens = {r.max_prompt_tokens} + {r.max_new_tokens} = "
                     f"{longest} exceeds the model's {self.architecture.max_positions} positions",
                     "rollout.max_prompt_tokens", "rollout.max_new_tokens",
                     fix=f"keep their sum <= {self.architecture.max_positions}")
        multiple = sequence_multiple(t.tp, t.cp, t.sequence_parallel)
        padded = round_up(longest, multiple)
        if t.token_budget < padded:
            self.add(f"trainer.token_budget = {t.token_budget} is below the longest sequence of {longest} tokens "
                     f"(padded to {padded}, a multiple of {multiple})", "trainer.token_budget",
                     "rollout.max_prompt_tokens", "rollout.max_new_tokens",
                     fix=f"use trainer.token_budget >= {padded}")
        elif t.token_budget % multiple:
            self.add(f"trainer.token_budget = {t.token_budget} is not a multiple of {multiple}, the unit that "
                     f"sequences are padded to (2 CP when CP > 1, times TP with sequence parallelism)",
                     "trainer.token_budget", "trainer.cp", "trainer.tp",
                     fix=f"use trainer.token_budget = {round_up(t.token_budget, multiple)}")

    def share_prompts(self) -> None:
        t = self.config.trainer
        if t.share_prompts != "on" or can_share_prompts(t.cp, t.sequence_parallel, self.device):
            return
        key, fix = "trainer.share_prompts", "use trainer.share_prompts = auto, which shares prompts if possible"
        if self.device != "cpu":
            self.add(f"{key} = on, but on a GPU Transformer Engine's attention does not support documents with a "
                     f"shared prefix", key, fix=f"{fix}, or run on the CPU with --device cpu")
        if t.cp > 1:
            self.add(f"{key} = on with trainer.cp = {t.cp}: context parallelism splits every sequence as a whole", key,
                     "trainer.cp", fix=f"{fix}, or trainer.cp = 1")
        if t.sequence_parallel:
            self.add(f"{key} = on with trainer.sequence_parallel = true: logits are then computed once per "
                     f"input token, but a shared prompt's last token predicts for several completions", key,
                     "trainer.sequence_parallel", fix=f"{fix}, or sequence_parallel: false")

    def gradients(self) -> None:
        t, key = self.config.trainer, "trainer.overlap_param_gather"
        if t.overlap_param_gather is True and not t.distributed_optimizer:
            self.add(f"{key} = true with trainer.distributed_optimizer = false: every rank then updates all its "
                     f"parameters, and nothing is gathered", key, "trainer.distributed_optimizer",
                     fix=f"use {key} = auto")
        elif t.overlap_param_gather is True and not t.overlap_grad_reduce:
            self.add(f"{key} = true with trainer.overlap_grad_reduce = false: the parameters then lie in one bucket, "
                     f"which no forward pass can hide", key, "trainer.overlap_grad_reduce", fix=f"use {key} = auto")
        if t.gradient_accumulation_fusion is True and self.device == "cpu":
            key = "trainer.gradient_accumulation_fusion"
            self.add(f"{key} = true needs Transformer Engine's kernels, and this run computes on CPUs", key,
                     fix=f"use {key} = auto, which is on on a GPU")

    def batch(self) -> None:
        al, t = self.config.algorithm, self.config.trainer
        if al.prompts_per_step % al.updates_per_batch:
            self.add(f"algorithm.prompts_per_step = {al.prompts_per_step} does not divide into "
                     f"algorithm.updates_per_batch = {al.updates_per_batch} equal shares of whole groups",
                     "algorithm.prompts_per_step", "algorithm.updates_per_batch",
                     fix=f"use algorithm.updates_per_batch = {divisors(al.prompts_per_step)}")
            return
        samples = al.prompts_per_step // al.updates_per_batch * al.group_size
        # Interleaved pipelines need a multiple of PP micro-batches, each of at least one sequence (verl#1617).
        needed = t.dp * (t.pp if t.vpp > 1 else 1)
        if samples < needed:
            shape = f"trainer.dp = {t.dp}" + (f" x trainer.pp = {t.pp} (interleaved)" if t.vpp > 1 else "")
            self.add(f"an update has {samples} sequences (algorithm.prompts_per_step {al.prompts_per_step} x "
                     f"group_size {al.group_size} / updates_per_batch {al.updates_per_batch}), but {shape} "
                     f"needs {needed}",
                     "algorithm.prompts_per_step", "trainer.dp",
                     fix=f"use algorithm.prompts_per_step >= {-(-needed // al.group_size) * al.updates_per_batch} "
                         f"or fewer ranks")
        if al.prompts_per_step < self.config.rollout.replicas:
            self.add(f"rollout.replicas = {self.config.rollout.replicas} engines share algorithm.prompts_per_step = "
                     f"{al.prompts_per_step} prompts: some would be idle (a group stays on one engine)",
                     "rollout.replicas", "algorithm.prompts_per_step",
                     fix=f"use rollout.replicas <= {al.prompts_per_step}")

    def dynamic_sampling(self) -> None:
        al, key = self.config.algorithm, "algorithm.dynamic_sampling"
        if al.dynamic_sampling.enabled and al.reserve == 0:
            self.add(f"{key}.enabled = true with {key}.max_refill = 0: there is no reserve that could replace a group",
                     f"{key}.max_refill", f"{key}.enabled", fix=f"use {key}.max_refill >= 1, or enabled: false")
        if al.dynamic_sampling.enabled and al.advantage == "reinforce_pp":
            self.add(f"{key}.enabled = true with algorithm.advantage = reinforce_pp: its advantages have no baseline "
                     "of the group, so a group of equal rewards teaches too", f"{key}.enabled", "algorithm.advantage",
                     fix=f"use {key}.enabled = false, or advantage: reinforce_pp_baseline")
        if self.config.workload.flat_groups and not al.dynamic_sampling.enabled:
            self.add(f"workload.flat_groups = {self.config.workload.flat_groups:g} has no effect with {key}.enabled = "
                     "false", "workload.flat_groups", f"{key}.enabled", fix=f"set {key}.enabled, or remove flat_groups")

    def loss(self) -> None:
        al = self.config.algorithm
        if al.loss == "gspo" and al.aggregation != "sequence_mean":
            self.add(f"algorithm.loss = gspo with algorithm.aggregation = {al.aggregation}: its ratio belongs to a "
                     "sequence, and its loss is the mean of sequence means", "algorithm.loss", "algorithm.aggregation",
                     fix="use algorithm.aggregation = sequence_mean")
        if al.loss == "cispo" and al.dual_clip is not None:
            self.add(f"algorithm.dual_clip = {al.dual_clip:g} has no effect with algorithm.loss = cispo",
                     "algorithm.dual_clip", "algorithm.loss", fix="use algorithm.dual_clip = null")

    def overlap(self) -> None:
        """What a part of the batch cannot know, or may not do before the rest is there."""
        al = self.config.algorithm
        if al.overlap and al.advantage in ("reinforce_pp", "reinforce_pp_baseline"):
            self.add(f"algorithm.overlap = true with algorithm.advantage = {al.advantage}: advantages are whitened "
                     "over the whole batch, so no part of it can be trained before the last completion",
                     "algorithm.overlap", "algorithm.advantage",
                     fix="use algorithm.advantage = grpo, grpo_no_std or rloo, or algorithm.overlap = false")
        if al.overlap and al.optimizer_steps > 1:
            self.add(f"algorithm.overlap = true with {al.optimizer_steps} optimizer steps per batch "
                     f"(algorithm.updates_per_batch {al.updates_per_batch} x epochs {al.epochs}): the engines still "
                     "generate the batch when its first step changes the weights", "algorithm.overlap",
                     "algorithm.updates_per_batch", "algorithm.epochs",
                     fix="use algorithm.updates_per_batch = 1 and epochs = 1, or algorithm.overlap = false")

    def old_policy(self) -> None:
        """What compares the engine with the trainer's old policy needs one that is not the engine's own."""
        al = self.config.algorithm
        if al.importance_weight == "sequence" and al.importance_cap is None:
            self.add("algorithm.importance_weight = sequence, and with algorithm.importance_cap = null there is no "
                     "weight", "algorithm.importance_weight", "algorithm.importance_cap",
                     fix="set algorithm.importance_cap, or importance_weight: none")
        if al.old_logprobs != "none" or al.optimizer_steps == 1:
            return
        for key, asked in (("importance_weight", al.importance_weight == "sequence"),
                           ("rejection.rule", al.rejection.rule in ("icepop", "sequence", "geometric"))):
            if asked:
                value = self.loaded.value(f"algorithm.{key}")
                self.add(f"algorithm.{key} = {value} compares old log-probs with the engine's, and with "
                         f"algorithm.old_logprobs = none the engine's are the old ones of {al.optimizer_steps} "
                         "optimizer steps per batch (updates_per_batch x epochs)", f"algorithm.{key}",
                         "algorithm.old_logprobs", fix="use algorithm.old_logprobs = recompute or interpolate")

    def rejection(self) -> None:
        rejection, key = self.config.algorithm.rejection, "algorithm.rejection"
        for name, bound in (("low", rejection.low), ("high", rejection.high)):
            if bound is not None and (rejection.rule == "none" or (rejection.rule, name) == ("off_policy", "low")):
                self.add(f"{key}.{name} = {bound:g} has no effect with {key}.rule = {rejection.rule}", f"{key}.{name}",
                         f"{key}.rule", fix=f"remove {name}" + (", or choose a rule" if rejection.rule == "none" else
                                                                ""))
        if rejection.rule == "off_policy":
            if rejection.high is None:
                self.add(f"{key}.rule = off_policy needs its bound", f"{key}.rule",
                         fix=f"set {key}.high, nats per token: look at drift/abs_mean of a run first")
        elif rejection.rule != "none":
            low, high = rejection.bounds
            if low >= high:
                self.add(f"{key}.low = {low:g} is not below {key}.high = {high:g}", f"{key}.low", f"{key}.high",
                         fix=f"use {key}.low < {high:g}")

    def distillation(self) -> None:
        al, key = self.config.algorithm.distillation, "algorithm.distillation"
        if al.teacher is None:
            for name in ("coef", "form", "estimator", "offload"):
                if self._is_set(f"{key}.{name}"):
                    self.add(f"{key}.{name} = {json.dumps(self.loaded.value(f'{key}.{name}'))} has no effect with "
                             f"{key}.teacher = null", f"{key}.{name}", f"{key}.teacher",
                             fix=f"set {key}.teacher, or remove {name}")
            if not any(each.weight for each in self.config.reward.functions):
                self.add("every weight of reward.functions is 0, and there is no teacher: nothing can be learned",
                         "reward.functions.0.weight", f"{key}.teacher", fix=f"set a weight, or {key}.teacher")
        elif self.config.algorithm.dynamic_sampling.enabled and not any(
                each.weight for each in self.config.reward.functions):
            self.add("algorithm.dynamic_sampling.enabled = true, and every weight of reward.functions is 0: every "
                     "group would be replaced", "algorithm.dynamic_sampling.enabled", "reward.functions.0.weight",
                     fix="use algorithm.dynamic_sampling.enabled = false")
        elif al.form == "advantage" and self._is_set(f"{key}.estimator"):
            self.add(f"{key}.estimator = {al.estimator} has no effect with {key}.form = advantage", f"{key}.estimator",
                     f"{key}.form", fix=f"use {key}.form = loss, or remove estimator")

    def _is_set(self, key: str) -> bool:
        """Whether the user wrote the key."""
        return self.loaded.sources[key].kind in ("file", "override")

    def teacher(self, teacher: Architecture) -> None:
        """The teacher runs on the ranks of the policy, with the same sizes, on the policy's tokens."""
        a, t, key = self.architecture, self.config.trainer, "algorithm.distillation.teacher"
        for units, what in ((teacher.heads, "attention heads"), (teacher.kv_heads, "KV heads"),
                            (teacher.ffn, "columns of the feed-forward layer")):
            if units % t.tp:
                both = divisors(a.heads, a.kv_heads, a.ffn, teacher.heads, teacher.kv_heads, teacher.ffn)
                self.add(f"trainer.tp = {t.tp} does not divide the teacher's {units} {what}", "trainer.tp", key,
                         fix=f"use trainer.tp = {both}, which also divides the policy")
                break
        if teacher.layers < t.pp:
            self.add(f"trainer.pp = {t.pp} has more stages than the teacher has layers ({teacher.layers})",
                     "trainer.pp", key, fix=f"use trainer.pp <= {teacher.layers}")
        elif t.vpp > 1 and teacher.layers % (t.pp * t.vpp):
            self.add(f"trainer.pp x trainer.vpp = {t.pp} x {t.vpp} does not divide the teacher's {teacher.layers} "
                     "layers", "trainer.pp", "trainer.vpp", key, fix="use trainer.vpp = 1")
        if teacher.vocab < a.vocab:
            self.add(f"the teacher has {teacher.vocab} token ids and the policy {a.vocab}: the policy can sample ids "
                     "without a probability under the teacher", key, "model.path",
                     fix=f"use a teacher with a vocab_size of at least {a.vocab} in its config.json")
        r = self.config.rollout
        if r.max_prompt_tokens + r.max_new_tokens > teacher.max_positions:
            self.add(f"rollout.max_prompt_tokens + max_new_tokens = {r.max_prompt_tokens + r.max_new_tokens} exceeds "
                     f"the teacher's {teacher.max_positions} positions", "rollout.max_prompt_tokens",
                     "rollout.max_new_tokens", key, fix=f"keep their sum <= {teacher.max_positions}")

    def optimizer(self) -> None:
        o = self.config.trainer.optimizer
        steps = self.config.run.steps * self.config.algorithm.optimizer_steps
        key = "trainer.optimizer"
        if o.min_lr > o.lr:
            self.add(f"{key}.min_lr = {o.min_lr:g} exceeds {key}.lr = {o.lr:g}", f"{key}.min_lr", f"{key}.lr",
                     fix=f"use {key}.min_lr <= {o.lr:g}")
        if o.schedule == "constant" and 0 < o.min_lr <= o.lr:
            self.add(f"{key}.min_lr = {o.min_lr:g} has no effect with {key}.schedule = constant", f"{key}.min_lr",
                     f"{key}.schedule", fix=f"use {key}.schedule = linear or cosine, or remove min_lr")
        if o.warmup_steps >= steps:
            self.add(f"{key}.warmup_steps = {o.warmup_steps} covers all {steps} optimizer steps of the run "
                     f"(run.steps x algorithm.updates_per_batch x epochs)", f"{key}.warmup_steps", "run.steps",
                     fix=f"use {key}.warmup_steps <= {steps - 1}")

    def engine(self) -> None:
        r, a = self.config.rollout, self.architecture
        if r.max_num_batched_tokens is not None and r.max_num_batched_tokens < r.max_num_seqs:
            self.add(f"rollout.max_num_batched_tokens = {r.max_num_batched_tokens} is below rollout.max_num_seqs = "
                     f"{r.max_num_seqs}: vLLM needs a token for each sequence", "rollout.max_num_batched_tokens",
                     "rollout.max_num_seqs", fix=f"use rollout.max_num_batched_tokens >= {r.max_num_seqs}")
        staleness = self.config.algorithm.max_staleness
        if r.deterministic and staleness and r.swap != "border":
            self.add(f"rollout.deterministic = true with algorithm.max_staleness = {staleness} and rollout.swap = "
                     f"{r.swap}: which token new weights reach first depends on timing", "rollout.deterministic",
                     "rollout.swap", "algorithm.max_staleness",
                     fix="use rollout.swap=border, or algorithm.max_staleness=0")
        in_flight = self.config.weight_sync.in_flight
        if r.keep_kv and in_flight != "keep":
            self.add(f"rollout.keep_kv = true with weight_sync.in_flight = {in_flight}: no request is running with a "
                     "KV cache when the weights change", "rollout.keep_kv", "weight_sync.in_flight",
                     fix="use weight_sync.in_flight=keep, or rollout.keep_kv=false")
        if self.device != "cpu":
            return
        limit = r.max_num_batched_tokens
        if r.deterministic and limit is not None and r.max_prompt_tokens > limit:
            self.add(f"rollout.deterministic = true with prompts of up to {r.max_prompt_tokens} tokens, above the "
                     f"chunked-prefill limit of {limit}: on a CPU, vLLM fails on a seeded prompt in several chunks",
                     "rollout.deterministic", "rollout.max_prompt_tokens", "rollout.max_num_batched_tokens",
                     fix=f"use rollout.max_num_batched_tokens >= {r.max_prompt_tokens}, or null")
        kv_heads = max(1, a.kv_heads // r.tp)
        token_bytes = 2 * a.layers * kv_heads * a.head_dim * KV_BYTES[r.dtype]
        longest = r.max_prompt_tokens + r.max_new_tokens
        capacity = int(r.kv_cache_gb * 2**30) // token_bytes
        if capacity < longest:
            self.add(f"rollout.kv_cache_gb = {r.kv_cache_gb:g} holds {capacity} tokens, fewer than one sequence of "
                     f"{longest}", "rollout.kv_cache_gb",
                     fix=f"use rollout.kv_cache_gb >= {math.ceil(longest * token_bytes / 2**30 * 100) / 100:g}")

    def staging(self) -> None:
        """`shadow` receives the weights into a second copy, next to an engine that serves."""
        c, key = self.config, "weight_sync.staging"
        if c.weight_sync.staging != "shadow":
            return
        for other, colliding, why in (
                ("model.lora_rank", c.model.lora_rank is not None,
                 "only adapters are sent, and an engine loads a new adapter next to the old one anyway"),
                ("rollout.dtype", c.rollout.dtype == "fp8",
                 "an engine builds its quantised weights in place, layer by layer"),
                ("placement.mode", c.placement.mode in ("colocated", "hybrid"),
                 "trainer and engine alternate on a GPU, so no engine serves while weights are handed over")):
            if colliding:
                self.add(f"{key} = shadow with {other} = {self.loaded.value(other)}: {why}", key, other,
                         fix=f"use {key} = in_place")

    def transformer_engine(self) -> None:
        """Flash and cuDNN attention support 16-bit types only, and the fp32 attention has no context parallelism
        (Transformer Engine 2.11, `get_attention_backend`)."""
        t = self.config.trainer
        if self.device == "gpu" and t.dtype == "fp32" and t.cp > 1:
            self.add(f"trainer.dtype = fp32 with trainer.cp = {t.cp}: on a GPU, Transformer Engine does not "
                     f"support fp32 attention with context parallelism", "trainer.dtype", "trainer.cp",
                     fix="use bf16 for trainer.dtype and rollout.dtype, or trainer.cp = 1")

    def sections_that_need_each_other(self) -> None:
        c = self.config
        asked = [key for key, on in (("eval.every", c.eval.every > 0), ("eval.at_start", c.eval.at_start),
                                     ("eval.at_end", c.eval.at_end)) if on]
        if asked and c.data.eval is None:
            self.add(f"{' and '.join(asked)} cannot be used with data.eval = null", *asked, "data.eval",
                     fix="set data.eval to a file of held-out questions, or turn the evaluations off")
        if c.weight_sync.disk.compare and c.weight_sync.disk.every == 0:
            self.add("weight_sync.disk.compare = true, but weight_sync.disk.every = 0 writes no versions",
                     "weight_sync.disk.compare", "weight_sync.disk.every",
                     fix="set weight_sync.disk.every > 0, or remove compare")
        names = [each.function for each in c.reward.functions]
        if c.eval.right is not None and c.eval.right not in names:
            self.add(f"eval.right = {c.eval.right} is not one of reward.functions", "eval.right",
                     fix=f"use {' or '.join(names)}, or null for the first")
        if c.data.system is not None and c.data.chat_template == "none":
            self.add("data.system needs a chat template, but data.chat_template = none", "data.system",
                     "data.chat_template", fix="use data.chat_template = auto, or put the text into the prompts")
        if c.algorithm.kl.reference_offload and c.algorithm.kl.beta == 0:
            self.add("algorithm.kl.reference_offload = true, but algorithm.kl.beta = 0 uses no reference model",
                     "algorithm.kl.reference_offload", "algorithm.kl.beta",
                     fix="set algorithm.kl.beta > 0, or remove reference_offload")

    def gpu_count(self, gpus: int) -> None:
        t, r = self.config.trainer, self.config.rollout
        training, rollout = t.tp * t.pp * t.cp * t.dp, r.replicas * r.tp
        if training + rollout > gpus:
            self.add(f"the run needs {training + rollout} GPUs (training: tp {t.tp} x pp {t.pp} x cp {t.cp} x "
                     f"dp {t.dp} = {training}; rollout: replicas {r.replicas} x tp {r.tp} = {rollout}), but this "
                     f"machine has {gpus}", "trainer.tp", "rollout.tp",
                     fix="lower these sizes, or run on the CPU with --device cpu")
