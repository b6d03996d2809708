"""Scores samples in worker processes, with a deadline per sample.

A grader may hang (a regular expression, SymPy on `9^{9^9}`), raise, or crash its process. It must run in the main
thread of a process that can be killed: in another thread, math-verify's own timeout raises and everything scores 0
(verl#5635, TRL#5281); without a timeout, one answer hangs the run (verl#5839).

Samples are sent in chunks and scores come back one by one, so a worker's silence is measured from its last score. The
next sample is then to blame, and the rest of its chunk goes to another worker. Pools that return a chunk as a whole
(pebble, concurrent.futures) can only time a chunk, and would have to run it again to find the sample.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path

from launch.config.schema import Reward as RewardConfig
from launch.errors import UserError
from megatron_rl.rewards import child
from megatron_rl.rewards.sample import Sample, Score, Status

log = logging.getLogger(__name__)

LARGEST_CHUNK = 8
"""Maximum number of samples that wait in a process, behind one that may hang."""


class RewardFailure(Exception):
    """A sample failed in a call that stops at the first failure."""

    def __init__(self, index: int, score: Score) -> None:
        super().__init__(f"sample {index}: {score.status}: {score.detail}")
        self.index, self.score = index, score


@dataclass(eq=False)
class _Call:
    """The samples of one call, and the scores that it has so far."""

    samples: Sequence[Sample]
    stop_on_failure: bool
    scores: dict[int, Score] = field(default_factory=dict)
    future: Future[list[Score]] = field(default_factory=Future)

    def scored(self, index: int, score: Score) -> None:
        if self.future.done():
            return
        self.scores[index] = score
        if score.status != "ok" and self.stop_on_failure:
            self.future.set_exception(RewardFailure(index, score))
        elif len(self.scores) == len(self.samples):
            self.future.set_result([self.scores[i] for i in range(len(self.samples))])


Item = tuple[_Call, int]
"""A sample: its call, and its index there."""


class RewardPool:
    """`config.workers` processes that score samples. Any thread may call it, several at a time: samples are scored in
    the order of the calls, by whichever process is free. A thread of the pool serves the processes.

    Args:
        columns: names of the data's further columns, see `load_rewards`.
        log_dir: each worker writes to `<log_dir>/reward-process-<i>.log`; None: to this process's output.
        first: number of the first worker.
        start_timeout_s: time limit for the start of a worker (import, guards).
    """

    def __init__(self, config: RewardConfig, *, columns: Sequence[str] | None = None, log_dir: Path | None = None,
                 first: int = 0, start_timeout_s: float = 120.0) -> None:
        self._workers = [
            _Worker(i, config, columns, None if log_dir is None else log_dir / f"reward-process-{i}.log",
                    start_timeout_s) for i in range(first, first + config.workers)]
        self._lock = threading.Lock()
        """Guards what callers change: the next four fields."""
        self._waiting: deque[Item] = deque()
        self._calls: set[_Call] = set()
        self._closed, self._rung = True, False
        self._heard, self._bell = multiprocessing.Pipe(duplex=False)
        """A message in this pipe wakes the pool's thread."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the processes and wait until all are ready.

        Raises:
            UserError: the rewards do not load or fail their guards, or a worker does not start in time.
        """
        try:
            for worker in self._workers:
                worker.start()
            while any(worker.starting for worker in self._workers):
                self._wait()
                for worker in self._workers:
                    worker.read()
        except BaseException:
            self._kill_all()
            raise
        self._closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="reward-pool")
        self._thread.start()

    def submit(self, samples: Sequence[Sample], *, stop_on_failure: bool = False) -> Future[list[Score]]:
        """Ask for the scores of samples, see `score`. Returns at once."""
        call = _Call(list(samples), stop_on_failure)
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is not running")
            if not samples:
                call.future.set_result([])
                return call.future
            self._calls.add(call)
            self._waiting.extend((call, index) for index in range(len(samples)))
            self._ring()
        return call.future

    def score(self, samples: Sequence[Sample], *, stop_on_failure: bool = False) -> list[Score]:
        """The score of every sample, in the given order.

        A sample that fails has the status `error` or `timeout`. Its worker is replaced if necessary.

        Raises:
            RewardFailure: with `stop_on_failure`, at the first sample that fails. The pool can be used again.
        """
        return self.submit(samples, stop_on_failure=stop_on_failure).result()

    def close(self) -> None:
        """End all worker processes and the processes they started. May be called twice."""
        with self._lock:
            self._closed = True
            self._ring()
        if self._thread is not None:
            self._thread.join()
        self._fail(RuntimeError("the reward pool was closed"))
        self._kill_all()

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        """Hand samples out and collect their scores, until the pool is closed."""
        try:
            while not self._closed:
                self._hand_out()
                self._wait()
                for worker in self._workers:
                    for (call, index), score in worker.read().items():
                        call.scored(index, score)
                        if call.future.done():
                            self._forget(call)
                    self._put_back(worker.take_back())
        except BaseException as error:  # a worker that cannot be replaced: nobody may wait for its scores
            self._closed = True
            self._fail(error)

    def _hand_out(self) -> None:
        for worker in self._workers:
            chunk = self._next_chunk() if worker.idle else []
            if chunk and not worker.give(chunk):
                self._put_back(chunk)

    def _next_chunk(self) -> list[Item]:
        with self._lock:
            size = min(LARGEST_CHUNK, math.ceil(len(self._waiting) / (2 * len(self._workers))))
            return [self._waiting.popleft() for _ in range(size)]

    def _put_back(self, items: Sequence[Item]) -> None:
        if items:
            with self._lock:
                self._waiting.extendleft(reversed(items))

    def _forget(self, call: _Call) -> None:
        """Nobody waits for further scores of a call."""
        with self._lock:
            self._calls.discard(call)
            if len(call.scores) < len(call.samples):
                self._waiting = deque(item for item in self._waiting if item[0] is not call)

    def _fail(self, error: BaseException) -> None:
        """End the calls that are under way. Only while no thread serves them, or in that thread."""
        with self._lock:
            calls, self._calls = self._calls, set()
            self._waiting.clear()
        for call in calls:
            if not call.future.done():
                call.future.set_exception(error)

    def _ring(self) -> None:
        """Wake the pool's thread. The lock is held."""
        if not self._rung:
            self._rung = True
            self._bell.send_bytes(b"!")

    def _wait(self) -> None:
        """Wait for a message, a death, a deadline or a new call."""
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        timeout_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        ready = wait([self._heard, *(handle for worker in self._workers for handle in worker.handles())], timeout_s)
        if self._heard in ready:
            with self._lock:
                self._heard.recv_bytes()
                self._rung = False

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()


class _Worker:
    """One process and the samples it holds. It is `starting` until it reports ready, then `idle` or busy."""

    def __init__(self, number: int, config: RewardConfig, columns: Sequence[str] | None, log_path: Path | None,
                 start_timeout_s: float) -> None:
        self._number, self._config, self._columns, self._log_path = number, config, columns, log_path
        self._start_timeout_s = start_timeout_s
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pending: deque[Item] = deque()
        self._left: list[Item] = []
        self._running, self._began = "", 0.0
        self.starting = False
        self.deadline: float | None = None
        """When silence becomes a fault, on the monotonic clock; None while idle."""

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def idle(self) -> bool:
        return self.running and not self.starting and not self._pending

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=child.main, name=f"reward-process-{self._number}", daemon=True,
                                        args=(theirs, self._config, self._columns, self._log_path))
        self._process.start()
        theirs.close()
        self.starting = True
        self.deadline = time.monotonic() + self._start_timeout_s

    def handles(self) -> list:
        """Handles that become ready when the worker sends a message or dies."""
        return [] if self._process is None else [self._connection, self._process.sentinel]

    def give(self, chunk: list[Item]) -> bool:
        """Whether the samples were taken. A process that died while idle is replaced, as no sample is to blame."""
        try:
            self._connection.send([call.samples[index] for call, index in chunk])
        except (BrokenPipeError, ConnectionResetError):
            self.kill()
            self.start()
            return False
        self._pending.extend(chunk)
        self._progress()
        return True

    def read(self) -> dict[Item, Score]:
        """Scores that have arrived. If the process died or missed its deadline it is replaced, and the sample that it
        was scoring has failed."""
        scores: dict[Item, Score] = {}
        if self._process is None:
            return scores
        # Taken before the messages are read: a score that arrives while this process is not scheduled is in time.
        now = time.monotonic()
        try:
            while self._connection.poll():
                kind, value = self._connection.recv()
                if kind == child.REFUSED:
                    raise value
                if kind == child.RUNNING:
                    self._running = value
                    continue
                if kind == child.SCORED:
                    scores[self._pending.popleft()] = replace(value, seconds=max(0.0, now - self._began))
                self.starting = False
                self._progress()
        except (EOFError, ConnectionResetError):
            return scores | self._replace("error", _death(self._process))
        if self.deadline is not None and now >= self.deadline:
            limit = self._start_timeout_s if self.starting else self._config.timeout_s
            return scores | self._replace("timeout", f"no answer within {limit:g} s")
        return scores

    def take_back(self) -> list[Item]:
        """The samples left behind by a process that was replaced."""
        left, self._left = self._left, []
        return left

    def kill(self) -> None:
        if self._process is None or self._process.pid is None:
            return
        # Before `join`, which frees the PID: the worker leads a process group with everything the reward started.
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()
        self._process.join(timeout=10.0)
        self._connection.close()
        self._process, self.starting, self.deadline = None, False, None
        self._pending.clear()

    def _progress(self) -> None:
        self._running, self._began = "", time.monotonic()
        self.deadline = self._began + self._config.timeout_s if self._pending else None

    def _replace(self, status: Status, detail: str) -> dict[Item, Score]:
        """Replace this process. The sample that it was scoring gets the blame."""
        if self._log_path is not None:
            detail += f"; see {self._log_path}"
        if self.starting:
            raise UserError(f"reward worker {self._number} did not start: {detail}", where="reward.functions",
                            fix="import the module of each reward function in Python and see what it does")
        functions = self._config.functions
        function = self._running or (functions[0].function if len(functions) == 1 else "")
        log.warning("reward worker %d is replaced: %s", self._number, detail)
        failed = {}
        if self._pending:
            score = Score.failed(status, detail, function)
            failed = {self._pending.popleft(): replace(score, seconds=time.monotonic() - self._began)}
        self._left = list(self._pending)
        self.kill()
        self.start()
        return failed


def _death(process: multiprocessing.process.BaseProcess) -> str:
    process.join(timeout=5.0)
    code = process.exitcode
    if code is None:  # another waiter has reaped it
        return "the worker process ended"
    return f"the worker process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
