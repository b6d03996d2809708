"""Generated blocks in the pages of documentation, between `<!-- begin NAME -->` and `<!-- end NAME -->`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def with_block(page: str, name: str, content: str) -> str:
    """The text of a page with another content of one block.

    Raises:
        ValueError: the page does not have exactly one such block.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed or begin in tail:
        raise ValueError(f"the page needs exactly one block {begin} ... {end}")
    return f"{head}{begin}\n{content}\n{end}{tail}"


def indented(text: str) -> str:
    """Text as a block of code in Markdown."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def write_blocks(page: Path, blocks: Mapping[str, str]) -> None:
    """Write each text, indented, into the block of its name. Raises ValueError as `with_block`; nothing was written."""
    content = page.read_text(encoding="utf-8")
    for name, text in blocks.items():
        content = with_block(content, name, f"\n{indented(text)}\n")
    page.write_text(content, encoding="utf-8")
