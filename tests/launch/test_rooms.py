"""The rooms of `launch/` keep their order, and nothing imports in a circle: read from the import statements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.imports import modules_of

ROOT = Path(__file__).parents[2]
ORDER = ("ground", "files", "model", "config", "plan", "coefficients", "cluster", "run", "fabric", "planner",
         "accuracy", "slurm", "health", "report", "runtime", "cli")
"""A room imports only from itself and from the rooms before it. Ground: the modules that lie in `launch/` itself."""

Sources = Mapping[str, str]
"""Module -> text."""
Imports = Mapping[str, set[str]]
"""Module -> the modules of the same sources that it imports, in functions too."""


def test_no_room_imports_a_later_one(imports: Imports) -> None:
    assert not list(against_the_order(imports))


def test_every_room_has_its_place(imports: Imports) -> None:
    assert {room(module) for module in imports if module.startswith("launch.")} == set(ORDER)


def test_contributing_has_this_order() -> None:
    page = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    assert f"the modules in launch/ itself, {', '.join(ORDER[1:])}" in page


def test_the_design_page_lists_every_folder_in_this_order() -> None:
    tree = (ROOT / "docs/design.md").read_text(encoding="utf-8").partition("    launch/\n")[2].partition("\n\n")[0]
    listed = {package: re.findall(r"^      (\w+)/ ", part, re.MULTILINE)
              for package, part in zip(("launch", "megatron_rl"), tree.split("    megatron_rl/\n"), strict=True)}
    assert listed["launch"] == list(ORDER[1:])
    folders = {path.parent.name for path in (ROOT / "megatron_rl").glob("*/__init__.py")}
    assert sorted(listed["megatron_rl"]) == sorted(folders)


def test_no_circle_of_modules(imports: Imports) -> None:
    assert not circle(imports)


def test_no_circle_of_packages_in_megatron_rl(imports: Imports) -> None:
    assert not circle(packages(imports, "megatron_rl"))


def test_an_import_of_a_later_room_is_found() -> None:
    imports = imports_of({"launch.run.find": "def f():\n    from launch.report.lines import wrap",
                          "launch.report.lines": "", "launch.ports": "import launch.files.lock",
                          "launch.files.lock": "from launch import ports",
                          "launch.cli.main": "import launch.ports", "launch.__main__": "import launch.cli.main"})
    assert list(against_the_order(imports)) == ["launch.ports (ground) imports launch.files.lock (files)",
                                                "launch.run.find (run) imports launch.report.lines (report)"]


def test_an_import_for_annotations_only_is_none() -> None:
    guarded = "if TYPE_CHECKING:\n    from launch.b import B\nelse:\n    from launch.c import B"
    assert imports_of({"launch.a": guarded, "launch.b": "", "launch.c": ""})["launch.a"] == {"launch.c"}


def test_a_circle_is_found() -> None:
    texts = {"megatron_rl.data.a": "import megatron_rl.rollout.b", "megatron_rl.rollout.b": "import megatron_rl.data.c",
             "megatron_rl.data.c": ""}
    assert not circle(imports_of(texts))
    assert set(circle(packages(imports_of(texts), "megatron_rl"))) == {"megatron_rl.data", "megatron_rl.rollout"}
    texts["megatron_rl.data.c"] = "from megatron_rl.data import a"
    assert set(circle(imports_of(texts))) == set(texts)


@pytest.fixture(scope="module")
def imports() -> Imports:
    files = [file.relative_to(ROOT) for package in ("launch", "megatron_rl") for file in (ROOT / package).rglob("*.py")]
    return imports_of({".".join(file.with_suffix("").parts).removesuffix(".__init__"):
                       (ROOT / file).read_text(encoding="utf-8") for file in files})


def imports_of(sources: Sources) -> Imports:
    return {module: modules_of(text, sources) - {module} for module, text in sources.items()}


def room(module: str) -> str:
    """`launch.planner.time.step` is in `planner`. `launch.__main__` is the command's other name."""
    if module == "launch.__main__":
        return "cli"
    parts = module.split(".")
    return parts[1] if len(parts) > 2 or parts[1] in ORDER else "ground"


def against_the_order(imports: Imports) -> Iterator[str]:
    for module, targets in sorted(imports.items()):
        for target in sorted(targets):
            if not (module.startswith("launch.") and target.startswith("launch.")):
                continue
            here, there = room(module), room(target)
            if ORDER.index(there) > ORDER.index(here):
                yield f"{module} ({here}) imports {target} ({there})"


def packages(imports: Imports, top: str) -> Imports:
    """The packages directly below `top`, and its own modules, and what they import of one another."""
    found: dict[str, set[str]] = {}
    for module, targets in imports.items():
        here = ".".join(module.split(".")[:2])
        theirs = {".".join(target.split(".")[:2]) for target in targets if target.startswith(f"{top}.")}
        if module.startswith(f"{top}."):
            found.setdefault(here, set()).update(theirs - {here})
    return found


def circle(imports: Imports) -> list[str]:
    """One circle, in the order of its imports; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []
