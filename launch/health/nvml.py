"""What the NVIDIA driver says about this node's GPUs, as plain values: the one place that talks to NVML.

Read only: no setting is changed and no CUDA context is made. Judging is done elsewhere (`checks.gpus`), on these
values, so that faults can be injected here (`launch.health.simulated`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pynvml

HW_SLOWDOWN, HW_THERMAL, HW_POWER_BRAKE = "HW slowdown", "HW thermal slowdown", "HW power brake"
SW_THERMAL, SW_POWER_CAP = "SW thermal slowdown", "SW power cap"
_REASONS: tuple[tuple[str, str], ...] = (
    ("nvmlClocksEventReasonHwSlowdown", HW_SLOWDOWN),
    ("nvmlClocksEventReasonHwThermalSlowdown", HW_THERMAL),
    ("nvmlClocksEventReasonHwPowerBrakeSlowdown", HW_POWER_BRAKE),
    ("nvmlClocksEventReasonSwThermalSlowdown", SW_THERMAL),
    ("nvmlClocksEventReasonSwPowerCap", SW_POWER_CAP),
)
"""Not among them: idle clocks, which are normal, and clocks that somebody has set."""


@dataclass(frozen=True)
class GpuProcess:
    """A process with a CUDA context on a GPU."""

    pid: int
    memory_bytes: int = 0


@dataclass(frozen=True)
class GpuState:
    """One GPU. None: the card or the driver does not have it."""

    index: int
    """In PCI bus order."""
    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int = 0
    """Held by processes and by what has leaked; the driver's own reserve is not in it."""
    ecc_uncorrected: int | None = 0
    """Uncorrected errors since the driver was loaded."""
    remap_pending: bool | None = False
    """Rows wait to be remapped: the GPU must be reset first."""
    remap_failed: bool | None = False
    """No spare rows are left: the GPU must be replaced."""
    throttle: tuple[str, ...] = ()
    """Why the clocks are lowered just now."""
    nvlinks_up: int = 0
    nvlinks: int = 0
    """Links that the card has."""
    processes: tuple[GpuProcess, ...] = ()
    max_clock_mhz: int | None = None
    """Highest SM clock that is allowed."""
    power_limit_w: float | None = None
    temperature_c: int | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    bus_id: str | None = None
    """PCI address, such as `00000000:1B:00.0`."""
    error: str | None = None
    """The GPU is listed and does not answer ("GPU is lost")."""


@dataclass(frozen=True)
class GpuReport:
    """All GPUs that this process is allowed to see."""

    driver: str | None
    """Version; None without a driver."""
    cuda: str | None = None
    """Highest CUDA version of the driver."""
    gpus: tuple[GpuState, ...] = ()
    error: str | None = None
    """Why the driver does not answer at all."""


def read_gpus() -> GpuReport:
    """Ask NVML. A driver or GPU that does not answer is in the report, not an exception."""
    try:
        import pynvml
    except ImportError:
        return GpuReport(None, error="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuReport(None, error=str(error))
    try:
        cuda = _optional(pynvml, pynvml.nvmlSystemGetCudaDriverVersion_v2)
        return GpuReport(driver=str(pynvml.nvmlSystemGetDriverVersion()),
                         cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
                         gpus=tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())))
    except pynvml.NVMLError as error:
        return GpuReport(None, error=str(error))
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: pynvml, index: int) -> GpuState:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)  # v1 counts the reserve as used
        remapped = _optional(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
        links = _links(nvml, handle)
        power = _optional(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return GpuState(
            index=index, uuid=str(nvml.nvmlDeviceGetUUID(handle)), name=str(nvml.nvmlDeviceGetName(handle)),
            memory_bytes=int(memory.total), used_bytes=int(memory.used),
            ecc_uncorrected=_optional(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle,
                                      nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
            remap_pending=bool(remapped[2]) if remapped else None,
            remap_failed=bool(remapped[3]) if remapped else None,
            throttle=_throttle(nvml, handle), nvlinks_up=sum(links), nvlinks=len(links),
            processes=tuple(GpuProcess(int(process.pid), int(process.usedGpuMemory or 0))
                            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
            max_clock_mhz=_optional(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            power_limit_w=power / 1000 if power else None,
            temperature_c=_optional(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            pcie_width=_optional(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            pcie_max_width=_optional(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            bus_id=_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    except nvml.NVMLError as error:
        return GpuState(index, f"gpu-{index}", "unknown", 0, error=str(error))


def _text(value: str | bytes) -> str:
    """nvidia-ml-py has returned both."""
    return value.decode("ascii") if isinstance(value, bytes) else value


def _links(nvml: pynvml, handle: Any) -> list[bool]:
    """Of each NVLink that the card has: whether it is up."""
    states = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            break
    return states


def _throttle(nvml: pynvml, handle: Any) -> tuple[str, ...]:
    bits = _optional(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    return tuple(label for name, label in _REASONS if bits & getattr(nvml, name))


def _optional(nvml: pynvml, function: Callable, *arguments: Any) -> Any:
    """The answer, or None where this card or driver does not have it."""
    try:
        return function(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return None
