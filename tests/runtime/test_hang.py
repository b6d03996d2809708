"""Judging stacks: real faulthandler dumps of real processes, and dumps recorded from a hanging job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from launch.run.attempts import Attempt
from launch.run.components import components
from launch.runtime import hang
from launch.runtime.hang import SETTLED_LOOKS, Stack, absent, explain, judge, take_stacks, whole
from tests.patience import patient

RAY_IDLE = '''Current thread 0x00007f5b3fc63b80 (most recent call first):
  File "/v/ray/_private/worker.py", line 1069 in main_loop
  File "/v/ray/_private/workers/default_worker.py", line 323 in <module>
'''
SLEEPS = '''Current thread 0x00007f5b3fc63b80 (most recent call first):
  File "/p/launch/run/faults.py", line 31 in strike
  File "/p/megatron_rl/driver/actors.py", line 62 in update
  File "/v/ray/_private/worker.py", line 1069 in main_loop
  File "/v/ray/_private/workers/default_worker.py", line 323 in <module>
'''
PIPELINE = '''Thread 0x00007f0cfc8b76c0 (most recent call first):
  File "/l/threading.py", line 327 in wait

Current thread 0x00007f0d45858b80 (most recent call first):
  File "/v/megatron/core/pipeline_parallel/p2p_communication.py", line 392 in _communicate
  File "/v/megatron/core/pipeline_parallel/schedules.py", line 2174 in forward_backward_pipelining_without_interleaving
  File "/v/ray/_private/workers/default_worker.py", line 323 in <module>
'''
COLLECTIVE = '''Current thread 0x00007f0d45858b80 (most recent call first):
  File "/v/torch/distributed/distributed_c10d.py", line 2822 in all_reduce
  File "/v/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/v/megatron/core/tensor_parallel/mappings.py", line 34 in _reduce
'''
WRITES = '''Thread 0x00007f9b40efe6c0 (most recent call first):
  File "/l/pathlib.py", line 1044 in open
  File "/p/megatron_rl/trainer/checkpoint_tensors.py", line 65 in _write_file
  File "/l/concurrent/futures/thread.py", line 58 in run

Thread 0x00007f9b416ff6c0 (most recent call first):
  File "/l/threading.py", line 1139 in _wait_for_tstate_lock
  File "/l/concurrent/futures/_base.py", line 647 in __exit__
  File "/p/megatron_rl/trainer/checkpoint_tensors.py", line 57 in write
  File "/p/megatron_rl/trainer/background.py", line 37 in _run
  File "/l/threading.py", line 982 in run

'''
HAS_WRITTEN = '''Thread 0x00007f9b416ff6c0 (most recent call first):
  File "/v/torch/distributed/distributed_c10d.py", line 3513 in all_gather_object
  File "/p/megatron_rl/trainer/checkpoint.py", line 237 in _gathered
  File "/p/megatron_rl/trainer/background.py", line 37 in _run
  File "/l/threading.py", line 982 in run

'''
ASKED = '''Current thread 0x00007f9b6c464b80 (most recent call first):
  File "/l/threading.py", line 331 in wait
  File "/p/megatron_rl/trainer/background.py", line 50 in progress
  File "/p/megatron_rl/trainer/checkpoint.py", line 218 in progress
  File "/v/ray/_private/workers/default_worker.py", line 323 in <module>
'''
WRITING, WRITTEN = "trainer/checkpoint_tensors.py:57 in write", "trainer/checkpoint.py:237 in _gathered"


@pytest.mark.parametrize(("dump", "state", "at"), [
    (RAY_IDLE, "idle", "_private/worker.py:1069 in main_loop"),
    (SLEEPS, "running", "run/faults.py:31 in strike"),
    (PIPELINE, "waiting", "pipeline_parallel/p2p_communication.py:392 in _communicate"),
    (COLLECTIVE, "waiting", "tensor_parallel/mappings.py:34 in _reduce"),
    (WRITES + ASKED, "running", WRITING),
    (WRITES + RAY_IDLE, "running", WRITING),
    (HAS_WRITTEN + ASKED, "waiting", WRITTEN),
    (HAS_WRITTEN + SLEEPS, "running", "run/faults.py:31 in strike"),        # the steps go on beside it
    (WRITES + PIPELINE, "waiting", "pipeline_parallel/p2p_communication.py:392 in _communicate"),
])
def test_where_a_process_is(dump, state, at):
    assert judge(dump) == (state, at)


@pytest.mark.parametrize("dump", [RAY_IDLE, SLEEPS, PIPELINE])
def test_a_dump_is_judged_when_it_is_whole(dump):
    """A process that has no core to run on takes its time between two pieces of it."""
    assert whole(dump, 0)
    cuts = [dump[:end] for end in range(len(dump))]
    assert not any(whole(cut, 0) for cut in cuts)
    assert not whole(dump.splitlines(keepends=True)[0], SETTLED_LOOKS), "the head alone"


def test_a_dump_that_ends_otherwise_is_whole_when_it_grows_no_more():
    assert not whole(COLLECTIVE, SETTLED_LOOKS - 1) and whole(COLLECTIVE, SETTLED_LOOKS)


def stack(name: str, state: str) -> Stack:
    return Stack(name, state, "somewhere.py:1 in f", None)


def test_the_rank_that_does_not_wait_while_others_do_is_the_absent_one():
    ranks = [stack("trainer-0", "waiting"), stack("trainer-1", "running"), stack("trainer-2", "idle"),
             stack("trainer-3", "waiting"), stack("rollout-0", "running")]
    assert [each.name for each in absent(ranks)] == ["trainer-1"]
    assert explain(ranks).startswith("never arrived: trainer-1")


def test_a_rank_that_cannot_answer_comes_first():
    ranks = [stack("trainer-0", "waiting"), stack("trainer-1", "running"), stack("trainer-2", "stopped")]
    assert [each.name for each in absent(ranks)] == ["trainer-2"]


def test_a_dead_engine_explains_ranks_that_wait():
    stacks = [stack("trainer-0", "waiting"), stack("trainer-1", "running"), stack("rollout-0", "dead")]
    assert [each.name for each in absent(stacks)] == ["rollout-0"]


def test_nobody_is_blamed_when_nobody_waits():
    assert absent([stack("trainer-0", "idle"), stack("trainer-1", "idle")]) == []


CHILD = """
import sys, time, threading
from megatron_rl.driver.component import begin
begin(sys.argv[1], sys.argv[2], "node")
print("begun", flush=True)
threading.Event().wait()
"""


def test_stacks_of_real_processes_and_of_those_that_cannot_answer(tmp_path):
    attempt = Attempt(tmp_path / "attempts" / "1")
    for name in ("logs", "components", "stacks", "errors"):
        (attempt.folder / name).mkdir(parents=True)
    names = ["trainer-0", "trainer-1", "trainer-2"]
    children = {name: subprocess.Popen([sys.executable, "-c", CHILD, str(attempt.folder), name]) for name in names}
    try:
        for name in names:
            log = attempt.logs / f"{name}.log"
            while not (log.exists() and "begun" in log.read_text()):
                assert children[name].poll() is None
                try:
                    children[name].wait(0.05)
                except subprocess.TimeoutExpired:
                    continue
        os.kill(children["trainer-1"].pid, signal.SIGSTOP)
        deadline = time.monotonic() + patient(10)
        while psutil.Process(children["trainer-1"].pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline, "trainer-1 was not stopped"
            time.sleep(0.01)        # on a busy machine it takes a moment
        children["trainer-2"].kill()
        children["trainer-2"].wait()
        assert len(components(attempt)) == 3
        states = {each.name: each for each in take_stacks(attempt)}
        assert states["trainer-0"].state == "running" and "threading.py" in states["trainer-0"].at
        assert states["trainer-1"].state == "stopped"
        assert states["trainer-2"].state == "dead"
        assert "threading.py" in hang.stack_file(attempt, "trainer-0").read_text()
    finally:
        for child in children.values():
            child.kill()
            child.wait()
