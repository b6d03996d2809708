"""From findings to a verdict. The faults go in at the adapter; what is asserted is who takes part."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.exit_codes import ExitCode
from launch.health.check import Check, critical, ok, warning
from launch.health.ledger import Ledger
from launch.health.verdict import judge, record
from tests.health.conftest import H100X8

LOST = {"missing": [3]}
FAULTS = {"GPU missing": LOST, "wrong model": {"gpu": {"name": "NVIDIA A100-SXM4-80GB"}},
          "memory in use": {"gpus": {"0": {"used_bytes": 2 ** 34}}}, "ECC": {"gpus": {"0": {"ecc_uncorrected": 1}}},
          "rows": {"gpus": {"0": {"remap_pending": True}}},
          "throttled": {"gpus": {"0": {"throttle": ["HW slowdown"]}}},
          "NVLink": {"gpus": {"0": {"nvlinks_up": 12}}}, "process": {"gpus": {"0": {"processes": [2 ** 22 + 1]}}},
          "NIC": {"nics": {"down": ["mlx5_7"]}}}


def test_all_healthy(fleet):
    verdict = judge(fleet(4), 3, 1)
    assert verdict.ok and verdict.exit_code is ExitCode.OK and verdict.accepted == ("n1", "n2", "n3", "n4")
    assert not verdict.excluded and not verdict.warnings and not verdict.avoid and verdict.short == 0


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_bad_node_goes_and_the_spare_takes_its_place(fleet, fault):
    verdict = judge(fleet(4, {"n2": fault}), 3, 1)
    assert verdict.ok and verdict.accepted == ("n1", "n3", "n4") and set(verdict.excluded) == {"n2"}
    assert all(check.evidence and check.remedy for check in verdict.excluded["n2"].checks)
    assert verdict.warnings == ("0 of 1 spare nodes are left",)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_too_few_remain(fleet, fault):
    verdict = judge(fleet(4, {"n2": fault}), 4)
    assert not verdict.ok and verdict.exit_code is ExitCode.PREFLIGHT and verdict.short == 1 and verdict.only_short
    assert verdict.critical == ("4 nodes are needed, but only 3 of 4 are fit",)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_check_that_fails_everywhere_excludes_nobody(fleet, fault, tmp_path):
    """It is the site, the configuration or the check. The job stops, and no ledger learns of it."""
    verdict = judge(fleet(4, dict.fromkeys(("n1", "n2", "n3", "n4"), fault)), 3, 1)
    assert not verdict.ok and not verdict.excluded and len(verdict.accepted) == 4 and not verdict.only_short
    assert "fails on 4 of 4 nodes" in verdict.critical[0] and "run.skip_checks=[" in verdict.site[0].remedy
    ledger = Ledger(tmp_path / "ledger.json", cluster_nodes=4)
    record(verdict, ledger, {}, "7")
    assert ledger.entries() == []


def test_skipping_that_check_lets_the_job_start(fleet):
    nodes = fleet(4, dict.fromkeys(("n1", "n2", "n3"), FAULTS["ECC"]))
    assert not judge(nodes, 4).ok
    for skip in ("gpu.ecc", "gpu"):
        verdict = judge(nodes, 4, skip=[skip])
        assert verdict.ok and verdict.avoid == ("n1", "n2", "n3")
        assert "(skipped)" in verdict.warnings[0]


def test_a_check_that_is_broken_does_not_hide_a_bad_node(fleet):
    faults = {name: {"limits": {"memlock": 65536}} for name in ("n1", "n2", "n3", "n4")}
    faults["n3"] = {**faults["n3"], **LOST}
    verdict = judge(fleet(4, faults), 3)
    assert set(verdict.excluded) == {"n3"} and [check.name for check in verdict.site] == ["limit.memlock"]


def test_one_node_alone(fleet):
    """Nothing to compare with: a node that fails, fails."""
    verdict = judge(fleet(1, {"n1": LOST}), 1)
    assert not verdict.ok and set(verdict.excluded) == {"n1"}


class TestComparisons:
    def test_another_driver_is_used_last(self, fleet):
        verdict = judge(fleet(4, {"n2": {"driver": "550.54.15"}}), 3, 1)
        assert verdict.ok and verdict.avoid == ("n2",)
        assert "n2: gpu.driver.differs: gpu.driver is 550.54.15, on 3 of 4 nodes 570.124.06" in verdict.warnings

    def test_a_slower_gpu_is_used_last(self, fleet):
        verdict = judge(fleet(4, {"n2": {"gpus": {"5": {"max_clock_mhz": 1200}}},
                                  "n3": {"gpu": {"power_limit_w": 500.0}, "driver": "550"}}), 2, 2)
        assert verdict.avoid == ("n3", "n2")            # the one with more against it first

    def test_another_model_stays_out(self, fleet):
        nodes = fleet(4, {"n4": {"gpu": {"name": "NVIDIA H200"}}}, expected=replace(H100X8, gpu_kind=None))
        verdict = judge(nodes, 3)
        assert verdict.ok and verdict.excluded["n4"].checks[0].name == "gpu.model.differs"

    def test_without_a_majority_nobody_is_blamed(self, fleet):
        other = {"gpu": {"name": "NVIDIA H200"}}
        verdict = judge(fleet(4, {"n3": other, "n4": other}, expected=replace(H100X8, gpu_kind=None)), 4)
        assert not verdict.ok and not verdict.excluded and "disagree without a majority" in verdict.critical[0]

    @pytest.mark.parametrize("name", ["lib.versions", "env.communication"])
    def test_each_entry_of_a_mapping(self, name):
        def node(value):
            return [ok(name, {"torch": "2.13.0", **value})]

        verdict = judge({"n1": node({}), "n2": node({"torch": "2.12.0"}), "n3": node({}), "n4": node({"ray": "2"})},
                        2)
        told = {node: exclusion.reason for node, exclusion in verdict.excluded.items()}
        assert told["n2"] == f"{name}.differs: {name} torch is 2.12.0, on 3 of 4 nodes 2.13.0"
        assert told["n4"] == f"{name}.differs: {name} ray is 2, on 3 of 4 nodes not set"

    def test_loopback_between_hosts(self):
        def node(host, address):
            return [ok("net.host", host), ok("net.interface", {"name": "lo", "address": address,
                                                               "loopback": address.startswith("127")})]

        one_host = {f"n{index}": node("a", "127.0.0.1") for index in range(3)}
        assert judge(one_host, 3).ok                     # simulated nodes share a host
        hosts = {f"n{index}": node(str(index), "127.0.0.1" if index == 1 else f"10.0.0.{index}")
                 for index in range(3)}
        assert set(judge(hosts, 2).excluded) == {"n1"}

    def test_the_slow_one(self):
        nodes = {f"n{index}": [ok("fs.round_trip", seconds)] for index, seconds in enumerate((0.1, 0.2, 9.0, 0.1))}
        assert judge(nodes, 3, 1).avoid == ("n2",)
        assert judge({node: [ok("fs.round_trip", 0.01)] for node in nodes}, 4).avoid == ()

    def test_a_warning_that_all_have_ranks_nobody(self):
        everywhere = warning("limit.nofile", 20000, "20,000 open files", "raise it")
        nodes = {"n1": [everywhere], "n2": [everywhere, warning("gpu.pcie", 8, "8 lanes", "reseat")],
                 "n3": [everywhere]}
        assert judge(nodes, 2, 1).avoid == ("n2",)


class TestWithALedger:
    @pytest.fixture
    def ledger(self, tmp_path):
        return Ledger(tmp_path / "ledger.json", cluster_nodes=8)

    def test_recorded_with_evidence_and_kept_out_next_time(self, fleet, ledger):
        verdict = judge(fleet(4, {"n2": LOST}), 3, 1, ledger)
        record(verdict, ledger, {"n2": "attempts/1/nodes/n2/preflight.json"}, "7")
        [entry] = ledger.entries()
        assert (entry.node, entry.kind, entry.job, entry.evidence) == (
            "n2", "gpu.count", "7", "attempts/1/nodes/n2/preflight.json")
        again = judge(fleet(4), 3, 1, ledger)                   # it came back and looks healthy
        assert again.accepted == ("n1", "n3", "n4") and again.excluded["n2"].from_ledger
        assert "job 7, attempts/1/nodes/n2/preflight.json" in again.excluded["n2"].reason
        record(again, ledger, {}, "8")                          # what the ledger says is no new evidence
        assert len(ledger.entries()) == 1
        assert judge(fleet(4), 3, 1, ledger, now=entry.expires + 1).accepted == ("n1", "n2", "n3", "n4")

    @pytest.mark.parametrize("fault, recorded", [
        ({"used_bytes": 2 ** 34, "processes": [{"pid": 2 ** 22 + 1, "memory_bytes": 2 ** 34}]}, set()),
        ({"used_bytes": 2 ** 34}, {"gpu.memory"}),                      # what a dead process left: a reset is needed
        ({"used_bytes": 2 ** 34, "processes": [2 ** 22 + 1], "ecc_uncorrected": 4}, {"gpu.ecc"})])
    def test_a_node_that_another_job_uses_is_refused_and_not_remembered(self, fleet, ledger, fault, recorded):
        verdict = judge(fleet(4, {"n2": {"gpus": {"3": fault}}}), 3, 1, ledger)
        record(verdict, ledger, {"n2": "preflight.json"}, "7")
        assert set(verdict.excluded) == {"n2"} and {entry.kind for entry in ledger.entries()} == recorded
        assert judge(fleet(4), 4, 0, ledger).ok and (judge(fleet(4), 3, 1, ledger).excluded == {}) == (not recorded)

    def test_too_few_would_remain(self, fleet, ledger):
        ledger.add("n2", "gpu.ecc", "e.json", "7")
        verdict = judge(fleet(4), 4, 0, ledger)
        assert verdict.ok and len(verdict.accepted) == 4 and verdict.avoid == ("n2",)
        assert "too few nodes remain" in verdict.warnings[0]

    def test_suspicion_is_used_last(self, fleet, ledger):
        ledger.add("n3", "crash", "", "7")
        verdict = judge(fleet(4), 3, 1, ledger)
        assert verdict.avoid == ("n3",) and not verdict.excluded

    def test_over_the_cap(self, fleet, ledger):
        for index in range(1, 5):
            ledger.add(f"n{index}", f"reason {index}", "e.json", "7", now=float(index))
        verdict = judge(fleet(8), 2, 2, ledger, now=10.0)
        assert set(verdict.excluded) == {"n3", "n4"} and ledger.cap == 2
        assert sum("at most 2 nodes are excluded automatically" in line for line in verdict.warnings) == 2


def test_findings_of_the_job_itself(fleet):
    problem = critical("paths.run_dir", None, "cannot write /runs: Permission denied", "set run.dir")
    verdict = judge(fleet(2), 2, job=[problem])
    assert not verdict.ok and not verdict.excluded and verdict.critical == (
        "paths.run_dir: cannot write /runs: Permission denied",)
    assert judge({}, 0, job=[ok("config.valid")]).ok


SEVERITIES = st.sampled_from(["ok", "ok", "ok", "warning", "critical"])


@given(st.integers(1, 12).flatmap(lambda count: st.tuples(
    st.lists(st.lists(SEVERITIES, min_size=3, max_size=3), min_size=count, max_size=count), st.integers(1, count),
    st.integers(0, 3))))
@settings(max_examples=80, deadline=None)
def test_properties(case):
    """Nobody is lost, nobody with a critical finding of his own takes part, one check never takes most of three."""
    rows, needed, spares = case
    nodes = {f"n{index}": [Check(f"gpu.{at}", severity, None, "seen", "act") for at, severity in enumerate(row)]
             for index, row in enumerate(rows)}
    verdict = judge(nodes, needed, spares)
    assert sorted([*verdict.accepted, *verdict.excluded]) == sorted(nodes)
    assert set(verdict.avoid) <= set(verdict.accepted)
    assert verdict.ok == (not verdict.site and len(verdict.accepted) >= needed)
    site = {check.name for check in verdict.site}
    for node in verdict.accepted:
        assert all(check.severity != "critical" or check.name in site for check in nodes[node])
    for at in range(3):
        blamed = [node for node, exclusion in verdict.excluded.items()
                  if f"gpu.{at}" in {check.name for check in exclusion.checks}]
        assert len(nodes) < 3 or len(blamed) <= len(nodes) / 2
    assert json.loads(json.dumps(verdict.to_json()))["accepted"] == list(verdict.accepted)
