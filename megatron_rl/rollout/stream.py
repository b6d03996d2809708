"""The rollout stream: generation and rewards run ahead of the trainer, which takes one batch after the other.

Every group is assigned to a batch when its prompt is handed out. Batch b is handed out as soon as

    b <= version + 1 + max_staleness

where `version` is the newest version that the engines have committed. Batches are trained in order, so batch b is
trained at version b - 1, and its oldest token is at most `max_staleness` versions old. Nothing is dropped, and which
prompts a batch holds never depends on timing. With `max_staleness` 0 the loop is synchronous. `max_staleness` may
change during the run: every batch keeps the bound under which it was handed out.

With dynamic sampling a batch has more prompts than it trains: its own reserve. It trains the first groups with spread,
in the order of its prompts. A prompt of the reserve is handed out for each group that turns out to have no spread. So
exactly the prompts up to the last group that is trained are generated, in whatever order groups arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from megatron_rl.data.batch import Group, Prompt
from megatron_rl.data.carried import CarriedGroup
from megatron_rl.rewards.sample import Sample, Score, group_samples
from megatron_rl.rollout.parts import FairShare
from megatron_rl.rollout.pending import PendingBatch, ScoredBatch, ScoredGroups
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.scheduler import RolloutScheduler

Timed = Callable[[int], AbstractContextManager[None]]
Arrived = Callable[[int, Group, bool], asyncio.Task[None]]
"""Takes the group of a place, and whether a checkpoint had it. Returns the task that scores it."""


class RewardClient(Protocol):
    """The stream's view of the reward workers."""

    def score(self, samples: Sequence[Sample]) -> Awaitable[list[Score]]: ...


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
        batch_size: how many groups of a batch are trained; the other prompts that `draw` returns are its reserve, for
            dynamic sampling. None: all.
        share: the smallest part of a batch that may be trained before the others; None: there are no parts.
        timed: opens a span for the generation of one batch, given its step.
    """

    def __init__(self, draw: Callable[[], Sequence[Prompt]], scheduler: RolloutScheduler, rewards: RewardClient,
                 sampling: Sampling, *, max_staleness: int, last: int, batch_size: int | None = None,
                 share: FairShare | None = None, timed: Timed = lambda step: contextlib.nullcontext()) -> None:
        self._draw, self._scheduler, self._rewards, self._sampling = draw, scheduler, rewards, sampling
        self.max_staleness, self._last, self._timed = max_staleness, last, timed
        self._batch_size, self._share = batch_size, share
        self._turn = asyncio.Lock()
        self._batches: dict[int, PendingBatch] = {}
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
        """Wait until every group of a batch is generated, or until `part` has one to give; with dynamic sampling also
        scored, because that decides what is generated. `arrived` is called as groups of any batch come in.

        Raises:
            UserError, ComponentFailed, NotServing: generation or a reward failed, in this or in a later batch, or the
                reserve of this batch did not suffice.
        """
        await self._until(lambda: self._batches[step].generated or bool(self._next_part(step)), arrived)
        if (failure := self._batches[step].failure) is not None:
            raise failure

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
        """Wait until every batch that was handed out is generated. Raises like `generated`, but not for a reserve that
        did not suffice."""
        await self._until(lambda: all(batch.generated for batch in self._batches.values()), arrived)

    async def batch(self, step: int, arrived: Callable[[], None] = lambda: None) -> ScoredBatch:
        """Wait until a batch is generated and scored, and take it. Raises like `generated`.

        Raises:
            RuntimeError: a token breaks the bound on the staleness. Only an error in this program leads to that.
        """
        await self.generated(step, arrived)
        await self._until(lambda: self._batches[step].complete, arrived)
        batch = self._batches.pop(step)
        result = batch.result()
        _check_staleness(batch, result.groups)
        return result

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
        prompts = self._draw()
        batch = self._batches[step] = PendingBatch(step, prompts, self._batch_size or len(prompts), bound, again)
        self.counts["handed_out"] += batch.size
        task = asyncio.create_task(self._produce(batch), name=f"batch {step}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        self._next += 1
        return True

    async def _produce(self, batch: PendingBatch) -> None:
        async with asyncio.TaskGroup() as scoring:

            def arrived(place: int, group: Group, carried: bool) -> asyncio.Task[None]:
                self.counts["carried"] += carried
                self.counts["generated"] += not carried
                self.counts["generated_again"] += batch.again and not carried
                batch.groups[place] = group
                self._changed.set()
                return scoring.create_task(self._score(batch, place))

            with self._timed(batch.step):
                if self._scheduler.deterministic:
                    await self._in_rounds(batch, arrived)
                else:
                    async with asyncio.TaskGroup() as generating:
                        for place in range(batch.size):
                            generating.create_task(self._one_by_one(batch, place, arrived))
        batch.close()
        self._changed.set()

    async def _one_by_one(self, batch: PendingBatch, first: int, arrived: Arrived) -> None:
        """Generate the group of a place. With dynamic sampling, go on with the reserve until one has spread."""
        place: int | None = first
        while place is not None:
            carried = self._carried_group(batch, place)
            group = carried or await self._scheduler.group(batch.prompts[place], self._sampling, batch.step)
            scored = arrived(place, group, carried is not None)
            if not batch.dynamic:
                return
            await scored
            place = None if place in batch.spread else batch.next_place()
            self.counts["handed_out"] += place is not None

    async def _in_rounds(self, batch: PendingBatch, arrived: Arrived) -> None:
        """Generate a batch in rounds, each of them whole and by its place in the batch: first the prompts that are
        trained, then as many of the reserve as there are groups without spread. No other batch comes between."""
        async with self._turn:
            places = range(batch.size)
            while places:
                groups = [self._carried_group(batch, place) for place in places]
                made = [group for group in groups if group is not None]
                carried = len(made) == len(places)
                if not carried:
                    made = await self._scheduler.rollout([batch.prompts[place] for place in places], self._sampling,
                                                         batch.step)
                scored = [arrived(place, group, carried) for place, group in zip(places, made, strict=True)]
                if not batch.dynamic:
                    return
                await asyncio.gather(*scored)
                missing = batch.size - len(batch.spread)
                places = range(places.stop, min(places.stop + missing, len(batch.prompts)))
                self.counts["handed_out"] += len(places)

    async def _score(self, batch: PendingBatch, place: int) -> None:
        batch.scored(place, await self._rewards.score(group_samples(batch.groups[place])))
        self._changed.set()

    def _carried_group(self, batch: PendingBatch, place: int) -> Group | None:
        """The group of the checkpoint for a place of a batch, if it belongs there and keeps the bound."""
        carried, prompt = self._carried.pop((batch.step, place), None), batch.prompts[place]
        if (carried is None or carried.prompt_index != prompt.index or len(carried.trajectories) != self._sampling.n
                or carried.oldest < batch.step - 1 - batch.bound):
            return None
        return carried.group(prompt)

    def _next_part(self, step: int) -> list[int]:
        if self._share is None:
            return []
        batch = self._batches[step]
        return self._share.next_part({place: batch.groups[place] for place in batch.trained()}, batch.scores.keys(),
                                     batch.taken, batch.size, self._scheduler.deterministic)

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


def _check_staleness(batch: PendingBatch, groups: Sequence[Group]) -> None:
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
