"""Every metric of a run: name, unit, meaning, healthy range. docs/metrics.md is printed from this table
(`python -m megatron_rl.monitor.metrics > docs/metrics.md`), and a name that is not in it is warned of."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Metric:
    """One row of the table. A name that ends in `/<x>` stands for every name with that prefix."""

    name: str
    unit: str
    meaning: str
    healthy: str = "–"

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
        Metric("step", "–", "number of the step, 1 for the first rollout batch; 0 is an evaluation before training",
               "rises by 1 a line"),
        Metric("timestamp", "s", "when the line was written, seconds since 1970-01-01 UTC"),
        Metric("weights/version", "–", "weight version that the engines serve after the step", "equals the step"),
    ),
    "Reward": (
        Metric("reward/mean", "reward", "mean total reward of the batch, truncated completions included", "rises"),
        Metric("reward/std", "reward", "standard deviation over the batch", "> 0"),
        Metric("reward/max", "reward", "largest total reward of the batch"),
        Metric("reward/errors", "share", "completions whose reward raised or ran out of time and scored 0", "0"),
        Metric("reward/component/<function>", "reward",
               "mean of one reward function before its weight, for runs with several"),
        Metric("group/zero_variance", "share",
               "groups whose G rewards are all equal: they carry no gradient", "< 0.7 until the task is solved"),
        Metric("group/all_right", "share", "groups with every reward at least 1", "rises late"),
        Metric("group/all_wrong", "share", "groups with no reward above 0", "falls"),
        Metric("group/reward_std", "reward", "mean over groups of the standard deviation inside a group", "> 0"),
        Metric("group/dropped", "share", "groups left out, because engines gave up all but one of their completions",
               "0"),
    ),
    "Completions": (
        Metric("response/length_mean", "tokens", "mean length of a completion, the stop token included",
               "no collapse to 1, no drift to the limit"),
        Metric("response/length_max", "tokens", "longest completion"),
        Metric("response/length_min", "tokens", "shortest completion"),
        Metric("response/truncated", "share", "completions cut at `rollout.max_new_tokens`", "< 0.3"),
        Metric("response/masked", "share", "completions kept out of the loss (`algorithm.truncated: mask`)"),
        Metric("response/aborted", "share",
               "completions that an engine gave up: in neither the loss nor the baseline", "0"),
        Metric("prompt/length_mean", "tokens", "mean length of a prompt, the chat template included"),
    ),
    "Time": (
        Metric("time/step", "s", "wall-clock time of the whole step"),
        Metric("time/rollout", "s", "generating the completions"),
        Metric("time/reward", "s", "scoring them, after the last one has arrived"),
        Metric("time/logprob", "s", "passes that only compute log-probs: old policy, reference"),
        Metric("time/train", "s", "forward, backward and optimizer of all updates"),
        Metric("time/sync", "s", "weights from trainer to engines, verification included"),
        Metric("time/eval", "s", "evaluation; not part of `time/step`"),
        Metric("time/checkpoint", "s", "writing a checkpoint; not part of `time/step`"),
        Metric("time/disk", "s", "waiting for a version of the weights to be on disk (`weight_sync.disk`); part of "
                                 "`time/other`"),
        Metric("time/other", "s", "`time/step` less rollout, reward, logprob, train and sync",
               "< 5 % of `time/step` for a real model"),
        Metric("throughput/samples_per_s", "1/s", "completions trained on over `time/step`"),
        Metric("throughput/tokens_per_s", "1/s", "prompt and completion tokens trained on over `time/step`"),
        Metric("throughput/rollout_tokens_per_s", "1/s", "completion tokens over `time/rollout`"),
    ),
    "Update": (
        Metric("train/loss", "–", "policy loss with KL and entropy terms, mean over the step's updates",
               "near 0 on-policy: its value says little, its gradient counts"),
        Metric("train/grad_norm", "–", "global gradient norm before clipping", "steady; < 10 x its median"),
        Metric("train/lr", "–", "learning rate of the last update"),
        Metric("train/entropy", "nats", "mean entropy of the policy over completion tokens",
               "falls slowly; not to 0 before the task is solved"),
        Metric("train/kl", "nats", "KL to the reference by `algorithm.kl.estimator`, token mean", "< 0.1"),
        Metric("train/ratio_mean", "–", "mean of current over old probability", "0.99 to 1.01"),
        Metric("train/ratio_max", "–", "largest such ratio of a token"),
        Metric("train/clip_fraction", "share", "tokens whose clipped branch is the active one", "< 0.2"),
        Metric("train/clip_fraction_high", "share", "tokens clipped from above"),
        Metric("train/clip_fraction_low", "share", "tokens clipped from below"),
        Metric("train/dual_clip_fraction", "share", "tokens held by the dual clip", "< 0.01"),
        Metric("train/tokens", "tokens", "tokens the loss was summed over"),
        Metric("train/sequences", "–", "sequences packed into the step's updates"),
        Metric("train/microbatches", "–", "micro-batches of one data-parallel rank"),
        Metric("train/skipped", "–", "updates skipped because a gradient was not finite", "0"),
    ),
    "Engine against trainer": (
        Metric("mismatch/kl", "nats",
               "KL(behaviour || trainer) by k3 on the sampled tokens: engine and trainer, same weights",
               "fp32 < 1e-5, bf16 around 1e-3; a steep rise: the weights are not arriving"),
        Metric("mismatch/abs_mean", "nats", "mean absolute difference of the two log-probs",
               "fp32 < 1e-4, bf16 < 0.05"),
        Metric("mismatch/abs_max", "nats", "largest absolute difference of a token", "fp32 < 1e-2, bf16 of the order of 1"),
        Metric("mismatch/ratio_mean", "–", "mean of trainer over behaviour probability", "0.98 to 1.02"),
        Metric("mismatch/capped", "share", "tokens whose importance weight reached `algorithm.importance_cap`",
               "< 0.01"),
        Metric("staleness/mean", "versions", "trainer version less the version that sampled a token", "0 here"),
        Metric("staleness/max", "versions", "the oldest token's", "0 here"),
    ),
    "Weight sync": (
        Metric("sync/bytes", "bytes", "payload that the engines took in, from the trainer or from one another"),
        Metric("sync/seconds", "s", "duration of the transfer alone"),
        Metric("sync/pause_seconds", "s", "how long the engines served nothing"),
        Metric("sync/verify_seconds", "s", "digests of the source and of what the engines hold, of the slowest member; "
               "they are taken while other buckets travel"),
        Metric("sync/gb_per_s", "GB/s", "`sync/bytes` over `sync/seconds`, 1e9 bytes"),
    ),
    "Evaluation": (
        Metric("eval/accuracy", "share", "held-out questions answered rightly (by `eval.right`), greedy", "rises"),
        Metric("eval/reward", "reward", "mean total reward on them"),
        Metric("eval/questions", "–", "how many were asked"),
        Metric("eval/length_mean", "tokens", "mean length of their answers"),
        Metric("eval/truncated", "share", "of them cut at the limit"),
    ),
}
ALL: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)


class UnknownMetric(ValueError):
    """A metric name that the table does not hold: a bug of the caller, not of the user."""


def lookup(name: str) -> Metric | None:
    """The table's row for `name`, families included."""
    return next((metric for metric in ALL if metric.matches(name)), None)


def check_names(names: Iterable[str], *, strict: bool, warned: set[str] | None = None) -> None:
    """Raise UnknownMetric (`strict`) or warn once about names without a row. `warned` remembers those warned of."""
    for name in names:
        if lookup(name) is not None:
            continue
        near = get_close_matches(name, [metric.name for metric in ALL], n=1)
        message = f"metric {name!r} is not in the table of megatron_rl/monitor/metrics.py" + (
            f"; did you mean {near[0]!r}?" if near else "")
        if strict:
            raise UnknownMetric(message)
        if warned is None or name not in warned:
            log.warning(message)
        if warned is not None:
            warned.add(name)


def markdown() -> str:
    """The page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "One JSON object a step in `runs/<name>/attempts/<n>/metrics.jsonl`; the same names in TensorBoard and",
        "Weights & Biases. Numbers that are not finite are written as the strings `NaN`, `Infinity` and `-Infinity`,",
        "so that every line is valid JSON. A metric that does not apply to a step is absent, not zero.",
        "",
        "Each attempt has a file of its own, which is only appended to. After a resume from step k the new attempt",
        "goes on with k + 1; where two attempts hold the same step, `megatron-rl report` takes the newer one.",
        "",
        "With `monitor.wandb_project` the same metrics go to Weights & Biases, one run there a run folder (its id lies",
        "in `runs/<name>/wandb-id`), after `wandb login` or with WANDB_API_KEY; with WANDB_MODE=offline they stay in",
        "`runs/<name>/wandb` until `wandb sync`. W&B takes a step once: one that a resume makes again keeps its first",
        "values there. Unlike everything else in a job, this sends data off the machine.",
        "",
        "Warnings (divergence, settings that a resume changed) go to `warnings.jsonl`, the log, the display and the",
        "report: one object each with `code`, `step`, `message` and `evidence`.",
        "",
        "This page is printed from `megatron_rl/monitor/metrics.py` by `make docs`.",
    ]
    for title, metrics in SECTIONS.items():
        lines += ["", f"## {title}", "", "| metric | unit | meaning | healthy |", "|---|---|---|---|"]
        lines += [_table_row(metric) for metric in metrics]
    return "\n".join(lines) + "\n"


def _table_row(metric: Metric) -> str:
    meaning = metric.meaning.replace("|", "\\|")  # a bar would end the cell
    return f"| `{metric.name}` | {metric.unit} | {meaning} | {metric.healthy} |"


if __name__ == "__main__":
    print(markdown(), end="")
