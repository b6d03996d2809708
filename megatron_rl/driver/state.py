"""What the loop itself must remember: the data, the place in it, the step. All of it goes into every checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.config.schema import RunConfig
from launch.errors import UserError
from launch.run.attempts import Attempt
from megatron_rl.data import dataset, template
from megatron_rl.data.batch import Prompt
from megatron_rl.data.sampler import PromptSampler
from megatron_rl.layouts.step_folder import latest_complete


@dataclass
class RunState:
    """The driver's own state.

    `step` counts finished steps. It is also the version of the weights: version k are the weights after step k, so
    that nothing can drift apart on a resume.
    """

    config: RunConfig
    prompts: list[Prompt]
    held_out: list[Prompt]
    sampler: PromptSampler
    identity: dict[str, str]
    """Hashes of what the two sides and a resumed run must agree on."""
    step: int = 0
    exports: bool = False
    """The run's last step still has to be exported, also when it is made already."""
    changes: list[str] = field(default_factory=list)
    """What a resumed run was started with differently."""
    saved: int = -1
    """Step of the newest checkpoint written or loaded."""

    @staticmethod
    def from_data(config: RunConfig, attempt: Attempt) -> RunState:
        """Read, render and tokenise the data once, for both sides.

        Raises:
            UserError: see `megatron_rl.data.dataset.load_prompts`.
        """
        tokenizer = template.load_tokenizer(config.model.path)
        prompts = dataset.load_prompts(config, tokenizer, "train")
        evaluates = config.eval.every > 0 or config.eval.at_start or config.eval.at_end
        held_out = dataset.load_prompts(config, tokenizer, "eval")[:config.eval.max_prompts] if evaluates else []
        rendering = template.PromptTemplate(tokenizer, chat_template=config.data.chat_template,
                                            system=config.data.system)
        rendering.check_end_token(template.stop_token_ids(tokenizer, config.model.path))
        content = dataset.fingerprint(prompts)
        sampler = PromptSampler(len(prompts), config.run.seed, config.data.shuffle, content)
        exports = config.checkpoint.export == "last" and not attempt.exported(config.run.steps).exists()
        return RunState(config, prompts, held_out, sampler, {"data": content, "template": rendering.fingerprint()},
                        exports=exports)

    @property
    def columns(self) -> list[str]:
        """Names of the data set's further columns."""
        return sorted({name for prompt in self.prompts for name in prompt.columns})

    def next_prompts(self) -> list[Prompt]:
        """The prompts of the next step."""
        return [self.prompts[row] for row in self.sampler.next(self.config.algorithm.prompts_per_step)]

    def extra(self) -> dict[str, Any]:
        """What a checkpoint keeps of this."""
        return {"step": self.step, "sampler": self.sampler.state_dict(), "identity": self.identity}

    def resume(self, loaded: dict[str, Any] | None) -> None:
        """Go on where a checkpoint was written; None is a run that begins.

        Raises:
            UserError: the run has already made all its steps, or its data or template changed.
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
                            fix="put the old files back, or start a run with another run.name")
        self.sampler.load_state_dict(extra["sampler"])
        self.step = self.saved = extra["step"]
        self.changes = list(loaded["changes"])


def refuse_old_export(state: RunState, attempt: Attempt) -> None:
    """A folder where this run's export would go is told before the run, not after it.

    Raises:
        UserError: there is one, and the run has steps to make.
    """
    folder = attempt.exported(state.config.run.steps)
    if state.config.checkpoint.export == "last" and state.step < state.config.run.steps and folder.exists():
        raise UserError(f"{folder} exists already: an earlier run with the same name was exported there",
                        where="run.name, run.steps", fix="remove that folder, use another run.name, or set "
                                                         "checkpoint.export=never")


def newest_checkpoint(attempt: Attempt, config: RunConfig) -> Path | None:
    """The checkpoint to go on from, if there is one.

    Raises:
        UserError: there is one and `run.resume` is `never`.
    """
    newest = latest_complete(attempt.checkpoints)
    if newest is not None and config.run.resume == "never":
        raise UserError(f"run {config.run.name!r} has a checkpoint and run.resume is never",
                        where=str(newest), fix="set run.resume=auto to go on from it, or use another run.name")
    return newest
