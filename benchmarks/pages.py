"""Measured text in the pages of docs/. Each block lies between two marks and is replaced as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_blocks(page: Path, blocks: Mapping[str, str]) -> None:
    """Put each text, indented, between `<!-- begin NAME -->` and `<!-- end NAME -->`.

    Raises:
        ValueError: the page has no such block. Nothing was written.
    """
    content = page.read_text(encoding="utf-8")
    for name, text in blocks.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, found, rest = content.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{page} needs a block {begin} ... {end}")
        indented = "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())
        content = f"{head}{begin}\n\n{indented}\n{end}{tail}"
    page.write_text(content, encoding="utf-8")
