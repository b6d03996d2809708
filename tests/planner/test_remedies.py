"""No plan fits: what is proposed really makes one."""

from __future__ import annotations

import re

import pytest

from launch.cluster.file import load_cluster
from launch.config.load import load_config
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.planner.explain.remedies import MOST, with_nodes
from launch.planner.prepare import OnCluster, prepare_for
from tests.planner.problems import CONFIGS, h100

SEVENTY = CONFIGS / "70b" / "grpo.yaml"


def planned(words: list[str], nodes: int) -> OnCluster:
    cluster = with_nodes(load_cluster(CONFIGS / "clusters" / "h100x32.yaml"), nodes)
    return prepare_for(load_config(SEVENTY, words), cluster)


@pytest.mark.parametrize("words, nodes, why, least", [
    ([], 1, "training needs at least", 2), ([], 4, "", 2),
    (["model.path=llama3.1-405b"], 8, "training needs at least", 0),
    (["model.path=llama3.1-405b"], 32, "engines of TP8", 1),
    (["model.path=llama3.1-405b"], 128, "101.5 GB of weights", 1),
    (["model.path=qwen3-235b-a22b"], 16, "training needs at least", 1),
    (["trainer.tp=1", "trainer.pp=1"], 8, "training needs at least", 3), (["trainer.dp=10"], 8, "", 1),
    (["rollout.replicas=25"], 12, "engines of TP2", 2), (["rollout.tp=2"], 16, "engines of TP2", 1),
    
    (["placement.spare_nodes=3"], 7, "", 2),
    (["placement.mode=hybrid", "algorithm.max_staleness=0"], 2, "", 1)])
def test_every_remedy_makes_a_plan(words, nodes, why, least):
    with pytest.raises(UserError) as error:
        planned(words, nodes)
    assert error.value.exit_code == ExitCode.NO_FEASIBLE_PLAN
    assert f"no plan fits {nodes} nodes" in str(error.value) and why in error.value.what
    changes = re.findall(r"^ *(\S.*?)   \(([\d,]+) prompts/h predicted\)$", error.value.fix, re.MULTILINE)
    assert least <= len(changes) <= MOST
    for change, rate in changes:
        more = re.fullmatch(r"(\d+) nodes instead of (\d+)", change)
        assert more is None or int(more[2]) == nodes
        made = planned(words, int(more[1])) if more else planned([*words, *change.split()], nodes)
        assert f"{made.found.prompts_per_hour:,.0f}" == rate


def test_the_number_of_nodes_is_the_least():
    with pytest.raises(UserError) as error:
        planned([], 2)
    nodes = int(re.search(r"(\d+) nodes instead of", error.value.fix)[1])
    planned([], nodes)
    with pytest.raises(UserError):
        planned([], nodes - 1)


def test_with_nodes_keeps_what_describes_the_cluster():
    cluster = load_cluster(CONFIGS / "clusters" / "h100x128.yaml")
    assert with_nodes(cluster, 128) is cluster
    fewer = with_nodes(cluster, 40)
    assert fewer.nodes == cluster.nodes[:40]
    assert {node for switch in fewer.switches for node in switch.nodes} == set(fewer.nodes)
    names = {switch.name for switch in fewer.switches}
    assert all(name in names for switch in fewer.switches for name in switch.switches)
    more = with_nodes(cluster, 200)
    assert len(set(more.nodes)) == 200 and more.nodes[:128] == cluster.nodes
    assert (more.gpu, more.gpus_per_node, more.nic_bandwidth) == (cluster.gpu, cluster.gpus_per_node,
                                                                 cluster.nic_bandwidth)
    assert len(h100(3).nodes) == 3
