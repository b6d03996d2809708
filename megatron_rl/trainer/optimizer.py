"""Gradients, Adam and the learning rate: Megatron's DDP and optimizer around the model chunks of one rank.

Gradients are plain sums over micro-batches, parts of a batch and DP x CP, divided once by the normaliser of the
*global* batch (`megatron_rl.trainer.model.sum_model_grads`). Nothing here divides by a world size or a micro-batch
count.

Two collectives over DP x CP may run behind compute. Gradients are reduced during the backward pass of the last
micro-batch of the last part: what is reduced before is summed over the ranks twice. Parameters are gathered during the
next forward pass, or at once if something other than a forward pass reads them next.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer import TransformerConfig

from launch.config.resolved import ResolvedConfig, ResolvedTrainer
from launch.errors import UserError
from megatron_rl.trainer.model import sum_model_grads

log = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of each optimizer step, as a function of the number of steps applied before.

    It has no state, so it cannot be stepped twice, counted in rollouts, or lost in a checkpoint.
    """

    kind: str
    """`constant`, `linear` or `cosine`."""
    peak: float
    final: float
    warmup: int
    """Optimizer steps of linear warm-up. Step `warmup - 1` is the first at the peak."""
    total: int
    """Optimizer steps of the whole run. The last one has `final`."""

    def at(self, step: int) -> float:
        """Learning rate of the optimizer step with this 0-based number."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup) / max(1, self.total - 1 - self.warmup))
        share = 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final + (self.peak - self.final) * share


def learning_rate(config: ResolvedConfig) -> LearningRate:
    """The schedule of a run, in optimizer steps: `run.steps` rollout batches with their optimizer steps."""
    section = config.trainer.optimizer
    return LearningRate(section.schedule, section.lr, section.min_lr, section.warmup_steps,
                        config.run.steps * config.algorithm.optimizer_steps)


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, equal on every rank."""

    applied: bool
    """False: the gradient was not finite and the weights are unchanged."""
    grad_norm: float
    """Global norm before clipping; NaN or infinite if the step was not applied."""
    learning_rate: float


class PolicyOptimizer:
    """Adam over the chunks of a rank, with clipping, the schedule and the rule for gradients that are not finite.

    Attributes:
        chunks: the chunks wrapped in Megatron's DDP, for forward and backward.
        megatron: Megatron's own optimizer.
        updates: optimizer steps applied so far. Adam's step count, the schedule and a resume all use this number.
        skipped_in_a_row: steps skipped since the last applied one.
        whole: whether the parameters are those of the last step. If not, the next forward pass gathers them.
    """

    def __init__(self, chunks: list[torch.nn.Module], model_config: TransformerConfig, trainer: ResolvedTrainer,
                 schedule: LearningRate) -> None:
        if not model_config.calculate_per_token_loss:
            raise ValueError("TransformerConfig.calculate_per_token_loss must be set before DDP is built: "
                             "without it DDP divides gradients by the data parallel size")
        self._overlap_grad_reduce, self._overlap_param_gather = trainer.overlap_grad_reduce, trainer.gathers_overlap
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=trainer.distributed_optimizer,
                                            grad_reduce_in_fp32=True, overlap_grad_reduce=self._overlap_grad_reduce,
                                            overlap_param_gather=self._overlap_param_gather)
        # A later chunk is one bucket: the compute of the other chunks hides its collectives.
        self.chunks = [DistributedDataParallel(model_config, ddp, chunk, disable_bucketing=number > 0)
                       for number, chunk in enumerate(chunks)]
        self._model_config = model_config
        self.whole = True
        self.megatron = get_megatron_optimizer(_optimizer_config(trainer), self.chunks)
        for part in self.parts:
            _allocate_adam_state(part)
        self.schedule = schedule
        self.updates = 0
        self.skipped_in_a_row = 0
        self.clip_grad = trainer.optimizer.clip_grad
        self.weight_decay = trainer.optimizer.weight_decay

    @property
    def parts(self) -> list[MegatronOptimizer]:
        """Megatron's optimizers behind the chain. A dense model has one."""
        return getattr(self.megatron, "chained_optimizers", [self.megatron])

    def zero_grad(self) -> None:
        """Clear all gradients. Call this before the first forward-backward pass of a step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around the passes over a part of the batch; `last`: no other part follows in this step."""
        with ExitStack() as stack:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            if not last:
                for each in no_sync:
                    stack.enter_context(each())
            elif self._overlap_grad_reduce:     # Megatron's schedule leaves it before the last micro-batch
                self._model_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
                stack.callback(setattr, self._model_config, "no_sync_func", None)
            yield

    def sum_gradients(self, normaliser: float, reducing: bool) -> None:
        """Complete the gradients (`sum_model_grads`). `reducing`: a backward pass of this step was the `last`."""
        if self._overlap_grad_reduce and not reducing:
            for chunk in self.chunks:
                chunk.start_grad_sync()
        sum_model_grads(self.chunks, normaliser)

    def step(self, gather: bool = True) -> StepResult:
        """Clip and apply the gradients, which `sum_gradients` has completed.

        Args:
            gather: do not leave the gather of the parameters to the next forward pass.

        Raises:
            UserError: the gradient was not finite for the third time in a row.
        """
        result = self._step()
        if self._overlap_param_gather:
            if gather:
                for chunk in self.chunks:
                    chunk.start_param_sync(force_sync=True)
            self.whole = gather
        return result

    def _step(self) -> StepResult:
        rate = self.schedule.at(self.updates)
        for group in self.megatron.param_groups:
            # Megatron leaves both to its scheduler. `wd_mult` is 0 for norms and biases, which Adam would otherwise
            # decay too.
            group["lr"] = rate * group["lr_mult"]
            group["weight_decay"] = self.weight_decay * group["wd_mult"]
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            return self._skip(norm, rate)
        if self.clip_grad > 0:
            for part in self.parts:
                if parameters := part.get_parameters():
                    clip_grad_by_total_norm_fp32(parameters, self.clip_grad, norm)
        self.megatron.step_with_ready_grads()
        self.updates += 1
        self.skipped_in_a_row = 0
        return StepResult(True, norm, rate)

    def weights_changed(self) -> None:
        """Tell the optimizer that the model's weights were written from outside (initial load), so that it updates its
        fp32 copies."""
        self.megatron.reload_model_params()

    def _skip(self, norm: float, rate: float) -> StepResult:
        self.skipped_in_a_row += 1
        log.warning("gradient norm is %s: update skipped, weights unchanged (%d in a row)", norm,
                    self.skipped_in_a_row)
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise UserError(
                f"the gradient was not finite {MAX_SKIPPED_IN_A_ROW} updates in a row (norm {norm}), after "
                f"{self.updates} good ones",
                where=f"trainer.optimizer.lr ({rate:g} at this step), trainer.dtype",
                fix="continue from the last checkpoint with a lower learning rate or a longer warm-up; "
                    "check the rewards for NaN")
        return StepResult(False, norm, rate)


def _optimizer_config(trainer: ResolvedTrainer) -> OptimizerConfig:
    section, bf16 = trainer.optimizer, trainer.dtype == "bf16"
    return OptimizerConfig(
        optimizer="adam", lr=section.lr, min_lr=section.min_lr, weight_decay=section.weight_decay,
        adam_beta1=section.beta1, adam_beta2=section.beta2, adam_eps=section.eps, clip_grad=section.clip_grad,
        bf16=bf16, params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=trainer.distributed_optimizer, overlap_param_gather=trainer.gathers_overlap)


def _allocate_adam_state(optimizer: MegatronOptimizer) -> None:
    """Allocate Adam's moments now, not at the first step, so a checkpoint can be written and read at any time.

    Megatron expects the state of `torch.optim.Adam` to exist when it builds a sharded state dict.
    """
    adam = optimizer.optimizer
    if not isinstance(adam, torch.optim.Optimizer):
        return
    optimizer.init_state_fn(adam, optimizer.config)
    if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):
        for state in adam.state.values():
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
