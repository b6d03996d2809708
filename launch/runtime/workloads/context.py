"""What a supervisor tells a workload, and what it gets back."""

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
        """A line of the node's log."""

    def wait(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Until the condition holds. Raises at the deadline, saying `what`, or when the attempt ends meanwhile."""


class Running(Protocol):
    """What a workload started on a node."""

    children: Sequence[processes.Child]
    """As soon as one of them ends, the node's part of the job is over."""

    def close(self, *, failed: bool = False) -> None:
        """Remove what lies outside the attempt's folder; called when all processes of the node have ended."""
