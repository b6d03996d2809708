"""Text for people, at most 100 columns: a label of 13 columns followed by its text, lists of names, plots."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from launch.files.waiting import listed

WIDTH = 100
LABEL = 13


def field(label: str, text: str) -> str:
    """`label        text ...`, with continuation lines indented to the text. Words longer than a line stay whole."""
    lines = []
    for part in text.splitlines() or [""]:
        lines += textwrap.wrap(part, WIDTH - LABEL, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(f"{label if number == 0 else '':<{LABEL}}{line}".rstrip() for number, line in enumerate(lines))


def duration(seconds: float) -> str:
    """`45 s`, `12:30 min`, `5:12:10 h`, `3 d 4 h`."""
    whole = int(round(max(0.0, seconds)))
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 72:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minute:02}:{second:02} h" if hours else f"{minutes}:{second:02} min"


def node_list(names: Sequence[str]) -> str:
    """`h100-[001-016]` for consecutive names with one prefix, single names otherwise."""
    parts, at = [], 0
    while at < len(names):
        end = at
        while end + 1 < len(names) and _follows(names[end], names[end + 1]):
            end += 1
        if end > at:
            head = names[at].rstrip("0123456789")
            low = names[at][len(head):]
            parts.append(f"{head}[{low}-{names[end][len(head):]}]")
        else:
            parts.append(names[at])
        at = end + 1
    return listed(parts, 6)


def _follows(one: str, other: str) -> bool:
    first, second = re.fullmatch(r"(.*?)(\d+)", one), re.fullmatch(r"(.*?)(\d+)", other)
    return bool(first and second and first[1] == second[1] and len(first[2]) == len(second[2])
                and int(first[2]) + 1 == int(second[2]))


def ranges(numbers: Sequence[int]) -> str:
    """`0-3,8-11`, in the given order, so that an order other than the natural one is visible."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def plotted(width: int, height: int, draw: Callable[[Any], None]) -> str:
    """What `draw` puts into a plotext figure of this many columns and lines, as plain text."""
    import plotext  # has one figure for the whole process, which is cleared before and after

    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    figure.theme("colorless")
    draw(figure)
    drawing = plotext.uncolorize(str(figure.build()))
    figure.clear()
    return "\n".join(line.rstrip() for line in drawing.splitlines()).rstrip()
