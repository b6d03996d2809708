"""Log-probs that stay fixed during the updates of a batch: proximal (old), reference, teacher.

They never leave the rank that computed them. Log-prob passes and updates of a batch have one schedule, so the rank that
needs a log-prob in the loss is the one that made it: the same sequences, the same split by context parallelism, the
same stage of the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from megatron_rl.data.batch import PolicyBatch
from megatron_rl.data.schedule import Schedule
from megatron_rl.trainer.step import FixedArguments

Model = Literal["policy", "reference", "teacher"]
_ARGUMENTS: dict[Model, str] = {"policy": "old_logprobs_T", "reference": "reference_logprobs_T",
                                "teacher": "teacher_logprobs_T"}


@dataclass(frozen=True)
class _OfBatch:
    lengths_B: np.ndarray
    schedule: Schedule
    arguments: dict[str, list[torch.Tensor]]


class FixedLogprobs:
    """This rank's log-probs of the batches of a step, by `PolicyBatch.number`. 4 bytes for each prediction of the rank
    and each model, on its device."""

    def __init__(self) -> None:
        self._batches: dict[int, _OfBatch] = {}

    def put(self, batch: PolicyBatch, schedule: Schedule, model: Model, values: list[torch.Tensor]) -> None:
        """Keep what `run_logprobs` returned for a batch."""
        kept = self._of(batch) or _OfBatch(batch.lengths_B, schedule, {})
        self._batches[batch.number] = kept
        kept.arguments[_ARGUMENTS[model]] = values

    def arguments(self, batch: PolicyBatch) -> FixedArguments:
        """What is kept for a batch, for `run_step` under the same schedule."""
        kept = self._of(batch)
        return kept.arguments if kept else {}

    def schedule(self, batch: PolicyBatch) -> Schedule | None:
        """The schedule of a batch for which something is kept."""
        kept = self._of(batch)
        return kept.schedule if kept else None

    def forget(self) -> None:
        """Drop everything, after the last update of a step."""
        self._batches.clear()

    def _of(self, batch: PolicyBatch) -> _OfBatch | None:
        kept = self._batches.get(batch.number)
        if kept is not None and not np.array_equal(kept.lengths_B, batch.lengths_B):
            raise RuntimeError(f"two batches of a step have the number {batch.number}")
        return kept
