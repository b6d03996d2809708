from __future__ import annotations

import pytest

from launch.cluster.file import parse_cluster
from launch.cluster.spec import Switch
from launch.errors import UserError
from launch.slurm import show
from launch.slurm.client import Slurm
from launch.slurm.live_cluster import assemble, read_cluster, survey
from tests.slurm.test_show import line

FILE = """\
nodes: {count: 2}
gpus: {kind: h100, per_node: 8}
network: {nics_per_node: 4, nic_gbit_per_s: 200, rails: 1}
host: {memory_gb: 500}
node_mtbf_hours: 4000
coefficients: {training.gemm_bf16: {value: 0.5, source: run x}}
"""
TREE = (Switch("leaf1", (), ("h1", "h2")), Switch("leaf2", (), ("h3", "h4", "c1")),
        Switch("core", ("leaf1", "leaf2"), ()))


def nodes(*lines: str) -> tuple[show.Node, ...]:
    return show.nodes("".join(lines))


def h100s(count: int = 4) -> list[str]:
    return [line(f"h{number}") for number in range(1, count + 1)]


def test_what_slurm_does_not_know_is_said_to_be_assumed():
    spec = assemble(survey(nodes(*h100s())), ())
    assert spec.nodes == ("h1", "h2", "h3", "h4") and spec.gpu.name == "H100-SXM-80GB" and spec.gpus_per_node == 8
    assert (spec.nics_per_node, spec.rails, spec.nic_bandwidth) == (8, 8, 50e9)
    assumed = ("nics_per_node", "rails", "nic_bandwidth")
    assert all(spec.sources[f"cluster.{key}"].startswith("assumed") for key in assumed)
    assert spec.sources["cluster.host_memory_bytes"] == "scontrol show node -o, RealMemory"
    assert assemble(survey(nodes(line(gres="gpu:a100:8"))), ()).nic_bandwidth == 25e9


def test_a_cluster_file_adds_the_network():
    base = parse_cluster(FILE, "c.yaml")
    spec = assemble(survey(nodes(*h100s())), TREE, base=base, base_file="c.yaml")
    assert (spec.nics_per_node, spec.rails, spec.nic_bandwidth, spec.node_mtbf_hours) == (4, 1, 25e9, 4000)
    assert spec.coefficients == {"coefficients.training.gemm_bf16": 0.5} and len(spec.nodes) == 4
    assert spec.sources["cluster.nic_bandwidth"] == "c.yaml:3"
    assert spec.sources["cluster.nodes"].startswith("scontrol") and spec.host_memory_bytes == 2_000_000 * 2**20


@pytest.mark.parametrize(("gres", "words"), [
    ("gpu:h200:8", "gpus.kind is H200-SXM-141GB in Slurm but H100-SXM-80GB in the file"),
    ("gpu:h100:4", "gpus.per_node is 4 in Slurm but 8 in the file")])
def test_slurm_and_the_file_disagree(gres, words):
    with pytest.raises(UserError, match=words) as error:
        assemble(survey(nodes(line(gres=gres))), (), base=parse_cluster(FILE, "c.yaml"), base_file="c.yaml")
    assert "c.yaml" in error.value.where and "scontrol show node" in error.value.where


def test_nodes_that_no_job_gets_are_left_out_and_reported():
    found = survey(nodes(line("h1"), line("h2", state="DOWN*"),
                         line("h3", state="IDLE+DRAIN", reason="Reason=bad GPU"),
                         line("h4", state="ALLOCATED"), line("c1", gres="(null)")))
    assert [node.name for node in found.nodes] == ["h1", "h4"]
    assert dict(found.left_out) == {"h2": "DOWN+NOT_RESPONDING", "h3": "DRAIN (bad GPU)", "c1": "no GPU"}
    spec = assemble(found, TREE)
    assert spec.sources["cluster.nodes"] == ("scontrol show node -o: 2 nodes; left out: h2: DOWN+NOT_RESPONDING; "
                                             "h3: DRAIN (bad GPU); c1: no GPU")
    assert spec.switches == (Switch("leaf1", (), ("h1",)), Switch("leaf2", (), ("h4",)),
                             Switch("core", ("leaf1", "leaf2"), ()))


def test_a_switch_without_nodes_left_disappears():
    spec = assemble(survey(nodes(*h100s(2))), TREE)
    assert spec.switches == (Switch("leaf1", (), ("h1", "h2")), Switch("core", ("leaf1",), ()))


def test_filters():
    every = nodes(line("h1", partitions="a"), line("h2", partitions="a,b", state="ALLOCATED"),
                  line("h3", partitions="b"))
    assert [node.name for node in survey(every, partition="b").nodes] == ["h2", "h3"]
    assert [node.name for node in survey(every, nodelist="h[3,1]").nodes] == ["h1", "h3"]


@pytest.mark.parametrize(("wanted", "words"), [
    ({"partition": "btach"}, "no partition 'btach'"), ({"nodelist": "h[1-9]"}, "no node 'h3'"),
    ({"nodelist": "h["}, "is not closed"), ({"nodelist": ""}, "offers no node"), ({"gpu": "h101"}, "no figures"),
    ({"gpu": "a100"}, "no node is left; left out: h1, h2: has h100, not A100-SXM-80GB")])
def test_wishes_that_cannot_be_met(wanted, words):
    gpu = wanted.pop("gpu", None)
    with pytest.raises(UserError) as error:
        assemble(survey(nodes(*h100s(2)), **wanted), (), gpu=gpu)
    assert words in str(error.value) and error.value.fix and error.value.exit_code == 2


def test_mixed_kinds_are_refused_and_planned_one_by_one():
    mixed = survey(nodes(*h100s(3), line("a1", gres="gpu:a100:8"), line("x1", gres="gpu:1g.10gb:56")))
    with pytest.raises(UserError, match="no figures for a GPU named '1g.10gb'"):
        assemble(mixed, ())
    mixed = survey(nodes(*h100s(3), line("a1", gres="gpu:a100:8"), line("h4", gres="gpu:h100:4")))
    with pytest.raises(UserError) as error:
        assemble(mixed, ())
    assert "3 nodes with 8 x H100-SXM-80GB (h1, ...); 1 nodes with 8 x A100-SXM-80GB" in error.value.what
    assert "--gpu" in error.value.fix
    spec = assemble(mixed, (), gpu="a100")
    assert spec.nodes == ("a1",) and "has h100, not A100-SXM-80GB" in spec.sources["cluster.nodes"]
    both = assemble(survey(nodes(line("h1"), line("m1", gres="gpu:a100:4,gpu:h100:4"))), ())
    assert both.nodes == ("h1",) and "m1: mixes 4 a100 and 4 h100" in both.sources["cluster.nodes"]


def test_gpus_without_a_type():
    untyped = survey(nodes(line("h1", gres="gpu:8")))
    with pytest.raises(UserError, match="names no type") as error:
        assemble(untyped, ())
    assert "--gpu" in error.value.fix
    assert assemble(untyped, (), gpu="h200").gpu.name == "H200-SXM-141GB"
    assert assemble(untyped, (), base=parse_cluster(FILE, "c.yaml")).gpu.name == "H100-SXM-80GB"


@pytest.mark.parametrize(("tree", "words"), [
    (TREE[:2], "nothing connects leaf1, leaf2"), ((TREE[0], TREE[2]), "is not a switch"),
    ((Switch("leaf1", (), ("h1",)),), "no switch connects h2"),
    ((*TREE, Switch("leaf3", (), ("h1",))), "node h1 is under leaf1 and leaf3")])
def test_a_topology_that_does_not_fit(tree, words):
    with pytest.raises(UserError) as error:
        assemble(survey(nodes(*h100s())), tree)
    assert words in error.value.what and error.value.where == "scontrol show topology"


def test_without_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="cannot run scontrol"):
        read_cluster(Slurm())
