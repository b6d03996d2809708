"""Parallel layouts of the two partitions: their sizes, Megatron's order of ranks, and the layers of each pipeline
stage. The placement (`launch.planner.seats`) assigns nodes and GPUs later. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from launch.config.auto import MAX_NUM_SEQS
from launch.errors import UserError
from launch.model.architecture import Architecture
from launch.plan.plan import RankCoordinates

Precision = Literal["bf16", "fp8", "fp32"]
PRECISION_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp8": 1}
"""Bytes of one element."""


def wide_bytes(precision: str) -> int:
    """Bytes per element of tensors that are never FP8 (on the wire, on disk, norms, embeddings): 4 in fp32, else 2."""
    return 4 if precision == "fp32" else 2


@dataclass(frozen=True, slots=True)
class TrainingLayout:
    """Megatron's parallel sizes, and the other options that decide the memory and time of a training rank."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Model chunks per rank; 1: plain 1F1B."""
    cp: int = 1
    dp: int = 1
    ep: int = 1
    """Expert parallel size, inside DP x CP."""
    etp: int = 1
    """TP ranks that split each expert. 1, as recipes set it: experts are whole, and EP spans TP x DP x CP."""
    fsdp: int = 1
    """Ranks that shard the parameters (only in published FSDP runs); 1: the distributed optimizer."""
    sequence_parallel: bool = True
    """Splits activations outside the matrices over TP. It has no effect at TP 1."""
    recompute: tuple[str, ...] = ()
    """(): nothing is recomputed; ("full",): all; else modules: core_attn, mlp, layernorm, ..."""
    precision: Precision = "bf16"
    grad_bytes: int = 4
    """Bytes per element of the accumulated gradient."""
    distributed_optimizer: bool = True
    fused_attention: bool = True
    """False: attention scores are stored (Megatron before FlashAttention, only in published runs of 2021 and 2022)."""
    layers_of_stage: tuple[int, ...] = ()
    """Number of layers of each pipeline stage, all its chunks together; (): an even split."""
    overlap_grad_reduce: bool = True
    """The last backward pass hides the reduction of gradients."""
    hidden_gathers: float = 1.0
    """Share of the optimizer steps after which a forward pass hides the gather of parameters. Before a weight sync
    nothing does."""
    fused_gradients: bool = True
    """Weight gradients are added to the accumulated ones inside the product that makes them."""

    def at_dp(self, dp: int) -> TrainingLayout:
        """The layout with another DP. `dataclasses.replace` would make a search three times as long."""
        return TrainingLayout(self.tp, self.pp, self.vpp, self.cp, dp, self.ep, self.etp, self.fsdp,
                              self.sequence_parallel, self.recompute, self.precision, self.grad_bytes,
                              self.distributed_optimizer, self.fused_attention, self.layers_of_stage,
                              self.overlap_grad_reduce, self.hidden_gathers, self.fused_gradients)

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def replica_gpus(self) -> int:
        """GPUs of one model replica, that is of one DP index."""
        return self.tp * self.pp * self.cp


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """The engines of the rollout partition."""

    tp: int = 1
    pp: int = 1
    replicas: int = 1
    weight_precision: Precision = "bf16"
    kv_precision: Precision = "bf16"
    max_num_seqs: int = MAX_NUM_SEQS
    memory_utilization: float = 0.85
    cuda_graphs: bool = True

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.replicas


@lru_cache(maxsize=1024)
def even_layers(layers: int, pp: int, vpp: int = 1) -> tuple[int, ...]:
    """Number of layers of each stage if a run does not state it.

    The split is equal if PP divides the layers. Otherwise embedding and head count as one layer each if that makes all
    chunks equal (Megatron's `account_for_embedding_in_pipeline_split`: 126 layers on PP 8). Otherwise the layers are
    spread as by `layers_of_stage`.
    """
    if layers % pp == 0:
        return (layers // pp,) * pp
    if pp > 1 and (layers + 2) % (pp * vpp) == 0:
        each = (layers + 2) // pp
        return (each - 1, *(each,) * (pp - 2), each - 1)
    return _spread(layers, pp)


def _spread(layers: int, pp: int) -> tuple[int, ...]:
    """Number of layers of each stage, as even as possible. The middle stages get the remainder, then the first one."""
    base, left = divmod(layers, pp)
    takers = [*range(1, pp - 1), 0][:left]
    return tuple(base + (stage in takers) for stage in range(pp))


def stage_layers(shape: Architecture, layout: TrainingLayout) -> tuple[int, ...]:
    """Number of layers of each pipeline stage."""
    return layout.layers_of_stage or even_layers(shape.layers, layout.pp, layout.vpp)


def rank_coordinates(tp: int, cp: int, dp: int, pp: int) -> tuple[RankCoordinates, ...]:
    """Megatron's order: rank = tp + TP (cp + CP (dp + DP pp))."""
    return tuple(RankCoordinates(rank=rank, tp=rank % tp, cp=rank // tp % cp, dp=rank // (tp * cp) % dp,
                                 pp=rank // (tp * cp * dp))
                 for rank in range(tp * cp * dp * pp))


def layers_of_stage(layers: int, pp: int, vpp: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Global layer numbers: `result[stage][chunk]`.

    With VPP, chunk v of stage p holds block v PP + p, and all blocks are equal (Narayanan et al., arXiv 2104.04473,
    section 2.2). Without VPP, the middle stages get the remainder, then the first one, because the ends also hold the
    embedding and the logits.

    Raises:
        UserError: fewer layers than stages, or a VPP that does not divide.
    """
    if vpp > 1:
        if pp == 1 or layers % (pp * vpp):
            raise UserError(f"{layers} layers do not divide into PP {pp} x VPP {vpp} equal blocks",
                            where="trainer.pp, trainer.vpp", fix="choose sizes whose product divides the layers")
        block = layers // (pp * vpp)
        return tuple(tuple(tuple(range((chunk * pp + stage) * block, (chunk * pp + stage + 1) * block))
                           for chunk in range(vpp)) for stage in range(pp))
    if layers < pp:
        raise UserError(f"PP {pp} has more stages than the model has layers ({layers})", where="trainer.pp",
                        fix=f"use trainer.pp <= {layers}")
    stages, start = [], 0
    for count in _spread(layers, pp):
        stages.append((tuple(range(start, start + count)),))
        start += count
    return tuple(stages)
