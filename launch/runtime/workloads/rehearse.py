"""The rehearsal on one node: starts one process per rank, with the rank's environment, which reports where it runs.
It does everything that a job does except the GPU work, without torch and with a few megabytes per process. With
`run.rehearse=ray`, Ray also starts, with a driver that only counts nodes (`megatron_rl.driver.ray_census`).

Every node writes the reports of its processes (`nodes/<node>/rehearsal.json`) with secrets masked. The placement's
first node waits for all of them, compares them with the placement and writes the outcome (`launch.runtime.rehearsal`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil

from launch import envvars, processes
from launch.errors import UserError
from launch.files.shared import seen, write_atomically
from launch.run import faults
from launch.run.outcome import write_outcome
from launch.runtime import rehearsal
from launch.runtime.places import PlacedProcess, places, variables
from launch.runtime.rehearsal import RankReport
from launch.runtime.workloads import NodeContext, rank_report, train

SCRIPT = Path(rank_report.__file__)
CENSUS = "megatron_rl.driver.ray_census"


@dataclass(frozen=True)
class Rehearsal:
    """The running processes of this node."""

    children: list[processes.Child]
    ray: train.Training | None = None

    def close(self, *, failed: bool = False) -> None:
        """Close Ray, which alone has files outside the attempt's folder."""
        if self.ray is not None:
            self.ray.close(failed=failed)


def start(context: NodeContext) -> Rehearsal:
    """Start this node's processes and collect their reports. On the first node, compare all reports.

    Raises:
        UserError: a process ended, or processes or nodes did not report within `run.deadline_s`.
        RayNotUp: Ray did not start.
    """
    attempt, node = context.attempt, context.node
    config, placement, device = attempt.config(), attempt.placement(), attempt.plan().device
    deadline_s = config.run.deadline_s
    mine = [place for place in places(placement) if place.node == node]
    folder = Path(tempfile.mkdtemp(prefix="mrl-"))      # private, because a report may contain secrets
    try:
        children = [_start(place, variables(place, config, placement, device, attempt.mark), folder) for place in mine]
        context.wait(lambda: all(map(_has_said, children)), f"the {len(children)} processes on {node} to report",
                     deadline_s)
        reports = [report_of(child.log.read_bytes()) for child in children]
    finally:
        shutil.rmtree(folder)
    target = rehearsal.node_file(attempt, node)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, json.dumps(list(map(asdict, reports))))
    ray = train.start(context, CENSUS) if config.run.rehearse == "ray" else None
    if node == placement.nodes[0]:
        for other in placement.nodes:
            file = rehearsal.node_file(attempt, other)
            context.wait(partial(seen, file), f"the rehearsal's report of {other}", deadline_s)
        if ray is not None:
            _wait_for_census(context, ray)
        write_outcome(attempt.folder, rehearsal.conclude(attempt))
        left = [psutil.Process(child.pid) for child in children if child.returncode is None]
        processes.end_processes(left, grace_s=0.0)
    return Rehearsal([*children, *(ray.children if ray is not None else [])], ray)


def _wait_for_census(context: NodeContext, ray: train.Training) -> None:
    """Wait until Ray's nodes are counted and their actors have answered. Raylets of one host start one by one."""
    file, census = rehearsal.ray_file(context.attempt), ray.children[-1]

    def told() -> bool:
        if census.returncode:
            raise train.RayNotUp(f"the census of Ray's nodes ended with status {census.returncode}: see {census.log}")
        return file.exists()

    nodes = len(context.attempt.placement().nodes)
    context.wait(told, f"an actor on each of {nodes} Ray nodes", context.attempt.config().run.deadline_s * nodes)


def _start(place: PlacedProcess, given: dict[str, str], folder: Path) -> processes.Child:
    if place.gpu is not None:
        given["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, faults.swapped(place.node, place.visible)))
    command = [sys.executable, "-I", "-S", str(SCRIPT), place.process, str(place.index)]
    return processes.start(place.process, command, log=folder / place.process,
                           environment={**envvars.inherited(), **given})


def _has_said(child: processes.Child) -> bool:
    if child.returncode is not None:
        raise UserError(f"{child.name} ended with status {child.returncode} instead of reporting: "
                        f"{child.log.read_text(errors='replace')[-500:]}",
                        fix="make the Python interpreter work on this node: see the message")
    return child.log.read_bytes().endswith(rank_report.END)


def report_of(said: bytes) -> RankReport:
    """The report of a process, with secrets masked."""
    head, _, environ = said.removesuffix(rank_report.END).partition(b"\0\0")
    fields, variables = (dict(entry.split("=", 1) for entry in os.fsdecode(text).split("\0") if "=" in entry)
                         for text in (head, environ))
    gpu, nic = (int(fields[key]) if fields[key] else None for key in ("gpu", "nic"))
    return RankReport(fields["process"], fields["node"], gpu, nic, fields["host"], int(fields["pid"]),
                      int(fields["cpus"]), fields["switches"], envvars.recordable(variables))
