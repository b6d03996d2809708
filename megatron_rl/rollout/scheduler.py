"""Routes groups to rollout engines, on the driver.

Engines are handles with awaitable methods (`generate`, `generate_group`), so the scheduler works with Ray actors and
with plain objects. Groups are returned in the order of their prompts, never in the order of arrival.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_rl.data.batch import Group, Prompt
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.weight_sync.protocol import NotServing


class EngineClient(Protocol):
    """The scheduler's view of a rollout engine (`RolloutEngine`, directly or behind a Ray actor)."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> Awaitable[list[Group]]: ...

    def generate_group(self, prompt: Prompt, sampling: Sampling, seed: int | None = None) -> Awaitable[Group]: ...


@dataclass
class _Lane:
    """The scheduler's record of one engine."""

    client: EngineClient
    version: int | None = None
    outstanding_tokens: int = 0
    outstanding_sequences: int = 0
    served: dict[str, int] = field(default_factory=lambda: {"groups": 0, "tokens": 0})

    def enter(self, group: _Waiting) -> None:
        self.outstanding_tokens += group.tokens
        self.outstanding_sequences += group.sequences

    def leave(self, group: _Waiting) -> None:
        self.outstanding_tokens -= group.tokens
        self.outstanding_sequences -= group.sequences


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
    Otherwise each group goes to the engine with the fewest outstanding tokens among those with room in their batch. The
    remaining groups wait in the scheduler, so a slow engine receives fewer. A single engine receives all groups at
    once.

    Args:
        engines: one client per replica.
        max_num_seqs: number of sequences that an engine decodes at once (`rollout.max_num_seqs`).
        deterministic: use fixed routing.
    """

    def __init__(self, engines: Sequence[EngineClient], *, max_num_seqs: int, deterministic: bool) -> None:
        self._lanes = [_Lane(engine) for engine in engines]
        self._max_num_seqs = max_num_seqs
        self.deterministic = deterministic
        self._committed: int | None = None
        self._held = False
        self._waiting: list[_Waiting] = []
        self._arrivals = itertools.count()
        self._turn = asyncio.Lock()

    def hold(self) -> None:
        """Send no further group until `committed`. Groups that the engines already have are not affected."""
        self._held = True

    def committed(self, version: int, replicas: Sequence[int] | None = None) -> None:
        """Record that `replicas` (default: all) committed `version`. Only engines that hold it receive requests."""
        self._committed, self._held = version, False
        for replica in range(len(self._lanes)) if replicas is None else replicas:
            self._lanes[replica].version = version
        self._hand_out()

    def served(self) -> list[dict[str, int]]:
        """For each engine, the numbers of groups and sampled tokens that it has returned so far."""
        return [dict(lane.served) for lane in self._lanes]

    async def rollout(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
        """Generate the groups of `prompts`, in their order. An engine's error cancels the rest and is raised.

        Raises:
            NotServing: no engine holds the committed version.
        """
        if self.deterministic:
            async with self._turn:
                return await self._in_shares(self._eligible(), prompts, sampling, step)
        groups: dict[int, Group] = {}

        async def serve(index: int, prompt: Prompt) -> None:
            groups[index] = await self.group(prompt, sampling, step)

        await _all_or_cancel([serve(index, prompt) for index, prompt in enumerate(prompts)])
        return [groups[i] for i in range(len(prompts))]

    async def group(self, prompt: Prompt, sampling: Sampling, step: int) -> Group:
        """Generate the group of one prompt of batch `step`, once an engine has room for it.

        Raises:
            NotServing: no engine holds the committed version.
        """
        tokens = len(prompt.token_ids) + sampling.n * sampling.max_new_tokens
        waiting = _Waiting((step, -len(prompt.token_ids), next(self._arrivals)), sampling.n, tokens,
                           asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, waiting)
        self._hand_out()
        try:
            lane = await waiting.lane
            group = _checked(await lane.client.generate_group(prompt, sampling), prompt, sampling)
            _count(lane, group)
            return group
        finally:
            if waiting.lane.done() and not waiting.lane.cancelled() and waiting.lane.exception() is None:
                waiting.lane.result().leave(waiting)
                self._hand_out()

    def _eligible(self) -> list[_Lane]:
        lanes = [lane for lane in self._lanes if self._committed is not None and lane.version == self._committed]
        if not lanes:
            held = ", ".join(f"engine {i}: {lane.version}" for i, lane in enumerate(self._lanes))
            raise NotServing(f"no engine holds the committed version {self._committed} ({held})")
        return lanes

    async def _in_shares(self, lanes: Sequence[_Lane], prompts: Sequence[Prompt], sampling: Sampling, step: int
                         ) -> list[Group]:
        """Make one call per engine. Prompt i goes to engine i mod E."""
        groups: dict[int, Group] = {}

        async def serve(lane: _Lane, indices: range) -> None:
            answers = await lane.client.generate([prompts[i] for i in indices], sampling, step)
            for i, group in zip(indices, answers, strict=True):
                groups[i] = _checked(group, prompts[i], sampling)
                _count(lane, group)

        shares = [(lane, range(first, len(prompts), len(lanes))) for first, lane in enumerate(lanes)]
        await _all_or_cancel([serve(lane, indices) for lane, indices in shares if len(indices)])
        return [groups[i] for i in range(len(prompts))]

    def _hand_out(self) -> None:
        """Give waiting groups to engines with room, first those whose turn it is."""
        while self._waiting and not self._held:
            first = self._waiting[0]
            if first.lane.done():       # cancelled while it waited
                heapq.heappop(self._waiting)
                continue
            try:
                lane = self._least_loaded(self._eligible(), first.sequences)
            except NotServing as error:
                heapq.heappop(self._waiting).lane.set_exception(error)
                continue
            if lane is None:
                return
            heapq.heappop(self._waiting)
            lane.enter(first)
            first.lane.set_result(lane)

    def _least_loaded(self, lanes: Sequence[_Lane], sequences: int) -> _Lane | None:
        """The engine with the fewest outstanding tokens among those with room. An idle engine always has room, and a
        single one queues on its own."""
        free = [lane for lane in lanes if len(lanes) == 1 or lane.outstanding_sequences == 0
                or lane.outstanding_sequences + sequences <= self._max_num_seqs]
        return min(free, key=lambda lane: lane.outstanding_tokens, default=None)


def _checked(group: Group, prompt: Prompt, sampling: Sampling) -> Group:
    if group.prompt.index != prompt.index or len(group.trajectories) != sampling.n:
        raise RuntimeError(f"asked for {sampling.n} trajectories of prompt {prompt.index}, got "
                           f"{len(group.trajectories)} of prompt {group.prompt.index}")
    return group


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
