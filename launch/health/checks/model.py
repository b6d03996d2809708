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
    folder, shards, digest = Path(expected.model), [], hashlib.sha256()
    try:
        for name, weights in ((expected.model, expected.model_weights), (expected.teacher, True)):
            if name is None:
                continue
            folder = Path(name)
            check_model_folder(folder, weights=weights)
            digest.update((folder / "config.json").read_bytes())
            shards += sorted(folder.glob("*.safetensors")) if weights else []
        for shard in shards:
            digest.update(f"{shard.name} {shard.stat().st_size}\n".encode())
    except UserError as error:
        return [critical("model.files", str(folder), error.what, error.fix or "copy the model folder again")]
    except OSError as error:
        return [critical("model.files", str(folder), f"{error.filename or folder}: {error.strerror}",
                         "make the file system with the model readable on this node")]
    size = sum(shard.stat().st_size for shard in shards)
    return [ok("model.files", expected.model, f"complete: {len(shards)} files, {size / GIB:.1f} GiB"),
            ok("model.fingerprint", digest.hexdigest()[:16], "")]
