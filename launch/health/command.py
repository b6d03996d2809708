"""Implements `megatron-rl preflight`: on this machine, or on all nodes of an allocation with one job step."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from launch import envvars, processes
from launch.cluster import hostlist
from launch.cluster.file import load_cluster
from launch.cluster.spec import ClusterSpec
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.files.shared import seen
from launch.files.waiting import wait_until
from launch.health import network, network_run
from launch.health.check import SCHEMA_VERSION, Check, checks_to_json, write_report
from launch.health.expected import Expected, expected_of
from launch.health.gather import TIMEOUT_S, gather_reports
from launch.health.ledger import FILE as LEDGER
from launch.health.ledger import Ledger
from launch.health.login import check_login
from launch.health.node import CheckContext, check_node
from launch.health.simulated import machine_of
from launch.health.verdict import Verdict, judge
from launch.planner.here import is_here
from launch.planner.prepare import OnCluster, Prepared
from launch.ports import allocate
from launch.run.attempts import Attempt
from launch.run.faults import trains
from launch.run.node_files import END, NodeFiles, greeting
from launch.slurm import step as slurm_step
from launch.slurm.container import folders_of
from launch.slurm.profiles import Profile, load_profile

Say = Callable[[str], None]
CPU_MEMBERS = 2
"""Processes of the network tier on one machine without GPUs."""


@dataclass(frozen=True)
class Request:
    """The command line."""

    config: str | None = None
    overrides: tuple[str, ...] = ()
    device: Literal["auto", "cpu", "gpu"] = "auto"
    tier: Literal["login", "node", "fabric"] = "node"
    skip: tuple[str, ...] = ()
    ledger: str | None = None


def run(request: Request, say: Say = lambda line: None) -> Verdict:
    """Run the checks and return the verdict.

    Raises:
        UserError: the step on the allocation's nodes could not be started, or a given file is invalid.
    """
    job, prepared = check_login(request.config, request.overrides, request.device) if request.config else ([], None)
    if request.tier == "login":
        return judge({}, 0, job=job, skip=request.skip)
    here, cluster = _node(), None
    if prepared is not None and not is_here(named := _cluster(prepared)):
        cluster = named
    device = cluster.gpu.device if cluster else _device(request, here)
    profile = load_profile(prepared.config.run.profile if prepared else None)
    expected = Expected(device=device)
    if prepared is not None:
        config = prepared.config
        expected = expected_of(config, cluster, device, profile=profile, computes=trains(config))
    nodes = allocation()
    if nodes:
        read = folders_of(prepared.config) if prepared else []
        found = _over(nodes, _folder(prepared), expected, profile, request.tier == "fabric", cluster, say, read)
    else:
        found = {here: check_node(CheckContext(here, expected))}
        if request.tier == "fabric":
            found[here] += _network_here(here, device, _folder(prepared), say)
    needed, spares = _size(prepared, cluster is not None, len(found))
    return judge(found, needed, spares, _ledger(request, prepared, len(found)), job=job,
                 skip=(*request.skip, *(prepared.config.run.skip_checks if prepared else ())))


def agent(folder: str) -> None:
    """One node's part of the step: write the hello, run the checks, measure the network if requested, and exit."""
    attempt, node = Attempt(Path(folder)), _node()
    files = NodeFiles(attempt, node)
    files.folder.mkdir(parents=True, exist_ok=True)
    ports = allocate(int(envvars.get("SLURM_PROCID", "0")))
    try:
        where = greeting(node, ports)
        files.write_hello(where)
        checks = check_node(CheckContext(node, Expected.read(attempt.folder), attempt.folder, address=where.address))
        write_report(files.folder, node, checks)
        end = attempt.folder / END
        wait_until(lambda: seen(end) or network.Task.read(attempt.folder) is not None, "the leader", TIMEOUT_S,
                   say=print)
        if not seen(end):
            _members(attempt.folder, node, where.interface)
    finally:
        ports.release()


def document(request: Request, verdict: Verdict) -> dict[str, Any]:
    """The document for `--json`."""
    return {"schema_version": SCHEMA_VERSION, "tier": request.tier, "verdict": verdict.to_json(),
            "exclude": hostlist.compress(verdict.excluded),
            "nodes": {node: checks_to_json(checks) for node, checks in verdict.findings.items()}}


def allocation() -> tuple[str, ...]:
    """Nodes of the Slurm job that this process is in; () outside a job."""
    text = envvars.get("SLURM_JOB_NODELIST") if envvars.get("SLURM_JOB_ID") else None
    return hostlist.expand(text, "SLURM_JOB_NODELIST") if text else ()


def _over(nodes: Sequence[str], folder: Path, expected: Expected, profile: Profile, with_network: bool,
          cluster: ClusterSpec | None, say: Say, read: Sequence[Path]) -> dict[str, list[Check]]:
    """Check all nodes with one step of the allocation. Containers also mount the folders in `read`."""
    expected.write(folder)
    command, environment = slurm_step.step([sys.executable, "-m", "launch", "preflight", "--agent", str(folder)],
                                           nodes=nodes, cpus=int(envvars.get("SLURM_CPUS_ON_NODE", "1")),
                                           profile=profile, folders=(folder, *read))
    step = processes.start("the preflight's step", command, log=folder / "step.log", environment=environment)

    def check() -> None:
        if step.returncode is not None:
            raise UserError(f"srun ended with status {step.returncode} before all nodes reported: "
                            f"{_last_line(step.log)}", where=str(step.log), fix="see the log",
                            exit_code=ExitCode.SLURM)

    try:
        found = gather_reports(folder, nodes, say=say, check=check)
        if with_network:
            hellos = {node: hello for node in nodes if (hello := NodeFiles(Attempt(folder), node).hello()) is not None}
            measured = network_run.measure(folder, found, hellos, expected, cluster, profile, say, check)
            found = {node: [*checks, *measured.get(node, ())] for node, checks in found.items()}
        return found
    finally:
        (folder / END).touch()
        if step.wait(30.0) is None:
            step.end()


def _members(folder: Path, node: str, interface: str) -> None:
    """Start this node's processes of the network task and wait for them."""
    children, task = network_run.start(folder, node, interface), network.Task.read(folder)
    deadline = time.monotonic() + (task.timeout_s if task else 0.0)
    for child in children:
        if child.wait(max(0.0, deadline - time.monotonic())) is None:
            child.end()


def _network_here(node: str, device: str, folder: Path, say: Say) -> list[Check]:
    """Measure this machine alone: its GPUs, or two CPU processes."""
    gpus = [gpu.index for gpu in machine_of(node).gpus().gpus] if device == "gpu" else []
    ports = allocate(address="127.0.0.1")
    try:
        members = tuple(network.Member(node, gpu, "127.0.0.1") for gpu in gpus or (None,) * CPU_MEMBERS)
        task = network.Task(members, "nccl" if gpus else "gloo", ports.rendezvous, {},
                           **({} if gpus else {"allreduce_bytes": 16 * network.MIB}))
        task.write(folder)
        _members(folder, node, "lo")
        return network_run.result(folder, replace(task, timeout_s=0.0), [node], None, say)[node]
    finally:
        ports.release()


def _node() -> str:
    return envvars.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def _device(request: Request, node: str) -> envvars.Device:
    """The device of this machine. A broken driver is an error only if GPUs are requested by Slurm or --device."""
    if request.device != "auto":
        return request.device
    asked = envvars.get("SLURM_GPUS_ON_NODE") or envvars.get("SLURM_JOB_GPUS")
    return "gpu" if asked or machine_of(node).gpus().gpus else "cpu"


def _cluster(prepared: Prepared):
    name = prepared.config.cluster
    return None if name == "local" else load_cluster(name)


def _folder(prepared: Prepared | None) -> Path:
    """Folder for the exchange between the nodes and for the results: `<run.dir>/.preflight/<job>-<time>`."""
    root = Path(prepared.config.run.dir if prepared else "runs") / ".preflight"
    folder = root / f"{envvars.get('SLURM_JOB_ID') or _node()}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    return folder.absolute()


def _size(prepared: Prepared | None, on_cluster: bool, given: int) -> tuple[int, int]:
    """(nodes that the plan uses, spares). Without a plan for a cluster, all given nodes."""
    if not isinstance(prepared, OnCluster) or not on_cluster or given == 1:
        return given, 0
    return prepared.needed, prepared.spares


def _ledger(request: Request, prepared: Prepared | None, nodes: int) -> Ledger | None:
    if request.ledger is not None:
        return Ledger(request.ledger, cluster_nodes=nodes)
    if prepared is None:
        return None
    run = prepared.config.run
    return Ledger(Path(run.dir) / run.name / LEDGER, cluster_nodes=nodes)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it printed nothing"
