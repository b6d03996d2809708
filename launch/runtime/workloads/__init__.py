"""Workloads that the supervisors start once a job is placed, by the `start(context)` of each module."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

from launch import envvars, processes
from launch.config.schema import RunConfig
from launch.files.waiting import wait_until
from launch.ports import Ports
from launch.run.attempts import Attempt
from launch.run.faults import WORKLOAD


@dataclass(frozen=True)
class NodeContext:
    """A node of a placed attempt, as its supervisor shows it to the workload."""

    attempt: Attempt
    node: str
    ports: Ports
    """The block that this node holds."""
    check: Callable[[], None]
    """Raises when the attempt ends."""
    say: Callable[[str], None]
    """Writes a line to the node's log."""

    def wait(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Wait until the condition holds. Raises with `what` at the deadline, or when the attempt ends before it."""
        wait_until(condition, what, deadline_s, say=self.say, check=self.check)


class Running(Protocol):
    """The processes that a workload started on a node."""

    children: Sequence[processes.Child]
    """As soon as one of them ends, the node's part of the job is over."""

    def close(self, *, failed: bool = False) -> None:
        """Remove files outside the attempt's folder. Called after all processes of the node have ended."""


def workload_of(config: RunConfig) -> ModuleType:
    """The rehearsal if the configuration requests it, else the training, or its replacement in a test."""
    own = f"{__name__}.rehearse" if config.run.rehearse else f"{__name__}.train"
    return importlib.import_module(own if config.run.rehearse else envvars.get(WORKLOAD) or own)
