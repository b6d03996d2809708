"""Our reading of host lists against Slurm's own, on lists made at random."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.cluster.hostlist import expand
from launch.errors import UserError
from tests.slurm_cluster import SlurmCluster

BATCH = 40
"""Lists of one example: each needs a process of scontrol's."""
_number = st.integers(0, 130)


@st.composite
def _range(draw) -> str:
    low, count, width = draw(_number), draw(st.integers(0, 12)), draw(st.integers(1, 4))
    return f"{low:0{width}d}" + (f"-{low + count:0{width}d}" if draw(st.booleans()) else "")


@st.composite
def _name(draw) -> str:
    """A name with up to two brackets, the last of them at its end: text after it is an error to Slurm 22.05."""
    text = draw(st.sampled_from(["a", "gpu", "h100-", "r", "b04-", "rack1-n", "n.x-"]))
    for joint in draw(st.lists(st.sampled_from(["-", "n", "-ib"]), max_size=2)):
        text += f"{joint}[{','.join(draw(st.lists(_range(), min_size=1, max_size=3)))}]"
    return text + ("" if text[-1:] == "]" or text[-1:].isalnum() else "7")


LISTS = st.lists(st.lists(_name(), min_size=1, max_size=3).map(",".join), min_size=BATCH, max_size=BATCH)
JUNK = st.lists(st.text(alphabet="ab019,-[]", min_size=1, max_size=12), min_size=BATCH, max_size=BATCH)
ONCE = settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))


def scontrol(slurm: SlurmCluster, text: str) -> list[str]:
    return slurm.run("scontrol", "show", "hostnames", text, check=False).stdout.split()


@ONCE
@given(texts=LISTS)
def test_what_slurm_accepts_we_read_alike(slurm: SlurmCluster, texts):
    for text in texts:
        assert list(expand(text)) == scontrol(slurm, text), text


@ONCE
@given(texts=JUNK)
def test_what_we_accept_slurm_reads_alike(slurm: SlurmCluster, texts):
    """The other way round does not hold: Slurm makes `a]` of `a[1-3` and says nothing."""
    for text in texts:
        try:
            ours = list(expand(text))
        except UserError:
            continue
        assert ours == scontrol(slurm, text), text


def test_slurm_is_silent_on_a_bad_list(slurm: SlurmCluster):
    """Why we count, and do not ask it."""
    answer = slurm.run("scontrol", "show", "hostnames", "h100-[001-002]-ib0", check=False)
    assert answer.returncode == 0 and answer.stdout.strip() == ""
    assert list(expand("h100-[001-002]-ib0")) == ["h100-001-ib0", "h100-002-ib0"]
