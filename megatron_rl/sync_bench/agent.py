"""An agent on a node of an allocation: it starts member processes there for a bench that runs elsewhere.

The bench listens inside the job's network. Agents and members connect to it, and both ends prove that they know the
bench's key before anything else is read. Each member has its own connection, so it is called like a member on the
bench's machine. When the bench closes an agent's connection, its members end.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing.connection import Client

from launch import envvars
from launch.ports import allocate
from launch.run.node_files import greeting
from megatron_rl.sync_bench.members import Host, await_ends, serve

KEY = "MEGATRON_RL_SYNC_BENCH_KEY"
"""The key, in the environment of the step. It is on no command line."""


def main() -> int:
    """`python -m megatron_rl.sync_bench.agent ADDRESS PORT`, once per node."""
    endpoint, key = (sys.argv[1], int(sys.argv[2])), bytes.fromhex(envvars.get(KEY, ""))
    node = envvars.get("SLURMD_NODENAME", "")
    ports = allocate(int(envvars.get("SLURM_PROCID", "0")))
    context = multiprocessing.get_context("forkserver")
    members: list[multiprocessing.process.BaseProcess] = []
    with Client(endpoint, authkey=key) as bench:
        bench.send(("agent", asdict(greeting(node, ports))))
        try:
            context.set_forkserver_preload(list(bench.recv()))
            while True:
                number, name, host, kind, args, variables = bench.recv()
                members.append(context.Process(target=_member, name=name, daemon=True,
                                               args=(endpoint, key, number, host, kind, args, variables)))
                members[-1].start()
        except (EOFError, OSError):
            pass            # the bench has ended
    await_ends(members)
    ports.release()
    return 0


def _member(endpoint: tuple[str, int], key: bytes, number: int, host: Host, kind: str, args: tuple,
            variables: Mapping[str, str]) -> None:
    pipe = Client(endpoint, authkey=key)
    pipe.send(("member", number))
    serve(pipe, host, kind, args, dict(variables), None)


if __name__ == "__main__":
    sys.exit(main())
