"""The loop's own state: the data, the position in it and the step. Every checkpoint stores it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.config.resolved import ResolvedConfig
from launch.errors import UserError
from launch.run.attempts import Attempt
from megatron_rl.algorithms.staleness import StalenessBound
from megatron_rl.data import dataset, template
from megatron_rl.data.batch import Prompt
from megatron_rl.data.curriculum import Guarded, load_curriculum
from megatron_rl.data.overlong import EFFECTS
from megatron_rl.data.sampler import BatchSampler, PromptSampler
from megatron_rl.driver.ledger import Ledger
from megatron_rl.layouts.step_folder import latest_complete
from megatron_rl.rewards.load import load_rewards
from megatron_rl.rollout.sampling import numbered


@dataclass
class RunState:
    """The driver's own state.

    `step` counts finished steps. It is also the weight version: version k is the weights after step k, so step and
    version cannot diverge on a resume.
    """

    config: ResolvedConfig
    prompts: list[Prompt]
    held_out: list[Prompt]
    sampler: BatchSampler
    identity: dict[str, str]
    """Hashes of what engines, trainer and a resumed run must share."""
    staleness: StalenessBound
    ledger: Ledger
    step: int = 0
    exports: bool = False
    """The last step still has to be exported, even if it was trained earlier."""
    changes: list[str] = field(default_factory=list)
    """Settings that a resumed run changed."""
    saved: int = -1
    """Step of the newest checkpoint written or loaded."""
    overlong: list[str] = field(default_factory=list)
    """What became of prompts over the limit."""

    @staticmethod
    def from_data(config: ResolvedConfig, attempt: Attempt) -> RunState:
        """Read, render and tokenise the data once, for engines and trainer.

        Raises:
            UserError: the data cannot be used (`megatron_rl.data.dataset.load_prompts`), or the rewards
                (`megatron_rl.rewards.load`). A wrong path is reported before anything starts.
        """
        tokenizer = template.load_tokenizer(config.model.path)
        prompts, overlong = dataset.load(config, tokenizer, "train")
        evaluates = config.eval.every > 0 or config.eval.at_start or config.eval.at_end
        held_out, overlong_eval = dataset.load(config, tokenizer, "eval") if evaluates else dataset.DataSet([], None)
        rendering = template.PromptTemplate(tokenizer, chat_template=config.data.chat_template,
                                            system=config.data.system)
        rendering.check_end_token(template.stop_token_ids(tokenizer, config.model.path))
        rewards = load_rewards(config.reward, _columns(prompts))
        rendering.check_visible(tag for reward in rewards for tag in reward.thinking or ())
        content = dataset.fingerprint(prompts)
        sampler = _sampler(config, prompts)
        exports = config.checkpoint.export == "last" and not attempt.exported(config.run.steps).exists()
        identity = {"data": content, "template": rendering.fingerprint(),
                    "overlong": overlong.identity if overlong else "none"}
        notes = [f"data.{split}: {found}. data.overlong = {found.rule}: {EFFECTS[found.rule]}"
                 for split, found in (("train", overlong), ("eval", overlong_eval)) if found]
        return RunState(config, prompts, held_out[:config.eval.max_prompts], sampler, identity,
                        StalenessBound(config.algorithm.max_staleness), Ledger(_order(config, prompts)),
                        exports=exports, overlong=notes)

    @property
    def columns(self) -> list[str]:
        """Names of the data set's further columns."""
        return _columns(self.prompts)

    def draw(self) -> list[Prompt]:
        """Draw the prompts of the next batch, ahead of its training."""
        return numbered([self.prompts[row] for row in self.sampler.draw()])

    def taken(self, rewards: Sequence[tuple[int, list[float]]]) -> None:
        """The loop has the next batch. `rewards`: row and rewards of every group that was generated for it."""
        self.sampler.taken(rewards)

    def trained(self, step: int, prompts: Sequence[Prompt], replaced: Sequence[Prompt] = ()) -> None:
        """`step` is finished and trained the groups of `prompts`. Dynamic sampling replaced those of `replaced`."""
        picked = self.sampler.trained()
        waiting = self.sampler.waiting if self.config.data.curriculum is None else []
        self.ledger.settle(picked, [prompt.index for prompt in prompts], [prompt.index for prompt in replaced], waiting)
        self.step = step

    def extra(self) -> dict[str, Any]:
        """The part of the state that a checkpoint stores."""
        return {"step": self.step, "sampler": self.sampler.state_dict(), "identity": self.identity,
                "staleness": self.staleness.state_dict(), "ledger": self.ledger.state_dict()}

    def resume(self, loaded: dict[str, Any] | None) -> None:
        """Continue from a checkpoint, or start a new run if `loaded` is None.

        Raises:
            UserError: the run has already made all its steps, or its data, template or curriculum changed.
        """
        if loaded is None:
            return
        extra, steps = loaded["extra"], self.config.run.steps
        if extra["step"] > steps or (extra["step"] == steps and not self.exports):
            raise UserError(f"run {self.config.run.name!r} has already made its {extra['step']} steps",
                            where="run.steps", fix=f"raise run.steps above {extra['step']}, use another run.name, or "
                                                   "launch with --fresh")
        if extra["identity"]["template"] != self.identity["template"]:
            raise UserError("the tokenizer or chat template changed since the checkpoint", where="model.path",
                            fix="restore the old files, or start a run with another run.name")
        then, now = extra["identity"].get("overlong", "none"), self.identity["overlong"]
        if extra["identity"]["data"] != self.identity["data"] and then != now:
            raise UserError(f"the treatment of prompts over the limit was {then!r} when the checkpoint was written, "
                            f"and is {now!r} now", where="data.overlong, rollout.max_prompt_tokens",
                            fix="restore both keys, or start a run with another run.name")
        if extra["identity"]["data"] != self.identity["data"]:
            raise UserError(f"the data set changed since the checkpoint: fingerprint {extra['identity']['data']} then, "
                            f"{self.identity['data']} now", where="data.train",
                            fix="restore the old data set, or start a run with another run.name")
        self.sampler.load_state_dict(extra["sampler"])
        self.staleness.load_state_dict(extra["staleness"])
        self.ledger.load_state_dict(extra["ledger"])
        self.step = self.saved = extra["step"]
        self.changes = list(loaded["changes"])


def _columns(prompts: list[Prompt]) -> list[str]:
    return sorted({name for prompt in prompts for name in prompt.columns})


def _order(config: ResolvedConfig, prompts: list[Prompt]) -> PromptSampler | None:
    """The shuffled epochs, if they decide which prompts come."""
    if config.data.curriculum is not None:
        return None
    return PromptSampler(len(prompts), config.run.seed, config.data.shuffle)


def _sampler(config: ResolvedConfig, prompts: list[Prompt]) -> BatchSampler:
    """Draws the batches of a run. The curriculum hears every batch as late as the bound on the staleness may make it.
    """
    name, algorithm = config.data.curriculum, config.algorithm
    curriculum = _order(config, prompts) or load_curriculum(name or "", prompts, config.run.seed)
    return BatchSampler(Guarded(curriculum, name or "the shuffled epoch", len(prompts)), algorithm.prompts_per_step,
                        algorithm.reserve, lag=algorithm.max_staleness)


def refuse_old_export(state: RunState, attempt: Attempt) -> None:
    """Report an existing folder at the place of this run's export before the run, not after it.

    Raises:
        UserError: the folder exists and the run has steps to make.
    """
    folder = attempt.exported(state.config.run.steps)
    if state.config.checkpoint.export == "last" and state.step < state.config.run.steps and folder.exists():
        raise UserError(f"{folder} already exists: an earlier run with the same name was exported there",
                        where="run.name, run.steps", fix="remove that folder, use another run.name, or set "
                                                         "checkpoint.export=never")


def newest_checkpoint(attempt: Attempt, config: ResolvedConfig) -> Path | None:
    """Return the checkpoint to resume from, if there is one.

    Raises:
        UserError: there is a checkpoint and `run.resume` is `never`.
    """
    newest = latest_complete(attempt.checkpoints)
    if newest is not None and config.run.resume == "never":
        raise UserError(f"run {config.run.name!r} has a checkpoint and run.resume is never",
                        where=str(newest), fix="set run.resume=auto to resume from it, or use another run.name")
    return newest
