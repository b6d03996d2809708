"""A signal that comes while the leader still imports."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from launch import early_signals
from launch.runtime.stop_clock import Signals

STRIKES_FIRST = """
import os, runpy, signal, sys

class Strikes:
    def find_spec(self, name, path=None, target=None):
        if name == "launch.cli":        # what the product imports first
            sys.meta_path.remove(self)
            assert "pydantic" not in sys.modules and "click" not in sys.modules
            os.kill(os.getpid(), signal.SIGUSR1)

sys.meta_path.insert(0, Strikes())
runpy.run_module("launch", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(("verb", "status"), [("job", 2), ("plan", -signal.SIGUSR1)])
def test_a_job_survives_a_signal_before_its_first_import(verb, status):
    done = subprocess.run([sys.executable, "-c", STRIKES_FIRST, verb, "no/such.yaml"], capture_output=True, text=True,
                          check=False)
    assert done.returncode == status, done.stderr


def test_what_came_early_is_handed_on_once():
    handlers = {number: signal.getsignal(number) for number in (*early_signals.CAUGHT, signal.SIGUSR2)}
    try:
        early_signals.catch()
        signal.raise_signal(signal.SIGUSR1)
        signals = Signals()
        signal.raise_signal(signal.SIGTERM)
        assert signals.noted == [signal.SIGUSR1, signal.SIGTERM] and Signals().noted == []
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
