"""`megatron-rl job`."""

from __future__ import annotations

import click

from launch.cli.options import config_and_overrides


@click.command()
@config_and_overrides
def command(config: str, overrides: tuple[str, ...]) -> int:
    """Inside a Slurm job: run CONFIG on the job's nodes.

    The last line of the batch script. Starts a supervisor on every node, places the plan on the nodes that pass the
    preflight, and watches the job. At the end, requeues the job, submits it again without bad nodes, or stops.
    """
    from launch.runtime.job import run_job

    return run_job(config, overrides)
