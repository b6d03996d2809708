"""The HTML report of a run."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from launch.report.html import NUMBER, TEXT, facts, page, table
from launch.report.run.charts import SPLIT_COLOURS, svg_charts
from launch.report.run.display import duration, shares
from launch.report.run.plan_vs_measured import FILE, comparison_html, of_attempt
from launch.report.run.terminal import mean_split
from launch.run.metrics import Row, attempt_dirs, first_and_last, metric_history, read_jsonl, series

DOCUMENTS = ("config.yaml", "config.json", "plan.json", "placement.json", FILE, "versions.json",
             "environment.json")
"""Files of an attempt or of the run that the report shows in full, if they exist."""
SAMPLES = 12


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
    return page(name, body)


def _head(name: str, history: Sequence[Row], attempts: int) -> str:
    steps = int(history[-1]["step"]) if history else 0
    return (f'<h1>{escape(name)}</h1><div class="soft">{steps} steps in {attempts} '
            f'attempt{"s" if attempts != 1 else ""}</div>')


def _facts(history: Sequence[Row]) -> str:
    found: list[tuple[str, str]] = []
    _, rewards = series(history, "reward/mean")
    if rewards:
        first, last, n = first_and_last(rewards)
        found.append((f"{first:.3f} → {last:.3f}", f"mean reward, first and last {n} steps"))
    _, accuracy = series(history, "eval/accuracy")
    if accuracy:
        found.append((f"{accuracy[0]:.1%} → {accuracy[-1]:.1%}", "held-out accuracy, greedy"))
    split = mean_split(history)
    if split.get("time/step"):
        found.append((f"{split['time/step']:.2f} s", "mean step"))
        found.append((duration(sum(row.get("time/step", 0.0) for row in history)), "in steps, start-up not counted"))
    for unit in ("samples", "tokens"):
        _, values = series(history, f"throughput/{unit}_per_s")
        if values:
            found.append((f"{sum(values) / len(values):,.1f}", f"{unit}/s, mean"))
    return facts((value, what, "") for value, what in found)


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
    rows = ((f'<span class="key" style="background:{SPLIT_COLOURS[word]}"></span>{word}', f"{seconds:.3f}",
             f"{share:.1%}") for word, seconds, share in parts)
    return (f'<h2>Where a step goes</h2><div class="card"><div class="bar">{bar}</div>'
            f"{table({'part': TEXT, 'seconds': NUMBER, 'share': NUMBER}, rows)}</div>")


def _samples(samples: Sequence[dict]) -> str:
    if not samples:
        return ""
    rows = []
    for sample in samples[-SAMPLES:]:
        why, prompt, completion, answer, end = (
            escape(str(sample[key])) for key in ("why", "prompt", "completion", "answer", "finish_reason"))
        rows.append((f"{int(sample['step'])}", f"{float(sample['reward']):.3g}", why, f"<pre>{prompt}</pre>",
                     f"<pre>{completion}</pre>", answer, end))
    columns = {"step": NUMBER, "reward": NUMBER, "why": TEXT, "prompt": TEXT, "completion": TEXT, "answer": TEXT,
               "end": TEXT}
    return f'<h2>Completions</h2><div class="card">{table(columns, rows)}</div>'


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
