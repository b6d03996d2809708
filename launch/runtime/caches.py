"""Where the compilers of a node keep what they made: on the node's own disk. In the home directory, which a cluster
shares, hundreds of ranks wait for each other's locks and trip over files that vanish."""

from __future__ import annotations

import os
import platform
import stat
import tempfile
from pathlib import Path

from launch import envvars
from launch.health.checks.versions import version_of

COMPILERS = ("torch", "triton", "vllm", "flashinfer-python")
"""Whose version is in the folder's name: another version does not read what this one wrote."""


def variables() -> dict[str, str]:
    """`envvars.CACHES` with folders of this user's under the temporary folder; names that are set already are left
    alone. {} where that folder is not this user's alone: whoever can write there decides what the ranks run."""
    private = Path(tempfile.gettempdir()) / f"megatron-rl-{os.getuid()}"
    if not _private(private):
        return {}
    versions = [f"{name.partition('-')[0]}-{found}" for name in COMPILERS if (found := version_of(name))]
    folder = private / "-".join([*versions, f"python-{platform.python_version()}"]).replace("/", "_")
    return {name: str(folder / below) for name, below in envvars.CACHES.items() if not envvars.get(name)}


def _private(folder: Path) -> bool:
    """Make it, or check that nobody else made it: anybody may write into /tmp."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
