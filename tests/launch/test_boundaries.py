"""House rules: `launch/` is light; one module runs processes, one reads the environment, one asks each of Slurm, NVML
and sysfs."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "megatron", "vllm", "ray", "transformers", "numpy", "megatron_rl")

IMPORT_ALL = f"""
import importlib, importlib.abc, pkgutil, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ImportError(f"launch imports {{name}}")

sys.meta_path.insert(0, Refuse())
import launch
found = pkgutil.walk_packages(launch.__path__, "launch.")
names = [each.name for each in found if not each.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_launch_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True,
                          timeout=patient(120))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 25


def test_the_blocker_blocks():
    """The test above can fail."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL + "\nimport numpy"], cwd=ROOT, capture_output=True,
                          text=True, timeout=patient(120))
    assert done.returncode != 0 and "launch imports numpy" in done.stderr


def test_the_command_starts_without_pydantic_yaml_or_rich():
    """Usage errors and help answer at once: verbs import what they need when they run."""
    code = ("import sys; from launch.cli.main import main; assert main(['--help']) == 0; "
            "print([name for name in ('pydantic', 'yaml', 'rich', 'psutil', 'plotext') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]"


def uses(tree: ast.AST) -> set[str]:
    """Which of the guarded things a module touches."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            if node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv"):
                found.add("environment")
            starts = ("system", "popen", "fork", "exec", "spawn", "posix_spawn")
            if node.attr.startswith(starts):
                found.add("process")
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if "subprocess" in names:
                found.add("process")
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                found.update("environment" for alias in node.names if alias.name in ("environ", "getenv"))
            if "pynvml" in names:
                found.add("NVML")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            found.add("eval")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in ("scontrol", "squeue", "sinfo", "sacct", "scancel"):
                found.add("Slurm's commands")
            if node.value.startswith("/sys/class/infiniband"):
                found.add("RDMA in sysfs")
    return found


@functools.cache
def used_by(module: str) -> set[str]:
    return uses(ast.parse((ROOT / module).read_text(encoding="utf-8")))


MODULES = sorted(file.relative_to(ROOT).as_posix() for package in ("launch", "megatron_rl")
                 for file in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("thing, allowed", [("process", {"launch/processes.py"}),
                                            ("environment", {"launch/envvars.py"}), ("eval", set()),
                                            ("Slurm's commands", {"launch/slurm/client.py"}),
                                            ("NVML", {"launch/cluster/nvml.py"}),
                                            ("RDMA in sysfs", {"launch/cluster/rdma.py"})])
def test_one_module_only(thing, allowed):
    assert {name for name in MODULES if thing in used_by(name)} == allowed
