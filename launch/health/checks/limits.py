"""Checks resource limits. Slurm passes the limits of the submitting shell on to the job (see `--propagate`)."""

from __future__ import annotations

import resource

from launch.health.check import Check, critical, ok, warning
from launch.health.expected import GIB, Expected
from launch.health.machine import Limit, Machine

WANTED_FILES = 65536
FEW_FILES = 4096
"""Ray opens hundreds of sockets, vLLM and Megatron many files. Below this limit they fail."""
WANTED_MEMLOCK = 8 * GIB
FEW_PROCESSES = 4096


def raise_open_files() -> None:
    """Raise this process's soft limit of open files towards the hard limit. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check(machine: Machine, expected: Expected) -> list[Check]:
    """Raises the soft limit of open files as far as allowed, then checks all limits."""
    raise_open_files()
    return [_files(machine.limit("nofile")), _memlock(machine.limit("memlock"), expected),
            _processes(machine.limit("nproc"))]


def _files(limit: Limit) -> Check:
    told = f"{_text(limit.soft)} open files (hard limit {_text(limit.hard)})"
    remedy = "raise LimitNOFILE of slurmd, or submit with --propagate=NONE"
    if limit.soft is not None and limit.soft < FEW_FILES:
        return critical("limit.nofile", limit.soft, f"{told}, below {FEW_FILES}", remedy)
    if limit.soft is not None and limit.soft < WANTED_FILES:
        return warning("limit.nofile", limit.soft, f"{told}, below {WANTED_FILES}", remedy)
    return ok("limit.nofile", limit.soft, told)


def _memlock(limit: Limit, expected: Expected) -> Check:
    """RDMA locks the memory that it registers. With a small limit NCCL fails when it opens InfiniBand."""
    told = f"{_text(limit.soft)} bytes of locked memory"
    if expected.nics and limit.soft is not None and limit.soft < WANTED_MEMLOCK:
        return critical("limit.memlock", limit.soft, f"{told}; RDMA needs unlimited",
                        "set LimitMEMLOCK=infinity for slurmd, and submit with --propagate=NONE")
    return ok("limit.memlock", limit.soft, told)


def _processes(limit: Limit) -> Check:
    told = f"{_text(limit.soft)} processes and threads"
    if limit.soft is not None and limit.soft < FEW_PROCESSES:
        return critical("limit.nproc", limit.soft, f"{told}, below {FEW_PROCESSES}",
                        "raise LimitNPROC of slurmd, or submit with --propagate=NONE")
    return ok("limit.nproc", limit.soft, told)


def _text(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"
