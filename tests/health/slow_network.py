"""All members of a measurement of the network on this machine: `python -m tests.health.slow_network FOLDER`. The kernel
sends slowly on some of their connections, as a link does that trained down.

They fork from one process, so that torch is loaded once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil
import torch.distributed as dist

from launch.health.network import Task
from megatron_rl import network_check

SO_MAX_PACING_RATE = 47
"""socket(7); Python has no name for it."""
SLOW = 4e6
"""Bytes/s."""
SLOW_TOWARDS: Mapping[int, Collection[int]] = {0: (2,), 3: (0, 1, 2)}
"""Rank -> those to whom it sends slowly."""


def member(folder: str, rank: int) -> None:
    """`python -m megatron_rl.network_check FOLDER RANK`, whose connections are slowed down once they are made."""
    connect = dist.init_process_group

    def connected(*args, store: dist.Store, **more) -> None:
        connect(*args, store=store, **more)
        mine = [each for each in psutil.Process().net_connections("tcp4") if each.status == psutil.CONN_ESTABLISHED]
        store.set(f"ports/{rank}", json.dumps([each.laddr.port for each in mine]))
        for other in SLOW_TOWARDS.get(rank, ()):
            theirs = json.loads(store.get(f"ports/{other}"))
            paced = [_pace(each.fd) for each in mine if each.raddr.port in theirs]
            assert paced, f"no connection from {rank} to {other}"

    dist.init_process_group = connected
    sys.exit(network_check.main([folder, str(rank)]))


def _pace(file: int) -> None:
    with socket.socket(fileno=os.dup(file)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(SLOW))


def main(folder: str) -> int:
    context = multiprocessing.get_context("fork")
    members = [context.Process(target=member, args=(folder, rank))
               for rank in range(len(Task.read(Path(folder)).members))]
    for each in members:
        each.start()
    for each in members:
        each.join()
    return max(abs(each.exitcode) for each in members)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
