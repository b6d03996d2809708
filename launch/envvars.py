"""The environment: the one module that reads it, and the one table of variables that each kind of process gets.

Libraries read variables such as CUDA_VISIBLE_DEVICES or OMP_NUM_THREADS at import, so they are set before Python starts
(in the actor's runtime environment). A running process never sets them for itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, overload

if TYPE_CHECKING:
    from launch.config.schema import RunConfig

Role = Literal["driver", "trainer", "rollout", "reward"]
Device = Literal["cpu", "gpu"]
ROLES: tuple[Role, ...] = ("driver", "trainer", "rollout", "reward")
NODE = "MEGATRON_RL_NODE"
"""Name of the node that the process runs on."""
COMPONENT = "MEGATRON_RL_COMPONENT"
"""Name of the component that the process is, or that started it."""
SIMULATED_GPUS = "MEGATRON_RL_SIMULATED_GPUS"
"""File with a simulated machine's answers to the preflight, see `launch.health.simulated`."""
INTERFACE = "MEGATRON_RL_INTERFACE"
"""Network interface of the job, for a supervisor. Without it, the supervisor finds one."""
SITE = "MEGATRON_RL_SITE"
"""Set by a batch script: the parts of a site profile that the script was written with, see `launch.slurm.profiles`."""
JOB_MARK = "MEGATRON_RL_JOB"
"""Marks every process of a job, so that `launch.processes` can count and end them by PID, never by name."""


@dataclass(frozen=True)
class Variable:
    """One row of the table. `environment` fills in `{threads}`, `{interface}` and `{address}` in `value`."""

    name: str
    value: str
    why: str
    roles: tuple[Role, ...] = ROLES
    devices: tuple[Device, ...] = ("cpu", "gpu")


TABLE: tuple[Variable, ...] = (
    Variable("HF_HUB_OFFLINE", "1", "a job downloads nothing"),
    Variable("TRANSFORMERS_OFFLINE", "1", "a job downloads nothing"),
    Variable("HF_DATASETS_OFFLINE", "1", "a job downloads nothing"),
    Variable("TOKENIZERS_PARALLELISM", "false", "its threads compete with the ranks and can deadlock after a fork"),
    Variable("OMP_NUM_THREADS", "{threads}", "torch would use every core in every process"),
    Variable("MKL_NUM_THREADS", "{threads}", "torch would use every core in every process"),
    Variable("PYTHONUNBUFFERED", "1", "logs keep the last line before a crash"),
    Variable("PYTHONHASHSEED", "0", "all processes iterate over sets in the same order"),
    Variable("GLOO_SOCKET_IFNAME", "{interface}", "gloo's default, the interface of the host name, is often wrong"),
    Variable("NCCL_SOCKET_IFNAME", "{interface}", "as GLOO_SOCKET_IFNAME", ("trainer", "rollout"), ("gpu",)),
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", "Megatron overlaps its TP communication by launch order",
             ("trainer",), ("gpu",)),
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", "32", "weight-sync transfers must not share a hardware queue",
             ("rollout",), ("gpu",)),
    Variable("PYTORCH_ALLOC_CONF", "expandable_segments:True", "packed micro-batches of varying lengths fragment the "
             "allocator", ("trainer",), ("gpu",)),
    Variable("TORCHDYNAMO_DISABLE", "1", "no compiler on the CPU path", ("trainer", "rollout"), ("cpu",)),
    Variable("VLLM_CPU_OMP_THREADS_BIND", "nobind", "TP ranks may share cores", ("rollout",),
             ("cpu",)),
    Variable("VLLM_HOST_IP", "{address}", "workers meet on the job's interface", ("rollout",)),
    Variable("VLLM_NO_USAGE_STATS", "1", "nothing is sent anywhere", ("rollout",)),
    Variable("DO_NOT_TRACK", "1", "nothing is sent anywhere", ("rollout",)),
    Variable("VLLM_LOGGING_LEVEL", "WARNING", "one log line per request hides the rest", ("rollout",)),
    Variable("VLLM_ENABLE_V1_MULTIPROCESSING", "0", "without TP the worker runs in the engine's process",
             ("rollout",), ("cpu",)),
    Variable("VLLM_WORKER_MULTIPROC_METHOD", "spawn", "forking a process with threads can deadlock", ("rollout",)),
    Variable("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1", "the placement chooses GPUs, not Ray"),
    Variable("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0", "actors without Ray GPUs keep CUDA_VISIBLE_DEVICES"),
    Variable("RAY_worker_niceness", "0", "Ray's default, 15, slows workers on a shared machine"),
    Variable("RAY_USAGE_STATS_ENABLED", "0", "nothing is sent anywhere"),
    Variable("RAY_DEDUP_LOGS", "0", "keep every rank's lines"),
)

CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TORCH_EXTENSIONS_DIR": "extensions",
          "VLLM_CACHE_ROOT": "vllm", "FLASHINFER_WORKSPACE_BASE": "flashinfer", "CUDA_CACHE_PATH": "cuda",
          "HF_MODULES_CACHE": "modules"}
"""Variables that name a compiler's cache -> folder in a node's own cache (`launch.runtime.caches`). XDG_CACHE_HOME is
not among them: it also holds what a user has downloaded."""


def environment(role: Role, device: Device, config: RunConfig | None, *, job: str, gpus: Sequence[int] = (),
                interface: str = "lo", address: str = "127.0.0.1", nics: Sequence[str] = ()) -> dict[str, str]:
    """The variables to set for a process of this role before its Python starts, in addition to those it inherits.

    Args:
        config: None if there is none yet (the preflight); then every process gets one thread.
        job: the attempt's mark, see `JOB_MARK`.
        gpus: local indices of the GPUs that the placement gives to this process, in rank order.
        interface, address: the network of the job on this node.
        nics: names of this node's NICs for NCCL. All processes of a node get the same list, because ranks that see
            different NICs build rings that do not meet. () lets NCCL find them.
    """
    threads = {"trainer": config.trainer.threads, "rollout": config.rollout.threads} if config else {}
    filled = {"threads": threads.get(role, 1) if device == "cpu" else 1,
              "interface": interface, "address": address}
    values = {each.name: each.value.format(**filled) for each in TABLE
              if role in each.roles and device in each.devices}
    if device == "gpu":
        values["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of the placement's indices
        values["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        if nics and role in ("trainer", "rollout"):
            values["NCCL_IB_HCA"] = "=" + ",".join(nics)    # exact names: mlx5_1 would also take mlx5_10
    else:
        values["CUDA_VISIBLE_DEVICES"] = ""
    values[JOB_MARK] = job
    return values


@overload
def get(name: str) -> str | None: ...


@overload
def get(name: str, default: str) -> str: ...


def get(name: str, default: str | None = None) -> str | None:
    """One variable of this process."""
    return os.environ.get(name, default)


def inherited(without: Sequence[str] = ()) -> dict[str, str]:
    """A copy of this process's environment for a child, except the names in `without`."""
    return {name: value for name, value in os.environ.items() if name not in without}


@contextmanager
def without(names: Sequence[str]) -> Iterator[None]:
    """Hide variables of this process for the duration of a `with`, from a library that starts commands itself."""
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextmanager
def during(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for the duration of a `with`, for a library that reads them in it."""
    with without(list(values)):
        os.environ.update(values)
        try:
            yield
        finally:
            for name in values:
                os.environ.pop(name, None)


def set_for_this_process(values: Mapping[str, str]) -> None:
    """For entry points only, before they import what reads the variables (the driver, a test's rank)."""
    os.environ.update(values)


_SECRET_NAME = re.compile(r"(?i)(token(?!i[sz])|secret|passw|api_?key|credential|private_?key|authorization|cookie|"
                          r"_key$|^aws_|_pat$)")
_SECRET_IN_URL = re.compile(r"(?i)([a-z][a-z0-9+.-]*://)[^/@\s]+@")
_RECORDED = re.compile(r"^(CUDA|NCCL|GLOO|OMP|MKL|KMP|VLLM|RAY|HF|TRANSFORMERS|TOKENIZERS|TORCH|PYTORCH|TRITON|"
                       r"FLASHINFER|PYTHON|SLURM|NVIDIA|UCX|MEGATRON_RL|LD_LIBRARY_PATH|LD_PRELOAD|PATH$|VIRTUAL_ENV)")


def recordable(values: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables that a run records: those that can explain its behaviour, with secrets masked. All others
    are left out, because no list of secret names is ever complete."""
    values = os.environ if values is None else values
    return masked({name: value for name, value in values.items() if _RECORDED.match(name)})


def masked(values: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of an environment that may be recorded, sorted by name. `***` replaces secrets, which are recognised by
    name, and the part of a URL before `@` (proxies)."""
    values = os.environ if values is None else values
    return {name: "***" if _SECRET_NAME.search(name) and values[name] else _SECRET_IN_URL.sub(r"\1***@", values[name])
            for name in sorted(values)}


def secret(name: str, value: str) -> bool:
    """Whether a variable holds a secret, judged by its name or by a password in a URL."""
    return bool(value) and bool(_SECRET_NAME.search(name) or _SECRET_IN_URL.search(value))
