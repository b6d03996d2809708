"""What srun says of a step that has failed. Pure."""

from __future__ import annotations

import re

from launch.cluster import hostlist
from launch.errors import UserError
from launch.slurm.refusals import explain, names

_HOSTS = r"(?P<hosts>[\w.,\[\]-]+)"
LOST = re.compile(rf"Task launch for .* failed on node {_HOSTS}: |Node failure on {_HOSTS.replace('hosts', 'others')}")
"""The node itself: its slurmd, a prolog, the network."""
EXITED = re.compile(rf"error: {_HOSTS}: tasks? [\d,-]+: Exited with exit code")
"""The task, or the container it was to run in. Tasks that are `Killed` or `Terminated` only follow."""
USERS = {"unknown option", "gpus", "memory"}
"""Refusals (`launch.slurm.refusals.TABLE`) that would be the same the next time."""


def failed_nodes(text: str) -> tuple[str, ...]:
    """Nodes that are at fault, in the order in which they are named; () where none is."""
    for pattern in (LOST, EXITED):
        found = [node for match in pattern.finditer(text) for hosts in match.groups() if hosts
                 for node in _expanded(hosts)]
        if found:
            return tuple(dict.fromkeys(found))
    return ()


def refused(text: str) -> bool:
    """Whether Slurm would refuse this step again: it was asked for wrongly."""
    return bool(USERS & names(explain("srun", 1, text)))


def _expanded(hosts: str) -> tuple[str, ...]:
    try:
        return hostlist.expand(hosts)
    except UserError:
        return ()
