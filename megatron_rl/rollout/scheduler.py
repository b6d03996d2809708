"""Routes groups to rollout engines, on the driver.

Engines are handles with awaitable methods (`generate`, `generate_group`), so the scheduler works with Ray actors and
with plain objects. Groups are returned in the order of their prompts, never in the order of arrival.

An engine that fails leaves the routing, and its unfinished groups are asked again of the others. A group is returned
only when it is complete and checked, so each is returned exactly once.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from launch.errors import UserError
from megatron_rl.data.batch import Group, Prompt
from megatron_rl.rollout.answers import check_group
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.weight_sync.protocol import NotServing

Answer = TypeVar("Answer")


class EngineLeft(Exception):
    """The engine left the routing before it answered."""


class EngineClient(Protocol):
    """The scheduler's view of a rollout engine (`RolloutEngine`, directly or behind a Ray actor)."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> Awaitable[list[Group]]: ...

    def generate_group(self, prompt: Prompt, sampling: Sampling, seed: int | None = None) -> Awaitable[Group]: ...

    def ended(self, count: int) -> Awaitable[int]: ...


@dataclass(eq=False)
class _Lane:
    """The scheduler's record of one engine."""

    replica: int
    client: EngineClient
    version: int | None = None
    outstanding_tokens: int = 0
    sent: int = 0
    """Sequences of the groups that it received."""
    left: int = 0
    """Sequences of the groups that it answered."""
    ended: int = 0
    """Sequences that it has ended, as it last said."""
    served: dict[str, int] = field(default_factory=lambda: {"groups": 0, "tokens": 0})
    calls: set[asyncio.Future] = field(default_factory=set)
    """What it was asked and has not answered."""
    asking: asyncio.Task[None] | None = None
    """Waits until further sequences have ended."""

    @property
    def unfinished(self) -> int:
        """Sequences that it has not ended, as far as known."""
        return self.sent - max(self.left, self.ended)

    def enter(self, group: _Waiting) -> None:
        self.outstanding_tokens += group.tokens
        self.sent += group.sequences

    def leave(self, group: _Waiting) -> None:
        self.outstanding_tokens -= group.tokens
        self.left += group.sequences

    def ask_no_more(self) -> None:
        if self.asking is not None:
            self.asking.cancel()
            self.asking = None      # here: a task that has not begun yet never runs its `finally`


@dataclass(order=True)
class _Waiting:
    """A group that waits for an engine with room."""

    turn: tuple[int, int, int]
    """Groups of earlier batches first, then longest prompts first, then in order of arrival."""
    sequences: int = field(compare=False)
    tokens: int = field(compare=False)
    lane: asyncio.Future[_Lane] = field(compare=False)


class RolloutScheduler:
    """Distributes groups over the engines. Several batches may be under way at a time.

    With `deterministic`, batches run one after the other and group i goes to engine i mod E, independent of the load.
    Otherwise each group goes to the engine with the fewest outstanding tokens among those that decode fewer sequences
    than they can. The remaining groups wait in the scheduler, so a slow engine receives fewer. A group holds no place
    for its ended sequences: with lengths as in `configs/70b/grpo.yaml` the longest of 16 is three times the mean, and
    two places of three would be empty. A single engine receives all groups at once.

    Args:
        engines: one client per replica.
        max_num_seqs: number of sequences that an engine decodes at once (`rollout.max_num_seqs`).
        vocabulary: number of token ids. An engine that returns others has failed.
        deterministic: use fixed routing. The results depend on it, so no group is asked of another engine.
    """

    def __init__(self, engines: Sequence[EngineClient], *, max_num_seqs: int, vocabulary: int,
                 deterministic: bool) -> None:
        self._lanes = {replica: _Lane(replica, engine) for replica, engine in enumerate(engines)}
        self._max_num_seqs, self._vocabulary = max_num_seqs, vocabulary
        self.deterministic = deterministic
        self.on_failure: Callable[[int, Exception], object] = self.leave
        """Called with a replica that failed. It must let the replica leave."""
        self._nobody: Exception | None = None
        """Why there is no engine left for further groups."""
        self._committed: int | None = None
        self._versions = range(0)
        """The versions that engines may have sampled from: all committed ones, and the one that is being committed."""
        self._held = False
        self._waiting: list[_Waiting] = []
        self._arrivals = itertools.count()
        self._turn = asyncio.Lock()

    def hold(self, version: int) -> None:
        """Send no further group until `version` is committed. Groups that the engines already have are not affected."""
        self._held = True
        self._allow(version)

    def committed(self, version: int, replicas: Sequence[int] | None = None) -> None:
        """Record that `replicas` (default: all) committed `version`. Only engines that hold it receive requests."""
        self._committed, self._held = version, False
        self._allow(version)
        for replica in self._lanes if replicas is None else replicas:
            self._lanes[replica].version = version
        self._hand_out()

    def leave(self, replica: int, cause: Exception) -> bool:
        """Send nothing more to an engine, and ask others for its unfinished groups. Returns False if that is not
        possible: no other engine serves, or routing is `deterministic`. All groups then fail with `cause`."""
        lane = self._lanes.pop(replica)
        if not self.spares(replica):
            self._nobody = cause
        for call in lane.calls:
            call.cancel()
        lane.ask_no_more()
        self._hand_out()
        return self._nobody is None

    def spares(self, replica: int) -> bool:
        """Whether the run can continue without this engine: others hold the committed version, if there is one yet."""
        return not self.deterministic and any(lane.version == self._committed for lane in self._lanes.values()
                                              if lane.replica != replica)

    def enter(self, replica: int, engine: EngineClient) -> None:
        """Route groups to a replaced engine, from the next `committed` on."""
        self._lanes[replica] = _Lane(replica, engine)

    def served(self) -> dict[int, dict[str, int]]:
        """For each engine in the routing, the numbers of groups and sampled tokens that it has returned so far."""
        return {replica: dict(lane.served) for replica, lane in sorted(self._lanes.items())}

    async def rollout(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
        """Generate the groups of `prompts`, in their order. Raises like `group`, and cancels the rest."""
        if self.deterministic:
            async with self._turn:
                return await self._in_shares(self._eligible(), prompts, sampling, step)
        groups: dict[int, Group] = {}

        async def serve(index: int, prompt: Prompt) -> None:
            groups[index] = await self.group(prompt, sampling, step)

        await _all_or_cancel([serve(index, prompt) for index, prompt in enumerate(prompts)])
        return [groups[i] for i in range(len(prompts))]

    async def group(self, prompt: Prompt, sampling: Sampling, step: int) -> Group:
        """Generate the group of one prompt of batch `step`, once an engine has room for it. If that engine fails,
        another one starts the group again.

        Raises:
            UserError: the prompt cannot be generated from.
            NotServing: no engine holds the committed version.
            Exception: what made the last engine leave.
        """
        turn = step, -len(prompt.token_ids), next(self._arrivals)
        tokens = len(prompt.token_ids) + sampling.n * sampling.max_new_tokens
        while True:
            waiting = _Waiting(turn, sampling.n, tokens, asyncio.get_running_loop().create_future())
            heapq.heappush(self._waiting, waiting)
            self._hand_out()
            try:
                lane = await waiting.lane
                group = await self._answer(lane, lambda engine: engine.generate_group(prompt, sampling),
                                           lambda group: self._check(group, prompt, sampling))
                _count(lane, group)
                return group
            except EngineLeft:
                continue
            finally:
                if waiting.lane.done() and not waiting.lane.cancelled() and waiting.lane.exception() is None:
                    waiting.lane.result().leave(waiting)
                self._hand_out()

    async def _answer(self, lane: _Lane, ask: Callable[[EngineClient], Awaitable[Answer]],
                      check: Callable[[Answer], None]) -> Answer:
        """Ask an engine, await its answer and check it.

        Raises:
            UserError: the engine raised it.
            EngineLeft: the engine failed, and others can be asked.
            Exception: the engine failed, and no other can be asked.
        """
        if self._lanes.get(lane.replica) is lane:
            call = asyncio.ensure_future(ask(lane.client))
            lane.calls.add(call)
            try:
                await asyncio.wait([call])
            finally:
                lane.calls.discard(call)
                call.cancel()
            try:
                if not call.cancelled():
                    check(answer := call.result())
                    return answer
            except UserError:
                raise
            except Exception as error:
                # A request may reach an engine just after it stopped serving for a sync. That is no failure.
                stopped = self._held and isinstance(error, NotServing)
                if not stopped and self._lanes.get(lane.replica) is lane:
                    self.on_failure(lane.replica, error)
        if self._nobody is not None:
            raise self._nobody
        raise EngineLeft(f"engine {lane.replica} left the routing")

    def _check(self, group: Group, prompt: Prompt, sampling: Sampling) -> None:
        check_group(group, prompt, sampling.n, self._vocabulary, self._versions)

    def _eligible(self) -> list[_Lane]:
        if self._nobody is not None:
            raise self._nobody
        lanes = [lane for _, lane in sorted(self._lanes.items())
                 if lane.version is not None and lane.version == self._committed]
        if not lanes:
            held = ", ".join(f"engine {lane.replica}: {lane.version}" for lane in self._lanes.values())
            raise NotServing(f"no engine holds the committed version {self._committed} ({held})")
        return lanes

    async def _in_shares(self, lanes: Sequence[_Lane], prompts: Sequence[Prompt], sampling: Sampling, step: int
                         ) -> list[Group]:
        """Make one call per engine. Prompt i goes to engine i mod E."""
        groups: dict[int, Group] = {}

        async def serve(lane: _Lane, indices: range) -> None:
            def check(answers: list[Group]) -> None:
                for i, group in zip(indices, answers, strict=True):
                    self._check(group, prompts[i], sampling)

            mine = [prompts[i] for i in indices]
            answers = await self._answer(lane, lambda engine: engine.generate(mine, sampling, step), check)
            for i, group in zip(indices, answers, strict=True):
                groups[i] = group
                _count(lane, group)

        shares = [(lane, range(first, len(prompts), len(lanes))) for first, lane in enumerate(lanes)]
        await _all_or_cancel([serve(lane, indices) for lane, indices in shares if len(indices)])
        return [groups[i] for i in range(len(prompts))]

    def _hand_out(self) -> None:
        """Give waiting groups to engines with room, first those whose turn it is."""
        while self._waiting:
            first = self._waiting[0]
            if first.lane.done():       # cancelled while it waited
                heapq.heappop(self._waiting)
                continue
            if self._held:
                return
            try:
                lanes = self._eligible()
            except Exception as error:
                heapq.heappop(self._waiting).lane.set_exception(error)
                continue
            free = [lane for lane in lanes if len(lanes) == 1 or lane.unfinished < self._max_num_seqs]
            if not free:
                self._ask_for_room(lanes)
                return
            lane = min(free, key=lambda lane: lane.outstanding_tokens)
            heapq.heappop(self._waiting)
            lane.enter(first)
            first.lane.set_result(lane)
        for lane in self._lanes.values():
            lane.ask_no_more()

    def _ask_for_room(self, lanes: Sequence[_Lane]) -> None:
        """Ask full engines to tell when they have a place."""
        for lane in lanes:
            if lane.asking is None:
                lane.asking = asyncio.create_task(self._await_room(lane, lane.sent - self._max_num_seqs + 1))

    async def _await_room(self, lane: _Lane, count: int) -> None:
        try:
            lane.ended = await lane.client.ended(count)
        except Exception:
            return      # the engine failed, and its groups tell how
        finally:
            if lane.asking is asyncio.current_task():
                lane.asking = None
        self._hand_out()

    def _allow(self, version: int) -> None:
        self._versions = range(self._versions.start if self._versions else version, version + 1)


def _count(lane: _Lane, group: Group) -> None:
    lane.served["groups"] += 1
    lane.served["tokens"] += sum(trajectory.length for trajectory in group.trajectories)


async def _all_or_cancel(calls: Sequence[Awaitable[None]]) -> None:
    """Wait for all calls. At the first failure, cancel the rest and raise it."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
