"""Every metric of a run: name, unit, meaning, healthy range. docs/metrics.md is generated from this table
(`python -m megatron_rl.monitor.metrics > docs/metrics.md`). A name outside the table causes a warning."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

from launch.errors import nearest

log = logging.getLogger(__name__)
NONE = "–"
"""Marks a missing unit or healthy range."""


@dataclass(frozen=True)
class Metric:
    """One row of the table. A name that ends in `/<x>` stands for all names with that prefix."""

    name: str
    unit: str
    meaning: str
    healthy: str = NONE

    @property
    def is_family(self) -> bool:
        return self.name.endswith(">")

    def matches(self, name: str) -> bool:
        if not self.is_family:
            return name == self.name
        prefix = self.name[:self.name.index("<")]
        return re.fullmatch(re.escape(prefix) + r"[A-Za-z0-9_.:#-]+", name) is not None


SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Step": (
        Metric("step", "–", "step number; 0 is an evaluation before training", "rises by 1"),
        Metric("timestamp", "s", "seconds since 1970-01-01 UTC"),
        Metric("weights/version", "–", "version that the engines serve after the step", "equals the step"),
    ),
    "Reward": (
        Metric("reward/mean", "reward", "mean total reward, truncated trajectories included; aborted ones and those "
               "whose reward failed not", "rises"),
        Metric("reward/std", "reward", "standard deviation", "> 0"),
        Metric("reward/max", "reward", "largest total reward"),
        Metric("reward/errors", "share", "trajectories whose reward raised, died or timed out; in neither loss nor "
               "baseline", "< 0.01"),
        Metric("reward/timeouts", "share", "those of `reward/errors` that timed out", "< 0.01"),
        Metric("reward/component/<function>", "reward",
               "mean of one of several reward functions, unweighted"),
        Metric("group/zero_variance", "share",
               "groups with equal rewards, which give no gradient", "< 0.7 until the task is solved"),
        Metric("group/all_right", "share", "groups with every reward at least 1", "rises late"),
        Metric("group/all_wrong", "share", "groups with no reward above 0", "falls"),
        Metric("group/reward_std", "reward", "mean standard deviation inside a group", "> 0"),
        Metric("group/dropped", "share", "groups left out: fewer than two trajectories with a reward", "0"),
        Metric("group/replaced_right", "groups", "replaced by dynamic sampling: every reward at least 1", "rises late"),
        Metric("group/replaced_wrong", "groups", "replaced: no reward above 0", "falls"),
        Metric("group/replaced_other", "groups", "replaced: equal rewards of another value, or rewards that failed",
               "0"),
        Metric("group/generated_per_trained", "–", "groups generated per group trained, the cost of dynamic sampling",
               "< 2"),
    ),
    "Trajectories": (
        Metric("response/length_mean", "tokens", "mean sampled tokens, stop tokens included, tokens of tools not",
               "no drift to 1 or to the limit"),
        Metric("response/length_max", "tokens", "most sampled tokens"),
        Metric("response/length_min", "tokens", "fewest sampled tokens"),
        Metric("response/truncated", "share", "trajectories cut at `rollout.max_new_tokens`", "< 0.3"),
        Metric("response/masked", "share", "trajectories left out of the loss (`algorithm.truncated`)"),
        Metric("response/aborted", "share",
               "trajectories that an engine aborted; in neither loss nor baseline", "0"),
        Metric("prompt/length_mean", "tokens", "mean prompt length, chat template included"),
    ),
    "Time": (
        Metric("time/step", "s", "the whole step"),
        Metric("time/rollout", "s", "waiting for the trajectories of the batch, or for the engines at a border"),
        Metric("time/rollout_hidden", "s", "generation beside other work, not in `time/rollout`"),
        Metric("time/reward", "s", "waiting for scores, after the last trajectory of the batch"),
        Metric("time/reward_sample", "s", "mean time of a reward process for a trajectory", "`workload.reward_s`"),
        Metric("time/logprob", "s", "passes for old, reference and teacher log-probs"),
        Metric("time/train", "s", "forward, backward and optimizer of all updates"),
        Metric("time/train_hidden", "s", "training and log-prob passes while the same batch is still generated, in "
               "`time/train` and `time/logprob` (`algorithm.overlap`)"),
        Metric("time/sync", "s", "weight sync, verification included"),
        Metric("time/eval", "s", "evaluation, not in `time/step`"),
        Metric("time/checkpoint", "s", "what the run waited for a checkpoint, not in `time/step`"),
        Metric("time/checkpoint_write", "s", "writing a checkpoint, from the copy to the complete folder"),
        Metric("time/disk", "s", "waiting for a version on disk (`weight_sync.disk`), in `time/other`"),
        Metric("time/other", "s", "the part of `time/step` without rollout, reward, logprob, train or sync",
               "< 5 % of `time/step`"),
        Metric("idle/trainer", "share", "of `time/step`: the trainer waits for trajectories or scores"),
        Metric("idle/engines", "share", "of `time/step`: no batch is being generated"),
        Metric("throughput/samples_per_s", "1/s", "trajectories per second of `time/step`"),
        Metric("throughput/tokens_per_s", "1/s", "all tokens, prompts and tools included, per second of `time/step`"),
        Metric("throughput/rollout_tokens_per_s", "1/s", "sampled tokens per second of generation, hidden or not"),
    ),
    "Update": (
        Metric("train/loss", "–", "loss with KL and entropy terms, mean over updates",
               "near 0 on-policy"),
        Metric("train/grad_norm", "–", "global gradient norm before clipping", "steady; < 10 x its median"),
        Metric("train/lr", "–", "learning rate of the last update"),
        Metric("train/entropy", "nats", "mean entropy over sampled tokens", "falls slowly, not to 0"),
        Metric("train/kl", "nats", "KL to the reference (`algorithm.kl.estimator`), mean over sampled tokens", "< 0.1"),
        Metric("train/ratio_mean", "–", "mean ratio of current to old probability of sampled tokens", "0.99 to 1.01"),
        Metric("train/ratio_max", "–", "largest ratio"),
        Metric("train/clip_fraction", "share", "clipped tokens", "< 0.2"),
        Metric("train/clip_fraction_high", "share", "clipped from above"),
        Metric("train/clip_fraction_low", "share", "clipped from below"),
        Metric("train/dual_clip_fraction", "share", "tokens limited by the dual clip", "< 0.01"),
        Metric("train/tokens", "tokens", "sampled tokens in the loss"),
        Metric("train/sequences", "–", "sequences in the updates"),
        Metric("train/microbatches", "–", "micro-batches per data parallel rank"),
        Metric("train/skipped", "–", "updates skipped for a gradient that is not finite", "0"),
    ),
    "Distillation": (
        Metric("distill/kl", "nats",
               "KL(policy || teacher) (`algorithm.distillation`), mean of log policy - log teacher over sampled tokens",
               "falls towards 0"),
        Metric("distill/teacher_logprob", "nats", "mean log-prob of the sampled tokens under the teacher", "rises"),
    ),
    "Engine against trainer": (
        Metric("mismatch/kl", "nats",
               "KL(behaviour || trainer), k3, of tokens sampled with the trainer's weights (age 0)",
               "fp32 < 1e-5, bf16 around 1e-3; a steep rise: weights do not arrive"),
        Metric("mismatch/abs_mean", "nats", "mean absolute difference of their log-probs",
               "fp32 < 1e-4, bf16 < 0.05"),
        Metric("mismatch/abs_max", "nats", "largest absolute difference", "fp32 < 1e-2, bf16 of the order of 1"),
        Metric("mismatch/ratio_mean", "–", "mean ratio of trainer to behaviour probability", "0.98 to 1.02"),
        Metric("mismatch/kl/<part>", "nats", "by position in the completion: `to_1k`, `to_4k`, `to_16k`, `beyond`",
               "does not rise along the completion"),
        Metric("mismatch/abs_mean/<part>", "nats", "the same"),
        Metric("staleness/mean", "versions", "trainer version minus sampling version, mean over sampled tokens",
               "0 (synchronous)"),
        Metric("staleness/max", "versions", "oldest sampled token", "0 (synchronous)"),
        Metric("staleness/bound", "versions", "bound for batches handed out after the step, at most "
               "`algorithm.max_staleness`", "not lowered"),
    ),
    "Old tokens": (
        Metric("drift/divergence", "–", "mean absolute (trainer / behaviour - 1) over all sampled tokens", "< 0.2"),
        Metric("drift/kl", "nats", "KL(behaviour || trainer), k3, of tokens of older weights (age 1 and more)"),
        Metric("drift/abs_mean", "nats", "mean absolute difference of their log-probs"),
        Metric("drift/kl/<part>", "nats",
               "by age (`age_1`, `age_2`, `age_3`, `age_4_up`) and by position (as `mismatch/kl/<part>`)",
               "rises with age, not beyond 0.1"),
        Metric("drift/abs_mean/<part>", "nats", "the same"),
        Metric("correction/ess", "share", "effective sample size of the importance weights before the cap", "> 0.5"),
        Metric("correction/capped", "share", "tokens at `algorithm.importance_cap`", "< 0.01"),
        Metric("correction/rejected", "share", "tokens left out by `algorithm.rejection`", "< 0.1"),
        Metric("correction/rejected_sequences", "share", "sequences left out by it", "< 0.1"),
        Metric("correction/ess/<age>", "share", "by age, if any token is old: `age_0` to `age_4_up`"),
        Metric("correction/capped/<age>", "share", "the same"),
        Metric("correction/rejected/<age>", "share", "the same"),
        Metric("correction/rejected_sequences/<age>", "share", "the same; a sequence counts with its tokens' ages"),
    ),
    "Weight sync": (
        Metric("sync/bytes", "bytes", "payload that the engines received"),
        Metric("sync/seconds", "s", "duration of the transfer alone"),
        Metric("sync/pause_seconds", "s", "time during which engines served nothing"),
        Metric("sync/verify_seconds", "s", "digests of the slowest member, overlapped with the transfer"),
        Metric("sync/gb_per_s", "GB/s", "`sync/bytes` per second of `sync/seconds` (1e9 bytes)"),
    ),
    "Engines": (
        Metric("engines/serving", "–", "engines that serve after the step", "`rollout.replicas`"),
        Metric("engines/restarts", "–", "engines that were started again in this attempt", "0"),
        Metric("engines/groups/<replica>", "–", "groups of the batch that this engine generated",
               "equal, unless an engine is slow or was away"),
    ),
    "Evaluation": (
        Metric("eval/accuracy", "share", "right answers to held-out questions (`eval.right`), greedy, of those that "
               "were graded", "rises"),
        Metric("eval/reward", "reward", "mean total reward of the answers that have one"),
        Metric("eval/ungraded", "share", "questions that are neither right nor wrong: the reward failed, or an engine "
               "aborted the answer", "0"),
        Metric("eval/questions", "–", "questions asked"),
        Metric("eval/length_mean", "tokens", "mean sampled tokens of an answer"),
        Metric("eval/truncated", "share", "answers cut at the limit"),
    ),
}
ALL: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)


def lookup(name: str) -> Metric | None:
    """The table's row for `name`, including families."""
    return next((metric for metric in ALL if metric.matches(name)), None)


def check_names(names: Iterable[str], warned: set[str]) -> None:
    """Warn once about each name without a row. `warned` collects these names."""
    for name in names:
        if name not in warned and lookup(name) is None:
            near = nearest(name, (metric.name for metric in ALL))
            log.warning(f"metric {name!r} is not in the table of megatron_rl/monitor/metrics.py"
                        + (f"; did you mean {near!r}?" if near else ""))
            warned.add(name)


def markdown() -> str:
    """The page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Each step appends one JSON object to `runs/<name>/attempts/<n>/metrics.jsonl`. TensorBoard and",
        "Weights & Biases use the same names. Numbers that are not finite are the strings `NaN`, `Infinity` and",
        "`-Infinity`. A metric that does not apply to a step is absent. If two attempts hold the same step,",
        "`megatron-rl report` takes the newer one.",
        "",
        "`monitor.wandb_project` also sends the metrics to Weights & Biases, after `wandb login` or with",
        "WANDB_API_KEY. With WANDB_MODE=offline they stay in `runs/<name>/wandb` until `wandb sync`. A step that is",
        "repeated after a resume keeps its first values there.",
        "",
        "Every `monitor.samples_every` steps a few completions for people to read go to `samples.jsonl`. Every",
        "`monitor.rollouts_every` steps (0: never) the whole rollout batch goes to `rollouts/step-<n>.jsonl`, one JSON",
        "object per trajectory in the order of training, about 40 bytes a token:",
        "",
        "- `step`, `group` (place in the batch), `row` (of the data set), `sample` (place in the group), `engine`;",
        "- `prompt`, `completion`, `answer`, `tokens` (sampled ones), `finish_reason`;",
        "- `reward` (total; null without one), `components` (per function, unweighted), `status` (`ok`, `error`,",
        "  `timeout`, `aborted`);",
        "- `prompt_token_ids`, `token_ids`; per token `logprobs` (behaviour, after the temperature; exact float32) and",
        "  `weight_versions`, both null for tokens that a tool wrote.",
        "",
        "Such files suit offline analysis, distillation and `workload.response.path`.",
        "",
        "Warnings go to `warnings.jsonl` (`code`, `step`, `message`, `evidence`), the log, the display and the report.",
        "",
        "Generated from `megatron_rl/monitor/metrics.py` by `make docs`.",
    ]
    for title, metrics in SECTIONS.items():
        lines += ["", f"## {title}", "", "| metric | unit | meaning | healthy |", "|---|---|---|---|"]
        lines += [_table_row(metric) for metric in metrics]
    return "\n".join(lines) + "\n"


def _table_row(metric: Metric) -> str:
    meaning = metric.meaning.replace("|", "\\|")  # a bar would end the cell
    unit, healthy = ("" if cell == NONE else cell for cell in (metric.unit, metric.healthy))
    return f"| `{metric.name}` | {unit} | {meaning} | {healthy} |"


if __name__ == "__main__":
    print(markdown(), end="")
