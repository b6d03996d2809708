"""The interface between a supervisor and a workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from launch import processes
from launch.ports import Ports
from launch.run.attempts import Attempt


class NodeContext(Protocol):
    """A node of a placed attempt."""

    attempt: Attempt
    node: str
    ports: Ports
    """The block that this node holds."""

    def say(self, text: str) -> None:
        """Write a line to the node's log."""

    def wait(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Wait until the condition holds. Raises with `what` at the deadline, or when the attempt ends before it."""


class Running(Protocol):
    """The processes that a workload started on a node."""

    children: Sequence[processes.Child]
    """As soon as one of them ends, the node's part of the job is over."""

    def close(self, *, failed: bool = False) -> None:
        """Remove files outside the attempt's folder. Called after all processes of the node have ended."""
