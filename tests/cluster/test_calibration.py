from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.cluster.calibration import edited, with_coefficients
from launch.cluster.file import load_cluster, parse_cluster
from launch.cluster.known_coefficients import known_coefficients
from launch.errors import UserError

HEAD = """\
# A cluster with a story.

nodes: {count: 2}           # two
gpus:
  kind: h100
  per_node: 8
network: {nics_per_node: 8, nic_gbit_per_s: 400, rails: 8}
host:
  memory_gb: 2000           # as bought
"""
BLOCK = """\

# What we measured.
coefficients:
    training.gemm_bf16: {value: 0.5, source: by hand}    # low: the old driver
    training.hbm:                                        # of three runs
        value: 0.7
        source: "run x"
    # end of the list
name: story                 # the last key
"""
FLOW = "coefficients: {training.gemm_bf16: {value: 0.5, source: by hand}}\n"
A, B, C = "training.gemm_bf16", "training.hbm", "training.layer_s"
FREE = sorted(key for key in known_coefficients()
              if not key.endswith(("_low", "_high")) and f"{key}_low" not in known_coefficients())
"""Those that need not lie between others."""


@pytest.mark.parametrize("tail", ["", BLOCK, FLOW, "coefficients: {}\n", BLOCK.rpartition("name:")[0].rstrip("\n")])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("values", [{A: 0.61}, {C: 1.25e-5}, {A: 0.61, B: 0.93, C: 0.123456789}, {}])
def test_round_trip(tmp_path, tail, newline, values):
    """The values arrive, all else stays, comments included; a second calibration replaces the first."""
    path = tmp_path / "c.yaml"
    path.write_text((HEAD + tail).replace("\n", newline), newline="")
    path.chmod(0o640)
    before = load_cluster(path)
    after = with_coefficients(path, {f"coefficients.{key}": value for key, value in values.items()}, 'runs/a "b" #1')
    assert after == load_cluster(path)
    expected = before.coefficients | {f"coefficients.{key}": pytest.approx(value, rel=1e-5)
                                      for key, value in values.items()}
    assert after.coefficients == expected
    for key in values:
        assert after.sources[f"coefficients.{key}"].startswith('runs/a "b" #1 (')
    text = path.read_bytes().decode()
    comments = [line[line.index("#"):] for line in (HEAD + tail).splitlines() if "#" in line]
    assert all(comment in text for comment in comments)
    assert ("\r\n" in text) == (newline == "\r\n") and text.count("\n") - text.count("\r\n") in (0, text.count("\n"))
    assert path.stat().st_mode & 0o777 == 0o640 and [child.name for child in tmp_path.iterdir()] == ["c.yaml"]
    again = with_coefficients(path, dict.fromkeys(values, 0.25), "second")
    assert all(again.coefficients[f"coefficients.{key}"] == 0.25 for key in values)
    assert len(path.read_bytes()) <= len(text) + 40 * len(values)     # replaced, not appended


def test_lines_of_other_sections_do_not_move():
    new = edited(HEAD + BLOCK, {A: 0.9, C: 0.1}, "run")
    old_lines, new_lines = (HEAD + BLOCK).splitlines(), new.splitlines()
    differing = [line for line in old_lines if line not in new_lines]
    assert differing == ["    training.gemm_bf16: {value: 0.5, source: by hand}    # low: the old driver"]
    assert '    training.gemm_bf16: {value: 0.9, source: "run"}    # low: the old driver' in new_lines
    added = new_lines.index('    training.layer_s: {value: 0.1, source: "run"}')
    assert added < new_lines.index("name: story                 # the last key")


@pytest.mark.parametrize(("text", "values", "words"), [
    (HEAD, {"training.gemm": 0.5}, "unknown coefficient training.gemm"),
    (HEAD, {A: float("nan")}, "nan is out of range"),
    (HEAD, {A: -1.0}, "-1 is out of range: 0.001 to 1"),
    (HEAD, {A: 45.0}, "45 is out of range"), (HEAD, {"sync.pause_s": float("inf")}, "inf s is out of range: 0 to"),
    (HEAD, {"rl.train_efficiency": 0.1}, "0.1 is not between train_efficiency_low = 0.71"),
    (HEAD + "...\n", {A: 0.5}, "c.yaml"),
    ("{nodes: {count: 2}, gpus: {kind: h100, per_node: 8}, host: {memory_gb: 1}, "
     "network: {nics_per_node: 8, nic_gbit_per_s: 1, rails: 1}}\n", {A: 0.5}, "cannot be inserted"),
    ("nodes: 3\n", {A: 0.5}, "nodes = 3")])
def test_a_refusal_leaves_the_file_as_it_was(tmp_path, text, values, words):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        with_coefficients(path, values, "run")
    assert path.read_text() == text and [child.name for child in tmp_path.iterdir()] == ["c.yaml"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(FREE).flatmap(lambda key: st.tuples(st.just(key), st.floats(
    known_coefficients()[key].allowed.least, known_coefficients()[key].allowed.most))), max_size=5).map(dict),
       st.text(max_size=12), st.sampled_from(["", BLOCK, FLOW]))
def test_any_values_and_names_of_runs(values, run, tail):
    text = edited(HEAD + tail, {key.removeprefix("coefficients."): value for key, value in values.items()}, run)
    spec = parse_cluster(text, "c.yaml")
    for key, value in values.items():
        assert spec.coefficients[key] == pytest.approx(value, rel=1e-5)
        assert spec.sources[key].startswith(run)
