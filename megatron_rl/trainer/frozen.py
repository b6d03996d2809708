"""Frozen models beside the policy: the reference of the KL term and the teacher of on-policy distillation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from launch.config.resolved import ResolvedTrainer
from launch.plan.plan import Plan
from megatron_rl.data.batch import PolicyBatch
from megatron_rl.data.schedule import Schedule
from megatron_rl.layouts.hf_read import CheckpointReader, load_layout
from megatron_rl.layouts.megatron import Implementation, canonical_tensors, megatron_layout
from megatron_rl.trainer.model import build_model, named_parameters
from megatron_rl.trainer.step import run_logprobs

Chunks = list[torch.nn.Module]


class FrozenModel:
    """A model on the policy's ranks, with the same parallel sizes and precision, without gradients.

    It needs memory for the shard's weights: on the device or, if offloaded, in (pinned) host memory, and then on the
    device only during a pass.
    """

    def __init__(self, plan: Plan, trainer: ResolvedTrainer, device: torch.device, fill: Callable[[Chunks], None], *,
                 offload: bool) -> None:
        """Build the model of `plan`; `fill` writes the weights into its chunks."""
        self.plan, self.device = plan, device
        trainer = trainer.model_copy(update={"gradient_accumulation_fusion": False})    # there are no gradients
        self.chunks: Chunks = [*build_model(plan.architecture, plan.training, trainer, device)]
        fill(self.chunks)
        for chunk in self.chunks:
            chunk.eval().requires_grad_(False)
        self._host = _host_copies(self.chunks, device) if offload else None
        if self._host is not None:
            self._point_at_host()

    def logprobs(self, batch: PolicyBatch, temperature: float, schedule: Schedule) -> list[torch.Tensor]:
        """Log-probs of this rank's predictions under the model, see `run_logprobs`."""
        with self._on_device():
            return run_logprobs(self.chunks, self.plan, batch, temperature, schedule)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if self._host is None:
            yield
            return
        for parameter, host in self._host:
            parameter.data = host.to(self.device, non_blocking=True)
        try:
            yield
        finally:
            self._point_at_host()

    def _point_at_host(self) -> None:
        """Point the parameters at the host copies. Nothing is copied back, because frozen weights do not change."""
        for parameter, host in self._host or ():
            parameter.data = host


def copy_of(policy: Chunks) -> Callable[[Chunks], None]:
    """Fill a model with the weights of `policy`, the bare chunks of this rank."""
    @torch.no_grad()
    def fill(chunks: Chunks) -> None:
        for mine, theirs in zip(chunks, policy, strict=True):
            source = dict(theirs.named_parameters())
            for name, parameter in mine.named_parameters():
                parameter.copy_(source.pop(name))
            if source:
                raise RuntimeError(f"the frozen model lacks {sorted(source)} of the policy")
    return fill


def read_from(folder: str, plan: Plan, rank: int, implementation: Implementation) -> Callable[[Chunks], None]:
    """Fill a model with this rank's part of a Hugging Face folder. Raises UserError as `load_layout`."""
    def fill(chunks: Chunks) -> None:
        with CheckpointReader(folder) as reader:
            load_layout(reader, canonical_tensors(plan.architecture),
                        megatron_layout(plan.architecture, plan.training, rank, implementation),
                        named_parameters(chunks))
    return fill


def _host_copies(chunks: Chunks, device: torch.device) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    copies = []
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        host = parameter.detach().to("cpu", copy=True)
        copies.append((parameter, host.pin_memory() if device.type == "cuda" else host))
    return copies
