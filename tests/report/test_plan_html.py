from __future__ import annotations

import html
import re
import xml.etree.ElementTree as xml
from collections import Counter

import pytest

from launch.errors import UserError
from launch.plan.plan import EnginePlan, RolloutPlan
from launch.planner.seats.local import place_local
from launch.ports import Ports
from launch.report import svg
from launch.report.plan import map as plan_map
from launch.report.plan import routes as plan_routes
from launch.report.plan import svg as plan_svg
from launch.report.plan.html import render
from tests.report.plan_example import example_placement, example_plan, without_forecast
from tests.report.test_html import Page

NAMESPACE = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert(1)</script>\"'&<svg onload=x>"


def pictures(page: str) -> list[xml.Element]:
    return [xml.fromstring(each) for each in re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL)]


def gpus(picture: str) -> list[str]:
    """Tooltips of the elements that are GPUs."""
    root = xml.fromstring(picture)
    return [each.find(f"{NAMESPACE}title").text for each in root.iter() if each.get("class") == "gpu"]


@pytest.mark.parametrize("options", [{}, {"asynchronous": False}, {"mode": "colocated", "engines": 20}, {"spare": 3},
                                     {"dp": 20, "engines": 44, "spare": 4, "leaves": (32, 32, 32, 32)}])
def test_page_is_well_formed_and_stands_alone(options):
    plan = example_plan(**options)
    page = render(plan, example_placement(plan))
    parsed = Page(page)
    assert "script" not in parsed.tags and "img" not in parsed.tags
    assert parsed.addresses == []
    assert len(pictures(page)) == 5 + sum(1 for route in plan.forecast.sync.routes if route.edges)
    assert page == render(plan, example_placement(plan))
    assert "Every figure on this page is predicted" in page


def test_the_step_says_what_overlaps():
    def text(plan) -> str:
        return render(plan, example_placement(plan))

    plan = example_plan(asynchronous=False)
    early = tuple(phase.model_copy(update={"starts": 1.0}) if phase.name == "train" else phase
                  for phase in plan.forecast.phases)
    hidden = plan.model_copy(update={"forecast": plan.forecast.model_copy(update={"phases": early})})
    assert "each phase waits for the previous one" in text(plan)
    assert "complete groups while others of the same batch are generated" in text(hidden)
    assert "samples of different versions" in text(example_plan())


def test_page_holds_the_plans_figures():
    plan = example_plan()
    page = render(plan, example_placement(plan))
    words = re.sub(r"<[^>]+>", " ", page)
    for each in ("9,996 prompts/h", "8,533 to 11,755; target 10,000: within its uncertainty", "92.2 s per step",
                 "training: TP4 CP2 DP5 PP4 VPP5", "rollout: 12 engines of TP8", "72.0 of 73.0 GB", "5 versions",
                 "W011", "decoding is bound by HBM bandwidth", "98.1% progress", "0, 4, 1, 5, 2, 6, 3, 7"):
        assert each in words, each
    for choice in plan.forecast.choices:
        assert choice.reason in words and all(each.rejected_by in words for each in choice.alternatives)
    for number in plan.forecast.numbers:
        assert number.key in words and (number.formula or number.source) in words


def test_every_gpu_is_drawn_once_with_its_coordinates():
    plan = example_plan(spare=2)
    titles = gpus(plan_map.draw(plan, example_placement(plan)))
    assert len(titles) == 34 * 8
    assert len({title.splitlines()[0] for title in titles}) == 34 * 8
    assert sum("spare" in title for title in titles) == 16
    ranks = {int(re.search(r"training rank (\d+)", title)[1]): title for title in titles if "training rank" in title}
    for each in plan.training.ranks:
        assert f"tp {each.tp}, cp {each.cp}, dp {each.dp}, pp {each.pp}" in ranks[each.rank]
    assert len(ranks) == 160
    engines = Counter(re.search(r"engine (\d+)", title)[1] for title in titles if "engine" in title)
    assert engines == {str(number): 8 for number in range(12)}
    first = next(title for title in titles if title.startswith("gpu020, GPU 4"))   # GPU order 0,4,1,...
    assert "rollout engine 0: rank 1" in first


def test_shared_gpus_show_both_roles():
    plan = example_plan(mode="colocated", engines=20)
    titles = gpus(plan_map.draw(plan, example_placement(plan)))
    assert len(titles) == 160
    assert all("training rank" in title and "rollout engine" in title for title in titles)


def test_a_plan_without_gpus_is_drawn_by_process():
    plan = example_plan(dp=1, pp=1, vpp=1, device="cpu")
    plan = plan.model_copy(update={"rollout": RolloutPlan(tp=2, engines=(EnginePlan(replica=0, tp=2),))})
    plan = plan.model_copy(update={"forecast": plan.forecast.model_copy(update={
        "cluster": plan.forecast.cluster.model_copy(update={"nodes": 1, "gpus_per_node": 12, "leaves": (1,)})})})
    titles = gpus(plan_map.draw(plan, place_local(plan, 1, Ports(20480))))
    assert [title.splitlines()[0] for title in titles] == [f"local, core {index}" for index in range(12)]
    assert sum("training rank" in title for title in titles) == 8
    assert sum("engine 0" in title for title in titles) == 2


def test_leaves_hold_their_nodes():
    plan = example_plan(dp=20, engines=44, spare=4, leaves=(32, 32, 32, 32))
    names = [f"gpu{number:03d}" for number in range(128)]
    picture = plan_map.draw(plan, example_placement(plan), [names[first:first + 32] for first in range(0, 128, 32)])
    assert [each for each in re.findall(r"leaf \d+: \d+ nodes", picture)] == [f"leaf {n}: 32 nodes" for n in range(4)]
    assert len(gpus(picture)) == 1024


def test_nothing_is_drawn_outside_of_the_picture():
    for options in ({}, {"dp": 20, "engines": 44, "spare": 4, "leaves": (64, 64)},
                    {"pp": 1, "vpp": 1, "dp": 1, "engines": 1}):
        plan = example_plan(**options)
        for root in pictures(render(plan, example_placement(plan))):
            width, height = map(float, root.get("viewBox").split()[2:])
            for each in root.iter(f"{NAMESPACE}rect"):
                x, y = float(each.get("x")), float(each.get("y"))
                assert -0.01 <= x and x + float(each.get("width")) <= width + 0.01
                assert -0.01 <= y and y + float(each.get("height")) <= height + 0.01
            for each in root.iter(f"{NAMESPACE}circle"):
                assert 0 <= float(each.get("cx")) <= width and 0 <= float(each.get("cy")) <= height
            for each in root.iter(f"{NAMESPACE}text"):
                assert 0 <= float(each.get("x")) <= width and 0 <= float(each.get("y")) <= height


def test_memory_bars_are_to_scale():
    plan = example_plan()
    root = xml.fromstring(plan_svg.memory(plan.forecast.memory))
    for row in plan.forecast.memory:
        widths = {}
        for each in root.iter(f"{NAMESPACE}rect"):
            title = each.findtext(f"{NAMESPACE}title", "")
            if title.startswith(f"{row.name}: "):
                widths[title[len(row.name) + 2:].rsplit(" ", 2)[0]] = float(each.get("width"))
        assert set(widths) == set(row.components)
        scale = sum(widths.values()) / row.total
        for name, width in widths.items():
            assert width == pytest.approx(row.components[name] * scale, abs=0.02)


def test_front_has_every_point():
    plan = example_plan()
    root = xml.fromstring(plan_svg.pareto(plan.forecast))
    points = [each for each in root.iter(f"{NAMESPACE}circle") if each.get("class") == "pareto"]
    assert len(points) == len(plan.forecast.pareto)
    heights = [float(each.get("cy")) for each in points]
    assert heights == sorted(heights, reverse=True)          # more nodes, more prompts: higher up the page


def test_routes_conserve_bytes_when_nodes_share_a_point():
    plan = example_plan(dp=30, engines=100)
    for route in plan.forecast.sync.routes:
        root = xml.fromstring(plan_routes.route(plan.forecast, route))
        nodes = [each for each in root.iter() if each.get("class") == "node"]
        assert 2 <= len(nodes) <= 2 * plan_routes.MOST_POINTS
        pairs = 0
        for each in root.iter():
            if each.get("class") == "edge":
                found = re.search(r"(\d+) pairs", each.findtext(f"{NAMESPACE}title"))
                pairs += int(found[1]) if found else 1
        assert pairs == len(route.edges)


def test_hostile_names_are_only_text():
    plan = example_plan(hostile=HOSTILE)
    page = render(plan, example_placement(plan, prefix=HOSTILE))
    parsed = Page(page)
    assert "script" not in parsed.tags and "<script" not in page
    titles = [title for root in pictures(page) for title in gpus(xml.tostring(root, encoding="unicode"))]
    assert sum(title.startswith(f"{HOSTILE}000, GPU ") for title in titles) == 8           # text, in the tooltip
    assert html.unescape(page).count(plan.forecast.warnings[0].message) == 1


def test_a_plan_without_forecast_or_placement():
    plan = example_plan()
    with pytest.raises(UserError, match="has no forecast"):
        render(without_forecast(plan), None)
    assert "Nodes and GPUs" not in render(plan, None)


def test_numbers_that_are_none():
    """A plan read from a file may hold anything that the schema allows."""
    assert svg.number(float("nan")) == "0" and svg.ticks(float("inf")) == [0.0] and svg.ticks(-1) == [0.0]
    plan = example_plan()
    forecast = plan.forecast.model_copy(
        update={
            "step_s": 0.0,
            "pareto": (),
            "memory": (),
            "phases": (),
            "numbers": (),
            "choices": (),
            "warnings": (),
            "sync": plan.forecast.sync.model_copy(update={"routes": ()}),
        }
    )
    page = render(plan.model_copy(update={"forecast": forecast}), example_placement(plan))
    assert Page(page) and pictures(page)
    assert svg.ticks(10000) == [0, 2000, 4000, 6000, 8000, 10000]
