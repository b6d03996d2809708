"""A command with subcommands: `plan CONFIG` runs the command itself, `plan explain CONFIG` the subcommand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class CommandWithVerbs(click.Group):
    """If the first word is a verb, the verb runs. Otherwise the command itself parses all words, CONFIG first.

    To name a file that is called like a verb, give its path: `plan ./diff`.
    """

    allow_extra_args = False
    allow_interspersed_args = True

    def make_context(self, info_name: str | None, args: list[str], parent: click.Context | None = None,
                     **extra: Any) -> click.Context:
        verb = args[0] if args else ""
        if verb not in self.commands:
            return super().make_context(info_name, args, parent, **extra)
        try:
            return self.commands[verb].make_context(f"{info_name} {verb}", args[1:], parent, **extra)
        except click.UsageError as error:
            if Path(verb).is_file():
                here = f"megatron-rl {info_name} ./{verb}"
                raise click.UsageError(f"{error.format_message()} (for the file {verb}: {here})", error.ctx) from error
            raise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = click.Command.parse_args(self, ctx, args)
        word = ctx.params.get("config", "")
        if word in self.commands and not Path(word).is_file():
            raise click.UsageError(f"the command comes first: {ctx.command_path} {word} ...", ctx)
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        return click.Command.invoke(self, ctx)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, " ".join(click.Command.collect_usage_pieces(self, ctx)))
        formatter.write_usage(ctx.command_path, "COMMAND ...", prefix=" " * len("Usage: "))
