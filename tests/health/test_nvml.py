"""The real adapter: that it speaks the installed nvidia-ml-py, and what it says without a driver."""

from __future__ import annotations

import ast
import inspect

import pytest

from launch.cluster import nvml
from launch.health.checks import gpus
from launch.health.expected import Expected
from launch.health.machine import RealMachine


def test_every_name_exists_in_the_installed_package():
    """It cannot run on a machine without a GPU, so at least each function and constant that it names must exist."""
    pynvml = pytest.importorskip("pynvml")
    tree = ast.parse(inspect.getsource(nvml))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name) and node.value.id in ("nvml", "pynvml")}
    used |= {name for name, _ in nvml._REASONS}
    assert len(used) > 25 and [name for name in sorted(used) if not hasattr(pynvml, name)] == []


def test_nothing_is_changed():
    """Read only: no function of NVML that sets, resets or clears anything is named."""
    assert not [word for word in ("Set", "Reset", "Clear") if f"nvmlDevice{word}" in inspect.getsource(nvml)]


def test_without_a_driver():
    report = nvml.read_gpus()
    if report.gpus:
        pytest.skip("this machine has GPUs")
    assert report.driver is None and report.error
    [found] = gpus.check(RealMachine(), Expected(gpus=8), {}, None)
    assert found.severity == "critical" and report.error in found.evidence
