"""`megatron-rl doctor`."""

from __future__ import annotations

import click

from launch.cli import options


@click.command()
@click.argument("run", metavar="RUN|JOB")
@options.runs_folder
@options.attempt
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run: str, folder: str, attempt: int | None, as_json: bool) -> None:
    """Explain why RUN failed or is waiting, and what to do.

    RUN is a run's name, the path of its folder, or a Slurm job id. Reads Slurm's record, the outcome, every log and
    the ledger of bad nodes. docs/troubleshooting.md lists the known failures.
    """
    import json

    from launch.report.diagnose.ask_slurm import diagnosis_of
    from launch.report.diagnose.doctor_text import doctor_text

    diagnosis = diagnosis_of(run, folder, attempt)
    click.echo(json.dumps(diagnosis.as_json()) if as_json else doctor_text(diagnosis))
