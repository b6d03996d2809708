"""The typed model of a run's YAML: one frozen class per section, one docstring per key.

Constraints between keys are in `launch.config.checks`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Dtype = Literal["fp32", "bf16"]
Size = PositiveInt | Literal["auto"]
"""A parallel size, or `auto`: the planner's choice on a cluster, 1 on this machine."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False,
                              use_attribute_docstrings=True, protected_namespaces=())


class Run(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its files are in `<dir>/<name>`."""
    dir: str = "runs"
    """Folder of all runs."""
    steps: PositiveInt
    """GRPO steps (rollout batches)."""
    seed: NonNegativeInt = 0
    """Seed for data order, sampling and initial weights."""
    resume: Literal["auto", "never"] = "auto"
    """`auto`: continue from the newest complete checkpoint. `never`: refuse if there is one."""
    port_base: int | None = Field(default=None, ge=1024, le=65535)
    """First port of the job's block on each node; null: the first free block. A pinned block in use is refused."""
    deadline_s: PositiveFloat = 180.0
    """Time limit for a component to start; 1.5 times this for the first span of a phase. Slurm jobs derive an unset
    limit from the plan (docs/recover.md)."""
    hang_factor: PositiveFloat = 3.0
    """A phase hangs if it makes no progress for this many times its expected duration."""
    hang_min_s: PositiveFloat = 60.0
    """Minimum seconds without progress before a phase hangs."""
    rehearse: bool | Literal["ray"] = False
    """Slurm only. Start ranks that report their place and compute nothing (docs/slurm.md). `ray`: also start Ray."""
    replan: bool = False
    """Slurm only. Plan again if the allocation differs from the plan; false: end the job."""
    min_nodes: PositiveInt | None = None
    """Slurm only. Minimum healthy nodes to continue on, with fewer engines, then fewer data parallel replicas; null:
    all planned nodes."""
    max_attempts: PositiveInt = 20
    """Slurm only. Maximum attempts (requeues and fresh jobs) in a row without user action. An orderly stop after new
    steps resets the count."""
    stop_margin_s: PositiveFloat | Literal["auto"] = "auto"
    """Slurm only. Seconds before the time limit at which the job checkpoints and ends. `auto`: slowest step, checkpoint
    and 60 s."""
    node_silent_s: PositiveFloat = 90.0
    """Slurm only. Seconds without a sign of life after which a node has failed."""
    preflight: Literal["node", "fabric"] = "node"
    """Slurm only. `fabric`: also measure an all-reduce and all node pairs at the start; `node`: only after a hang or a
    collective timeout (docs/preflight.md)."""
    skip_checks: list[str] = []
    """Slurm only. Preflight checks (`gpu.nvlink`) or subjects (`gpu`) that are reported but never fatal."""
    profile: str | None = None
    """Slurm only. Site profile (slurm/profiles): container, modules, interfaces."""


class Model(Section):
    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer); never downloaded. `megatron-rl plan` also accepts a
    built-in name such as `llama-3-70b` (docs/plan.md)."""
    init: Literal["load", "random"] = "load"
    """`random`: initialise the weights with `run.seed`."""
    lora_rank: PositiveInt | None = None
    """LoRA rank; null: train all weights. Can be planned, but not run by this version."""


class Optimizer(Section):
    lr: PositiveFloat
    """Peak learning rate of Adam."""
    min_lr: NonNegativeFloat = 0.0
    """Final learning rate of a decaying schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from `lr` to `min_lr` after the warm-up, until the last optimizer step."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (AdamW), except for norms and biases."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Adam's decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    clip_grad: NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0: no clipping."""


class Trainer(Section):
    tp: Size = "auto"
    """Tensor parallel size."""
    pp: Size = "auto"
    """Pipeline parallel size."""
    vpp: Size = "auto"
    """Virtual pipeline stages per rank (interleaved schedule); 1: plain 1F1B."""
    cp: Size = "auto"
    """Context parallel size."""
    dp: Size = "auto"
    """Data parallel size."""
    sequence_parallel: bool | Literal["auto"] = "auto"
    """Shard norms and dropout over the sequence inside a TP group. `auto`: on a cluster with TP > 1."""
    dtype: Dtype = "bf16"
    """Type of parameters and activations; optimizer state and gradients are `fp32`."""
    token_budget: Size = "auto"
    """Maximum tokens of a micro-batch. `auto`: 8192, or the longest sequence if that is longer."""
    share_prompts: Literal["auto", "on", "off"] = "auto"
    """Pack a prompt once for all its completions in a micro-batch. CPU only, with `cp` 1 and without
    `sequence_parallel`. `auto`: `on` if possible, else `off`."""
    recompute: Literal["none", "selective", "full", "auto"] = "auto"
    """Activation recomputation: `none`, `selective` (core attention) or `full` (every layer). `auto`: the least that
    fits; on this machine none."""
    distributed_optimizer: bool = True
    """Shard optimizer state over DP x CP."""
    overlap_grad_reduce: bool = True
    """Reduce gradients over DP x CP bucket by bucket during the last backward pass of an optimizer step."""
    overlap_param_gather: bool | Literal["auto"] = "auto"
    """Gather updated parameters bucket by bucket during the next forward pass, except after the last update of a step,
    since the weight sync follows. Needs `distributed_optimizer` and `overlap_grad_reduce`; `auto`: with these."""
    gradient_accumulation_fusion: bool | Literal["auto"] = "auto"
    """GPU only. The products that make weight gradients add them to the fp32 gradients. `auto`: on a GPU."""
    optimizer: Optimizer
    """Adam and its schedule."""
    threads: PositiveInt = 1
    """CPU only. Threads per training rank."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Timeout of a collective among training ranks."""

    @property
    def gathers_overlap(self) -> bool:
        """`overlap_param_gather`, where `auto` is decided."""
        if self.overlap_param_gather == "auto":
            return self.distributed_optimizer and self.overlap_grad_reduce
        return self.overlap_param_gather


class Rollout(Section):
    replicas: Size = "auto"
    """Number of vLLM engines."""
    tp: Size = "auto"
    """Tensor parallel size of an engine."""
    dtype: Literal["fp32", "bf16", "fp8"] = "bf16"
    """Type of the rollout weights: `trainer.dtype` (`fp32`, `bf16`), or `fp8` with a bf16 trainer
    (docs/weight-sync.md). On GPUs, FP8 needs compute capability 8.9."""
    max_prompt_tokens: PositiveInt
    """Maximum prompt tokens, chat template included; longer prompts are refused at start-up."""
    max_new_tokens: PositiveInt
    """Maximum completion tokens; longer completions end with reason `length`."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature. It also divides the trainer's logits."""
    max_num_seqs: Size = "auto"
    """Maximum sequences that an engine decodes at once. `auto`: from lengths and KV cache (256 on this machine)."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens per engine iteration (chunked prefill); null: vLLM's default."""
    memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """GPU only. Share of GPU memory for an engine."""
    kv_cache_gb: PositiveFloat = 1.0
    """CPU only. KV cache of an engine in GiB."""
    threads: PositiveInt = 1
    """CPU only. Threads per engine worker."""
    enforce_eager: bool = True
    """Disable CUDA graphs and torch.compile."""
    prefix_caching: bool = True
    """Share a prompt's KV blocks within its group."""
    swap: Literal["in_flight", "border"] = "in_flight"
    """With `algorithm.max_staleness` above 0, when engines take new weights. `in_flight`: at once; see
    `weight_sync.in_flight`. `border`: after every batch that they have (docs/async.md)."""
    keep_kv: bool = False
    """Running requests keep their KV cache when the weights change. It saves their prefill; their later tokens read
    keys and values of older weights (docs/async.md). New requests never do."""
    deterministic: bool = False
    """Make rollouts repeat bit for bit."""


class KL(Section):
    beta: NonNegativeFloat = 0.0
    """Weight of the KL term; 0: no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator in the loss."""
    reference_offload: bool = False
    """Keep the reference model in host memory between passes."""


class Distillation(Section):
    teacher: str | None = None
    """Hugging Face folder of a frozen teacher with the policy's tokenizer (docs/distillation.md); null: none.
    `megatron-rl plan` also accepts a built-in name."""
    coef: PositiveFloat = 1.0
    """Weight of the reverse KL to the teacher."""
    form: Literal["advantage", "loss"] = "advantage"
    """`advantage`: the negative KL of each token is added to its advantage. `loss`: an estimate of the KL is added to
    the loss."""
    estimator: Literal["k2", "k3"] = "k2"
    """KL estimator of `form: loss`. The expected gradient of `k2` is that of the reverse KL."""
    offload: bool = False
    """Keep the teacher in host memory between passes."""


class Rejection(Section):
    rule: Literal["none", "icepop", "sequence", "geometric", "off_policy"] = "none"
    """Which tokens leave the policy loss (docs/corrections.md). `icepop`: tokens whose ratio trainer / behaviour is
    outside the bounds. `sequence`: sequences by their product of ratios. `geometric`: sequences by their geometric
    mean. `off_policy`: sequences with a negative advantage that the policy has left (DeepSeek-V3.2)."""
    low: float | None = Field(default=None, gt=0, lt=1)
    """Lower bound of the ratio; null: icepop 0.5, sequence 1/3, geometric 0.999."""
    high: PositiveFloat | None = None
    """Upper bound of the ratio; null: icepop 5, sequence 3, geometric 1.001. `off_policy`: the bound of the mean of
    log(behaviour / current), in nats, which has no default."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound of the ratio. Not for `none` and `off_policy`."""
        low, high = {"icepop": (0.5, 5.0), "sequence": (1 / 3, 3.0), "geometric": (0.999, 1.001)}[self.rule]
        return (low if self.low is None else self.low, high if self.high is None else self.high)


class DynamicSampling(Section):
    enabled: bool = False
    """Replace groups whose rewards are all equal, which teach nothing (DAPO, docs/prompts.md)."""
    max_refill: NonNegativeInt = 3
    """Reserve of a batch, in multiples of `prompts_per_step`. A batch that it does not fill ends the run."""


class Algorithm(Section):
    group_size: int = Field(ge=2)
    """Completions per prompt (G)."""
    prompts_per_step: PositiveInt
    """Prompts per rollout batch."""
    updates_per_batch: PositiveInt = 1
    """Mini-batches of a rollout batch, each an optimizer step on an equal share of its groups."""
    epochs: PositiveInt = 1
    """Passes over a rollout batch. Old log-probs are those before the first update."""
    advantage: Literal["grpo", "grpo_no_std", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = "grpo"
    """`grpo`: (R - mean)/(std + eps). `grpo_no_std`: R - mean (Dr.GRPO). `rloo`: leave-one-out baseline.
    `reinforce_pp`: R, whitened over the tokens of the rollout batch. `reinforce_pp_baseline`: R - mean, whitened in the
    same way."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """`token_mean`: over the tokens of the global batch (DAPO). `sequence_mean`: mean of sequence means (GRPO).
    `sequence_sum`: mean of sequence sums. `constant`: sequence sums over `rollout.max_new_tokens` (Dr.GRPO)."""
    loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """`ppo`: clipped ratio of each token. `gspo`: clipped ratio of the sequence, with `aggregation: sequence_mean`.
    `cispo`: clipped ratio as a weight of log p, so that clipped tokens keep their gradient."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]. `cispo` has no lower bound."""
    clip_high: PositiveFloat = 0.2
    """Upper clip range; DAPO's clip-higher uses 0.28."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the loss for negative advantages, in multiples of |A|; null: off."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    old_logprobs: Literal["none", "recompute", "interpolate"] = "none"
    """`recompute`: a trainer pass computes the old log-probs. `none`: not needed with one update per batch; with
    several, the engine's are used. `interpolate`: between the engine's and the current ones, by age (A-3PO,
    docs/corrections.md)."""
    importance_weight: Literal["none", "token", "sequence"] = "token"
    """Weight of the policy loss from behaviour to trainer policy: of each token, or of its whole sequence."""
    importance_cap: float | None = Field(default=2.0, gt=0)
    """Cap on the importance weight; null: no weight."""
    rejection: Rejection = Rejection()
    """Tokens and sequences left out of the policy loss because they are off-policy."""
    kl: KL = KL()
    """KL term against the reference model."""
    distillation: Distillation = Distillation()
    """On-policy distillation: KL term against a teacher."""
    max_staleness: Literal["auto"] | NonNegativeInt = 0
    """Maximum age of a sampled token in weight versions: how many batches generation runs ahead of training. 0:
    synchronous. `auto`: the plan's (docs/async.md)."""
    overlap: bool = False
    """Train complete groups while others of the same batch are still generated. The optimizer step waits for all, so
    this is on-policy (docs/async.md)."""
    truncated: Literal["keep", "mask"] = "keep"
    """`keep` or `mask` completions cut at `max_new_tokens` in the loss. Their reward always counts in the baseline."""
    dynamic_sampling: DynamicSampling = DynamicSampling()
    """Replacement of groups that teach nothing."""

    @property
    def reserve(self) -> int:
        """Prompts that are drawn for a batch beyond those that it trains."""
        return self.prompts_per_step * self.dynamic_sampling.max_refill if self.dynamic_sampling.enabled else 0

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps on a rollout batch."""
        return self.updates_per_batch * self.epochs


class RewardFunction(Section):
    function: str
    """Built-in name (exact_match, math, format, length) or `package.module:function`."""
    weight: float = 1.0
    """Weight in the sum; negative for a penalty."""
    args: dict[str, Any] = {}
    """Keyword arguments of each call."""


class Reward(Section):
    functions: list[RewardFunction] = Field(min_length=1)
    """Reward functions. A sample's reward is their weighted sum."""
    workers: PositiveInt = 1
    """Reward processes on each node that trains. Leave its ranks a core per GPU or more."""
    timeout_s: PositiveFloat = 10.0
    """Timeout of one sample's reward."""
    on_error: Literal["stop", "zero"] = "stop"
    """If a reward raises or hangs, `stop` the run, or give the sample `zero` weight: it is in neither the baseline nor
    the loss, and is counted. Both save it (docs/rewards.md)."""


class Data(Section):
    train: str
    """JSONL or Parquet file with `prompt` (string) or `messages` (chat), `answer`, and columns for the reward."""
    eval: str | None = None
    """Held-out questions, answered greedily."""
    prompt_column: str = "prompt"
    """Column of the prompt."""
    messages_column: str = "messages"
    """Column of the chat messages."""
    answer_column: str = "answer"
    """Column of the reference answer."""
    system: str | None = None
    """System message before a `prompt`."""
    chat_template: Literal["auto", "none"] = "auto"
    """`auto`: the tokenizer's template, if any. `none`: plain text."""
    overlong: Literal["refuse", "drop", "truncate_left"] = "refuse"
    """Prompts longer than `rollout.max_prompt_tokens`: `refuse` the run, `drop` the rows, or `truncate_left`, which
    keeps their last tokens (docs/data.md)."""
    shuffle: bool = True
    """Shuffle each epoch, with `run.seed`; false: file order."""
    curriculum: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """Class that picks the prompts and hears their rewards, as `package.module:Class` (docs/prompts.md); null: the
    epochs of `shuffle`."""


class Disk(Section):
    every: NonNegativeInt = 0
    """Steps between versions written as Hugging Face folders to `<run.dir>/<run.name>/weights` (docs/weight-sync.md);
    0: off."""
    keep: PositiveInt = 2
    """Newest complete versions kept."""
    compare: bool = False
    """Compare every engine's weights with each written version, bit for bit; a difference ends the attempt."""


class WeightSync(Section):
    route: Literal["auto", "direct", "chain", "tree"] = "auto"
    """Route of the weights (docs/weight-sync.md). `auto`: the fastest predicted route."""
    bucket_mb: PositiveFloat = 256.0
    """Maximum MiB of a packed bucket; the plan may choose less."""
    staging: Literal["in_place", "shadow"] = "in_place"
    """`in_place`: an engine stops while its weights are written. `shadow`: it keeps serving and receives into a second
    copy, which shrinks its KV cache (docs/weight-sync.md)."""
    in_flight: Literal["keep", "drain", "abort"] = "keep"
    """Requests running when an engine stops. `keep`: continue with the new weights. `drain`: finish first, within half
    of `timeout_s`. `abort`: resubmit with the tokens so far."""
    timeout_s: PositiveFloat = 120.0
    """Timeout of a sync. Missing engines are then left out; a missing training rank ends the attempt."""
    verify: Literal["always"] = "always"
    """A version counts only if the engine's digest equals the trainer's."""
    disk: Disk = Disk()
    """Versions of the weights on disk."""


class Checkpoint(Section):
    every: NonNegativeInt = 50
    """Steps between checkpoints; 0: only at the end and on a stop."""
    keep: PositiveInt = 2
    """Newest complete checkpoints kept."""
    async_save: bool = True
    """The run goes on as soon as every training rank has copied its share to host memory, and writes it meanwhile.
    `false`: the run waits, and needs no copy."""
    export: Literal["last", "never"] = "last"
    """`last`: write a Hugging Face folder at the end (`<run.dir>/<run.name>/hf/step-...`). `never`: no export."""


class Evaluation(Section):
    every: NonNegativeInt = 0
    """Steps between evaluations; 0: off."""
    at_start: bool = False
    """Evaluate the initial weights."""
    at_end: bool = False
    """Evaluate the final weights."""
    max_prompts: PositiveInt | None = None
    """Use only the first questions; null: all."""
    right: str | None = None
    """Function of `reward.functions` whose value >= 1 means a right answer; null: the first."""


class Monitor(Section):
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb_project: str | None = None
    """Weights & Biases project (docs/metrics.md); null: off, nothing is sent."""
    samples_every: NonNegativeInt = 10
    """Steps between completions written to samples.jsonl; 0: off."""
    rollouts_every: NonNegativeInt = 0
    """Steps between rollout batches written in full to rollouts/step-<n>.jsonl: token ids, log-probs, rewards
    (docs/metrics.md); 0: off."""


class Lengths(Section):
    distribution: Literal["lognormal", "fixed", "histogram", "file"] = "lognormal"
    """`lognormal`: from `mean` and `sigma`, capped at `rollout.max_new_tokens`. `fixed`: always `mean`. `histogram`:
    `values` with `counts`. `file`: measured, from `path`."""
    mean: PositiveFloat | None = None
    """Mean completion tokens; null: a quarter of `rollout.max_new_tokens` (lognormal), all of it (fixed)."""
    sigma: PositiveFloat = 0.9
    """Standard deviation of the logarithm: 0.6 gives a short tail, 1.1 a long one."""
    values: list[PositiveInt] | None = None
    """Lengths of the histogram."""
    counts: list[NonNegativeFloat] | None = None
    """Frequency of each value."""
    path: str | None = None
    """JSONL of completions, such as a run's samples.jsonl."""


class Workload(Section):
    prompt_tokens: PositiveFloat | None = None
    """Mean prompt tokens; null: half of `rollout.max_prompt_tokens`."""
    response: Lengths = Lengths()
    """Distribution of completion lengths."""
    flat_groups: float = Field(default=0.0, ge=0, lt=1)
    """Expected share of groups with equal rewards, which `algorithm.dynamic_sampling` generates in addition."""
    reward_s: PositiveFloat | None = None
    """Seconds of a reward process for a completion: `time/reward_sample` of a run. null: the planner's figures for the
    built-in rewards, and an assumed one for functions of yours."""
    target_prompts_per_hour: PositiveFloat | None = None
    """Throughput to compare the plan with."""


class Placement(Section):
    mode: Literal["disaggregated", "colocated", "hybrid", "auto"] = "disaggregated"
    """`disaggregated`: some nodes train, others roll out. `colocated`: all GPUs alternate, and weights pass through
    full tensors. `hybrid`: the same, with weights resharded in place. `auto`: the fastest. This version runs only
    `disaggregated`."""
    training_nodes: Size = "auto"
    """Nodes that train; the others roll out."""
    spare_nodes: NonNegativeInt = 0
    """Nodes kept out of the plan to replace failed ones."""
    tp_across_nodes: bool = False
    """Allow pinned TP groups larger than a node, and engines on two nodes."""


class RunConfig(Section):
    run: Run
    """Name, length, seed, resume and deadlines."""
    model: Model
    """The policy that is trained."""
    trainer: Trainer
    """Megatron: parallel sizes, precision, optimizer."""
    rollout: Rollout
    """vLLM: engines, lengths, sampling."""
    algorithm: Algorithm
    """GRPO: batch, advantage, loss."""
    reward: Reward
    """Scores of the completions."""
    data: Data
    """Prompts."""
    weight_sync: WeightSync = WeightSync()
    """Weights from trainer to engines."""
    checkpoint: Checkpoint = Checkpoint()
    """When to save and how many to keep."""
    eval: Evaluation = Evaluation()
    """Greedy answers on held-out questions."""
    monitor: Monitor = Monitor()
    """Where metrics and samples go."""
    workload: Workload = Workload()
    """The planner's assumptions about the data. It changes no run."""
    placement: Placement = Placement()
    """How the planner divides the cluster."""
    cluster: str = "local"
    """`local`: this machine. Else a cluster file (configs/clusters) for `megatron-rl plan` and Slurm."""
