"""Which prompts the next step gets: a deterministic, epoch-aware order that survives a resume."""

from __future__ import annotations

import numpy as np

from launch.errors import UserError


class PromptSampler:
    """Endless stream of row indices over a data set of `n` rows; every epoch visits each row exactly once.

    The order of an epoch is a function of (`seed`, epoch) alone, so a position is two integers and a resumed run
    goes on in the epoch it stopped in (Megatron-Bridge#4601: a sampler that forgets the epoch repeats the first).
    Two draws of one row are two prompt *instances*, each with a group of its own.
    """

    def __init__(self, n: int, seed: int, shuffle: bool = True, fingerprint: str = "") -> None:
        """`fingerprint` names the data set's content (`dataset.fingerprint`); a resume compares it."""
        if n < 1:
            raise ValueError(f"a sampler needs at least one row, got {n}")
        self.n, self.seed, self.shuffle, self.fingerprint = n, seed, shuffle, fingerprint
        self.epoch, self.position = 0, 0
        self._order_n = self._order(0)

    def next(self, k: int) -> list[int]:
        """The next `k` row indices, across as many epochs as it takes."""
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
        """JSON-serialisable; belongs in every checkpoint (prime-rl#3164)."""
        return {"epoch": self.epoch, "position": self.position, "n": self.n, "seed": self.seed,
                "shuffle": self.shuffle, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict) -> None:
        """Go on at a saved position. UserError if data set, seed or shuffling changed since: the rows already seen
        could not be told from those still to come."""
        if (state["n"], state["fingerprint"]) != (self.n, self.fingerprint):
            raise UserError(f"the data set changed since the checkpoint: {state['n']} rows with fingerprint "
                            f"{state['fingerprint']!r} then, {self.n} rows with {self.fingerprint!r} now",
                            where="data.train", fix="put the old data set back, or start a run with another run.name")
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
        # PCG64 by name: the order must not move when NumPy changes its default generator.
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.n)
