"""`tests/install_slurm.sh` says why it does not install."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import patient

SCRIPT = Path(__file__).with_name("install_slurm.sh")


@pytest.mark.skipif(shutil.which("scontrol", path="/usr/sbin:/sbin") is not None, reason="Slurm lies where the script "
                    "always looks")
@pytest.mark.parametrize("conf, programs, why", [
    ("SlurmctldHost=here\n", (), "this machine has a Slurm already"), ("", (), "this is no Debian or Ubuntu"),
    ("", ("apt-get", "sudo"), "this user may not install packages|the package index cannot be fetched")])
def test_a_refusal_has_a_reason(tmp_path, conf, programs, why):
    (tmp_path / "slurm.conf").write_text(conf)
    (tmp_path / "bin").mkdir()
    for name in programs:           # neither does what it is asked
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("tee", "chmod", "rm"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / "bin" / name).chmod(0o755)
    done = subprocess.run(["/bin/bash", str(SCRIPT)], capture_output=True, text=True, timeout=patient(30), check=False,
                          env={"PATH": str(tmp_path / "bin"), "SLURM_CONF": str(tmp_path / "slurm.conf")})
    assert done.returncode == 0
    assert re.search(f"tests of a live Slurm will be skipped: .*scontrol.* not installed, and ({why})", done.stderr)
