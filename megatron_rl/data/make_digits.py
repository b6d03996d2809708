"""The larger of two digits: the data set of configs/tiny. This command reproduces it bit for bit:

    python -m megatron_rl.data.make_digits configs/tiny

The data set contains all 100 pairs of digits, of which 20 are held out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

SEED, EVAL_ROWS = 0, 20


def make(seed: int = SEED) -> tuple[list[dict], list[dict]]:
    """Return (training rows, held-out rows). Each row is {prompt, answer}."""
    rows = [{"prompt": f"{a} {b}=", "answer": str(max(a, b))} for a, b in itertools.product(range(10), repeat=2)]
    random.Random(seed).shuffle(rows)
    return rows[EVAL_ROWS:], rows[:EVAL_ROWS]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write train.jsonl and eval.jsonl for the larger of two digits.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name, rows in zip(("train.jsonl", "eval.jsonl"), make(), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8")
        print(f"{folder / name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
