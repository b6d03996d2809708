from __future__ import annotations

import json
import re
import xml.etree.ElementTree as xml
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from launch.cli.report import command
from launch.report.run.charts import svg_charts
from launch.report.run.html import write_report
from tests.report.synthetic import row, write_run

VOID = {"meta", "br", "img", "hr", "link", "input", "path"}


class Page(HTMLParser):
    """Collects what a test asks of a page; raises on tags that do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID or tag == "path":
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href"):
                self.addresses.append(value)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("runs") / "tiny", (1, 30), (21, 40))
    attempt = run / "attempts" / "2"
    (attempt / "warnings.jsonl").write_text(json.dumps(
        {"code": "MISMATCH", "step": 30, "message": "KL <b>0.2</b>", "evidence": {}}) + "\n")
    (attempt / "samples.jsonl").write_text(json.dumps(
        {"step": 1, "why": "best", "row": 0, "sample": 0, "prompt": "<script>alert(1)</script>",
         "completion": "5 & 6", "answer": None, "reward": 1.0, "tokens": 2, "finish_reason": "stop"}) + "\n")
    (attempt / "plan.json").write_text('{"schema_version": 1}')
    (run / "config.yaml").write_text("run: {name: tiny}\n")
    return run


@pytest.fixture(scope="module")
def page(run) -> str:
    return write_report(run).read_text(encoding="utf-8")


def test_page_is_well_formed_and_loads_nothing(page):
    parsed = Page(page)
    assert all(address.startswith("#") for address in parsed.addresses)
    assert "script" not in parsed.tags and "url(http" not in page and "@import" not in page
    assert len(parsed.ids) == len(set(parsed.ids)) > 0


def test_page_holds_every_part(page):
    for chart in ("reward", "lengths", "split", "mismatch", "kl", "entropy", "grad_norm", "throughput"):
        assert f'aria-label="{chart}"' in page
    for text in ("40 steps in 2 attempts", "MISMATCH", "held-out accuracy", "plan.json", "config.yaml",
                 "schema_version"):
        assert text in page, text


def test_text_of_the_run_is_escaped(page):
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "5 &amp; 6" in page and "KL &lt;b&gt;" in page


def test_every_chart_is_xml_with_its_references_resolved(page):
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        root = xml.fromstring(svg)
        ids = {element.get("id") for element in root.iter()}
        assert set(re.findall(r"url\(#([^)]*)\)", svg)) | set(re.findall(r'href="#([^"]*)"', svg)) <= ids


def test_curve_goes_through_the_metrics():
    """The drawn points of the KL chart, mapped back by the axis, are the logged values (a straight line here)."""
    svg = svg_charts([row(step) for step in range(1, 9)])["kl"]
    path = re.search(r'id="kl-line2d_\d+">\s*<path d="([^"]*)" clip-path[^>]*stroke: #a855f7', svg)[1]
    points = [tuple(map(float, pair)) for pair in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)]
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False)]
    assert len(points) == 8 and slopes[0] < 0  # SVG's y axis points down
    assert slopes == pytest.approx([slopes[0]] * 7, rel=1e-3)


def test_charts_without_data_are_left_out():
    assert set(svg_charts([{"step": s, "reward/mean": 0.5} for s in (1, 2)])) == {"reward"}


def test_report_is_the_same_twice_and_of_a_run_without_steps(run, page, tmp_path):
    assert write_report(run).read_text(encoding="utf-8") == page
    (tmp_path / "attempts" / "1").mkdir(parents=True)
    assert "No step has been logged yet" in write_report(tmp_path).read_text(encoding="utf-8")


def test_verb_writes_the_report_and_prints_the_curve(run, tmp_path):
    out = tmp_path / "elsewhere.html"
    words = [run.name, "--dir", str(run.parent), "--out", str(out)]
    result = CliRunner().invoke(command, words, catch_exceptions=False)
    assert result.exit_code == 0 and out.stat().st_size > 10_000
    assert "(mean of the first 10 and the last 10 of 40 steps)" in result.output and str(out) in result.output
