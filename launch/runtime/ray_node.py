"""Ray on one node: starts a raylet with pinned ports, token authentication and the job's interface.

One node of a job runs the head; each other node runs a raylet that joins it. Simulated nodes may share a host, and so
an address: each has its own scratch folder, name and block of ports.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from launch import envvars, processes
from launch.config.resolved import ResolvedConfig
from launch.errors import UserError
from launch.planner.seats.local import LOOPBACK
from launch.ports import Ports

ADDRESS_VARIABLE = "MEGATRON_RL_RAY_ADDRESS"
"""Variable with the head's address, for the driver."""
PREFIX, OWNER = "mrl-", "owner"
SOCKET_BYTES = 107
"""Maximum bytes of a socket path (sun_path in unix(7), minus its terminator)."""
LONGEST_SOCKET = "/session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store.9"
"""Path that Ray appends to its temporary folder (`_private/node.py`), with the highest pid of Linux."""
SHORT = Path("/tmp")
OBJECT_STORE_BYTES = 256 << 20
"""Minimum; actors of a small run exchange megabytes."""
BYTES_A_TOKEN = 32
"""Bytes per token of a step's completions in the object store of the driver's node: id and log-prob, once as received
and once as sent to the training ranks, doubled as reserve."""
LOGICAL_CPUS = 16
"""Number of workers that Ray starts at a time and of idle workers that it keeps. Actors are pinned by node name and
take no Ray CPUs. Ray's default is the node's number of cores, too many on nodes with hundreds."""
MANY_NODES = 8
FOR_MANY_NODES = {"RAY_gcs_server_rpc_server_thread_num": "64", "RAY_gcs_rpc_server_reconnect_timeout_s": "120"}
"""For `MANY_NODES` and more: dozens to hundreds of actors register at once. With Ray's defaults (a quarter of the
head's cores, and the deadlines of `_start_deadlines`) some of them are lost, which later shows as a hang in NCCL
(NeMo-RL#3089)."""
REQUEST_S = 60
"""Ray's own deadline of a request to the control store. It also holds after the start."""
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Keeps Ray on 127.0.0.1: otherwise it replaces a loopback address with the host's own and listens on all interfaces.
(The switch was made for macOS and also works on Linux.)"""
REGISTERED = "Ray runtime started."
"""`ray start` prints this when the control store lists its node (`Node.__init__` polls until it does)."""


def new_folder() -> Path:
    """A private folder for a session, in the temporary folder, or in /tmp if that path is too long for Ray's sockets.

    Raises:
        UserError: the folder cannot be created.
    """
    wanted = Path(tempfile.gettempdir())
    length = len(os.fsencode(f"{wanted}/{PREFIX}12345678/r{LONGEST_SOCKET}"))
    parent = wanted if length <= SOCKET_BYTES else SHORT
    try:
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        why = "" if parent == wanted else (f"; in {wanted} the paths of Ray's sockets would have {length} bytes, but "
                                           f"the limit is {SOCKET_BYTES}")
        raise UserError(f"cannot create a folder for Ray in {parent}: {error.strerror}{why}", where="TMPDIR",
                        fix="set a writable folder with a path of at most "
                            f"{len(os.fsencode(wanted)) - length + SOCKET_BYTES} bytes as scratch in the site "
                            "profile or in TMPDIR") from error


def new_secret() -> str:
    """A token for a job's Ray."""
    return secrets.token_hex(32)


@dataclass
class RaySession:
    """Ray's scratch folder on one node, the job's token and the temporary files of the job's processes there. All are
    removed at the end. The folder is private to this user, because Ray makes its own subfolder readable by all users.
    """

    folder: Path = field(default_factory=new_folder)
    secret: str = field(default_factory=new_secret, repr=False)
    """The token. The head's node generates it, and the other nodes of the job receive the same one."""
    nodes: int = 1
    """Number of nodes of the job."""
    object_store_bytes: int = OBJECT_STORE_BYTES
    deadline_s: float | None = None
    """How long Ray may take to start: `run.deadline_s`. None: Ray's own deadlines."""

    def __post_init__(self) -> None:
        remove_leftovers()
        self._owner = _owned(self.folder)
        descriptor = os.open(self.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(self.secret)

    @property
    def token(self) -> Path:
        return self.folder / "token"

    @property
    def scratch(self) -> Path:
        """Ray's temporary folder."""
        return self.folder / "r"

    def variables(self) -> dict[str, str]:
        """Variables of every process that uses Ray. The token itself is never in an environment or a log."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "VLLM_RPC_BASE_PATH": str(self.folder),     # vLLM's sockets, which it leaves behind
            # Processes that are killed leave their temporary files. If this folder is not in the user's TMPDIR, because
            # that path is too long, it may be on a smaller disk.
            **({"TMPDIR": str(self.folder)} if self.folder.parent == Path(tempfile.gettempdir()) else {}),
            **(FOR_MANY_NODES if self.nodes >= MANY_NODES else {}),
            **({} if self.deadline_s is None else _start_deadlines(self.deadline_s)),
        }

    def __str__(self) -> str:
        """The settings, for the log."""
        settings = " ".join(f"{name}={value}" for name, value in self.variables().items() if "TOKEN" not in name)
        return f"Ray in {self.folder}, object store {self.object_store_bytes >> 20} MiB, {settings}"

    def keep_logs(self, destination: Path) -> None:
        """Copy Ray's own logs, for an attempt that failed."""
        logs = self.scratch / "session_latest" / "logs"
        if logs.is_dir():
            with contextlib.suppress(shutil.Error):  # a socket, or a file that disappeared: the rest is copied
                shutil.copytree(logs, destination, dirs_exist_ok=True, ignore_dangling_symlinks=True)

    def remove(self) -> None:
        self._owner.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _start_deadlines(deadline_s: float) -> dict[str, str]:
    """Ray's own start-up deadlines, so that none of them ends a start that the run still waits for. The names are those
    of Ray's `ray_config_def.h` and `_private/node.py`; in brackets what Ray 2.60 allows otherwise."""
    seconds = math.ceil(deadline_s)
    return {
        "RAY_raylet_start_wait_time_s": str(seconds),                   # `ray start` until its node is listed (30 s)
        "RAY_gcs_server_port_wait_time_s": str(seconds),                # tries to reach the control store (20)
        "RAY_NUM_REDIS_GET_RETRIES": str(seconds),                      # tries to read the head's entries (20)
        "RAY_gcs_rpc_server_connect_timeout_s": str(seconds),           # a process connects to the control store (5 s)
        "RAY_gcs_server_request_timeout_seconds": str(max(seconds, REQUEST_S)),
        "RAY_agent_register_timeout_ms": str(1000 * seconds),           # a raylet ends without its agent (30 s)
        "RAY_worker_register_timeout_seconds": str(seconds),            # an actor's process registers (60 s)
    }


def object_store_bytes(config: ResolvedConfig, free_shm: int) -> int:
    """Size for the completions of a step, at most half of the free shared memory: Ray spills the rest to disk either
    way."""
    completions = config.algorithm.prompts_per_step * config.algorithm.group_size
    tokens = completions * (config.rollout.max_prompt_tokens + config.rollout.max_new_tokens)
    return max(OBJECT_STORE_BYTES, min(tokens * BYTES_A_TOKEN, free_shm // 2))


def remove_leftovers() -> None:
    """Remove the folders of sessions whose launcher was killed and could not clean up. A live launcher holds a lock; a
    pid would not identify it, because every container has its own pids."""
    for parent in dict.fromkeys((Path(tempfile.gettempdir()), SHORT)):
        for owner in parent.glob(f"{PREFIX}*/{OWNER}"):
            with contextlib.suppress(OSError), owner.open("rb") as file:    # held, another user's, or removed meanwhile
                if os.fstat(file.fileno()).st_uid == os.getuid():
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(owner.parent, ignore_errors=True)


def _owned(folder: Path) -> IO[bytes]:
    """The folder's owner file, locked as long as this process keeps it open. It gets its name only after it is locked,
    so that `remove_leftovers` never removes a live folder. (Children do not inherit a file from `open`.)"""
    aside = folder / f".{OWNER}"
    file = aside.open("wb")
    with contextlib.suppress(OSError):      # without file locks, no other process can lock or remove it either
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    aside.rename(folder / OWNER)
    return file


def ray_environment(config: ResolvedConfig, device: envvars.Device, mark: str, address: str,
                    interface: str = "lo") -> dict[str, str]:
    """Environment of Ray and the driver. Processes of Ray inherit it; actors get the rest from the driver."""
    search = ":".join(filter(None, [os.getcwd(), envvars.get("PYTHONPATH")]))
    return {**envvars.inherited(),
            **envvars.environment("driver", device, config, job=mark, interface=interface, address=address),
            **(ON_LOOPBACK if address == LOOPBACK else {}), "PYTHONPATH": search}


def head_command(session: RaySession, ports: Ports, *, node: str, address: str) -> list[str]:
    """`ray start --head` for this node. Pure."""
    return [*_start(session, ports, node, address), "--head", "--port", str(ports.ray_gcs),
            "--ray-client-server-port", str(ports.ray_client), "--include-dashboard", "false", "--no-monitor"]


def raylet_command(session: RaySession, ports: Ports, *, node: str, address: str, head: str) -> list[str]:
    """`ray start --address=HEAD` for another node. Pure."""
    return [*_start(session, ports, node, address), "--address", head]


def start_head(session: RaySession, ports: Ports, *, node: str, address: str, environment: Mapping[str, str],
               log: Path) -> processes.Child:
    """Start the head. It is ready when the driver has counted its nodes, not when this returns."""
    return processes.start("ray", head_command(session, ports, node=node, address=address), log=log,
                           environment={**environment, **session.variables()})


def start_raylet(session: RaySession, ports: Ports, *, node: str, address: str, head: str,
                 environment: Mapping[str, str], log: Path) -> processes.Child:
    """Start another node of the Ray cluster whose control store is at `head` (address:port)."""
    return processes.start("ray", raylet_command(session, ports, node=node, address=address, head=head), log=log,
                           environment={**environment, **session.variables()})


def registered(ray: processes.Child) -> bool:
    """Whether Ray's control store lists the node that this process started."""
    return ray.log.exists() and REGISTERED in ray.log.read_text(encoding="utf-8", errors="replace")


def _start(session: RaySession, ports: Ports, node: str, address: str) -> list[str]:
    low, high = ports.ray_worker_range
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block",
        "--node-ip-address", address, "--node-name", node,
        "--node-manager-port", str(ports.ray_node_manager), "--object-manager-port", str(ports.ray_object_manager),
        "--min-worker-port", str(low), "--max-worker-port", str(high),
        "--dashboard-host", "127.0.0.1", "--dashboard-port", str(ports.ray_dashboard),
        "--dashboard-agent-listen-port", str(ports.ray_dashboard_agent),
        "--dashboard-agent-grpc-port", str(ports.ray_dashboard_agent_grpc),
        "--runtime-env-agent-port", str(ports.ray_runtime_env), "--metrics-export-port", str(ports.ray_metrics),
        "--num-cpus", str(LOGICAL_CPUS), "--num-gpus", "0", "--object-store-memory", str(session.object_store_bytes),
        "--temp-dir", str(session.scratch), "--include-log-monitor", "false", "--disable-usage-stats",
    ]
