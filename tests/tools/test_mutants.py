"""The list of `make mutants` fits the tree, and its tool tells what a test sees from what it does not see."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.fast import ROOT
from tools.mutants.listed import MUTANTS
from tools.mutants.run import Mutant, run


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_applies_and_its_test_exists(mutant: Mutant) -> None:
    assert mutant.apply(ROOT) != (ROOT / mutant.file).read_text(encoding="utf-8")
    file, _, name = mutant.test.partition("::")
    tests = {node.name for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
             if isinstance(node, ast.FunctionDef)}
    assert not name or name.partition("[")[0] in tests


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tiny project under git."""
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef unused():\n    return 1\n")
    (tmp_path / "test_sums.py").write_text("from sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n")
    (tmp_path / "test_wrong.py").write_text("def test_wrong():\n    assert 1 == 2\n")
    (tmp_path / "ignored.txt").touch()
    (tmp_path / ".gitignore").write_text("ignored.txt\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def mutant(old: str, new: str, test: str = "test_sums.py") -> Mutant:
    return Mutant(f"{old} -> {new}", "sums.py", old, new, test)


def test_what_a_test_sees_is_killed_and_everything_else_is_told(tree: Path) -> None:
    before = {path.name: path.read_bytes() for path in tree.glob("*.py")}
    found = list(run([mutant("a + b", "a - b"), mutant("return 1", "return 2"), mutant("a * b", "0"),
                      mutant("return", "yield"), mutant("a + b", "a + b + 0"), mutant("a + b", "a - b")], tree, 2))
    assert [result.verdict for result in found] == ["killed", "SURVIVED", "BROKEN", "BROKEN", "SURVIVED", "killed"]
    assert "assert -1 == 5" in found[0].detail and "0 times" in found[2].detail and "2 times" in found[3].detail
    assert {path.name: path.read_bytes() for path in tree.glob("*.py")} == before


def test_a_module_that_cannot_be_imported_kills_nothing(tree: Path) -> None:
    (result,) = run([mutant("def add(a, b):", "raise ValueError\ndef add(a, b):")], tree, 1)
    assert result.verdict == "BROKEN"


def test_a_test_that_fails_anyway_is_told_before_any_mutant(tree: Path) -> None:
    with pytest.raises(RuntimeError, match="without any mutant: assert 1 == 2"):
        next(run([mutant("a + b", "a - b", "test_wrong.py")], tree, 1))


def test_the_command_lists_and_refuses_words_that_nothing_has() -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "tools.mutants", *words], cwd=ROOT, capture_output=True, text=True)

    assert command("--list", "optimizer.py").stdout.count("megatron_rl/trainer/optimizer.py: ") == len(
        [each for each in MUTANTS if "optimizer.py" in each.file])
    refused = command("no-such-mutant")
    assert refused.returncode == 2 and "no mutant has no-such-mutant" in refused.stderr
