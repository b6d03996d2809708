"""A few SVG shapes as text: enough for the pictures of a plan without a drawing library. Text from outside is escaped.
Ink and page colours come from the page's style sheet, so both light and dark mode work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

INK = "currentColor"
SOFT = "var(--soft)"
LINE = "var(--line)"
PALETTE = ("#3b82f6", "#f59e0b", "#10b981", "#a855f7", "#ef4444", "#06b6d4", "#84cc16", "#ec4899", "#8b5cf6", "#14b8a6",
           "#f97316", "#64748b")


def picture(width: float, height: float, shapes: Iterable[str], label: str) -> str:
    """A scalable `<svg>` element of `width` x `height` user units."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(width)} {number(height)}" role="img" '
        f'aria-label="{escape(label)}" font-family="system-ui, sans-serif" font-size="12">{"".join(shapes)}</svg>'
    )


def number(value: float) -> str:
    """At most two decimals, never an exponent or NaN."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"


def rect(x: float, y: float, width: float, height: float, fill: str, *, title: str = "", radius: float = 0,
         stroke: str = "", opacity: float = 1, kind: str = "") -> str:
    return _shape("rect", {"x": x, "y": y, "width": max(0.0, width), "height": max(0.0, height), "rx": radius or None,
                           "fill": fill, "stroke": stroke or None, "opacity": None if opacity == 1 else opacity,
                           "class": kind or None}, title)


def circle(x: float, y: float, radius: float, fill: str, *, title: str = "", stroke: str = "", width: float = 1,
           kind: str = "") -> str:
    return _shape("circle", {"cx": x, "cy": y, "r": radius, "fill": fill, "stroke": stroke or None,
                             "stroke-width": width if stroke else None, "class": kind or None}, title)


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = LINE, *, width: float = 1, dash: str = "",
         title: str = "") -> str:
    return _shape("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "stroke": stroke, "stroke-width": width,
                           "stroke-dasharray": dash or None}, title)


def path(commands: Sequence[str | float], stroke: str, *, width: float = 1.5, opacity: float = 1, title: str = "",
         kind: str = "") -> str:
    """`commands` is SVG path data with numbers as numbers: `("M", 0, 0, "L", 5, 5)`."""
    data = " ".join(each if isinstance(each, str) else number(each) for each in commands)
    return _shape("path", {"d": data, "fill": "none", "stroke": stroke, "stroke-width": width,
                           "opacity": None if opacity == 1 else opacity, "class": kind or None}, title)


def text(x: float, y: float, words: str, *, size: float = 12, anchor: str = "start", fill: str = INK,
         bold: bool = False, title: str = "", halo: bool = False) -> str:
    """`halo`: an outline in the colour of the card, for words on top of lines."""
    return _shape("text", {"x": x, "y": y, "font-size": None if size == 12 else size,
                           "text-anchor": None if anchor == "start" else anchor, "fill": fill,
                           "font-weight": "600" if bold else None, "stroke": "var(--card)" if halo else None,
                           "stroke-width": 4 if halo else None, "paint-order": "stroke" if halo else None},
                  title, escape(words))


def legend(x: float, y: float, entries: Sequence[tuple[str, str]], *, width: float,
           size: float = 12) -> tuple[list[str], float]:
    """Coloured squares with words, in rows of at most `width`.

    Returns:
        The shapes and their height.
    """
    shapes, left, row = [], x, 0
    for colour, words in entries:
        taken = 18 + text_width(words, size) + 16
        if left + taken > x + width and left > x:
            left, row = x, row + 1
        top = y + row * (size + 8)
        shapes += [rect(left, top, size - 1, size - 1, colour, radius=3),
                   text(left + 16, top + size - 2, words, size=size)]
        left += taken
    return shapes, (row + 1) * (size + 8)


def text_width(words: str, size: float = 12) -> float:
    """Approximate width in a common sans-serif font."""
    return sum(0.32 if each in " .,:;'|!iIl()[]fjt" else 0.85 if each in "mwMW%@" else 0.6 for each in words) * size


def shortened(words: str, width: float, size: float = 12) -> str:
    """`words`, cut with an ellipsis if they exceed `width`."""
    if text_width(words, size) <= width:
        return words
    while words and text_width(words + "…", size) > width:
        words = words[:-1]
    return words + "…"


def ticks(limit: float, count: int = 5) -> list[float]:
    """About `count` round numbers from 0 to at most `limit`."""
    if not math.isfinite(limit) or limit <= 0:
        return [0.0]
    rough = limit / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [index * step for index in range(int(limit / step * 1.0001) + 1)]


def mixed(colour: str, other: str, share: float) -> str:
    """The colour at `share` of the way from one `#rrggbb` to another."""
    pairs = [(int(colour[i:i + 2], 16), int(other[i:i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _shape(name: str, attributes: dict[str, str | float | None], title: str, inner: str = "") -> str:
    given = " ".join(f'{key}="{escape(value) if isinstance(value, str) else number(value)}"'
                     for key, value in attributes.items() if value is not None)
    return f"<{name} {given}>" + (f"<title>{escape(title)}</title>" if title else "") + f"{inner}</{name}>"
