from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.fast import ROOT, is_heavy
from tests.patience import patient


@pytest.mark.parametrize("module, heavy", [
    ("tests.rollout.test_engine", True), ("tests.trainer.test_step", True), ("tests.job.test_failures", True),
    ("tests.slurm.test_ends", True), ("tests.planner.test_lengths", False), ("tests.algorithms.test_losses", False)])
def test_what_leads_to_an_engine_is_heavy(module: str, heavy: bool) -> None:
    assert is_heavy(module) is heavy


@pytest.mark.parametrize("code", ["import ray", "from vllm import LLM", "import megatron.core",
                                  "import subprocess; subprocess.run(['/usr/sbin/slurmctld', '-V'])"])
def test_no_process_of_the_fast_tests_comes_by_an_engine_or_a_slurm(code: str) -> None:
    done = _python(code)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("starts none: mark the test `heavy`")


def test_whether_an_engine_is_installed_may_be_asked() -> None:
    done = _python("import importlib.util as u; print(u.find_spec('ray') is not None, u.find_spec('json') is not None)")
    assert done.stdout.split() == ["True", "True"]


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(60),
                          env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "no_engines")})
