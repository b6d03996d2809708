"""The HTML report of a run: one file, without network access or scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from launch.report.run.charts import SPLIT_COLOURS, svg_charts
from launch.report.run.display import duration, shares
from launch.report.run.plan_vs_measured import FILE, comparison_html, of_attempt
from launch.report.run.terminal import mean_split
from launch.run.metrics import Row, attempt_dirs, first_and_last, metric_history, read_jsonl, series

DOCUMENTS = ("config.yaml", "config.json", "plan.json", "placement.json", FILE, "versions.json",
             "environment.json")
"""Files of an attempt or of the run that the report shows in full, if they exist."""
SAMPLES = 12
CSS = """
:root { color-scheme: light dark; --ink: #1f2937; --soft: #6b7280; --line: #e5e7eb; --card: #fff; --page: #f8fafc; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e7eb; --soft: #9ca3af; --line: #374151; --card: #1f2937; --page: #111827; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 28px 20px 60px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 34px 0 12px; } .soft { color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(168px, 1fr)); gap: 12px; margin-top: 18px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.fact b { display: block; font-size: 17px; font-weight: 650; white-space: nowrap; }
.fact span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 14px;
  grid-auto-flow: dense; }
.wide { grid-column: 1 / -1; } svg { width: 100%; height: auto; display: block; }
.bar { display: flex; height: 22px; border-radius: 6px; overflow: hidden; margin: 4px 0 12px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; }
.warning { border-left: 4px solid #f59e0b; margin-bottom: 8px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 12.5px/1.45 ui-monospace, monospace; margin: 0; }
details { margin-bottom: 8px; } summary { cursor: pointer; font-weight: 600; }
"""


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of all attempts of `run_dir` to `out` (default: `report.html` in it) and return its path.

    Raises UserError if the folder is not a run's folder or matplotlib is missing."""
    attempts = attempt_dirs(run_dir)
    history = metric_history(attempts)
    out = out or run_dir / "report.html"
    warnings = [warning for attempt in attempts for warning in read_jsonl(attempt / "warnings.jsonl")]
    samples = [sample for attempt in attempts for sample in read_jsonl(attempt / "samples.jsonl")]
    page = render(run_dir.name, history, warnings=warnings, samples=samples, attempts=len(attempts),
                  documents=_documents(run_dir, attempts[-1]), compared=comparison_html(of_attempt(attempts[-1])))
    out.write_text(page, encoding="utf-8")
    return out


def render(name: str, history: Sequence[Row], *, warnings: Sequence[dict], samples: Sequence[dict],
           documents: dict[str, str], attempts: int, compared: str = "") -> str:
    """The whole page as text.

    Args:
        compared: the section that compares the plan with measurements.
    """
    body = [_head(name, history, attempts), _facts(history), _warnings(warnings)]
    if history:
        charts = "".join(f'<div class="card{" wide" if key == "split" else ""}">{svg}</div>'
                         for key, svg in svg_charts(history).items())
        body += [f'<h2>Curves</h2><div class="charts">{charts}</div>', _split(history), compared]
    else:
        body.append("<p>No step has been logged yet.</p>")
    body += [_samples(samples), _document_list(documents)]
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(name)}</title><style>{CSS}</style></head><body>{''.join(body)}</body></html>\n")


def _head(name: str, history: Sequence[Row], attempts: int) -> str:
    steps = int(history[-1]["step"]) if history else 0
    return (f'<h1>{escape(name)}</h1><div class="soft">{steps} steps in {attempts} '
            f'attempt{"s" if attempts != 1 else ""}</div>')


def _facts(history: Sequence[Row]) -> str:
    facts: list[tuple[str, str]] = []
    _, rewards = series(history, "reward/mean")
    if rewards:
        first, last, n = first_and_last(rewards)
        facts.append((f"{first:.3f} → {last:.3f}", f"mean reward, first and last {n} steps"))
    _, accuracy = series(history, "eval/accuracy")
    if accuracy:
        facts.append((f"{accuracy[0]:.1%} → {accuracy[-1]:.1%}", "held-out accuracy, greedy"))
    split = mean_split(history)
    if split.get("time/step"):
        facts.append((f"{split['time/step']:.2f} s", "mean step"))
        facts.append((duration(sum(row.get("time/step", 0.0) for row in history)), "in steps, start-up not counted"))
    for unit in ("samples", "tokens"):
        _, values = series(history, f"throughput/{unit}_per_s")
        if values:
            facts.append((f"{sum(values) / len(values):,.1f}", f"{unit}/s, mean"))
    cards = "".join(f'<div class="card fact"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
                    for value, what in facts)
    return f'<div class="facts">{cards}</div>'


def _warnings(warnings: Sequence[dict]) -> str:
    if not warnings:
        return ""
    cards = "".join(f'<div class="card warning"><b>{escape(str(w["code"]))}</b> '
                    f'<span class="soft">step {int(w["step"])}</span><br>{escape(str(w["message"]))}</div>'
                    for w in warnings)
    return f"<h2>Warnings</h2>{cards}"


def _split(history: Sequence[Row]) -> str:
    parts = shares(mean_split(history))
    if not parts:
        return ""
    bar = "".join(f'<div style="width:{share:.2%};background:{SPLIT_COLOURS[word]}" title="{word}"></div>'
                  for word, _, share in parts)
    rows = "".join(f'<tr><td><span class="key" style="background:{SPLIT_COLOURS[word]}"></span>{word}</td>'
                   f'<td class="n">{seconds:.3f}</td><td class="n">{share:.1%}</td></tr>'
                   for word, seconds, share in parts)
    return (f'<h2>Where a step goes</h2><div class="card"><div class="bar">{bar}</div><table><tr><th>part</th>'
            f'<th class="n">seconds</th><th class="n">share</th></tr>{rows}</table></div>')


def _samples(samples: Sequence[dict]) -> str:
    if not samples:
        return ""
    rows = "".join(
        f'<tr><td class="n">{int(s["step"])}</td><td class="n">{float(s["reward"]):.3g}</td>'
        f'<td>{escape(str(s["why"]))}</td><td><pre>{escape(str(s["prompt"]))}</pre></td><td><pre>{escape(str(s["completion"]))}</pre></td>'
        f'<td>{escape(str(s["answer"]))}</td><td>{escape(str(s["finish_reason"]))}</td></tr>'
        for s in samples[-SAMPLES:])
    return (f'<h2>Completions</h2><div class="card"><table><tr><th class="n">step</th><th class="n">reward</th>'
            f"<th>why</th><th>prompt</th><th>completion</th><th>answer</th><th>end</th></tr>{rows}</table></div>")


def _documents(run_dir: Path, attempt: Path) -> dict[str, str]:
    found = {}
    for name in DOCUMENTS:
        for folder in (attempt, run_dir):
            if (folder / name).is_file():
                found[name] = (folder / name).read_text(encoding="utf-8", errors="replace")
                break
    return found


def _document_list(documents: dict[str, str]) -> str:
    if not documents:
        return ""
    blocks = "".join(f'<details class="card"><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>'
                     for name, text in documents.items())
    return f"<h2>Configuration and plan</h2>{blocks}"
