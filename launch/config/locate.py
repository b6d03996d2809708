"""Finds the files that a configuration names.

Relative paths are relative to the working directory, like the configuration's own path on the command line. Every
message shows the absolute path.
"""

from __future__ import annotations

from pathlib import Path

from launch.config.load import LoadedConfig
from launch.errors import UserError

DATA_SUFFIXES = (".jsonl", ".parquet")


def model_folder(loaded: LoadedConfig) -> Path:
    """The folder `model.path`. Raises UserError if it does not exist."""
    folder = Path(loaded.config.model.path)
    if not folder.is_dir():
        kind = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UserError(f"the model folder {folder} {kind}",
                        where=f"{loaded.where('model.path')}: {folder.absolute()}",
                        fix="set model.path to a Hugging Face model folder (nothing is downloaded); "
                            "`megatron-rl models --help` lists the models that this project can make")
    return folder


def data_file(loaded: LoadedConfig, key: str) -> Path:
    """The file of `data.train` or `data.eval`. Raises UserError if it is missing, empty or of another format."""
    file = Path(loaded.value(key))
    where = f"{loaded.where(key)}: {file.absolute()}"
    if not file.is_file():
        kind = "is a folder" if file.is_dir() else "does not exist"
        raise UserError(f"the data file {file} {kind}", where=where,
                        fix="give a JSONL or Parquet file, relative to the working directory or absolute")
    if file.suffix not in DATA_SUFFIXES:
        raise UserError(f"the data file {file} has the suffix {file.suffix or 'none'!r}", where=where,
                        fix=f"use {' or '.join(DATA_SUFFIXES)}")
    if file.stat().st_size == 0:
        raise UserError(f"the data file {file} is empty", where=where, fix="write at least one prompt, one per line")
    return file


def check_data_files(loaded: LoadedConfig) -> None:
    """Check that the data files of a run exist. Raises UserError for the first that does not."""
    data_file(loaded, "data.train")
    if loaded.config.data.eval is not None:
        data_file(loaded, "data.eval")
