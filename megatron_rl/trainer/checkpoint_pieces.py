"""What a rank writes of a checkpoint and reads back: pieces of whole tensors, under keys that no layout is part of.

Every rank of a DP x CP group has a share of the group's weights, fp32 master weights and Adam's moments, and no two
shares overlap. With the distributed optimizer it is the range of Megatron's buffers that the rank updates, so nothing
is gathered before a save. Without it the tensors are equal on all ranks of the group, and each takes an equal part. A
load fills the rank's share, and the group exchanges the rest (`complete`).

Megatron describes where a parameter lies in its whole tensor (`sharded_state_dict`). A share cuts parameters at any
element, so a parameter becomes a few boxes: whole rows, and parts of a row at both ends. Keys and boxes are those of
Megatron's `torch_dist` format (optimizer `fully_reshardable`), which Megatron's own loader reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import MegatronModule

from megatron_rl.layouts.boxes import Box, flat_boxes
from megatron_rl.trainer.optimizer import PolicyOptimizer

PIECE_BYTES = 64 << 20
"""Largest piece, in bytes, unless one row is larger. A piece is read as a whole, so this bounds what a load in another
layout reads too much, and the host memory of a thread that reads or writes."""
WEIGHT = ""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor, and the live memory that holds it."""

    key: str
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    data: torch.Tensor
    """The elements of the box, contiguous, with the shape of the box."""
    written: bool
    """False: another TP or PP rank holds the same elements and writes them."""
    padded: bool
    """The whole tensor may have another number of rows in another layout (vocabulary)."""

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True)
class _Share:
    """The elements `start` to `stop` of a parameter, and of everything that the optimizer keeps for it."""

    parameter: torch.nn.Parameter
    start: int
    stop: int
    tensors: Mapping[str, torch.Tensor]
    """1-D, of these elements: the weight and the optimizer's tensors by their names in Megatron's keys."""


def pieces_of(chunks: list[MegatronModule], optimizer: PolicyOptimizer) -> list[Piece]:
    """This rank's share of the checkpoint. The pieces of all ranks with `written` hold every element once.

    Args:
        chunks: the bare model chunks of this rank, which `optimizer` updates.
    """
    places = _places(chunks)
    return [piece for share in _shares(optimizer, dist.get_rank(_group())) for place in places[share.parameter]
            for piece in _pieces(share, *place)]


def _pieces(share: _Share, at: int, place: ShardedTensor) -> Iterator[Piece]:
    """The pieces of a share that lie in the part of its parameter that begins at the element `at`."""
    start, stop = max(share.start, at), min(share.stop, at + prod(place.local_shape))
    first_replica = not any(place.replica_id[:2])       # (PP, TP, DP x CP): the last one is what shares are for
    front = (1,) * place.prepend_axis_num
    for kind, tensor_N in share.tensors.items():
        key = place.key if kind == WEIGHT else f"optimizer.state.{kind}.{place.key}"
        done = start - share.start
        most = PIECE_BYTES // tensor_N.element_size()
        for inner, shape in flat_boxes(place.local_shape, start - at, stop - at, most):
            offset = place.global_offset[place.prepend_axis_num:]
            where = *place.global_offset[:place.prepend_axis_num], *map(sum, zip(offset, inner, strict=True))
            shape = *front, *shape
            data = tensor_N[done:done + prod(shape)].view(shape)
            done += prod(shape)
            yield Piece(key, tuple(place.global_shape), (where, shape), data, first_replica,
                        place.allow_shape_mismatch)


def _places(chunks: list[MegatronModule]) -> dict[torch.nn.Parameter, list[tuple[int, ShardedTensor]]]:
    """Where every parameter lies in whole tensors: (first element, description). A fused gate and up projection is two
    tensors. Python objects (`_extra_state` of Transformer Engine's modules) are left out: they would be pickled."""
    places: dict[torch.nn.Parameter, list[tuple[int, ShardedTensor]]] = {}
    for chunk in chunks:
        tensors, _ = extract_sharded_tensors_and_factories(chunk.sharded_state_dict())
        for entry in nested_values(tensors):
            if not entry.data.requires_grad:
                raise RuntimeError(f"{entry.key} is not trained, so no rank has a share of it")
            parts = list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]
            for part in parts:
                if not part.data.is_contiguous():
                    raise RuntimeError(f"{part.key} is not a run of elements of its parameter")
            places[entry.data] = [(part.data.storage_offset() - entry.data.storage_offset(), part) for part in parts]
    return places


def _shares(optimizer: PolicyOptimizer, member: int) -> Iterator[_Share]:
    """The shares of a rank of the DP x CP group. With the distributed optimizer only the own ones are known."""
    (part,) = optimizer.parts
    if isinstance(part, DistributedOptimizer):
        yield from _shares_of_buffers(part)
    else:
        yield from _equal_shares(optimizer, part, member)


def _shares_of_buffers(part: DistributedOptimizer) -> Iterator[_Share]:
    ranges = (ranges for buffer in part.gbuf_ranges for buckets in buffer.values() for ranges in buckets)
    for parameter, where in ((p, where["param"]) for each in ranges for p, where in each["param_map"].items()):
        group, order = part.model_param_group_index_map[parameter]
        main_N = part.optimizer.param_groups[group]["params"][order]
        state = part.optimizer.state[main_N]
        yield _Share(parameter, where.start, where.end, {
            WEIGHT: _flat(parameter)[where.start:where.end], "param": main_N.detach(),
            **{name: state[name] for name in MOMENTS}})


def _equal_shares(optimizer: PolicyOptimizer, part: MegatronOptimizer, member: int) -> Iterator[_Share]:
    """The elements of all parameters in a row, cut into equal parts."""
    parameters = [parameter for chunk in optimizer.chunks for parameter in chunk.parameters()]
    members, total, at = dist.get_world_size(_group()), sum(parameter.numel() for parameter in parameters), 0
    first, last = total * member // members, total * (member + 1) // members
    for parameter in parameters:
        start, stop = max(first - at, 0), min(last - at, parameter.numel())
        at += parameter.numel()
        if start < stop:
            main = getattr(parameter, "main_param", parameter)
            tensors = {WEIGHT: parameter, **({} if main is parameter else {"fp32_param": main}),
                       **{name: part.optimizer.state[main][name] for name in MOMENTS}}
            yield _Share(parameter, start, stop, {kind: _flat(each)[start:stop] for kind, each in tensors.items()})


def complete(optimizer: PolicyOptimizer, updates: int) -> None:
    """Bring the group's other shares to this rank after every rank has filled its own, and set Adam's step count.
    Collective.

    Adam's count is a tensor for each parameter in torch, and a number of the parameter group in Transformer Engine.
    """
    (part,) = optimizer.parts
    if isinstance(part, DistributedOptimizer):
        for chunk in optimizer.chunks:
            chunk.start_param_sync(force_sync=True)
    else:
        for member, rank in enumerate(dist.get_process_group_ranks(_group())):
            for share in _equal_shares(optimizer, part, member):
                for tensor_N in share.tensors.values():
                    dist.broadcast(tensor_N, rank, group=_group())
    adam = part.optimizer
    if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):
        for state in adam.state.values():
            state["step"] = torch.tensor(float(updates))
    else:
        for group in adam.param_groups:
            group["step"] = updates


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


def _group() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
