"""`megatron-rl plan accuracy`: how errors are counted, that each check can fail, and the models over the repository's
points."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.accuracy import score as scoring
from launch.accuracy.checks import run_checks
from launch.accuracy.fit import median, robust_mean, search
from launch.accuracy.interface import KINDS, VERDICTS, Predicted, measured
from launch.accuracy.points import FILE_KINDS, Point, load
from launch.accuracy.report import evaluate
from launch.accuracy.score import DEVELOPMENT, TARGETS, Target, kind_scores, leave_one_out, predict, score
from launch.accuracy.table import figure, markdown
from launch.cli.main import main
from launch.coefficients.base import Coefficients, coefficient
from launch.errors import UserError
from tests.patience import patient
from tools.validation_page import PAGE

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Rate(Coefficients):
    rate: float = coefficient(2.0, "s", "seconds of a unit of work", "a test")


class Stub:
    """Time = rate x work; whatever a point puts under `say` is said instead."""

    QUANTITIES = {"step_time_s": "s", "fits": "", "parameters": ""}
    TYPICAL = {"rate": 3.0}

    def default(self) -> Rate:
        return Rate()

    def predict(self, point: Point, coefficients: Rate) -> list[Predicted]:
        say = point.data.get("say")
        if isinstance(say, Exception):
            raise say
        values = {name: point.number(f"measured.{name}") for name in point.data["measured"]}
        return [measured(name, value, say if say is not None else coefficients.rate * point.number("work", 0.0))
                for name, value in values.items() if value is not None]

    def calibrate(self, points: Sequence[Point], start: Rate) -> Rate:
        return Rate(median([point.number("measured.step_time_s") / point.number("work") for point in points]))

    def class_of(self, point: Point) -> str:
        return point.text("class") or ""

    def lower_bound_s(self, point: Point, coefficients: Rate) -> float | None:
        return point.number("bound")


def find(kind: str) -> Stub:
    return Stub()


def point(name: str, kind: str = "training", source: str = "s", regime: str = "r", **data: object) -> Point:
    return Point(id=name, kind=kind, regime=regime, source=source, confidence="read", model=None, model_name="m",
                 data=data)


def timed(name: str, work: float, seconds: float, **more: object) -> Point:
    return point(name, work=work, measured={"step_time_s": seconds}, **more)


def test_error_is_signed_and_zero_inside_a_range():
    assert measured("s", 10.0, 12.0).error == pytest.approx(0.2)
    errors = [Predicted("s", 10.0, 20.0, value).error for value in (5.0, 10.0, 15.0, 20.0, 30.0)]
    assert errors == [-0.5, 0, 0, 0, 0.5]
    assert measured("s", 10.0, None).error is None
    assert [measured("fits", *pair).error for pair in ((1, 1), (0, 0), (0, 1), (1, 0))] == [0, 0, 1, -1]


def test_medians_and_targets():
    rows = predict([timed(str(error), 1.0, 2.0 / (1 + error)) for error in (0.2, -0.1, 0.04)], find)
    found = score("all", rows, Target(0.101, 0.03))
    assert (found.points, round(found.absolute, 9), round(found.signed, 9), found.met) == (3, 0.1, 0.04, False)
    assert score("all", rows, Target(0.101, 0.05)).met and not score("all", rows, Target(0.09)).met
    assert score("none", []) is None and score("all", rows).met is None


def test_a_regime_has_a_target_from_eight_points_on():
    for count, target in ((7, None), (8, TARGETS["training"])):
        rows = predict([timed(str(number), 1.0, 2.0) for number in range(count)], find)
        assert scoring.regime_scores(rows)["training", "r"].target == target


def test_verdicts_enter_no_median():
    rows = predict([point("a", "memory", measured={"fits": 1}, say=1),
                    point("b", "memory", measured={"fits": 0}, say=1)], find)
    assert kind_scores(rows) == {} and [row.result.error for row in rows] == [0, 1]


def test_rl_phases_and_totals_colocated_and_disaggregated_apart():
    points = [point(f"{mode}{name}{number}", "rl_steps", mode=mode, measured={name: 1.0}, say=1.1)
              for mode, count in (("colocated_sync", 3), ("one_step_off", 2), ("fully_async", 1))
              for name in ("step_time_s", "train_time_s") for number in range(count)]
    points.append(point("few", "rl_steps", mode="colocated_sync", measured={"refit_time_s": 1.0}, say=1.1))
    scores = kind_scores(predict(points, find))["rl_steps"]
    found = {each.label: (each.points, each.target and each.target.absolute) for each in scores}
    assert found == {"colocated, the step": (3, 0.2), "colocated, train": (3, 0.25), "colocated, refit": (1, None),
                     "disaggregated, the step": (3, 0.2), "disaggregated, train": (3, 0.25)}


@pytest.mark.parametrize("say, reason", [
    (UserError("TP 3 does not divide"), "TP 3 does not divide"), (KeyError("tp"), "the model failed: KeyError"),
    (math.inf, "the model failed: it says inf"), (math.nan, "the model failed: it says nan")])
def test_a_point_that_the_model_stumbles_over_is_listed(say, reason):
    rows = predict([point("a", measured={"step_time_s": 2.0}, say=say), timed("b", 1.0, 2.0)], find)
    assert [row.result.predicted for row in rows] == [None, 2.0] and rows[0].result.reason.startswith(reason)


def test_each_source_is_left_out_in_turn():
    """Two sources at 2 s, one at 4 s: fitted without it, its points are predicted at half."""
    development = [replace(timed(f"{source}{number}", 1.0, seconds), source=source)
                   for source, seconds in (("a", 2.0), ("b", 2.0), ("c", 4.0)) for number in range(2)]
    found = leave_one_out(predict(development, find), development, find)
    assert [(each.source, each.inside.signed, each.outside.signed) for each in found] == [
        ("a", 0.0, 0.5), ("b", 0.0, 0.5), ("c", -0.5, -0.5)]
    assert all(each.reason == "" for each in found)
    others = [timed("new", 1.0, 3.0)]                       # a source that took no part: nothing to leave out
    assert leave_one_out(predict(others, find), development, find) == []


def test_a_source_that_is_alone_is_not_predicted_from_nothing():
    """Points of one class say nothing about another, and neutral values are nobody's measurement."""
    development = [replace(each, source=source, data={**each.data, "class": kind}) for each, source, kind in (
        (timed("a", 1.0, 2.0), "a", "x"), (timed("b", 1.0, 2.0), "b", "x"), (timed("c", 1.0, 4.0), "a", "y"))]
    found = {(each.source, each.part): each for each in leave_one_out(predict(development, find), development, find)}
    assert set(found) == {("a", "x"), ("b", "x"), ("a", "y")}
    assert found["a", "x"].outside.signed == 0.0
    assert found["a", "y"].outside is None and found["a", "y"].reason == "no other source has points of y"


def outcome(points: list[Point], name: str) -> bool | None:
    checks = {check.name: check for check in run_checks(predict(points, find), find)}
    return next(check.passed for title, check in checks.items() if name in title)


def test_checks_pass_and_fail():
    assert outcome([point("m", "parameters", measured={"parameters": 10}, say=10)], "exact") is True
    assert outcome([point("m", "parameters", measured={"parameters": 10}, say=11)], "exact") is False
    assert outcome([point("o", "memory", measured={"fits": 0}, say=0)], "never fits") is True
    assert outcome([point("o", "memory", measured={"fits": 0}, say=1)], "never fits") is False
    assert outcome([point("o", "memory", measured={"fits": 1}, say=1)], "never fits") is None
    for bound, expected, below, near in ((1.0, 3.0, True, True), (2.5, 3.0, False, True), (1.0, 5.0, True, False),
                                         (0.1, 5.0, True, None)):
        mine = [point("w", "weight_sync", measured={"step_time_s": 2.0}, say=expected, bound=bound)]
        assert (outcome(mine, "lower bound"), outcome(mine, "within 2x")) == (below, near)


def run(name: str, tp: int, gpus: int, seconds: float, say: float, **sizes: int) -> Point:
    return timed(name, 1.0, seconds, say=say, global_batch=gpus, seq_len=1000, hardware={"num_gpus": gpus},
                 parallelism={"tp": tp, "dp": gpus // tp, **sizes})


def test_orderings():
    four, eight = run("four", 4, 64, 10.0, 10.0), run("eight", 8, 64, 11.0, 12.0)
    assert outcome([four, eight], "order of tensor") is True
    assert outcome([four, run("eight", 8, 64, 11.0, 9.0)], "order of tensor") is False
    assert outcome([four, run("eight", 8, 64, 10.1, 9.0)], "order of tensor") is None     # too near to tell
    for seconds, say, flat in ((10.1, 10.2, True), (10.1, 10.5, False), (11.0, 10.5, None)):
        assert outcome([four, run("more", 4, 512, seconds, say)], "weak scaling") is flat
    assert outcome([four], "TP 8 with half") is True         # the stub says the same for both


def test_search():
    calls = []

    def cost(values):
        calls.append(1)
        return math.log(values["a"] / 3) ** 2 + math.log(values["a"] * values["b"] / 6) ** 2

    best = search(cost, {"a": 1.0, "b": 1.0}, evaluations=500)
    assert best["a"] == pytest.approx(3, rel=0.01) and best["b"] == pytest.approx(2, rel=0.01) and len(calls) <= 500
    assert search(cost, {"a": 1.0, "b": 1.0}, evaluations=500) == best
    assert search(cost, {"a": 1.0, "b": 1.0}, bounds={"a": (0.5, 2.0)})["a"] == 2.0
    calls.clear()
    few = search(cost, {"a": 1.0, "b": 1.0}, evaluations=7)
    assert len(calls) == 7 and cost(few) <= cost({"a": 1.0, "b": 1.0})
    assert robust_mean([0.01], 0.1) == pytest.approx(0.01 ** 2 / 2, rel=0.01) and robust_mean([10.0], 0.1) < 1.1


@pytest.mark.parametrize("value, unit, text", [
    (14.66, "s", "14.7 s"), (0.0123, "s", "12.3 ms"), (3.2e-5, "s", "32.0 us"), (58.8e9, "bytes", "58.8 GB"),
    (1117.6, "tokens/s", "1,118"), (230e9, "bytes/s", "230 GB/s"), (8030261248, "", "8,030,261,248")])
def test_figures(value, unit, text):
    assert figure(value, unit) == text


# The models themselves.

@pytest.fixture(scope="module")
def report():
    return evaluate(load(DEVELOPMENT), leave_out=False)


def test_every_target_is_met(report):
    missed = [f"{kind}, {each.label}: {each.absolute:.1%}, {each.signed:+.1%}"
              for kind, scores in report.kinds.items() for each in scores if each.met is False]
    missed += [f"{kind}, {regime}: {each.absolute:.1%}, {each.signed:+.1%}"
               for (kind, regime), each in report.regimes.items() if each.met is False]
    missed += [f"{check.name}: {check.detail}" for check in report.checks if check.passed is False]
    assert not missed, "\n".join(missed)
    assert set(report.kinds) == set(KINDS)


def test_only_what_is_not_described_is_not_predicted(report):
    assert not [row for row in report.rows if row.result.reason.startswith("the model failed")]
    assert len(report.unpredicted) < 0.1 * len(report.rows)


def test_quantities_have_units(report):
    for row in report.rows:
        if row.result.predicted is not None:
            assert row.result.quantity in scoring.module(row.point.kind).QUANTITIES


def test_a_prediction_knows_no_names(report):
    """The same point under another id, repository and page is predicted alike. (The release of a program may select
    an engine class.)"""
    for kind in FILE_KINDS:
        rows = [row for row in report.rows if row.point.kind == kind][::7]
        for row in rows:
            release = {"version": row.point.get("source.version")}
            data = {**row.point.data, "id": "x", "source": {"repo": "x/y", **release}, "notes": ""}
            other = replace(row.point, id="x", source="x/y", data=data)
            assert row.result in [each.result for each in predict([other])]


def test_the_page_is_up_to_date(report):
    """Without the section on sources, which takes a minute: `make docs` writes the whole."""
    text = PAGE.read_text(encoding="utf-8")
    for section in markdown(report).split("\n\n## "):
        assert section.strip() in text, "docs/validation.md is older than the models: make docs"
    assert "## Each source left out in turn" in text


def test_json(capsys):
    assert main(["plan", "accuracy", "--json", "--no-leave-out"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["points"][0]) == {"id", "kind", "regime", "quantity", "measured", "predicted", "error"}
    entries = [(each["kind"], each["id"], each["quantity"]) for each in document["points"] + document["unpredicted"]]
    assert len(entries) == len(set(entries))
    assert {name for _, name, _ in entries} == {each.id for each in load(DEVELOPMENT)}
    for each in document["points"]:
        low, high = each["measured"] if isinstance(each["measured"], list) else (each["measured"],) * 2
        inside = low <= each["predicted"] <= high
        assert (each["error"] == 0) == inside
    assert document["regimes"]["decode/decode_tpot_vllm"]["points"] == 60
    assert all(each["reason"] for each in document["unpredicted"])


def test_the_tables_are_at_most_100_columns_wide(capsys):
    assert main(["plan", "accuracy", "--no-leave-out"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    for words in ("median errors, by regime", "median errors, by kind", "checks", "not predicted"):
        assert words in out.lower()


@pytest.mark.parametrize("arguments, fragment", [
    (["--kind", "taste"], "unknown kind"), (["nowhere"], "nowhere is not a directory"),
    (["."], "no measured points")])
def test_usage(arguments, fragment, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "accuracy", *arguments]) == 2
    assert fragment in capsys.readouterr().err


def test_without_the_repository(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "DEVELOPMENT", tmp_path / "gone")
    assert main(["plan", "accuracy"]) == 2
    assert "name a directory of measured points" in capsys.readouterr().err


def test_from_another_directory(tmp_path):
    command = [sys.executable, "-m", "launch", "plan", "accuracy", "--kind", "parameters", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True,
                          text=True, timeout=patient(60))
    assert done.returncode == 0 and all(each["error"] == 0 for each in json.loads(done.stdout)["points"])


DOCUMENTS = {kind: yaml.safe_load((DEVELOPMENT / f"{kind}.yaml").read_text(encoding="utf-8")) for kind in FILE_KINDS}
ODD = st.sampled_from([None, "not_stated", 0, -1, 3, 1e30, "text", [], {}, True])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_odd_points_never_break_a_model(data, tmp_path_factory):
    """A point of the repository with some fields gone, null, not stated or absurd: predicted, or listed with a reason
    that is not a stumble."""
    kind = data.draw(st.sampled_from(FILE_KINDS))
    document = DOCUMENTS[kind]
    odd = copy.deepcopy(data.draw(st.sampled_from(document["points"])))
    paths = [(key,) for key in odd] + [(key, inner) for key, value in odd.items() if isinstance(value, dict)
                                       for inner in value]
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=4, unique=True)):
        inside = odd
        for key in path[:-1]:
            inside = inside.get(key)
        if isinstance(inside, dict):
            if data.draw(st.booleans()):
                inside[path[-1]] = data.draw(ODD)
            else:
                inside.pop(path[-1], None)
    folder = tmp_path_factory.mktemp("odd")
    (folder / f"{kind}.yaml").write_text(yaml.safe_dump({**document, "points": [odd]}), encoding="utf-8")
    rows = predict(each for each in load(folder) if each.kind == kind)
    assert rows
    for row in rows:
        assert not row.result.reason.startswith("the model failed"), row.result.reason
        assert row.result.predicted is not None or row.result.reason
        assert row.result.quantity in VERDICTS or row.result.predicted is None or row.result.predicted > 0
