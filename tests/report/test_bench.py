"""The arithmetic of `make bench`, on a history whose rates are known."""

from __future__ import annotations

import pytest

from benchmarks.asynchrony import Case as AsyncCase
from benchmarks.asynchrony import Result, aims
from benchmarks.results import compare, shortfall
from benchmarks.run import Case, markdown, summarise
from tests.report.synthetic import row

CONFIG = """
run: {name: t, steps: 9}
model: {path: model}
trainer: {optimizer: {lr: 0.001}}
rollout: {max_prompt_tokens: 8, max_new_tokens: 4}
algorithm: {group_size: 4, prompts_per_step: 8}
reward: {functions: [{function: exact_match}]}
data: {train: train.jsonl}
"""


@pytest.fixture
def ours(tmp_path) -> dict:
    (tmp_path / "grpo.yaml").write_text(CONFIG)
    history = [row(step) for step in range(1, 7)]
    history[0]["time/step"] = 60.0  # warm-up: not counted
    history[3]["time/step"] = 3.2  # a slow step: counted
    return summarise(history, Case(str(tmp_path / "grpo.yaml"), 6, 6, warmup=2), ["algorithm.prompts_per_step=16"])


def test_rate_is_samples_over_time_after_the_warm_up(ours):
    assert ours["samples_per_step"] == 64 and ours["steps_measured"] == 4
    assert ours["samples_per_s"] == pytest.approx(4 * 64 / (1.6 + 3.2 + 1.6 + 1.6))
    assert ours["split_s"]["train"] == pytest.approx(0.9) and ours["other_share"] == pytest.approx(0.08 / 2.0)


def test_table_shows_both_rates_and_the_ratio(ours):
    trl = {"samples_per_s": 8.0, "length_mean": 3.5}
    page = markdown({"machine": {"cpu": "CPU", "cores": 2},
                     "cases": {"tiny": {"ours": ours, "trl": trl, "ratio": ours["samples_per_s"] / 8.0}}})
    assert "| tiny | 64 | 32.00 | 8.00 | 4.00 | met | " in page and "0.08 s (4.0%)" in page


def test_a_ratio_below_the_aim_is_said_to_miss_it(ours):
    trl = {"samples_per_s": 20.0, "length_mean": 3.5}
    page = markdown({"machine": {"cpu": "CPU", "cores": 2},
                     "cases": {"tiny": {"ours": ours, "trl": trl, "ratio": 1.6}}})
    assert "| 20.00 | 1.60 | missed | " in page


@pytest.mark.parametrize(("gained", "lost", "missed"), [
    (30, 2, ()),                      # 14 points of 200, p about 1e-7
    (24, 10, ("7.0 points",)),        # p 0.024, too small a gain
    (1, 0, ("0.5 points", "p = 1")),  # one question is chance
    (0, 40, ("-20.0 points",)),       # worse, and surely so
])
def test_results_fail_unless_the_gain_is_large_and_no_chance(gained, lost, missed):
    before = {question: question < lost for question in range(200)}
    after = {question: lost <= question < lost + gained for question in range(200)}
    said = shortfall(compare(before, after))
    assert (said is None) == (not missed)
    for part in missed:
        assert part in said
    assert "p =" not in (said or "") or "p = 1" in missed


def measured(step: float, **changes: float) -> Result:
    """Iterations of 0.1 s, 64 slots, a batch of 1,920 tokens: 3 s of full engines, three times an update of 1 s."""
    numbers = {"rollout": 2.0, "update": 1.0, "sync": 0.1, "iteration": 0.1, "tokens": 1920.0, "longest": 57.0}
    return Result(step, ages=(1.0, 2.0), **(numbers | changes))


def test_the_ideal_is_the_longest_of_rollout_update_and_completion():
    assert [measured(5.0).ideal(bound) for bound in (0, 1, 4)] == pytest.approx([5.7, 3.0, 3.0])
    assert measured(5.0, update=4.0).ideal(1) == pytest.approx(4.1)


@pytest.mark.parametrize("two, zero, slower, verdicts", [
    (3.3, 7.0, 1.0, ["met", "met"]), (3.31, 7.2, 1.0, ["missed", "missed"]),
    (3.0, 14.0, 2.0, ["met", "met"])])      # a machine that is half as fast in one of the runs
def test_aims_compare_times_of_one_run(two, zero, slower, verdicts):
    results = {"former loop": measured(7.0), "k = 0": measured(zero, iteration=0.1 * slower), "k = 2": measured(two)}
    said = aims({AsyncCase(name): result for name, result in results.items()})
    assert [line.rpartition(": ")[2] for line in said] == verdicts


def test_the_overlap_hides_what_the_step_is_shorter_by():
    results = {name: measured(step) for name, step in
               (("former loop", 7.0), ("k = 0", 7.0), ("k = 0, overlap", 6.35), ("k = 2", 3.0))}
    assert "hides 65% of the update" in aims({AsyncCase(name): result for name, result in results.items()})[2]
