"""Sums asked in words: the data set of configs/135m. This command reproduces it bit for bit:

    python -m megatron_rl.data.make_sums configs/135m

Questions add two numbers up to 15 (eleven wordings) or three numbers up to 9 (three wordings). The held-out questions
use sets of operands that no training question uses, in any order or wording.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path

TWO = (
    "What is {0} plus {1}?",
    "What is {0} + {1}?",
    "What is the sum of {0} and {1}?",
    "How much is {0} plus {1}?",
    "Add {0} and {1}.",
    "Find the sum of {0} and {1}.",
    "Calculate {0} plus {1}.",
    "{0} plus {1} equals what?",
    "{0} + {1} = ?",
    "What do {0} and {1} add up to?",
    "What do you get when you add {0} to {1}?",
)
THREE = (
    "What is {0} plus {1} plus {2}?",
    "What is the sum of {0}, {1} and {2}?",
    "Add {0}, {1} and {2}.",
)
ENDING = " Answer with a number."
SEED, HELD_OUT_SHARE = 0, 0.2
TRAIN_ROWS = (1848, 200)
EVAL_ROWS = (230, 26)
"""Number of questions with two and with three numbers."""

Operands = tuple[int, ...]


def make(seed: int = SEED) -> tuple[list[dict], list[dict]]:
    """Return (training rows, held-out rows) without repeated questions. Each row is {prompt, answer}."""
    rng = random.Random(seed)
    train: list[dict] = []
    held_out: list[dict] = []
    for count, largest, train_rows, eval_rows in ((2, 15, TRAIN_ROWS[0], EVAL_ROWS[0]),
                                                  (3, 9, TRAIN_ROWS[1], EVAL_ROWS[1])):
        sums = list(itertools.combinations_with_replacement(range(1, largest + 1), count))
        rng.shuffle(sums)
        cut = round(len(sums) * HELD_OUT_SHARE)
        held_out += rng.sample(_questions(sums[:cut]), eval_rows)
        train += rng.sample(_questions(sums[cut:]), train_rows)
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out


def _questions(sums: Iterable[Operands]) -> list[dict]:
    """Every sum in every wording, with ascending and with descending operands."""
    rows = []
    for operands in sums:
        for wording in TWO if len(operands) == 2 else THREE:
            for ordered in dict.fromkeys((operands, operands[::-1])):
                rows.append({"prompt": wording.format(*ordered) + ENDING, "answer": str(sum(operands))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Write train.jsonl and eval.jsonl for sums asked in words.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name, rows in zip(("train.jsonl", "eval.jsonl"), make(), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8")
        print(f"{folder / name}: {len(rows)} questions")


if __name__ == "__main__":
    main()
