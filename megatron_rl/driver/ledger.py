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
        order: the run's order of prompts, at its beginning.
    """

    def __init__(self, order: PromptSampler) -> None:
        self._order = order
        self._due = self.trained = 0
        self._open: Counter[int] = Counter()
        """Row -> times that it was due less times that it was trained, where they differ."""

    def settle(self, due: int, rows: Sequence[int]) -> None:
        """A step is done: the next `due` rows of the order were to be trained, and `rows` were."""
        self._open.update(self._order.next(due))
        self._open.subtract(rows)
        self._open = Counter({row: times for row, times in self._open.items() if times})
        self._due += due
        self.trained += len(rows)

    @property
    def lost(self) -> int:
        """Prompts that were due and not trained."""
        return sum(times for times in self._open.values() if times > 0)

    @property
    def duplicated(self) -> int:
        """Prompts that were trained once more than they were due."""
        return -sum(times for times in self._open.values() if times < 0)

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable state, stored in every checkpoint."""
        return {"due": self._due, "trained": self.trained, "open": [list(each) for each in self._open.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. Call it on a new ledger."""
        self._due, self.trained = state["due"], state["trained"]
        self._open = Counter({row: times for row, times in state["open"]})
        if self._due:
            self._order.next(self._due)
