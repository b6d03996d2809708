"""Bars made of text: memory against its limit, phases on a time axis, a throughput with its uncertainty."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text


@dataclass(frozen=True)
class Marks:
    """The characters of the bars."""

    full: str
    empty: str
    over: str
    """Beyond the limit."""
    line: str
    between: str
    nominal: str
    target: str


UNICODE = Marks(full="█", empty="░", over="▓", line="─", between="━", nominal="●", target="┃")
ASCII = Marks(full="#", empty=".", over="!", line="-", between="=", nominal="o", target="|")


def marks(encoding: str) -> Marks:
    """Block characters if the stream can encode them, ASCII otherwise."""
    return UNICODE if encoding.lower().startswith("utf") else ASCII


def against_limit(used: float, limit: float, width: int, style: str, characters: Marks = UNICODE) -> Text:
    """`used` as a bar of `width` cells that ends at the limit. If `used` exceeds the limit, the limit lies inside the
    bar and the excess is marked."""
    scale = max(used, limit) or 1
    filled = max(1, round(width * used / scale)) if used > 0 else 0
    end = round(width * limit / scale) if used > limit else width
    if used > limit:
        end = min(end, width - 1)         # an overrun is always visible
    inside = min(filled, end)
    return Text.assemble((characters.full * inside, style), (characters.over * max(0, filled - end), "bold red"),
                         (characters.empty * (width - max(inside, filled)), "dim"))


def span(start: float, seconds: float, total: float, width: int, style: str, characters: Marks = UNICODE) -> Text:
    """A phase on a time axis of `total` seconds and `width` cells. It takes at least one cell."""
    total = total or 1
    left = min(width - 1, max(0, round(width * start / total)))
    right = min(width, max(left + 1, round(width * (start + seconds) / total)))
    return Text.assemble(" " * left, (characters.full * (right - left), style), " " * (width - right))


def axis(total: float, width: int, parts: int = 4) -> str:
    """Labels of a time axis in seconds, from 0 at the left end to `total` at the right end."""
    line = [" "] * width
    for part in range(parts + 1):
        label = f"{total * part / parts:.{1 if total < 10 else 0}f}" + (" s" if part == parts else "")
        middle = round(width * part / parts)
        left = width - len(label) if part == parts else max(0, middle - (len(label) // 2 if part else 0))
        line[left:left + len(label)] = label
    return "".join(line[:width])


def with_uncertainty(low: float, nominal: float, high: float, target: float | None, width: int,
                     characters: Marks = UNICODE) -> Text:
    """From 0 to beyond the largest value: a heavy line from `low` to `high`, a dot at `nominal`, a mark at `target`."""
    scale = 1.06 * max(high, nominal, target or 0) or 1

    def cell(value: float) -> int:
        return min(width - 1, max(0, int(width * value / scale)))

    strip = Text(characters.line * width, "dim")
    text = list(strip.plain)
    for index in range(cell(low), cell(high) + 1):
        text[index] = characters.between
    styles = [(cell(low), cell(high) + 1, "cyan")]
    if target is not None:
        mark = cell(target)
        if mark == cell(nominal):                                 # keep both visible
            above = target >= nominal and mark + 1 < width or mark == 0
            mark += 1 if above else -1
        text[mark] = characters.target
        styles.append((mark, mark + 1, "bold yellow"))
    text[cell(nominal)] = characters.nominal
    styles.append((cell(nominal), cell(nominal) + 1, "bold cyan"))
    strip = Text("".join(text), "dim")
    for left, right, style in styles:
        strip.stylize(f"not dim {style}", left, right)
    return strip
