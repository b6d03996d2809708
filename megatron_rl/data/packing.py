"""The arrays of one micro-batch on one rank: packed input tokens and the predictions made from them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Callable

import numpy as np
import torch

from megatron_rl.data.batch import PolicyBatch
from megatron_rl.data.schedule import Unit, trajectory_inputs

Mapping = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Documents:
    """D packed documents, before context parallelism splits them. A document with a prefix continues it: its tokens
    attend to the prefix and causally to each other, and their positions follow those of the prefix."""

    lengths_D: np.ndarray
    """int64, padded, above 0."""
    prefix_starts_D: np.ndarray
    """int64, index of the prefix's first token among the packed tokens."""
    prefix_lengths_D: np.ndarray
    """int64; 0 without a prefix."""


@dataclass(frozen=True)
class Predictions:
    """P >= 1 predictions of sampled tokens. If there are none, one placeholder has weight 0 and index -1."""

    rows_P: torch.Tensor
    """int64, index of this rank's input token whose logits are used. The last token of a shared prompt predicts the
    first token of several trajectories."""
    labels_P: torch.Tensor
    """int64, the predicted token."""
    weights_P: torch.Tensor
    """float32."""
    advantages_P: torch.Tensor
    """float32."""
    behaviour_logprobs_P: torch.Tensor
    """float32."""
    ages_P: torch.Tensor
    """int64, as in the batch."""
    positions_P: torch.Tensor
    """int64, position of the predicted token in its trajectory, from 0."""
    sequence_P: torch.Tensor
    """int64, number of the sequence in the micro-batch, equal on all ranks of context parallelism; 0 if nothing is
    predicted."""
    index_P: torch.Tensor
    """int64, index of the predicted token on the batch's N axis, or -1 if nothing is predicted."""

    def map(self, function: Mapping) -> Predictions:
        """Apply a function to every tensor."""
        return Predictions(**{field.name: function(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True)
class MicroBatch:
    """T packed input tokens of one rank and the predictions made from them."""

    tokens_T: torch.Tensor
    """int64, 0 in padding."""
    positions_T: torch.Tensor
    """int64, position in the sequence."""
    predictions: Predictions
    documents: Documents
    sequences: int
    """Number of sequences, at least 1."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch with its tensors on another device."""
        return replace(self, tokens_T=to_device(self.tokens_T, device), positions_T=to_device(self.positions_T, device),
                       predictions=self.predictions.map(lambda x: to_device(x, device)))


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device. The host does not wait for a GPU that copies from pinned memory."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def pack(batch: PolicyBatch, units: tuple[Unit, ...], *, multiple: int = 1, length: int | None = None, cp: int = 1,
         cp_rank: int = 0, predict_everywhere: bool = False) -> MicroBatch:
    """Concatenate the sequences of units. Trajectories that share a prompt follow the sequence that contains it.

    Args:
        units: the scheduled units. Without any, the result is one document of padding, so that ranks stay in step.
        multiple: each document is padded to a multiple of this.
        length: the micro-batch is padded to this many tokens with documents of padding, so that all pipeline exchanges
            of a step have the same shape.
        cp, cp_rank: this rank's share of every document (zig-zag). `multiple` is a multiple of 2 CP if CP > 1.
        predict_everywhere: make one prediction for every row, in order, most of them with weight 0. Needed if logits
            cannot be computed for selected rows only. Every unit must then have a single sequence.

    Raises:
        ValueError: `predict_everywhere` is set and a unit has several sequences.
    """
    if predict_everywhere and any(len(unit) > 1 for unit in units):
        raise ValueError("predict_everywhere: a row shared by several trajectories needs several predictions")
    sequences = _lay_out(batch, units, multiple)
    documents = _documents(sequences, multiple, length)
    lengths_D, total = documents.lengths_D, int(documents.lengths_D.sum())
    place_T = zigzag_positions(lengths_D, cp, cp_rank)
    packed_T = np.repeat(np.cumsum(lengths_D) - lengths_D, lengths_D // cp) + place_T
    token_T = _token_of_place(sequences, total)[packed_T]

    place_P, index_P = _prediction_places(sequences, batch.sampled_N)
    row_of_place = np.full(total, -1, np.int64)
    row_of_place[packed_T] = np.arange(len(packed_T))
    rows_P = row_of_place[place_P]
    rows_P, index_P = rows_P[rows_P >= 0], index_P[rows_P >= 0]
    if predict_everywhere:
        index_T = np.full(len(packed_T), -1, np.int64)
        index_T[rows_P] = index_P
        rows_P, index_P = np.arange(len(packed_T)), index_T
    elif not len(rows_P):
        rows_P, index_P = np.array([0]), np.array([-1])
    return MicroBatch(
        tokens_T=torch.from_numpy(np.where(token_T >= 0, batch.tokens_N[token_T], 0).astype(np.int64)),
        positions_T=torch.from_numpy(place_T + np.repeat(documents.prefix_lengths_D, lengths_D // cp)),
        predictions=_predictions(batch, sequences, rows_P, index_P), documents=documents,
        sequences=max(1, len(sequences.numbers_S)))


@dataclass(frozen=True)
class _Sequences:
    """S sequences in packing order. int64. A place is an index into the micro-batch before CP splits it."""

    numbers_S: np.ndarray
    """Place of the sequence in the batch."""
    offsets_S: np.ndarray
    """Index of the first token on the batch's N axis."""
    prompts_S: np.ndarray
    """Number of prompt tokens."""
    trajectories_S: np.ndarray
    """Number of trajectory tokens."""
    skipped_S: np.ndarray
    """Number of prompt tokens that are packed elsewhere: all or none."""
    inputs_S: np.ndarray
    """Number of packed tokens."""
    padded_S: np.ndarray
    """Number of packed tokens, with padding."""
    starts_S: np.ndarray
    """Place of the first packed token."""
    trunks_S: np.ndarray
    """Place of the first prompt token."""


def _lay_out(batch: PolicyBatch, units: tuple[Unit, ...], multiple: int) -> _Sequences:
    sequence_S = np.array([sequence for unit in units for sequence in unit], np.int64)
    whole_S = np.array([sequence == unit[0] for unit in units for sequence in unit], bool)
    prompts_S = np.asarray(batch.prompt_lengths_B, np.int64)[sequence_S]
    skipped_S = np.where(whole_S, 0, prompts_S)
    inputs_S = prompts_S - skipped_S + trajectory_inputs(batch)[sequence_S]
    padded_S = -(-inputs_S // multiple) * multiple
    starts_S = np.cumsum(padded_S) - padded_S
    return _Sequences(
        numbers_S=sequence_S, offsets_S=batch.offsets_B1[sequence_S], prompts_S=prompts_S,
        trajectories_S=np.asarray(batch.lengths_B, np.int64)[sequence_S] - prompts_S, skipped_S=skipped_S,
        inputs_S=inputs_S, padded_S=padded_S, starts_S=starts_S,
        trunks_S=np.repeat(starts_S[whole_S], np.array([len(unit) for unit in units], np.int64)))


def _documents(sequences: _Sequences, multiple: int, length: int | None) -> Documents:
    """Documents of the sequences that have tokens, followed by documents of padding up to `length`. Padding documents
    are at most as long as the longest sequence."""
    padded_S, skipped_S, used_S = sequences.padded_S, sequences.skipped_S, sequences.padded_S > 0
    missing = max(length or 0, 0 if len(padded_S) else multiple) - int(padded_S.sum())
    longest = int(padded_S.max(initial=0)) or missing
    full, rest = divmod(max(0, missing), max(1, longest))
    padding_D = np.array([longest] * full + ([rest] if rest else []), np.int64)
    none_D = np.zeros_like(padding_D)
    return Documents(
        lengths_D=np.concatenate([padded_S[used_S], padding_D]),
        prefix_starts_D=np.concatenate([np.where(skipped_S > 0, sequences.trunks_S, 0)[used_S], none_D]),
        prefix_lengths_D=np.concatenate([skipped_S[used_S], none_D]))


def _token_of_place(sequences: _Sequences, total: int) -> np.ndarray:
    """Index on the batch's N axis of the token at each place, -1 in padding."""
    token_of_place = np.full(total, -1, np.int64)
    places = _ranges(sequences.starts_S, sequences.inputs_S)
    token_of_place[places] = _ranges(sequences.offsets_S + sequences.skipped_S, sequences.inputs_S)
    return token_of_place


def _prediction_places(sequences: _Sequences, sampled_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each sampled token, the place that predicts it and the token's index on the batch's N axis. The end of the
    prompt (possibly packed elsewhere) predicts the trajectory's first token, and each token predicts the next."""
    trajectories_S, prompts_S = sequences.trajectories_S, sequences.prompts_S
    index_P = _ranges(sequences.offsets_S + prompts_S, trajectories_S)
    ordinal_P = _ranges(np.zeros_like(trajectories_S), trajectories_S)
    first_P = np.repeat(sequences.trunks_S + prompts_S - 1, trajectories_S)
    later_P = _ranges(sequences.starts_S + prompts_S - sequences.skipped_S - 1, trajectories_S)
    sampled_P = sampled_N[index_P]
    return np.where(ordinal_P == 0, first_P, later_P)[sampled_P], index_P[sampled_P]


def _predictions(batch: PolicyBatch, sequences: _Sequences, rows_P: np.ndarray, index_P: np.ndarray) -> Predictions:
    offsets_B, real_P = batch.offsets_B1[:-1], index_P >= 0
    number_P = np.where(real_P, np.searchsorted(offsets_B, index_P, side="right") - 1, 0)
    position_P = index_P - offsets_B[number_P] - np.asarray(batch.prompt_lengths_B, np.int64)[number_P]
    place_B = np.zeros(len(offsets_B), np.int64)
    place_B[sequences.numbers_S] = np.arange(len(sequences.numbers_S))

    def values(values_N: np.ndarray, dtype: type = np.float32) -> torch.Tensor:
        return torch.from_numpy(np.where(real_P, values_N[index_P], 0).astype(dtype))

    return Predictions(
        rows_P=torch.from_numpy(rows_P), labels_P=values(batch.tokens_N, np.int64),
        weights_P=values(batch.loss_weights_N), advantages_P=values(batch.advantages_N),
        behaviour_logprobs_P=values(batch.behaviour_logprobs_N), ages_P=values(batch.ages_N, np.int64),
        positions_P=torch.from_numpy(np.where(real_P, position_P, 0)),
        sequence_P=torch.from_numpy(np.where(real_P, place_B[number_P], 0)), index_P=torch.from_numpy(index_P))


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenated `arange(start, start + length)`."""
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


def zigzag_positions(lengths: np.ndarray, cp: int, cp_rank: int) -> np.ndarray:
    """The positions in each document that CP rank r holds, document by document: chunks r and 2 CP - 1 - r of 2 CP
    equal chunks, so that the cost of causal attention is the same on every rank. int64 [sum(lengths) / CP].

    Raises:
        ValueError: a length does not split into 2 CP chunks.
    """
    local = lengths // cp
    place_T = _ranges(np.zeros_like(lengths), local)
    if cp == 1:
        return place_T
    if (lengths % (2 * cp)).any():
        raise ValueError(f"documents of {lengths.tolist()} tokens do not split into 2 x CP = {2 * cp} chunks")
    chunk_T = np.repeat(lengths // (2 * cp), local)
    mirrored_T = place_T >= chunk_T
    return place_T + np.where(mirrored_T, (2 * cp - 2 - cp_rank) * chunk_T, cp_rank * chunk_T)
