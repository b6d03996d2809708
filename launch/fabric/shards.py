"""Bytes of each training shard that each rollout worker needs.

Every tensor is cut along one axis into units (query heads, KV heads, MLP columns, experts, vocabulary rows). Training
rank t of T and rollout rank d of D hold intervals of the same units, and their overlap is sent from t to d. Tensors
that are replicated over TP (norms, router) are sent by one rank. Padding rows of the vocabulary are in no interval. All
numbers are integers: a worker receives each byte that it needs once.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

from launch.model.architecture import VOCAB_MULTIPLE, Architecture, elements, expert_tensors, layer_tensors
from launch.model.padding import VLLM_VOCAB_MULTIPLE, round_up
from launch.plan.layouts import RolloutLayout, TrainingLayout, stage_layers

ALIGN = 4
"""Flows are cut at multiples of this many bytes, so that no element of any type is split."""
DENSE = -1
"""Replaces the EP rank for tensors that are not split over EP."""


class Shard(NamedTuple):
    """The dense tensors on the training ranks of one (PP, TP) coordinate, or the routed experts on those of one (PP,
    EP, expert TP) coordinate."""

    pp: int
    tp: int
    """TP rank, or expert TP rank for routed experts."""
    ep: int = DENSE
    """EP rank, or DENSE for dense tensors."""

    @property
    def routed(self) -> bool:
        """Whether it holds routed experts."""
        return self.ep != DENSE


class Worker(NamedTuple):
    """A rank of an engine, the same for every replica."""

    pp: int
    tp: int


class Flow(NamedTuple):
    """Bytes that one worker receives from one shard."""

    shard: Shard
    worker: Worker
    bytes: int


class _Axis(NamedTuple):
    """Tensors of a layer with the same cut: number of `units` along the cut, and `bytes` per unit and layer."""

    units: int
    bytes: int
    kv: bool = False
    """KV heads, which are replicated if there are more ranks than heads."""
    whole: bool = False
    """Every worker of an engine holds the whole tensor (vLLM gathers a projection for a norm over its whole width)."""


def flows(shape: Architecture, training: TrainingLayout, rollout: RolloutLayout, element_bytes: int = 2,
          lora_rank: int = 0) -> tuple[Flow, ...]:
    """All flows of one engine, sorted by shard, then worker. They are the same for every replica of either side.

    Args:
        element_bytes: bytes per element on the wire (2: bf16, also if the engine quantises).
        lora_rank: only the adapters of every linear layer are sent (0: all weights). An engine needs whole adapters, so
            every worker receives all bytes of its layers.
    """
    return _flows(shape, training.tp, training.ep, training.etp, training.vpp, stage_layers(shape, training),
                  rollout.tp, rollout.pp, element_bytes, lora_rank)


@lru_cache(maxsize=1024)
def _flows(shape: Architecture, tp: int, ep: int, etp: int, vpp: int, stages: tuple[int, ...], engine_tp: int,
           engine_pp: int, element_bytes: int, lora_rank: int) -> tuple[Flow, ...]:
    moved: dict[tuple[Shard, Worker], int] = defaultdict(int)
    workers = [Worker(pp, each) for pp in range(engine_pp) for each in range(engine_tp)]
    common = _common_layers(stages, vpp, _engine_layers(shape.layers, engine_pp))
    per_layer = _adapter_layer(shape, tp, engine_tp, element_bytes, lora_rank) if lora_rank else \
        _dense_layer(shape, tp, engine_tp, element_bytes)
    for (stage, engine_stage), layers in common.items():
        for (source, target), size in per_layer.items():
            moved[Shard(stage, source), Worker(engine_stage, target)] += layers * size
    if not lora_rank:
        _add_experts(moved, shape, ep, etp, engine_tp, common, element_bytes)
        _add_ends(moved, shape, tp, len(stages), engine_tp, engine_pp, element_bytes, workers)
    return tuple(Flow(shard, worker, size) for (shard, worker), size in sorted(moved.items()) if size)


def _layer(shape: Architecture, element_bytes: int) -> tuple[list[_Axis], int, int]:
    """One layer: axes of the dense tensors, bytes replicated over TP, bytes of one column of one routed expert."""
    tensors = layer_tensors(shape)
    norms = [tensor for tensor in tensors if tensor.role in ("q_norm", "k_norm")]

    def axis(units: int, cut: str, whole: bool = False) -> _Axis:
        mine = (tensor for tensor in tensors if tensor.cut == cut and (tensor in norms) == whole)
        return _Axis(units, elements(mine) // max(1, units) * element_bytes, cut == "kv_heads", whole)

    heads = ((shape.heads, "heads"), (shape.kv_heads, "kv_heads"))
    axes = [*(axis(*each) for each in heads), axis(shape.shared_ffn if shape.experts else shape.ffn, "ffn"),
            *(axis(*each, whole=True) for each in heads if shape.qk_norm_whole)]
    replicated = elements(tensor for tensor in tensors if not tensor.cut) * element_bytes
    return axes, replicated, elements(expert_tensors(shape)) // max(1, shape.moe_ffn) * element_bytes


def _dense_layer(shape: Architecture, tp: int, engine_tp: int, element_bytes: int) -> dict[tuple[int, int], int]:
    """(training TP rank, engine TP rank) -> bytes of the dense tensors of one layer."""
    axes, replicated, _ = _layer(shape, element_bytes)
    moved: dict[tuple[int, int], int] = defaultdict(int)
    for target in range(engine_tp):
        near = target * tp // engine_tp
        moved[near, target] += replicated
        for axis in axes:
            low, high = _held(axis, engine_tp, target)
            if axis.kv and tp > axis.units:      # replicated at the source: the nearest rank with this head
                for head in range(low, high):
                    owners = [rank for rank in range(tp) if rank * axis.units // tp == head]
                    moved[min(owners, key=lambda rank: abs(rank - near)), target] += axis.bytes
                continue
            for source in range(tp):
                source_low, source_high = _even(axis.units, tp, source)
                moved[source, target] += max(0, min(high, source_high) - max(low, source_low)) * axis.bytes
    return moved


def _add_experts(moved: dict, shape: Architecture, ep: int, etp: int, engine_tp: int, common: dict,
                 element_bytes: int) -> None:
    if not shape.experts:
        return
    column = _layer(shape, element_bytes)[2]
    for rank in range(ep):
        low, high = _even(shape.experts, ep, rank)
        for target in range(engine_tp):
            first, last = _even(shape.moe_ffn, engine_tp, target)
            for source in range(etp):
                start, stop = _even(shape.moe_ffn, etp, source)
                size = (high - low) * max(0, min(last, stop) - max(first, start)) * column
                for (stage, engine_stage), layers in common.items():
                    moved[Shard(stage, source, rank), Worker(engine_stage, target)] += layers * size


def _add_ends(moved: dict, shape: Architecture, tp: int, pp: int, engine_tp: int, engine_pp: int, element_bytes: int,
              workers: list[Worker]) -> None:
    """Add embedding, positions, final norm and head. An engine stage that holds one copy of a tied head gets one."""
    row, last = shape.hidden * element_bytes, pp - 1
    for worker in workers:
        near = worker.tp * tp // engine_tp
        first_stage, last_stage = worker.pp == 0, worker.pp == engine_pp - 1
        sources = [0] if first_stage else []
        if last_stage and (not shape.tied or not first_stage):
            sources.append(last)
        low, high = _engine_rows(shape.vocab, engine_tp, worker.tp)
        for stage in sources:
            for source in range(tp):
                source_low, source_high = _trainer_rows(shape.vocab, tp, source)
                rows = max(0, min(high, source_high) - max(low, source_low))
                moved[Shard(stage, source), worker] += rows * row
        if first_stage:
            moved[Shard(0, near), worker] += _position_bytes(shape, element_bytes)
        if last_stage:
            moved[Shard(last, near), worker] += _final_norm_bytes(shape, element_bytes)


def _position_bytes(shape: Architecture, element_bytes: int) -> int:
    return shape.learned_positions * shape.hidden * element_bytes


def _final_norm_bytes(shape: Architecture, element_bytes: int) -> int:
    return (2 if shape.all_biases else 1) * shape.hidden * element_bytes


def adapter_bytes(shape: Architecture, rank: int, element_bytes: int = 2) -> int:
    """Bytes of one layer's LoRA adapters: rank x (in + out) of q, k, v, o and the dense MLP. Routed experts have
    none."""
    h, q, kv = shape.hidden, shape.q_width, shape.kv_width
    width = shape.shared_ffn if shape.experts else shape.ffn
    ends = 2 * (h + q) + 2 * (h + kv) + (shape.mlp_matrices * (h + width) if width else 0)
    return rank * ends * element_bytes


def _adapter_layer(shape: Architecture, tp: int, engine_tp: int, element_bytes: int,
                   rank: int) -> dict[tuple[int, int], int]:
    size = adapter_bytes(shape, rank, element_bytes)
    cuts = [_even(size, tp, source) for source in range(tp)]
    return {(source, target): high - low for source, (low, high) in enumerate(cuts) for target in range(engine_tp)}


def share(size: int, parts: int, part: int) -> tuple[int, int]:
    """(first, last) byte of one of `parts` equal parts of `size` bytes, cut between elements."""
    low, high = _even(size // ALIGN, parts, part)
    return low * ALIGN, high * ALIGN if part + 1 < parts else size


def _even(units: int, parts: int, part: int) -> tuple[int, int]:
    return units * part // parts, units * (part + 1) // parts


def _held(axis: _Axis, parts: int, part: int) -> tuple[int, int]:
    """Units of an engine's worker."""
    if axis.whole:
        return 0, axis.units
    if axis.kv and parts > axis.units:
        head = part * axis.units // parts
        return head, head + 1
    return _even(axis.units, parts, part)


def _trainer_rows(vocab: int, parts: int, part: int) -> tuple[int, int]:
    """Rows of Megatron's vocabulary shard without padding."""
    return _rows(vocab, round_up(vocab, VOCAB_MULTIPLE * parts) // parts, part)


def _engine_rows(vocab: int, parts: int, part: int) -> tuple[int, int]:
    """Rows of vLLM's vocabulary shard without padding."""
    return _rows(vocab, -(-round_up(vocab, VLLM_VOCAB_MULTIPLE) // parts), part)


def _rows(vocab: int, each: int, part: int) -> tuple[int, int]:
    return min(vocab, each * part), min(vocab, each * (part + 1))


def _engine_layers(layers: int, pp: int) -> list[range]:
    """Layers of each engine stage: contiguous and nearly even."""
    return [range(*_even(layers, pp, stage)) for stage in range(pp)]


def _common_layers(stages: tuple[int, ...], vpp: int, engine: list[range]) -> dict[tuple[int, int], int]:
    """(training stage, engine stage) -> number of shared layers. With VPP, chunk c of all stages precedes chunk c +
    1."""
    common: dict[tuple[int, int], int] = defaultdict(int)
    layer = 0
    for chunk in range(vpp):
        for stage, number in enumerate(stages):
            low, high = _even(number, vpp, chunk)
            held = range(layer, layer + high - low)
            layer = held.stop
            for engine_stage, wanted in enumerate(engine):
                shared = min(held.stop, wanted.stop) - max(held.start, wanted.start)
                if shared > 0:
                    common[stage, engine_stage] += shared
    return common
