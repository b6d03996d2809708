"""Simulated nodes whose faults are put in at the adapter (`launch.health.simulated`), and what a job expects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.health.check import Check
from launch.health.expected import Expected
from launch.health.node import CheckContext, check_node
from launch.health.simulated import load

H100X8 = Expected(gpus=8, gpu_kind="H100-SXM-80GB", nics=8, nic_gbit_per_s=400, nvlink=True, cpus=96)
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.fixture
def fleet(tmp_path: Path) -> Callable[..., dict[str, list[Check]]]:
    """`fleet(4, {"n2": {"missing": [5]}})`: the findings of n1 to n4."""
    def make(count: int, faults: dict | None = None, *, default: dict | None = None, expected: Expected = H100X8,
             environment: dict[str, str] = ENVIRONMENT) -> dict[str, list[Check]]:
        file = tmp_path / "hardware.json"
        file.write_text(json.dumps({"default": {"limits": {"nofile": 1_000_000}, **(default or {})},
                                    "nodes": faults or {}}))
        return {node: check_node(CheckContext(node, expected, environment=environment, machine=load(file, node)))
                for node in (f"n{index}" for index in range(1, count + 1))}
    return make


def named(checks: list[Check], name: str) -> Check:
    """The one check of this name."""
    found = [check for check in checks if check.name == name]
    assert len(found) == 1, f"{name} is there {len(found)} times: {[check.name for check in checks]}"
    return found[0]


def bad(checks: list[Check]) -> dict[str, str]:
    """name -> severity of everything that is not ok."""
    return {check.name: check.severity for check in checks if check.severity != "ok"}
