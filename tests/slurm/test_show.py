"""Reading of scontrol's output, on lines as Slurm 22.05 to 24.11 print them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.cluster.spec import Switch
from launch.errors import UserError
from launch.slurm import show
from launch.slurm.live_cluster import assemble, survey

NODE = ("NodeName={name} Arch=x86_64 CoresPerSocket=48  CPUAlloc=0 CPUEfctv=96 CPUTot=96 CPULoad=1.66 "
        "AvailableFeatures=(null) ActiveFeatures=(null) Gres={gres} NodeAddr=10.0.0.1 NodeHostName={name} Port=6818 "
        "Version=22.05.8 OS=Linux 6.1.0-18-amd64 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=2000000 AllocMem=0 "
        "FreeMem=14013 Sockets=2 Boards=1 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A "
        "Partitions={partitions}  BootTime=2026-11-29T14:09:15 SlurmdStartTime=2026-11-29T17:31:43 "
        "CfgTRES=cpu=96,mem=2000000M,billing=96,gres/gpu=8 AllocTRES= CapWatts=n/a CurrentWatts=0 {reason}")
TOPOLOGY = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=h[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=h[3-4],cpu-[001-001]
SwitchName=core Level=1 LinkSpeed=1 Nodes=cpu-001,h[1-4] Switches=leaf[1-2]
"""


def line(name: str = "h1", gres: str = "gpu:h100:8(S:0-1)", state: str = "IDLE", partitions: str = "batch",
         reason: str = "") -> str:
    return NODE.format(name=name, gres=gres, state=state, partitions=partitions, reason=reason) + "\n"


def test_a_node():
    (node,) = show.nodes(line(partitions="batch,long"))
    assert (node.name, node.gpus, node.partitions) == ("h1", (("h100", 8),), ("batch", "long"))
    assert node.memory_bytes == 2_000_000 * 2**20 and node.unfit == ""


@pytest.mark.parametrize(("gres", "gpus"), [
    ("(null)", ()), ("gpu:8", (("", 8),)), ("gpu:h100:8", (("h100", 8),)), ("gpu:h100", (("h100", 1),)),
    ("gpu", (("", 1),)), ("gpu:nvidia_a100-sxm4-40gb:4(S:0,2)", (("nvidia_a100-sxm4-40gb", 4),)),
    ("gpu:a100:4(S:0),gpu:h100:4(S:1)", (("a100", 4), ("h100", 4))),
    ("nvme:1,gpu:h200:8(S:0-1),mps:100", (("h200", 8),)),
    ("gpu:h100:4(S:0),gpu:h100:4(S:1)", (("h100", 8),)), ("gpumem:80G", ()), ("gpu:h100:0", ())])
def test_gres(gres, gpus):
    assert show.nodes(line(gres=gres))[0].gpus == gpus


@pytest.mark.parametrize(("state", "unfit"), [
    ("IDLE", ""), ("ALLOCATED", ""), ("MIXED", ""), ("MIXED+PLANNED", ""), ("ALLOCATED+COMPLETING", ""),
    ("IDLE+RESERVED", ""), ("IDLE+CLOUD+POWERED_DOWN", ""), ("IDLE+DRAIN", "DRAIN"), ("MIXED+DRAIN", "DRAIN"),
    ("DOWN*", "DOWN+NOT_RESPONDING"), ("DOWN*+DRAIN", "DOWN+DRAIN+NOT_RESPONDING"), ("IDLE*", "NOT_RESPONDING"),
    ("IDLE+MAINTENANCE", "MAINTENANCE"), ("UNKNOWN", "UNKNOWN"), ("IDLE+FAIL", "FAIL"),
    ("DOWN+INVALID_REG", "DOWN+INVALID_REG"),
    ("WHATEVER_COMES_NEXT", "WHATEVER_COMES_NEXT")])
def test_states(state, unfit):
    assert show.nodes(line(state=state))[0].unfit == unfit


def test_what_an_admin_wrote_does_not_change_the_state():
    """A reason is free text; and Slurm prints it last."""
    (node,) = show.nodes(line(state="IDLE+DRAIN", reason="Reason=GPU 3 fell off State=IDLE [root@2026-11-28]"))
    assert node.unfit.startswith("DRAIN (GPU 3 fell off")


def test_topology():
    assert show.topology(TOPOLOGY) == (
        Switch("leaf1", (), ("h1", "h2")), Switch("leaf2", (), ("h3", "h4", "cpu-001")),
        Switch("core", ("leaf1", "leaf2"), ()))
    assert show.topology("") == show.topology("No topology information available\n") == ()


@pytest.mark.parametrize(("text", "words"), [
    ("BlockName=b1 BlockIndex=0 Nodes=h[1-18] BlockSize=18\n", "topology/block"),
    ("SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=h[1-\n", "is not closed"),
    ("Switch=leaf1\n", "not a line of Slurm's topology"),
    ("slurm_load_topo error: Unable to contact slurm controller\n", "not a line of Slurm's topology")])
def test_a_topology_that_cannot_be_read(text, words):
    with pytest.raises(UserError, match=words) as error:
        show.topology(text)
    assert error.value.where.startswith("scontrol show topology, line 1") and error.value.fix


@pytest.mark.parametrize("text", ["garbage\n", "NodeName=\n", "NodeName=h1 State=IDLE\n",
                                  "NodeName=h1 State=IDLE RealMemory=lots\n", line(gres="gpu:h100:8:9:x")])
def test_nodes_that_cannot_be_read(text):
    with pytest.raises(UserError) as error:
        show.nodes(text)
    assert error.value.where.startswith("scontrol show node -o")


def test_a_cluster_without_nodes():
    assert show.nodes("No nodes in the system\n") == ()
    with pytest.raises(UserError, match="Slurm offers no node"):
        survey(())


SOUND = "".join(line(f"h{number}") for number in range(1, 5))


def pieces(text: str) -> st.SearchStrategy[str]:
    """A real output with words cut, doubled, swapped or replaced."""
    words = st.sampled_from(text.replace("\n", " \n ").split(" "))
    odd = st.text(max_size=6) | st.sampled_from(["Gres=gpu:", "Gres=gpu:h100:8", "State=", "Nodes=h[1-", "=",
                                                "Switches=x", "NodeName=h1", "SwitchName=leaf1", "RealMemory=1",
                                                "\n"])
    return st.lists(words | odd, max_size=60).map(" ".join)


@settings(max_examples=80, deadline=None)
@given(pieces(SOUND) | pieces(SOUND).map(lambda text: SOUND + text), pieces(TOPOLOGY) | st.just(TOPOLOGY))
def test_any_output_is_read_or_refused(node_text, topology_text):
    try:
        spec = assemble(survey(show.nodes(node_text)), show.topology(topology_text))
    except UserError as error:
        assert error.exit_code == 2
    else:
        assert spec.nodes and spec.gpus_per_node > 0
