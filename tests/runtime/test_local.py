"""What the launcher on this machine makes of a driver that has said why it ends and takes long to go."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launch import processes
from launch.exit_codes import ExitCode
from launch.planner.prepare import prepare
from launch.planner.seats.local import LOCAL_NODE, place_local
from launch.ports import Ports
from launch.report.run.display import make_display
from launch.run import progress as progress_file
from launch.run.attempts import RunFolder
from launch.run.components import record_error
from launch.runtime import local
from launch.runtime.local import LocalJob
from tests.progress import doing
from tests.runtime.played_job import CONFIG
from tests.slurm_cluster import REPOSITORY

REGISTERS = f"""
import sys
from pathlib import Path
from launch.run.attempts import Attempt
from launch.run.components import register
register(Attempt(Path(sys.argv[1])), "trainer-0", "{LOCAL_NODE}")
"""
"""A component that is gone at once."""
SLOW = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize(("user_error", "status"), [(True, "user_error"), (False, "crash")])
def test_a_slow_end_does_not_turn_the_users_error_into_a_crash(tmp_path, monkeypatch, user_error, status):
    """Its actors are gone before it is."""
    monkeypatch.setattr(local, "DRIVER_GRACE_S", 0.0)
    prepared = prepare(CONFIG, (f"run.dir={tmp_path}",), "cpu")
    config = prepared.config
    with RunFolder(config.run) as run:
        attempt = run.new_attempt()
        attempt.write(config, prepared.plan, place_local(prepared.plan, 1, Ports(20000)), {})
        ray, driver = (processes.start(name, SLOW, log=attempt.logs / f"{name}.log", environment={})
                       for name in ("ray", "driver"))
        subprocess.run([sys.executable, "-c", REGISTERS, str(attempt.folder)], cwd=REPOSITORY, check=True)
        progress_file.write_progress(attempt.folder, doing(0, "resume"))
        record_error(attempt, "driver", "already made its 24 steps", "", user_error=user_error)
        job = LocalJob(attempt, config, "cpu", Ports(20000))
        monkeypatch.setattr(job, "_start", lambda: (ray, driver))
        try:
            with make_display("x", 1, quiet=True) as display:
                outcome = job._run(display)
        finally:
            for child in (ray, driver):
                child.end(grace_s=1.0)
    assert outcome.status == status
    assert ("already made its 24 steps" if user_error else "trainer-0") in outcome.message
    assert outcome.exit_code == (ExitCode.USER_ERROR if user_error else ExitCode.CRASH)
