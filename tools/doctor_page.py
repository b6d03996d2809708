"""Writes the rows of docs/troubleshooting.md from the table of known failures (`make docs`)."""

from __future__ import annotations

from pathlib import Path

from launch.report.diagnose.doctor import GROUPS, PAGE

BEGIN, END = "<!-- begin rows -->", "<!-- end rows -->"


def rows() -> str:
    """A table for each group; the code is an anchor, which `megatron-rl doctor` prints."""
    parts = []
    for title, group in GROUPS:
        lines = [f"### {title}", "", "| Code | You see | Cause | What to do |", "| --- | --- | --- | --- |"]
        lines += [f'| <a id="{each.code}"></a>{each.code} | `{each.see}` | {_cell(each.cause)} '
                  f'| {_cell(each.remedy)} |' for each in group]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def page(text: str) -> str:
    """The page with its rows written anew."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{rows()}\n\n{END}{tail}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    file = Path(PAGE)
    file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
