"""`make bench-sync`: a real sync between two simulated hosts whose NICs count the bytes, and a benchmark that leaves
nothing behind; then, without hosts, what its table says and when a run does not count."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.sync_cases import CASES, MIB, MODEL, QUICK, QUICK_MODEL, Case, Setup, write_model
from benchmarks.sync_hosts import NAMESPACES, PREFIX, Network, Traffic, remove_leftovers, why_not
from benchmarks.sync_measure import RUNS, Measured, expected_nics, measure, worst_share
from benchmarks.sync_probe import Verdict
from benchmarks.sync_table import aims, table
from launch.coefficients.sync import SyncCoefficients
from megatron_rl.sync_bench.rates import Rates
from megatron_rl.weight_sync.plan.manifest import SyncManifest
from megatron_rl.weight_sync.plan.streams import Hop, Stream
from megatron_rl.weight_sync.protocol import SyncReport
from tests.patience import patient
from tests.rollout.engines import engine_environment

ROOT = Path(__file__).parents[2]
RATES = Rates(memcpy=10e9, pack=8e9, unpack=9e9, digest=2e9)
SLOW = SyncCoefficients(nic_efficiency=0.95, chunk_latency_s=1e-3, pause_s=0.0, barrier_s=0.0, copy_rate=8e9,
                        digest_rate=2e9)


@pytest.fixture
def simulated_hosts():
    if why := why_not():
        pytest.skip(f"hosts cannot be simulated here: {why}")


def _spaces() -> set[str]:
    names = (each.name for each in NAMESPACES.iterdir()) if NAMESPACES.is_dir() else ()
    return {name for name in names if name.startswith(PREFIX)}


@pytest.mark.slow
def test_the_nics_carry_what_the_manifest_says_and_all_common_ways_bring_the_same_weights(simulated_hosts, tmp_path):
    """TP2 on one host to TP2 on another, over shaped links. The manifest's bytes are proved against the layouts
    elsewhere; here they are compared with the interfaces' own counters."""
    before = _spaces()
    setup = Setup(QUICK[0], write_model(tmp_path / "model", QUICK_MODEL), 200e6, 1 * MIB, 60.0)
    with engine_environment(setup.config):
        found = asyncio.run(measure(setup, RATES, cores=2, logs=tmp_path))
    trainer, rollout = expected_nics(setup, found.manifest)
    assert trainer == Traffic(found.manifest.total_bytes, 0) and rollout == Traffic(0, found.manifest.total_bytes)
    assert found.manifest.total_bytes > 5e6
    assert worst_share(found.nics, [trainer, rollout]) < 0.04
    assert found.nics[0].into < 0.05 * found.nics[0].out                    # acknowledgements only
    assert found.seconds["ours"] > found.bound_s > 0.2                      # nobody is faster than the NIC
    assert {name: len(runs) for name, runs in found.runs.items()} == dict.fromkeys(
        ("ours", "gather", "tensors", "buckets", "ring"), RUNS)
    for method in ("tensors", "buckets", "ring"):                           # all ended with equal digests
        assert found.seconds[method] > found.seconds["gather"] > 0
    assert _spaces() == before


def test_hosts_are_removed_after_a_failure_and_those_of_a_killed_benchmark_by_the_next_one(simulated_hosts):
    with pytest.raises(ZeroDivisionError), Network(1, 200e6) as network:
        made = {space for space in _spaces() if space.startswith(network.hosts[0].namespace.rpartition("-")[0])}
        assert len(made) == 2                                               # the switch and the host
        raise ZeroDivisionError
    assert not made & _spaces()

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(patient(30))
    left = f"{PREFIX}-{ended.pid}-0-1"
    subprocess.run(["ip", "netns", "add", left], check=True, timeout=patient(30))
    assert left in remove_leftovers() and left not in _spaces()


@pytest.mark.slow
def test_interrupted_it_leaves_no_host_and_no_process(simulated_hosts):
    """asyncio treats Ctrl-C alike."""
    with subprocess.Popen([sys.executable, "-m", "benchmarks.sync", "--quick"], cwd=ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, start_new_session=True) as running:
        try:
            deadline = time.monotonic() + patient(90)
            while not _hosts_of(running.pid) and running.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)        # nobody tells of a new namespace
            assert _hosts_of(running.pid), "it never made its hosts"
            running.send_signal(signal.SIGTERM)
            output, _ = running.communicate(timeout=patient(60))
        finally:
            running.kill()
    assert running.returncode == 130 and output.splitlines()[-1] == "interrupted", output
    assert not _hosts_of(running.pid)
    assert _in_session(running.pid, timeout_s=patient(20)) == []


def _hosts_of(pid: int) -> set[str]:
    return {space for space in _spaces() if space.startswith(f"{PREFIX}-{pid}-") and "probe" not in space}


def _in_session(leader: int, timeout_s: float) -> list[int]:
    """Processes of a session that are still there; they may take a moment to see that their pipes are closed."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = []
        for each in Path("/proc").iterdir():
            try:
                if each.name.isdigit() and os.getsid(int(each.name)) == leader:
                    left.append(int(each.name))
            except ProcessLookupError:
                continue
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


@pytest.fixture
def setups(tmp_path):
    folder = write_model(tmp_path / "model", MODEL)
    return [Setup(case, folder, 200e6, 4 * MIB, 240.0) for case in CASES]


def test_cases_are_those_that_docs_name_and_the_model_has_64_mib(setups):
    assert [setup.case.name for setup in setups] == ["4+4", "2+6", "1+7", "1+1", "1+2", "1+4"]
    assert [setup.case.layout for setup in setups[:3]] == ["TP2 PP2 DP2 -> 4 x TP2", "TP2 PP2 -> 6 x TP2",
                                                           "TP2 -> 7 x TP2"]
    replica = setups[0].predicted(SLOW).replica_bytes
    assert replica == pytest.approx(64 * MIB, rel=0.01)
    for setup in setups:                    # the busiest NIC takes or gives one copy: 64 MiB at 25 MB/s
        assert setup.predicted(SLOW).floor_s == pytest.approx(replica / 25e6, rel=0.01)
        assert {setup.host_of_rank(each.rank) for each in setup.plan.training.ranks} == set(
            range(setup.case.trainer_hosts))
        assert setup.plan.training.world_size == 2 * setup.case.trainer_hosts
    assert all(setup.predicted(SLOW).chosen == "chain" for setup in setups[:3])


@pytest.mark.slow
def test_where_receivers_pass_on_the_trainers_nic_sends_one_copy(simulated_hosts, tmp_path):
    """TP2 on one host to engines on two others, as a chain: bytes of every hop, from the interfaces."""
    setup = Setup(Case(1, 1, 2, baselines=False), write_model(tmp_path / "model", QUICK_MODEL), 200e6, 1 * MIB, 60.0)
    with engine_environment(setup.config):
        found = asyncio.run(measure(setup, RATES, cores=2, logs=tmp_path, route="chain"))
    said = expected_nics(setup, found.manifest)
    copy = found.manifest.total_bytes / 2
    assert said[0] == Traffic(copy, 0)
    assert sorted((each.out, each.into) for each in said[1:]) == [(0, copy), (copy, copy)]
    assert worst_share(found.nics, said) < 0.04
    hops = found.ours.arrivals
    assert any(sender.startswith("engine") for sender, _ in hops) and min(hops.values()) > 0


def _row(setup: Setup, ours: float, *, verify: float = 0.02, spare: float = 0.5, rate: float = 0.95,
         **seconds) -> Measured:
    runs = {"ours": ours, **seconds}
    row = Measured(setup, setup.predicted(SLOW), predicted_s=2.95,
                   runs={name: [0.9 * middle, middle, 1.2 * middle] for name, middle in runs.items()})
    row.ours = SyncReport(1, 2, 1, {"total": ours, "receive": ours, "live_digest": verify * ours, "verify": 0.0})
    row.verdict = Verdict(rate, spare)
    return row


def test_aims_are_met_missed_or_cannot_be_judged(setups):
    good = {aim.what: aim for aim in aims([_row(setups[0], 3.0, tensors=15.0, buckets=6.5, ring=3.1)])}
    assert len(good) == 6 and all(aim.met for aim in good.values())
    bad = aims([_row(setups[0], 3.5, tensors=13.5, buckets=6.95, ring=3.4, verify=0.11)])
    assert [aim.met for aim in bad] == [False] * 6
    assert bad[0].said.startswith("1.3") and [aim.said for aim in bad[1:4]] == ["3.9 x", "2.0 x", "1.0 x"]
    for changes in ({"spare": 0.19}, {"rate": 0.89}):
        uncounted = aims([_row(setups[0], 3.0, tensors=15.0, buckets=6.5, ring=3.1, **changes)])
        assert [aim.met for aim in uncounted] == [None] * 6 and "4+4 invalid" in uncounted[0].said


def test_growth_is_judged_a_doubling_at_a_time(setups):
    def growth(*seconds: float) -> list[bool | None]:
        rows = [_row(setup, ours) for setup, ours in zip((setups[2], *setups[3:]), seconds, strict=True)]
        return [aim.met for aim in aims(rows) if "per doubling" in aim.what]

    assert growth(6.8, 5.5, 6.0, 6.3) == [True, True, True]
    assert growth(38.0, 5.5, 10.9, 21.8) == [False, False, False]           # direct: twice the time a doubling
    for ours, beats in ((3.0, True), (30.0, False)):
        aim, = (aim for aim in aims([_row(setups[2], ours)]) if "beats `direct`" in aim.what)
        assert aim.met is beats


def test_a_run_that_does_not_count_says_why(setups):
    text = table([_row(setups[0], 6.0, tensors=30.0, buckets=13.0, ring=7.0, spare=0.05, rate=0.8)], RATES)
    assert "5.40/6.00/7.20" in text and "6.30/7.00/8.40" in text          # the spread of the runs
    assert "invalid: a plain transfer reached 80% of the NICs' rate, 90% are needed; the CPU had 5.0% to spare" in text
    assert Verdict(0.9, 0.2).reasons == ()


def test_bytes_that_the_nics_did_not_carry_are_seen(setups):
    setup = Setup(Case(1, 1, 2), setups[0].folder, 200e6, 4 * MIB, 240.0)
    streams = tuple(Stream(rank, rank, 0, 1000, (Hop(None, (0, rank)), Hop((0, rank), (1, rank)))) for rank in range(2))
    said = expected_nics(setup, SyncManifest(1000, "chain", streams))
    assert said == [Traffic(2000, 0), Traffic(2000, 2000), Traffic(0, 2000)]
    assert worst_share([Traffic(2050, 90), Traffic(2000, 2000), Traffic(50, 2000)], said) == pytest.approx(0.025)
    assert worst_share([Traffic(2000, 90), Traffic(1000, 2000), Traffic(50, 2000)], said) == pytest.approx(0.5)


def test_a_case_that_does_not_exist_is_refused():
    done = subprocess.run([sys.executable, "-m", "benchmarks.sync", "--cases", "9+9"], cwd=ROOT, capture_output=True,
                          text=True, timeout=patient(60))
    assert done.returncode == 2 and "there is no case 9+9" in done.stderr and "use some of 4+4" in done.stderr
