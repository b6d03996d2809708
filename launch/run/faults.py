"""Fault injection for drills and tests, by environment variables. Without them this module has no effect.

`MEGATRON_RL_FAULT=trainer-1:update:3:sleep`: at the named point and step, the named component does one of: `sleep`
(never arrives), `exit` (dies silently), `raise`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from launch import envvars
from launch.config.schema import RunConfig
from launch.errors import UserError

VARIABLE = "MEGATRON_RL_FAULT"
SWAP = "MEGATRON_RL_FAULT_SWAP"
WORKLOAD = "MEGATRON_RL_WORKLOAD"
"""A Python module that the supervisors of a job start instead of the training, with the interface of
`launch.runtime.workloads.train`. It is not a configuration key, because shared configuration files must not name
code."""
ACTIONS = ("sleep", "exit", "raise")


def trains(config: RunConfig) -> bool:
    """Whether the processes of a job load the model and train it, which is not so in a rehearsal or with `WORKLOAD`."""
    return not config.run.rehearse and envvars.get(WORKLOAD) is None


def strike(component: str, point: str, step: int) -> None:
    """Inject the requested fault. Called at the points where a fault may be requested."""
    wanted = envvars.get(VARIABLE)
    if not wanted:
        return
    parts = wanted.split(":")
    if len(parts) != 4 or parts[3] not in ACTIONS:
        raise UserError(f"{VARIABLE}={wanted} is not component:point:step:action",
                        fix=f"for example trainer-1:update:3:sleep; actions: {', '.join(ACTIONS)}")
    if parts[:3] != [component, point, str(step)]:
        return
    if parts[3] == "sleep":
        while True:             # each signal, such as the request for stacks, ends one pause
            signal.pause()
    elif parts[3] == "exit":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(f"fault requested by {VARIABLE}={wanted}")


def swapped(node: str, gpus: Sequence[int]) -> tuple[int, ...]:
    """`gpus`, with two of them exchanged if `MEGATRON_RL_FAULT_SWAP=node:gpu:gpu` names this node, as if the driver
    ordered GPUs differently than the placement."""
    wanted = envvars.get(SWAP)
    if not wanted:
        return tuple(gpus)
    parts = wanted.split(":")
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise UserError(f"{SWAP}={wanted} is not node:gpu:gpu", fix="for example h100-003:0:5")
    if parts[0] != node:
        return tuple(gpus)
    one, other = int(parts[1]), int(parts[2])
    return tuple({one: other, other: one}.get(gpu, gpu) for gpu in gpus)
