"""Selects the prompts of the next step in a deterministic, epoch-aware order that survives a resume."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launch.errors import UserError
from megatron_rl.data.curriculum import Curriculum, Guarded


class PromptSampler(Curriculum):
    """The shuffled epoch: an endless stream of row indices over a data set of `n` rows. Every epoch visits each row
    exactly once. Rows that are put back come first.

    The order of an epoch depends only on (`seed`, epoch). Two integers therefore define a position, and a resumed run
    continues in the epoch in which it stopped (Megatron-Bridge#4601: a sampler that forgets the epoch repeats the
    first). Two draws of one row are two prompt *instances*, each with its own group.
    """

    def __init__(self, n: int, seed: int, shuffle: bool = True) -> None:
        if n < 1:
            raise ValueError(f"a sampler needs at least one row, got {n}")
        self.n, self.seed, self.shuffle = n, seed, shuffle
        self.epoch, self.position = 0, 0
        self._order_n = self._order(0)
        self._put_back: deque[int] = deque()

    def pick(self, count: int) -> list[int]:
        """Draw the next `count` row indices, across as many epochs as needed."""
        if count < 1:
            raise ValueError(f"a draw needs at least one prompt, got {count}")
        drawn = [self._put_back.popleft() for _ in range(min(count, len(self._put_back)))]
        while len(drawn) < count:
            if self.position == self.n:
                self.epoch, self.position = self.epoch + 1, 0
                self._order_n = self._order(self.epoch)
            taken = self._order_n[self.position:self.position + count - len(drawn)]
            drawn.extend(int(row) for row in taken)
            self.position += len(taken)
        return drawn

    def put_back(self, rows: Sequence[int]) -> None:
        """Rows that were drawn and not used, to be drawn before any other."""
        self._put_back.extend(rows)

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable state, stored in every checkpoint (prime-rl#3164)."""
        return {"epoch": self.epoch, "position": self.position, "put_back": list(self._put_back), "seed": self.seed,
                "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Raises UserError if the seed or shuffling changed since then, because it is
        then unknown which rows the run has already visited."""
        for key, then, now in (("run.seed", state["seed"], self.seed),
                               ("data.shuffle", state["shuffle"], self.shuffle)):
            if then != now:
                raise UserError(f"{key} was {then} when the checkpoint was written and is {now} now", where=key,
                                fix=f"set {key}={then}, or start a run with another run.name")
        self.epoch, self.position = state["epoch"], state["position"]
        self._put_back = deque(state["put_back"])
        self._order_n = self._order(self.epoch)

    def _order(self, epoch: int) -> np.ndarray:
        """int64 [n], a permutation."""
        if not self.shuffle:
            return np.arange(self.n)
        # PCG64 is explicit so that the order does not change with NumPy's default generator.
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.n)


@dataclass(frozen=True)
class _Drawn:
    """A batch that was drawn and not yet trained."""

    rows: list[int]
    state: dict[str, Any]
    """The curriculum's state after the draw."""
    heard: int
    """The last batch whose results the curriculum had heard by then."""


class BatchSampler:
    """Draws the rows of whole batches ahead of their training, and tells the curriculum the results of trained ones.

    Batches are numbered like the steps that train them. The curriculum hears the results of batch b (rewards, and the
    part of the reserve that was not used) just before it picks batch b + 1 + `lag`, neither sooner nor later. With a
    `lag` of at least `algorithm.max_staleness` they are there in time, so picks never depend on timing.

    A checkpoint holds the state after the draw of the last trained batch, and the results that the curriculum had not
    heard by then. A resumed run draws the later batches again, so every row is trained once however far a run had drawn
    when it ended.
    """

    def __init__(self, curriculum: Guarded, batch_size: int, reserve: int = 0, lag: int = 0) -> None:
        """`batch_size`, `reserve`: rows of a batch that are trained, and those that may replace them."""
        self._curriculum, self._size, self._rows, self._lag = curriculum, batch_size, batch_size + reserve, lag
        self._trained = self._taken = self._heard = 0
        self._mark = _Drawn([], curriculum.state_dict(), 0)
        """The last trained batch."""
        self._ahead: deque[_Drawn] = deque()
        self._results: dict[int, dict[str, Any]] = {}
        """By batch: `rewards`, pairs of a row and the rewards of its group, and `unused`, rows."""

    def draw(self) -> list[int]:
        """The rows of the next batch, those of the reserve last.

        Raises:
            UserError: the curriculum's class made a mistake.
        """
        batch = self._trained + len(self._ahead) + 1
        while self._heard < batch - 1 - self._lag:
            self._heard += 1
            self._hear(self._results[self._heard])
        rows = self._curriculum.pick(self._rows)
        self._ahead.append(_Drawn(rows, self._curriculum.state_dict(), self._heard))
        return rows

    def taken(self, rewards: Sequence[tuple[int, list[float]]]) -> None:
        """The trainer has the next batch, in order. `rewards`: row and rewards of every generated group, in the order
        of the draw; a group may have none. The rest of its rows was not used."""
        rows = self._ahead[self._taken - self._trained].rows
        self._taken += 1
        self._results[self._taken] = {"rewards": [list(pair) for pair in rewards] if self._curriculum.hears else [],
                                      "unused": rows[len(rewards):]}

    def trained(self) -> list[int]:
        """The oldest of the drawn batches is trained. Returns its rows, without what was not used of its reserve."""
        self._trained += 1
        self._mark = self._ahead.popleft()
        unused = len(self._results[self._trained]["unused"])
        picked = self._mark.rows[:max(self._size, self._rows - unused)]
        self._results = {batch: result for batch, result in self._results.items() if batch > self._mark.heard}
        return picked

    def state_dict(self) -> dict[str, Any]:
        """The position after the last trained batch, as JSON."""
        unheard = range(self._mark.heard + 1, self._trained + 1)
        return {"batch": self._trained, "class": self._curriculum.name, "state": self._mark.state,
                "unheard": [self._results[batch] for batch in unheard]}

    @property
    def waiting(self) -> list[int]:
        """Rows that no trained batch used, and that the shuffled epoch will pick again."""
        state = self.state_dict()
        return [*state["state"].get("put_back", ()), *(row for each in state["unheard"] for row in each["unused"])]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises:
            UserError: another class picked the prompts until now, or the class refuses its state.
        """
        if state["class"] != self._curriculum.name:
            raise UserError(f"the prompts of the checkpoint were picked by {state['class']}, and now by "
                            f"{self._curriculum.name}", where="data.curriculum",
                            fix="restore data.curriculum, or start a run with another run.name")
        self._curriculum.load_state_dict(state["state"])
        self._trained = self._taken = state["batch"]
        self._heard = self._trained - len(state["unheard"])
        self._results = dict(enumerate(state["unheard"], self._heard + 1))
        self._mark = _Drawn([], state["state"], self._heard)
        self._ahead.clear()

    def _hear(self, result: dict[str, Any]) -> None:
        for row, rewards in result["rewards"]:
            if rewards:
                self._curriculum.hear(row, rewards)
        if result["unused"]:
            self._curriculum.put_back(result["unused"])
