"""The live cluster read from a real Slurm of 32 simulated H100 nodes, two A100 nodes and one without GPUs."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from launch.cli.main import main
from launch.cluster.inventory import NodeFacts
from launch.errors import UserError
from launch.slurm.client import Slurm
from launch.slurm.live_cluster import read_cluster
from launch.slurm.refusals import SlurmError
from tests.slurm_cluster import Group, requires_slurm, running

pytestmark = requires_slurm
H100 = Group("h100", 32)
GROUPS = (H100, Group("a100", 2, "a100", 4, "small"), Group("cpu", 1, None, partition="cpu"))
TOPOLOGY = """\
SwitchName=leaf1 Nodes=h100-[001-008]
SwitchName=leaf2 Nodes=h100-[009-016]
SwitchName=leaf3 Nodes=h100-[017-024]
SwitchName=leaf4 Nodes=h100-[025-032]
SwitchName=leaf5 Nodes=a100-[001-002],cpu-[001-001]
SwitchName=spine1 Switches=leaf[1-2]
SwitchName=spine2 Switches=leaf[3-5]
SwitchName=core Switches=spine[1-2]
"""


@pytest.fixture(scope="module")
def slurm():
    with running(GROUPS, TOPOLOGY) as cluster, pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, cluster.environment[name])
        yield cluster


def test_a_whole_partition_with_its_tree(slurm):
    spec = read_cluster(Slurm(), partition="batch")
    assert list(spec.nodes) == H100.names and spec.gpus_per_node == 8 and spec.gpu.name == "H100-SXM-80GB"
    assert spec.host_memory_bytes == 2_000_000 * 2**20
    tree = {switch.name: switch for switch in spec.switches}
    assert sorted(tree) == ["core", "leaf1", "leaf2", "leaf3", "leaf4", "spine1", "spine2"]     # leaf5 has no H100
    assert tree["leaf2"].nodes == tuple(H100.names[8:16]) and tree["spine2"].switches == ("leaf3", "leaf4")
    assert tree["core"].switches == ("spine1", "spine2") and tree["core"].nodes == ()


def test_the_command_plans_for_the_nodes_that_slurm_names(slurm, capsys):
    words = ["plan", "configs/7b/grpo.yaml", "--from-slurm", "--partition", "batch", "--nodelist", "h100-[007-010]"]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    facts, split = plan["forecast"]["cluster"], plan["forecast"]["split"]
    assert (facts["nodes"], facts["gpus_per_node"], facts["leaves"]) == (4, 8, [2, 2])
    assert split["training"] + split["rollout"] + split["spare"] == 4
    assert main([*words[:3], "--nodelist", "h100-040"]) == 2
    assert "h100-040" in capsys.readouterr().err


def test_mixed_kinds(slurm):
    with pytest.raises(UserError, match="several kinds of nodes") as error:
        read_cluster(Slurm())
    assert "32 nodes with 8 x H100-SXM-80GB" in error.value.what
    assert "2 nodes with 4 x A100-SXM-80GB" in error.value.what
    spec = read_cluster(Slurm(), gpu="a100")
    assert spec.nodes == ("a100-001", "a100-002") and spec.gpus_per_node == 4
    assert "cpu-001: no GPU" in spec.sources["cluster.nodes"]


def test_nodes_that_are_drained_or_down(slurm):
    slurm.run("scontrol", "update", "nodename=h100-003", "state=drain", "reason=GPU 3 fell off State=IDLE")
    slurm.run("scontrol", "update", "nodename=h100-004", "state=down", "reason=fan")
    try:
        spec = read_cluster(Slurm(), nodelist="h100-[001-010]")
    finally:
        slurm.run("scontrol", "update", "nodename=h100-[003-004]", "state=resume")
    assert list(spec.nodes) == [name for name in H100.names[:10] if name not in ("h100-003", "h100-004")]
    said = spec.sources["cluster.nodes"]
    assert "h100-003: DRAIN (GPU 3 fell off" in said and "h100-004: DOWN" in said
    assert {switch.name for switch in spec.switches if switch.nodes} == {"leaf1", "leaf2"}


def test_names_that_slurm_does_not_know(slurm):
    with pytest.raises(UserError, match="no node 'h100-033'"):
        read_cluster(Slurm(), nodelist="h100-[030-033]")
    with pytest.raises(UserError, match="no partition 'bach'") as error:
        read_cluster(Slurm(), partition="bach")
    assert "did you mean batch?" in error.value.fix


def test_nvml_on_a_node_is_joined(slurm):
    """NVML has no simulated GPU to ask, so its answer is given; everything else is Slurm's."""
    usable = 84_900_000_000
    spec = read_cluster(Slurm(), partition="batch", node="h100-001",
                        facts=NodeFacts(("NVIDIA H100 80GB HBM3",) * 8, (usable,) * 8))
    assert spec.gpu.usable_bytes == usable and spec.sources["gpu.usable_bytes"].startswith("NVML on h100-001")
    with pytest.raises(UserError, match="Slurm and h100-001 disagree") as error:
        read_cluster(Slurm(), partition="batch", node="h100-001",
                     facts=NodeFacts(("NVIDIA H200",) * 7, (150_000_000_000,) * 7))
    assert "H200-SXM-141GB" in error.value.what and "7 GPUs, not 8" in error.value.what


def test_a_flat_network_and_a_controller_that_is_gone(monkeypatch):
    with running([Group("h100", 2)], settings="MessageTimeout=3") as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        monkeypatch.setenv("PATH", cluster.environment["PATH"])
        spec = read_cluster(Slurm())
        assert spec.nodes == ("h100-001", "h100-002") and spec.switches == ()
        cluster.daemons.pop("slurmctld").end()
        with pytest.raises(SlurmError, match="Slurm does not answer") as error:
            read_cluster(Slurm())
        assert "`scontrol show node -o`" in error.value.where


def test_nothing_is_left_running():
    """The daemons are ours alone: after `stop` none lives and the controller's port is free."""
    with running([Group("h100", 2)]) as cluster:
        text = Path(cluster.environment["SLURM_CONF"]).read_text()
        children = list(cluster.daemons.values())
        assert len(children) == 4 and all(child.returncode is None for child in children)
    assert all(child.returncode is not None for child in children)
    assert not cluster.folder.exists()
    port = int(text.partition("SlurmctldPort=")[2].split()[0])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
