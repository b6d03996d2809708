"""Reads the state of this machine's GPUs from the NVIDIA driver. The only module that calls NVML.

Read only: it changes no setting and creates no CUDA context. `cards` serves planning and process start, and fails if
the driver does not answer. `read_gpus` serves the preflight, which judges the state (`launch.health.checks.gpus`).
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
"""Excludes idle clocks, which are normal, and clocks set by an administrator."""


@dataclass(frozen=True)
class Card:
    """A GPU that responds."""

    uuid: str
    name: str
    """Product name, such as `NVIDIA H100 80GB HBM3`."""
    usable_bytes: int
    """Bytes that a process can use: total minus the driver's reserve."""


@dataclass(frozen=True)
class GpuProcess:
    """A process with a CUDA context on a GPU."""

    pid: int
    memory_bytes: int = 0


@dataclass(frozen=True)
class GpuState:
    """The state of one GPU. A field is None if the card or driver does not provide it."""

    index: int
    """In PCI bus order."""
    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int = 0
    """Bytes held by processes or leaked, without the driver's reserve."""
    ecc_uncorrected: int | None = 0
    """Uncorrected errors since the driver was loaded."""
    remap_pending: bool | None = False
    """A row remapping is pending: the GPU must be reset."""
    remap_failed: bool | None = False
    """No spare rows are left: the GPU must be replaced."""
    throttle: tuple[str, ...] = ()
    """Reasons why the clocks are currently reduced."""
    nvlinks_up: int = 0
    nvlinks: int = 0
    """Number of links of the card."""
    processes: tuple[GpuProcess, ...] = ()
    max_clock_mhz: int | None = None
    """Highest allowed SM clock."""
    power_limit_w: float | None = None
    temperature_c: int | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    bus_id: str | None = None
    """PCI address, such as `00000000:1B:00.0`."""
    error: str | None = None
    """Set if the GPU is listed but does not answer ("GPU is lost")."""


@dataclass(frozen=True)
class GpuReport:
    """All GPUs that this process can see."""

    driver: str | None
    """Version; None without a driver."""
    cuda: str | None = None
    """Highest CUDA version that the driver supports."""
    gpus: tuple[GpuState, ...] = ()
    error: str | None = None
    """Why the driver does not answer."""


def cards(nvml: Any = None) -> tuple[Card, ...]:
    """All GPUs, in PCI bus order; () without an NVIDIA driver (a login node).

    Args:
        nvml: the module `pynvml`, or an object with the same interface. None: the installed module, if any.

    Raises:
        UserError: the driver is installed, but it or a GPU does not answer.
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
                        fix="check `nvidia-smi`, or use the CPU with --device cpu") from error


def read_gpus() -> GpuReport:
    """The state of every GPU. A driver or GPU that does not answer is reported, not raised."""
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
    """The module `pynvml`; None if nvidia-ml-py, a part of the GPU stack, is not installed."""
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
    """Use version 2 of this call: version 1 counts the driver's reserve as used."""
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
    """nvidia-ml-py returns str or bytes, depending on its version."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _links(nvml: Any, handle: Any) -> list[bool]:
    """Whether each NVLink of the card is up."""
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
    """The result, or None if this card or driver does not provide it."""
    try:
        return function(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return None
