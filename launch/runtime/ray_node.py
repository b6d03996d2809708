"""Ray on one node: how a raylet is started, with every port pinned, token authentication and the job's interface."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launch import processes
from launch.ports import Ports
from launch.runtime.components import Pid

ADDRESS_VARIABLE = "MEGATRON_RL_RAY_ADDRESS"
"""Tells the driver where the head listens."""
PREFIX, OWNER = "mrl-", "owner"
OBJECT_STORE_BYTES = 256 << 20
LOGICAL_CPUS = 1024
"""Actors are pinned by node name and take no Ray CPUs; the number only must not stand in the way."""


@dataclass
class RaySession:
    """Ray's scratch folder and token, gone at the end. The folder is private to this user (Ray makes its own part of it
    open to everybody) and its name is short, since a socket's path has 107 bytes."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix=PREFIX)))

    def __post_init__(self) -> None:
        sweep()
        owner = psutil.Process()
        (self.folder / OWNER).write_text(f"{owner.pid} {owner.create_time()}", encoding="ascii")
        descriptor = os.open(self.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))

    @property
    def token(self) -> Path:
        return self.folder / "token"

    @property
    def scratch(self) -> Path:
        """What Ray is given as its temporary folder."""
        return self.folder / "r"

    def variables(self) -> dict[str, str]:
        """What every process that talks to Ray needs. The token itself is never in an environment or a log."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
        }

    def keep_logs(self, destination: Path) -> None:
        """Copy Ray's own logs aside, for an attempt that failed."""
        logs = self.scratch / "session_latest" / "logs"
        if logs.is_dir():
            with contextlib.suppress(shutil.Error):  # a socket, or a file that went: the rest is there
                shutil.copytree(logs, destination, dirs_exist_ok=True, ignore_dangling_symlinks=True)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def sweep() -> None:
    """Remove the folders of sessions whose launcher is gone: one that was killed could not tidy up."""
    for owner in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{OWNER}"):
        with contextlib.suppress(OSError, ValueError):  # another user's, or removed meanwhile
            pid, started = owner.read_text(encoding="ascii").split()
            if owner.stat().st_uid == os.getuid() and not Pid(int(pid), float(started)).alive():
                shutil.rmtree(owner.parent, ignore_errors=True)


def loopback_variables() -> dict[str, str]:
    """Keep Ray on 127.0.0.1: otherwise it replaces a loopback address with the host's own and listens everywhere.
    (The switch was made for macOS and works on Linux.)"""
    return {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def head_command(session: RaySession, ports: Ports, *, node: str, address: str) -> list[str]:
    """`ray start --head` for this node. Pure."""
    low, high = ports.ray_worker_range
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        "--node-ip-address", address, "--node-name", node, "--port", str(ports.ray_gcs),
        "--node-manager-port", str(ports.ray_node_manager), "--object-manager-port", str(ports.ray_object_manager),
        "--min-worker-port", str(low), "--max-worker-port", str(high),
        "--ray-client-server-port", str(ports.ray_client),
        "--include-dashboard", "false", "--dashboard-host", "127.0.0.1", "--dashboard-port", str(ports.ray_dashboard),
        "--dashboard-agent-listen-port", str(ports.ray_dashboard_agent),
        "--dashboard-agent-grpc-port", str(ports.ray_dashboard_agent_grpc),
        "--runtime-env-agent-port", str(ports.ray_runtime_env), "--metrics-export-port", str(ports.ray_metrics),
        "--num-cpus", str(LOGICAL_CPUS), "--num-gpus", "0", "--object-store-memory", str(OBJECT_STORE_BYTES),
        "--temp-dir", str(session.scratch), "--include-log-monitor", "false", "--disable-usage-stats", "--no-monitor",
    ]


def start_head(session: RaySession, ports: Ports, *, node: str, address: str, environment: Mapping[str, str],
               log: Path) -> processes.Child:
    """Start the head. It is up when the driver has counted its nodes, not when this returns."""
    return processes.start("ray", head_command(session, ports, node=node, address=address), log=log,
                           environment={**environment, **session.variables()})
