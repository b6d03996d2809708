"""`megatron-rl config`: show, explain, search."""

from __future__ import annotations

import click

from launch.cli import options


@click.group()
def command() -> None:
    """Show a configuration, or explain its keys."""


@command.command()
@options.config_and_overrides
@click.option("--json", "as_json", is_flag=True, help="Print JSON: path, config, sources.")
def show(config: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print every value of CONFIG after the overrides, and where each was set.

    The last column is the line of the file, the override, or `default`.
    """
    from launch.config import show as shown
    from launch.config.load import load_config

    loaded = load_config(config, overrides)
    click.echo(shown.as_json(loaded) if as_json else shown.as_text(loaded))


@command.command()
@click.argument("key", metavar="KEY")
@click.argument("config", type=click.Path(), metavar="[CONFIG]", required=False)
@options.overrides
@options.as_json
def explain(key: str, config: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Explain KEY: type, default and documentation. With CONFIG, also its value and where that is set.

    KEY is a dotted key (trainer.tp), a section (trainer.optimizer), or the last part alone if it is unambiguous. If
    the value is auto, the planner's choice is shown.
    """
    import json

    from launch.config import reference
    from launch.config.load import load_config
    from launch.errors import UserError

    found, values, note = reference.find(key), {}, ""
    if config is not None:
        loaded = load_config(config, overrides)
        values = reference.resolved(found, key, loaded, {})
        if any(value.value == "auto" for value in values.values()):
            from launch.planner.prepare import prepare
            try:
                values = reference.resolved(found, key, loaded, prepare(config, overrides).plan.chosen)
            except UserError as error:
                note = f"auto is not resolved, because there is no plan: {error.what}"
    entry, inside = reference.entry(found), reference.members(found)
    if as_json:
        document = {**entry.as_json(), "members": [each.key for each in inside], "note": note,
                    "values": {dotted: vars(value) for dotted, value in values.items()}}
        click.echo(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        click.echo(reference.as_text(entry, inside, values, note))


@command.command()
@click.argument("words", nargs=-1, required=True, metavar="WORD...")
@options.as_json
def search(words: tuple[str, ...], as_json: bool) -> None:
    """List the keys whose name or documentation contains every WORD. Other frameworks' names count too."""
    import json

    from launch.config import reference
    from launch.errors import UserError

    found = reference.search(words)
    if as_json:
        click.echo(json.dumps([each.as_json() for each in found], indent=1, ensure_ascii=False))
    elif found:
        click.echo("\n".join(reference.list_text(found, whole=True)))
    else:
        raise UserError(f"no key has {' and '.join(words)} in its name or documentation",
                        where="megatron-rl config search", fix="use fewer or shorter words, or see docs/config.md")
