"""The order in which communicators of two members are opened: in rounds, in which a member opens at most one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


def rounds(pairs: Iterable[tuple[Member, Member]]) -> dict[frozenset[Member], int]:
    """The round of each pair of members, from 0 on. A pair counts once, whichever of the two is named first.

    The number of rounds is at most one more than the most pairs that a member is in: an edge colouring by Misra and
    Gries, "A constructive proof of Vizing's theorem" (1992). The same pairs in the same order get the same rounds.
    """
    coloured = _Colouring[Member]()
    seen = set()
    for one, other in pairs:
        if (pair := frozenset((one, other))) not in seen:
            seen.add(pair)
            coloured.add(one, other)
    return {frozenset((one, other)): colour for one, others in coloured.at.items() for colour, other in others.items()}


class _Colouring(Generic[Member]):
    """A proper edge colouring, which grows edge by edge."""

    def __init__(self) -> None:
        self.at: dict[Member, dict[int, Member]] = defaultdict(dict)
        """Member -> colour of each of its edges -> the member at the other end."""

    def add(self, centre: Member, leaf: Member) -> None:
        fan = self._fan(centre, leaf)
        free, end = self._free(centre), self._free(fan[-1])
        self._swap(centre, end, free)       # `end` is now free at the centre too
        for size, last in enumerate(fan, 1):
            if end not in self.at[last] and self._is_fan(centre, fan[:size]):
                self._rotate(centre, fan[:size], end)
                return
        raise AssertionError("Vizing's theorem does not hold")

    def _free(self, member: Member) -> int:
        """The least colour that no edge of the member has."""
        return next(colour for colour in range(len(self.at[member]) + 1) if colour not in self.at[member])

    def _fan(self, centre: Member, leaf: Member) -> list[Member]:
        """Neighbours of the centre, of which each one's edge has a colour that is free at the one before. As long as
        possible."""
        fan, left = [leaf], dict(self.at[centre])
        while (colour := next((c for c in left if c not in self.at[fan[-1]]), None)) is not None:
            fan.append(left.pop(colour))
        return fan

    def _is_fan(self, centre: Member, fan: list[Member]) -> bool:
        colour_of = {member: colour for colour, member in self.at[centre].items()}
        return all(colour_of[after] not in self.at[before] for before, after in pairwise(fan))

    def _swap(self, member: Member, first: int, second: int) -> None:
        """Exchange two colours along the path that leaves the member with `first`."""
        path, colours = [member], (first, second)
        while (following := self.at[path[-1]].get(colours[(len(path) - 1) % 2])) is not None:
            path.append(following)
        edges = list(pairwise(path))
        for number, (one, other) in enumerate(edges):
            self._uncolour(one, other, colours[number % 2])
        for number, (one, other) in enumerate(edges):
            self._colour(one, other, colours[(number + 1) % 2])

    def _rotate(self, centre: Member, fan: list[Member], last: int) -> None:
        """Give each edge of the fan the colour of the next one, and the last edge the colour `last`."""
        colour_of = {member: colour for colour, member in self.at[centre].items()}
        colours = [colour_of[member] for member in fan[1:]]
        for member, colour in zip(fan[1:], colours, strict=True):
            self._uncolour(centre, member, colour)
        for member, colour in zip(fan, [*colours, last], strict=True):
            self._colour(centre, member, colour)

    def _colour(self, one: Member, other: Member, colour: int) -> None:
        self.at[one][colour], self.at[other][colour] = other, one

    def _uncolour(self, one: Member, other: Member, colour: int) -> None:
        del self.at[one][colour], self.at[other][colour]
