"""docs/preflight.md names every check that the program makes, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_check_is_in_the_list():
    page = (ROOT / "docs" / "preflight.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^- `([a-z]+\.[a-z_]+)`:", page, re.MULTILINE))
    sources = [file for file in (ROOT / "launch" / "health").rglob("*.py")
               if file.name not in ("login.py", "node.py")]
    made = {name for file in sources for name in re.findall(
        r'"((?:gpu|nic|net|limit|cpu|disk|model|lib|env|fs|clock|fabric|report)\.[a-z_]+)"', file.read_text())}
    assert made - {"gpu.model.differs"} == told
