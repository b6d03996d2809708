"""The node tier of the preflight: the checks that a supervisor runs on its node before it starts anything."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch import envvars
from launch.health import canary
from launch.health.check import Check, warning
from launch.health.checks import clock, cpus, environment, gpus, interface, limits, model, nics, scratch, versions
from launch.health.expected import Expected
from launch.health.machine import Machine
from launch.health.simulated import machine_of


@dataclass(frozen=True)
class CheckContext:
    """A node and the expectations it is checked against."""

    node: str
    """Its Slurm name (SLURMD_NODENAME), never the host name."""
    expected: Expected
    attempt: Path | None = None
    """The attempt's folder on the shared file system, where a leader answers the canary (`launch.health.gather`).
    None: there is no leader, and the file system and clock are not checked."""
    environment: Mapping[str, str] = field(default_factory=envvars.inherited)
    """The environment that the processes of this node will inherit."""
    address: str | None = None
    """The address at which the other nodes reach this one, if the supervisor has chosen it."""
    mark: str | None = None
    """`Attempt.mark`: GPU processes that carry it belong to the job."""
    machine: Machine | None = None
    """The hardware to check; None: this machine, or the simulated one set in the environment."""


SUBJECTS: dict[str, Callable[[CheckContext, Machine], Sequence[Check]]] = {
    "gpu": lambda at, machine: gpus.check(machine, at.expected, at.environment, at.mark),
    "nic": lambda at, machine: nics.check(machine, at.expected, at.environment),
    "net": lambda at, machine: interface.check(machine, at.environment, at.address),
    "limit": lambda at, machine: limits.check(machine, at.expected),
    "cpu": lambda at, machine: cpus.check(machine, at.expected),
    "disk": lambda at, machine: scratch.check(at.expected, at.environment),
    "model": lambda at, machine: model.check(at.expected),
    "lib": lambda at, machine: versions.check(at.expected),
    "env": lambda at, machine: environment.check(at.expected, at.environment),
    "fs": lambda at, machine: clock.check(at.attempt, at.node, canary.TIMEOUT_S),
}
"""Group of checks -> what runs it. Those that wait for the leader are last."""


def check_node(context: CheckContext) -> list[Check]:
    """Run every check on this node. Takes a second or two, and at most `canary.TIMEOUT_S` more if the leader does not
    answer.

    If a check itself fails with an unexpected exception, the result is a warning: a defective check must not remove
    nodes from the job.
    """
    machine = context.machine or machine_of(context.node)
    checks: list[Check] = []
    for subject, run in SUBJECTS.items():
        try:
            checks += run(context, machine)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            checks.append(warning(f"{subject}.check_failed", None,
                                  f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})",
                                  "the check itself failed and found nothing: report this as a bug in megatron-rl"))
    return checks
