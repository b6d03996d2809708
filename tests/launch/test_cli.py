from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from launch.cli.main import CONTEXT, VERBS
from launch.cli.main import cli as root
from launch.cli.verbs import CommandWithVerbs
from launch.exit_codes import MEANINGS, ExitCode
from tests.patience import patient

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "help.txt"


def all_help() -> str:
    """`--help` of the command and of every verb, at a fixed width."""
    parts = []

    def add(command: click.Command, name: str, parent: click.Context | None) -> None:
        with click.Context(command, info_name=name, parent=parent, terminal_width=100, **CONTEXT) as context:
            parts.append(f"$ {context.command_path} --help\n{command.get_help(context)}\n")
            for verb in command.list_commands(context) if isinstance(command, click.Group) else []:
                if isinstance(command, CommandWithVerbs):       # as its make_context does
                    add(command.get_command(context, verb), f"{name} {verb}", parent)
                else:
                    add(command.get_command(context, verb), verb, context)

    add(root, "megatron-rl", None)
    return "\n".join(parts)


def test_help_is_frozen():
    """A change of the command line is a change of this file, seen in review."""
    # In a process of its own: click keeps a command's help option from the first context that any test gave it.
    script = "from tests.launch.test_cli import all_help; print(all_help(), end='')"
    now = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    before = GOLDEN.read_text(encoding="utf-8")
    difference = "".join(difflib.unified_diff(before.splitlines(True), now.splitlines(True), "golden", "now"))
    assert not difference, f"{difference}\nrefresh: python -m tests.launch.test_cli"


def test_every_verb_has_a_file_of_its_own(cli):
    for verb, (module, line) in VERBS.items():
        assert module == f"launch.cli.{verb}" and line.endswith(".")
        code, out, _ = cli(verb, "--help")
        assert code == 0 and out.startswith(f"Usage: megatron-rl {verb}")


@pytest.mark.parametrize("arguments, fragment", [
    (["nope"], "No such command 'nope'"), (["plan"], "Missing argument 'CONFIG'"),
    (["plan", "trainer.tp=2"], "name a configuration first"),
    (["plan", "x.yaml", "--nope"], "No such option"), (["plan", "x.yaml", "--device", "tpu"], "'tpu' is not one of"),
    (["plan", "x.yaml"], "no configuration file x.yaml"), (["config", "show"], "Missing argument 'CONFIG'")])
def test_usage_errors_are_exit_code_2(cli, arguments, fragment):
    code, out, err = cli(*arguments)
    assert code == 2 and out == "" and fragment in err and "Traceback" not in err


def test_as_a_process(run_yaml):
    """`python -m launch`, as a shell sees it."""
    command = [sys.executable, "-m", "launch", "plan", str(run_yaml), "trainer.tp=3", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == ("error: trainer.tp = 3 does not divide the 8 attention heads\n"
                           "  where: override 'trainer.tp=3', trainer.tp\n  fix:   use trainer.tp = 1, 2 or 4\n")


def test_options_may_stand_between_overrides(run_yaml, cli):
    code, out, err = cli("plan", run_yaml, "trainer.pp=4", "--json", "--device", "cpu", "trainer.dp=2")
    assert code == 0 and '"pp": 4' in out and err == ""


def test_a_reader_that_stops_reading_gets_no_traceback(run_yaml):
    """`megatron-rl config show ... | head`, with a reader that ends at once."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-m", "launch", "config", "show", str(run_yaml)], cwd=ROOT,
                              stdout=writer, stderr=subprocess.PIPE, text=True, timeout=patient(60))
    finally:
        os.close(writer)
    assert done.stderr == ""


def test_version_is_that_of_the_package(cli):
    done = subprocess.run([sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True,
                          timeout=patient(60))
    assert cli("--version") == (0, f"megatron-rl {done.stdout.splitlines()[-1]}\n", "")


def test_exit_codes_are_all_explained():
    assert set(MEANINGS) == set(ExitCode) and len({int(code) for code in ExitCode}) == len(ExitCode)


class TestStop:
    @pytest.fixture
    def runs(self, tmp_path):
        for number in ("1", "2", "10"):
            (tmp_path / "runs" / "small" / "attempts" / number).mkdir(parents=True)
        return tmp_path / "runs"

    def test_writes_into_the_newest_attempt(self, runs, cli):
        code, out, _ = cli("stop", "small", "--dir", runs)
        file = runs / "small" / "attempts" / "10" / "stop"
        assert code == 0 and str(file) in out and file.exists()
        assert not (runs / "small" / "attempts" / "2" / "stop").exists()
        file.unlink()
        assert cli("stop", runs / "small")[0] == 0 and file.exists()

    def test_what_cannot_be_stopped(self, runs, cli):
        code, _, err = cli("stop", "smal", "--dir", runs)
        assert code == 2 and "there is no run 'smal'" in err and "runs here: small" in err
        (runs / "small" / "attempts" / "10" / "outcome.json").write_text("{}")
        code, _, err = cli("stop", "small", "--dir", runs)
        assert code == 2 and "attempt 10 of run 'small' has already ended" in err
        (runs / "new" / "attempts").mkdir(parents=True)
        code, _, err = cli("stop", "new", "--dir", runs)
        assert code == 2 and "has no attempt yet" in err


if __name__ == "__main__":
    GOLDEN.write_text(all_help(), encoding="utf-8")
