"""Common start-up and failure handling of every process of a job: log file, stacks on demand, first error."""

from __future__ import annotations

import errno
import faulthandler
import functools
import gc
import inspect
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from launch import envvars
from launch.errors import UserError
from launch.files.shared import write_atomically
from launch.run.attempts import Attempt
from launch.run.components import record_error, register
from launch.runtime.hang import STACK_SIGNAL, stack_file

_stacks: dict[str, IO[str]] = {}
"""Stays open for the life of the process, because faulthandler's signal handler writes to the descriptor."""


def begin(attempt_folder: str | Path, name: str, node: str, *, own_log: bool = True) -> Attempt:
    """Register this process as a component of the attempt.

    Args:
        name: `trainer-0`, `rollout-1`, `reward-0`, `driver`.
        node: name of the node that the process runs on.
        own_log: redirect stdout and stderr, including those of C++, to `logs/<name>.log`.
    """
    _keep_term_blocked()
    attempt = Attempt(Path(attempt_folder))
    record = register(attempt, name, node)
    (attempt.folder / "environment").mkdir(exist_ok=True)
    write_atomically(attempt.folder / "environment" / f"{name}.json",
                     json.dumps({"node": node, "variables": envvars.recordable()}, indent=2), mode=0o600)
    if own_log:
        descriptor = os.open(record.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, sys.stdout.fileno() if sys.stdout.isatty() else 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    _stacks[name] = stack_file(attempt, name).open("a", encoding="utf-8")
    faulthandler.register(STACK_SIGNAL, file=_stacks[name], all_threads=True, chain=False)
    faulthandler.enable(file=sys.stderr)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True,
                        format=f"%(asctime)s {name} %(levelname)s %(message)s")
    return attempt


def _keep_term_blocked() -> None:
    """Keep SIGTERM blocked. The processes of a Slurm job start with SIGTERM blocked (`launch.runtime.supervisor`), so
    that a preemption does not end them. Python unblocks it in the thread that starts multiprocessing's resource
    tracker, so the tracker is started here and the mask restored."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if signal.SIGTERM in before:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def settle() -> None:
    """Exclude all objects of start-up, which live until the end, from later garbage collections. A full collection over
    the objects of torch, vLLM and Ray pauses a step for half a second."""
    gc.collect()
    gc.freeze()


Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(method: Method) -> Method:
    """Decorate a method of an actor to record the first exception with its traceback before raising it."""
    return _handling(method, report)


def logged(method: Method) -> Method:
    """Decorate a method of an actor to log an exception before raising it. It is not recorded as the component's error,
    because the run may continue: in a weight sync, survivors raise when an engine dies."""
    return _handling(method, lambda attempt, name, error: traceback.print_exception(error))


def _handling(method: Method, handle: Callable[[Attempt, str, Exception], None]) -> Method:
    if inspect.iscoroutinefunction(method):
        @functools.wraps(method)
        async def call_async(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await method(self, *args, **kwargs)
            except Exception as error:
                handle(self.attempt, self.name, error)
                raise
        return cast(Method, call_async)

    @functools.wraps(method)
    def call(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            handle(self.attempt, self.name, error)
            raise
    return cast(Method, call)


def report(attempt: Attempt, name: str, error: BaseException) -> None:
    """Write the error to the log and to the attempt's error files. A full disk counts as a user error."""
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    summary, users = f"{type(error).__name__}: {error}", False
    if isinstance(error, UserError):
        summary, users = str(error), True
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        summary, users = f"no space left to write {error.filename or attempt.folder}: free some, or set run.dir", True
    record_error(attempt, name, summary, text, user_error=users)
