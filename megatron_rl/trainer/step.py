"""Forward and backward passes over a packed schedule, through Megatron's 1F1B or interleaved pipeline."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Callable, Iterator, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from launch.plan.plan import Plan
from megatron_rl.algorithms.sequences import Sequences
from megatron_rl.data.batch import PolicyBatch
from megatron_rl.data.packing import MicroBatch, Predictions, pack, to_device
from megatron_rl.data.schedule import InputTokens, Schedule, make_schedule
from megatron_rl.trainer import cpu
from megatron_rl.trainer.logprobs import vocab_parallel_logprobs
from megatron_rl.trainer.model import select_output_rows
from megatron_rl.trainer.packed_attention import plan_documents
from megatron_rl.trainer.parallel import device_of_rank

FixedArguments = Mapping[str, Sequence[torch.Tensor]]
"""By argument of the objective (`old_logprobs_T`): the log-probs of each micro-batch of this rank, float32 [P]. Without
values on a stage without logits."""

# Micro-batches are padded to one length, so that the pipeline need not exchange shapes before each exchange of
# activations, unless this would add more than this share of tokens.
_MOST_PADDING = 0.25


_NOT_FIXED = dict.fromkeys(("old_logprobs_T", "reference_logprobs_T", "teacher_logprobs_T"))


class Objective(Protocol):
    """`megatron_rl.algorithms.objective.token_objective` with its algorithm bound, see there."""

    def __call__(self, *, logprobs_T: torch.Tensor, entropy_T: torch.Tensor, advantages_T: torch.Tensor,
                 weights_T: torch.Tensor, behaviour_logprobs_T: torch.Tensor, old_logprobs_T: torch.Tensor | None,
                 reference_logprobs_T: torch.Tensor | None, ages_T: torch.Tensor, positions_T: torch.Tensor,
                 sequences: Sequences,
                 teacher_logprobs_T: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss (a plain sum over these tokens, with weights) and sums for metrics, all scalars."""


def schedule_of(batch: PolicyBatch, plan: Plan) -> Schedule:
    """The packed schedule of a batch under a plan, equal on every rank."""
    training = plan.training
    return make_schedule(batch, training.dp, plan.batch.token_budget, plan.batch.sequence_multiple,
                         micro_batch_multiple=training.pp if training.vpp > 1 else 1,
                         share_prompts=plan.batch.share_prompts, pipelined=training.pp > 1)


def run_step(chunks: list, plan: Plan, batch: PolicyBatch, objective: Objective, temperature: float,
             schedule: Schedule | None = None, fixed: FixedArguments | None = None) -> dict[str, float]:
    """Add this rank's share of the gradient of the objective over a batch, or over a part of it.

    Afterwards, `param.main_grad` holds what it held before, plus d(sum over the rank's micro-batches of the
    objective)/d(param). The caller zeroes gradients before the first part, and calls `sum_model_grads` after the last.

    Args:
        chunks: model chunks of this rank, wrapped in Megatron's DDP.
        batch: the global batch or part, equal on every rank.
        schedule: default `schedule_of(batch, plan)`.
        fixed: log-probs of `run_logprobs` under the same schedule, which the objective takes.

    Returns:
        The objective's sums over `batch` (maxima if the name ends in `_max`) and `train/loss`, the sum of its losses,
        equal on every rank.
    """
    fixed, sums = fixed or {}, []

    def loss_of(logits_PV: torch.Tensor, micro: MicroBatch, index: int) -> torch.Tensor:
        predictions = micro.predictions
        logprobs_P, entropy_P = _logprobs(logits_PV, predictions, plan, temperature)
        loss, parts = objective(
            logprobs_T=logprobs_P, entropy_T=entropy_P, advantages_T=predictions.advantages_P,
            weights_T=predictions.weights_P, behaviour_logprobs_T=predictions.behaviour_logprobs_P,
            ages_T=predictions.ages_P, positions_T=predictions.positions_P,
            sequences=Sequences(predictions.sequence_P, micro.sequences, _add_over_context_parallel),
            **_NOT_FIXED | {argument: values[index] for argument, values in fixed.items()})
        sums.append({name: value.detach() for name, value in {"train/loss": loss, **parts}.items()})
        return loss

    _run(chunks, plan, batch, schedule or schedule_of(batch, plan), loss_of, forward_only=False)
    return _reduce(sums, objective, fixed)


@torch.no_grad()
def run_logprobs(chunks: list, plan: Plan, batch: PolicyBatch, temperature: float,
                 schedule: Schedule | None = None) -> list[torch.Tensor]:
    """Log-probs of this rank's predictions under the model, without gradients: log p(token | previous tokens).

    Returns:
        float32 [P] of each micro-batch of the schedule, in the order of `Predictions`; without meaning at a
        placeholder. Empty on a stage without logits.
    """
    values: dict[int, torch.Tensor] = {}

    def record(logits_PV: torch.Tensor, micro: MicroBatch, index: int) -> torch.Tensor:
        values[index], _ = _logprobs(logits_PV, micro.predictions, plan, temperature)
        return values[index].sum()

    _run(chunks, plan, batch, schedule or schedule_of(batch, plan), record, forward_only=True)
    return [values[index] for index in sorted(values)]


def _run(chunks: list, plan: Plan, batch: PolicyBatch, schedule: Schedule,
         loss_of: Callable[[torch.Tensor, MicroBatch, int], torch.Tensor], forward_only: bool) -> None:
    """Run this rank's micro-batches of the schedule through the pipeline once."""
    training = plan.training
    config = get_model_config(chunks[0])
    length = _padded_length(schedule, batch, plan)
    config.variable_seq_lengths = length is None and training.pp > 1
    count, device = len(schedule[parallel_state.get_data_parallel_rank()]), device_of_rank()

    # Each virtual stage asks for each micro-batch, with at most PP x VPP others between the first and the last.
    @functools.lru_cache(maxsize=2 * training.pp * training.vpp)
    def packed(index: int) -> tuple[MicroBatch, PackedSeqParams]:
        micro = micro_batch(plan, batch, schedule, index, length).to(device)
        return micro, _packed_seq_params(micro, training.cp, parallel_state.get_context_parallel_rank())

    def forward(indices: Iterator[int], chunk: torch.nn.Module):
        index = next(indices)
        micro, params = packed(index)
        select_output_rows(chunk, micro.predictions.rows_P)
        output = chunk(micro.tokens_T[None], micro.positions_T[None], None, packed_seq_params=params)
        return output, lambda logits_1PV: (loss_of(logits_1PV.squeeze(0), micro, index), _no_tokens(), {})

    get_forward_backward_func()(
        forward_step_func=forward, data_iterator=[iter(range(count)) for _ in chunks], model=chunks,
        num_microbatches=count, seq_length=length or 1, micro_batch_size=1, forward_only=forward_only)
    cpu.finish_sends()


def micro_batch(plan: Plan, batch: PolicyBatch, schedule: Schedule, index: int, length: int | None) -> MicroBatch:
    """This rank's micro-batch of a schedule, in host memory. `length`: see `_padded_length`."""
    return pack(batch, schedule[parallel_state.get_data_parallel_rank()][index], multiple=plan.batch.sequence_multiple,
                length=length, cp=plan.training.cp, cp_rank=parallel_state.get_context_parallel_rank(),
                predict_everywhere=plan.training.sequence_parallel)


def _padded_length(schedule: Schedule, batch: PolicyBatch, plan: Plan) -> int | None:
    """The common length of all micro-batches in a pipeline; None if they keep their own."""
    if plan.training.pp == 1:
        return None
    tokens = InputTokens(batch, plan.batch.sequence_multiple)
    sizes = [tokens.micro_batch(units) for rank in schedule for units in rank]
    longest = max(sizes)
    return longest if longest * len(sizes) <= (1 + _MOST_PADDING) * sum(sizes) else None


def _packed_seq_params(micro: MicroBatch, cp: int, cp_rank: int) -> PackedSeqParams:
    if cpu.needed():
        return plan_documents(micro.documents, micro.positions_T, cp, cp_rank)
    if micro.documents.prefix_lengths_D.any():
        raise ValueError("documents that share a prefix need the CPU's attention: Transformer Engine's does not "
                         "support prefixes")
    lengths = micro.documents.lengths_D
    cu_seqlens = to_device(torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
                           micro.tokens_T.device)
    longest = int(lengths.max())
    # Documents contain their padding. Told of it, Transformer Engine compares the two on the host, in every layer; its
    # context parallelism takes nothing else.
    padded = cu_seqlens if cp > 1 else None
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens,
                           cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded, max_seqlen_q=longest,
                           max_seqlen_kv=longest)


def _logprobs(logits_PV: torch.Tensor, predictions: Predictions, plan: Plan,
              temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    return vocab_parallel_logprobs(logits_PV, predictions.labels_P, vocab=plan.architecture.vocab,
                                   temperature=temperature, group=parallel_state.get_tensor_model_parallel_group())


def _add_over_context_parallel(sums_KS: torch.Tensor) -> torch.Tensor:
    """Context parallelism splits a sequence, and the other ranks of its group have the same micro-batch."""
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(sums_KS, group=parallel_state.get_context_parallel_group())
    return sums_KS


def _no_tokens() -> torch.Tensor:
    """The schedule's token count. It is unused, because `sum_model_grads` does not divide."""
    return torch.zeros((), dtype=torch.int, device=device_of_rank())


def _reduce(parts_of_micro: list[dict[str, torch.Tensor]], objective: Objective,
            fixed: FixedArguments) -> dict[str, float]:
    """Combine over micro-batches and DP x CP, for every rank, with one collective of a few numbers.

    Only the last stage has seen the objective. The others learn its names from a call with one token of weight 0.
    """
    names = list(parts_of_micro[0] if parts_of_micro else _names(objective, fixed))
    maxima = torch.tensor([name.endswith("_max") for name in names], device=device_of_rank())
    mine = torch.where(maxima, -torch.inf, torch.zeros(len(names), dtype=torch.float64, device=device_of_rank()))
    if parts_of_micro and parallel_state.get_tensor_model_parallel_rank() == 0:
        mine = _combine(torch.stack([torch.stack(list(parts.values())).double() for parts in parts_of_micro]), maxima)
    everyone = mine.new_empty(dist.get_world_size() * len(names))
    dist.all_gather_into_tensor(everyone, mine)
    return dict(zip(names, _combine(everyone.unflatten(0, (-1, len(names))), maxima).tolist(), strict=True))


def _combine(rows: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    return torch.where(maxima, rows.amax(0), torch.where(maxima, 0.0, rows).sum(0))


def _names(objective: Objective, fixed: FixedArguments) -> list[str]:
    zero = torch.zeros(1, device=device_of_rank())
    first = zero.long()
    _, parts = objective(
        logprobs_T=zero, entropy_T=zero, advantages_T=zero, weights_T=zero, behaviour_logprobs_T=zero, ages_T=first,
        positions_T=first, sequences=Sequences(first, 1), **_NOT_FIXED | dict.fromkeys(fixed, zero))
    return ["train/loss", *parts]
