"""Numbers with units, rounded for people or exact. GB is 1e9 bytes, as in datasheets."""

from __future__ import annotations

import math

SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
SCALED = {"bytes": "B", "bytes/s": "B/s", "FLOP": "FLOP", "FLOP/s": "FLOP/s", "FLOP/token": "FLOP/token",
          "bytes/token": "B/token", "bit/s": "bit/s", "W": "W"}
"""Units that take a decimal prefix, and the symbol after the prefix."""


def significant(value: float, digits: int = 3) -> str:
    """`value` with thousands separators and `digits` significant digits, or all digits of a larger whole part.
    Exponents are used only below 1e-6 and from 1e15 on."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -6 or magnitude >= 15:
        return f"{value:.{digits - 1}e}"
    text = f"{value:,.{max(0, digits - 1 - magnitude)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def human(value: float, unit: str = "") -> str:
    """`64.7 GB`, `48 ms`, `1,020 tokens/s`, `989 TFLOP/s`, `0.85`."""
    if unit == "s":
        return seconds(value)
    if unit in SCALED:
        for factor, prefix in SI:
            if abs(value) >= factor and math.isfinite(value):
                return f"{significant(value / factor)} {prefix}{SCALED[unit]}"
        return f"{significant(value)} {SCALED[unit] if unit != 'bytes' else 'bytes'}"
    if float(value).is_integer() and abs(value) < 2 ** 53:
        return f"{int(value):,} {unit}".rstrip()
    return f"{significant(value, 4)} {unit}".rstrip()


def seconds(value: float) -> str:
    """A time in a suitable unit: `4.2 ms`, `92.2 s`, `31 min`, `212 h`."""
    size = abs(value)
    if size == 0 or not math.isfinite(value):
        return f"{significant(value)} s"
    for below, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (600.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if size < below:
            return f"{significant(value * factor)} {unit}"
    return f"{significant(value / 3600)} h"


def exact(value: float, unit: str = "") -> str:
    """The number with all its digits."""
    whole = math.isfinite(value) and float(value).is_integer() and abs(value) < 2 ** 53
    return f"{int(value):,} {unit}".rstrip() if whole else f"{value!r} {unit}".rstrip()


def both(value: float, unit: str = "") -> str:
    """The rounded value, followed by the exact one if that says more."""
    short, full = human(value, unit), exact(value, unit)
    return short if short == full else f"{short} ({full})"


def gigabytes(value: float) -> str:
    """`64.7`: gigabytes without the unit, for bars and columns that state it once."""
    return f"{value / 1e9:.1f}"


def change(before: float, after: float) -> str:
    """Relative change: `+8.8 %`; "" if there is none or no base."""
    if before == after or not before or not math.isfinite(before) or not math.isfinite(after):
        return ""
    share = (after - before) / abs(before)
    return f"{share:+,.1%}".replace("%", " %") if abs(share) >= 0.0005 else f"{share:+.1e}"


def plural(count: int, word: str) -> str:
    """`1 node`, `12 nodes`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def plain(text: str) -> str:
    """Text from a user's file, safe on a terminal: control characters become `?`."""
    return "".join(each if each.isprintable() else "?" for each in text)
