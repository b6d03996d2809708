"""What `plan explain`, `plan diff` and --trace print, and plan files."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.errors import UserError
from launch.plan.plan import ForecastPlan
from launch.report.plan.diff import diff
from launch.report.plan.explain import explain
from launch.report.plan.file import load_plan
from launch.report.plan.timeline import one_f_one_b
from launch.report.plan.trace import trace
from tests.report.plan_example import example_plan, without_forecast


def test_a_number_is_explained_down_to_what_was_given():
    plan = example_plan()
    assert explain(plan, "memory.training.stage0.weights").splitlines() == [
        "memory.training.stage0.weights = 8.82 GB (8,819,213,312 bytes)",
        "    = 2 bytes x parameters / (TP PP)",
        "    model.parameters = 70,553,706,496",
        "        = L layer + 2 V h + h",
        "        model.hidden = 8,192",
        "            given: configs/70b/grpo.yaml:12, model.path",
        "        model.layers = 80",
        "            given: configs/70b/grpo.yaml:12, model.path",
        "    trainer.tp = 4",
        "        given: configs/70b/grpo.yaml:31, trainer.tp",
        "    trainer.pp = 4",
        "        given: searched"]


def test_every_leaf_of_the_book_is_reached():
    plan = example_plan()
    numbers = {each.key: each for each in plan.forecast.numbers}
    for key in numbers:
        text, todo = explain(plan, key), [key]
        while todo:
            number = numbers[todo.pop()]
            assert number.key in text and (number.formula or number.source) in text
            todo += number.inputs


def test_a_choice_is_explained_by_what_rejected_the_others():
    text = explain(example_plan(), "trainer.layout")
    assert text.splitlines()[0] == "trainer.layout = TP4 CP2 PP4 VPP5 DP5"
    assert "not TP4 CP1 PP4 VPP1 DP10: stage 0 needs 85.0 GB of 84.9 GB" in text
    assert "not TP8 CP1 PP2 VPP1 DP10 (8,800 prompts/h): 12 % slower" in text


def test_prefixes_and_all():
    plan = example_plan()
    text = explain(plan, "memory.training")
    assert text == explain(plan, "memory.training.")
    assert "stage0.activations" in text and "training.compute_s" not in text
    assert "rollout.tp = 8" in explain(plan, "rollout")
    everything = explain(plan)
    assert all(each.key in everything for each in (*plan.forecast.numbers, *plan.forecast.choices))
    assert everything.index("CHOICES") < everything.index("MODEL (3 numbers)")
    assert max(map(len, everything.splitlines())) <= 100


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(UserError) as caught:
        explain(example_plan(), "memory.trainig.stage0.weight")
    assert "memory.training.stage0.weights" in str(caught.value)
    with pytest.raises(UserError, match="has no forecast"):
        explain(without_forecast(example_plan()), "model")


def test_a_plan_survives_its_file(tmp_path):
    plan = example_plan()
    file = tmp_path / "plan.json"
    file.write_text(plan.model_dump_json(indent=2))
    assert load_plan(file) == plan


@pytest.mark.parametrize("content, message", [
    ("", "not JSON"), ("{", "not JSON"), ("[]", "not a plan"), ("{}", "no schema_version"), ("3", "not a plan"),
    ('{"schema_version": 1}', "schema_version 1, this version reads"),
    ('{"schema_version": "2"}', "schema_version '2'"),
    ('{"schema_version": 3}', "not a valid plan: config_hash"),
    ("[" * 100_000, "not JSON"), (b"\xff\xfe", "not JSON")])
def test_a_bad_file_is_a_message(tmp_path, content, message):
    file = tmp_path / "plan.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as caught:
        load_plan(file)
    assert "plan.json" in caught.value.where and caught.value.fix


def test_no_file_and_a_wrong_field(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot read"):
        load_plan(tmp_path)
    content = json.loads(example_plan().model_dump_json())
    content["forecast"]["throughput"]["nominal"] = "many"
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="forecast.throughput.nominal"):
        load_plan(tmp_path / "plan.json")


def test_diff_of_equals_and_of_schema_versions():
    plan = example_plan()
    assert "identical" in diff(plan, example_plan(), ("a.json", "b.json"))
    with pytest.raises(UserError, match="schema_version"):
        diff(plan, plan.model_copy(update={"schema_version": 1}))


def test_diff_by_subject():
    text = diff(example_plan(), example_plan(dp=6, engines=8, faster=1.1), ("a.json", "b.json"))
    order = [
        text.index(each)
        for each in (
            "a.json -> b.json",
            "\nsplit",
            "\nlayouts",
            "\nstep",
            "\nthroughput",
            "\nweight sync" if "\nweight sync" in text else "\nthroughput",
            "\ngiven numbers (1 changed)",
            "\ncomputed numbers (4 changed)",
        )
    ]
    assert order == sorted(order)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "training nodes 20 -> 24 (+20.0 %)" in lines
    assert "training TP4 CP2 DP5 PP4 VPP5 -> TP4 CP2 DP6 PP4 VPP5" in lines
    assert "whole step 92.2 s -> 83.8 s (-9.1 %)" in lines
    assert "coefficients.training.efficiency 0.52 -> 0.572 (+10.0 %)" in lines
    assert "model.hidden" not in text                                       # the same in both


def test_diff_says_when_only_the_forecast_changed():
    plan = example_plan()
    text = diff(plan, example_plan(faster=1.1))
    assert f"the same plan ({plan.fingerprint()}), another forecast" in text
    assert "numbers only in the first" in diff(plan, without_forecast(plan))


def test_diff_shows_differences_behind_the_rounding():
    plan = example_plan()
    other = plan.model_copy(update={"forecast": plan.forecast.model_copy(update={"step_s": 92.2000001})})
    assert "92.2 s -> 92.2000001 s" in " ".join(diff(plan, other).split())


def test_diff_has_a_line_for_whatever_changes():
    """Every leaf of the forecast that a reader sees in the overview."""
    plan = example_plan()
    changes = {
        ("cluster", "rails"): 1,
        ("split", "spare"): 3,
        ("throughput", "target"): 5.0,
        ("rollout", "load"): 0.9,
        ("staleness", "versions"): 7,
        ("sync", "chosen"): "tree",
        ("reliability", "restart_s"): 1.0,
    }
    for (part, field), value in changes.items():
        changed = getattr(plan.forecast, part).model_copy(update={field: value})
        forecast = plan.forecast.model_copy(update={part: changed})
        text = diff(plan, plan.model_copy(update={"forecast": forecast}))
        assert text.count(" -> ") == 2, (part, field, text)


@pytest.mark.parametrize("options", [{}, {"asynchronous": False}, {"pp": 1, "vpp": 1}, {"pp": 2, "vpp": 1},
                                     {"mode": "colocated", "engines": 20, "asynchronous": False}])
def test_trace_is_valid(options):
    plan = example_plan(**options)
    document = json.loads(json.dumps(trace(plan), allow_nan=False))
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    named = set()
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "M") and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["name"] == "thread_name":
            named.add((event["pid"], event["tid"]))
    assert set(threads) == named
    for events in threads.values():
        assert all(first[1] <= second[0] for first, second in pairwise(sorted(events)))
    steps = [each for each in document["traceEvents"] if each["ph"] == "X" and each["name"] == "train"]
    train = next(each for each in plan.forecast.phases if each.name == "train")
    assert [each["ts"] for each in steps] == [round((train.starts + k * 92.2) * 1e6) for k in range(2)]
    assert all(abs(each["dur"] - train.seconds * 1e6) <= 1 for each in steps)


def test_trace_pipeline_fills_the_update():
    plan = example_plan()
    events = [each for each in trace(plan)["traceEvents"] if each["ph"] == "X" and each["pid"] == 3]
    passes = [each for each in events if "pass" in each["args"]]
    assert len(passes) == 2 * 2 * 240 * 5            # forward and backward, two stages, micro-batches, chunks
    train = next(each for each in plan.forecast.phases if each.name == "train")
    assert min(each["ts"] for each in events) == round(train.starts * 1e6)
    end = max(each["ts"] + each["dur"] for each in events)
    assert end == pytest.approx((train.starts + train.seconds) * 1e6, abs=2)
    assert {each["name"] for each in events} >= {"gradients", "optimizer"}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 8))
def test_schedule_is_1f1b(stages, chunks, rounds):
    """Narayanan et al. 2104.04473: m + (p - 1)/v slots of a forward and a backward pass, each stage busy for m of
    them; a micro-batch's backward follows its forward, on the stage and across stages."""
    chunks = chunks if stages > 1 else 1
    micro_batches = stages * rounds
    slots = micro_batches + (stages - 1) / chunks
    schedule = one_f_one_b(stages, chunks, micro_batches, 3 * slots)
    ends = {}
    for stage, passes in enumerate(schedule):
        assert len(passes) == 2 * micro_batches * chunks
        assert sum(each.seconds for each in passes) == pytest.approx(3 * micro_batches)
        for first, second in pairwise(passes):
            assert first.start + first.seconds <= second.start + 1e-9
        for each in passes:
            assert each.seconds == pytest.approx((1 if each.kind == "forward" else 2) / chunks)
            ends[each.kind, each.micro_batch, each.chunk, stage] = (each.start, each.start + each.seconds)
    for (kind, micro_batch, chunk, stage), (start, _) in ends.items():
        if kind == "forward" and stage:
            assert ends[kind, micro_batch, chunk, stage - 1][1] <= start + 1e-9
        if kind == "backward":
            assert ends["forward", micro_batch, chunk, stage][1] <= start + 1e-9
            if stage < stages - 1:
                assert ends[kind, micro_batch, chunk, stage + 1][1] <= start + 1e-9
    assert max(end for _, end in ends.values()) == pytest.approx(3 * slots)


def test_schedule_with_few_micro_batches():
    schedule = one_f_one_b(4, 5, 3, 18.0)                   # 3 does not divide by 4: one chunk, (3 + 3) slots of 3
    assert {each.chunk for stage in schedule for each in stage} == {0}
    assert schedule[0][0].seconds == pytest.approx(1.0)


def test_texts_are_deterministic():
    a, b = example_plan(), ForecastPlan.model_validate_json(example_plan().model_dump_json())
    assert explain(a) == explain(b) and json.dumps(trace(a)) == json.dumps(trace(b))
