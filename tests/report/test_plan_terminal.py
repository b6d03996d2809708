from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from launch.config.load import load_config
from launch.planner.sweep import SweepPoint, smallest_that_reaches
from launch.report.plan import bars as plan_bars
from launch.report.plan.overview import print_overview
from launch.report.plan.sweep import capacity_curve, print_sweep
from launch.report.plan.table import print_plan
from launch.report.quantities import change, exact, human, seconds
from tests.report.plan_example import example_plan, without_forecast

CONFIG = "configs/70b/grpo.yaml"
COMMAND = "megatron-rl plan configs/70b/grpo.yaml --cluster configs/clusters/h100-32.yaml --html plan.html"


def printed(plan, width=100, *, colour=False, encoding="utf-8", config=CONFIG, commands=()) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=stream, width=width, highlight=False, force_terminal=colour, no_color=not colour)
    print_overview(plan, config, console, commands=commands)
    stream.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("options", [{}, {"asynchronous": False}, {"mode": "colocated", "engines": 20}, {"spare": 2},
                                     {"pp": 1, "vpp": 1, "dp": 2}])
def test_no_line_is_wider_than_the_terminal_or_100(width, options):
    text = printed(example_plan(**options), width)
    assert max(map(len, text.splitlines())) <= min(width, 100)
    assert "predicted" in text


def test_every_figure_is_the_plans():
    """What the plan says, formatted here by hand."""
    text = re.sub(r"\s+", " ", printed(example_plan(), commands=[COMMAND]))
    for figure in (
            "disaggregated, asynchronous", "70,553,706,496 parameters", "32 nodes x 8 H100-SXM-80GB",
            "8 NICs of 50 GB/s a node, 8 rails", "training 20 160 TP4 CP2 DP5 PP4 VPP5 stage 0, worst",
            "65.9/84.9 GB fits",
            "stage 3, last", "60.1/84.9 GB fits", "rollout 12 96 12 engines of TP8 engine", "72.0/73.0 GB tight",
            "activations 27.5, gradients 17.4", "92.2 s predicted (78.4 s to 108 s)",
            "bottleneck: rollout: decoding is bound by HBM bandwidth", "89.8 s (76.3 s to 103 s) 97%",
            "74.1 s (65.2 s to 83 s) 80%", "9,996 prompts/h predicted (●), 8,533 to 11,755; target 10,000 (┃): "
            "within its uncertainty", "48 ms per output token, 1,020 tokens/s/GPU; 4,369 sequences in flight of 6,380",
            "load 68%",
            "at most 5 versions (algorithm.max_staleness 8), mean 1.6",
            "algorithm.max_staleness 8", "141 GB per copy", "> direct at least 390 ms, expected 2.4 s",
            "chain at least 410 ms, expected 4.9 s", "tree at least 410 ms, expected 3.1 s",
            "26.5 GB out, 17.6 GB in", "to disk every 20 steps: 141 GB per version, written and read back in 7.06 s",
            "0,4,1,5,2,6,3,7: 0 bytes cross rails (106 GB in natural order)", "one every 61.3 h expected",
            "restart 420 s; with a checkpoint every 20 steps (30.7 min), 98.1%",
            "988 GB: steps wait 300 ms for the copy to host memory (55 GB a node), which is written in 14 s beside "
            "them, by 20 training nodes; a resume reads it in 15 s", "W003 the target", COMMAND):
        assert figure in text, figure


def test_pipes_and_plain_terminals():
    plan = example_plan()
    assert "\x1b" not in printed(plan)
    assert "\x1b[" in printed(plan, colour=True)
    text = printed(plan, encoding="ascii")                # would raise on a character that the stream cannot carry
    assert "########" in text and "9,996 prompts/h" in text


def test_hostile_names_reach_the_terminal_as_text():
    text = printed(example_plan(hostile="[bold]\x1b[31m[/nope]"), config="a[/b]\x1b]0;x\x07.yaml")
    assert "\x1b" not in text and "\x07" not in text
    assert "[bold]?[31m[/nope]" in text and "a[/b]?]0;x?.yaml" in text


def test_synchronous_and_shared_nodes():
    text = re.sub(r"\s+", " ", printed(example_plan(asynchronous=False, mode="colocated", engines=20)))
    assert "0 versions: the step is synchronous" in text
    assert "training 20 160" in text and "rollout 20 160" in text


def test_print_plan_chooses_by_the_forecast():
    """Without one, the warnings of the configuration are all there are."""
    plan, config = example_plan(), load_config("configs/7b/grpo.yaml", ["reward.on_error=stop"]).config
    for shown, word in ((plan, "bottleneck"), (without_forecast(plan), "pipeline stage")):
        prepared = SimpleNamespace(plan=shown, loaded=SimpleNamespace(path=CONFIG), config=config)
        stream = io.StringIO()
        print_plan(prepared, Console(file=stream, width=100, highlight=False), commands=["make it so"])
        assert word in stream.getvalue()
        assert ("make it so" in stream.getvalue()) == (shown is plan)
        assert ("MATH_STOP: reward.on_error = stop" in stream.getvalue()) == (shown is not plan)


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1e12), st.floats(0, 1e12), st.integers(4, 80))
def test_memory_bar_is_full_only_at_the_limit(used, limit, width):
    bar = plan_bars.against_limit(used, limit, width, "green").plain
    assert len(bar) == width
    assert (plan_bars.UNICODE.over in bar) == (used > limit)
    if 0 < used <= limit:
        assert bar.count(plan_bars.UNICODE.full) == max(1, round(width * used / limit))


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e5), st.none() | st.floats(0, 1e5), st.integers(8, 90))
def test_uncertainty_strip_shows_nominal_and_target(low, nominal, high, target, width):
    low, nominal, high = sorted((low, nominal, high))
    strip = plan_bars.with_uncertainty(low, nominal, high, target, width).plain
    assert len(strip) == width
    assert strip.count(plan_bars.UNICODE.nominal) == 1
    assert strip.count(plan_bars.UNICODE.target) == (target is not None)
    assert len(plan_bars.span(low, nominal, high, width, "green").plain) == width


def test_quantities():
    assert human(84_932_000_000, "bytes") == "84.9 GB" and human(0, "bytes") == "0 bytes"
    assert human(989.4e12, "FLOP/s") == "989 TFLOP/s" and human(50e9, "bytes/s") == "50 GB/s"
    assert [seconds(each) for each in (0, 4.2e-5, 0.0483, 92.2, 1844, 220_000)] == [
        "0 s", "42 us", "48.3 ms", "92.2 s", "30.7 min", "61.1 h"]
    assert human(70_553_706_496) == "70,553,706,496" and human(1019.97, "tokens/s") == "1,020 tokens/s"
    assert exact(70_553_706_496.0) == "70,553,706,496" and exact(0.1, "s") == "0.1 s"
    assert change(92.2, 84.1) == "-8.8 %" and change(0, 3) == "" and change(2, 2) == ""
    assert human(float("nan"), "s") == "nan s" and human(float("inf"), "bytes") == "inf bytes"


def sweep() -> list[SweepPoint]:
    rates = {8: None, 16: 4300.0, 32: 9996.0, 40: 12400.0, 64: 19800.0}
    return [SweepPoint(nodes, f"{nodes // 2} + {nodes // 2}", rate, None if rate is None else nodes * 8 / rate * 1000,
                       "no layout fits 80 GB" if rate is None else "reached" if rate >= 10000 else "missed")
            for nodes, rate in rates.items()]


@pytest.mark.parametrize("width", [80, 100])
def test_sweep(width):
    points = sweep()
    assert smallest_that_reaches(points, 10000).nodes == 40
    stream = io.StringIO()
    print_sweep(points, 10000, Console(file=stream, width=width, highlight=False))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    marked = [line for line in text.splitlines() if line.startswith(">")]
    assert len(marked) == 1 and marked[0].split()[1:6] == ["40", "20", "+", "20", "12,400"]
    assert "25.8" in marked[0]                                    # 40 x 8 GPUs / 12,400 prompts/h x 1,000
    assert "no layout fits 80 GB" in text
    assert "smallest cluster that reaches 10,000 prompts/h: 40 nodes (12,400 prompts/h predicted)" in words


def test_sweep_without_an_answer():
    def text(points, target):
        stream = io.StringIO()
        print_sweep(points, target, Console(file=stream, width=100, highlight=False))
        return stream.getvalue()

    assert ("none of these sizes reaches 30,000 prompts/h: the maximum is 19,800 prompts/h with 64 nodes"
            in text(sweep(), 30000))
    assert "the maximum is 19,800" in text(sweep(), None)
    assert "no plan fits on any of these sizes" in text(sweep()[:1], 10000)
    assert capacity_curve(sweep()[:2], 10000) == ""
    assert capacity_curve(sweep(), 10000) == capacity_curve(sweep(), 10000)
