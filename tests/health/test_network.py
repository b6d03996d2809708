"""The fabric tier: a real measurement by gloo between processes, its schedule, and the judgement of what it found."""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import replace

import pytest

from launch import envvars, processes
from launch.cluster.file import load_cluster
from launch.config.load import load_config
from launch.health import network
from launch.health.check import worst
from launch.health.network import Member, Pair, Result, Task, judge_network, rounds
from launch.health.verdict import judge
from launch.ports import allocate
from tests.health.conftest import named
from tests.patience import patient

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
NODES = ("a", "b", "c", "d")


@pytest.mark.parametrize("count", range(1, 10))
def test_every_pair_once_and_nobody_in_two_at_a_time(count):
    found = rounds(count)
    assert sorted(itertools.chain(*found)) == list(itertools.combinations(range(count), 2))
    for disjoint in found:
        assert len(set(itertools.chain(*disjoint))) == 2 * len(disjoint)
    assert len(found) == (count - 1 if count % 2 == 0 else count)


def measured(slow: dict[tuple[str, str], float], **others) -> Result:
    pairs = tuple(Pair(pair, slow.get(pair, 45e9)) for pair in itertools.combinations(NODES, 2))
    return Result(2 ** 28, 0.01, pairs, members=32, **others)


class TestJudgement:
    def test_all_well(self):
        found = judge_network(measured({}), NODES, 50e9)
        assert all(worst(checks) == "ok" for checks in found.values())
        told = named(found["a"], "fabric.allreduce").evidence
        assert "bus bandwidth 52 GB/s" in told          # 2 x 31/32 x 268 MB / 10 ms

    @pytest.mark.parametrize("rate, severity", [(10e9, "critical"), (30e9, "warning")])
    def test_a_slow_node(self, rate, severity):
        """All pairs of a node are slow: the node is, and its partners are not blamed."""
        result = measured({pair: rate for pair in itertools.combinations(NODES, 2) if "b" in pair})
        found = judge_network(result, NODES, 50e9)
        assert named(found["b"], "fabric.bandwidth").severity == severity
        assert [node for node in NODES if worst(found[node]) != "ok"] == ["b"]
        verdict = judge(found, 3, 1)
        assert (set(verdict.excluded) == {"b"}) == (severity == "critical") and verdict.ok

    def test_a_slow_node_without_a_plan(self):
        """Slower than the others: used last."""
        result = measured({pair: 10e9 for pair in itertools.combinations(NODES, 2) if "b" in pair})
        assert judge(judge_network(result, NODES), 3, 1).avoid == ("b",)

    def test_a_slow_path(self):
        found = judge_network(measured({("a", "c"): 5e9}), NODES, 50e9)
        assert named(found["a"], "fabric.path").severity == "warning" and "5 GB/s to c" in named(
            found["a"], "fabric.path").evidence
        assert named(found["a"], "fabric.bandwidth").severity == "ok" and worst(found["c"]) == "ok"

    def test_everything_is_slow(self):
        """Then it is the plan's expectation or the fabric: nobody is excluded, and the job does not start."""
        verdict = judge(judge_network(measured({}), NODES, 200e9), 4)
        assert not verdict.ok and not verdict.excluded
        assert [check.name for check in verdict.site] == ["fabric.bandwidth"]

    def test_damaged_data_and_absent_members(self):
        found = judge_network(measured({}, wrong={"c": "data from a arrived wrong"}), NODES, 50e9)
        assert named(found["c"], "fabric.data").severity == "critical"
        found = judge_network(Result(0, 0.0, errors={"d": "d did not come within 60 s"}), NODES)
        assert named(found["d"], "fabric.joined").severity == "critical" and found["a"] == []

    def test_what_the_plan_expects(self):
        assert network.expected_bytes_per_s(load_cluster("configs/clusters/h100x32.yaml")) == 50e9


def test_files(tmp_path):
    assert Task.read(tmp_path) is None and Result.read(tmp_path) is None
    task = Task((Member("a", 0, "10.0.0.1"), Member("b", None, "10.0.0.2")), "gloo", 23456, {"a": ("mlx5_0", "mlx5_1")})
    task.write(tmp_path)
    result = measured({}, wrong={"c": "damaged"})
    result.write(tmp_path)
    assert Task.read(tmp_path) == task and Result.read(tmp_path) == result
    assert json.loads((tmp_path / "fabric" / "result.json").read_text())["schema_version"] == 1


def test_it_measures_with_the_environment_of_the_job(run_yaml):
    """NCCL over other NICs is not the fabric that the job will use, and without cuMem it has no NVLS."""
    nics = {"b": tuple(f"mlx5_{rail}" for rail in range(8))}
    task = Task((Member("a", 3, "10.0.0.1"), Member("b", 5, "10.0.0.2")), "nccl", 23456, nics)
    found = network.variables(task, task.members[1], "bond0", "runs/r/attempts/1")
    rank = envvars.environment("trainer", "gpu", load_config(run_yaml).config, job="runs/r/attempts/1", gpus=(5,),
                               interface="bond0", address="10.0.0.2", nics=nics["b"])
    assert found == {**rank, envvars.NODE: "b"}
    assert found["NCCL_IB_HCA"] == "=" + ",".join(nics["b"]) and "NCCL_CUMEM_ENABLE" not in found
    assert "NCCL_IB_HCA" not in network.variables(task, task.members[0], "bond0", "")


def run(task: Task, folder, ranks) -> list[int | None]:
    """Real processes, as supervisors start them; their exit codes."""
    task.write(folder)
    children = [processes.start(f"fabric-{rank}", network.command(folder, rank), log=folder / f"{rank}.log",
                                environment={**envvars.inherited(),
                                             **network.variables(task, task.members[rank], "lo", "tests")})
                for rank in ranks]
    try:
        return [child.wait(patient(90)) for child in children]
    finally:
        for child in children:
            child.end()


@needs_torch
@pytest.mark.slow
class TestForReal:
    @pytest.fixture
    def task(self):
        ports = allocate(5, address="127.0.0.1")
        yield Task(tuple(Member(node, None, "127.0.0.1") for node in ("a", "a", "b", "b")), "gloo", ports.rendezvous,
                   allreduce_bytes=2 ** 20, pair_bytes=2 ** 18, repeats=2, timeout_s=patient(60.0))
        ports.release()

    def test_two_nodes_of_two_members(self, task, tmp_path):
        assert run(task, tmp_path, range(4)) == [0, 0, 0, 0], (tmp_path / "0.log").read_text()
        result = Result.read(tmp_path)
        assert [pair.nodes for pair in result.pairs] == [("a", "b")] and result.members == 4
        assert 1e6 < result.pairs[0].bytes_per_s < 1e12 and 1e6 < result.bus_bytes_per_s < 1e12
        assert not result.wrong and not result.errors
        assert worst(judge_network(result, ("a", "b"))["a"]) == "ok"

    def test_who_does_not_come_is_named(self, task, tmp_path):
        three = tuple(Member(node, None, "127.0.0.1") for node in ("a", "b", "c"))
        assert run(replace(task, members=three, timeout_s=patient(8.0)), tmp_path, (0, 1)) == [1, 1]
        errors = Result.read(tmp_path).errors
        assert list(errors) == ["c"] and "c#2 did not come" in errors["c"]


@needs_torch
def test_an_error_that_names_nobody_blames_nobody():
    from megatron_rl.network_check import _blamed

    task = Task(tuple(Member(node, None, "") for node in NODES for _ in range(2)), "gloo", 1)
    errors = _blamed(task, RuntimeError("Connection closed by peer [10.0.0.3]:4711\nat pair.cc"))
    assert errors == dict.fromkeys(NODES, "Connection closed by peer [10.0.0.3]:4711")
    verdict = judge(judge_network(Result(0, 0.0, errors=errors), NODES), 4)
    assert not verdict.ok and not verdict.excluded and [check.name for check in verdict.site] == ["fabric.joined"]


@needs_torch
def test_damage_is_seen():
    """One flipped bit in what arrived."""
    import torch

    from megatron_rl.network_check import _Member

    member = _Member(Task((Member("a", None, ""), Member("b", None, "")), "gloo", 1), 0, torch.device("cpu"))
    right_N = member._pattern_N(1, 1000)
    member._compare(right_N.clone(), right_N, "data from b")
    assert member.wrong == ""
    damaged_N = right_N.clone()
    damaged_N.view(torch.int32)[17] ^= 1 << 3
    member._compare(damaged_N, right_N, "data from b")
    assert member.wrong == "data from b arrived wrong in 1 of 1,000 elements"
