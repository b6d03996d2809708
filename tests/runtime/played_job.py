"""A job on several nodes without Slurm: this process plays the leader, the supervisors are the real ones."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch import envvars, processes
from launch.health.expected import expected_of
from launch.health.gather import gather_reports
from launch.plan.plan import Placement
from launch.planner.prepare import prepare
from launch.planner.seats.local import place_cpu
from launch.ports import Ports
from launch.run import node_files
from launch.run.attempts import Attempt, RunFolder
from launch.run.metrics import metric_rows
from launch.run.node_files import Beat, NodeFiles
from launch.runtime.ray_node import ADDRESS_VARIABLE
from launch.runtime.workloads.train import TOKEN_FILE, ray_address
from launch.slurm.profiles import Profile
from tests.patience import patient, still_there

CONFIG = "configs/tiny/grpo.yaml"


@dataclass
class PlayedJob:
    attempt: Attempt
    placement: Placement
    supervisors: dict[str, processes.Child]

    def until(self, condition: Callable[[], bool], what: str, deadline_s: float = 150.0) -> None:
        until(condition, what, deadline_s, self.text)

    def at_step(self, step: int) -> None:
        self.until(lambda: len(metric_rows(self.attempt.folder / "metrics.jsonl")) >= step, f"step {step}")

    def text(self) -> str:
        """The ends of all logs, for a test that fails."""
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
                         for path in sorted(self.attempt.logs.glob("*.log")))

    def variables(self) -> dict[str, str]:
        """For a process that talks to the job's Ray as its driver does."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.attempt.folder / TOKEN_FILE),
                ADDRESS_VARIABLE: ray_address(self.attempt, self.placement.nodes[0])}


@contextmanager
def played(runs: Path, nodes: list[str], training_nodes: int, *words: str) -> Iterator[PlayedJob]:
    """The tiny run on simulated nodes of this host, from the moment when it is placed. At the end every supervisor
    must end what is its node's, and nothing may be left."""
    prepared = prepare(CONFIG, (f"run.dir={runs}", *words), "cpu", to_run=True)
    config = prepared.config
    with RunFolder(config.run) as run:
        attempt = run.new_attempt()
        expected_of(config, None, "cpu", profile=Profile()).write(attempt.folder)
        beat = Beat(attempt.folder / node_files.LEADER_BEAT)
        supervisors = {node: supervisor(attempt, node, number) for number, node in enumerate(nodes)}
        try:
            files = {node: NodeFiles(attempt, node) for node in nodes}
            until(lambda: all(each.hello() for each in files.values()), "every supervisor's hello", 30)
            gather_reports(attempt.folder, nodes, patient(60))
            hellos = {node: each.hello() for node, each in files.items()}
            placement = place_cpu(prepared.plan, attempt.number, nodes, training_nodes,
                                  {node: hello.address for node, hello in hellos.items()},
                                  {node: Ports(hello.ports) for node, hello in hellos.items()},
                                  {node: hello.interface for node, hello in hellos.items()})
            attempt.write(config, prepared.plan, placement, envvars.recordable())
            yield PlayedJob(attempt, placement, supervisors)
        finally:
            (attempt.folder / node_files.END).write_text("{}")
            left = [node for node, child in supervisors.items() if child.wait(patient(30)) is None]
            beat.stop()
        assert not left, f"still there: supervisors of {left}"
        assert still_there(attempt.mark) == []


def supervisor(attempt: Attempt, node: str, number: int) -> processes.Child:
    """The supervisor of a simulated node, the job's task `number`."""
    return processes.start(
        node, [sys.executable, "-m", "launch", "node", str(attempt.folder)],
        log=attempt.logs / f"supervisor-{node}.log",
        environment={**os.environ, "SLURMD_NODENAME": node, "SLURM_PROCID": str(number)})


def until(condition: Callable[[], bool], what: str, deadline_s: float, text: Callable[[], str] = str) -> None:
    end = time.monotonic() + patient(deadline_s)
    while not condition():
        assert time.monotonic() < end, f"not within {patient(deadline_s):.0f} s: {what}\n{text()}"
        time.sleep(0.05)  # between two looks at the condition
