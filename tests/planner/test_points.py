"""Loading measured points: the repository's own, and files that leave out, misspell or break things."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.accuracy.points import FILE_KINDS, load
from launch.errors import UserError

MEASURED = Path(__file__).parents[2] / "benchmarks" / "measured"
MODEL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 100,
         "tied": False, "mlp": "swiglu"}


def write(folder: Path, kind: str, points: object, models: object = None) -> Path:
    document = {"schema_version": 1, "kind": kind, "split": "holdout", "models": models, "points": points}
    (folder / f"{kind}.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return folder


def one(folder: Path, point: dict, models: dict | None = None):
    return load(write(folder, "training", [point], models))[0]


def test_the_repository_s_points():
    points = load(MEASURED)
    assert {kind: sum(point.kind == kind for point in points) for kind in FILE_KINDS} == {
        "training": 106, "memory": 20, "rl_steps": 30, "decode": 108, "weight_sync": 28, "collectives": 57}
    for point in points:
        assert point.id and point.regime and point.source != "not_stated"
        assert (point.model is None) == bool(point.model_problem)
        assert point.kind == "parameters" or (point.gpu is None) == bool(point.gpu_problem)
        assert point.calibrates == (point.confidence != "secondary")
    unknown = {point.gpu_problem for point in points if point.kind not in ("weight_sync", "parameters")}
    assert unknown == {""}, "every GPU of the training, memory, decode and RL points is in the table"
    ids = [point.id for point in points if point.kind != "parameters"]
    assert len(ids) == len(set(ids))


def test_a_model_becomes_a_shape(tmp_path):
    point = one(tmp_path, {"id": "a", "model": "m", "model_overrides": {"layers": 3}},
                {"m": {**MODEL, "params": 5, "qk_norm": True, "mlp": "squared_relu"}})
    shape = point.model
    assert (shape.layers, shape.mlp_matrices, shape.qk_norm, shape.q_width) == (3, 2, True, 64)
    assert "params" not in point.model_data      # the count of the model without the override
    counted = load(tmp_path)[1]
    assert (counted.kind, counted.data["measured"], counted.model.layers) == ("parameters", {"parameters": 5}, 2)


@pytest.mark.parametrize("fields, problem", [
    ({"architecture": "MLA + MoE"}, "MLA + MoE"), ({**MODEL, "hidden": None}, "hidden not given"),
    ({**MODEL, "mlp": "maxout"}, "maxout is not modelled"), ({**MODEL, "tied": "not_stated"}, "not stated"),
    ({**MODEL, "layers": "many"}, "layers not given"), ({**MODEL, "num_experts": 8}, "experts_per_token, moe_ffn"),
    (None, "not described"), ("text", "not described")])
def test_an_unusable_model_has_a_reason(tmp_path, fields, problem):
    point = one(tmp_path, {"id": "a", "model": "m"}, {"m": fields})
    assert point.model is None and problem in point.model_problem


def test_an_unknown_gpu_has_a_reason(tmp_path):
    assert "ZX-9000" in one(tmp_path, {"hardware": {"gpu": "ZX-9000"}}).gpu_problem
    assert one(tmp_path, {"hardware": {"gpu": "not_stated"}}).gpu_problem == "the GPU is not stated"
    assert one(tmp_path, {"hardware": "eight of them"}).gpu_problem == "the GPU is not stated"


def test_absent_null_and_not_stated_are_the_same(tmp_path):
    point = one(tmp_path, {"id": "a", "parallelism": {"tp": 4, "pp": None, "vpp": "not_stated", "dp": 2.5, "cp": 0},
                           "measured": {"a_s": "1e3", "b_s": True, "c_s": float("nan"), "d_s": 2},
                           "recompute": "not_stated"})
    assert point.sizes() == {"tp": 4}
    assert point.sizes("measured.d_s") == point.sizes("nowhere") == {}
    assert [point.number(f"measured.{name}_s") for name in "abcd"] == [1000.0, None, None, 2.0]
    assert point.get("parallelism.pp", 7) == point.get("parallelism.vpp", 7) == point.get("x.y.z", 7) == 7
    assert point.recompute() == ()
    assert (point.regime, point.source, point.confidence) == ("not_stated",) * 3


@pytest.mark.parametrize("value, modules", [
    ("none", ()), ("full", ("full",)), ("selective", ("core_attn",)),
    ("core_attn+layernorm", ("core_attn", "layernorm")),
    (["mlp", "core_attn"], ("mlp", "core_attn"))])
def test_recompute(tmp_path, value, modules):
    assert one(tmp_path, {"recompute": value}).recompute() == modules


@pytest.mark.parametrize("text, fragment", [
    ("points: [", "not valid YAML"), ("- 1", "a mapping"), ("kind: taste\npoints: []", "unknown kind"),
    ("kind: memory\npoints: 3", "not a list"), ("kind: memory\npoints: [3]", "point 1 is not a mapping"),
    ("kind: memory\nmodels: [3]", "a mapping is expected"), ("kind: !!python/name:os.system", "not valid YAML")])
def test_broken_files_name_themselves(tmp_path, text, fragment):
    (tmp_path / "memory.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    assert fragment in caught.value.what and "memory.yaml" in caught.value.where and caught.value.fix


def test_other_files_beside_the_points_are_left_alone(tmp_path):
    (tmp_path / "mkdocs.yaml").write_text("site: x", encoding="utf-8")
    assert [each.id for each in load(write(tmp_path, "memory", [{"id": "a"}]))] == ["a"]


def test_a_directory_without_points(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError):
            load(folder)
    assert load(write(tmp_path, "decode", None)) == []      # a file may be empty of points


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("not_stated")
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner,
                                                                                           max_size=2), max_leaves=4)
FIELDS = ("id", "regime", "source", "confidence", "hardware", "model", "model_overrides", "parallelism", "measured")


@settings(max_examples=60, deadline=None)
@given(data=st.dictionaries(st.sampled_from(FIELDS), VALUES),
       model=st.dictionaries(st.sampled_from([*MODEL, "params"]), VALUES))
def test_odd_values_are_problems_of_the_point(tmp_path_factory, data, model):
    folder = write(tmp_path_factory.mktemp("points"), "training", [{**data, "model": "m"}],
                   {"m": {**MODEL, **model}})
    point = load(folder)[0]
    assert (point.model is None) == bool(point.model_problem) and point.sizes() is not None
    assert isinstance(point.recompute(), tuple) and isinstance(point.regime, str)
