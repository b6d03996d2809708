"""Starts the actors of a job, each in its own process on the node that the placement assigns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch import envvars
from launch.errors import UserError
from launch.run.attempts import Attempt
from megatron_rl.driver.actors import RewardActor, RolloutActor, TrainerActor
from megatron_rl.driver.clock import StepClock
from megatron_rl.driver.cluster import connect, gather, pinned
from megatron_rl.driver.handles import RemoteEngine, RemoteRewards, RemoteTrainer
from megatron_rl.facts import disagreements, shared_gpus


@dataclass(frozen=True)
class Actors:
    """All actors of an attempt. Each has built its part."""

    trainers: tuple[RemoteTrainer, ...]
    """By rank."""
    engines: tuple[RemoteEngine, ...]
    """By replica."""
    rewards: tuple[RemoteRewards, ...]
    """One on each training node."""
    start_again: Callable[[int], Awaitable[RemoteEngine]]
    """Starts a new process for a replica, on the node and GPUs of the placement. Raises like `start_actors`."""


async def start_actors(attempt: Attempt, columns: Sequence[str], template_fingerprint: str,
                       clock: StepClock) -> Actors:
    """Start all actors at the same time and wait until each has built its part.

    Args:
        columns: further columns of the data set, which the rewards may use.
        template_fingerprint: fingerprint of the template that rendered the prompts. The engines must decode with it.

    Raises:
        StartTimeout: a node or an actor did not arrive within `run.deadline_s`.
        UserError, ComponentFailed: an actor cannot start, or the started actors do not match.
    """
    placement, deadline_s = attempt.placement(), attempt.config().run.deadline_s
    clock.start_up(f"waiting for {len(placement.nodes)} Ray node(s)")
    nodes = await connect(placement, deadline_s)
    folder = str(attempt.folder.resolve())

    def engine_of(replica: int) -> RemoteEngine:
        each, name = placement.rollout[replica], f"rollout-{replica}"
        environment = _environment(attempt, "rollout", each.node, each.gpus) | {envvars.COMPONENT: name}
        return RemoteEngine(name, pinned(RolloutActor, nodes[each.node], environment, folder, replica, concurrent=True))

    async def start_again(replica: int) -> RemoteEngine:
        engine = engine_of(replica)
        try:
            found = await gather({engine.name: engine.start()}, "start", deadline_s)
            refuse_disagreement({**facts, **found})
        except BaseException:
            engine.kill()
            raise
        return engine

    engines = tuple(engine_of(each.replica) for each in placement.rollout)
    trainers = tuple(
        RemoteTrainer(f"trainer-{each.rank}", pinned(
            TrainerActor, nodes[each.node],
            _environment(attempt, "trainer", each.node, () if each.gpu is None else (each.gpu,)), folder, each.rank))
        for each in placement.training)
    rewards = tuple(
        RemoteRewards(f"reward-{index}", pinned(RewardActor, nodes[node], _environment(attempt, "reward", node, ()),
                                                folder, index, list(columns), concurrent=True))
        for index, node in enumerate(placement.rewards))
    clock.start_up(f"starting {len(trainers)} training rank(s), {len(engines)} vLLM engine(s) and the rewards on "
                   f"{len(rewards)} node(s)")
    calls = {each.name: each.start() for each in trainers}
    calls |= {each.name: each.start() for each in engines}
    calls |= {each.name: each.start() for each in rewards}
    facts = await gather(calls, "start", deadline_s)
    facts = {"driver": {"template_fingerprint": template_fingerprint}, **facts}
    refuse_disagreement(facts)
    return Actors(trainers, engines, rewards, start_again)


def refuse_disagreement(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises:
        UserError: the processes of the job differ in versions, NCCL settings or tokenizer, or two share a GPU.
    """
    lines = disagreements(facts) + shared_gpus(facts)
    if lines:
        raise UserError("the processes of this job do not fit together\n  " + "\n  ".join(lines),
                        where="environment and packages of the nodes",
                        fix="use one environment, one model folder and the placement's GPUs on all nodes")


def _environment(attempt: Attempt, role: envvars.Role, node: str, gpus: Sequence[int]) -> dict[str, str]:
    placement = attempt.placement()
    variables = envvars.environment(role, attempt.plan().device, attempt.config(), job=attempt.mark, gpus=gpus,
                                    interface=placement.interface(node), address=placement.addresses[node],
                                    nics=placement.nics.get(node, ()))
    return {**variables, envvars.NODE: node}
