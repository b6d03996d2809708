"""Ray's scratch folder: private, and swept when its launcher is gone."""

from __future__ import annotations

import itertools
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.config.load import load_config
from launch.errors import UserError
from launch.planner.seats.local import LOOPBACK
from launch.ports import Ports, allocate
from launch.runtime import ray_node
from launch.runtime.ray_node import (
    ON_LOOPBACK,
    RaySession,
    head_command,
    object_store_bytes,
    raylet_command,
    registered,
    remove_leftovers,
    start_head,
)
from tests.patience import patient


@pytest.fixture
def scratch(monkeypatch) -> Iterator[Path]:
    """A temporary folder with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_folder_and_token_are_the_users_alone_and_the_token_is_in_no_command(scratch):
    session = RaySession()
    assert stat.S_IMODE(session.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(session.token.stat().st_mode) == 0o600
    token = session.token.read_text()
    command = head_command(session, Ports(20000), node="n", address="127.0.0.1")
    assert len(token) == 64
    assert not any(token in word for word in [*command, *session.variables().values(), *ON_LOOPBACK.values()])
    session.remove()
    assert not session.folder.exists()


def test_a_further_node_joins_the_head_with_the_same_token_and_ports_of_its_own(scratch):
    first = RaySession()
    second = RaySession(secret=first.token.read_text())
    assert second.token.read_text() == first.token.read_text() and second.folder != first.folder
    head = head_command(first, Ports(20000), node="a", address="10.0.0.1")
    command = raylet_command(second, Ports(21024), node="b", address="10.0.0.1", head="10.0.0.1:20001")
    options = dict(itertools.pairwise(command))
    assert options["--address"] == "10.0.0.1:20001" and options["--node-name"] == "b"
    assert not {"--head", "--port", "--include-dashboard"} & set(command)      # `ray start` takes these of a head only
    numbers = {name: int(value) for name, value in options.items() if name.endswith("-port")}
    assert {name for name in head if name.endswith("-port")} - {"--port", "--ray-client-server-port"} <= set(numbers)
    assert len(set(numbers.values())) == len(numbers) and all(21024 <= port < 21536 for port in numbers.values())


def test_the_folder_of_a_launcher_that_was_killed_is_swept_and_a_living_ones_is_not(scratch):
    script = ("import os, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
              "from launch.runtime.ray_node import RaySession\n"
              "session = RaySession(); print(session.folder); sys.stdout.flush(); os.kill(os.getpid(), 9)")
    done = subprocess.run([sys.executable, "-c", script, str(scratch)], capture_output=True, text=True, check=False)
    left = Path(done.stdout.strip())
    assert left.is_dir()
    mine = RaySession()
    another = RaySession()
    assert not left.exists() and mine.folder.is_dir() and another.folder.is_dir()


def test_who_lives_is_told_by_a_lock_and_not_by_a_pid(scratch):
    """In another container the pid means another process, or none."""
    mine = RaySession()
    done = subprocess.run([sys.executable, "-c", "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
                           "from launch.runtime.ray_node import remove_leftovers; remove_leftovers()", str(scratch)],
                          check=True)
    assert done.returncode == 0 and mine.folder.is_dir()
    mine._owner.close()         # its process has ended, and its number is taken
    remove_leftovers()
    assert not mine.folder.exists()


def test_a_temporary_folder_too_long_for_rays_sockets_is_replaced_by_a_short_one(monkeypatch, tmp_path):
    long = tmp_path / "slurm.1234567.0"
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    session = RaySession()
    assert session.folder.parent == Path("/tmp") and stat.S_IMODE(session.folder.stat().st_mode) == 0o700
    socket_path = f"{session.scratch}/session_2026-11-29_21-14-50_123456_{2 ** 22}/sockets/plasma_store"
    assert len(socket_path) <= 107 < len(socket_path.replace("/tmp/", f"{long}/"))
    session.remove()
    monkeypatch.setattr(ray_node, "SHORT", tmp_path / "absent")
    with pytest.raises(UserError) as error:
        RaySession()
    assert re.search(r"paths of Ray's sockets would have \d{3} bytes, but the limit is 107", error.value.what)
    assert "at most 26 bytes" in error.value.fix


def test_the_longest_temporary_folder_that_is_used_fits_rays_sockets(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="x" * 26) as folder:
        for length, used in ((26, True), (27, False)):
            parent = Path(folder[:length])
            parent.mkdir(exist_ok=True)
            monkeypatch.setattr(tempfile, "tempdir", str(parent))
            session = RaySession()
            assert (session.folder.parent == parent) == used
            variables = session.variables()
            assert variables.get("TMPDIR") == (str(session.folder) if used else None), "the user's disk"
            assert variables["VLLM_RPC_BASE_PATH"] == str(session.folder)
            session.remove()
            parent.rmdir()


@pytest.mark.heavy
def test_ray_start_waits_for_its_node_as_long_as_the_run_allows(scratch):
    """The real `ray start`, with a raylet that is stopped before it can register. Of its own accord it asks the control
    store for its node for 30 s, in vain, and gives up. Here that question takes the 2 s of the run."""
    session, log = RaySession(deadline_s=2.0), scratch / "ray.log"
    ports = allocate(address=LOOPBACK)
    try:
        ray = start_head(session, ports, node="n", address=LOOPBACK, log=log,
                         environment={**os.environ, **ON_LOOPBACK})
        try:
            raylet = _awaited(lambda: next((child for child in psutil.Process(ray.pid).children(recursive=True)
                                            if child.name() == "raylet"), None), "a raylet")
            raylet.suspend()
            began = time.monotonic()
            _awaited(lambda: "Failed to get node info" in log.read_text(), "a failed question for the node")
            assert time.monotonic() - began < 20 and not registered(ray)
            raylet.resume()
            _awaited(lambda: registered(ray), "the node")
        finally:
            for process in (*psutil.Process(ray.pid).children(recursive=True), psutil.Process(ray.pid)):
                process.kill()
            ray.wait(patient(10))
    finally:
        ports.release()
        session.remove()


def _awaited(look: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + patient(30)
    while not (found := look()):
        assert time.monotonic() < until, f"there is no {what}"
        time.sleep(0.02)
    return found


def test_every_start_up_deadline_of_ray_is_the_runs(scratch):
    """No process of Ray gives up before the run does, and requests after the start keep Ray's minute."""
    of = {seconds: {name: int(value) for name, value in RaySession(deadline_s=seconds).variables().items()
                    if name.endswith(("_s", "_ms", "_seconds", "_RETRIES"))} for seconds in (10.0, 899.5)}
    assert set(of[10.0].values()) == {10, 10_000, 60} and set(of[899.5].values()) == {900, 900_000}
    assert not {*of[10.0]} & {*RaySession().variables()}


@pytest.mark.parametrize("nodes", [4, 8, 32])
def test_settings_for_many_nodes(scratch, nodes):
    session = RaySession(nodes=nodes)
    many = {name for name in session.variables() if "gcs" in name or "register_timeout" in name}
    assert many == (set(ray_node.FOR_MANY_NODES) if nodes >= 8 else set())
    told = str(session)
    assert all(f"{name}={session.variables()[name]}" in told for name in many), "in the log"
    assert session.secret not in told and str(session.token) not in told


def test_few_workers_start_at_a_time_and_the_object_store_holds_a_step(scratch, run_yaml):
    config = load_config("configs/70b/grpo.yaml").config
    tokens = 256 * 16 * (512 + 8192)
    assert object_store_bytes(config, 2 ** 40) == 32 * tokens > 2 ** 30
    assert object_store_bytes(config, 2 ** 30) == 2 ** 29, "half of what is free"
    assert object_store_bytes(load_config(run_yaml).config, 2 ** 40) == 256 << 20
    command = head_command(RaySession(object_store_bytes=2 ** 30), Ports(20000), node="n", address="127.0.0.1")
    options = dict(itertools.pairwise(command))
    assert (options["--num-cpus"], options["--object-store-memory"]) == ("16", str(2 ** 30))
