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
    """Name of the run: its files lie in `<dir>/<name>`."""
    dir: str = "runs"
    """Folder of all runs, relative to the working directory."""
    steps: PositiveInt
    """Number of GRPO steps (rollout batches)."""
    seed: NonNegativeInt = 0
    """Seeds data order, sampling and weight initialisation."""
    resume: Literal["auto", "never"] = "auto"
    """`auto`: go on from the newest complete checkpoint of this run. `never`: refuse if there is one."""
    port_base: int | None = Field(default=None, ge=1024, le=65535)
    """First port of the job's block (`launch.ports`) on each of its nodes; null takes the first free block. A pinned
    block that is in use is refused."""
    deadline_s: PositiveFloat = 180.0
    """How long one component may take to start before the attempt ends, naming who is missing; half as long again, the
    first time of any phase. A Slurm job takes longer by itself where its plan needs it (docs/recover.md), unless this
    is set."""
    hang_factor: PositiveFloat = 3.0
    """No progress for this many times the expected phase counts as a hang."""
    hang_min_s: PositiveFloat = 60.0
    """... but never before this many seconds."""
    rehearse: bool | Literal["ray"] = False
    """Do everything but the work of the GPUs: every rank starts as a process on its node and reports where it is
    (docs/slurm.md). `ray`: Ray comes up as well, and an actor on every node reports. Slurm only."""
    replan: bool = False
    """Slurm only. Where the allocation differs from the plan (nodes, GPUs, memory), plan anew for what was given;
    false ends the job with a message that names both."""
    min_nodes: PositiveInt | None = None
    """Slurm only. Fewer healthy nodes than planned: go on with fewer engines, then with fewer data parallel replicas,
    on no fewer nodes than this; null needs all that the plan uses."""
    max_attempts: PositiveInt = 20
    """Slurm only. Attempts without a person, requeues and fresh jobs together, that fail or make no step. One that is
    stopped in order after new steps (time limit, preemption) begins a new count. 1: no attempt follows another."""
    stop_margin_s: PositiveFloat | Literal["auto"] = "auto"
    """Slurm only. Seconds before the end of the time limit at which the job writes a checkpoint and ends. `auto`:
    what the plan needs (its slowest step, a checkpoint, 60 s), in whole minutes."""
    node_silent_s: PositiveFloat = 90.0
    """Slurm only. A node whose supervisor gave no sign of life for so long counts as failed, unless most others fell
    silent with it: that is the file system."""
    preflight: Literal["node", "fabric"] = "node"
    """Slurm only. `fabric`: beyond each node by itself, measure an all-reduce and every pair of nodes before the job
    starts, a minute or two. `node` does so after an attempt that hung, or whose collectives timed out, with no node to
    blame."""
    skip_checks: list[str] = []
    """Slurm only. Checks of the preflight (`gpu.nvlink`) or subjects (`gpu`) that are told and not judged, where a site's
    peculiarity fails them (docs/preflight.md)."""
    profile: str | None = None
    """Slurm only. Site profile (slurm/profiles): container, modules, interfaces; null: a site without peculiarities."""
    workload: Literal["train", "rehearse", "stub"] = "train"
    """What a job's processes do once they are placed. For tests of the launcher; `run.rehearse` is the word to use."""

    @property
    def work(self) -> Literal["train", "rehearse", "stub"]:
        """What the processes do, by both keys."""
        return "rehearse" if self.rehearse else self.workload


class Model(Section):
    path: str
    """Hugging Face model folder: config.json, safetensors, tokenizer. Never downloaded. `megatron-rl plan` also takes
    the name of a built-in architecture (docs/plan.md), such as `llama3-70b`."""
    init: Literal["load", "random"] = "load"
    """`random` starts from weights drawn with `run.seed` (tiny policies, tests)."""
    lora_rank: PositiveInt | None = None
    """Train adapters of this rank instead of all weights; null trains all. Planned only: this version does not run
    it."""


class Optimizer(Section):
    lr: PositiveFloat
    """Peak learning rate of Adam."""
    min_lr: NonNegativeFloat = 0.0
    """Final learning rate of a decaying schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from `lr` to `min_lr` over the run's optimizer steps (`run.steps` x `algorithm.updates_per_batch`), after
    the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up to `lr`; a GRPO step makes `algorithm.updates_per_batch` of them."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (AdamW); norms and biases are not decayed."""
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
    """Virtual pipeline stages a rank (interleaved schedule); 1 is plain 1F1B."""
    cp: Size = "auto"
    """Context parallel size."""
    dp: Size = "auto"
    """Data parallel size."""
    sequence_parallel: bool | Literal["auto"] = "auto"
    """Shard norms and dropout over the sequence inside a TP group. `auto`: with TP > 1 on a cluster, not on this
    machine."""
    dtype: Dtype = "bf16"
    """Type of parameters and activations; optimizer state and gradients are fp32."""
    token_budget: Size = "auto"
    """Tokens packed into one micro-batch at most (a longer single sequence is refused). `auto`: 8192, or the longest
    sequence where that is longer."""
    share_prompts: Literal["auto", "on", "off"] = "auto"
    """Pack the prompt of a GRPO group once for all its completions in a micro-batch; gradients are the same, up to
    rounding. Needs this project's attention for the CPU: Transformer Engine's on a GPU has no documents with a common
    beginning. Not with `cp` > 1 or `sequence_parallel`. `auto`: on where it works."""
    recompute: Literal["none", "selective", "full", "auto"] = "auto"
    """Activation recomputation: `selective` the core attention, `full` every layer. `auto`: on a cluster the least that
    fits, on this machine none."""
    distributed_optimizer: bool = True
    """Shard optimizer state over DP x CP."""
    optimizer: Optimizer
    """Adam and its schedule."""
    threads: PositiveInt = 1
    """CPU threads a training rank (CPU runs only)."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Deadline of every collective among the training ranks. The hang watch (`run.hang_factor`) should speak first."""


class Rollout(Section):
    replicas: Size = "auto"
    """vLLM engines, each a TP group."""
    tp: Size = "auto"
    """Tensor parallel size of one engine."""
    dtype: Literal["fp32", "bf16", "fp8"] = "bf16"
    """Type of the rollout weights: that of `trainer.dtype`, or `fp8` with a trainer in bf16. Then bf16 travels, and
    each engine quantises the matrices of its layers (vLLM's `fp8_per_channel`) from a copy that it keeps in bf16;
    embedding, head and KV cache stay bf16 (docs/weight-sync.md). GPUs need FP8 kernels: compute capability 8.9."""
    max_prompt_tokens: PositiveInt
    """Longest prompt, in tokens of the rendered chat template; a longer one is refused at start-up."""
    max_new_tokens: PositiveInt
    """Longest completion; longer ones end with finish reason `length`."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer divides its logits by the same value."""
    max_num_seqs: Size = 256
    """Sequences an engine decodes at once. `auto`: what the lengths need and the KV cache holds (256 on this
    machine)."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens of one engine iteration (the chunked-prefill limit); null lets vLLM choose."""
    memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of GPU memory an engine may use (GPU only)."""
    kv_cache_gb: PositiveFloat = 1.0
    """KV cache of an engine in GiB (CPU only)."""
    threads: PositiveInt = 1
    """CPU threads a worker of an engine (CPU runs only). Rollout and training take turns, so both may use all cores."""
    enforce_eager: bool = True
    """True: no CUDA graphs, no torch.compile."""
    prefix_caching: bool = True
    """Share the prompt's KV blocks among the G completions of a group."""
    deterministic: bool = False
    """Rollouts that repeat bit for bit: fixed routing and order, cold prefix cache, a seed for every sample."""


class KL(Section):
    beta: NonNegativeFloat = 0.0
    """Weight of the KL term against the reference; 0 means no reference model is built."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Which estimator of the KL enters the loss."""
    reference_offload: bool = False
    """Keep the frozen reference in host memory between its passes."""


class Algorithm(Section):
    group_size: int = Field(ge=2)
    """G, completions a prompt. G = 1 has no group baseline and is refused."""
    prompts_per_step: PositiveInt
    """Prompts of one rollout batch."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps made from one rollout batch, each on an equal share of its groups."""
    advantage: Literal["grpo", "grpo_no_std", "rloo"] = "grpo"
    """(R - mean)/(std + eps); R - mean (Dr.GRPO); leave-one-out baseline."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """How token losses become one number: mean over the tokens of the global batch (DAPO), mean of sequence
    means (GRPO), mean of sequence sums, or sequence sums over `rollout.max_new_tokens` (Dr.GRPO)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: PositiveFloat = 0.2
    """Upper side of the clip range; 0.28 is DAPO's clip-higher."""
    dual_clip: float | None = Field(default=None, gt=1)
    """For negative advantages the loss is at most this many times |A|; null is off."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    old_logprobs: Literal["none", "recompute"] = "none"
    """`recompute` runs a pass of the trainer for the proximal log-probs. `none`: with one update a batch the
    current policy is the old one, with several the behaviour log-probs stand in (docs/old-logprobs.md)."""
    importance_cap: float | None = Field(default=2.0, gt=0)
    """Truncated importance weight from behaviour to trainer policy, a token: min(ratio, cap); null is off."""
    kl: KL = KL()
    """KL term against the reference model."""
    asynchronous: bool = False
    """Generation goes on while the trainer updates, so that samples are some versions old. Planned only: this version
    runs synchronously."""
    max_staleness: NonNegativeInt | None = None
    """Most versions that a sample may be old: the trainer waits rather than use an older one, and the plan counts that.
    null: what the lengths demand, as the plan derives it."""
    truncated: Literal["keep", "mask"] = "keep"
    """What a completion cut at `max_new_tokens` does to the loss; its reward always stays in the baseline."""


class RewardFunction(Section):
    function: str
    """A built-in name (exact_match, math, format, length) or `package.module:function`."""
    weight: float = 1.0
    """Weight in the sum; negative for a penalty."""
    args: dict[str, Any] = {}
    """Keyword arguments passed on every call."""


class Reward(Section):
    functions: list[RewardFunction] = Field(min_length=1)
    """Reward functions; a sample's reward is their weighted sum."""
    workers: PositiveInt = 1
    """Reward worker processes."""
    timeout_s: PositiveFloat = 10.0
    """Deadline of one sample's reward."""
    on_error: Literal["stop", "zero"] = "stop"
    """A reward that raises or hangs ends the run with the sample saved, or scores zero and is counted."""


class Data(Section):
    train: str
    """JSONL or Parquet file: `prompt` (string) or `messages` (chat), `answer`, further columns for the reward."""
    eval: str | None = None
    """Held-out questions, answered greedily."""
    prompt_column: str = "prompt"
    """Column of the prompt's text."""
    messages_column: str = "messages"
    """Column of chat messages, used where a row has no prompt."""
    answer_column: str = "answer"
    """Column of the reference answer."""
    system: str | None = None
    """System message put before a `prompt`."""
    chat_template: Literal["auto", "none"] = "auto"
    """`auto`: the tokenizer's own template if it has one; `none`: the prompt's text as it is."""
    shuffle: bool = True
    """A new order each epoch, drawn from `run.seed`; false keeps the file's order."""


class Disk(Section):
    every: NonNegativeInt = 0
    """Versions (steps) between those that are written to disk as Hugging Face folders (`<run.dir>/<run.name>/weights`,
    docs/weight-sync.md), for debugging and for engines that start again; 0 is off."""
    keep: PositiveInt = 2
    """Newest complete versions kept."""
    compare: bool = False
    """For debugging: compare the live weights of every engine with each version that was written, bit for bit, and end
    the attempt where they differ."""


class WeightSync(Section):
    route: Literal["auto", "direct", "chain", "tree"] = "auto"
    """How weights travel (docs/weight-sync.md): straight to every engine, or from engine to engine in chains or in two
    trees. `auto` takes the one that is predicted to be the fastest."""
    bucket_mb: PositiveFloat = 256.0
    """Most MiB of a packed bucket; where engines pass buckets on, the plan may choose smaller ones."""
    staging: Literal["in_place", "shadow"] = "in_place"
    """`in_place`: an engine stops while its weights are written. `shadow`: it goes on serving the old version while it
    receives the new one into a second copy of its weights, by which its KV cache is smaller, and stops only for the
    swap (docs/weight-sync.md). Worth it where generation and training overlap; a synchronous run waits for the sync
    anyway."""
    in_flight: Literal["keep", "drain", "abort"] = "keep"
    """Requests that run when an engine stops for a sync. `keep`: frozen in their place, they go on with the new
    weights. `drain`: the engine takes no new ones and waits for them, half of `timeout_s` at most. `abort`: they are ended, and
    asked again with the tokens that they have (docs/weight-sync.md). A synchronous run has none."""
    timeout_s: PositiveFloat = 120.0
    """Deadline of one sync; past it the attempt ends and names who is missing."""
    verify: Literal["always"] = "always"
    """A version counts only after the engine's digest equals the trainer's."""
    disk: Disk = Disk()
    """Versions of the weights on disk."""


class Checkpoint(Section):
    every: NonNegativeInt = 50
    """Steps between checkpoints; 0 only at the end and on a stop."""
    keep: PositiveInt = 2
    """Newest complete checkpoints kept."""
    export: Literal["last", "never"] = "last"
    """`last`: when the run has made all its steps, write the weights as a Hugging Face folder too
    (`<run.dir>/<run.name>/hf/step-...`)."""


class Evaluation(Section):
    every: NonNegativeInt = 0
    """Steps between evaluations; 0 is off."""
    at_start: bool = False
    """Evaluate the initial weights."""
    at_end: bool = False
    """Evaluate the final weights."""
    max_prompts: PositiveInt | None = None
    """Use only the first so many questions; null uses all."""
    right: str | None = None
    """Reward function by which an answer counts as right (its value is at least 1), as named in `reward.functions`;
    null: the first of them."""


class Monitor(Section):
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb_project: str | None = None
    """Weights & Biases project (docs/metrics.md); null is off, and nothing is sent."""
    samples_every: NonNegativeInt = 10
    """Steps between completions written to samples.jsonl; 0 is off."""


class Lengths(Section):
    distribution: Literal["lognormal", "fixed", "histogram", "file"] = "lognormal"
    """`lognormal`: by mean and sigma, capped at `rollout.max_new_tokens` with the mean kept. `fixed`: all of `mean`.
    `histogram`: `values` with `counts`. `file`: measured, from a JSONL of completions."""
    mean: PositiveFloat | None = None
    """Mean tokens of a completion; null: a quarter of `rollout.max_new_tokens` (lognormal), all of it (fixed)."""
    sigma: PositiveFloat = 0.9
    """Standard deviation of the logarithm: 0.6 is a short tail, 1.1 a long one."""
    values: list[PositiveInt] | None = None
    """Lengths of the histogram."""
    counts: list[NonNegativeFloat] | None = None
    """How often each of `values` was seen."""
    path: str | None = None
    """JSONL of completions, such as a run's samples.jsonl."""


class Workload(Section):
    prompt_tokens: PositiveFloat | None = None
    """Mean tokens of a prompt; null: half of `rollout.max_prompt_tokens`."""
    response: Lengths = Lengths()
    """Distribution of the completions' lengths."""
    target_prompts_per_hour: PositiveFloat | None = None
    """Throughput that the plan is held against."""


class Placement(Section):
    mode: Literal["disaggregated", "colocated", "hybrid", "auto"] = "disaggregated"
    """`disaggregated`: some nodes train, others roll out. `colocated`: both on all GPUs, in turn, weights handed over
    inside a GPU through full tensors. `hybrid`: the same, resharded in place. `auto` takes the fastest. Colocated and
    hybrid are planned only: this version runs disaggregated."""
    training_nodes: Size = "auto"
    """Nodes that train; the others roll out."""
    spare_nodes: NonNegativeInt = 0
    """Nodes kept out of the plan, for when others fail."""
    tp_across_nodes: bool = False
    """Allow TP groups larger than a node: those that are pinned, and engines of two nodes."""


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
    """What scores a completion."""
    data: Data
    """Prompts."""
    weight_sync: WeightSync = WeightSync()
    """From the trainer's ranks to the engines."""
    checkpoint: Checkpoint = Checkpoint()
    """When to save and how many to keep."""
    eval: Evaluation = Evaluation()
    """Greedy answers on held-out questions."""
    monitor: Monitor = Monitor()
    """Where metrics and samples go."""
    workload: Workload = Workload()
    """What the planner assumes of the data; it changes no run."""
    placement: Placement = Placement()
    """How the planner divides the cluster."""
    cluster: str = "local"
    """`local`: this machine. Else a cluster file (configs/clusters), for which `megatron-rl plan` plans and on which
    Slurm runs the job."""
