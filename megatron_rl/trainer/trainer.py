"""One training rank and everything it does, without Ray. Methods that compute are collective over the training ranks.

    parallel.initialise(plan, rank, address, port, timeout_s)
    trainer = MegatronTrainer(config, plan, rank)
    trainer.load_initial_weights()
    trainer.load(checkpoint)                 # to continue a run
    metrics = trainer.update(batch)
    trainer.save(folder, extra)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launch.config.resolved import ResolvedConfig
from launch.plan.plan import Plan
from megatron_rl.algorithms.mismatch import means
from megatron_rl.algorithms.objective import token_objective
from megatron_rl.data.batch import PolicyBatch
from megatron_rl.data.schedule import Schedule
from megatron_rl.layouts.hf_read import CheckpointReader, load_layout
from megatron_rl.layouts.hf_write import Exporter, export_part
from megatron_rl.layouts.megatron import Implementation, canonical_tensors, megatron_layout
from megatron_rl.layouts.step_folder import Exported, Part, Transferred, changed_since
from megatron_rl.layouts.tiles import ParamLayout
from megatron_rl.trainer import cpu, rng
from megatron_rl.trainer.checkpoint import Checkpoints
from megatron_rl.trainer.fixed_logprobs import FixedLogprobs, Model
from megatron_rl.trainer.frozen import FrozenModel, copy_of, read_from
from megatron_rl.trainer.initial_weights import draw_layout
from megatron_rl.trainer.model import DTYPES, build_model, named_parameters
from megatron_rl.trainer.optimizer import PolicyOptimizer, learning_rate
from megatron_rl.trainer.parallel import device_of_rank
from megatron_rl.trainer.step import run_logprobs, run_step, schedule_of


@dataclass(frozen=True)
class _Part:
    """What is left of a part of a batch beside its gradient."""

    sums: dict[str, float]
    """See `run_step`."""
    normaliser: float
    sequences: int
    microbatches: int
    """Of each rank."""


class MegatronTrainer:
    """One rank's shard of the policy, its optimizer, the reference and the teacher.

    The caller has joined the process group (`parallel.initialise`). Weights are undefined before
    `load_initial_weights`.
    """

    def __init__(self, config: ResolvedConfig, plan: Plan, rank: int) -> None:
        self.config, self.plan = config, plan
        self.coordinates = plan.training.ranks[rank]
        self.device = device_of_rank()
        rng.seed_rank(config.run.seed, self.coordinates)
        self._chunks = build_model(plan.architecture, plan.training, config.trainer, self.device)
        self.optimizer = PolicyOptimizer(self._chunks, self._chunks[0].config, config.trainer, learning_rate(config))
        self._checkpoints = Checkpoints(self._chunks, self.optimizer, self.coordinates, self._sizes(),
                                        config.checkpoint.keep)
        self._implementation: Implementation = "local" if cpu.needed() else "transformer_engine"
        self._layout = megatron_layout(plan.architecture, plan.training, rank, self._implementation)
        self._objective = partial(token_objective, config.algorithm)
        self._reference: FrozenModel | None = None
        self._teacher: FrozenModel | None = None
        self._parts: list[_Part] = []
        """The parts of the next optimizer step whose gradients are in Megatron's buffers."""
        self._fixed = FixedLogprobs()

    def load_initial_weights(self) -> None:
        """Fill the policy from the model folder or from `run.seed`, freeze a copy as the reference if beta > 0, and
        load the teacher if there is one.

        Raises:
            UserError: a folder's weights are missing, truncated, or do not match its config.json.
        """
        architecture = self.plan.architecture
        canonical = canonical_tensors(architecture)
        if self.config.model.init == "random":
            draw_layout(canonical, self._layout, self.parameters(), self.config.run.seed,
                        architecture.initializer_range)
        else:
            with CheckpointReader(self.config.model.path) as reader:
                load_layout(reader, canonical, self._layout, self.parameters())
        self.optimizer.weights_changed()
        kl = self.config.algorithm.kl
        if kl.beta > 0:
            self._reference = FrozenModel(self.plan, self.config.trainer, self.device, copy_of(self._chunks),
                                          offload=kl.reference_offload)
        self._load_teacher()

    def _load_teacher(self) -> None:
        distillation = self.config.algorithm.distillation
        if distillation.teacher is not None and self._teacher is None:
            plan = self.plan.of_teacher()
            self._teacher = FrozenModel(
                plan, self.config.trainer, self.device,
                read_from(distillation.teacher, plan, self.coordinates.rank, self._implementation),
                offload=distillation.offload)

    def accumulate(self, batch: PolicyBatch) -> None:
        """Add the gradient of a part of the next optimizer step's batch. Every rank has the part in full. Weights do
        not change.

        Raises:
            UserError: a sequence exceeds the token budget.
        """
        self._accumulate(batch, last=False)

    def _accumulate(self, batch: PolicyBatch, last: bool) -> None:
        if not self._parts:
            self.optimizer.zero_grad()
        schedule = self._schedule(batch)
        with self.optimizer.backward(last):
            sums = run_step(self.optimizer.chunks, self.plan, batch, self._objective, self.config.rollout.temperature,
                            schedule, self._fixed.arguments(batch))
        self._parts.append(_Part(sums, batch.normaliser, len(batch.lengths_B), len(schedule[0])))

    def update(self, batch: PolicyBatch | None, index: int = 0, more: bool = False) -> dict[str, float]:
        """Run one optimizer step on a batch: the parts that `accumulate` has had, and this last one if there is one.
        The gradient is that of the whole, up to the order of summation.

        Args:
            index: number of updates of the same rollout batch before this one.
            more: another update of the same rollout batch follows. Without one, the parameters are gathered at once
                (`trainer.overlap_param_gather`), and what `keep_logprobs` keeps is dropped.

        Returns:
            Metrics by the names in `megatron_rl.monitor.metrics`, equal on every rank. Without old log-probs,
            `mismatch/*` and `drift/*` exist only for the first update of a rollout batch, because the weights then
            still are those of the step's start.

        Raises:
            UserError: a sequence exceeds the token budget, or gradients were not finite three times in a row.
        """
        if batch is not None:
            self._accumulate(batch, last=True)
        parts, self._parts = self._parts, []
        normaliser = sum(part.normaliser for part in parts)
        self.optimizer.sum_gradients(normaliser, reducing=batch is not None)
        result = self.optimizer.step(gather=not more)
        metrics = means(_together([part.sums for part in parts]))
        metrics["train/loss"] /= normaliser or 1.0
        if self.config.algorithm.old_logprobs != "recompute" and index > 0:
            metrics = {name: value for name, value in metrics.items()
                       if not name.startswith(("mismatch/", "drift/"))}
        if not more:
            self._fixed.forget()
        metrics["train/clip_fraction"] = metrics["train/clip_fraction_high"] + metrics["train/clip_fraction_low"]
        return metrics | {"train/grad_norm": result.grad_norm, "train/lr": result.learning_rate,
                          "train/skipped": float(not result.applied),
                          "train/sequences": float(sum(part.sequences for part in parts)),
                          "train/microbatches": float(sum(part.microbatches for part in parts))}

    def keep_logprobs(self, batch: PolicyBatch, model: Model) -> None:
        """Compute log-probs that stay fixed during the updates of a batch, and keep them for these: of the policy as it
        is now (`algorithm.old_logprobs: recompute`), of the reference or of the teacher."""
        schedule = self._schedule(batch)
        self._fixed.put(batch, schedule, model, self.logprobs(batch, model, schedule))

    def logprobs(self, batch: PolicyBatch, model: Model = "policy",
                 schedule: Schedule | None = None) -> list[torch.Tensor]:
        """Log-probs of this rank's predictions at the sampling temperature, see `run_logprobs`."""
        temperature, schedule = self.config.rollout.temperature, schedule or schedule_of(batch, self.plan)
        if model == "policy":
            return run_logprobs(self.optimizer.chunks, self.plan, batch, temperature, schedule)
        frozen = self._reference if model == "reference" else self._teacher
        if frozen is None:
            key = "algorithm.kl.beta is 0" if model == "reference" else "algorithm.distillation.teacher is null"
            raise RuntimeError(f"there is no {model} model: {key}, or no weights have been loaded")
        return frozen.logprobs(batch, temperature, schedule)

    def _schedule(self, batch: PolicyBatch) -> Schedule:
        """One schedule for all passes over a batch, computed once."""
        return self._fixed.schedule(batch) or schedule_of(batch, self.plan)

    def layout(self) -> list[ParamLayout]:
        """Layout of this rank's parameters, as tiles of the Hugging Face tensors."""
        return self._layout

    def parameters(self) -> dict[str, torch.Tensor]:
        """This rank's live parameters, by their names in `layout()`. Raises RuntimeError as `require_whole`."""
        self.require_whole()
        return named_parameters(self._chunks)

    def require_whole(self) -> None:
        """Whoever reads weights outside of a forward pass calls this first.

        Raises:
            RuntimeError: after `update(more=True)`. The rank holds old weights until it has gathered the new ones.
        """
        if not self.optimizer.whole:
            raise RuntimeError("the weights were updated with more=True: they are gathered in the next forward pass")

    def save(self, folder: str | Path, extra: dict[str, Any], rollouts: bytes = b"") -> None:
        """Write a checkpoint to `folder` (`checkpoints/step-000050`) and keep the newest `checkpoint.keep` ones.

        Args:
            extra: the driver's own state, as JSON: weight version, data position, counters, ... `load` compares what is
                under `identity` (hashes of data set, tokenizer, template, ...).
            rollouts: groups that were generated ahead (`megatron_rl.data.carried`).

        Raises:
            UserError: the disk is full or cannot be written. Earlier checkpoints are unchanged.
        """
        self.begin_save(folder, extra, rollouts, background=False)
        self._checkpoints.wait()

    def begin_save(self, folder: str | Path, extra: dict[str, Any], rollouts: bytes = b"", *,
                   background: bool) -> None:
        """Begin what `save` does, after an unfinished save. `checkpoint_progress` tells how far it is.

        Args:
            background: the next update may begin at once. Otherwise weights must not change before the save is
                finished.
        """
        self.require_whole()
        state = {"model": self._model_facts(), "identity": self._identity(), "extra": extra}
        self._checkpoints.begin_save(Path(folder), state, rollouts, background=background)

    def load(self, folder: str | Path, identity: dict[str, str] | None = None) -> dict[str, Any]:
        """Continue from a checkpoint, in this layout or another. The reference stays at the initial weights, and the
        teacher at its own.

        Args:
            identity: the current value of `extra["identity"]`.

        Returns:
            `extra` as it was saved; `updates`, the optimizer steps applied so far; `changes`, one line per setting or
            identity that differs from the saved run; `rng_restored`, False in another layout, where ranks are seeded
            anew from the seed and the step.

        Raises:
            UserError: the checkpoint is incomplete, another user's, or of another model, precision or optimizer.
        """
        self.begin_load(folder)
        self._checkpoints.wait()
        return self.finish_load(folder, identity)

    def begin_load(self, folder: str | Path) -> None:
        """Begin what `load` does. `checkpoint_progress` tells how far it is."""
        if self.config.algorithm.kl.beta > 0 and self._reference is None:
            self.load_initial_weights()
        self._load_teacher()
        self._checkpoints.begin_load(Path(folder), self._model_facts())

    def finish_load(self, folder: str | Path, identity: dict[str, str] | None = None) -> dict[str, Any]:
        """The end of `load`, after the checkpoint has been read."""
        loaded = self._checkpoints.finish_load(Path(folder))
        if not loaded.rng_restored:
            rng.seed_rank(self.config.run.seed, self.coordinates, step=self.optimizer.updates)
        state = loaded.state
        changes = changed_since(state["identity"], self._identity())
        if identity is not None:
            changes += changed_since(state["extra"].get("identity", {}), identity)
        return {"extra": state["extra"], "updates": self.optimizer.updates, "changes": changes,
                "rng_restored": loaded.rng_restored}

    def checkpoint_progress(self, within_s: float) -> Transferred:
        """How far a save or load is. Returns when it ends, at the latest after `within_s` seconds.

        Raises:
            UserError: it has failed: the disk is full, or a file cannot be written or read.
        """
        return self._checkpoints.progress(within_s)

    def export(self, folder: str | Path, part: Part) -> Exported:
        """Carry out one part of writing the policy as a Hugging Face folder (`weight_sync.disk.write_folder`). It is
        not collective: each rank writes the bytes it owns. Errors of the file system are returned in the answer."""
        exporter = Exporter(folder, canonical_tensors(self.plan.architecture), DTYPES[self.config.trainer.dtype])
        return export_part(exporter, part, self.config.model.path, self.plan.architecture, self.plan.training,
                           self.coordinates.rank, self._implementation, self.parameters())

    def _sizes(self) -> dict[str, int]:
        training = self.plan.training
        return {name: getattr(training, name) for name in ("tp", "pp", "vpp", "cp", "dp")}

    def _model_facts(self) -> dict[str, Any]:
        """Facts that must be equal for the tensors of a checkpoint to have the same meaning."""
        trainer = self.config.trainer
        return {"architecture": asdict(self.plan.architecture), "dtype": trainer.dtype,
                "distributed_optimizer": trainer.distributed_optimizer}

    def _identity(self) -> dict[str, str]:
        """Settings that may be changed on a resume, which is then reported."""
        config = self.config
        optimizer = {f"trainer.optimizer.{name}": str(value)
                     for name, value in config.trainer.optimizer.model_dump().items()}
        sizes = {f"trainer.{name}": str(size) for name, size in self._sizes().items()}
        return {"plan": self.plan.fingerprint(), "model.path": config.model.path, "model.init": config.model.init,
                "algorithm.distillation.teacher": str(config.algorithm.distillation.teacher),
                "run.seed": str(config.run.seed), "run.steps": str(config.run.steps), **optimizer, **sizes}


def _together(sums_of_parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sums (maxima if the name ends in `_max`) over all parts of a batch."""
    return {name: float((np.max if name.endswith("_max") else np.sum)([sums[name] for sums in sums_of_parts]))
            for name in sums_of_parts[0]}
