"""Ends an attempt's processes on a node and removes the shared memory that they leave."""

from __future__ import annotations

from launch import processes, shared_memory
from launch.run.attempts import Attempt
from launch.run.components import components, dismissed
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


def end_earlier(attempt: Attempt, node: str, name: str) -> None:
    """End what is left of the earlier processes of a component and of the processes that they started. Called by the
    component itself when it starts."""
    if earlier := [record for record in dismissed(attempt) if record.name == name]:
        processes.end_processes(processes.marked(attempt.mark, node, name), grace_s=0.0)
        shared_memory.remove(path for record in earlier for path in record.segments)


def _recorded(attempt: Attempt, node: str | None) -> set[str]:
    """Segments that the components recorded when they were ready: a process that is already dead (Ray ends actors) no
    longer shows them. A damaged file must not prevent an attempt from ending or starting."""
    try:
        records = [*components(attempt, node), *(each for each in dismissed(attempt) if node in (None, each.node))]
        return {path for record in records for path in record.segments}
    except (OSError, ValueError, TypeError, KeyError):
        return set()
