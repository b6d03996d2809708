"""`sbatch slurm/grpo_70b.sbatch run.rehearse=true` on 32 nodes of a real Slurm: everything of the job but the GPU work.

What the processes say is held against Slurm (which node is under which leaf, which GPUs a node has) and against
Megatron's rank order, computed here; only then against the placement.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from launch import processes
from launch.run.node_files import NodeFiles
from launch.runtime.ray_node import FOR_MANY_NODES
from launch.runtime.workloads.train import TOKEN_FILE
from tests.launcher_stub import VARIABLES
from tests.slurm.rehearsing import SCRIPT_7B, SCRIPT_70B, Rehearsed, rehearse, rehearsed
from tests.slurm_cluster import REPOSITORY

WHOLE_LEAVES = ("trainer.tp=8", "trainer.pp=2", "trainer.cp=1", "trainer.dp=8", "rollout.tp=4", "rollout.replicas=32")
"""16 nodes for each partition: two leaves of eight."""


@pytest.fixture(scope="module")
def full(slurm, tmp_path_factory) -> Rehearsed:
    return rehearse(slurm, tmp_path_factory.mktemp("full"), SCRIPT_70B, *WHOLE_LEAVES)


def trainer(said: dict) -> int | None:
    role, _, number = said["process"].partition("-")
    return int(number) if role == "trainer" else None


def test_256_processes_of_their_own_each_on_a_gpu_of_its_own(full):
    assert len(full.said) == 256 and full.state["ExitCode"] == "0:0"
    assert {trainer(said) for said in full.said} - {None} == set(range(128))
    assert len({said["pid"] for said in full.said}) == 256, "all of them on this host, and alive at the same time"
    assert max(Counter((said["node"], said["gpu"]) for said in full.said).values()) == 1
    assert {said["node"] for said in full.said} == {f"h100-{number:03d}" for number in range(1, 33)}
    assert {said["gpu"] for said in full.said} == set(range(8))


def test_so_many_nodes_take_no_more_questions_than_two(full):
    """And the step: at most three RPCs at start."""
    assert len(json.loads((full.attempt.folder / "slurm-calls.json").read_text())) <= 2


def test_tp_groups_and_engines_lie_inside_a_node(full):
    groups = defaultdict(set)
    for said in full.said:
        rank = trainer(said)
        groups[said["process"].partition(".")[0] if rank is None else rank // 8].add(said["node"])
    assert len(groups) == 16 + 32 and {len(nodes) for nodes in groups.values()} == {1}


def test_ranks_that_meet_across_nodes_are_on_one_rail(full):
    """rank = tp + 8 (dp + 8 pp): DP groups and neighbouring stages share tp."""
    rails = defaultdict(set)
    for said in full.said:
        if (rank := trainer(said)) is not None:
            rails[rank % 8].add((said["gpu"], said["nic"]))
    assert len(rails) == 8 and {len(found) for found in rails.values()} == {1}


def test_partitions_are_on_whole_leaves(full, slurm):
    leaf_of = {}
    for line in slurm.run("scontrol", "show", "topology").stdout.splitlines():
        words = dict(word.split("=") for word in line.split())
        if words["Level"] == "0":
            for name in slurm.run("scontrol", "show", "hostnames", words["Nodes"]).stdout.split():
                leaf_of[name] = words["SwitchName"]
    leaves = defaultdict(set)
    for said in full.said:
        leaves[leaf_of[said["node"]]].add(said["process"].partition("-")[0])
    assert sorted(map(sorted, leaves.values())) == [["rollout"], ["rollout"], ["trainer"], ["trainer"]]
    assert all(entry["leaf"] == leaf_of[node] for node, entry in full.report["nodes"].items())


def test_every_process_was_started_with_its_environment(full):
    for said in full.said:
        variables = said["environment"]
        assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" and variables["MEGATRON_RL_NODE"] == said["node"]
        assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == ("1" if trainer(said) is not None else "32")
        assert len(variables["CUDA_VISIBLE_DEVICES"].split(",")) == (1 if trainer(said) is not None else 4)
        assert variables["NCCL_IB_HCA"] == "=" + ",".join(f"mlx5_{rail}" for rail in range(8)), "by exact names"
    assert not any("NCCL_CUMEM_ENABLE" in said["environment"] for said in full.said), "NVLS needs cuMem"


def test_the_report_is_the_placement(full):
    placement = full.attempt.placement()
    told = {each["process"]: (node, each["gpu"]) for node, entry in full.report["nodes"].items()
            for each in entry["processes"]}
    wanted = {f"trainer-{rank.rank}": (rank.node, rank.gpu) for rank in placement.training}
    wanted |= {f"rollout-{engine.replica}.{number}": (engine.node, gpu)
               for engine in placement.rollout for number, gpu in enumerate(engine.gpus)}
    assert told == wanted and full.report["ok"] and all(not check["findings"] for check in full.report["checks"])


def test_the_report_is_printed_and_says_what_a_user_wants_to_know(full):
    text = (full.attempt.folder / "rehearsal.txt").read_text()
    assert text.strip() in full.output
    assert "256 processes on 32 nodes" in text and "no leaf: each belongs to one partition" in text
    assert full.outcome.status == "finished"


def test_the_report_tells_the_asynchrony_and_the_rates_of_the_plan(full):
    """As the job would run: the template's `auto`, with the bound that its plan derives."""
    plan, config = full.attempt.plan(), full.attempt.config()
    bound, forecast = plan.chosen["algorithm.max_staleness"], plan.forecast
    assert forecast.asynchronous and bound == config.algorithm.max_staleness > 0
    assert bound == math.ceil(forecast.rollout.longest_s / forecast.step_s)
    assert full.report["run"] == {"max_staleness": bound, "swap": "in_flight", "step_s": forecast.step_s,
                                  "prompts_per_hour": forecast.throughput.nominal}
    text = " ".join((full.attempt.folder / "rehearsal.txt").read_text().split())
    assert f"asynchronous: samples are at most {bound} versions old, rollout.swap in_flight" in text
    assert f"{forecast.throughput.nominal:,.0f} prompts/h" in text


def test_two_gpus_exchanged_on_one_node_fail_the_rehearsal(slurm, tmp_path):
    found = rehearse(slurm, tmp_path, SCRIPT_7B, ends="FAILED", variables={"MEGATRON_RL_FAULT_SWAP": "h100-001:0:5"})
    assert found.state["ExitCode"] == "5:0" and not found.report["ok"]
    swapped = {said["process"] for said in found.said if said["node"] == "h100-001" and said["gpu"] in (0, 5)}
    named = {finding["process"] for check in found.report["checks"] if check["name"] == "GPU as placed"
             for finding in check["findings"]}
    assert named == swapped and len(named) == 2
    assert all(name in found.output for name in named) and "h100-001 GPU 5" in found.output


def test_a_user_rehearses_with_launch(slurm, tmp_path):
    answer = slurm.run("python3", "-m", "launch", "launch", "configs/7b/grpo.yaml", "--on", "slurm", "--time", "30:00",
                       "run.rehearse=true", f"run.dir={tmp_path}/runs", timeout_s=60)
    assert answer.stdout.strip().isdecimal(), "the job's id alone"
    found = rehearsed(slurm, int(answer.stdout), tmp_path)
    assert found.report["ok"] and len(found.said) == 16


def test_a_job_asks_the_controller_at_most_three_times_whatever_its_number_of_nodes(slurm, full, tmp_path):
    """By the controller's own count. The other job has a time limit below the margin of training, which a rehearsal
    does not need."""
    small = rehearse(slurm, tmp_path, SCRIPT_7B, options=("--time=5",))
    assert len(small.report["nodes"]) == 2 and small.report["ok"]
    assert full.asked == small.asked and 0 < sum(full.asked.values()) <= 3, full.asked


def test_a_time_limit_that_the_margin_takes_up_is_refused_with_the_sum(slurm, tmp_path):
    job = slurm.submit("--time=2", f"--output={tmp_path}/log", SCRIPT_7B, f"run.dir={tmp_path}/runs",
                       "algorithm.max_staleness=0", variables=VARIABLES)
    assert slurm.wait_for(job, "FAILED")["ExitCode"] == "2:0"
    said = slurm.output(job)
    assert "the time limit 00:02:00 leaves" in said and "it would stop at once; a stop needs" in said
    assert "(checkpoint," in said and "GB/s) + 60 s =" in said and "sbatch --time" in said


def test_ray_comes_up_as_on_many_nodes_and_leaves_nothing(slurm, tmp_path):
    """Eight nodes have the settings of thirty-two."""
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text((REPOSITORY / "configs/clusters/h100x32.yaml").read_text().replace(
        "count: 32", "count: 8").replace("[001-032]", "[001-008]"))
    sizes = ("trainer.tp=4", "trainer.pp=1", "trainer.cp=1", "trainer.dp=4", "rollout.tp=4", "rollout.replicas=12")
    found = rehearse(slurm, tmp_path, SCRIPT_7B, "run.rehearse=ray", f"cluster={cluster}", *sizes,
                     options=("--nodes=8",))
    nodes = found.attempt.placement().nodes
    assert found.report["ok"] and found.report["ray"]["found"] == {node: node for node in nodes} and len(nodes) == 8
    assert "8 nodes counted after" in found.output and "ok     an actor on every Ray node: 8 of 8" in found.output
    folders = set()
    for node in nodes:
        told = NodeFiles(found.attempt, node).log.read_text()
        assert all(f"{name}={value}" in told for name, value in FOR_MANY_NODES.items())
        folders.add(Path(told.partition("Ray in ")[2].partition(",")[0]))
    assert len(folders) == 8 and not [folder for folder in folders if folder.exists()]
    assert not (found.attempt.folder / TOKEN_FILE).exists() and processes.marked(found.attempt.mark) == []


def test_variables_that_srun_obeys_do_not_bend_the_step(slurm, tmp_path):
    """Any of these, left by the user or by an option of sbatch, would fail the step or move it elsewhere."""
    found = rehearse(slurm, tmp_path, SCRIPT_7B, variables={
        "SLURM_EXACT": "1", "SLURM_STDOUTMODE": "/not/there/log",
        "SLURM_MPI_TYPE": "no_such_plugin", "SLURM_NTASKS_PER_CORE": "0", "SLURM_REMOTE_CWD": "/not/there",
        "SLURM_CONSTRAINT": "no_such_feature", "SLURM_GPUS_PER_TASK": "3", "SLURM_TASK_PROLOG": "/not/there"})
    assert found.report["ok"] and len(found.said) == 16
