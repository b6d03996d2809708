"""Selects the prompts of the next step in a deterministic, epoch-aware order that survives a resume."""

from __future__ import annotations

from collections import deque

import numpy as np

from launch.errors import UserError


class PromptSampler:
    """Endless stream of row indices over a data set of `n` rows. Every epoch visits each row exactly once.

    The order of an epoch depends only on (`seed`, epoch). Two integers therefore define a position, and a resumed run
    continues in the epoch in which it stopped (Megatron-Bridge#4601: a sampler that forgets the epoch repeats the
    first). Two draws of one row are two prompt *instances*, each with its own group.
    """

    def __init__(self, n: int, seed: int, shuffle: bool = True, fingerprint: str = "") -> None:
        """`fingerprint` identifies the content of the data set (`dataset.fingerprint`). A resume compares it."""
        if n < 1:
            raise ValueError(f"a sampler needs at least one row, got {n}")
        self.n, self.seed, self.shuffle, self.fingerprint = n, seed, shuffle, fingerprint
        self.epoch, self.position = 0, 0
        self._order_n = self._order(0)

    def next(self, k: int) -> list[int]:
        """Draw the next `k` row indices, across as many epochs as needed."""
        if k < 1:
            raise ValueError(f"a draw needs at least one prompt, got {k}")
        drawn: list[int] = []
        while len(drawn) < k:
            if self.position == self.n:
                self.epoch, self.position = self.epoch + 1, 0
                self._order_n = self._order(self.epoch)
            taken = self._order_n[self.position:self.position + k - len(drawn)]
            drawn.extend(int(row) for row in taken)
            self.position += len(taken)
        return drawn

    def state_dict(self) -> dict:
        """JSON-serialisable state, stored in every checkpoint (prime-rl#3164)."""
        return {"epoch": self.epoch, "position": self.position, "n": self.n, "seed": self.seed,
                "shuffle": self.shuffle, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict) -> None:
        """Continue at a saved position. Raises UserError if the data set, seed or shuffling changed since then, because
        it is then unknown which rows the run has already visited."""
        if (state["n"], state["fingerprint"]) != (self.n, self.fingerprint):
            raise UserError(f"the data set changed since the checkpoint: {state['n']} rows with fingerprint "
                            f"{state['fingerprint']!r} then, {self.n} rows with {self.fingerprint!r} now",
                            where="data.train", fix="restore the old data set, or start a run with another run.name")
        for key, then, now in (("run.seed", state["seed"], self.seed),
                               ("data.shuffle", state["shuffle"], self.shuffle)):
            if then != now:
                raise UserError(f"{key} was {then} when the checkpoint was written and is {now} now", where=key,
                                fix=f"set {key}={then}, or start a run with another run.name")
        self.epoch, self.position = state["epoch"], state["position"]
        self._order_n = self._order(self.epoch)

    def _order(self, epoch: int) -> np.ndarray:
        """int64 [n], a permutation."""
        if not self.shuffle:
            return np.arange(self.n)
        # PCG64 is explicit so that the order does not change with NumPy's default generator.
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.n)


class BatchSampler:
    """Draws the rows of whole batches ahead of their training, and knows the position of the last trained one.

    A resumed run continues there and draws the later batches again, so every row is trained once however far a run had
    drawn when it ended.
    """

    def __init__(self, sampler: PromptSampler, batch_size: int) -> None:
        self._sampler, self._batch_size = sampler, batch_size
        self._trained = sampler.state_dict()
        self._ahead: deque[dict] = deque()
        """The sampler's state after each batch that was drawn and not yet trained."""

    def draw(self) -> list[int]:
        """The rows of the next batch."""
        rows = self._sampler.next(self._batch_size)
        self._ahead.append(self._sampler.state_dict())
        return rows

    def trained(self) -> None:
        """The oldest of the drawn batches is trained."""
        self._trained = self._ahead.popleft()

    def state_dict(self) -> dict:
        """The position after the last trained batch, as JSON."""
        return self._trained

    def load_state_dict(self, state: dict) -> None:
        """Continue at a saved position. Raises like `PromptSampler.load_state_dict`."""
        self._sampler.load_state_dict(state)
        self._trained = state
        self._ahead.clear()
