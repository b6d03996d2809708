"""The node tier of the preflight: what a supervisor checks on its node before anything is started there."""

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
    """A node, and what is expected of it."""

    node: str
    """Its name in Slurm (SLURMD_NODENAME), never the host's."""
    expected: Expected
    attempt: Path | None = None
    """The attempt's folder, on the shared file system, where a leader answers the canary (`launch.health.gather`);
    None: no leader, the canary and the clock are not checked."""
    environment: Mapping[str, str] = field(default_factory=envvars.inherited)
    """What the processes of this node will inherit."""
    address: str | None = None
    """The address under which the other nodes reach this one, where the supervisor has chosen it."""
    mark: str | None = None
    """`Attempt.mark`: GPU processes that carry it are the job's own."""
    machine: Machine | None = None
    """What is asked about the hardware; None: the machine itself, or the simulated one that the environment names."""
    canary_timeout_s: float = canary.TIMEOUT_S


@dataclass(frozen=True)
class Subject:
    """A group of checks with what they need."""

    name: str
    run: Callable[[CheckContext, Machine], Sequence[Check]]


SUBJECTS: tuple[Subject, ...] = (
    Subject("gpu", lambda at, machine: gpus.check(machine, at.expected, at.environment, at.mark)),
    Subject("nic", lambda at, machine: nics.check(machine, at.expected, at.environment)),
    Subject("net", lambda at, machine: interface.check(machine, at.environment, at.address)),
    Subject("limit", lambda at, machine: limits.check(machine, at.expected)),
    Subject("cpu", lambda at, machine: cpus.check(machine, at.expected)),
    Subject("disk", lambda at, machine: scratch.check(at.expected, at.environment)),
    Subject("model", lambda at, machine: model.check(at.expected)),
    Subject("lib", lambda at, machine: versions.check(at.expected)),
    Subject("env", lambda at, machine: environment.check(at.expected, at.environment)),
    Subject("fs", lambda at, machine: clock.check(at.attempt, at.node, at.canary_timeout_s)),
)


def check_node(context: CheckContext) -> list[Check]:
    """Run every check on this node, the ones that wait for the leader last. Takes a second or two; at most
    `context.canary_timeout_s` more where the leader does not answer.

    A check that fails by itself, by an error nobody foresaw, is a warning with the error: a defect of a check must
    not take nodes out of the job.
    """
    machine = context.machine or machine_of(context.node)
    checks: list[Check] = []
    for subject in SUBJECTS:
        try:
            checks += subject.run(context, machine)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            checks.append(warning(f"{subject.name}.check_failed", None,
                                  f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})",
                                  "the check itself failed, nothing is known: report this as a bug of megatron-rl"))
    return checks
