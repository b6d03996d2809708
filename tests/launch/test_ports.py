from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch import ports
from launch.errors import UserError
from tests.patience import patient


@pytest.fixture
def allocate():
    held = []

    def call(*arguments, **options):
        held.append(ports.allocate(*arguments, **options))
        return held[-1]

    yield call
    for each in held:
        each.release()


def test_the_table_is_disjoint_and_fits_its_block():
    used = [offset + index for offset, count, _ in ports.TABLE.values() for index in range(count)]
    assert len(set(used)) == len(used) and min(used) == 0 and max(used) < ports.BLOCK


def test_blocks_are_disjoint_below_the_ephemeral_range_and_hold_no_default_of_others():
    bases = ports.blocks()
    every = [port for base in bases for port in range(base, base + ports.BLOCK)]
    assert len(set(every)) == len(every) and len(bases) >= 56
    assert min(every) >= 1024 and max(every) < 32768
    assert not set(every) & {6379, 8000, 8265, 10001, 29500}
    assert all(base + ports.BLOCK <= 20000 for base in ports.blocks(ephemeral_floor=20000))
    assert ports.blocks(ephemeral_floor=1024) == bases  # a site whose range covers all: probed all the same


def test_names_of_the_table():
    block = ports.Ports(20480)
    assert block.ray_gcs == 20481 and block.rendezvous == 20490
    assert [block.lane(rank) for rank in (0, 127)] == [20512, 20639]
    assert block.ray_worker_range == (20640, 20799)
    for name in ("lanes", "nonsense"):
        with pytest.raises(AttributeError, match=name):
            getattr(block, name)
    with pytest.raises(UserError, match="rank 128 exceeds the 128 training ranks"):
        block.lane(128)


def test_two_jobs_on_one_machine_do_not_meet(allocate):
    first, second = allocate(5), allocate(5)
    assert abs(first.base - second.base) >= ports.BLOCK
    first.release()
    assert allocate(5).base == first.base


def test_a_block_with_a_listener_is_skipped(allocate):
    free = ports.allocate(5)
    base = free.base
    free.release()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", base + ports.TABLE["ray_workers"][0] + 7))
        listener.listen()
        assert allocate(5).base != base
    assert allocate(5).base == base


def test_where_no_block_is_free_who_holds_the_ports_is_named(monkeypatch):
    free = ports.allocate(9)
    free.release()
    monkeypatch.setattr(ports, "blocks", lambda floor: [free.base])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free.ray_gcs))
        listener.listen()
        with pytest.raises(UserError, match=rf"port {free.ray_gcs} is taken by .* \(pid {os.getpid()}\)"):
            ports.allocate()


def test_many_processes_at_once_get_blocks_of_their_own():
    code = ("import sys; from launch import ports; block = ports.allocate(0); print(block.base, flush=True); "
            "sys.stdin.read()")
    children = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 text=True, cwd=Path(__file__).parents[2]) for _ in range(5)]
    try:
        bases = [int(child.stdout.readline()) for child in children]
        assert len(set(bases)) == 5
    finally:
        for child in children:
            child.stdin.close()
            child.wait(patient(10))
            child.stdout.close()


def test_a_pinned_block_in_use_is_refused_naming_port_and_process():
    with socket.socket() as listener:
        free = ports.allocate(9)
        free.release()
        listener.bind(("127.0.0.1", free.rendezvous))
        listener.listen()
        with pytest.raises(UserError) as error:
            ports.allocate(pinned=free.base)
    for fragment in (f"port {free.rendezvous} (rendezvous) is already taken", f"(pid {os.getpid()})",
                     f"run.port_base = {free.base}", "run.port_base=null"):
        assert fragment in str(error.value)
    assert error.value.exit_code == 2


def test_a_pinned_block_that_another_job_holds_is_refused(allocate):
    held = allocate(11)
    with pytest.raises(UserError, match=rf"port {held.base} \(claim\) is already taken"):
        ports.allocate(pinned=held.base)


def test_a_pinned_block_past_the_last_port_is_refused():
    with pytest.raises(UserError, match="ends past 65535.*\n.*\n.*use at most 65216"):
        ports.allocate(pinned=65300)


def test_a_pickled_copy_names_the_same_ports_and_holds_nothing(allocate):
    mine = allocate(13)
    copy = pickle.loads(pickle.dumps(mine))
    assert copy == mine and copy.hold is None and copy.lane(3) == mine.lane(3)
