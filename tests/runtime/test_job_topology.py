"""The switch tree of a job: from its nodes, or from Slurm, asked once."""

from __future__ import annotations

import time

import pytest

from launch.cluster.spec import Switch
from launch.run.node_files import Hello
from launch.runtime.job_plan import switches_of_job
from launch.slurm import show
from launch.slurm.refusals import SlurmError

TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=n[5-6]
SwitchName=core Level=1 LinkSpeed=1 Nodes=n[1-6] Switches=leaf[1-3]
"""
BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-4] BlockSize=4
"""
NODES = ("n1", "n2", "n3", "n4")


class Asked:
    """What `scontrol show topology` says, and how often it was asked."""

    def __init__(self, text: str | None = None) -> None:
        self.text, self.times = text, 0

    def topology(self, blocks):
        self.times += 1
        if self.text is None:
            raise SlurmError("slurmctld does not answer")
        return show.topology(self.text, blocks=blocks)


def hellos(addresses: dict[str, str], pattern: str) -> dict[str, Hello]:
    return {node: Hello(node, 1, "host", "10.0.0.1", "eth0", 12288, 0, 96, address, pattern if address else "",
                        time.time()) for node, address in addresses.items()}


@pytest.mark.parametrize("addresses, pattern", [
    ({node: f"core.leaf{1 + at // 2}.{node}" for at, node in enumerate(NODES)}, "switch.switch.node"),
    ({node: f"b{1 + at // 2}.{node}" for at, node in enumerate(NODES)}, "block.node"),
    ({node: node for node in NODES}, "node")])
def test_nobody_is_asked_where_the_nodes_know(addresses, pattern):
    asked, said = Asked(), []
    found = switches_of_job(hellos(addresses, pattern), NODES, asked, said.append)
    assert asked.times == 0 and said == []
    expected = set() if pattern == "node" else {NODES[:2], NODES[2:]}
    assert {switch.nodes for switch in found if switch.nodes} == expected


@pytest.mark.parametrize("missing", [NODES, ("n3",)])
@pytest.mark.parametrize("text, top", [(TREE, "core"), (BLOCKS, "blocks")])
def test_where_nodes_say_nothing_slurm_is_asked_once(missing, text, top):
    addresses = {node: "" if node in missing else f"core.leaf1.{node}" for node in NODES}
    asked, said = Asked(text), []
    found = switches_of_job(hellos(addresses, "switch.switch.node"), NODES, asked, said.append)
    assert asked.times == 1 and said == []
    leaves = {switch.name: switch.nodes for switch in found if switch.nodes}
    assert sorted(leaves.values()) == [NODES[:2], NODES[2:]], "of the job's nodes only"
    assert Switch(top, tuple(leaves)) in found


@pytest.mark.parametrize("text, why", [
    (None, "slurmctld does not answer"), ("No topology information available", "Slurm knows no switches"),
    ("SwitchName=leaf1 Level=0 Nodes=n[1-3]", "no switch connects n4")])
def test_a_job_that_is_placed_without_switches_says_so(text, why):
    said = []
    found = switches_of_job(hellos(dict.fromkeys(NODES, ""), ""), NODES, Asked(text), said.append)
    assert found == () and len(said) == 1 and said[0].startswith("warning topology.unknown:") and why in said[0]
    assert "n1 reports nothing as its switches (SLURM_TOPOLOGY_ADDR)" in said[0]
