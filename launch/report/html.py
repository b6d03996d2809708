"""The parts that the HTML pages share: the style sheet, the page, facts, tables. A page is one file, without network
access or scripts, for light and dark mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

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
TEXT, NUMBER = "", "n"
"""Kinds of table columns: CSS classes."""


def page(title: str, body: Iterable[str], style: str = CSS) -> str:
    """The whole document. The sections of `body` are HTML; the title is text."""
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(title)}</title><style>{style}</style></head><body>{''.join(body)}</body></html>\n")


def facts(rows: Iterable[tuple[str, str, str]]) -> str:
    """Cards with a value, its meaning, and the CSS class of the value ("" for none)."""
    cards = "".join(f'<div class="card fact"><b{_class(kind)}>{escape(value)}</b><span>{escape(what)}</span></div>'
                    for value, what, kind in rows)
    return f'<div class="facts">{cards}</div>'


def table(columns: Mapping[str, str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already. `columns`: title -> TEXT or NUMBER."""
    kinds = [_class(kind) for kind in columns.values()]
    head = "".join(f"<th{kind}>{title}</th>" for title, kind in zip(columns, kinds, strict=True))
    body = "".join("<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
                   for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
