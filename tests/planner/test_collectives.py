"""Collectives: closed forms at both ends of the curve, published bandwidths, and the calibration."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from launch.accuracy import collectives as validation
from launch.accuracy.fit import median
from launch.accuracy.points import load
from launch.cluster import gpus
from launch.cluster.spec import ClusterSpec
from launch.coefficients.collectives import CollectiveCoefficients
from launch.planner.time.collectives import CollectiveTime, RankGroup, group

MEASURED = Path(__file__).parents[2] / "benchmarks" / "measured"
H100 = ClusterSpec("h100", tuple(f"n{number}" for number in range(8)), 8, gpus.find("h100"), 8, 50e9, 8, 10**12)
C = CollectiveCoefficients()
NODE = RankGroup(8, 8)
GIB = 1024 ** 3


@pytest.fixture
def comm() -> CollectiveTime:
    return CollectiveTime(H100, C)


def test_group_counts_the_members_in_a_node():
    assert group(8, 1, 8) == RankGroup(8, 8)
    assert group(16, 4, 8) == RankGroup(16, 2)      # DP peers of TP 4
    assert group(5, 8, 8) == RankGroup(5, 1)        # TP x CP fills the node
    assert group(2, 1, 8).nodes == 1
    assert RankGroup(16, 2).nodes == 8


def test_one_rank_and_no_bytes_cost_nothing(comm):
    alone = RankGroup(1, 1)
    for operation in (comm.all_gather, comm.reduce_scatter, comm.all_reduce, comm.broadcast):
        assert operation(GIB, alone) == 0
        assert operation(0, NODE) == 0
    assert comm.dispatch(GIB, 8, alone) == 0
    assert comm.direct_all_reduce(GIB, 1) == 0


def test_large_messages_reach_the_published_bus_bandwidth(comm):
    """NCCL tests: 360 GB/s for rings and up to 480 with NVLS in a node; 46 to 48 of a 50 GB/s NIC at the most."""
    size = 16 * GIB
    assert 340e9 < size * 7 / 8 / comm.all_gather(size, NODE) < 385e9
    assert 460e9 < size * 2 * 7 / 8 / comm.all_reduce(size, NODE) < 490e9
    one_nic = RankGroup(4, 1)
    assert 40e9 < size * 3 / 4 / comm.reduce_scatter(size, one_nic) < 48e9


def test_small_messages_cost_their_latency(comm):
    tiny = comm.all_gather(8, NODE)
    assert tiny == pytest.approx(C.launch_s + 7 * C.hop_s, rel=0.05)
    assert comm.all_gather(2**20, NODE) < 4 * tiny
    assert 2**24 * 7 / 8 / comm.all_gather(2**24, NODE) < 0.7 * 360e9


def test_a_ring_across_nodes_runs_at_the_speed_of_its_nics(comm):
    size = 4 * GIB
    seconds = [comm.all_gather(size, RankGroup(4 * per_node, per_node)) for per_node in (1, 2, 4)]
    assert seconds[0] / seconds[1] == pytest.approx(2, rel=0.2)
    assert seconds[1] / seconds[2] == pytest.approx(2, rel=0.2)
    slow = CollectiveTime(replace(H100, nic_bandwidth=25e9), C)
    assert slow.all_gather(size, RankGroup(4, 1)) == pytest.approx(2 * seconds[0], rel=0.05)


def test_half_the_nvlink_takes_twice_as_long(comm):
    thin = CollectiveTime(replace(H100, gpu=replace(H100.gpu, nvlink_bandwidth=225e9)), C)
    assert thin.all_gather(8 * GIB, NODE) == pytest.approx(2 * comm.all_gather(8 * GIB, NODE), rel=0.05)


def test_the_tree_beats_the_ring_on_many_nodes(comm):
    """A small all-reduce over 64 nodes takes 12 steps between nodes, a ring 63 for each half."""
    ranks = RankGroup(512, 8)
    assert comm.all_reduce(2**20, ranks) < comm.reduce_scatter(2**20, ranks)


def test_a_token_crosses_to_a_node_once(comm):
    """Eight experts on two nodes: about one copy of each token over the NIC, not four."""
    ranks, size = RankGroup(16, 8), 2**30
    over_nic = size * (1 - 0.5**8) / (C.nic_share * 50e9)
    assert comm.dispatch(size, 8, ranks) == pytest.approx(over_nic, rel=0.1)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
@pytest.mark.parametrize("ranks", [RankGroup(2, 2), NODE, RankGroup(16, 8), RankGroup(32, 2)])
def test_more_bytes_take_longer(comm, operation, ranks):
    times = [getattr(comm, operation)(2**power, ranks) for power in range(4, 34)]
    assert times == sorted(times)
    assert all(b < 2 * a for a, b in pairwise(times))


def test_calibration_reproduces_what_is_shipped():
    points = [point for point in load(MEASURED) if point.kind == "collectives"]
    assert validation.calibrate(points, validation.default()) == validation.default()
    errors: dict[str, list[float]] = {}
    for point in points:
        for result in validation.predict(point, validation.default()):
            if result.error is not None:
                errors.setdefault(point.regime, []).append(abs(result.error))
    large = {regime: median(each) for regime, each in errors.items() if len(each) >= 8}
    assert large and max(large.values()) < 0.1
