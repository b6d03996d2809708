"""From the command line's words to a checked plan: the steps that `plan` and `launch` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.cluster import local
from launch.config import locate
from launch.config.checks import check
from launch.config.load import LoadedConfig, load_config
from launch.config.model_folder import check_model_folder
from launch.planner.architecture import from_hf_config
from launch.planner.build import plan
from launch.planner.plan import Architecture, Plan


@dataclass(frozen=True)
class Prepared:
    """A configuration that is complete, checked and planned."""

    loaded: LoadedConfig
    model_folder: Path
    architecture: Architecture
    plan: Plan


def prepare(path: str, words: Sequence[str] = (), device: Literal["auto", "cpu", "gpu"] = "auto", *,
            to_run: bool = False) -> Prepared:
    """Load, check against the model and this machine, and plan.

    Args:
        to_run: also check what only a run needs: tokenizer, complete weights, data files. A plan needs config.json.

    Raises:
        UserError: see the steps.
    """
    loaded = load_config(path, words)
    folder = locate.model_folder(loaded)
    if to_run:
        architecture = check_model_folder(folder, weights=loaded.config.model.init == "load",
                                          where=f"{loaded.where('model.path')}: {folder.absolute()}")
        locate.check_data_files(loaded)
    else:
        architecture = from_hf_config(folder)
    kind = local.device(device)
    count = len(local.gpus()) if kind == "gpu" else 0
    # A plan for GPUs can be made on a machine without any; a run cannot.
    check(loaded, architecture, kind, gpus=count if kind == "gpu" and (to_run or count) else None)
    return Prepared(loaded, folder, architecture, plan(loaded.config, architecture, kind))
