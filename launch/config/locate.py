"""Finds the files that a configuration names.

Relative paths are relative to the working directory, like the configuration's own path on the command line. Every
message shows the absolute path.
"""

from __future__ import annotations

from pathlib import Path

from launch.config.load import LoadedConfig
from launch.errors import UserError
from launch.model.architecture import Architecture
from launch.model.folder import check_model_folder
from launch.model.tokenizer import check_same_ids

DATA_SUFFIXES = (".jsonl", ".parquet")
TEACHER = "algorithm.distillation.teacher"


def model_folder(loaded: LoadedConfig, key: str = "model.path") -> Path:
    """The folder `model.path`, or that of the teacher. Raises UserError if it does not exist."""
    folder = Path(loaded.value(key))
    if not folder.is_dir():
        kind = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UserError(f"the model folder {folder} {kind}",
                        where=f"{loaded.where(key)}: {folder.absolute()}",
                        fix=f"set {key} to a Hugging Face model folder (nothing is downloaded); "
                            "`megatron-rl models --help` lists the models that this project can make")
    return folder


def check_model_files(loaded: LoadedConfig) -> Architecture:
    """Check what a run reads of the policy and of its teacher: complete weights, and the same token ids.

    Returns:
        The policy's architecture.

    Raises:
        UserError: a folder is missing, incomplete or damaged, or the tokenizers differ.
    """
    folder, config = model_folder(loaded), loaded.config
    architecture = check_model_folder(folder, weights=config.model.init == "load",
                                      where=f"{loaded.where('model.path')}: {folder.absolute()}")
    if config.algorithm.distillation.teacher is not None:
        teacher = model_folder(loaded, TEACHER)
        where = f"{loaded.where(TEACHER)}: {teacher.absolute()}"
        check_model_folder(teacher, where=where)
        check_same_ids(folder, teacher, where)
    return architecture


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
