"""Ends an attempt's processes on a node and removes the shared memory that they leave."""

from __future__ import annotations

from launch import processes, shared_memory
from launch.run.attempts import Attempt
from launch.run.components import components
from launch.run.find import attempts_of


def end_all(attempt: Attempt, node: str | None = None, grace_s: float = 0.0) -> list[str]:
    """End every process that carries the attempt's mark, wherever it is in the process tree. Does so twice, because one
    may just have started another. Returns the shared memory that was removed.

    Args:
        node: only processes of this node of the job, see `processes.marked`; None for a local job.
        grace_s: seconds between TERM and KILL in the first pass.
    """
    segments: set[str] = set()
    for grace in (grace_s, 0.0):
        left = processes.marked(attempt.mark, node)
        segments |= shared_memory.held(process.pid for process in left)
        if left:
            processes.end_processes(left, grace)
    return shared_memory.remove(segments | _recorded(attempt, node))


def remove_leftovers(attempt: Attempt, node: str | None = None) -> list[str]:
    """Remove and return the shared memory that killed processes of earlier attempts of the run left on this node.
    Called when `attempt` holds the run's lock, so that the earlier attempts are over."""
    earlier = [Attempt(folder) for folder in attempts_of(attempt.run_folder) if int(folder.name) < attempt.number]
    return shared_memory.remove(path for each in earlier for path in _recorded(each, node))


def _recorded(attempt: Attempt, node: str | None) -> set[str]:
    """Segments that the components recorded when they were ready: a process that is already dead (Ray ends actors) no
    longer shows them. A damaged file must not prevent an attempt from ending or starting."""
    try:
        return {path for record in components(attempt, node) for path in record.segments}
    except (OSError, ValueError, TypeError, KeyError):
        return set()
