"""Workloads that the supervisors start once a job is placed, by the `start(context)` of each module."""

from __future__ import annotations

import importlib
from types import ModuleType

from launch import envvars
from launch.config.schema import RunConfig
from launch.run.faults import WORKLOAD


def workload_of(config: RunConfig) -> ModuleType:
    """The rehearsal if the configuration requests it, else the training, or its replacement in a test."""
    own = f"{__name__}.rehearse" if config.run.rehearse else f"{__name__}.train"
    return importlib.import_module(own if config.run.rehearse else envvars.get(WORKLOAD) or own)
