"""A plan held against the allocation, and made smaller where nodes are missing."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from launch.cluster.tree import path_of, switches_of
from launch.config.load import load_config
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.planner.prepare import OnCluster
from launch.planner.seats.cluster import nodes_needed
from launch.run.node_files import Hello
from launch.runtime.job_plan import place_job, plan_job
from launch.runtime.replan import for_fewer, sizes_for
from launch.slurm.job_facts import JobFacts, combine
from launch.slurm.records import job_records
from tests.runtime.slurm_text import JOB

CLUSTER = """\
nodes: {{count: {nodes}, names: "n[001-{nodes:03d}]"}}
gpus: {{kind: {kind}, per_node: {per_node}}}
network: {{nics_per_node: {per_node}, nic_gbit_per_s: 400, rails: {per_node}}}
host: {{memory_gb: 1024}}
"""
WORDS = ("trainer.tp=1", "trainer.pp=2", "trainer.dp=4", "rollout.replicas=auto")
"""On nodes of 2 GPUs: four nodes train (DP 4), the others roll out."""


@pytest.fixture
def job(tmp_path):
    """A function that plans the tiny model for so many nodes and is given others."""
    def make(planned: int, given: int, *words: str, kind: str = "H100-SXM-80GB", gpus: int = 2,
             comment: str = "") -> OnCluster:
        file = tmp_path / f"cluster-{planned}-{kind}.yaml"
        file.write_text(CLUSTER.format(nodes=planned, kind=kind, per_node=2), encoding="utf-8")
        words = (f"cluster={file}", *WORDS, *words)
        return plan_job("configs/tiny/grpo.yaml", words, load_config("configs/tiny/grpo.yaml", words),
                        facts(given, gpus, comment))
    return make


def facts(nodes: int, gpus: int, comment: str) -> JobFacts:
    record = job_records(JOB.format(end=0))[0]
    names = tuple(f"h{number}" for number in range(1, nodes + 1))
    return combine(replace(record, nodes=names, node_count=nodes, comment=comment)).model_copy(
        update={"gpus_per_node": gpus})


def hellos(names) -> dict[str, Hello]:
    return {name: Hello(name, 1, "host", f"10.0.0.{at}", "eth0", 12288, at, 96, f"spine.leaf{at % 2}.{name}",
                        "switch.switch.node", time.time()) for at, name in enumerate(names)}


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    for name in ("SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)


# ---- the allocation ----------------------------------------------------------------------------------------------

def test_the_allocation_that_was_planned_for_is_taken(job):
    made = job(6, 6)
    assert (made.needed, made.spares) == (6, 0)


@pytest.mark.parametrize(("given", "gpus", "text"), [(5, 2, "planned for 6 nodes, allocated 5"),
                                                      (7, 2, "planned for 6 nodes, allocated 7"),
                                                      (6, 4, "planned for 2 GPUs per node, allocated 4")])
def test_one_that_differs_is_an_error_that_names_both(job, given, gpus, text):
    with pytest.raises(UserError, match=text) as error:
        job(6, given, gpus=gpus)
    assert "run.replan=true" in error.value.fix


def test_a_plan_that_is_not_the_submitted_one_is_refused(job):
    submitted = job(6, 6).plan.fingerprint()
    assert job(6, 6, comment=f"megatron-rl:plan:{submitted}").needed == 6
    with pytest.raises(UserError, match=submitted):
        job(6, 6, "algorithm.group_size=8", comment=f"megatron-rl:plan:{submitted}")


def test_with_replan_the_given_nodes_are_planned_for(job):
    made = job(6, 8, "run.replan=true")
    assert made.needed == 8 and made.cluster.nodes[0] == "h1"
    assert made.config.rollout.replicas == 8, "four nodes of two train, as pinned; four roll out"


def test_fewer_nodes_are_taken_as_they_are_down_to_min_nodes(job):
    assert job(6, 5, "run.min_nodes=5").needed == 6
    with pytest.raises(UserError, match="planned for 6 nodes, allocated 4"):
        job(6, 4, "run.min_nodes=5")


def test_spares_belong_to_the_allocation(job):
    made = job(7, 7, "placement.spare_nodes=1")
    assert (made.needed, made.spares) == (6, 1)


# ---- fewer fit nodes than planned ---------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["H100-SXM-80GB", "CPU-core"])
def test_engines_go_first_then_replicas_of_the_trainer(job, kind):
    """Six nodes: four of two GPUs train with DP 4, two roll out with an engine a GPU."""
    made = job(6, 6, kind=kind)
    found = {nodes: (sizes.dp, sizes.replicas) if (sizes := sizes_for(nodes, made)) else None
             for nodes in range(1, 7)}
    assert found == {6: (4, 4), 5: (4, 2), 4: (2, 4), 3: (2, 2), 2: (1, 2), 1: None}


def test_what_was_made_smaller_really_fits(job):
    made = job(6, 6)
    for nodes in range(2, 6):
        smaller, sizes = for_fewer(nodes, made, min_nodes=1)
        layouts = smaller.found.training.layout, smaller.found.rollout.layout
        assert sizes.nodes == nodes_needed(*layouts, made.cluster) == smaller.needed <= nodes
        assert len(smaller.plan.training.ranks) == 2 * sizes.dp == 2 * smaller.config.trainer.dp
        assert len(smaller.plan.rollout.engines) == sizes.replicas
        split = smaller.plan.forecast.split
        assert (split.training, split.training + split.rollout) == (sizes.training_nodes, sizes.nodes)
        assert smaller.plan.forecast.step_s > 0 and smaller.plan.batch == made.plan.batch


@pytest.mark.parametrize("least", [None, 5])
def test_below_min_nodes_it_is_a_failed_preflight(job, least):
    made = job(6, 6)
    with pytest.raises(UserError, match="4 fit node.*plan needs 6") as error:
        for_fewer(4, made, least)
    assert error.value.exit_code == ExitCode.PREFLIGHT


def test_nothing_that_fits_is_a_failed_preflight_too(job):
    made = job(6, 6)
    with pytest.raises(UserError, match="the plan cannot be reduced to 1") as error:
        for_fewer(1, made, 1)
    assert error.value.exit_code == ExitCode.PREFLIGHT


# ---- placement on the nodes really given ---------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["H100-SXM-80GB", "CPU-core"])
def test_suspects_become_spares_and_every_node_keeps_its_own_ports(job, kind):
    made = job(7, 7, "placement.spare_nodes=1", kind=kind)
    names = [f"h{number}" for number in range(1, 8)]
    greeted = hellos(names)
    greeted = {name: replace(hello, ports=12288 + 512 * at) for at, (name, hello) in enumerate(greeted.items())}
    _, placement, smaller = place_job(made, names, ["h2"], greeted, attempt=3)
    assert smaller == "" and placement.spares == ("h2",) and len(placement.nodes) == 6 and placement.attempt == 3
    assert placement.ports == {node: greeted[node].ports for node in placement.nodes}
    assert placement.addresses == {node: greeted[node].address for node in placement.nodes}
    for rank in placement.training:
        assert 0 <= rank.port - placement.ports[rank.node] < 512
        assert (rank.gpu is None) == (kind == "CPU-core")


def test_a_short_job_is_placed_smaller(job):
    made = job(6, 6, "run.min_nodes=3")
    names = ["h1", "h2", "h4", "h5", "h6"]
    small, placement, text = place_job(made, names, [], hellos(names), attempt=1)
    assert sorted(placement.nodes) == names and len(placement.rollout) == 2 and "2 engine(s)" in text
    assert placement.plan_fingerprint == small.plan.fingerprint() != made.plan.fingerprint()


def test_the_switch_tree_from_the_addresses_of_the_nodes():
    """As Slurm 22.05 writes them; two spines over the same leaf are one part with a bracket."""
    assert path_of("core.spine1.leaf1.h100-001", "switch.switch.switch.node") == ("core", "spine1", "leaf1")
    assert path_of("spine[1-2].leaf1.h100-001", "switch.switch.node") == ("spine[1-2]", "leaf1")
    assert path_of("h100-001", "node") == path_of("", "") == ()
    paths = {"a": ("core", "s1", "l1"), "b": ("core", "s1", "l1"), "c": ("core", "s2", "l2")}
    tree = {switch.name: (switch.switches, switch.nodes) for switch in switches_of(paths)}
    assert tree == {"core": (("s1", "s2"), ()), "s1": (("l1",), ()), "s2": (("l2",), ()), "l1": ((), ("a", "b")),
                    "l2": ((), ("c",))}
    assert switches_of({**paths, "d": ()}) == (), "half a tree would mislead"
