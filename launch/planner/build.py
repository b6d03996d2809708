"""`plan()`: from a configuration with pinned sizes and an architecture to the plan that every process reads.

Pure: no file, no environment, no clock. The same inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from launch.config import auto
from launch.config.auto import can_share_prompts, round_up, sequence_multiple
from launch.config.schema import RunConfig
from launch.errors import UserError
from launch.model.architecture import Architecture
from launch.model.shape import VOCAB_MULTIPLE
from launch.plan.plan import BatchPlan, EnginePlan, Plan, RankCoordinates, RolloutPlan, TrainingPlan


def plan(config: RunConfig, architecture: Architecture, device: Literal["cpu", "gpu"]) -> Plan:
    """The plan of a run; sizes that are still `auto` are those of one machine. Run `launch.config.checks.check` first: it
    explains what does not fit together.

    Raises:
        UserError: layers that cannot be laid out over the pipeline.
    """
    config = auto.with_values(config, auto.local_values(config))
    trainer, rollout, algorithm = config.trainer, config.rollout, config.algorithm
    training = TrainingPlan(
        tp=trainer.tp, pp=trainer.pp, vpp=trainer.vpp, cp=trainer.cp, dp=trainer.dp,
        sequence_parallel=trainer.sequence_parallel,
        padded_vocab=round_up(architecture.vocab, VOCAB_MULTIPLE * trainer.tp),
        layers_of_stage=layers_of_stage(architecture.layers, trainer.pp, trainer.vpp),
        ranks=rank_coordinates(trainer.tp, trainer.cp, trainer.dp, trainer.pp))
    engines = tuple(EnginePlan(replica=replica, tp=rollout.tp) for replica in range(rollout.replicas))
    batch = BatchPlan(
        prompts_per_step=algorithm.prompts_per_step, group_size=algorithm.group_size,
        samples_per_step=algorithm.prompts_per_step * algorithm.group_size,
        updates_per_batch=algorithm.updates_per_batch, token_budget=trainer.token_budget,
        sequence_multiple=sequence_multiple(trainer.tp, trainer.cp, trainer.sequence_parallel),
        share_prompts=trainer.share_prompts != "off" and can_share_prompts(trainer, device))
    return Plan(config_hash=config_hash(config), architecture=architecture, device=device, training=training,
                rollout=RolloutPlan(tp=rollout.tp, engines=engines), batch=batch)


def config_hash(config: RunConfig) -> str:
    """Hash of the resolved values, not of the file's text: comments do not count."""
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]


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


