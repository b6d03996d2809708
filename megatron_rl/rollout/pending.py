"""A batch on its way: the groups that are generated and scored, and with dynamic sampling those that replace others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.data.batch import Group, Prompt
from megatron_rl.rewards.sample import Score, counted_rewards, group_rewards
from megatron_rl.rollout import refill


@dataclass(frozen=True)
class ScoredGroups:
    """Groups of a batch, in the order of its prompts."""

    groups: list[Group]
    scores: list[list[Score]]
    """`scores[g][i]` belongs to `groups[g].trajectories[i]`."""

    @property
    def rewards(self) -> list[np.ndarray]:
        """float64 [G] of each group, NaN where there is none (`group_rewards`)."""
        return [group_rewards(*each) for each in zip(self.groups, self.scores, strict=True)]


@dataclass(frozen=True)
class ScoredBatch(ScoredGroups):
    """A complete batch."""

    rest: ScoredGroups
    """The groups that no part has. Without parts, all of them."""
    bound: int
    """`max_staleness` when the batch was handed out."""
    replaced: list[refill.Replaced] | None = None
    """The groups without spread that dynamic sampling replaced; None: it is off."""
    heard: list[tuple[int, list[float]]] = field(default_factory=list)
    """Row and rewards of every group that was generated, replaced ones included, in the order of the draw. Trajectories
    without a reward are left out."""


@dataclass(eq=False)
class PendingBatch:
    """A batch that was handed out and not yet trained."""

    step: int
    """The step that trains it."""
    prompts: Sequence[Prompt]
    """Those of the reserve last."""
    size: int
    """Number of groups that are trained."""
    bound: int
    """`max_staleness` when it was handed out."""
    again: bool
    """It was handed out already before the checkpoint."""
    groups: dict[int, Group] = field(default_factory=dict)
    """By place in `prompts`, as they are generated."""
    scores: dict[int, list[Score]] = field(default_factory=dict)
    spread: set[int] = field(default_factory=set)
    """Places with spread. Only dynamic sampling asks for it."""
    taken: set[int] = field(default_factory=set)
    """Places of the groups that parts have."""
    handed_out: int = 0
    failure: refill.CannotBeFilled | None = None
    """The reserve did not suffice. It is raised when the batch is due, so that the end does not depend on timing."""

    def __post_init__(self) -> None:
        self.handed_out = self.size

    @property
    def dynamic(self) -> bool:
        return len(self.prompts) > self.size

    @property
    def generated(self) -> bool:
        return self.complete if self.dynamic else len(self.groups) == self.size

    @property
    def complete(self) -> bool:
        if self.failure is not None:
            return True
        return len(self.spread if self.dynamic else self.scores) == self.size

    def scored(self, place: int, scores: list[Score]) -> None:
        self.scores[place] = scores
        if self.dynamic and refill.has_spread(self.groups[place], scores):
            self.spread.add(place)

    def next_place(self) -> int | None:
        """The next place of the reserve; None if there is none left."""
        if self.handed_out == len(self.prompts):
            return None
        self.handed_out += 1
        return self.handed_out - 1

    def trained(self) -> list[int]:
        """The places that are trained, of the groups that are scored so far."""
        return sorted(self.spread if self.dynamic else self.scores)

    def at(self, places: Iterable[int]) -> ScoredGroups:
        places = list(places)
        return ScoredGroups([self.groups[place] for place in places], [self.scores[place] for place in places])

    def result(self) -> ScoredBatch:
        """The batch as it is trained, when it is complete."""
        whole, rest = self.at(self.trained()), self.at(place for place in self.trained() if place not in self.taken)
        return ScoredBatch(
            whole.groups, whole.scores, rest, self.bound,
            [(self.groups[place], self.scores[place]) for place in self._flat()] if self.dynamic else None,
            [(int(group.prompt.index), counted_rewards(group, self.scores[place]).tolist())
             for place, group in sorted(self.groups.items())])

    def close(self) -> None:
        """Everything that can be handed out is generated and scored."""
        if self.dynamic and len(self.spread) < self.size:
            flat = [(self.groups[place], self.scores[place]) for place in self._flat()]
            self.failure = refill.CannotBeFilled.of(self.step, flat, self.size, len(self.groups))

    def _flat(self) -> list[int]:
        return [place for place in sorted(self.groups) if place not in self.spread]
