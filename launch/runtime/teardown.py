"""The end of an attempt's processes on a node, and of the shared memory that they leave there."""

from __future__ import annotations

from launch import processes, shared_memory
from launch.run.attempts import Attempt
from launch.run.components import components
from launch.run.find import attempts_of


def end_all(attempt: Attempt, node: str | None = None, grace_s: float = 0.0) -> list[str]:
    """End every process that carries the attempt's mark, wherever it has moved in the process tree: twice, since one
    may just have started another. Returns the shared memory that was removed after them.

    Args:
        node: only those of this node of the job, see `processes.marked`; None on this machine alone.
        grace_s: between TERM and KILL, the first time.
    """
    segments: set[str] = set()
    for grace in (grace_s, 0.0):
        left = processes.marked(attempt.mark, node)
        segments |= shared_memory.held(process.pid for process in left)
        if left:
            processes.end_processes(left, grace)
    return shared_memory.remove(segments | _recorded(attempt, node))


def remove_leftovers(attempt: Attempt, node: str | None = None) -> list[str]:
    """Remove the shared memory that earlier attempts of the run left on this node, since whoever would have removed it
    was killed. Returns it. Called when `attempt` holds the run's lock: the earlier ones are over."""
    earlier = [Attempt(folder) for folder in attempts_of(attempt.run_folder) if int(folder.name) < attempt.number]
    return shared_memory.remove(path for each in earlier for path in _recorded(each, node))


def _recorded(attempt: Attempt, node: str | None) -> set[str]:
    """What the components wrote down when they were ready: who is dead by now (Ray ends actors) shows nothing. A
    damaged file must not keep an attempt from ending, or from starting."""
    try:
        return {path for record in components(attempt, node) for path in record.segments}
    except (OSError, ValueError, TypeError, KeyError):
        return set()
