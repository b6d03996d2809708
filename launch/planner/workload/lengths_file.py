"""Reads the response lengths of a run from a JSONL file of completions: one JSON object per line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from launch.errors import UserError

FIELDS = ("response_length", "completion_length", "length", "completion_tokens", "output_tokens", "tokens",
          "token_ids", "completion_ids")
"""Fields with the length of a response, as a number of tokens or as a list of tokens. The first one that is present
counts. `samples.jsonl` of a run has `tokens`."""


def read(path: str | Path) -> Counter[int]:
    """Length in tokens -> number of completions. Empty lines are skipped.

    Raises:
        UserError: the file cannot be read or has no completion; or a line, named by its number, is no JSON object, has
            none of `FIELDS`, or has a length that is no whole number above 0.
    """
    counts: Counter[int] = Counter()
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    counts[_length(line, f"{path}:{number}")] += 1
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the measured response lengths: {error}", where=str(path),
                        fix="name a JSONL file of completions, such as a run's samples.jsonl") from error
    if not counts:
        raise UserError("no completion in this file", where=str(path),
                        fix=f"write one JSON object per line, with one of {', '.join(FIELDS)}")
    return counts


def _length(line: str, where: str) -> int:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}", where=where, fix="write one JSON object per line") from error
    name = next((name for name in FIELDS if name in record), None) if isinstance(record, dict) else None
    if name is None:
        raise UserError("no response length on this line", where=where,
                        fix=f"a JSON object with one of {', '.join(FIELDS)}")
    value = len(record[name]) if isinstance(record[name], list) else record[name]
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        shown = json.dumps(record[name])[:40]
        raise UserError(f"{name} = {shown} is not a response length", where=where,
                        fix="a whole number of tokens above 0, or the list of tokens")
    return value
