"""How a process of a Slurm step introduces its node to the job."""

from __future__ import annotations

import os
import socket
import time

from launch import envvars
from launch.cluster.interfaces import job_address
from launch.ports import Ports
from launch.run.node_files import Hello


def greeting(node: str, ports: Ports) -> Hello:
    """Of this process, which holds `ports` on the node that Slurm calls `node`."""
    where = job_address(envvars.get(envvars.INTERFACE))
    return Hello(
        node=node, pid=os.getpid(), host=socket.gethostname(), address=where.address, interface=where.interface,
        ports=ports.base, task=int(envvars.get("SLURM_PROCID", "0")), cpus=len(os.sched_getaffinity(0)),
        topology=envvars.get("SLURM_TOPOLOGY_ADDR", ""),
        topology_pattern=envvars.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""), at=time.time())
