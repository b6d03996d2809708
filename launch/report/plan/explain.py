"""`megatron-rl plan explain`: where each number comes from and why each choice was made, according to the book."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from launch.errors import UserError, nearest_few
from launch.plan.forecast import Alternative, Choice, Forecast, Number
from launch.plan.plan import Plan
from launch.report.plan.file import with_forecast
from launch.report.quantities import both, human, plain, plural

WIDTH = 100
STEP = 4
"""Columns of indentation per level of the tree."""


def explain(plan: Plan, key: str = "") -> str:
    """Text of at most 100 columns, except for long keys and formulas.

    Args:
        key: a number, a choice, or a common prefix of several (`memory.training`); "" for everything.

    Raises:
        UserError: the plan has no forecast, or the key is unknown; the message names the nearest keys.
    """
    forecast = with_forecast(plan, "there is nothing to explain").forecast
    numbers = {each.key: each for each in forecast.numbers}
    choices = [each for each in forecast.choices if each.key == key]
    blocks = ["\n".join(_choice(each)) for each in choices]
    if key in numbers:
        blocks.append("\n".join(_tree(key, numbers)))
    if not blocks:
        blocks = _under(forecast, key)
    if not blocks:
        raise UserError(f"the plan has no number and no choice {plain(key)!r}", where="megatron-rl plan explain",
                        fix=f"nearest: {', '.join(_nearest(forecast, key))}; without a name, everything is printed")
    return "\n\n".join(blocks)


def _under(forecast: Forecast, key: str) -> list[str]:
    """Everything under a prefix: whole words first (`memory.training.`), otherwise any prefix."""
    for beginning in (key.rstrip(".") + ".", key):
        choices = [each for each in forecast.choices if each.key.startswith(beginning)]
        numbers = [each for each in forecast.numbers if each.key.startswith(beginning)]
        if choices or numbers:
            return [each for each in (_choices(choices), _numbers(numbers)) if each]
    return []


def _nearest(forecast: Forecast, key: str) -> list[str]:
    known = {each.key for each in forecast.numbers} | {each.key for each in forecast.choices}
    for each in list(known):
        words = each.split(".")
        known |= {".".join(words[:count]) for count in range(1, len(words))}
    return nearest_few(key, sorted(known), alike=0.0)


def _choices(choices: Sequence[Choice]) -> str:
    return "\n".join(["CHOICES", *(line for each in choices for line in _choice(each))]) if choices else ""


def _choice(choice: Choice) -> list[str]:
    lines = [*_wrapped(f"{choice.key} = {choice.value}", 0), *_wrapped(choice.reason, STEP)]
    for other in choice.alternatives:
        lines += _wrapped(f"not {rejected(other)}", STEP)
    return lines


def rejected(other: Alternative) -> str:
    """`24 training + 8 rollout (7,200 prompts/h): why not`; the throughput is omitted if the reason contains it."""
    rate = "" if other.prompts_per_hour is None else f"{other.prompts_per_hour:,.0f} prompts/h"
    return f"{other.value}{f' ({rate})' if rate and rate not in other.rejected_by else ''}: {other.rejected_by}"


def _numbers(numbers: Sequence[Number]) -> str:
    """Every number with its formula and inputs, grouped by the first word of its key."""
    groups: dict[str, list[Number]] = {}
    for number in numbers:
        groups.setdefault(number.key.split(".")[0], []).append(number)
    blocks = []
    for name, members in groups.items():
        lines = [f"{plain(name).upper()} ({plural(len(members), 'number')})"]
        for number in members:
            lines += _number(number, 0)
            if number.inputs:
                lines += _wrapped(f"from {', '.join(number.inputs)}", STEP)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _number(number: Number, indent: int) -> list[str]:
    lines = _wrapped(f"{number.key} = {both(number.value, number.unit)}", indent)
    return lines + _wrapped(_origin(number), indent + STEP)


def _origin(number: Number) -> str:
    if number.formula or number.inputs:
        return f"= {number.formula}"
    return f"given: {number.source or 'no source recorded'}"


def _tree(key: str, numbers: dict[str, Number]) -> list[str]:
    """The number, with its inputs indented under it, down to given numbers. A number that was already shown is only
    named: inputs are shared, and the tree would become huge."""
    lines: list[str] = []
    shown: set[str] = set()
    todo = [(key, 0)]
    while todo:
        name, depth = todo.pop()
        indent = min(depth * STEP, WIDTH // 2)
        number = numbers.get(name)
        if number is None:
            lines += _wrapped(f"{name}: not in the plan", indent)
        elif name in shown and number.inputs:
            lines += _wrapped(f"{name} = {human(number.value, number.unit)}, as above", indent)
        else:
            shown.add(name)
            lines += _number(number, indent)
            todo += [(each, depth + 1) for each in reversed(number.inputs)]
    return lines


def _wrapped(text: str, indent: int) -> list[str]:
    pad = " " * indent
    return textwrap.wrap(plain(text), WIDTH, initial_indent=pad, subsequent_indent=pad + " " * STEP,
                         break_long_words=False, break_on_hyphens=False) or [pad.rstrip()]
