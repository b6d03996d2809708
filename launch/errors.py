"""The one exception that reaches a user as a message instead of a traceback, and how several become one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from launch.exit_codes import ExitCode


class UserError(Exception):
    """Something the user can fix: what is wrong, where, the value found, and what to write instead.

    `str(error)` is the whole message, for example::

        trainer.tp = 3 does not divide the 8 attention heads of configs/tiny/model
          where: configs/tiny/grpo.yaml:14, trainer.tp
          fix:   use 1, 2, 4 or 8

    It may be raised anywhere (launcher, driver, a Ray actor: it pickles). Only the outermost process prints it and
    exits with `exit_code`.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None,
                 exit_code: ExitCode = ExitCode.USER_ERROR) -> None:
        super().__init__(what)
        self.what, self.where, self.fix, self.exit_code = what, where, fix, exit_code

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)

    def __reduce__(self):
        return _rebuild, (type(self), self.what, self.where, self.fix, self.exit_code)


def _rebuild(kind: type[UserError], what: str, where: str | None, fix: str | None, code: ExitCode) -> UserError:
    return kind(what, where=where, fix=fix, exit_code=code)


def nearest(word: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """The one of `known` that is spelled most like `word`; None if none is alike enough.

    Args:
        alike: the least share of characters in common, 0 to 1 (`difflib.SequenceMatcher.ratio`).
    """
    return next(iter(nearest_few(word, known, alike, most=1)), None)


def nearest_few(word: str, known: Iterable[str], alike: float = 0.6, *, most: int = 3) -> list[str]:
    """The few of `known` that are spelled most like `word`, the most alike first; [] if none is alike enough."""
    return difflib.get_close_matches(word, list(known), n=most, cutoff=alike)


class Problems:
    """Collects what is wrong, so that a user sees all of it at once: `UserError`s that become one, or none."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.errors: list[UserError] = []

    def add(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.errors.append(UserError(what, where=where, fix=fix))

    def raise_if_any(self) -> None:
        """Raises the only error as it is, or one UserError that shows all of them."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise UserError("\n\n".join([f"{len(self.errors)} errors in {self.subject}", *map(str, self.errors)]))


def divisors(*numbers: int) -> str:
    """`1, 2 or 4`: what divides all of them."""
    common = math.gcd(*numbers)
    return one_of(n for n in range(1, common + 1) if common % n == 0)


def one_of(values: Iterable[object]) -> str:
    """`1, 2 or 4`."""
    words = [str(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
