"""Puts the compiler caches of a node on its local disk. In the home directory, which the cluster shares, hundreds of
ranks would wait for each other's locks and fail on files that disappear."""

from __future__ import annotations

import os
import platform
import stat
import tempfile
from pathlib import Path

from launch import envvars
from launch.health.checks.versions import version_of

COMPILERS = ("torch", "triton", "vllm", "flashinfer-python")
"""The folder name contains these versions, so that different versions do not share a cache."""


def variables() -> dict[str, str]:
    """`envvars.CACHES` with this user's folders under the temporary folder; variables that are already set are kept.
    {} if other users can write to that folder, because they could then decide what the ranks run."""
    private = Path(tempfile.gettempdir()) / f"megatron-rl-{os.getuid()}"
    if not _private(private):
        return {}
    versions = [f"{name.partition('-')[0]}-{found}" for name in COMPILERS if (found := version_of(name))]
    folder = private / "-".join([*versions, f"python-{platform.python_version()}"]).replace("/", "_")
    return {name: str(folder / below) for name, below in envvars.CACHES.items() if not envvars.get(name)}


def _private(folder: Path) -> bool:
    """Create the folder, or check that it belongs to this user: every user may write to /tmp."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
