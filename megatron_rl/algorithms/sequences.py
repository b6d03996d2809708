"""Sums over the tokens of a sequence, which may lie on several ranks of context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


def _here(sums_KS: torch.Tensor) -> torch.Tensor:
    return sums_KS


@dataclass(frozen=True)
class Sequences:
    """The S sequences of a micro-batch that T tokens belong to. A micro-batch holds whole sequences, except that
    context parallelism gives every rank a part of each."""

    sequence_T: torch.Tensor
    """int64, the number of the token's sequence, below `count`. Equal on all ranks that share the micro-batch."""
    count: int
    add_up: Callable[[torch.Tensor], torch.Tensor] = _here
    """Adds a tensor over the ranks that hold the other tokens of the same sequences."""

    def sums(self, *values_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """For each argument [T], the sum over the sequence of each token, as float32 [T] without gradient. Summed in
        float64: the log-ratios of thousands of tokens cancel."""
        values_KT = torch.stack([each_T.detach().double() for each_T in values_T])
        sums_KS = values_KT.new_zeros(len(values_T), self.count).index_add_(1, self.sequence_T, values_KT)
        return tuple(self.add_up(sums_KS)[:, self.sequence_T].float())
