"""`megatron-rl sync bench` and what it stands on: members that die or hang are named, weights of one version are the
same on whoever holds them, measured and predicted meet edge by edge."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from launch.coefficients.sync import DEFAULT
from launch.errors import UserError
from launch.fabric.lanes import Fabric, Place, traffic
from launch.fabric.routes import build
from launch.fabric.seated import Seats
from launch.fabric.simulate import arrivals
from launch.plan.layouts import RolloutLayout, TrainingLayout
from launch.planner.prepare import prepare
from megatron_rl.layouts.digest import digest_layouts
from megatron_rl.layouts.megatron import megatron_layout
from megatron_rl.layouts.tiles import ParamLayout, Tile, contiguous_stride, tile_view
from megatron_rl.sync_bench.check import check
from megatron_rl.sync_bench.compare import LaneSpeed, edges, found_coefficients
from megatron_rl.sync_bench.members import Host, MemberError, Members, together
from megatron_rl.sync_bench.rank import fill
from megatron_rl.weight_sync.protocol import SyncReport
from tests.fabric.cases import SMALL
from tests.patience import patient
from tests.weight_sync.worlds import architecture, training_plan

ROOT = Path(__file__).parents[2]
HERE = Host("here")
ECHO = "tests.weight_sync.test_sync_bench:Echo"


class Echo:
    """A member's object."""

    def back(self, value):
        return value

    def slow(self, seconds: float):
        time.sleep(seconds)
        return "late"

    def fail(self):
        raise ValueError("no such thing")

    def die(self):
        os._exit(3)

    def say(self):
        print("a line", flush=True)
        return os.environ.get("SYNC_BENCH_TEST")


def test_members_answer_and_those_that_fail_die_or_hang_are_named(tmp_path):
    async def calls(members: Members) -> None:
        first = members.start("first", HERE, ECHO, variables={"SYNC_BENCH_TEST": "set"})
        second = members.start("second", HERE, ECHO)
        assert await together([first.call("back", 1), second.call("back", {"x": 2})]) == [1, {"x": 2}]
        assert await first.call("say") == "set"
        with pytest.raises(MemberError, match="(?s)second, fail:.*ValueError: no such thing"):
            await together([first.call("back", 3), second.call("fail")])
        with pytest.raises(MemberError, match="first gave no answer to slow within 0.2 s"):
            await first.call("slow", 0.6, timeout_s=0.2)
        assert await first.call("back", 4) == 4             # not the late answer
        with pytest.raises(MemberError, match="second died in die, exit code 3"):
            await second.call("die")

    with Members((), tmp_path) as members:
        asyncio.run(calls(members))
        processes = [member._process for member in members._members]
    assert all(not process.is_alive() for process in processes)
    assert (tmp_path / "first.log").read_text() == "a line\n"


@pytest.mark.parametrize("tp, pp, dp", [(2, 2, 2), (4, 1, 1), (1, 2, 1)])
def test_weights_of_a_version_are_the_same_on_every_rank(tp, pp, dp):
    """Cut any way, the elements of a canonical tensor have the digest of the whole tensor."""
    a = architecture(ffn=24)
    training = training_plan(a, tp=tp, pp=pp, dp=dp)
    whole: dict[str, torch.Tensor] = {}

    def whole_tensor(tile: Tile, version: int) -> torch.Tensor:
        shape = tuple(start + extent for start, extent in zip(tile.start, tile.shape, strict=True))
        layout = ParamLayout("t", shape, (Tile(tile.tensor, (0,) * len(shape), shape, contiguous_stride(shape), 0),))
        values = {"t": torch.zeros(shape, dtype=torch.bfloat16)}
        fill([layout], values, version)
        return values["t"]

    for rank in range(training.world_size):
        layouts = megatron_layout(a, training, rank, "local")
        parameters = {layout.name: torch.zeros(layout.shape, dtype=torch.bfloat16) for layout in layouts}
        digests = []
        for version in (0, 1):
            fill(layouts, parameters, version)
            digests.append(digest_layouts(layouts, parameters))
        assert digests[0] != digests[1]
        for layout in layouts:
            for tile in layout.tiles:
                here = tile_view(parameters[layout.name], tile).view(torch.int16)
                assert torch.equal(here, whole_tensor(tile, 1)[tile.slices].view(torch.int16)), (rank, layout.name)
                whole[tile.tensor] = here
    big = whole["model.layers.0.mlp.down_proj.weight"]
    assert len(big.unique()) > 0.5 * big.numel()            # rows and columns differ, or nothing would be noticed


def _planned(kind: str, training: TrainingLayout, rollout: RolloutLayout):
    fabric = Fabric(gpus_per_node=2, nics_per_node=1, nic_bandwidth=25e6, nvlink_bandwidth=1e9, rails=1)
    moved = traffic(SMALL, training, rollout, fabric)
    route = build(moved, kind, 1 << 16)
    first = training.gpus // 2
    seats = Seats(fabric, tuple(Place(*divmod(rank, 2)) for rank in range(training.gpus)),
                  {(replica, worker): Place(first + replica, worker) for replica in range(rollout.replicas)
                   for worker in range(rollout.tp)})
    return moved, route, arrivals(route, DEFAULT), seats


def test_edges_of_the_plan_and_of_the_sync_meet_by_sender_and_receiver():
    moved, route, at, seats = _planned("direct", TrainingLayout(tp=2, pp=2), RolloutLayout(tp=2, replicas=2))
    hops = {(rank, (replica, rank % 2)): 10 * rank + replica for rank in range(3) for replica in range(2)}
    measured = {(f"trainer rank {rank}", f"engine {replica} worker {worker}"): 0.5 for rank, (replica, worker) in hops}
    found = {edge.name: edge for edge in edges(route, at, seats, hops, measured)}
    same = found["trainer rank 2 -> engine 1 worker 0"]
    assert same.bytes == 21 and same.planned_bytes > 1000 and same.predicted_s > 0
    assert same.residual_s == pytest.approx(0.5 - same.predicted_s)
    missing = found["trainer rank 3 -> engine 0 worker 1"]      # planned, and this sync did not send it
    assert missing.bytes is None and missing.measured_s is None and missing.residual_s is None
    assert sum(edge.planned_bytes for edge in found.values()) == 2 * moved.replica_bytes


def test_what_receivers_pass_on_are_edges_between_engines():
    _, route, at, seats = _planned("chain", TrainingLayout(tp=2), RolloutLayout(tp=2, replicas=3))
    found = edges(route, at, seats, {((0, 1), (1, 1)): 7}, {("engine 0 worker 1", "engine 1 worker 1"): 0.5})
    names = [edge.name for edge in found]
    assert names[0] == "engine 0 worker 1 -> engine 1 worker 1" and found[0].bytes == 7
    assert found[0].residual_s == pytest.approx(0.5 - found[0].predicted_s)
    assert "engine 1 worker 0 -> engine 2 worker 0" in names
    assert not any(name.startswith("trainer") and "engine 2" in name for name in names)


def test_coefficients_are_those_that_a_cluster_file_takes():
    from launch.cluster.known_coefficients import PREFIX, faults

    report = SyncReport(1, 2, 10, {"total": 1.0, "receive": 0.7, "live_digest": 0.2})
    found = found_coefficients(LaneSpeed(30e6, 2e-3), 25e6, 8e9, 2e9, report)
    assert found == {"sync.nic_efficiency": 1.0, "sync.chunk_latency_s": 2e-3, "sync.copy_rate": 8e9,
                     "sync.digest_rate": 2e9, "sync.barrier_s": pytest.approx(0.3)}
    assert not list(faults({PREFIX + key: value for key, value in found.items()}))


@pytest.mark.parametrize("words, fragment", [
    (("configs/70b/grpo.yaml",), "the plan is for configs/clusters/h100x32.yaml, but the measurement is on this"),
    (("configs/tiny/grpo.yaml", "rollout.replicas=13"), "17 processes, but at most 16")])
def test_what_cannot_be_measured_here_is_refused(words, fragment):
    with pytest.raises(UserError, match=fragment):
        check(prepare(words[0], words[1:], "cpu"))


@pytest.mark.slow
def test_a_plan_is_measured_on_this_machine(tmp_path):
    """The command as a user runs it: every edge with its bytes, its prediction and its residual, and coefficients that
    go into a cluster file."""
    cluster = tmp_path / "here.yaml"
    cluster.write_text((ROOT / "configs/clusters/local-cpu.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    command = ["sync", "bench", "configs/tiny/grpo.yaml", "--device", "cpu", "--repeats", "1", "--json", "--write",
               str(cluster)]
    done = subprocess.run([sys.executable, "-m", "launch", *command], cwd=ROOT, capture_output=True, text=True,
                          timeout=patient(220))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["processes"] == 5 and found["backend"] == "gloo"
    assert sum(edge["bytes"] for edge in found["edges"]) == found["bytes"]
    for edge in found["edges"]:
        assert edge["measured_s"] > 0 and edge["planned_bytes"] == edge["bytes"]
        assert edge["residual_s"] == pytest.approx(edge["measured_s"] - edge["predicted_s"])
    assert found["parts"][-1]["measured_s"] == pytest.approx(found["seconds"]["total"])
    in_place, shadow = found["pauses"]
    assert (in_place["name"], shadow["name"]) == ("in_place", "shadow")
    assert in_place["measured_s"] > found["seconds"]["transfer"] and shadow["measured_s"] > 0
    assert all(each["predicted_s"] > 0 for each in found["pauses"])
    assert found["staging"]["planned"] == found["staging"]["allocated"]
    sync = prepare("configs/tiny/grpo.yaml", (), "cpu").found
    assert found["staging"]["planned"] == {"training": sync.training.sync_bytes, "rollout": sync.rollout.sync_bytes}
    assert found["rates"]["memcpy"] > 1e8 and found["lane"]["rate"] > 1e6
    written = cluster.read_text(encoding="utf-8")
    assert "sync.digest_rate: {value:" in written and "megatron-rl sync bench configs/tiny/grpo.yaml" in written
