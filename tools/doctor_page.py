"""Writes the rows of docs/troubleshooting.md from the table of known failures (`make docs`)."""

from __future__ import annotations

from pathlib import Path

from launch.report.diagnose.doctor import PAGE
from launch.report.diagnose.known import GROUPS, Symptom
from tools.docs import item
from tools.pages import with_block


def rows() -> str:
    """One list per group. The code is an anchor that `megatron-rl doctor` prints."""
    return "\n\n".join("\n".join([f"### {title}", "", *map(_row, group)]) for title, group in GROUPS)


def page(text: str) -> str:
    """The page with new rows."""
    return with_block(text, "rows", f"\n{rows()}\n")


def _row(each: Symptom) -> str:
    return item(f'<a id="{each.code}"></a>**{each.code}** (`{each.see}`): {each.cause} **Fix:** {each.remedy}')


if __name__ == "__main__":
    file = Path(PAGE)
    file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
