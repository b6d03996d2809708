"""The comparison of a rehearsal with its placement, on what processes might say. The plan is that of the 70B template:
TP 8 x PP 2 x DP 9 on 18 nodes, 28 engines of four GPUs on 14."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from launch import envvars
from launch.plan.plan import Placement, Plan
from launch.planner.prepare import prepare
from launch.planner.seats.cluster import bind
from launch.ports import Ports
from launch.report.run import rehearsal_table as table
from launch.run import faults
from launch.run.attempts import Attempt
from launch.runtime.places import PlacedProcess, places, variables
from launch.runtime.rehearsal import (
    Comparison,
    RankReport,
    RayReport,
    compare,
    conclude,
    node_file,
    ray_nodes,
    to_document,
)
from launch.runtime.workloads.rank_report import END, entry_of
from launch.runtime.workloads.rehearse import SCRIPT, report_of
from tests.slurm_cluster import REPOSITORY

MARK = "/runs/x/attempts/1"


@pytest.fixture(scope="module")
def prepared():
    return prepare(str(REPOSITORY / "configs/70b/grpo.yaml"),
                   ["trainer.tp=8", "trainer.pp=2", "trainer.cp=1", "trainer.dp=9", "rollout.tp=4",
                    "rollout.replicas=28", f"cluster={REPOSITORY}/configs/clusters/h100x32.yaml"])


@pytest.fixture(scope="module")
def placement(prepared) -> Placement:
    seating = prepared.seating
    return bind(seating, prepared.plan.fingerprint(), 1,
                {node: "10.0.0.1" for node in (*seating.training_nodes, *seating.rollout_nodes)}, Ports(12288))


@pytest.fixture(scope="module")
def given(prepared, placement) -> dict[str, dict[str, str]]:
    return {place.process: variables(place, prepared.config, placement, "gpu", MARK)
            for place in places(placement)}


def as_placed(place: PlacedProcess, environment: dict[str, str]) -> RankReport:
    leaf = (int(place.node.rpartition("-")[2]) - 1) // 8 + 1 if place.node.rpartition("-")[2].isdecimal() else 0
    return RankReport(place.process, place.node, place.gpu, place.nic, host="sim", pid=1000,
                  switches=f"core.spine[1-2].leaf{leaf}.{place.node}", environment=envvars.recordable(environment))


@pytest.fixture(scope="module")
def reports(placement, given) -> list[RankReport]:
    return [as_placed(place, given[place.process]) for place in places(placement)]


def wrong(plan: Plan, placement: Placement, reports: Sequence[RankReport], given) -> dict[str, Comparison]:
    return {check.name: check for check in compare(plan, placement, reports, given) if check.findings}


def test_processes_where_they_belong(prepared, placement, reports, given):
    checks = {check.name: check for check in compare(prepared.plan, placement, reports, given)}
    assert {check.held - check.asked for check in checks.values()} == {0}
    assert checks["each process once"].asked == 256 and checks["no GPU taken twice"].asked == 256
    assert checks["TP groups and engines inside a node"].asked == 2 * 9 + 28
    assert checks["rails aligned"].asked == 8 * 2 + 8 * 9, "8 x 2 DP groups, and 8 x 9 pairs of stages between nodes"


def test_two_gpus_exchanged_on_one_node(prepared, placement, reports, given):
    one, other = placement.training[40], placement.training[43]
    assert one.node == other.node
    swap = {one.rank: other.gpu, other.rank: one.gpu}
    said = [replace(report, gpu=swap[int(report.process.partition("-")[2])])
            if report.process in ("trainer-40", "trainer-43") else report for report in reports]
    found = wrong(prepared.plan, placement, said, given)
    assert set(found) == {"GPU as placed", "rails aligned"}
    assert [finding.process for finding in found["GPU as placed"].findings] == ["trainer-40", "trainer-43"]
    assert found["GPU as placed"].findings[0].found == f"{one.node} GPU {other.gpu}"
    assert found["GPU as placed"].findings[0].placed == f"{one.node} GPU {one.gpu}"


def test_an_actor_on_another_node_than_its_own_and_one_nowhere(placement):
    found = {node: node for node in placement.nodes}
    one, other, third = placement.nodes[:3]
    assert ray_nodes(placement, RayReport(1.0, 1.0, found)).findings == ()
    check = ray_nodes(placement, RayReport(1.0, 1.0, {**found, one: other, third: "nowhere"}))
    assert [(each.process, each.placed, each.found) for each in check.findings] == [
        (f"actor on {one}", one, other), (f"actor on {third}", third, "nowhere")]
    del found[third]
    assert ray_nodes(placement, RayReport(1.0, 1.0, found)).held == len(placement.nodes) - 1


def test_a_process_that_did_not_report_and_one_that_nobody_asked_for(prepared, placement, reports, given):
    said = [*reports[:-1], replace(reports[0], process="trainer-999", gpu=None)]
    (check,) = wrong(prepared.plan, placement, said, given).values()
    assert [(each.process, each.found) for each in check.findings] == [(reports[-1].process, "no report"),
                                                                      ("trainer-999", "reported")]


def test_a_process_that_reported_twice(prepared, placement, reports, given):
    found = wrong(prepared.plan, placement, [*reports, reports[7]], given)
    assert found["each process once"].findings[0].found == "2 times" and "no GPU taken twice" in found


def test_a_rank_on_another_node_breaks_its_tp_group(prepared, placement, reports, given):
    other = placement.nodes[-1]
    said = [replace(report, node=other) if report.process == "trainer-3" else report for report in reports]
    found = wrong(prepared.plan, placement, said, given)
    assert {"node as placed", "GPU as placed", "no GPU taken twice"} <= set(found)
    assert found["TP groups and engines inside a node"].findings[0].process == "TP group cp0 dp0 pp0"


def test_two_processes_on_one_gpu(prepared, placement, reports, given):
    said = [replace(report, gpu=0) if report.process == "rollout-5.2" else report for report in reports]
    assert {"GPU as placed", "no GPU taken twice"} <= set(wrong(prepared.plan, placement, said, given))


@pytest.mark.parametrize("change", [{"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {"CUDA_DEVICE_ORDER": None}])
def test_a_variable_that_did_not_arrive(prepared, placement, reports, given, change):
    environment = {**reports[9].environment, **change}
    environment = {name: value for name, value in environment.items() if value is not None}
    said = [replace(report, environment=environment) if report is reports[9] else report for report in reports]
    (check,) = wrong(prepared.plan, placement, said, given).values()
    assert check.name == "environment as set" and check.findings[0].process == reports[9].process
    assert next(iter(change)) in check.findings[0].found


def test_a_wrong_nic(prepared, placement, reports, given):
    said = [replace(report, nic=5) if report is reports[0] else report for report in reports]
    assert set(wrong(prepared.plan, placement, said, given)) == {"NIC as placed"}


def test_the_report_names_every_process_and_fits_the_terminal(prepared, placement, reports, given):
    checks = compare(prepared.plan, placement, reports, given)
    document = json.loads(json.dumps(to_document(placement, reports, checks)))
    told = {each["process"]: (node, each["gpu"], each["nic"]) for node, entry in document["nodes"].items()
            for each in entry["processes"]}
    assert told == {place.process: (place.node, place.gpu, place.nic) for place in places(placement)} and document["ok"]
    text = table.text(document)
    assert max(map(len, text.splitlines())) <= 100
    assert "ranks 0-7 on GPUs 0-7" in text and "are where the placement wants them" in text
    assert document["environment"]["trainer"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert document["environment"]["rollout"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


@pytest.mark.parametrize("word, says", [
    ("algorithm.max_staleness=auto", "asynchronous: samples are at most 4 versions old, rollout.swap in_flight"),
    ("algorithm.max_staleness=0", "synchronous")])
def test_the_result_tells_how_the_job_would_roll_out_and_the_rates_of_its_plan(tmp_path, placement, word, says):
    made = prepare(str(REPOSITORY / "configs/70b/grpo.yaml"),
                   ["trainer.tp=8", "trainer.pp=2", "trainer.cp=1", "trainer.dp=9", "rollout.tp=4", word,
                    "rollout.replicas=28", f"cluster={REPOSITORY}/configs/clusters/h100x32.yaml"])
    attempt = Attempt(tmp_path / "attempts/1")
    attempt.folder.mkdir(parents=True)
    attempt.write(made.loaded.config, made.plan, placement, {})
    for node in placement.nodes:
        said = [as_placed(place, variables(place, made.config, placement, "gpu", attempt.mark))
                for place in places(placement) if place.node == node]
        node_file(attempt, node).parent.mkdir(parents=True)
        node_file(attempt, node).write_text(json.dumps(list(map(asdict, said))))
    assert conclude(attempt).status == "finished"
    forecast = made.plan.forecast
    assert json.loads((attempt.folder / "rehearsal.json").read_text())["run"] == {
        "max_staleness": made.config.algorithm.max_staleness, "swap": "in_flight", "step_s": forecast.step_s,
        "prompts_per_hour": forecast.throughput.nominal}
    text = " ".join((attempt.folder / "rehearsal.txt").read_text().split())
    assert f"rollouts {says}; planned: a step of" in text and f"{forecast.throughput.nominal:,.0f} prompts/h" in text


def test_an_engine_is_one_process_a_gpu_and_all_see_all_of_its_gpus(placement):
    mine = [place for place in places(placement) if place.process.startswith("rollout-3.")]
    engine = placement.rollout[3]
    assert [place.process for place in mine] == [f"rollout-3.{number}" for number in range(4)]
    assert {place.visible for place in mine} == {engine.gpus} and [place.gpu for place in mine] == list(engine.gpus)


def test_a_process_tells_what_it_was_started_with():
    child = subprocess.Popen([sys.executable, "-I", "-S", str(SCRIPT), "rollout-0.1", "1"], stdout=subprocess.PIPE,
                             env={"CUDA_VISIBLE_DEVICES": "4,7", "MEGATRON_RL_NICS": "2,3", "SLURMD_NODENAME": "n1",
                                  "RAY_API_TOKEN": "s3cret\nin two lines", "HOME": "/root"})
    said = b""
    while not said.endswith(END):
        said += os.read(child.stdout.fileno(), 65536)
    child.terminate()
    child.wait(5)
    report = report_of(said)
    assert (report.process, report.node, report.gpu, report.nic) == ("rollout-0.1", "n1", 7, 3)
    assert report.pid == child.pid and report.environment["CUDA_VISIBLE_DEVICES"] == "4,7"
    assert report.environment["RAY_API_TOKEN"] == "***" and "HOME" not in report.environment


@pytest.mark.parametrize(("listed", "entry"), [("", ""), ("3", "3"), ("3,-1,5", "3"), ("GPU-1", "")])
def test_the_gpu_is_read_as_cuda_reads_it(listed, entry):
    assert entry_of(listed, 0) == entry and entry_of(listed, 2) == ""


def test_the_fault_exchanges_two_gpus_of_one_node(monkeypatch):
    monkeypatch.setenv(faults.SWAP, "n1:1:3")
    assert faults.swapped("n1", (0, 1, 2, 3)) == (0, 3, 2, 1) and faults.swapped("n2", (1, 3)) == (1, 3)
    assert faults.swapped("n1", (3,)) == (1,)
