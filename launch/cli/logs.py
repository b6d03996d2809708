"""`megatron-rl logs`."""

from __future__ import annotations

import click

from launch.cli import options

LOOK_EVERY_S = 0.5


@click.command()
@click.argument("run", metavar="RUN|JOB")
@options.runs_folder
@options.attempt
@click.option("--role", metavar="ROLE",
              help="Only logs of this role: driver, trainer, rollout, reward, ray, supervisor, job, ray-logs.")
@click.option("--rank", type=click.IntRange(min=0), help="Only this trainer rank or rollout replica.")
@click.option("--node", metavar="NODE", help="Only logs of this node.")
@click.option("-n", "--lines", default=50, show_default=True, type=click.IntRange(min=1), help="Number of last lines.")
@click.option("--all", "everything", is_flag=True, help="Print all lines.")
@click.option("-f", "--follow", is_flag=True, help="Print new lines as they are written, until the attempt ends.")
@click.option("--first-error", "first", is_flag=True, help="Print only the first error of all processes, by time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with --follow, one per line.")
def command(run: str, folder: str, attempt: int | None, role: str | None, rank: int | None, node: str | None,
            lines: int, everything: bool, follow: bool, first: bool, as_json: bool) -> None:
    """Print the logs of RUN, merged by time.

    RUN is a run's name, the path of its folder, or a Slurm job id. --first-error shows which process failed first;
    later errors are mostly timeouts of processes that waited for it.
    """
    import json

    from launch.report.diagnose import logs, logs_first_error
    from launch.report.diagnose.logs import attempt_of

    path = attempt_of(run, folder, attempt)
    wanted = logs.Filter(role, rank, node)
    chosen = logs.choose(path, wanted)
    if first:
        found = logs_first_error.first_error(path, wanted)
        click.echo(json.dumps(found.as_json()) if as_json else logs_first_error.text_of(found, path))
        return
    follower = logs.Follower(path, wanted)
    if follow:
        follower.start()
    shown = list(logs.merged(chosen)) if everything else logs.last(chosen, lines)
    width = logs.label_width(chosen)
    if as_json and not follow:
        click.echo(json.dumps({"schema_version": logs_first_error.SCHEMA_VERSION, "attempt": str(path),
                               "lines": [logs.as_json(line) for line in shown]}))
        return
    say = (lambda line: json.dumps(logs.as_json(line))) if as_json else (lambda line: logs.text_of(line, width))
    for line in shown:
        click.echo(say(line))
    if follow:
        for line in logs.follow(follower, LOOK_EVERY_S):
            click.echo(say(line))
