"""How many nodes a rate takes: each point is the plan of that size."""

from __future__ import annotations

from itertools import pairwise

import pytest

from launch.cluster.file import load_cluster
from launch.config.load import load_config
from launch.errors import UserError
from launch.planner.prepare import posed, prepare_for
from launch.planner.search.problem import Problem
from launch.planner.sweep import MOST_POINTS, parse, remarks, smallest_that_reaches, sweep
from tests.planner.problems import CONFIGS, h100


def asked(*words: str, nodes: int = 4, largest: int = 4) -> Problem:
    return posed(load_config(CONFIGS / "7b" / "grpo.yaml", words), h100(nodes), largest=largest)


@pytest.mark.parametrize("text, expected", [("nodes=8..64", (8, 64)), ("nodes = 1..1", (1, 1)),
                                            ("nodes=2..4096", (2, 4096))])
def test_parse(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["", "8..64", "nodes=8", "nodes=8-64", "nodes=0..3", "nodes=3..2", "nodes=1..4097",
                                  "gpus=1..2",
                                  "nodes=-1..2", "nodes=1..2..3", "nodes=a..b", "nodes=1.5..2"])
def test_parse_refuses(text):
    with pytest.raises(UserError, match="not a range of cluster sizes"):
        parse(text)


@pytest.mark.parametrize("words", [(), ("placement.mode=auto", "placement.spare_nodes=1")])
def test_every_point_is_the_plan_of_that_size(words):
    points = sweep(asked(*words), 2, 5)
    assert [point.nodes for point in points] == [2, 3, 4, 5]
    for point in points:
        try:
            made = prepare_for(load_config(CONFIGS / "7b" / "grpo.yaml", words), h100(point.nodes)).found
        except UserError:
            assert point.prompts_per_hour is None
            continue
        assert point.prompts_per_hour == pytest.approx(made.prompts_per_hour, rel=1e-12)
        assert point.gpu_hours == pytest.approx(8 * point.nodes * 1000 / made.prompts_per_hour)


def test_a_single_node_is_divided_by_gpus():
    first, second = sweep(asked(), 1, 2)
    assert first.split.endswith("GPUs") and first.prompts_per_hour < second.prompts_per_hour
    assert sweep(asked("placement.spare_nodes=1"), 1, 3)[0].verdict == "no plan fits"


def test_the_smallest_that_reaches():
    points = sweep(asked(), 1, 4)
    target = points[2].prompts_per_hour
    assert smallest_that_reaches(points, target) is points[2]
    assert smallest_that_reaches(points, 1e9) is None and smallest_that_reaches(points, None) is None


def test_many_sizes_are_sampled():
    points = sweep(asked("trainer.tp=4", "trainer.pp=1", "trainer.cp=2", "rollout.tp=4"), 2, 200)
    assert len(points) <= MOST_POINTS + 1 and points[0].nodes == 2 and points[-1].nodes == 200


def test_the_smallest_of_a_wide_range_is_found_to_the_node():
    """Among the sampled sizes it may be missing: every size planned one by one gives the same answer."""
    pins = ("trainer.tp=2", "trainer.pp=1", "trainer.cp=1", "rollout.tp=1", "algorithm.max_staleness=auto")
    every = sweep(asked(*pins), 20, 60)
    assert [point.nodes for point in every] == list(range(20, 61))
    fewer, first = next((a, b) for a, b in pairwise(every)
                        if b.nodes % 7 == 3 and b.prompts_per_hour > a.prompts_per_hour)
    target = (fewer.prompts_per_hour + first.prompts_per_hour) / 2
    wide = asked(*pins, f"workload.target_prompts_per_hour={target}")
    points = sweep(wide, 2, 400)
    assert len(points) < 80 and smallest_that_reaches(points, target).nodes == first.nodes
    said = remarks(wide.cluster, len(points), 2, 400)
    assert f"{len(points)} of the 399 sizes from 2 to 400" in said[0]
    assert remarks(wide.cluster, 3, 2, 4) == ()


def test_sizes_beyond_the_switch_tree_say_so():
    """Up to its nodes a cluster is planned as it is wired, and beyond them as one rail group, which is told."""
    cluster = load_cluster(CONFIGS / "clusters" / "h100x32.yaml")
    assert cluster.switches
    [said] = remarks(cluster, 5, 30, 34)
    assert "beyond the 32 nodes of h100x32" in said and remarks(cluster, 3, 30, 32) == ()
    loaded = load_config(CONFIGS / "7b" / "grpo.yaml")
    last = sweep(posed(loaded, cluster), 32, 34)[0]
    made = prepare_for(loaded, cluster).found
    assert last.prompts_per_hour == pytest.approx(made.prompts_per_hour, rel=1e-12)


def test_impossible_pins_are_refused_once():
    with pytest.raises(UserError, match=r"trainer\.tp = 3"):
        sweep(asked("trainer.tp=3"), 1, 4)
