"""A port of the block that a node would take is in use there."""

from __future__ import annotations

import socket

from launch import ports
from launch.run.node_files import NodeFiles
from tests.slurm.stub_run import StubRun


def test_a_node_takes_the_next_block_where_somebody_holds_a_port_of_the_first(slurm, tmp_path):
    run = StubRun(slurm, tmp_path, "occupied", 2, steps=3).submit("--hold")
    usual = ports.blocks(ports._ephemeral_floor())
    first = usual[run.job % len(usual)]       # of the job's first task; see `Supervisor._claim_ports`
    with socket.socket() as somebody:
        somebody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        somebody.bind(("127.0.0.1", first + ports.TABLE["ray_gcs"][0]))
        somebody.listen()
        slurm.run("scontrol", "release", str(run.job))
        (past,) = run.ended(1)
    assert past.status == "finished"
    taken = {NodeFiles(run.attempt(1), node).hello().ports for node in run.given(1)}
    assert len(taken) == 2 and first not in taken
