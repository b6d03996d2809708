"""Where ranks and layers are: Megatron's order of ranks, and the layers of each pipeline stage. Pure arithmetic."""

from __future__ import annotations

from launch.errors import UserError
from launch.plan.plan import RankCoordinates


def rank_coordinates(tp: int, cp: int, dp: int, pp: int) -> tuple[RankCoordinates, ...]:
    """Megatron's order: rank = tp + TP (cp + CP (dp + DP pp))."""
    return tuple(RankCoordinates(rank=rank, tp=rank % tp, cp=rank // tp % cp, dp=rank // (tp * cp) % dp,
                                 pp=rank // (tp * cp * dp))
                 for rank in range(tp * cp * dp * pp))


def layers_of_stage(layers: int, pp: int, vpp: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """`result[stage][chunk]`: global layer numbers.

    With VPP chunk v of stage p holds the block v PP + p (Narayanan et al., arXiv 2104.04473, section 2.2), all blocks
    equal. Without, layers left over go to the middle stages, then to the first: the ends also hold the embedding and
    the logits.

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
    for count in _layer_counts(layers, pp):
        stages.append((tuple(range(start, start + count)),))
        start += count
    return tuple(stages)


def _layer_counts(layers: int, pp: int) -> list[int]:
    """Layers a stage: as even as possible; what is left over goes to the middle, then to the first stage."""
    base, left = divmod(layers, pp)
    takers = [*range(1, pp - 1), 0][:left]
    return [base + (stage in takers) for stage in range(pp)]


