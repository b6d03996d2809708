"""The login tier of the preflight: checks that run before submission. Needs no GPU and takes a few seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from launch import envvars
from launch.config.load import load_config
from launch.config.locate import check_data_files, check_model_files
from launch.errors import UserError
from launch.health.check import Check, critical, ok, warning
from launch.health.checks import versions
from launch.planner.prepare import Prepared, prepare
from launch.run.faults import trains

SLOW_WRITE_S = 1.0
Result = TypeVar("Result")


def check_login(config: str, overrides: Sequence[str] = (), device: Literal["auto", "cpu", "gpu"] = "auto",
                ) -> tuple[list[Check], Prepared | None]:
    """(findings, the plan if there is one). Leaves no files behind."""
    checks: list[Check] = []

    def attempt(name: str, act: Callable[[], Result], evidence: Callable[[Result], str]) -> Result | None:
        try:
            result = act()
        except UserError as error:
            told = error.what + (f" ({error.where})" if error.where else "")
            checks.append(critical(name, None, told, error.fix or "see the message"))
            return None
        checks.append(ok(name, None, evidence(result)))
        return result

    loaded = attempt("config.valid", lambda: load_config(config, overrides), lambda found: f"{config} is complete")
    if loaded is None:
        return checks, None
    prepared = attempt("plan.feasible", lambda: prepare(config, overrides, device), _plan_text)
    if trains(loaded.config):
        attempt("paths.model", lambda: check_model_files(loaded), lambda _: f"{loaded.config.model.path} is complete")
        attempt("paths.data", lambda: check_data_files(loaded), lambda _: "the data files exist")
    checks += [_run_dir(Path(loaded.config.run.dir)), _stack()]
    return checks, prepared


def _plan_text(prepared: Prepared) -> str:
    training = prepared.plan.training.world_size
    rollout = sum(engine.tp for engine in prepared.plan.rollout.engines)
    return f"plan {prepared.plan.fingerprint()}: {training} training ranks, {rollout} rollout ranks"


def _run_dir(folder: Path) -> Check:
    """Writes, syncs and removes a small file in the runs' folder, or in the nearest existing folder above it."""
    where = folder.absolute()
    while not where.exists():
        where = where.parent
    probe = where / f".preflight.{os.getpid()}"
    began = time.perf_counter()
    try:
        with probe.open("wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
    except OSError as error:
        return critical("paths.run_dir", None, f"cannot write {where}: {error.strerror}",
                        "set run.dir to a writable folder on a file system that all nodes share")
    seconds = time.perf_counter() - began
    told = f"{where}: a synced write takes {seconds * 1e3:.0f} ms"
    if seconds > SLOW_WRITE_S:
        return warning("paths.run_dir", round(seconds, 3), told, "put run.dir on a faster file system")
    return ok("paths.run_dir", round(seconds, 3), told)


def _stack() -> Check:
    """Libraries installed for this Python. A login node needs only the launcher."""
    found = {name: version for name in versions.TOLD if (version := versions.version_of(name))}
    told = ", ".join(f"{name} {version}" for name, version in found.items())
    python = envvars.get("VIRTUAL_ENV") or "the system's Python"
    return ok("stack.installed", found, f"{python}: {told or 'the launcher only'}")
