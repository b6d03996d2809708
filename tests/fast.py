"""`make test-fast`: the tests that start no Ray, no engine, no ranks and no Slurm, and take no ten seconds.

Which they are is read from the imports, so that nobody keeps a list: a test is `heavy` if its file, a helper of the
tests or a module of ours that one of them imports leads to `HEAVY`. A test that starts such a thing by a command bears
the mark itself. Should it not: what `tests/no_engines` refuses fails it.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path

import pytest

from tests.imports import imported

ROOT = Path(__file__).parents[1]
HEAVY = ("ray", "vllm", "megatron", "tests.ranks", "tests.slurm_cluster", "tests.job.runner",
         "tests.runtime.played_job")
"""Packages, and modules of the tests that start such things."""
LEFT_OUT = ("heavy", "slow", "slurm", "gpu")
"""Marks."""


def configure() -> None:
    """For this process and all that it starts."""
    folder = str(ROOT / "tests" / "no_engines")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    if not hasattr(sys.modules.get("sitecustomize"), "REMEDY"):     # else Python has read it when it started
        importlib.import_module("tests.no_engines.sitecustomize")


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked; files that are heavy are not even read."""
    chosen = [item for item in items if not any(item.get_closest_marker(mark) for mark in LEFT_OUT)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def is_heavy(module: str) -> bool:
    """Whether its imports, or those of what it imports of this repository, lead to `HEAVY`."""
    return any(name.startswith(tuple(f"{each}." for each in HEAVY)) for name in
               (f"{reached}." for reached in _reached(module)))


@functools.cache
def _reached(module: str) -> frozenset[str]:
    reached: set[str] = set()
    todo = [module]
    while todo:
        if (name := todo.pop()) not in reached:
            reached.add(name)
            todo += _names_in(name)
    return frozenset(reached)


@functools.cache
def _names_in(module: str) -> frozenset[str]:
    """All names that it imports; none for a package that is not ours."""
    path = ROOT.joinpath(*module.split("."))
    file = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
    if module.partition(".")[0] not in ("launch", "megatron_rl", "tests", "benchmarks", "tools") or file is None:
        return frozenset()
    return frozenset(name for names in imported(file.read_text(encoding="utf-8")) for name in names)
