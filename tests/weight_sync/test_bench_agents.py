"""Agents that start a bench's members on other nodes: who does not come is named, and strangers are turned away."""

from __future__ import annotations

import asyncio
import os
import socket
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from megatron_rl.sync_bench.agent import KEY
from megatron_rl.sync_bench.agents import Agents
from megatron_rl.sync_bench.members import Host, MemberError, Members
from tests.patience import patient
from tests.weight_sync.test_sync_bench import ECHO, ROOT

NODES = ("n1", "n2")


def step(*nodes: str, prefix: str = ""):
    """In place of `srun`: the command once for each of these nodes, on this machine."""
    loop = f'for node in {" ".join(nodes)}; do SLURMD_NODENAME=$node {prefix} "$@" & done; wait'
    return lambda command: (["bash", "-c", loop, "bash", *command], {**os.environ, "PYTHONPATH": str(ROOT)})


def test_members_of_several_nodes_answer_and_one_that_dies_is_named(tmp_path):
    async def calls(members: Members) -> None:
        one, two = (members.start(f"on {node}", Host(node), ECHO, variables={"SYNC_BENCH_TEST": node})
                    for node in NODES)
        assert [await one.call("say"), await two.call("say")] == ["n1", "n2"]
        with pytest.raises(MemberError, match="on n1 died in die"):
            await one.call("die")
        assert await two.call("back", 7) == 7

    with Agents(NODES, step(*NODES), (), tmp_path, 30.0) as agents, Members((), tmp_path, agents) as members:
        address = agents._listener.getsockname()
        with socket.create_connection(address):             # says nothing, and holds nobody up
            with pytest.raises(AuthenticationError):
                Client(address, authkey=b"guessed")
            asyncio.run(calls(members))
    assert agents._child.returncode == 0


@pytest.mark.parametrize(("made", "within_s", "what"), [
    (step("n1"), 3.0, "no agent within .* s on n2"),
    (step(*NODES, prefix=f"env {KEY}=00"), 30.0, "before all had greeted")])
def test_a_node_that_does_not_come_is_named(tmp_path, made, within_s, what):
    with pytest.raises(MemberError, match=what), Agents(NODES, made, (), tmp_path, patient(within_s)):
        pass
