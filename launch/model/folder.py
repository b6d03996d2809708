"""Checks that a folder is a complete Hugging Face model that can be trained, with the standard library only."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from launch.errors import UserError, nearest
from launch.model.architecture import Architecture, tensor_shapes
from launch.model.hf_config import from_hf_config

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
DTYPE_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8,
              "U16": 16, "U32": 32, "U64": 64, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8}
TRAINABLE_DTYPES = ("F32", "BF16", "F16")


def check_model_folder(path: str | Path, *, weights: bool = True, where: str | None = None) -> Architecture:
    """The architecture of a model folder. The folder needs a config.json of a supported architecture, a tokenizer and,
    with `weights`, complete safetensors: every shard undamaged and every tensor with its shape.

    Only headers are read, which takes milliseconds at any size. `where` is the key with the path, for messages. Raises
    UserError.
    """
    folder = Path(path)
    where = where or f"model.path: {folder}"
    _check_folder(folder, where)
    architecture = from_hf_config(folder)
    if weights:
        _check_tensors(folder, tensor_shapes(architecture), _read_shapes(folder, where), where)
    return architecture


def read_safetensors_header(file: Path) -> dict[str, dict]:
    """Name -> {dtype, shape, data_offsets} of a safetensors file, checked against the file size.

    The format is an 8-byte little-endian length, a JSON header, and the data. Raises ValueError with the defect.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise ValueError(f"it has {size} bytes, too few for a safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"its header is said to have {length} bytes, but the file has {size}")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            broken = [name for name, entry in header.items() if not _is_consistent(entry)]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError("its header is not valid") from error
    if broken:
        raise ValueError(f"the offsets of {broken[0]} do not match its shape")
    if 8 + length + end != size:
        raise ValueError(f"it has {size} bytes, but its header says {8 + length + end}")
    return header


def _is_consistent(entry: dict) -> bool:
    elements = 1
    for dimension in entry["shape"]:
        elements *= dimension
    start, end = entry["data_offsets"]
    bits = DTYPE_BITS.get(entry["dtype"])
    return 0 <= start <= end and (bits is None or elements * bits == 8 * (end - start))


def _check_folder(folder: Path, where: str) -> None:
    if not folder.is_dir():
        near = nearest(folder.name, (path.name for path in folder.parent.glob("*") if path.is_dir()))
        raise UserError(f"the model folder {folder} does not exist", where=where,
                        fix=f"did you mean {folder.parent / near}?" if near else
                        "give the folder with config.json; `megatron-rl models get smollm2-135m` makes the small model "
                        "of the examples")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json", where=where, fix="give a Hugging Face model folder")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{folder} holds no tokenizer (no tokenizer.json)", where=where,
                        fix="copy the tokenizer files of the model into the folder")


def _read_shapes(folder: Path, where: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of all shards."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in _shard_names(folder, where):
        try:
            header = read_safetensors_header(folder / name)
        except ValueError as error:
            raise UserError(f"{folder / name} is truncated or damaged: {error}", where=where,
                            fix="copy or download the file again") from error
        for tensor, entry in header.items():
            if entry["dtype"] not in TRAINABLE_DTYPES:
                raise UserError(f"{tensor} in {folder / name} has type {entry['dtype']}", where=where,
                                fix=f"use weights in one of {', '.join(TRAINABLE_DTYPES)}")
            shapes[tensor] = tuple(entry["shape"])
    return shapes


def _shard_names(folder: Path, where: str) -> list[str]:
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (folder / INDEX).is_file():
        others = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f" (found {', '.join(others)})" if others else ""
        raise UserError(f"{folder} holds neither {WEIGHTS} nor {INDEX}{found}", where=where,
                        fix="use safetensors weights, or model.init=random for a policy from random weights")
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / INDEX} is not an index of safetensors", where=where,
                        fix="copy the file again") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{len(missing)} of {len(names)} weight files are missing in {folder}, the first is "
                        f"{missing[0]}", where=where, fix="copy or download the missing files")
    return names


def _check_tensors(folder: Path, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]],
                   where: str) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        raise UserError(f"{len(missing)} of {len(expected)} tensors are missing in {folder}, the first is "
                        f"{missing[0]}", where=where, fix="copy or convert the model again; config.json and the "
                        "weights may belong to different models")
    for name, shape in expected.items():
        if found[name] != shape:
            raise UserError(f"{name} in {folder} has shape {list(found[name])}, but config.json gives {list(shape)}",
                            where=where,
                            fix="config.json and the weights belong to different models: copy both again")
