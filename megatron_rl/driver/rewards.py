"""Distributes completions over the reward actors of a job, one on each training node.

A call (the completions of a group) goes to the actor with the fewest completions outstanding, and waits here while all
have enough to keep their processes busy. So an actor with a slow completion gets fewer. A score depends only on its
completion, and scores come back in the order of the call, whichever actor gave them.

The death of an actor's process, as long as others are left, costs only time: what it had not scored is scored by them.
The death of the last one ends the attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.driver.cluster import ComponentDied, death_reason
from megatron_rl.driver.engines import Note
from megatron_rl.rewards.sample import Sample, Score
from megatron_rl.weight_sync.calls import outcomes

log = logging.getLogger(__name__)

CODE = "REWARD"
"""Code of the warnings."""


class RewardActorHandle(Protocol):
    """An actor with reward processes (`handles.RemoteRewards`)."""

    name: str

    def score(self, samples: Sequence[Sample]) -> Awaitable[list[Score]]: ...

    def stay(self) -> Awaitable[None]: ...

    def close(self) -> Awaitable[None]: ...


@dataclass(eq=False)
class _Lane:
    """An actor, and what it was asked and has not answered."""

    actor: RewardActorHandle
    calls: int = 0
    samples: int = 0


class Rewards:
    """The reward actors of a job. It is the rollout stream's `RewardClient`.

    Args:
        actors: one per node.
        processes: reward processes of each.
        dismiss: tells the launcher that the run continues without this component.
        note: records a warning.
    """

    def __init__(self, actors: Sequence[RewardActorHandle], processes: int, dismiss: Callable[[str], None],
                 note: Note) -> None:
        self._lanes = [_Lane(actor) for actor in actors]
        self._processes, self._dismiss, self._note = processes, dismiss, note
        self._changed = asyncio.Event()
        """Set when an actor has answered or left."""
        self._watches = [asyncio.create_task(self._watch(lane), name=lane.actor.name) for lane in self._lanes]

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """The scores of samples, in their order.

        Raises:
            UserError: a reward failed, with `reward.on_error: stop`.
            ComponentFailed: an actor raised, or the last one died.
        """
        while True:
            lane = await self._free()
            lane.calls, lane.samples = lane.calls + 1, lane.samples + len(samples)
            try:
                return await lane.actor.score(samples)
            except ComponentDied as error:
                self._lost(lane, error)
            finally:
                lane.calls, lane.samples = lane.calls - 1, lane.samples - len(samples)
                self._changed.set()

    @property
    def serving(self) -> list[str]:
        """Names of the actors that score."""
        return [lane.actor.name for lane in self._lanes]

    async def close(self, within_s: float) -> None:
        """Stop watching, then end the reward processes. An actor that fails now does no harm: the launcher ends what is
        left."""
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        calls = {lane.actor.name: lane.actor.close() for lane in self._lanes}
        for name, outcome in (await outcomes(calls, time.monotonic() + within_s)).items():
            if isinstance(outcome, Exception):
                log.warning("stopping %s: %s", name, outcome)

    async def _free(self) -> _Lane:
        """The actor with the fewest samples outstanding among those that want more; the first one of equals."""
        while not (wanting := [lane for lane in self._lanes if self._wants_more(lane)]):
            self._changed.clear()
            await self._changed.wait()
        return min(wanting, key=lambda lane: lane.samples)

    def _wants_more(self, lane: _Lane) -> bool:
        """Whether a process might run out of samples before another call arrives."""
        return lane.calls < 2 or lane.samples < 2 * self._processes

    async def _watch(self, lane: _Lane) -> None:
        """Notice the death of an actor that has nothing to do."""
        try:
            await lane.actor.stay()
        except ComponentDied as error:
            if len(self._lanes) > 1:    # otherwise the launcher ends the attempt
                self._lost(lane, error)

    def _lost(self, lane: _Lane, error: ComponentDied) -> None:
        """Continue without an actor. Raises the error if it was the last one."""
        if lane not in self._lanes:
            return
        if len(self._lanes) == 1:
            raise error
        self._lanes.remove(lane)
        self._dismiss(lane.actor.name)
        reason = death_reason(error)
        self._note(CODE, f"{error}" + (f" ({reason})" if reason else "") + f"; {len(self._lanes)} others score its "
                   "completions until the next attempt", {})
