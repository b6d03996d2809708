"""The typed model of a run's YAML: one frozen class a section, one docstring a key.

Sizes that two sections must agree on are checked in `launch.config.checks`, not here: this file says only what
each key is.
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
    """Folder of all runs, relative to the working directory."""
    steps: PositiveInt
    """Number of GRPO steps (rollout batches)."""
    seed: NonNegativeInt = 0
    """Seed of data order, sampling and weight initialisation."""
    resume: Literal["auto", "never"] = "auto"
    """`auto`: continue from the newest complete checkpoint. `never`: refuse if there is one."""
    port_base: int | None = Field(default=None, ge=1024, le=65535)
    """First port of the job's port block on each node; null: the first free block. A pinned block in use is
    refused."""
    deadline_s: PositiveFloat = 180.0
    """Time limit for starting a component; 1.5 times as long for the first time of a phase. Unset, Slurm jobs derive
    it from the plan (docs/recover.md)."""
    hang_factor: PositiveFloat = 3.0
    """No progress for this many times the expected duration of a phase is a hang."""
    hang_min_s: PositiveFloat = 60.0
    """Minimum seconds without progress for a hang."""
    rehearse: bool | Literal["ray"] = False
    """Slurm only. Start every rank as a process that reports its place and computes nothing (docs/slurm.md). `ray`:
    also start Ray."""
    replan: bool = False
    """Slurm only. If the allocation differs from the plan, plan again; false: end the job."""
    min_nodes: PositiveInt | None = None
    """Slurm only. With fewer healthy nodes than planned, continue with fewer engines, then fewer data parallel
    replicas, on at least this many; null: all planned nodes."""
    max_attempts: PositiveInt = 20
    """Slurm only. Attempts (requeues and fresh jobs) in a row without user action. An orderly stop after new steps
    restarts the count. 1: no attempt follows another."""
    stop_margin_s: PositiveFloat | Literal["auto"] = "auto"
    """Slurm only. Seconds before the time limit at which the job writes a checkpoint and ends. `auto`: slowest step,
    checkpoint and 60 s."""
    node_silent_s: PositiveFloat = 90.0
    """Slurm only. A node without a sign of life for this long has failed."""
    preflight: Literal["node", "fabric"] = "node"
    """Slurm only. `fabric`: also measure an all-reduce and every pair of nodes before the start. `node` does so only
    after a hang or a collective timeout (docs/preflight.md)."""
    skip_checks: list[str] = []
    """Slurm only. Preflight checks (`gpu.nvlink`) or subjects (`gpu`) that are reported but never fatal
    (docs/preflight.md)."""
    profile: str | None = None
    """Slurm only. Site profile (slurm/profiles): container, modules, interfaces."""


class Model(Section):
    path: str
    """Hugging Face folder: config.json, safetensors, tokenizer. Never downloaded. `megatron-rl plan` also accepts a
    built-in architecture such as `llama-3-70b` (docs/plan.md)."""
    init: Literal["load", "random"] = "load"
    """`random`: draw the weights with `run.seed`."""
    lora_rank: PositiveInt | None = None
    """Train adapters of this rank; null: all weights. Planned only, not run by this version."""


class Optimizer(Section):
    lr: PositiveFloat
    """Peak learning rate of Adam."""
    min_lr: NonNegativeFloat = 0.0
    """Final learning rate of a decaying schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from `lr` to `min_lr` after the warm-up, over `run.steps` x `algorithm.updates_per_batch` optimizer
    steps."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up to `lr`."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (AdamW), without norms and biases."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Adam's decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    clip_grad: NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""


class Trainer(Section):
    tp: Size = "auto"
    """Tensor parallel size."""
    pp: Size = "auto"
    """Pipeline parallel size."""
    vpp: Size = "auto"
    """Virtual pipeline stages per rank (interleaved schedule); 1 is plain 1F1B."""
    cp: Size = "auto"
    """Context parallel size."""
    dp: Size = "auto"
    """Data parallel size."""
    sequence_parallel: bool | Literal["auto"] = "auto"
    """Shard norms and dropout over the sequence inside a TP group. `auto`: on a cluster with TP > 1."""
    dtype: Dtype = "bf16"
    """Type of parameters and activations. Optimizer state and gradients are fp32."""
    token_budget: Size = "auto"
    """Maximum tokens packed into a micro-batch; a longer sequence is refused. `auto`: 8192, or the longest sequence if
    that is longer."""
    share_prompts: Literal["auto", "on", "off"] = "auto"
    """Pack a group's prompt once for all its completions in a micro-batch. CPU attention only, not with `cp` > 1 or
    `sequence_parallel`. `auto`: on if possible."""
    recompute: Literal["none", "selective", "full", "auto"] = "auto"
    """Activation recomputation: `selective` core attention, `full` every layer. `auto`: on a cluster the least that
    fits, on this machine none."""
    distributed_optimizer: bool = True
    """Shard optimizer state over DP x CP."""
    optimizer: Optimizer
    """Adam and its schedule."""
    threads: PositiveInt = 1
    """CPU threads per training rank (CPU only)."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Deadline of a collective among training ranks."""


class Rollout(Section):
    replicas: Size = "auto"
    """vLLM engines, each a TP group."""
    tp: Size = "auto"
    """Tensor parallel size of one engine."""
    dtype: Literal["fp32", "bf16", "fp8"] = "bf16"
    """Type of the rollout weights: `trainer.dtype`, or `fp8` with a bf16 trainer (docs/weight-sync.md). FP8 needs
    compute capability 8.9."""
    max_prompt_tokens: PositiveInt
    """Maximum prompt length in tokens, chat template included; longer prompts are refused at start-up."""
    max_new_tokens: PositiveInt
    """Maximum completion length; longer ones end with finish reason `length`."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, which also divides the trainer's logits."""
    max_num_seqs: Size = "auto"
    """Sequences that an engine decodes at once. `auto`: from the lengths and the KV cache (256 on this machine)."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens per engine iteration (chunked prefill); null: vLLM's choice."""
    memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of GPU memory that an engine may use (GPU only)."""
    kv_cache_gb: PositiveFloat = 1.0
    """KV cache of an engine in GiB (CPU only)."""
    threads: PositiveInt = 1
    """CPU threads per engine worker (CPU only)."""
    enforce_eager: bool = True
    """Disable CUDA graphs and torch.compile."""
    prefix_caching: bool = True
    """Share the prompt's KV blocks among the completions of a group."""
    deterministic: bool = False
    """Rollouts that repeat bit for bit."""


class KL(Section):
    beta: NonNegativeFloat = 0.0
    """Weight of the KL term; 0: no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL in the loss."""
    reference_offload: bool = False
    """Keep the reference in host memory between its passes."""


class Algorithm(Section):
    group_size: int = Field(ge=2)
    """G, completions per prompt."""
    prompts_per_step: PositiveInt
    """Prompts per rollout batch."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps per rollout batch, each on an equal share of its groups."""
    advantage: Literal["grpo", "grpo_no_std", "rloo"] = "grpo"
    """`grpo`: (R - mean)/(std + eps). `grpo_no_std`: R - mean (Dr.GRPO). `rloo`: leave-one-out baseline."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """`token_mean`: over the tokens of the global batch (DAPO). `sequence_mean`: mean of sequence means (GRPO).
    `sequence_sum`: mean of sequence sums. `constant`: sequence sums over `rollout.max_new_tokens` (Dr.GRPO)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: PositiveFloat = 0.2
    """Upper clip range; 0.28 is DAPO's clip-higher."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound of the loss for negative advantages, in multiples of |A|; null: off."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    old_logprobs: Literal["none", "recompute"] = "none"
    """`recompute`: a trainer pass computes the old log-probs. `none`: not needed with one update per batch; with
    several, the engine's are used (docs/old-logprobs.md)."""
    importance_cap: float | None = Field(default=2.0, gt=0)
    """Cap of the importance weight from behaviour to trainer policy, per token; null: off."""
    kl: KL = KL()
    """KL term against the reference model."""
    asynchronous: bool = False
    """Generation continues during updates. Planned only: this version runs synchronously."""
    max_staleness: NonNegativeInt | None = None
    """Maximum age of a sample in versions; the trainer waits rather than use an older one. null: derived from the
    lengths."""
    truncated: Literal["keep", "mask"] = "keep"
    """Keep or mask completions cut at `max_new_tokens` in the loss. Their reward always counts in the baseline."""


class RewardFunction(Section):
    function: str
    """Built-in name (exact_match, math, format, length) or `package.module:function`."""
    weight: float = 1.0
    """Weight in the sum; negative for a penalty."""
    args: dict[str, Any] = {}
    """Keyword arguments of every call."""


class Reward(Section):
    functions: list[RewardFunction] = Field(min_length=1)
    """Reward functions; a sample's reward is their weighted sum."""
    workers: PositiveInt = 1
    """Reward worker processes."""
    timeout_s: PositiveFloat = 10.0
    """Deadline of one sample's reward."""
    on_error: Literal["stop", "zero"] = "stop"
    """A reward that raises or hangs: end the run and save the sample, or score zero and count it."""


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
    """`auto`: the tokenizer's template, if it has one. `none`: the plain text."""
    shuffle: bool = True
    """New order each epoch, drawn from `run.seed`; false: file order."""


class Disk(Section):
    every: NonNegativeInt = 0
    """Steps between versions written as Hugging Face folders (`<run.dir>/<run.name>/weights`, docs/weight-sync.md); 0:
    off."""
    keep: PositiveInt = 2
    """Newest complete versions kept."""
    compare: bool = False
    """Compare every engine's live weights with each written version, bit for bit; a difference ends the attempt."""


class WeightSync(Section):
    route: Literal["auto", "direct", "chain", "tree"] = "auto"
    """How weights travel (docs/weight-sync.md). `auto`: the fastest predicted route."""
    bucket_mb: PositiveFloat = 256.0
    """Maximum MiB of a packed bucket. The plan may choose smaller ones."""
    staging: Literal["in_place", "shadow"] = "in_place"
    """`in_place`: an engine stops while its weights are written. `shadow`: it keeps serving and receives into a second
    copy, which shrinks its KV cache (docs/weight-sync.md)."""
    in_flight: Literal["keep", "drain", "abort"] = "keep"
    """Requests that run when an engine stops. `keep`: continue with the new weights. `drain`: the engine waits for
    them, at most half of `timeout_s`. `abort`: resubmitted with their tokens so far."""
    timeout_s: PositiveFloat = 120.0
    """Deadline of one sync; then the attempt ends and names who is missing."""
    verify: Literal["always"] = "always"
    """A version counts only after the engine's digest equals the trainer's."""
    disk: Disk = Disk()
    """Versions of the weights on disk."""


class Checkpoint(Section):
    every: NonNegativeInt = 50
    """Steps between checkpoints; 0: only at the end and on a stop."""
    keep: PositiveInt = 2
    """Newest complete checkpoints kept."""
    export: Literal["last", "never"] = "last"
    """`last`: at the end also write a Hugging Face folder (`<run.dir>/<run.name>/hf/step-...`)."""


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
    """Reward function of `reward.functions` whose value of at least 1 means a right answer; null: the first."""


class Monitor(Section):
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb_project: str | None = None
    """Weights & Biases project (docs/metrics.md); null: off, nothing is sent."""
    samples_every: NonNegativeInt = 10
    """Steps between completions written to samples.jsonl; 0: off."""


class Lengths(Section):
    distribution: Literal["lognormal", "fixed", "histogram", "file"] = "lognormal"
    """`lognormal`: by mean and sigma, capped at `rollout.max_new_tokens`. `fixed`: all of `mean`. `histogram`:
    `values` with `counts`. `file`: measured, from a JSONL of completions."""
    mean: PositiveFloat | None = None
    """Mean tokens of a completion; null: a quarter of `rollout.max_new_tokens` (lognormal), all of it (fixed)."""
    sigma: PositiveFloat = 0.9
    """Standard deviation of the logarithm: 0.6 a short tail, 1.1 a long one."""
    values: list[PositiveInt] | None = None
    """Lengths of the histogram."""
    counts: list[NonNegativeFloat] | None = None
    """Frequency of each of `values`."""
    path: str | None = None
    """JSONL of completions, such as a run's samples.jsonl."""


class Workload(Section):
    prompt_tokens: PositiveFloat | None = None
    """Mean tokens of a prompt; null: half of `rollout.max_prompt_tokens`."""
    response: Lengths = Lengths()
    """Distribution of the completions' lengths."""
    target_prompts_per_hour: PositiveFloat | None = None
    """Throughput that the plan is compared with."""


class Placement(Section):
    mode: Literal["disaggregated", "colocated", "hybrid", "auto"] = "disaggregated"
    """`disaggregated`: some nodes train, others roll out. `colocated`: all GPUs do both in turn, weights pass through
    full tensors. `hybrid`: the same, resharded in place. `auto`: the fastest. This version runs only
    `disaggregated`."""
    training_nodes: Size = "auto"
    """Nodes that train; the others roll out."""
    spare_nodes: NonNegativeInt = 0
    """Nodes kept out of the plan to replace failed ones."""
    tp_across_nodes: bool = False
    """Allow pinned TP groups larger than a node, and engines of two nodes."""


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
