"""The rollout stream: generation and rewards run ahead of the trainer, which takes one batch after the other.

Every group is assigned to a batch when its prompt is handed out. Batch b is handed out as soon as

    b <= version + 1 + max_staleness

where `version` is the newest version that the engines have committed. Batches are trained in order, so batch b is
trained at version b - 1, and its oldest token is at most `max_staleness` versions old. Nothing is dropped, and which
prompts a batch holds never depends on timing. With `max_staleness` 0 the loop is synchronous. `max_staleness` may
change during the run: every batch keeps the bound under which it was handed out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatron_rl.data.batch import Group, Prompt
from megatron_rl.data.carried import CarriedGroup
from megatron_rl.rewards.sample import Sample, Score, group_samples
from megatron_rl.rollout.parts import FairShare
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.scheduler import RolloutScheduler

Timed = Callable[[int], AbstractContextManager[None]]


class RewardClient(Protocol):
    """The stream's view of the reward workers."""

    def score(self, samples: Sequence[Sample]) -> Awaitable[list[Score]]: ...


@dataclass(frozen=True)
class ScoredGroups:
    """Groups of a batch, in the order of its prompts."""

    groups: list[Group]
    scores: list[list[Score]]
    """`scores[g][i]` belongs to `groups[g].trajectories[i]`."""

    @property
    def rewards(self) -> list[np.ndarray]:
        """float64 [G] of each group."""
        return [np.array([score.total for score in group], dtype=np.float64) for group in self.scores]


@dataclass(frozen=True)
class ScoredBatch(ScoredGroups):
    """A complete batch."""

    rest: ScoredGroups
    """The groups that no part has. Without parts, all of them."""
    bound: int
    """`max_staleness` when the batch was handed out."""

    @property
    def heard(self) -> list[tuple[int, list[float]]]:
        """Row and rewards of every group."""
        return [(int(group.prompt.index), [score.total for score in scores])
                for group, scores in zip(self.groups, self.scores, strict=True)]


@dataclass(eq=False)
class _Batch:
    """A batch that was handed out and not yet trained."""

    step: int
    """The step that trains it."""
    prompts: Sequence[Prompt]
    bound: int
    """`max_staleness` when it was handed out."""
    again: bool
    """It was handed out already before the checkpoint."""
    groups: dict[int, Group] = field(default_factory=dict)
    """By place in `prompts`, as they are generated."""
    scores: dict[int, list[Score]] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    """Places of the groups that parts have."""

    def at(self, places: Iterable[int]) -> ScoredGroups:
        places = list(places)
        return ScoredGroups([self.groups[place] for place in places], [self.scores[place] for place in places])

    @property
    def generated(self) -> bool:
        return len(self.groups) == len(self.prompts)

    @property
    def complete(self) -> bool:
        return len(self.scores) == len(self.prompts)


class RolloutStream:
    """Hands out batches ahead of training and scores each group as soon as it is generated.

    Args:
        draw: returns the prompts of the next batch.
        scheduler: sends groups to the engines.
        rewards: scores the trajectories of a group.
        sampling: the sampling parameters of training.
        max_staleness: how many versions a batch may be handed out ahead of its turn. The loop may set another one
            before `committed`.
        last: the last step of the run.
        share: the smallest part of a batch that may be trained before the others; None: there are no parts.
        timed: opens a span for the generation of one batch, given its step.
    """

    def __init__(self, draw: Callable[[], Sequence[Prompt]], scheduler: RolloutScheduler, rewards: RewardClient,
                 sampling: Sampling, *, max_staleness: int, last: int,
                 share: FairShare | None = None, timed: Timed = lambda step: contextlib.nullcontext()) -> None:
        self._draw, self._scheduler, self._rewards, self._sampling = draw, scheduler, rewards, sampling
        self.max_staleness, self._last, self._timed = max_staleness, last, timed
        self._share = share
        self._batches: dict[int, _Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._carried: dict[tuple[int, int], CarriedGroup] = {}
        self._carried_bounds: Sequence[int] = ()
        self.counts: Counter[str] = Counter(handed_out=0, carried=0, generated=0, generated_again=0)
        """Groups, named as in `launch.run.outcome.Groups`."""
        self._next: int | None = None
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        """Set when a group arrives or fails. Only the loop waits for it."""

    def committed(self, version: int) -> None:
        """The engines serve `version` from now on: hand out every batch that this admits."""
        if self._next is None:
            self._next = version + 1
            for bound in self._carried_bounds:
                self._hand_out_next(version, bound, again=True)
        while self._hand_out_next(version, self.max_staleness):
            pass

    async def generated(self, step: int, arrived: Callable[[], None] = lambda: None) -> None:
        """Wait until every group of a batch is generated, or until `part` has one to give. `arrived` is called as
        groups of any batch come in.

        Raises:
            UserError, ComponentFailed, NotServing: generation or a reward failed, in this or in a later batch.
        """
        await self._until(lambda: self._batches[step].generated or bool(self._next_part(step)), arrived)

    async def part(self, step: int, arrived: Callable[[], None] = lambda: None) -> ScoredGroups | None:
        """Wait until a part of a batch can be trained while others of its groups are not complete, and give it. None:
        the batch is complete, and the rest of it is trained together. With deterministic engines, parts are fixed, and
        they are given even if the batch is complete. Raises like `batch`."""
        await self._until(lambda: self._batches[step].complete or bool(self._next_part(step)), arrived)
        places = self._next_part(step)
        if not places:
            return None
        batch = self._batches[step]
        batch.taken.update(places)
        part = batch.at(places)
        _check_staleness(batch, part.groups)
        return part

    async def drained(self, arrived: Callable[[], None] = lambda: None) -> None:
        """Wait until every group that was handed out is generated. Raises like `generated`."""
        await self._until(lambda: all(batch.generated for batch in self._batches.values()), arrived)

    async def batch(self, step: int, arrived: Callable[[], None] = lambda: None) -> ScoredBatch:
        """Wait until a batch is generated and scored, and take it. Raises like `generated`.

        Raises:
            RuntimeError: a token breaks the bound on the staleness. Only an error in this program leads to that.
        """
        await self._until(lambda: self._batches[step].complete, arrived)
        batch = self._batches.pop(step)
        places = range(len(batch.prompts))
        whole = batch.at(places)
        _check_staleness(batch, whole.groups)
        return ScoredBatch(whole.groups, whole.scores, batch.at(place for place in places if place not in batch.taken),
                           batch.bound)

    def finished_ahead(self) -> list[CarriedGroup]:
        """The generated groups of batches that are not trained yet, for the checkpoint."""
        return [CarriedGroup.of(batch.step, place, group) for _, batch in sorted(self._batches.items())
                for place, group in sorted(batch.groups.items())]

    def bounds_ahead(self) -> list[int]:
        """The bounds of the batches that are handed out and not trained yet, in their order, for the checkpoint."""
        return [batch.bound for _, batch in sorted(self._batches.items())]

    def carry_over(self, groups: Iterable[CarriedGroup], bounds: Sequence[int]) -> None:
        """Use these groups of a checkpoint instead of generating them again, and hand out the batches that were handed
        out then, with their `bounds`. Call it before the first `committed`."""
        self._carried = {(group.step, group.place): group for group in groups}
        self._carried_bounds = bounds

    async def close(self) -> None:
        """Cancel what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _hand_out_next(self, version: int, bound: int, again: bool = False) -> bool:
        """Hand out the next batch, if this bound admits it."""
        assert self._next is not None
        step = self._next
        if step > min(self._last, version + 1 + bound):
            return False
        batch = self._batches[step] = _Batch(step, self._draw(), bound, again)
        self.counts["handed_out"] += len(batch.prompts)
        task = asyncio.create_task(self._produce(batch), name=f"batch {step}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        self._next += 1
        return True

    async def _produce(self, batch: _Batch) -> None:
        async with asyncio.TaskGroup() as scoring:

            def arrived(place: int, group: Group) -> None:
                batch.groups[place] = group
                self._changed.set()
                scoring.create_task(self._score(batch, place))

            def generated(place: int, group: Group) -> None:
                self.counts["generated"] += 1
                self.counts["generated_again"] += batch.again
                arrived(place, group)

            with self._timed(batch.step):
                for place, group in self._usable(batch).items():
                    self.counts["carried"] += 1
                    arrived(place, group)
                missing = [place for place in range(len(batch.prompts)) if place not in batch.groups]
                if not self._scheduler.deterministic:
                    async with asyncio.TaskGroup() as generating:
                        for place in missing:
                            generating.create_task(self._generate(batch, place, generated))
                elif missing:
                    groups = await self._scheduler.rollout(batch.prompts, self._sampling, batch.step)
                    for place, group in enumerate(groups):
                        generated(place, group)

    async def _generate(self, batch: _Batch, place: int, arrived: Callable[[int, Group], None]) -> None:
        arrived(place, await self._scheduler.group(batch.prompts[place], self._sampling, batch.step))

    async def _score(self, batch: _Batch, place: int) -> None:
        batch.scores[place] = await self._rewards.score(group_samples(batch.groups[place]))
        self._changed.set()

    def _usable(self, batch: _Batch) -> dict[int, Group]:
        """The groups of the checkpoint that belong to this batch and keep the bound, by place. A deterministic batch is
        generated as a whole or not at all."""
        found = {place: carried.group(prompt) for place, prompt in enumerate(batch.prompts)
                 if (carried := self._carried.pop((batch.step, place), None)) is not None
                 and carried.prompt_index == prompt.index and len(carried.trajectories) == self._sampling.n
                 and carried.oldest >= batch.step - 1 - batch.bound}
        return {} if self._scheduler.deterministic and len(found) < len(batch.prompts) else found

    def _next_part(self, step: int) -> list[int]:
        if self._share is None:
            return []
        batch = self._batches[step]
        complete = {place: batch.groups[place] for place in batch.scores}
        return self._share.next_part(complete, batch.taken, len(batch.prompts), self._scheduler.deterministic)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = _first(error)
        self._changed.set()

    async def _until(self, done: Callable[[], bool], arrived: Callable[[], None]) -> None:
        while True:
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            if done():
                return
            await self._changed.wait()
            arrived()


def _check_staleness(batch: _Batch, groups: Sequence[Group]) -> None:
    version = batch.step - 1
    for group in groups:
        for trajectory in group.trajectories:
            versions_R = trajectory.weight_versions[trajectory.sampled]
            if versions_R.size and not version - batch.bound <= versions_R.min() <= versions_R.max() <= version:
                raise RuntimeError(f"step {batch.step} trains version {version}, and a trajectory of prompt "
                                   f"{group.prompt.index} was sampled at versions {versions_R.min()} to "
                                   f"{versions_R.max()}, with a bound of {batch.bound} on the staleness")


def _first(error: BaseException) -> BaseException:
    """The first failure of nested task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
