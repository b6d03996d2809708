"""Applies mutants, one at a time, to a copy of the working tree and runs the test that must fail with each."""

from __future__ import annotations

import itertools
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeVar

from tests.patience import measure

Answer = TypeVar("Answer")
Verdict = Literal["killed", "SURVIVED", "BROKEN"]
"""BROKEN says nothing about the test: the mutant no longer applies, or pytest did not run the test."""
OURS = Path(__file__).parents[2]
"""Where this tool is, for its plugin."""
TESTS_FAILED = 1
"""Exit code of pytest. Others (2 to 5) mean that tests could not be collected, found or run."""


@dataclass(frozen=True)
class Mutant:
    """A fault, as one textual change of one file."""

    name: str
    """The fault in words."""
    file: str
    old: str
    """Occurs exactly once in the file."""
    new: str
    test: str
    """What must fail: a file, or the id of a test."""

    def apply(self, root: Path) -> str:
        """The text of the file under `root` with the fault.

        Raises:
            ValueError: `old` does not occur exactly once, or the result is no Python.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has the old text {count} times: adapt the mutant {self.name!r}")
        mutated = text.replace(self.old, self.new)
        try:
            compile(mutated, self.file, "exec")
        except SyntaxError as error:
            raise ValueError(f"the mutant {self.name!r} is no Python: {error}") from error
        return mutated


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    verdict: Verdict
    detail: str
    """Why it was killed, or is broken."""
    seconds: float

    def __str__(self) -> str:
        return f"{self.verdict:8} {self.seconds:5.0f} s  {self.mutant.file}: {self.mutant.name}\n{'':18}{self.detail}"


class Tree:
    """A copy of the working tree (what git knows or does not ignore). Nothing else is ever changed."""

    def __init__(self, source: Path, root: Path) -> None:
        listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=source, check=True,
                                capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (source / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, root / name)
        self.root = root
        self._times = itertools.count(int(time.time()) - 10**6)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Inside, the copy has the fault. Raises ValueError as `Mutant.apply`."""
        path = self.root / mutant.file
        original, mutated = path.read_text(encoding="utf-8"), mutant.apply(self.root)
        try:
            self._write(path, mutated)
            yield
        finally:
            self._write(path, original)

    def test(self, tests: Sequence[str]) -> tuple[int, str]:
        """Exit code of pytest, and the line of its first failure. The environment is that of this Python; packages are
        imported from the copy."""
        search = os.pathsep.join(filter(None, [str(self.root), os.environ.get("PYTHONPATH"), str(OURS)]))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "--tb=no", "--color=no", "--durations=1",
             "--durations-min=9999", "-p", "no:cacheprovider", "-p", "tools.mutants.unshrunk", *tests],
            cwd=self.root, env={**os.environ, "PYTHONPATH": search, "COLUMNS": "200"}, capture_output=True, text=True)
        lines = (done.stdout + done.stderr).splitlines()
        found = next((line for line in lines if line.startswith(("FAILED ", "ERROR"))), "")
        return done.returncode, found.partition(" - ")[2] or found or (lines[-1] if lines else "no output")

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Python takes compiled code for current if time (whole seconds) and size are equal: no two may share both.
        stamp = next(self._times)
        os.utime(path, (stamp, stamp))


Trees = queue.SimpleQueue[Tree]
"""Those that no thread uses."""


def run(mutants: Sequence[Mutant], source: Path, workers: int) -> Iterator[Result]:
    """The results as they come. First, the tests must pass without a fault.

    Raises:
        RuntimeError: one does not, so that its failure would say nothing.
    """
    measure()       # the machine's speed, once
    with TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(workers) as pool:
        trees: Trees = queue.SimpleQueue()
        for number in range(workers):
            trees.put(Tree(source, Path(folder, str(number))))
        tests = sorted({mutant.test for mutant in mutants}, key=lambda test: ("job/" not in test, test))
        shares = [tests[worker::workers] for worker in range(workers)]
        for code, line in pool.map(lambda share: _on_a_tree(trees, lambda tree: tree.test(share)),
                                   filter(None, shares)):
            if code:
                raise RuntimeError(f"without any mutant: {line}")
        yield from pool.map(lambda mutant: _on_a_tree(trees, lambda tree: _result(tree, mutant)), mutants)


def _on_a_tree(trees: Trees, use: Callable[[Tree], Answer]) -> Answer:
    tree = trees.get()
    try:
        return use(tree)
    finally:
        trees.put(tree)


def _result(tree: Tree, mutant: Mutant) -> Result:
    began = time.monotonic()
    try:
        with tree.mutated(mutant):
            code, line = tree.test([mutant.test])
    except ValueError as error:
        return Result(mutant, "BROKEN", str(error), 0.0)
    verdict: Verdict = "killed" if code == TESTS_FAILED else "SURVIVED" if code == 0 else "BROKEN"
    return Result(mutant, verdict, mutant.test if code == 0 else line, time.monotonic() - began)
