"""The count that shows that every prompt was trained exactly once.

It trusts neither the rollout stream nor the position that a checkpoint stores. It has a sampler of its own, which
starts at the run's first prompt, and compares what that owes with what the trainer got.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_rl.data.sampler import PromptSampler


class Ledger:
    """What was due and what was trained, over all attempts of a run.

    Args:
        order: the run's order of prompts, at its beginning. None: a class of the user's picks them, so that only what
            it picked can be due.
    """

    def __init__(self, order: PromptSampler | None) -> None:
        self._order, self._waiting = order, 0
        self._due = self.trained = 0
        self.lost = self.duplicated = 0
        """Prompts that were due and not used; prompts that were used once more than they were due."""
        self._open: Counter[int] = Counter()
        """Row -> times that the order gave it less times that it was used, where they differ."""

    def settle(self, picked: Sequence[int], rows: Sequence[int], replaced: Sequence[int] = (),
               waiting: Sequence[int] = ()) -> None:
        """A step is done.

        Args:
            picked: the rows that were to be generated for it.
            rows: those that it trained.
            replaced: those that dynamic sampling replaced.
            waiting: rows that the order gave up to now and that are put back, to be picked again.
        """
        if self._order is None:
            self._open.update(picked)
        else:       # the batch picked rows that waited before, and what it did not use waits now
            due = len(picked) + len(waiting) - self._waiting
            self._open.update(self._order.pick(due) if due else ())
            self._due += due
        self._open.subtract(rows)
        self._open.subtract(replaced)
        self._open.subtract(waiting)
        lacking = Counter(self._open)
        self._open.update(waiting)
        self._open = Counter({row: times for row, times in self._open.items() if times})
        self._waiting = len(waiting)
        self.lost = sum(times for times in lacking.values() if times > 0)
        self.duplicated = -sum(times for times in lacking.values() if times < 0)
        self.trained += len(rows)

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable state, stored in every checkpoint."""
        return {"due": self._due, "trained": self.trained, "waiting": self._waiting, "lost": self.lost,
                "duplicated": self.duplicated, "open": [list(each) for each in self._open.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. Call it on a new ledger."""
        self._due, self.trained, self._waiting = state["due"], state["trained"], state["waiting"]
        self.lost, self.duplicated = state["lost"], state["duplicated"]
        self._open = Counter({row: times for row, times in state["open"]})
        if self._order is not None and self._due:
            self._order.pick(self._due)
