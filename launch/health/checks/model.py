"""Checks that the model's files exist, are complete and are the same on all nodes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from launch.errors import UserError
from launch.health.check import Check, critical, ok
from launch.health.expected import GIB, Expected
from launch.model.folder import check_model_folder


def check(expected: Expected) -> list[Check]:
    """Reads headers only. The fingerprint is compared across nodes, because copies on local disks become stale."""
    if expected.model is None:
        return []
    folder = Path(expected.model)
    try:
        check_model_folder(folder, weights=expected.model_weights)
        shards = sorted(folder.glob("*.safetensors")) if expected.model_weights else []
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for shard in shards:
            digest.update(f"{shard.name} {shard.stat().st_size}\n".encode())
    except UserError as error:
        return [critical("model.files", str(folder), error.what, error.fix or "copy the model folder again")]
    except OSError as error:
        return [critical("model.files", str(folder), f"{error.filename or folder}: {error.strerror}",
                         "make the file system with the model readable on this node")]
    size = sum(shard.stat().st_size for shard in shards)
    return [ok("model.files", str(folder), f"complete: {len(shards)} files, {size / GIB:.1f} GiB"),
            ok("model.fingerprint", digest.hexdigest()[:16], "")]
