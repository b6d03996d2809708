"""What a supervisor starts on its node: see `launch.runtime.workloads`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from launch import envvars, processes
from launch.runtime.workloads import NodeContext


@dataclass(frozen=True)
class Started:
    children: list[processes.Child]

    def close(self, *, failed: bool = False) -> None:
        """Nothing lies outside the attempt's folder."""


def start(context: NodeContext) -> Started:
    """Start this node's process."""
    attempt, node = context.attempt, context.node
    number = attempt.placement().nodes.index(node)
    environment = {**envvars.inherited(), envvars.JOB_MARK: attempt.mark, envvars.NODE: node,
                   "PYTHONPATH": ":".join(filter(None, [os.getcwd(), envvars.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "tests.launcher_stub.process", str(attempt.folder), str(number)]
    return Started([processes.start(f"trainer-{number}", command, log=attempt.logs / f"trainer-{number}.log",
                                    environment=environment)])
