"""Prints the preflight on a terminal: a table of nodes and subjects, the findings with evidence and remedy, the verdict
and the --exclude line to paste. Uses at most 100 columns."""

from __future__ import annotations

import textwrap

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.cluster.hostlist import compress
from launch.health.check import RANK, Severity, worst
from launch.health.verdict import Verdict, own_findings
from launch.report.plan.overview import WIDTH, terminal

MAX_ROWS = 40
NAMES_WIDTH = 24
WORDS: dict[Severity, tuple[str, str]] = {"ok": ("ok", "green"), "warning": ("warn", "yellow"),
                                          "critical": ("CRIT", "bold red")}


def print_preflight(verdict: Verdict, console: Console | None = None) -> None:
    """Print the verdict and all findings. Nodes without findings share a row."""
    console = console or terminal()
    width = min(WIDTH, console.width)
    if verdict.job:
        subjects = dict.fromkeys(check.subject for check in verdict.job)
        cells = [Text.assemble(subject, " ", _text(worst(check for check in verdict.job if check.subject == subject)))
                 for subject in subjects]
        console.print(Text("job:  ").append_text(Text("  ").join(cells)))
    if verdict.findings:
        console.print(_matrix(verdict))
    for line in _findings(verdict, width):
        console.print(line)
    _end(verdict, console, width)


def _matrix(verdict: Verdict) -> Table:
    subjects = list(dict.fromkeys(check.subject for checks in verdict.findings.values() for check in checks))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("node", *subjects, "verdict"):
        table.add_column(heading, no_wrap=True)
    rows: dict[tuple, list[str]] = {}
    for node, checks in verdict.findings.items():
        known = {check.subject for check in checks}
        cells = tuple(worst(check for check in checks if check.subject == subject) if subject in known else None
                      for subject in subjects)
        place = _place(verdict, node)
        flawed = place != "fit" or own_findings(node, verdict.findings)
        rows.setdefault((*cells, place, node if flawed else ""), []).append(node)
    ordered = sorted(rows.items(), key=lambda row: max(RANK.get(cell, 0) for cell in row[0][:-2]))
    for (*shown, place, _), nodes in ordered[-MAX_ROWS:]:
        names = compress(nodes)
        table.add_row(names if len(names) <= NAMES_WIDTH else f"{len(nodes)} nodes", *[_text(cell) for cell in shown],
                      Text(place, "bold red" if place == "excluded" else ""))
    if len(ordered) > MAX_ROWS:
        table.caption = f"{len(ordered) - MAX_ROWS} less severe rows omitted: see --json"
    return table


def _text(cell: Severity | None) -> Text:
    return Text(*WORDS[cell]) if cell else Text("-", "dim")


def _place(verdict: Verdict, node: str) -> str:
    if node in verdict.excluded:
        return "in ledger" if verdict.excluded[node].from_ledger else "excluded"
    return "used last" if node in verdict.avoid else "fit"


def _findings(verdict: Verdict, width: int) -> list[Text]:
    """Each finding once, with the affected nodes, most severe first."""
    groups: dict[tuple[Severity, str, str, str], list[str]] = {}
    site = {check.name for check in verdict.site}
    for check in (*verdict.job, *verdict.site):
        if check.severity != "ok":
            groups[(check.severity, check.name, check.evidence, check.remedy)] = []
    for node, checks in verdict.findings.items():
        out = verdict.excluded.get(node)
        for check in (*checks, *(out.checks if out and out.from_ledger else ())):
            if check.severity != "ok" and not (check.severity == "critical" and check.name in site):
                groups.setdefault((check.severity, check.name, check.evidence, check.remedy), []).append(node)
    lines: list[Text] = []
    for (severity, name, evidence, remedy), nodes in sorted(groups.items(), key=lambda each: -RANK[each[0][0]]):
        word, style = WORDS[severity]
        where = compress(nodes) if nodes else "job" if name not in site else "all nodes"
        lines.append(Text.assemble((word, style), " ", (f"{_fit(where, width - len(name) - 8)}: {name}", "bold")))
        lines += [Text(part) for part in _wrapped(evidence, width, "     ")]
        lines += [Text(part, "dim") for part in _wrapped(f"remedy: {remedy}", width, "     ")]
    return lines


def _end(verdict: Verdict, console: Console, width: int) -> None:
    total, fit = len(verdict.findings), len(verdict.accepted)
    if total == 0:
        console.print(_sentence(verdict))
        return
    spares = f", {max(0, fit - verdict.needed)} of {verdict.spares} spares left" if verdict.spares else ""
    console.print(Text(f"{fit} of {total} nodes are fit, {verdict.needed} needed{spares}"))
    for line in () if len(verdict.findings) < 2 else verdict.critical:
        for part in _wrapped(f"critical: {line}", width, "  "):
            console.print(Text(part, "bold red"))
    console.print(_sentence(verdict))
    if verdict.excluded:
        console.print(Text(f"--exclude={compress(verdict.excluded)}"), soft_wrap=True)


def _sentence(verdict: Verdict) -> Text:
    return (Text("the job may start", "green") if verdict.ok else
            Text("the job may not start as planned", "bold red"))


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  ")


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[:width - 3] + "..."
