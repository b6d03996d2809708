"""What drills and tests put in the place of the real thing, by variables of the environment; without them nothing here
does anything.

`MEGATRON_RL_FAULT=trainer-1:update:3:sleep`: the named component does, at the named point and step, one of: `sleep`
(never arrives), `exit` (dies without a word), `raise`.
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
"""A Python module that the supervisors of a job start in the place of the training, with the interface of
`launch.runtime.workloads.train`. Not a key of the configuration: a file that somebody shares must not name code."""
ACTIONS = ("sleep", "exit", "raise")


def trains(config: RunConfig) -> bool:
    """Whether the processes of a job load the model and train it: not in a rehearsal, and not under `WORKLOAD`."""
    return not config.run.rehearse and envvars.get(WORKLOAD) is None


def strike(component: str, point: str, step: int) -> None:
    """Called at the points where a fault may be asked for."""
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
        while True:             # a signal, such as the one that asks for stacks, ends one pause
            signal.pause()
    elif parts[3] == "exit":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(f"fault asked for by {VARIABLE}={wanted}")


def swapped(node: str, gpus: Sequence[int]) -> tuple[int, ...]:
    """`gpus`, two of them exchanged where `MEGATRON_RL_FAULT_SWAP=node:gpu:gpu` says so of this node: as if the driver
    counted GPUs in another order than the placement."""
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
