"""Simulated hardware for rehearsals and tests on machines without GPUs. A file describes the hardware of each node.

The file is JSON or YAML; MEGATRON_RL_SIMULATED_GPUS holds its path. All keys are optional:

    default:                            # every node
      driver: "570.124.06"
      cuda: "12.8"
      count: 8                          # GPUs
      gpu: {name: NVIDIA H100 80GB HBM3, memory_bytes: 85520809984, nvlinks: 18, ...}   # fields of nvml.GpuState
      nics: {count: 8, gbit_per_s: 400}
      limits: {memlock: null}           # null: unlimited
      cpus: 96
    nodes:                              # differences of single nodes: the faults
      node-03: {missing: [5], driver: "550.54.15", gpus: {2: {ecc_uncorrected: 4}}, nics: {down: [mlx5_3]}}
      node-04: {error: "Driver Not Loaded"}

An unknown key is an error, so that a misspelt fault does not pass as a healthy node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from launch import envvars
from launch.cluster.nvml import GpuProcess, GpuReport, GpuState
from launch.cluster.rdma import Nic, PciPath
from launch.errors import UserError
from launch.health.machine import Limit, Machine, RealMachine

_NODE_KEYS = ("driver", "cuda", "count", "gpu", "gpus", "missing", "error", "nics", "limits", "cpus")
_NIC_KEYS = ("count", "gbit_per_s", "down", "missing", "slow")
_GPU_KEYS = tuple(each.name for each in fields(GpuState) if each.name != "index")
_LIMITS = ("nofile", "memlock", "nproc")
_DEFAULT_GPU = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_520_809_984, "nvlinks": 18, "max_clock_mhz": 1980,
                "power_limit_w": 700.0, "temperature_c": 30, "pcie_width": 16, "pcie_max_width": 16}


@dataclass(frozen=True)
class SimulatedMachine:
    """The hardware of one node in the file: the default, overridden by the node's own keys."""

    node: str
    answers: Mapping[str, Any]

    def gpus(self) -> GpuReport:
        if self.answers.get("error"):
            return GpuReport(None, error=str(self.answers["error"]))
        missing, own = self.answers.get("missing", ()), self.answers.get("gpus", {})
        found = tuple(self._gpu(index, {**_DEFAULT_GPU, **self.answers.get("gpu", {}), **own.get(index, {})})
                      for index in range(self.answers.get("count", 8)) if index not in missing)
        # NVML numbers the visible GPUs without gaps.
        return GpuReport(self.answers.get("driver", "570.124.06"), self.answers.get("cuda", "12.8"),
                         tuple(replace(gpu, index=at) for at, gpu in enumerate(found)))

    def nics(self) -> list[Nic]:
        told = self.answers.get("nics", {})
        rate = float(told.get("gbit_per_s", 400))
        names = [f"mlx5_{index}" for index in range(told.get("count", 8))]
        return [Nic(name, "DOWN" if name in told.get("down", ()) else "ACTIVE",
                    told.get("slow", {}).get(name, rate))
                for name in names if name not in told.get("missing", ())]

    def pci_path(self, bus_id: str | None) -> PciPath:
        return ()       # rails are assigned by number

    def limit(self, name: str) -> Limit:
        limits = {"memlock": None, **self.answers.get("limits", {})}
        return Limit(limits[name], limits[name]) if name in limits else RealMachine().limit(name)

    def cpus(self) -> int:
        return int(self.answers.get("cpus", 96))

    def _gpu(self, index: int, values: dict[str, Any]) -> GpuState:
        processes = tuple(GpuProcess(**process) if isinstance(process, dict) else GpuProcess(int(process))
                          for process in values.pop("processes", ()))
        values.setdefault("uuid", f"GPU-{self.node}-{index}")
        values.setdefault("nvlinks_up", values["nvlinks"])
        return GpuState(index=index, processes=processes, **{**values, "throttle": tuple(values.get("throttle", ()))})


def load(file: str | Path, node: str) -> SimulatedMachine:
    """The simulated machine of `node`.

    Raises:
        UserError: the file is missing or invalid, or has an unknown key.
    """
    try:
        document = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read the simulated hardware: {error}", where=f"MEGATRON_RL_SIMULATED_GPUS={file}",
                        fix="set it to a JSON or YAML file, or unset the variable") from error
    _known(document, ("schema_version", "default", "nodes"), file, "the file")
    default, own = document.get("default") or {}, (document.get("nodes") or {}).get(node) or {}
    for name, answers in (("default", default), *(document.get("nodes") or {}).items()):
        _check(answers or {}, str(file), str(name))
    merged = {**default, **own}
    for key in ("gpu", "nics", "limits"):
        merged[key] = {**default.get(key, {}), **own.get(key, {})}
    gpus = {**default.get("gpus", {}), **own.get("gpus", {})}
    merged["gpus"] = {int(index): values for index, values in gpus.items()}     # JSON has no integer keys
    return SimulatedMachine(node, merged)


def _check(answers: Any, file: str, name: str) -> None:
    _known(answers, _NODE_KEYS, file, name)
    _known(answers.get("nics", {}), _NIC_KEYS, file, f"{name}.nics")
    _known(answers.get("limits", {}), _LIMITS, file, f"{name}.limits")
    _known(answers.get("gpu", {}), _GPU_KEYS, file, f"{name}.gpu")
    for index, values in answers.get("gpus", {}).items():
        _known(values, _GPU_KEYS, file, f"{name}.gpus.{index}")


def _known(values: Any, keys: tuple[str, ...], file: str | Path, where: str) -> None:
    if not isinstance(values, dict):
        raise UserError(f"{where} of the simulated hardware is {values!r}, not a mapping", where=str(file),
                        fix=f"give some of: {', '.join(keys)}")
    unknown = [key for key in values if key not in keys]
    if unknown:
        raise UserError(f"{where} of the simulated hardware has the unknown key {unknown[0]!r}", where=str(file),
                        fix=f"known: {', '.join(keys)}")


def machine_of(node: str) -> Machine:
    """The simulated machine for this node if MEGATRON_RL_SIMULATED_GPUS is set, else this machine.

    Raises:
        UserError: the file of the simulation cannot be used.
    """
    file = envvars.get(envvars.SIMULATED_GPUS)
    if not file:
        return RealMachine()
    return load(file, node)
