"""Every command in the pages here and in docs/ exists and takes the arguments that the page gives it; every link leads
somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from launch.cli.main import CONTEXT, cli, main
from launch.planner.prepare import prepare
from launch.slurm.sweep_points import points

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
RUN_FOR_REAL = ("config", "plan", "validate")
MADE = {"runs/tiny/hf/step-000100": "configs/tiny/model"}
"""A folder that an earlier command of a page makes -> one with the same config."""
MINUTES = ["plan", "accuracy"]
"""Run by tests/planner/test_accuracy.py, with less to do."""


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of each line of an indented or fenced block that starts with one of our commands."""
    found = {}
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            text = line.strip().removeprefix("$ ")
            if not (line.startswith("    ") or line.startswith("megatron-rl ") or line.startswith("make ")):
                continue
            if text.startswith(("megatron-rl ", "make ")):
                words = tuple(shlex.split(text, comments=True))
                found.setdefault(words, page.name)
    return [(page, list(words)) for words, page in found.items()]


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda value: value if isinstance(value, str)
                         else " ".join(value))
def test_command(page, words, capsys, tmp_path):
    if words[0] == "make":
        done = subprocess.run([*words[:1], "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True,
                              check=False)
        assert done.returncode == 0, done.stderr
        return
    context = click.Context(cli, **CONTEXT)  # click keeps a command's help option from the first context it sees
    name, command, rest = cli.resolve_command(context, words[1:])
    command.make_context(name, rest, parent=context)  # refuses unknown options and missing arguments
    if name in RUN_FOR_REAL and words[1:3] != MINUTES:
        assert main(words[1:]) == 0, capsys.readouterr().err
    if name == "launch" and "slurm" in words:    # up to the script, which needs no Slurm
        dry = [*words[1:], *(["--dry-run"] if "--dry-run" not in words else []), f"run.dir={tmp_path}"]
        assert main(dry) == 0, capsys.readouterr().err
    if name == "launch" and Path(words[2]).parent.name != "135m":  # its model folder is made by a command of its own
        overrides = [word for word in words[3:] if "=" in word]
        for made, same in MADE.items():
            overrides = [word.replace(made, same) for word in overrides]
        for each in [point.words for point in points(overrides, "run")] if "--sweep" in words else [overrides]:
            prepare(words[2], each, "cpu")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
