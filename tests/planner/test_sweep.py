"""How many nodes a rate takes: each point is the plan of that size."""

from __future__ import annotations

import pytest

from launch.config.load import load_config
from launch.errors import UserError
from launch.planner.planning import plan_on_cluster
from launch.planner.prepare import planning_inputs
from launch.planner.sweep import MOST_POINTS, parse, sweep
from launch.report.plan_sweep import smallest_that_reaches
from tests.planner.problems import CONFIGS, h100


def inputs(*words: str, nodes: int = 4):
    return planning_inputs(load_config(CONFIGS / "7b" / "grpo.yaml", words), h100(nodes))


@pytest.mark.parametrize("text, expected", [("nodes=8..64", (8, 64)), ("nodes = 1..1", (1, 1)), ("nodes=2..4096", (2, 4096))])
def test_parse(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["", "8..64", "nodes=8", "nodes=8-64", "nodes=0..3", "nodes=3..2", "nodes=1..4097", "gpus=1..2",
                                  "nodes=-1..2", "nodes=1..2..3", "nodes=a..b", "nodes=1.5..2"])
def test_parse_refuses(text):
    with pytest.raises(UserError, match="--sweep"):
        parse(text)


@pytest.mark.parametrize("words", [(), ("placement.mode=auto", "placement.spare_nodes=1")])
def test_every_point_is_the_plan_of_that_size(words):
    points = sweep(inputs(*words), 2, 5)
    assert [point.nodes for point in points] == [2, 3, 4, 5]
    for point in points:
        alone = inputs(*words, nodes=point.nodes)
        try:
            made = plan_on_cluster(alone.loaded, alone.architecture, alone.shape, alone.cluster).found
        except UserError:
            assert point.prompts_per_hour is None
            continue
        assert point.prompts_per_hour == pytest.approx(made.prompts_per_hour, rel=1e-12)
        assert point.gpu_hours == pytest.approx(8 * point.nodes * 1000 / made.prompts_per_hour)


def test_a_single_node_is_divided_by_gpus():
    first, second = sweep(inputs(), 1, 2)
    assert first.split.endswith("GPUs") and first.prompts_per_hour < second.prompts_per_hour
    assert sweep(inputs("placement.spare_nodes=1"), 1, 3)[0].verdict == "no plan fits"


def test_the_smallest_that_reaches():
    points = sweep(inputs(), 1, 4)
    target = points[2].prompts_per_hour
    assert smallest_that_reaches(points, target) is points[2]
    assert smallest_that_reaches(points, 1e9) is None and smallest_that_reaches(points, None) is None


def test_many_sizes_are_sampled():
    points = sweep(inputs("trainer.tp=4", "trainer.pp=1", "trainer.cp=2", "rollout.tp=4"), 2, 200)
    assert len(points) <= MOST_POINTS + 1 and points[0].nodes == 2 and points[-1].nodes == 200


def test_impossible_pins_are_refused_once():
    with pytest.raises(UserError, match=r"trainer\.tp = 3"):
        sweep(inputs("trainer.tp=3"), 1, 4)
