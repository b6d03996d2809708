"""Handles through which the driver calls the actors. Every verb has the type of the actor's method, and its errors name
the component.

    rank = RemoteTrainer("trainer-0", actor)
    metrics = await rank.update(step, shared(batch))
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, overload

import ray

from megatron_rl.driver.actors import RewardActor, RolloutActor, TrainerActor
from megatron_rl.driver.cluster import answer

Actor = TypeVar("Actor")
Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class Handle:
    """An actor and its name in logs and messages (`trainer-0`)."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor

    def kill(self) -> None:
        """End the actor's process. Processes that it started may be left."""
        ray.kill(self.actor)


@overload
def verb(method: Callable[Concatenate[Actor, Given], Coroutine[Any, Any, Answer]]
         ) -> Callable[Concatenate[Handle, Given], Awaitable[Answer]]: ...


@overload
def verb(method: Callable[Concatenate[Actor, Given], Answer]
         ) -> Callable[Concatenate[Handle, Given], Awaitable[Answer]]: ...


def verb(method: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a method of an actor's class into a method of its handle. Calls are sent at once and in order. Awaiting the
    answer raises the errors of `cluster.answer`."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Handle, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        return answer(self.name, getattr(self.actor, name).remote(*args, **kwargs))

    return call


Value = TypeVar("Value")


def shared(value: Value) -> Value:
    """Put an argument of several calls into Ray's store once, so that the actors of a node read one copy."""
    return cast(Value, ray.put(value))


class RemoteTrainer(Handle):
    """One training rank. It is also a `weight_sync.protocol.TrainerHandle` and a `weight_sync.disk.WeightWriter`."""

    start = verb(TrainerActor.start)
    load_initial_weights = verb(TrainerActor.load_initial_weights)
    begin_load = verb(TrainerActor.begin_load)
    finish_load = verb(TrainerActor.finish_load)
    begin_save = verb(TrainerActor.begin_save)
    checkpoint_progress = verb(TrainerActor.checkpoint_progress)
    accumulate = verb(TrainerActor.accumulate)
    update = verb(TrainerActor.update)
    keep_logprobs = verb(TrainerActor.keep_logprobs)
    export = verb(TrainerActor.export)
    sync_describe = verb(TrainerActor.sync_describe)
    sync_open = verb(TrainerActor.sync_open)
    sync_send = verb(TrainerActor.sync_send)
    sync_discard = verb(TrainerActor.sync_discard)


class RemoteEngine(Handle):
    """One rollout replica: a `rollout.scheduler.EngineClient` and a `weight_sync.protocol.EngineHandle`."""

    start = verb(RolloutActor.start)
    generate = verb(RolloutActor.generate)
    generate_group = verb(RolloutActor.generate_group)
    ended = verb(RolloutActor.ended)
    status = verb(RolloutActor.status)
    compare = verb(RolloutActor.compare)
    stop = verb(RolloutActor.stop)
    sync_describe = verb(RolloutActor.sync_describe)
    sync_open = verb(RolloutActor.sync_open)
    sync_prepare = verb(RolloutActor.sync_prepare)
    sync_receive = verb(RolloutActor.sync_receive)
    sync_commit = verb(RolloutActor.sync_commit)
    sync_discard = verb(RolloutActor.sync_discard)


class RemoteRewards(Handle):
    """The reward processes of one node: a `driver.rewards.RewardActorHandle`."""

    start = verb(RewardActor.start)
    score = verb(RewardActor.score)
    stay = verb(RewardActor.stay)
    close = verb(RewardActor.close)
