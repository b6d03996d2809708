"""Ray's scratch folder: private, and swept when its launcher is gone."""

from __future__ import annotations

import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from launch.runtime.ray_node import RaySession, head_command, loopback_variables
from launch.ports import Ports


def test_folder_and_token_are_the_users_alone_and_the_token_is_in_no_command(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    session = RaySession()
    assert stat.S_IMODE(session.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(session.token.stat().st_mode) == 0o600
    token = session.token.read_text()
    command = head_command(session, Ports(20000), node="n", address="127.0.0.1")
    assert len(token) == 64
    assert not any(token in word for word in [*command, *session.variables().values(), *loopback_variables().values()])
    session.remove()
    assert not session.folder.exists()


def test_the_folder_of_a_launcher_that_was_killed_is_swept_and_a_living_ones_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = ("import os, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
              "from launch.runtime.ray_node import RaySession\n"
              "print(RaySession().folder); sys.stdout.flush(); os.kill(os.getpid(), 9)")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    left = Path(done.stdout.strip())
    assert left.is_dir()
    mine = RaySession()
    another = RaySession()
    assert not left.exists() and mine.folder.is_dir() and another.folder.is_dir()
