"""The driver's view of Ray: connect, count the nodes, pin an actor to a node, wait for calls with a deadline."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from launch import envvars
from launch.errors import UserError
from launch.files.waiting import LOOK_EVERY_S
from launch.plan.plan import Placement
from launch.runtime.ray_node import ADDRESS_VARIABLE
from megatron_rl.weight_sync.calls import NoAnswer, outcomes

Answer = TypeVar("Answer")

NAMESPACE = "megatron-rl"
MOST_CALLS = 100_000
"""Calls that a concurrent actor works on at a time: an engine has one for every group, and must still answer."""
_LOW_MEMORY = re.compile(r"Memory usage \S+ exceeded threshold of [^)]*\)")


class ComponentFailed(RuntimeError):
    """A component raised or died. The message names it."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


class ComponentDied(ComponentFailed):
    """The process of a component ended."""


class StartTimeout(RuntimeError):
    """A node or component did not arrive before its deadline. The message names those that are missing."""


async def connect(placement: Placement, deadline_s: float) -> dict[str, str]:
    """Join the job's Ray once all its nodes have registered. Returns node name -> Ray node id.

    Raises:
        StartTimeout: a node did not register in time. The message names the missing nodes.
    """
    address = envvars.get(ADDRESS_VARIABLE)
    if not address:
        raise UserError(f"{ADDRESS_VARIABLE} is not set", fix="start the driver through `megatron-rl launch`")
    until = time.monotonic() + deadline_s
    await _wait_for_port(address, until)
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    while True:
        ids = {node["NodeName"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
        missing = [name for name in placement.nodes if name not in ids]
        if not missing:
            return {name: ids[name] for name in placement.nodes}
        if time.monotonic() > until:
            raise StartTimeout(f"{len(missing)} of {len(placement.nodes)} Ray nodes did not register within "
                               f"{deadline_s:g} s: {', '.join(missing)}")
        await asyncio.sleep(LOOK_EVERY_S)  # Ray offers no call that waits for a node


def pinned(cls: type, node_id: str, environment: Mapping[str, str], *args: Any, concurrent: bool = False) -> Any:
    """Start an actor on exactly this node. Its environment is set before its Python starts. It reserves no Ray
    resources, because the placement decides where each actor runs."""
    options: dict[str, Any] = {"max_concurrency": MOST_CALLS} if concurrent else {}
    return ray.remote(cls).options(
        num_cpus=0, max_restarts=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        runtime_env={"env_vars": dict(environment)}, **options).remote(*args)


async def answer(name: str, reference: Awaitable[Answer]) -> Answer:
    """Await the answer to a call of the component `name`.

    Args:
        reference: Ray's reference to the result of the call.
    Raises:
        UserError: the component raised it.
        ComponentFailed: the component raised anything else.
        ComponentDied: its process ended.
    """
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise ComponentFailed(name, f"{type(error.cause).__name__}: {error.cause}") from error
    except RayActorError as error:
        raise ComponentDied(name, f"its process died ({type(error).__name__})") from error


async def gather(calls: Mapping[str, Awaitable[Answer]], what: str, timeout_s: float | None = None,
                 arrived: Callable[[], None] = lambda: None) -> dict[str, Answer]:
    """Await one call per component and return the answers by name. The first failure is raised at once, while other
    calls still run. `arrived` is called on each answer. Without a deadline, only the hang watch limits the wait.

    Raises:
        StartTimeout: a component did not answer before the deadline. The message names it.
        UserError, ComponentFailed: as raised by a call (see `answer`).
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    found = await outcomes(calls, deadline, first_failure=True, arrived=lambda name, outcome: arrived())
    missing = sorted(name for name, outcome in found.items() if isinstance(outcome, NoAnswer))
    for outcome in found.values():
        if isinstance(outcome, BaseException) and not isinstance(outcome, NoAnswer):
            raise outcome
    if missing:
        raise StartTimeout(f"{what}: no answer within {timeout_s:g} s from {', '.join(missing)}")
    return found


def death_reason(error: BaseException) -> str | None:
    """Return the reason if Ray itself ended a process, otherwise None. Ray's memory monitor states it only in the text
    of the exception. Without it, a rank that ran out of memory looks like one that was killed."""
    seen: BaseException | None = error
    while seen is not None:
        match = _LOW_MEMORY.search(str(seen))
        if match:
            return f"Ray ended it because its node ran low on memory: {match[0]}"
        seen = seen.__cause__
    return None


async def _wait_for_port(address: str, until: float) -> None:
    host, port = address.rsplit(":", 1)
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise StartTimeout(f"Ray's head does not answer at {address}: {error}") from error
            await asyncio.sleep(LOOK_EVERY_S)  # there is nothing to wait for until the head listens
