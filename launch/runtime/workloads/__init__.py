"""What the supervisors start once a job is placed: each module's `start(context)`."""

from __future__ import annotations

import importlib
from types import ModuleType

from launch import envvars
from launch.config.schema import RunConfig
from launch.run.faults import WORKLOAD


def workload_of(config: RunConfig) -> ModuleType:
    """The rehearsal where the configuration asks for it, else the training, or what a test puts in its place."""
    own = f"{__name__}.rehearse" if config.run.rehearse else f"{__name__}.train"
    return importlib.import_module(own if config.run.rehearse else envvars.get(WORKLOAD) or own)
