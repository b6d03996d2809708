from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.cluster.file import load_cluster, parse_cluster
from launch.cluster.spec import ClusterSpec
from launch.errors import UserError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs/clusters").glob("*.yaml"))
TEXT = """\
nodes:
  count: 4
  names: "n[1-4]"
gpus:
  kind: h100
  per_node: 8
network:
  nics_per_node: 8
  nic_gbit_per_s: 400
  rails: 8
host:
  memory_gb: 2000
"""
TREE = """\
  switches:
    - {name: a, nodes: "n[1-2]"}
    - {name: b, nodes: "n[3-4]"}
    - {name: top, switches: "a,b"}
"""


def changed(old: str, new: str, text: str = TEXT) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


def with_tree(tree: str = TREE) -> str:
    return changed("  rails: 8\n", "  rails: 8\n" + tree)


def refusal(text: str) -> str:
    with pytest.raises(UserError) as error:
        parse_cluster(text, "c.yaml")
    assert error.value.exit_code == 2
    return str(error.value)


def test_values_and_sources():
    spec = parse_cluster(with_tree() + "node_mtbf_hours: 9000\n", "c.yaml")
    assert spec.nodes == ("n1", "n2", "n3", "n4") and spec.total_gpus == 32 and spec.name == "c"
    assert spec.gpu.name == "H100-SXM-80GB" and spec.nic_bandwidth == 50e9
    assert spec.host_memory_bytes == 2_000_000_000_000 and spec.node_mtbf_hours == 9000
    assert [(switch.name, switch.nodes, switch.switches) for switch in spec.switches] == [
        ("a", ("n1", "n2"), ()), ("b", ("n3", "n4"), ()), ("top", (), ("a", "b"))]
    assert spec.sources["cluster.nic_bandwidth"] == "c.yaml:9" and spec.sources["cluster.nodes"] == "c.yaml:1"
    assert spec.sources["cluster.nvlink_nodes"] == "default" and "datasheet" in spec.sources["gpu.hbm_bandwidth"]


def test_what_the_file_says_of_a_gpu_replaces_the_table():
    spec = parse_cluster(changed("  per_node: 8\n", "  per_node: 8\n  memory_gb: 70\n  memory_gb_per_s: 3000\n"
                                                  "  nvlink_gb_per_s: 200\n"),
                         "c.yaml")
    assert spec.gpu.usable_bytes == spec.gpu.hbm_bytes == 70_000_000_000
    assert (spec.gpu.hbm_bandwidth, spec.gpu.nvlink_bandwidth) == (3e12, 200e9)
    assert spec.sources["gpu.usable_bytes"] == "c.yaml:7, gpus.memory_gb"


def test_counts_fill_leaves_in_the_order_of_the_nodes():
    spec = parse_cluster(with_tree("  switches:\n    - {name: a, nodes: 1}\n    - {name: b, nodes: [n1, n4]}\n"
                                   "    - {name: c, nodes: 1}\n    - {name: top, switches: [a, 'b,c']}\n"), "c.yaml")
    assert [switch.nodes for switch in spec.switches[:3]] == [("n2",), ("n1", "n4"), ("n3",)]


def test_two_spines_over_the_same_leaves_are_a_tree():
    parse_cluster(with_tree(TREE + '    - {name: second, switches: "a,b"}\n'), "c.yaml")


def test_nodes_by_count_alone_get_names():
    spec = parse_cluster(changed('  names: "n[1-4]"\n', ""), "c.yaml")
    assert spec.nodes == ("node001", "node002", "node003", "node004")


@pytest.mark.parametrize(("old", "new", "words"), [
    ("count: 4", "count: 5", ["c.yaml:1", "nodes.count = 5, but nodes.names lists 4"]),
    ("count: 4", "count: 0", ["c.yaml:2, nodes.count", "nodes.count = 0", "integer >= 1"]),
    ("count: 4", "count: 1e30", ["nodes.count = 1e+30", "integer"]),
    ('names: "n[1-4]"', "names: []", ["nodes.names is empty"]),
    ('names: "n[1-4]"', "names: ''", ["nodes.names is empty"]),
    ('names: "n[1-4]"', 'names: "n[1-4"', ["c.yaml:3, nodes.names", "is not closed"]),
    ('names: "n[1-4]"', 'names: "n[1-3],n2"', ["n2 more than once"]),
    ('names: "n[1-4]"', 'names: 7', ["nodes.names = 7"]),
    ("kind: h100", "kind: h101", ["c.yaml:5, gpus.kind", "nearest: H100-SXM-80GB", "B200"]),
    ("kind: h100", "kind: [h100, a100]", ["one kind", "one file for each kind"]),
    ("  per_node: 8", "  per_node: -8", ["gpus.per_node = -8", "c.yaml:6"]),
    ("  per_node: 8", "  per_node: true", ["gpus.per_node = true"]),
    ("  per_node: 8", "  per_nodes: 8", ["unknown key gpus.per_nodes", "did you mean gpus.per_node?",
                                     "gpus.per_node is missing", "2 errors"]),
    ("  rails: 8", "  rails: 9", ["rails = 9", "more rails than NICs", "c.yaml:10"]),
    ("  rails: 8", "  rails: 4", ["rails = 4", "rails: 8", "rails: 1"]),
    ("nics_per_node: 8", "nics_per_node: 3", ["does not divide gpus.per_node = 8"]),
    ("nic_gbit_per_s: 400", "nic_gbit_per_s: 0", ["network.nic_gbit_per_s = 0", "> 0"]),
    ("nic_gbit_per_s: 400", "nic_gbit_per_s: .inf", ["network.nic_gbit_per_s = inf"]),
    ("nic_gbit_per_s: 400", "nic_gbit_per_s: .nan", ["network.nic_gbit_per_s = nan"]),
    ("nic_gbit_per_s: 400", "nic_gbit_per_s: 400G", ["network.nic_gbit_per_s = '400G'", "number"]),
    ("memory_gb: 2000", "memory_gb: -1", ["host.memory_gb = -1"]),
    ("host:\n  memory_gb: 2000\n", "", ["host is missing"]),
    ("host:\n", "switches: 3\nhost:\n", ["unknown key switches", "did you mean network.switches?"]),
    ("  rails: 8", "  rails: 8\n  nvlink_nodes: 3", ["nvlink_nodes = 3", "does not divide the 4 nodes"]),
    ("host:\n", "coefficients:\n  training.gemm_bf17: {value: 0.5, source: x}\nhost:\n",
     ["c.yaml:12, coefficients.training.gemm_bf17", "did you mean training.gemm_bf16?"]),
    ("host:\n", "coefficients:\n  training.gemm_bf16: 0.5\nhost:\n", ["coefficients.training.gemm_bf16 = 0.5"]),
    ("host:\n", "coefficients:\n  training.gemm_bf16: {value: 0.5}\nhost:\n",
     ["coefficients.training.gemm_bf16.source is missing"]),
    ("host:\n", "coefficients:\n  training.gemm_bf16: {value: -0.5, source: x}\nhost:\n",
     ["c.yaml:12, coefficients.training.gemm_bf16", "-0.5 is out of range: 0.001 to 1", "the default 0.877"]),
    ("host:\n", "coefficients:\n  training.gemm_bf16: {value: 85, source: x}\nhost:\n", ["85 is out of range"]),
    ("host:\n", "coefficients:\n  rl.train_efficiency: {value: 0.4, source: x}\nhost:\n",
     ["c.yaml:12", "0.4 is not between train_efficiency_low = 0.71", "set all three"])])
def test_one_fault_in_a_file_is_told_with_its_line_and_remedy(old, new, words):
    text = refusal(changed(old, new))
    assert all(word in text for word in words), text
    assert "c.yaml" in text and "fix:" in text


@pytest.mark.parametrize(("tree", "words"), [
    (TREE.replace("name: b", "name: a"), ["switch a is defined 2 times", "c.yaml:13"]),
    (TREE.replace("n[3-4]", "n[2-4]"), ["node n2 is under a and b", "c.yaml:13"]),
    (TREE.replace("n[3-4]", "n4"), ["no switch connects n3"]),
    (TREE.replace("n[3-4]", "n[3-5]"), ["connects 'n5', which is not a node"]),
    (TREE.replace("a,b", "a,x"), ["connects 'x', which is not a switch"]),
    (TREE.replace('switches: "a,b"', 'switches: "a"'), ["nothing connects"]),
    (TREE.replace('    - {name: top, switches: "a,b"}\n', ""), ["nothing connects a, b"]),
    (TREE.replace('switches: "a,b"', 'switches: "a,b,top"'), ["switch top is below itself"]),
    (TREE.replace('switches: "a,b"', 'switches: "a,b", nodes: n1'), ["connects both nodes and switches"]),
    (TREE.replace(', switches: "a,b"', ""), ["switch top connects nothing"]),
    (TREE.replace('"n[1-2]"', "3"), ["switch a has 3 nodes, but only 2 are left"]),
    (TREE.replace('"n[1-2]"', "1"), ["no switch connects n2"]),
    (TREE.replace('"n[1-2]"', "-1"), ["network.switches.0.nodes = -1"]),
    (TREE.replace('"n[1-2]"', '"n[1-"'), ["network.switches.0.nodes", "not closed"])])
def test_a_switch_tree_that_is_none(tree, words):
    text = refusal(with_tree(tree))
    assert all(word in text for word in words), text


@pytest.mark.parametrize("text", ["", "[]", "3", "nodes", "a: *b", "{", "nodes: {count: 1}\nnodes: {}", "\x00"])
def test_what_is_no_cluster_file(text):
    assert "c.yaml" in refusal(text)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "latin.yaml", "bad\0name"):
        with pytest.raises(UserError):
            load_cluster(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_cluster_loads(path):
    spec = load_cluster(path)
    assert path.read_text().startswith("#")
    assert all(key in spec.sources for key in ("cluster.nodes", "cluster.rails", "gpu.bf16_flops"))


def test_the_shipped_h100_clusters_are_those_promised():
    sizes = {len(spec.nodes): spec for spec in map(load_cluster, SHIPPED) if spec.gpu.name == "H100-SXM-80GB"}
    assert sorted(sizes) == [1, 2, 8, 32, 128]
    assert all(spec.total_gpus == 8 * nodes and spec.rails == 8 for nodes, spec in sizes.items())
    units = [switch for switch in sizes[128].switches if switch.nodes]
    assert [len(unit.nodes) for unit in units] == [32] * 4 and len(sizes[128].switches) == 5


scalars = st.none() | st.booleans() | st.integers(-2, 10**7) | st.floats() | st.text(max_size=8) | st.sampled_from(
    ["h100", "n[1-4]", "n[1-", "a", "top", 8, 400, 1e308, 10**400])
keys = st.sampled_from(["nodes", "gpus", "network", "host", "count", "names", "kind", "per_node", "rails", "switches",
                        "name", "nics_per_node", "nic_gbit_per_s", "memory_gb", "coefficients", "value", "source",
                        "training.gemm_bf16"]) | st.text(max_size=4)
trees = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5),
                     max_leaves=12)


def loads_or_refuses(text: str) -> None:
    try:
        assert isinstance(parse_cluster(text, "c.yaml"), ClusterSpec)
    except UserError as error:
        assert error.exit_code == 2 and "c.yaml" in str(error)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_sound_file_with_anything_in_place_of_a_value(data):
    """Fuzz: one to three values of a whole file, at any depth, are replaced, removed or joined by another key."""
    document = yaml.safe_load(with_tree() + "coefficients: {training.gemm_bf16: {value: 0.5, source: x}}\n")
    for _ in range(data.draw(st.integers(1, 3))):
        at = document
        while True:
            places = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not places:
                break
            place = data.draw(st.sampled_from(places))
            if isinstance(at[place], (dict, list)) and data.draw(st.booleans()):
                at = at[place]
                continue
            if data.draw(st.integers(0, 3)) == 0:
                del at[place]
            else:
                at[place] = data.draw(trees)
            break
    loads_or_refuses(yaml.safe_dump(document, sort_keys=False))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60) | trees.map(lambda value: yaml.safe_dump(value)))
def test_any_text_loads_or_is_refused(text):
    loads_or_refuses(text)
