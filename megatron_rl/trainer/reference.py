"""The frozen reference policy of the KL term: the weights that the run started from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from launch.config.resolved import ResolvedTrainer
from launch.plan.plan import Plan
from megatron_rl.data.batch import PolicyBatch
from megatron_rl.trainer.model import build_model
from megatron_rl.trainer.step import run_logprobs


class ReferenceModel:
    """A copy of the policy's chunks on the same ranks, in the same layout and precision, without gradients.

    It holds the run's *initial* weights, even if the run continues from a checkpoint. It needs memory for the shard's
    weights once more: on the device or, if offloaded, in (pinned) host memory, and then on the device only during a
    pass.
    """

    def __init__(self, policy: list[torch.nn.Module], plan: Plan, trainer: ResolvedTrainer, device: torch.device, *,
                 offload: bool) -> None:
        """Copy `policy`, the bare chunks of this rank."""
        self.plan, self.device = plan, device
        self.chunks = build_model(plan.architecture, plan.training, trainer, device)
        for mine, theirs in zip(self.chunks, policy, strict=True):
            mine.eval().requires_grad_(False)
            _copy_parameters(mine, theirs)
        self._host = _host_copies(self.chunks, device) if offload else None
        if self._host is not None:
            self._point_at_host()

    def logprobs(self, batch: PolicyBatch, temperature: float) -> np.ndarray:
        """Log-probs of the sampled tokens under the reference: float32 [N] on every rank, 0 for other tokens."""
        with self._on_device():
            return run_logprobs(self.chunks, self.plan, batch, temperature)

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


@torch.no_grad()
def _copy_parameters(mine: torch.nn.Module, theirs: torch.nn.Module) -> None:
    source = dict(theirs.named_parameters())
    for name, parameter in mine.named_parameters():
        parameter.copy_(source.pop(name))
    if source:
        raise RuntimeError(f"the reference lacks {sorted(source)} of the policy")


def _host_copies(chunks: list[torch.nn.Module],
                 device: torch.device) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    copies = []
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        host = parameter.detach().to("cpu", copy=True)
        copies.append((parameter, host.pin_memory() if device.type == "cuda" else host))
    return copies
