"""Packed micro-batches: which sequences go where, and the arrays of one micro-batch on one rank.

The schedule is computed once on the global batch, by every rank alike, so that no rank can run another number of
micro-batches than its peers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from launch.errors import UserError
from megatron_rl.data.batch import PolicyBatch

Schedule = tuple[tuple[tuple[int, ...], ...], ...]
"""`schedule[dp_rank][micro_batch]`: indices of sequences; empty where there are fewer sequences than places."""

# A sequence of L tokens is taken to cost L (1 + L / _ATTENTION_LENGTH): attention costs as much as the linear layers
# at roughly 12 hidden sizes.
_ATTENTION_LENGTH = 32_768


def make_schedule(lengths_B: np.ndarray, dp: int, token_budget: int, multiple: int = 1,
                  micro_batch_multiple: int = 1) -> Schedule:
    """Distribute B sequences over DP ranks and micro-batches: longest first, each to the cheapest place with room.

    Args:
        lengths_B: tokens of each sequence.
        dp: data parallel size.
        token_budget: most tokens of a micro-batch, padding of the sequences to `multiple` included.
        multiple: each sequence is padded to a multiple of this (2 CP x TP under context or sequence parallelism).
        micro_batch_multiple: the number of micro-batches is a multiple of this (PP for interleaved schedules).

    Returns:
        The same number of micro-batches for every DP rank; every sequence exactly once.

    Raises:
        UserError: a sequence alone is over the budget.
    """
    lengths_B = np.asarray(lengths_B, np.int64)
    padded_B = -(-lengths_B // multiple) * multiple
    if len(padded_B) and padded_B.max() > token_budget:
        worst = int(padded_B.argmax())
        raise UserError(
            f"sequence {worst} of the batch has {lengths_B[worst]} tokens, {padded_B[worst]} with padding; a "
            f"micro-batch holds at most trainer.token_budget = {token_budget}", where="trainer.token_budget",
            fix=f"set trainer.token_budget to at least {padded_B[worst]}, or lower rollout.max_new_tokens")
    count = max(1, -(-int(padded_B.sum()) // (dp * token_budget)))
    while True:
        count = -(-count // micro_batch_multiple) * micro_batch_multiple
        places = _fill(padded_B, dp * count, token_budget)
        if places is not None:
            # Places are ordered by DP rank last: neighbours in cost go to different ranks.
            return tuple(tuple(tuple(sorted(places[m * dp + d])) for m in range(count)) for d in range(dp))
        count += 1


def common_length(schedule: Schedule, lengths_B: np.ndarray, multiple: int = 1) -> int:
    """Tokens of the largest micro-batch of the schedule."""
    padded_B = -(-np.asarray(lengths_B, np.int64) // multiple) * multiple
    return max(max(multiple, int(padded_B[list(indices)].sum())) for rank in schedule for indices in rank)


def _fill(padded_B: np.ndarray, places: int, token_budget: int) -> list[list[int]] | None:
    tokens, cost = np.zeros(places, np.int64), np.zeros(places)
    members: list[list[int]] = [[] for _ in range(places)]
    for sequence in np.argsort(-padded_B, kind="stable"):
        length = padded_B[sequence]
        place = int(np.where(tokens + length <= token_budget, cost, np.inf).argmin())
        if tokens[place] + length > token_budget:
            return None
        tokens[place] += length
        cost[place] += length * (1.0 + length / _ATTENTION_LENGTH)
        members[place].append(int(sequence))
    return members


@dataclass(frozen=True)
class MicroBatch:
    """T packed positions. Per *predicting position*: the value at place t belongs to the prediction of the token that
    follows place t inside its document. The last position of a document and padding predict nothing: weight 0."""

    tokens_T: torch.Tensor
    """int64."""
    positions_T: torch.Tensor
    """int64, position inside the document."""
    labels_T: torch.Tensor
    """int64, the next token; 0 where nothing is predicted."""
    weights_T: torch.Tensor
    """float32."""
    advantages_T: torch.Tensor
    """float32."""
    behaviour_logprobs_T: torch.Tensor
    """float32."""
    old_logprobs_T: torch.Tensor | None
    """float32 or None, as in the batch."""
    reference_logprobs_T: torch.Tensor | None
    """float32 or None, as in the batch."""
    index_T: torch.Tensor
    """int64, place of the predicted token on the batch's N axis; -1 where nothing is predicted."""
    completion_T: torch.Tensor
    """bool, a token of a completion is predicted here; it does not depend on the loss mask."""
    lengths: np.ndarray
    """int64 [documents], padded lengths over all CP ranks; they sum to T x CP."""

    def to(self, device: torch.device) -> MicroBatch:
        """The tensors on another device."""
        return self.map(lambda x: x.to(device, non_blocking=True))

    def map(self, function) -> MicroBatch:
        """Apply a function to every tensor."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: function(v) for k, v in values.items() if isinstance(v, torch.Tensor)})


def pack(batch: PolicyBatch, indices: tuple[int, ...], multiple: int = 1, length: int | None = None) -> MicroBatch:
    """Concatenate sequences, each padded to a multiple of `multiple`.

    Args:
        indices: sequences of the batch. None at all gives one document of padding, so that ranks stay in step.
        length: pad the whole micro-batch to this many tokens by documents of padding (every pipeline exchange of a
            step then has one shape).
    """
    starts = batch.offsets_B1[list(indices)]
    prompts = np.asarray(batch.prompt_lengths_B, np.int64)[list(indices)]
    real = np.asarray(batch.lengths_B, np.int64)[list(indices)]
    padded = -(-real // multiple) * multiple
    pieces = _padding_documents(padded, multiple, length)
    none = np.zeros_like(pieces)
    real, padded = np.concatenate([real, none]), np.concatenate([padded, pieces])
    starts, prompts = np.concatenate([starts, none]), np.concatenate([prompts, none])

    document_T = np.repeat(np.arange(len(padded)), padded)
    position_T = np.arange(len(document_T)) - np.repeat(np.cumsum(padded) - padded, padded)
    source_T = starts[document_T] + position_T
    token_T = position_T < real[document_T]
    predicts_T = position_T < real[document_T] - 1
    next_T = np.where(predicts_T, source_T + 1, -1)
    tokens_T = np.where(token_T, batch.tokens_N[np.where(token_T, source_T, 0)], 0)

    def at_prediction(values_N: np.ndarray | None, dtype: type) -> torch.Tensor | None:
        if values_N is None:
            return None
        return torch.from_numpy(np.where(predicts_T, values_N[next_T], 0).astype(dtype))

    return MicroBatch(
        tokens_T=torch.from_numpy(tokens_T.astype(np.int64)),
        positions_T=torch.from_numpy(position_T),
        labels_T=at_prediction(batch.tokens_N, np.int64),
        weights_T=at_prediction(batch.loss_weights_N, np.float32),
        advantages_T=at_prediction(batch.advantages_N, np.float32),
        behaviour_logprobs_T=at_prediction(batch.behaviour_logprobs_N, np.float32),
        old_logprobs_T=at_prediction(batch.old_logprobs_N, np.float32),
        reference_logprobs_T=at_prediction(batch.reference_logprobs_N, np.float32),
        index_T=torch.from_numpy(next_T),
        completion_T=torch.from_numpy(predicts_T & (position_T + 1 >= prompts[document_T])), lengths=padded)


def _padding_documents(padded: np.ndarray, multiple: int, length: int | None) -> np.ndarray:
    """Lengths of documents without a token that fill up to `length`, none longer than the longest that is there."""
    missing = max(length or 0, 0 if len(padded) else multiple) - int(padded.sum())
    longest = int(padded.max(initial=0)) or missing
    full, rest = divmod(max(0, missing), max(1, longest))
    return np.array([longest] * full + ([rest] if rest else []), np.int64)


def zigzag_positions(lengths: np.ndarray, cp: int, cp_rank: int) -> np.ndarray:
    """Positions inside their documents that a CP rank holds, document by document: chunks r and 2 CP - 1 - r of 2 CP
    equal chunks, so that causal attention costs every rank the same. int64 [sum(lengths) / CP]."""
    local = lengths // cp
    place_T = np.arange(local.sum()) - np.repeat(np.cumsum(local) - local, local)
    if cp == 1:
        return place_T
    chunk_T = np.repeat(lengths // (2 * cp), local)
    mirrored_T = place_T >= chunk_T
    return place_T + np.where(mirrored_T, (2 * cp - 2 - cp_rank) * chunk_T, cp_rank * chunk_T)


def split_for_cp(micro: MicroBatch, cp: int, cp_rank: int) -> MicroBatch:
    """This CP rank's share of every document (zig-zag). Labels, weights and the rest were shifted before."""
    if cp == 1:
        return micro
    if (micro.lengths % (2 * cp)).any():
        raise ValueError(f"documents of {micro.lengths.tolist()} tokens do not split into 2 x CP = {2 * cp} chunks")
    start_T = np.repeat(np.cumsum(micro.lengths) - micro.lengths, micro.lengths // cp)
    select_T = torch.from_numpy(start_T + zigzag_positions(micro.lengths, cp, cp_rank))
    return micro.map(lambda x: x[select_T])
