"""What is printed: at most 100 columns, each finding once, and a line that Slurm understands."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from launch.cluster.hostlist import compress, expand
from launch.health.check import critical, ok
from launch.health.ledger import Ledger
from launch.health.verdict import judge
from launch.report.diagnose.preflight import print_preflight


def printed(verdict, width: int = 100) -> list[str]:
    stream = io.StringIO()
    print_preflight(verdict, Console(file=stream, width=width, highlight=False))
    return stream.getvalue().splitlines()


@pytest.fixture
def lines(fleet):
    faults = {"n2": {"missing": [3]}, "n7": {"missing": [3], "driver": "550"}, "n9": {"driver": "550"}}
    return printed(judge(fleet(32, faults), 28, 4))


def test_width(lines):
    assert max(map(len, lines)) <= 100


def test_healthy_nodes_share_a_row(lines):
    [row] = [line for line in lines if line.startswith("n[1,3-6,8,10-32]")]
    assert row.split()[1:] == ["ok"] * (len(row.split()) - 2) + ["fit"]


def test_each_finding_has_evidence_and_remedy(lines):
    text = "\n".join(lines)
    assert "CRIT n[2,7]: gpu.count" in text and "warn n[7,9]: gpu.driver.differs" in text
    assert text.count("gpu.count") == 1 and text.count("remedy: ") == 2
    assert "7 GPUs, but CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 names others; the plan needs 8" in text


def test_the_gravest_first(fleet):
    text = "\n".join(printed(judge(fleet(4, {"n1": {"driver": "550"}, "n2": {"missing": [3]}}), 3)))
    assert 0 < text.index("CRIT n2") < text.index("warn n1")


def test_the_verdict_and_the_line_to_paste(lines):
    assert lines[-3:] == ["30 of 32 nodes are fit, 28 needed, 2 of 4 spares left", "the job may start",
                          "--exclude=n[2,7]"]


def test_why_it_may_not_start(fleet, tmp_path):
    ledger = Ledger(tmp_path / "ledger.json", cluster_nodes=8)
    ledger.add("n1", "gpu.ecc: 4 errors", "attempts/1/nodes/n1/preflight.json", "7")
    lines = printed(judge(fleet(4, dict.fromkeys(("n2", "n3", "n4"), {"nics": {"down": ["mlx5_0"]}})), 3, 0, ledger))
    text = "\n".join(lines)
    assert "CRIT all nodes: nic.state" in text and "fails on 3 of 4 nodes" in text
    assert "the job may not start as planned" in text and "in ledger" in text and lines[-1] == "--exclude=n1"
    assert max(map(len, lines)) <= 100


def test_many_bad_nodes_stay_on_a_screen():
    nodes = {f"node{index:03d}": [critical("gpu.ecc", None, f"error {index}", "repair") if index % 3 == 0 else
                                  ok("gpu.ecc")] for index in range(200)}
    lines = printed(judge(nodes, 100))
    assert sum("excluded" in line for line in lines) <= 40 and any("omitted" in line for line in lines)


NAMES = st.from_regex(r"[a-z]{1,3}(-?[0-9]{1,4}){0,2}(-ib)?", fullmatch=True)


@given(st.lists(NAMES, max_size=30))
@settings(max_examples=100, deadline=None)
def test_compress_is_undone_by_expand(names):
    text = compress(names)
    assert sorted(expand(text) if text else ()) == sorted(set(names))


@pytest.mark.parametrize("names, text", [
    (["h100-001", "h100-003", "h100-002"], "h100-[001-003]"), (["n8", "n9", "n10", "n11"], "n[8-11]"),
    (["n099", "n100"], "n[099-100]"), (["n09", "n9"], "n[09,9]"), (["a1-ib", "a2-ib"], "a[1-2]-ib"),
    (["login"], "login"), (["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1"), ([], "")])
def test_compress(names, text):
    assert compress(names) == text
