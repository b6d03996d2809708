from __future__ import annotations

import io
from statistics import fmean

import pytest
from rich.console import Console

from launch.report.run.display import Display, LineDisplay, LiveDisplay, duration, make_display, shares, split_bar
from launch.report.run.terminal import closing_summary, mean_split, reward_curve
from launch.run.metrics import metric_history
from tests.report.synthetic import row, write_run


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=90)


def test_kind_follows_the_terminal():
    assert isinstance(make_display("tiny", 9, console=console(True)), LiveDisplay)
    assert isinstance(make_display("tiny", 9, console=console(False)), LineDisplay)
    assert type(make_display("tiny", 9, console=console(True), quiet=True)) is Display


def test_without_a_terminal_each_step_is_one_line():
    out = console(False)
    with make_display("tiny", 40, console=out) as progress:
        progress.phase("starting 1 vLLM engine")
        for step in (9, 10):
            progress.step(step, row(step))
    first, ninth, tenth = out.file.getvalue().splitlines()
    assert first == "starting 1 vLLM engine"
    assert "step 9/40" in ninth and "900 tokens/s" in ninth and "accuracy" not in ninth
    assert "1.60 s: rollout 0.40, reward 0.02, train 0.90, sync 0.20, other 0.08" in tenth
    assert "accuracy 15.9%" in tenth and tenth.endswith("left 0:48")


def test_panel_shows_reward_speed_split_and_time_left():
    out = console(True)
    with make_display("tiny", 40, console=out) as progress:
        progress.step(10, row(10))
        progress.phase("rollout of step 11")
    panel = out.file.getvalue()
    for text in ("step 10/40", "900 tokens/s", "train 56%", "left 0:48", "rollout of step 11", "held-out 15.9%"):
        assert text in panel, text


@pytest.mark.parametrize("width", [7, 60])
def test_split_bar_fills_its_width_however_shares_round(width):
    for weights in ((1, 1, 1), (0.001, 5, 2), (1, 0, 0)):
        metrics = dict(zip(("time/rollout", "time/train", "time/sync"), weights, strict=True))
        assert len(split_bar(metrics, width)) == width


def test_shares_of_a_step_without_split_are_empty():
    assert shares({"reward/mean": 1.0}) == []


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (7, "0:07"), (760, "12:40"), (11100, "3:05:00")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_reward_curve_rises_with_the_reward():
    """The line's cells in the drawing must lie lower on the left than on the right."""
    drawing = reward_curve([row(step) for step in range(1, 41)], width=60, height=14).splitlines()
    dots = [(x, y) for y, line in enumerate(drawing[2:-3]) for x, cell in enumerate(line)
            if 0x2800 < ord(cell) <= 0x28FF]
    left = [y for x, y in dots if x < 20]
    right = [y for x, y in dots if x > 45]
    assert min(left) > max(right)
    assert reward_curve([row(1)]) == ""


def test_summary_names_every_place(tmp_path):
    run = write_run(tmp_path / "tiny", (1, 40))
    (run / "tensorboard").mkdir()
    history = metric_history([run / "attempts" / "1"])
    summary = closing_summary(run, history, run / "report.html")
    assert f"tensorboard --logdir {run / 'tensorboard'}" in summary
    assert str(run / "report.html") in summary and "held-out     15.9% -> 96.6%" in summary
    first, last = (fmean(row(step)["reward/mean"] for step in steps) for steps in (range(1, 11), range(31, 41)))
    assert f"reward       {first:.3f} -> {last:.3f}" in summary
    assert mean_split(history)["time/train"] == pytest.approx(0.9)
