"""`megatron-rl`: one file per verb. A verb's module is imported only when it is used, so that the command starts fast
and a login node needs only the light dependencies."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click

from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.version import VERSION

VERBS: dict[str, tuple[str, str]] = {
    "config": ("launch.cli.config", "Show a configuration, or explain its keys."),
    "doctor": ("launch.cli.doctor", "Explain why a run or job failed, and what to do."),
    "job": ("launch.cli.job", "Inside a Slurm job: run a configuration on its nodes."),
    "launch": ("launch.cli.launch", "Train a configuration, on this machine or on Slurm."),
    "logs": ("launch.cli.logs", "Print a run's logs, merged by time, or its first error."),
    "models": ("launch.cli.models", "Create the model folders that the shipped configurations use."),
    "node": ("launch.cli.node", "Inside a Slurm job: supervise one node."),
    "plan": ("launch.cli.plan", "Plan a configuration: layout, memory, step time. Explain, compare and sweep plans."),
    "preflight": ("launch.cli.preflight", "Check nodes, network and configuration before a job starts."),
    "report": ("launch.cli.report", "Write the HTML report of a run."),
    "runs": ("launch.cli.runs", "List the runs in a folder."),
    "status": ("launch.cli.status", "Show the state of a run or job."),
    "stop": ("launch.cli.stop", "Ask a run to write a checkpoint and end."),
    "sync": ("launch.cli.sync", "Draw the routes of the weight sync, or measure it."),
    "validate": ("launch.cli.validate", "Check whether a configuration is valid."),
}
"""Verb -> (module that defines `command`, one line of help)."""

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class LazyGroup(click.Group):
    """Holds the name and help line of every verb, and imports a verb's module when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        return importlib.import_module(VERBS[name][0]).command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, VERBS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings=CONTEXT)
@click.version_option(VERSION, prog_name="megatron-rl", message="%(prog)s %(version)s")
def cli() -> None:
    """GRPO post-training: Megatron-core trains, vLLM generates rollouts, Ray orchestrates.

    A configuration is one YAML file. Every command that takes one also takes KEY=VALUE overrides.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. A user error is printed as one message on stderr."""
    try:
        result = cli.main(args=arguments, prog_name="megatron-rl", standalone_mode=False)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except click.ClickException as error:
        error.show()
        return int(ExitCode.USER_ERROR)
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    return int(result) if isinstance(result, int) else int(ExitCode.OK)
