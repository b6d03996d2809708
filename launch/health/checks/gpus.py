"""Checks that the GPUs are complete, of the planned kind, free, healthy, not throttled and connected by NVLink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psutil

from launch import envvars
from launch.cluster.gpus import find
from launch.cluster.local import visible
from launch.cluster.nvml import HW_POWER_BRAKE, HW_SLOWDOWN, HW_THERMAL, SW_THERMAL, GpuProcess, GpuReport, GpuState
from launch.errors import UserError
from launch.health.check import Check, critical, ok, warning
from launch.health.expected import GIB, Expected
from launch.health.machine import Machine

MAX_USED_BYTES = 2 * GIB
"""An idle GPU uses less. More, without a process, is memory leaked by a dead process."""
_SICK = (HW_SLOWDOWN, HW_THERMAL, HW_POWER_BRAKE)


def check(machine: Machine, expected: Expected, environment: Mapping[str, str], mark: str | None) -> list[Check]:
    """All GPU checks; [] if the job runs on CPUs."""
    if expected.device == "cpu":
        return []
    report = machine.gpus()
    if report.error is not None:
        return [critical("gpu.driver", None, f"the NVIDIA driver does not answer: {report.error}",
                         "check `nvidia-smi` and `dmesg | grep -i nvrm` on the node; reload the driver or reboot")]
    lost = [gpu for gpu in report.gpus if gpu.error is not None]
    gpus = [gpu for gpu in report.gpus if gpu.error is None]
    checks = [ok("gpu.driver", report.driver, f"driver {report.driver}, CUDA {report.cuda}"),
              _count(report, expected, environment)]
    if lost:
        checks.append(critical("gpu.lost", [gpu.index for gpu in lost], f"{_name(lost[0])} does not answer: "
                               f"{lost[0].error}", "look for Xid 79 in dmesg, and reboot or repair the node"))
    if not gpus:
        return checks
    return [*checks, _model(gpus, expected), _memory(gpus), _processes(gpus, mark), _ecc(gpus), _rows(gpus),
            _throttle(gpus), _nvlink(gpus, expected), _pcie(gpus), *_limits(gpus)]


def _count(report: GpuReport, expected: Expected, environment: Mapping[str, str]) -> Check:
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    found = len(report.gpus)
    try:
        usable = len(visible([gpu.uuid for gpu in report.gpus], wanted))
        told = f"{found} GPUs" + (f", {usable} of them in CUDA_VISIBLE_DEVICES={wanted}" if usable != found else "")
    except UserError:
        usable, told = 0, f"{found} GPUs, but CUDA_VISIBLE_DEVICES={wanted} names others"
    if usable < max(1, expected.gpus):
        needed = f"; the plan needs {expected.gpus}" if expected.gpus else ""
        missing = found < max(1, expected.gpus) or not usable
        return critical("gpu.count", found, told + needed,
                        "a GPU is missing: check `nvidia-smi -L` and dmesg on the node" if missing else
                        "request all GPUs of the node from Slurm: --gpus-per-node, one task per node")
    return ok("gpu.count", usable, told)


def _model(gpus: Sequence[GpuState], expected: Expected) -> Check:
    names = sorted({gpu.name for gpu in gpus})
    told = ", ".join(names)
    if len(names) > 1:
        return critical("gpu.model", names, f"GPUs of several kinds in one node: {told}",
                        "exclude the node (--exclude) or request one kind (--constraint)")
    if expected.gpu_kind is None:
        return ok("gpu.model", told, told)
    try:
        kind = find(names[0], memory_bytes=gpus[0].memory_bytes).name
    except UserError:
        kind = None
    if kind != expected.gpu_kind:
        return critical("gpu.model", told, f"{told}; the plan is for {expected.gpu_kind}",
                        "use another partition or --constraint, or plan for these GPUs")
    return ok("gpu.model", told, told)


def _memory(gpus: Sequence[GpuState]) -> Check:
    fullest = max(gpus, key=lambda gpu: gpu.used_bytes)
    told = f"{_name(fullest)} has {fullest.used_bytes / GIB:.1f} of {fullest.memory_bytes / GIB:.0f} GiB in use"
    if fullest.used_bytes > MAX_USED_BYTES:
        return critical("gpu.memory", fullest.used_bytes, told, "end the process that uses it (see gpu.processes); "
                        "if there is none, reset the GPU with nvidia-smi --gpu-reset")
    return ok("gpu.memory", fullest.used_bytes, told)


def _processes(gpus: Sequence[GpuState], mark: str | None) -> Check:
    strangers = [(gpu, process) for gpu in gpus for process in gpu.processes if not _ours(process, mark)]
    if strangers:
        gpu, process = strangers[0]
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        return critical("gpu.processes", sorted({each.pid for _, each in strangers}),
                        f"{_describe(process)} is running on {_name(gpu)}{more}",
                        "it belongs to another job or a dead one: ask its owner or the administrators to end it")
    return ok("gpu.processes", [], "no other process")


def _ecc(gpus: Sequence[GpuState]) -> Check:
    bad = [gpu for gpu in gpus if gpu.ecc_uncorrected]
    if bad:
        return critical("gpu.ecc", {gpu.uuid: gpu.ecc_uncorrected for gpu in bad},
                        f"{_name(bad[0])} has had {bad[0].ecc_uncorrected} uncorrected ECC errors since the driver was "
                        "loaded", "drain the node and reset the GPU; run dcgmi diag -r 3 before resuming the node")
    known = sum(gpu.ecc_uncorrected is not None for gpu in gpus)
    return ok("gpu.ecc", 0, "no uncorrected error" if known else "not reported by these GPUs")


def _rows(gpus: Sequence[GpuState]) -> Check:
    failed = [gpu for gpu in gpus if gpu.remap_failed]
    if failed:
        return critical("gpu.rows", [gpu.uuid for gpu in failed], f"{_name(failed[0])} has no spare memory rows left",
                        "replace the GPU")
    pending = [gpu for gpu in gpus if gpu.remap_pending]
    if pending:
        return critical("gpu.rows", [gpu.uuid for gpu in pending], f"{_name(pending[0])} has a row remapping pending",
                        "drain the node and reset the GPU with nvidia-smi --gpu-reset")
    return ok("gpu.rows", [], "no row remapping pending")


def _throttle(gpus: Sequence[GpuState]) -> Check:
    reasons = {gpu.uuid: list(gpu.throttle) for gpu in gpus if gpu.throttle}
    slowed = [gpu for gpu in gpus if any(reason in _SICK for reason in gpu.throttle)]
    warm = [gpu for gpu in gpus if SW_THERMAL in gpu.throttle]
    if slowed or warm:
        gpu = (slowed or warm)[0]
        told = f"{_name(gpu)} is throttled: {', '.join(gpu.throttle)}" + (
            f" at {gpu.temperature_c} C" if gpu.temperature_c is not None else "")
        return (critical if slowed else warning)("gpu.throttle", reasons, told, "check the node's cooling and "
                                                 "power; one slow GPU slows down the whole job")
    return ok("gpu.throttle", reasons, "not throttled")


def _nvlink(gpus: Sequence[GpuState], expected: Expected) -> Check:
    up = min(gpu.nvlinks_up for gpu in gpus)
    most = max(gpu.nvlinks for gpu in gpus)
    down = [gpu for gpu in gpus if gpu.nvlinks_up < most]
    if down and (expected.nvlink or up):
        return critical("gpu.nvlink", up, f"{_name(down[0])} has {down[0].nvlinks_up} of {most} NVLinks up",
                        "check `nvidia-smi nvlink -s` and the fabric manager (systemctl status nvidia-fabricmanager)")
    if expected.nvlink and not most:
        return critical("gpu.nvlink", 0, f"no NVLink; the plan is for {expected.gpu_kind} with NVLink",
                        "use another partition, or plan for these GPUs")
    return ok("gpu.nvlink", up, f"{up} NVLinks up on every GPU" if most else "these GPUs have no NVLink")


def _pcie(gpus: Sequence[GpuState]) -> Check:
    narrow = [gpu for gpu in gpus if gpu.pcie_width and gpu.pcie_max_width and gpu.pcie_width < gpu.pcie_max_width]
    if narrow:
        return warning("gpu.pcie", narrow[0].pcie_width, f"{_name(narrow[0])} runs on {narrow[0].pcie_width} of "
                       f"{narrow[0].pcie_max_width} PCIe lanes", "reseat or replace it; host transfers are slow")
    return ok("gpu.pcie", gpus[0].pcie_width, "full PCIe width")


def _limits(gpus: Sequence[GpuState]) -> list[Check]:
    """Lowest maximum clock and power limit of the node, which are compared across nodes."""
    clocks = [gpu.max_clock_mhz for gpu in gpus if gpu.max_clock_mhz is not None]
    watts = [gpu.power_limit_w for gpu in gpus if gpu.power_limit_w is not None]
    return ([ok("gpu.max_clock", min(clocks), f"up to {min(clocks)} MHz")] if clocks else []) + (
        [ok("gpu.power_limit", min(watts), f"{min(watts):.0f} W")] if watts else [])


def _name(gpu: GpuState) -> str:
    return f"GPU {gpu.index} ({gpu.uuid})"


def _ours(process: GpuProcess, mark: str | None) -> bool:
    try:
        return mark is not None and psutil.Process(process.pid).environ().get(envvars.JOB_MARK) == mark
    except psutil.Error:
        return False


def _describe(process: GpuProcess) -> str:
    try:
        found = psutil.Process(process.pid)
        return f"{found.name()} (pid {process.pid}, user {found.username()})"
    except psutil.Error:
        return f"pid {process.pid} (of another user or container)"
