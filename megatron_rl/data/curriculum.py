"""What decides which prompts come next: the interface, and how a class of the user's is loaded and called."""

from __future__ import annotations

import json
import operator
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.errors import UserError
from megatron_rl.data.batch import Prompt
from megatron_rl.user_code import import_named

WHERE = "data.curriculum"


class Curriculum(ABC):
    """Picks the prompts of a run. The driver calls all methods in one thread, in an order that never depends on timing.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:  # noqa: B027, a default
        """How the class that `data.curriculum` names is constructed. `prompts[row].index` is `row`; `seed` is
        `run.seed`."""

    @abstractmethod
    def pick(self, count: int) -> Sequence[int]:
        """The next `count` rows. A row may come several times."""

    def hear(self, row: int, rewards: list[float]) -> None:  # noqa: B027, a default
        """The rewards of a group of this row, once its batch is trained, without trajectories that were aborted or
        whose reward failed. Groups come in the order of the picks, also those that dynamic sampling replaced, but not
        those without any reward."""

    def put_back(self, rows: list[int]) -> None:  # noqa: B027, a default
        """Rows that were picked for the reserve of dynamic sampling and never generated."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that later picks depend on, as JSON: text keys, lists, text, numbers, booleans, None."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. It may be called on an object that has been used."""


def load_curriculum(path: str, prompts: Sequence[Prompt], seed: int) -> Curriculum:
    """Import and construct the user's class `package.module:Class`.

    Raises:
        UserError: it cannot be imported or constructed, or is no `Curriculum`.
    """
    found = import_named(path, "curriculum", WHERE)
    if not (isinstance(found, type) and issubclass(found, Curriculum)):
        raise UserError(f"curriculum {path!r} is not a subclass of megatron_rl.data.curriculum.Curriculum", where=WHERE,
                        fix="derive the class from it (docs/prompts.md)")
    if lacking := sorted(found.__abstractmethods__):
        raise UserError(f"curriculum {path!r} has no {' and no '.join(lacking)}", where=WHERE,
                        fix=f"define {lacking[0]} (docs/prompts.md)")
    try:
        return found(prompts, seed)
    except Exception as error:      # the constructor is the user's
        raise UserError(f"curriculum {path!r}: {found.__name__}(prompts, seed={seed}) raised {_said(error)}",
                        where=WHERE, fix="correct the class") from error


class Guarded:
    """Calls a curriculum and checks what it returns. Every mistake of the class becomes a UserError that names the
    class, the call and the value; a UserError of its own passes."""

    def __init__(self, curriculum: Curriculum, name: str, rows: int) -> None:
        """`name`: the class, for messages and checkpoints. `rows`: number of rows of the data set."""
        self._curriculum, self.name, self._rows = curriculum, name, rows
        self.hears = type(curriculum).hear is not Curriculum.hear
        """Whether the class listens to rewards."""

    def pick(self, count: int) -> list[int]:
        call, picked = f"pick({count})", self._call("pick", count)
        try:
            rows = [operator.index(row) for row in picked]
        except TypeError as error:
            raise self._wrong(f"{call} returned {_short(picked)}", "return a list of row numbers") from error
        if len(rows) != count:
            raise self._wrong(f"{call} returned {len(rows)} rows", f"return {count}")
        for row in rows:
            if not 0 <= row < self._rows:
                raise self._wrong(f"{call} returned {row}, which is no row of the data",
                                  f"return rows from 0 to {self._rows - 1}")
        return rows

    def hear(self, row: int, rewards: list[float]) -> None:
        self._call("hear", row, rewards)

    def put_back(self, rows: list[int]) -> None:
        self._call("put_back", rows)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state, as it comes back from JSON."""
        state = self._call("state_dict")
        try:
            copy = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise self._wrong(f"state_dict() returned what JSON cannot store ({error}): {_short(state)}",
                              "use only text keys, lists, text, finite numbers, booleans and None") from error
        if copy != state or not isinstance(copy, dict):
            raise self._wrong(f"state_dict() returned what JSON changes: {_short(state)} comes back as {_short(copy)}",
                              "return a dict with text keys, and lists in place of tuples")
        return copy

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._call("load_state_dict", state)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._curriculum, method)(*arguments)
        except UserError:
            raise
        except Exception as error:      # the method is the user's
            words = ", ".join(map(_short, arguments))
            raise self._wrong(f"{method}({words}) raised {_said(error)}", "correct the class") from error

    def _wrong(self, what: str, fix: str) -> UserError:
        return UserError(f"curriculum {self.name!r}: {what}", where=WHERE, fix=fix)


def _said(error: Exception) -> str:
    """An exception in a line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
