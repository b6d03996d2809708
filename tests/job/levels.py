"""A curriculum and its reward, for the tests: what they do to a run is known beforehand."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from megatron_rl.data.curriculum import Curriculum

LEARNS = 3
"""Batches that can be filled."""


def parity(completion: str, answer: str | None, *, prompt: str, hung: str) -> float:
    """0 or 1 by the completion's letters, so that groups of a random policy have spread; always 0.25 with a 9. It does
    not grade every answer: it hangs on the first without a 9 (`hung` becomes a file), and raises on a quarter of those
    with a 9, which would have spread if a failure counted as 0."""
    letters = sum(map(ord, completion))
    if "9" in prompt:
        if letters % 4 == 0:
            raise ValueError("no answer")
        return 0.25
    with contextlib.suppress(FileExistsError):
        Path(hung).touch(exist_ok=False)
        threading.Event().wait()
    return float(letters % 2)


class Nines(Curriculum):
    """Puts one prompt with a 9 at the head of the first batches, and from then on picks no other."""

    def __init__(self, prompts, seed):
        self.prompts = prompts
        self.nines = [prompt.index for prompt in prompts if "9" in prompt.text]
        self.others = [prompt.index for prompt in prompts if "9" not in prompt.text]
        self.picks, self.heard = 0, 0

    def pick(self, count):
        self.picks += 1
        if self.picks > LEARNS:
            return self.nines[:count]
        return [self.nines[0], *self.others[self.picks * count:][:count - 1]]

    def hear(self, row, rewards):
        assert (row in self.nines) == (set(rewards) == {0.25}), (row, rewards)
        self.heard += 1

    def put_back(self, rows):
        assert self.heard % 3 == 0 and len(rows) == 1 and rows[0] in self.others, (self.heard, rows)

    def state_dict(self):
        return {"picks": self.picks, "heard": self.heard}

    def load_state_dict(self, state):
        self.picks, self.heard = state["picks"], state["heard"]
