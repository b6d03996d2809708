"""Keeps the rollout engines of a run serving: notices one that failed, starts it again, and has the next weight sync
admit it.

An engine fails if it dies, raises, returns what no sound engine returns (`rollout.answers`), or hangs: it does not
answer, or it samples no token although it has requests. It then leaves the routing at once. If no other engine serves,
or if routing is deterministic, the attempt ends instead, and a hang is left to the launcher's hang watch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_rl.driver.cluster import ComponentFailed, death_reason
from megatron_rl.rollout.scheduler import EngineClient, RolloutScheduler
from megatron_rl.weight_sync.calls import outcomes
from megatron_rl.weight_sync.coordinator import SyncCoordinator
from megatron_rl.weight_sync.protocol import EngineHandle, EngineState, SyncError, SyncReport, engine_name

log = logging.getLogger(__name__)

ASK_EVERY_S = 2.0
"""Interval at which every engine is asked for its status."""
MOST_RESTARTS, WITHIN_S = 3, 3600.0
"""An engine is started again at most this often within this time. After that it stays out."""
CODE = "ENGINE"
"""Code of the warnings."""


Note = Callable[[str, str, Mapping[str, float]], object]
"""Records a warning: code, message, evidence."""


class Engine(EngineClient, EngineHandle, Protocol):
    """A rollout engine (`handles.RemoteEngine`)."""

    name: str

    def status(self) -> Awaitable[dict[str, Any]]: ...

    def compare(self, folder: str) -> Awaitable[list[str]]: ...

    def stop(self) -> Awaitable[None]: ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Means:
    """What the engines of an attempt need from outside."""

    start_again: Callable[[int], Awaitable[Engine]]
    """Starts a replica and returns once it answers. It holds no weights."""
    dismiss: Callable[[str], None]
    """Tells the launcher that the run continues without this process of a component."""
    blame: Callable[[str, Exception], None]
    """Records the error that ends the attempt under the name of a component that did not record it itself."""
    note: Note


@dataclass(eq=False)
class _Seat:
    """A replica over all its processes."""

    engine: Engine
    down: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `engine` has failed."""
    restarted: list[float] = field(default_factory=list)
    """When it was started again, on the monotonic clock."""
    waits: bool = False
    """Whether it was started again and waits for a sync."""


class Engines:
    """The engines of a run.

    Args:
        engines: one per replica, in the routing of `scheduler` and on the lanes of `coordinator`.
        hang_s: how long an engine may stay silent, or sample nothing although it has requests.
        first_s: the same for an engine that has not sampled anything yet and may have to compile first.
    """

    def __init__(self, engines: Sequence[Engine], scheduler: RolloutScheduler, coordinator: SyncCoordinator,
                 means: Means, *, hang_s: float, first_s: float) -> None:
        self._seats = {replica: _Seat(engine) for replica, engine in enumerate(engines)}
        self._scheduler, self._coordinator, self._means = scheduler, coordinator, means
        self._hang_s, self._first_s = hang_s, first_s
        self._off_lanes: set[int] = set()
        """Replicas that failed since the last sync."""
        self._over = False
        """Whether an engine failed that the run cannot continue without."""
        self.statuses: dict[int, dict[str, Any]] = {}
        """The last status of every replica. It changes as long as an engine makes progress."""
        scheduler.on_failure = self.failed
        self._tasks = [asyncio.create_task(self._keep(replica), name=f"engine {replica}") for replica in self._seats]
        for task in self._tasks:
            task.add_done_callback(_tell)

    @property
    def serving(self) -> dict[int, Engine]:
        """The engines in the routing."""
        return {replica: self._seats[replica].engine for replica in self._scheduler.served()}

    def metrics(self) -> dict[str, float]:
        """Metrics of the current step."""
        return {"engines/serving": float(len(self.serving)),
                "engines/restarts": float(sum(len(seat.restarted) for seat in self._seats.values()))}

    def failed(self, replica: int, error: Exception) -> None:
        """Continue without an engine that failed, if possible."""
        seat = self._seats[replica]
        if seat.down.is_set():
            return
        name = seat.engine.name
        seat.down.set()
        seat.waits = False
        left = self._scheduler.leave(replica, error) if replica in self._scheduler.served() else True
        if not left:
            self._over = True
            if not isinstance(error, ComponentFailed):
                self._means.blame(name, error)
            log.error("%s failed, and the run cannot continue without it: %s", name, error)
            return
        self._means.dismiss(name)
        seat.engine.kill()
        self._off_lanes.add(replica)
        reason = death_reason(error)
        self._note(f"{name} failed and leaves the routing; its unfinished groups start again on other engines: "
                   f"{_line(error)}" + (f" ({reason})" if reason else ""))

    async def before_sync(self) -> None:
        """Take failed engines off the lanes of the next sync, and have it admit those that were started again."""
        gone, self._off_lanes = self._off_lanes, set()
        await self._coordinator.leave(gone)
        for replica, seat in self._seats.items():
            if not seat.waits:
                continue
            engine = seat.engine
            try:
                await self._coordinator.admit(replica, engine)
            except SyncError as error:
                self.failed(replica, error)
            if seat.engine is engine and seat.waits:
                self._scheduler.enter(replica, engine)

    def after_sync(self, report: SyncReport) -> None:
        """Continue without the engines that the sync has lost, and tell which serve again."""
        for replica, engine in self.serving.items():
            if engine_name(replica) in report.lost:
                self.failed(replica, ComponentFailed(engine.name, f"lost in the sync of version {report.version}"))
        for replica, engine in self.serving.items():
            if self._seats[replica].waits:
                self._seats[replica].waits = False
                self._note(f"{engine.name} was started again and serves version {report.version}")

    async def compare(self, folder: str) -> dict[str, list[str]]:
        """What the serving engines hold different from a folder, by name. One that fails meanwhile is left out."""
        serving = {engine.name: (replica, engine) for replica, engine in self.serving.items()}
        found = await outcomes({name: engine.compare(folder) for name, (_, engine) in serving.items()}, math.inf)
        for name, outcome in found.items():
            if isinstance(outcome, Exception):
                self.failed(serving[name][0], outcome)
        return {name: lines for name, lines in found.items() if isinstance(lines, list)}

    async def stop(self, within_s: float) -> None:
        """Stop watching, then stop all engines. One that fails now does no harm: the launcher ends what is left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        calls = {seat.engine.name: seat.engine.stop() for seat in self._seats.values() if not seat.down.is_set()}
        for name, outcome in (await outcomes(calls, time.monotonic() + within_s)).items():
            if isinstance(outcome, Exception):
                log.warning("stopping %s: %s", name, outcome)

    async def _keep(self, replica: int) -> None:
        """Watch a replica and start it again after every failure, until it stays out or the attempt ends."""
        seat = self._seats[replica]
        while True:
            await self._watch(replica, seat)
            if self._over or not await self._start_again(replica, seat):
                return

    async def _watch(self, replica: int, seat: _Seat) -> None:
        """Return when the engine has failed."""
        before: dict[str, Any] = {}
        moved = time.monotonic()
        while not seat.down.is_set():
            limit_s = self._hang_s if before.get("generated_tokens") else self._first_s
            try:
                async with asyncio.timeout(limit_s):
                    status = await seat.engine.status()
            except TimeoutError:
                self._hangs(replica, f"no answer for {limit_s:.0f} s")
                continue
            except Exception as error:
                self.failed(replica, error)
                return
            self.statuses[replica] = status
            if status != before or not status["unfinished"] or status["state"] != EngineState.SERVING.value:
                before, moved = status, time.monotonic()
            elif time.monotonic() - moved > limit_s:
                self._hangs(replica, f"{status['unfinished']} requests and no new token for {limit_s:.0f} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_EVERY_S):
                    await seat.down.wait()

    def _hangs(self, replica: int, how: str) -> None:
        if self._scheduler.spares(replica):
            self.failed(replica, RuntimeError(f"{self._seats[replica].engine.name} hangs: {how}"))

    async def _start_again(self, replica: int, seat: _Seat) -> bool:
        """Start a replica again. Returns False if it has to stay out."""
        name = seat.engine.name
        while True:
            recent = sum(time.monotonic() - at < WITHIN_S for at in seat.restarted)
            if recent >= MOST_RESTARTS:
                self._note(f"{name} was started again {recent} times within {WITHIN_S / 60:.0f} minutes and stays out "
                           "until the next attempt: see its log")
                return False
            seat.restarted.append(time.monotonic())
            try:
                seat.engine = await self._means.start_again(replica)
            except Exception as error:
                self._means.dismiss(name)
                self._note(f"{name} could not be started again: {_line(error)}")
            else:
                seat.down.clear()
                seat.waits = True
                log.info("%s was started again and waits for the next weight sync", name)
                return True

    def _note(self, message: str) -> None:
        self._means.note(CODE, message, self.metrics())


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _tell(task: asyncio.Task[None]) -> None:
    """Log an error that ended the watch of an engine."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s is not watched any more", task.get_name(), exc_info=error)
