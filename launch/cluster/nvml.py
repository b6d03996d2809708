"""What the NVIDIA driver says about this machine's GPUs, as plain values: the one place that talks to NVML.

Read only: no setting is changed and no CUDA context is made. `cards` is for those who plan or start processes, and
fails if the driver does not answer. `read_gpus` is for the preflight, which judges what is wrong
(`launch.health.checks.gpus`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from launch.errors import UserError

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
class Card:
    """A GPU that answers."""

    uuid: str
    name: str
    """Of the product, `NVIDIA H100 80GB HBM3`."""
    usable_bytes: int
    """What a process can use: total less what the driver reserves."""


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


def cards(nvml: Any = None) -> tuple[Card, ...]:
    """All GPUs, in PCI bus order; () where there is no NVIDIA driver (a login node).

    Args:
        nvml: the module `pynvml`, or what answers like it. None: the installed one, if any.

    Raises:
        UserError: there is a driver, and it or a GPU does not answer.
    """
    nvml = nvml or _installed()
    if nvml is None:
        return ()
    what = "the NVIDIA driver"
    try:
        with _opened(nvml):
            what = "a GPU"
            return tuple(_card(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
                         for index in range(nvml.nvmlDeviceGetCount()))
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return ()
    except nvml.NVMLError as error:
        raise UserError(f"{what} does not answer: {error}", where="NVML",
                        fix="see `nvidia-smi`; or use the CPU: --device cpu") from error


def read_gpus() -> GpuReport:
    """The state of every GPU. A driver or GPU that does not answer is in the report, not an exception."""
    nvml = _installed()
    if nvml is None:
        return GpuReport(None, error="the package nvidia-ml-py is not installed")
    try:
        with _opened(nvml):
            cuda = _optional(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
            return GpuReport(driver=str(nvml.nvmlSystemGetDriverVersion()),
                             cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
                             gpus=tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())))
    except nvml.NVMLError as error:
        return GpuReport(None, error=str(error))


def _installed() -> Any:
    """The module `pynvml`; None without it: nvidia-ml-py comes with the GPU stack."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


@contextlib.contextmanager
def _opened(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _memory(nvml: Any, handle: Any) -> Any:
    """NVML's first version of this call counts the driver's reserve as used; the second names it."""
    return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)


def _card(nvml: Any, handle: Any) -> Card:
    memory = _memory(nvml, handle)
    return Card(_text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)),
                int(memory.total - memory.reserved))


def _gpu(nvml: Any, index: int) -> GpuState:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = _memory(nvml, handle)
        remapped = _optional(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
        links = _links(nvml, handle)
        power = _optional(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return GpuState(
            index=index, uuid=_text(nvml.nvmlDeviceGetUUID(handle)), name=_text(nvml.nvmlDeviceGetName(handle)),
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
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _links(nvml: Any, handle: Any) -> list[bool]:
    """Of each NVLink that the card has: whether it is up."""
    states = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            break
    return states


def _throttle(nvml: Any, handle: Any) -> tuple[str, ...]:
    bits = _optional(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    return tuple(label for name, label in _REASONS if bits & getattr(nvml, name))


def _optional(nvml: Any, function: Callable, *arguments: Any) -> Any:
    """The answer, or None where this card or driver does not have it."""
    try:
        return function(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return None
