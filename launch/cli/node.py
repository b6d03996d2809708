"""`megatron-rl node`."""

from __future__ import annotations

import click


@click.command()
@click.argument("attempt", metavar="ATTEMPT", type=click.Path())
def command(attempt: str) -> int:
    """Inside a Slurm job: supervise this node's part of ATTEMPT, the folder of an attempt.

    `megatron-rl job` starts one on each node.
    """
    from launch.runtime.supervisor import supervise

    return supervise(attempt)
