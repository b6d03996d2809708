"""Collects what is wrong, so that a user sees all of it at once."""

from __future__ import annotations

from launch.errors import UserError


class Problems:
    """A list of `UserError`s that becomes one error, or none."""

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
