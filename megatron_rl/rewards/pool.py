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
from multiprocessing.connection import wait
from pathlib import Path

from launch.config.schema import Reward as RewardConfig
from launch.errors import UserError
from megatron_rl.rewards import child
from megatron_rl.rewards.sample import Sample, Score, Status

log = logging.getLogger(__name__)

LARGEST_CHUNK = 32


class RewardFailure(Exception):
    """A sample failed in a call that stops at the first failure."""

    def __init__(self, index: int, score: Score) -> None:
        super().__init__(f"sample {index}: {score.status}: {score.detail}")
        self.index, self.score = index, score


class RewardPool:
    """`config.workers` processes that score samples. Any thread may call it, one at a time.

    Args:
        columns: names of the data's further columns, see `load_rewards`.
        log_dir: each worker writes to `<log_dir>/reward-process-<i>.log`; None: to this process's output.
        start_timeout_s: time limit for the start of a worker (import, guards).
    """

    def __init__(self, config: RewardConfig, *, columns: Sequence[str] | None = None, log_dir: Path | None = None,
                 start_timeout_s: float = 120.0) -> None:
        self._config = config
        self._lock = threading.Lock()
        logs = [None if log_dir is None else log_dir / f"reward-process-{i}.log" for i in range(config.workers)]
        self._workers = [_Worker(i, config, columns, logs[i], start_timeout_s) for i in range(config.workers)]

    def start(self) -> None:
        """Start the processes and wait until all are ready.

        Raises:
            UserError: the rewards do not load or fail their guards, or a worker does not start in time.
        """
        with self._lock:
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

    def score(self, samples: Sequence[Sample], *, stop_on_failure: bool = False) -> list[Score]:
        """The score of every sample, in the given order.

        A sample that fails has the status `error` or `timeout`. Its worker is replaced if necessary.

        Raises:
            RewardFailure: with `stop_on_failure`, at the first sample that fails. The pool can be used again.
        """
        with self._lock:
            if not all(worker.running for worker in self._workers):
                raise RuntimeError("the reward pool is not running")
            scores: dict[int, Score] = {}
            waiting = deque(range(len(samples)))
            try:
                while len(scores) < len(samples):
                    self._hand_out(samples, waiting)
                    self._wait()
                    for worker in self._workers:
                        scored = worker.read()
                        scores |= scored
                        waiting.extendleft(reversed(worker.take_back()))
                        failed = [i for i in scored if scored[i].status != "ok"]
                        if failed and stop_on_failure:
                            raise RewardFailure(failed[0], scored[failed[0]])
            except BaseException:
                # Also on Ctrl-C: scores of this call must not arrive in the next one.
                self._restart_busy()
                raise
            return [scores[i] for i in range(len(samples))]

    def close(self) -> None:
        """End all worker processes and the processes they started. May be called twice."""
        with self._lock:
            self._kill_all()

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hand_out(self, samples: Sequence[Sample], waiting: deque[int]) -> None:
        size = min(LARGEST_CHUNK, math.ceil(len(waiting) / (2 * len(self._workers))))
        for worker in self._workers:
            if waiting and worker.idle:
                chunk = [waiting.popleft() for _ in range(min(size, len(waiting)))]
                if not worker.give(chunk, [samples[i] for i in chunk]):
                    waiting.extendleft(reversed(chunk))

    def _wait(self) -> None:
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        timeout_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else 0.0
        wait([handle for worker in self._workers for handle in worker.handles()], timeout_s)

    def _restart_busy(self) -> None:
        for worker in self._workers:
            if worker.running and not worker.idle and not worker.starting:
                worker.kill()
                worker.start()

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
        self._pending: deque[int] = deque()
        self._left: list[int] = []
        self._running = ""
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

    def give(self, chunk: list[int], samples: list[Sample]) -> bool:
        """Whether the samples were taken. A process that died while idle is replaced, as no sample is to blame."""
        try:
            self._connection.send(samples)
        except (BrokenPipeError, ConnectionResetError):
            self.kill()
            self.start()
            return False
        self._pending.extend(chunk)
        self._progress()
        return True

    def read(self) -> dict[int, Score]:
        """Scores that have arrived, by sample index. If the process died or missed its deadline it is replaced, and the
        sample that it was scoring has failed."""
        scores: dict[int, Score] = {}
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
                    scores[self._pending.popleft()] = value
                self.starting = False
                self._progress()
        except (EOFError, ConnectionResetError):
            return scores | self._replace("error", _death(self._process))
        if self.deadline is not None and now >= self.deadline:
            limit = self._start_timeout_s if self.starting else self._config.timeout_s
            return scores | self._replace("timeout", f"no answer within {limit:g} s")
        return scores

    def take_back(self) -> list[int]:
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
        self._running = ""
        self.deadline = time.monotonic() + self._config.timeout_s if self._pending else None

    def _replace(self, status: Status, detail: str) -> dict[int, Score]:
        """Replace this process. The sample that it was scoring gets the blame."""
        if self._log_path is not None:
            detail += f"; see {self._log_path}"
        if self.starting:
            raise UserError(f"reward worker {self._number} did not start: {detail}", where="reward.functions",
                            fix="import the module of each reward function in Python and see what it does")
        functions = self._config.functions
        function = self._running or (functions[0].function if len(functions) == 1 else "")
        log.warning("reward worker %d is replaced: %s", self._number, detail)
        failed = {self._pending.popleft(): Score.failed(status, detail, function)} if self._pending else {}
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
