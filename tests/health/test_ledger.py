"""The ledger keeps bad nodes out, forgets them in time, and never eats the cluster."""

from __future__ import annotations

import json
import math
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch import envvars, processes
from launch.errors import UserError
from launch.files.waiting import wait_until
from launch.health.check import critical
from launch.health.ledger import EXPIRY_S, MAX_WITHOUT_SIZE, Ledger, LedgerEntry
from launch.health.verdict import judge, record

DAY = 24 * 3600.0


def test_evidence_keeps_out_at_once_suspicion_the_second_time(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json", cluster_nodes=32)
    ledger.add("n1", "gpu.ecc: 4 errors", "attempts/1/nodes/n1/preflight.json", "7", now=0.0)
    ledger.add("n2", "crash", "", "7", now=1.0)
    assert ledger.excluded(2.0) == ("n1",) and ledger.suspected(2.0) == ("n2",)
    ledger.add("n2", "crash", "", "7", now=2.0)             # the same job again is no second opinion
    assert ledger.excluded(3.0) == ("n1",)
    ledger.add("n2", "crash", "", "8", now=3.0)
    assert set(ledger.excluded(4.0)) == {"n1", "n2"} and ledger.suspected(4.0) == ()
    newest, _ = ledger.reasons("n2", 4.0)
    assert (newest.job, newest.reason, newest.expires) == ("8", "crash", 3.0 + EXPIRY_S)
    assert ledger.reasons("n1", 4.0)[0].evidence == "attempts/1/nodes/n1/preflight.json"


def test_expiry(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json", cluster_nodes=32)
    ledger.add("n1", "gpu.ecc", "e.json", "7", now=0.0)
    assert ledger.excluded(DAY - 1) == ("n1",) and ledger.excluded(DAY) == ()
    ledger.add("n2", "crash", "", "8", now=DAY + 1)
    assert [entry.node for entry in ledger.entries()] == ["n2"]         # what has expired is dropped from the file
    short = Ledger(tmp_path / "ledger.json", cluster_nodes=32, expiry_s=60.0)
    short.add("n3", "gpu.ecc", "e.json", "9", now=DAY + 2)
    assert short.excluded(DAY + 30) == ("n3",) and short.excluded(DAY + 63) == ()


def test_a_reason_given_for_most_nodes_is_the_check(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json", cluster_nodes=8)
    ledger.add("n8", "gpu.count: 7 GPUs", "e.json", "1", now=1.0)
    for index in range(5):
        ledger.add(f"n{index}", f"nic.rate: {index}", "e.json", "1", now=2.0)
    assert ledger.excluded(3.0) == ("n8",)


def test_worst_first_under_the_cap(tmp_path):
    """32 nodes, a quarter may go: the ones seen most often, and the rest is named."""
    ledger = Ledger(tmp_path / "ledger.json", cluster_nodes=32, max_share=0.1)
    for index, reasons in enumerate((["a"], ["a", "b"], ["b"], ["a", "b", "c"], ["c"])):
        for reason in reasons:
            ledger.add(f"n{index}", reason, "e.json", "1", now=float(index))
    assert ledger.cap == 3 and ledger.excluded(9.0) == ("n3", "n1", "n4") and ledger.over_cap(9.0) == ("n2", "n0")


def test_a_size_that_is_not_known(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json")
    for index in range(10):
        ledger.add(f"n{index}", f"reason-{index}", "e.json", "1", now=1.0)
    assert len(ledger.excluded(2.0)) == MAX_WITHOUT_SIZE


ENTRIES = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["gpu.ecc", "nic.state", "crash", "hang"]),
                             st.booleans(), st.integers(1, 5), st.floats(0, 3 * DAY)), max_size=60)


@given(ENTRIES, st.one_of(st.none(), st.integers(1, 64)), st.floats(0.01, 1.0), st.floats(0, 4 * DAY))
@settings(max_examples=60, deadline=None)
def test_it_never_eats_the_cluster(tmp_path_factory, entries, size, share, now):
    """Whatever was recorded: at most the cap, only nodes with a live entry, nobody twice, the same after a reload."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.json"
    rows = [LedgerEntry(f"n{node}", reason, "e.json" if evidence else "", str(job), at, at + EXPIRY_S)
            for node, reason, evidence, job, at in entries]
    path.write_text(json.dumps({"schema_version": 1, "entries": [vars(row) for row in rows]}))
    ledger = Ledger(path, cluster_nodes=size, max_share=share)
    out = ledger.excluded(now)
    cap = MAX_WITHOUT_SIZE if size is None else max(1, math.floor(size * share))
    alive = {row.node for row in rows if row.expires > now}
    proven = {row.node for row in rows if row.expires > now and row.evidence}
    twice = {node for node in alive if len({row.job for row in rows if row.node == node and row.expires > now}) > 1}
    assert len(out) == len(set(out)) <= cap and set(out) <= proven | twice
    assert not set(out) & set(ledger.over_cap(now)) and set(out) | set(ledger.suspected(now)) == alive
    assert Ledger(path, cluster_nodes=size, max_share=share).excluded(now) == out
    if size is not None and size >= 3:
        for reason in {row.reason for row in rows}:
            blamed = {row.node for row in rows if row.expires > now and row.reason == reason}
            only = {node for node in blamed if {row.reason for row in rows if row.node == node and row.expires > now}
                    == {reason}}
            if len(blamed) > size / 2:
                assert not only & set(out)


def test_two_jobs_do_not_lose_each_others_entries(tmp_path):
    def job(number: int) -> None:
        ledger = Ledger(tmp_path / "ledger.json", cluster_nodes=1000)
        for index in range(10):
            ledger.add(f"n{number}-{index}", f"reason {number} {index}", "e.json", str(number))

    threads = [threading.Thread(target=job, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Ledger(tmp_path / "ledger.json").entries()) == 40
    assert json.loads((tmp_path / "ledger.json").read_text())["schema_version"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ledger.json.lock", "ledger.json"]


@pytest.mark.parametrize("text, fragment", [("{", "not readable"), ("[]", "not readable"),
                                            ('{"schema_version": 9, "entries": []}', "schema version 9")])
def test_a_broken_file_is_said(tmp_path, text, fragment):
    (tmp_path / "ledger.json").write_text(text)
    with pytest.raises(UserError, match=fragment):
        Ledger(tmp_path / "ledger.json").excluded(1.0)


HOLDER = """
import sys, threading
from pathlib import Path
from launch.files.lock import held
with held(Path(sys.argv[1]), 5.0):
    threading.Event().wait()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the ledger's lock."""
    lock = tmp_path / ".ledger.json.lock"
    root = Path(__file__).parents[2]
    child = processes.start("holder", [sys.executable, "-c", HOLDER, str(lock)], log=tmp_path / "holder.log",
                            environment={**envvars.inherited(), "PYTHONPATH": str(root)})
    try:
        wait_until(lambda: lock.exists() and lock.read_text() != "", "the holder", 30.0, say=print)
        yield child
    finally:
        child.end(grace_s=0.0)


def test_a_lock_that_is_not_given_up_ends_no_run(tmp_path, holder):
    """The holder or the lock service hangs, and a waiting process cannot tell which. It reports what is
    not recorded and continues."""
    ledger, said = Ledger(tmp_path / "ledger.json", cluster_nodes=8, lock_s=0.1), []
    with pytest.raises(UserError, match=f"pid {holder.pid} on .* holds it") as error:
        ledger.add("n1", "gpu.ecc: 4 errors", "preflight.json", "7")
    assert error.value.where == str(tmp_path / ".ledger.json.lock")
    verdict = judge({node: [critical("gpu.ecc", 4, "4 errors", "drain")] if node < "n3" else []
                     for node in ("n1", "n2", "n3", "n4")}, 2, ledger=ledger.readable(said.append))
    record(verdict, ledger, {}, "7", said.append)
    line, = said
    assert line.startswith("warning: n1, n2 could not be added to the ledger of bad nodes, and the run continues: ")
    assert f"pid {holder.pid} on " in line and ".ledger.json.lock" in line and not ledger.entries()

    holder.end(grace_s=0.0)             # those who gave up must not have it now
    ledger.lock_s = 10.0
    record(verdict, ledger, {}, "7", said.append)
    assert len(said) == 1 and {entry.node for entry in ledger.entries()} == {"n1", "n2"}


def test_a_ledger_that_cannot_be_read_ends_no_run(tmp_path):
    (tmp_path / "ledger.json").write_text("{", encoding="utf-8")
    said: list[str] = []
    assert Ledger(tmp_path / "ledger.json").readable(said.append) is None
    assert "continuing without the ledger of bad nodes" in said[0] and "remove or rename the file" in said[0]
