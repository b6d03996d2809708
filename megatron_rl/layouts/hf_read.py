"""Loading a Hugging Face checkpoint through the layouts. A rank reads only the boxes it holds.

safetensors reads slices from a mapped file, so a rank of TP8 x PP4 touches 1/32 of the bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from launch.errors import UserError
from megatron_rl.layouts.megatron import EMBEDDING, HEAD
from megatron_rl.layouts.step_folder import unlike
from megatron_rl.layouts.tiles import CanonicalTensor, ParamLayout, box_slices, tile_view

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LAYER = re.compile(r"model\.layers\.\d+\.")


class CheckpointReader:
    """Reads boxes of the tensors of a Hugging Face folder: one `model.safetensors`, or shards with an index.

    Opening reads only headers. Use it as a context manager, or call `close()`.

    Raises UserError if the folder is missing, has no safetensors, lacks a shard that its index names, or contains a
    truncated file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UserError(f"the model folder {self.folder} does not exist", where="model.path",
                            fix="give a Hugging Face folder with config.json and *.safetensors")
        self._files: dict[Path, safe_open] = {}
        self._file_of = self._locate()
        self.bytes_read = 0

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the mapped files."""
        self._files.clear()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The box [start, start + shape) of tensor `name`, in the file's dtype, on the CPU."""
        try:
            box = self._slice(name)[box_slices(start, shape)]
        except SafetensorError as error:
            raise UserError(f"{self._file_of[name]} cannot be read at tensor {name}: {error}",
                            where=str(self.folder)) from error
        self.bytes_read += box.numel() * box.element_size()
        return box

    def _locate(self) -> dict[str, Path]:
        index, single = self.folder / INDEX_FILE, self.folder / SINGLE_FILE
        if index.is_file():
            return self._locate_shards(index)
        if not single.is_file():
            raise UserError(f"no {SINGLE_FILE} and no {INDEX_FILE} in {self.folder}", where="model.path",
                            fix="save the model with safetensors (save_pretrained does), or start from random "
                                "weights")
        return dict.fromkeys(self._open(single).keys(), single)

    def _locate_shards(self, index: Path) -> dict[str, Path]:
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            located = {name: self.folder / file for name, file in weight_map.items()}
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} is not a safetensors index: {error!r}", where=str(index),
                            fix="download or save the model again") from error
        lacking = sorted({path.name for path in located.values() if not path.is_file()})
        if lacking:
            raise UserError(f"{index.name} names {', '.join(lacking)}, not in the folder", where=str(self.folder),
                            fix="download the missing files")
        for name, path in located.items():
            if name not in self._open(path).keys():
                raise UserError(f"{index.name} says that {path.name} holds {name}, but it does not",
                                where=str(self.folder), fix="download or save the model again")
        return located

    def _open(self, path: Path) -> safe_open:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is truncated or not a safetensors file: {error}", where=str(path),
                                fix="download or save the model again") from error
        return self._files[path]

    def _slice(self, name: str):
        if name not in self._file_of:
            raise self._missing(name)
        return self._open(self._file_of[name]).get_slice(name)

    def _missing(self, name: str) -> UserError:
        if name == HEAD:
            return UserError(f"{self.folder} has no {HEAD}, but its config.json says tie_word_embeddings: false",
                             where="model.path", fix="set tie_word_embeddings to true in config.json if the model "
                                                     "ties them, otherwise save the model again")
        return UserError(f"{self.folder} lacks the tensor {name} ({len(self._file_of)} tensors found)",
                         where="model.path", fix="compare config.json with the checkpoint: layers, biases and q/k "
                                                 "norms follow from it")


@dataclass(frozen=True)
class LoadReport:
    """What one rank read."""

    bytes_read: int
    unused: tuple[str, ...]
    """Tensors of the checkpoint that the architecture does not use (rotary buffers, a tied head, layers beyond the
    configured number)."""


def load_layout(reader: CheckpointReader, canonical: Iterable[CanonicalTensor], layouts: Iterable[ParamLayout],
                parameters: Mapping[str, Tensor]) -> LoadReport:
    """Fill `parameters` in place from the checkpoint, converted to each parameter's dtype. Padding becomes zero.

    Every tensor of `canonical` must be in the checkpoint with its shape, even if this rank holds no part of it, so that
    all ranks refuse a wrong checkpoint together.

    Args:
        canonical: `canonical_tensors(architecture)`.
        layouts: this rank's layouts.
        parameters: name -> tensor, for exactly the names in `layouts`; contiguous, on any device.

    Raises:
        UserError: a tensor is missing or has another shape, a layer has a tensor that the architecture does not know,
            or embeddings are tied and the checkpoint has an `lm_head.weight` that differs from the embedding.
        ValueError: the parameters do not match the layouts.
    """
    canonical, layouts = list(canonical), list(layouts)
    _check_shapes(reader, canonical)
    check_parameters(layouts, parameters)
    unused = reader.names - {tensor.name for tensor in canonical}
    _check_unused(reader, canonical, unused)
    before = reader.bytes_read
    if HEAD in unused:
        _check_tied_head(reader, layouts)
    for layout in layouts:
        parameter = parameters[layout.name]
        if layout.padding:
            parameter.detach().zero_()
        for tile in layout.tiles:
            tile_view(parameter, tile).copy_(reader.read(tile.tensor, tile.start, tile.shape))
    return LoadReport(reader.bytes_read - before, tuple(sorted(unused)))


def check_parameters(layouts: Iterable[ParamLayout], parameters: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `parameters` have the names and shapes of `layouts`."""
    expected = {layout.name: layout.shape for layout in layouts}
    found = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if expected == found:
        return
    wrong = [f"{name}: layout {expected.get(name, 'none')}, model {found.get(name, 'none')}"
             for name in unlike(expected, found)]
    raise ValueError(f"the layouts do not describe this model, {len(wrong)} parameters differ: "
                     + "; ".join(wrong[:5]))


def _check_shapes(reader: CheckpointReader, canonical: Iterable[CanonicalTensor]) -> None:
    for tensor in canonical:
        found = reader.shape(tensor.name)
        if found != tensor.shape:
            raise UserError(f"{tensor.name} has shape {list(found)} in the checkpoint, but {list(tensor.shape)} "
                            f"according to its config.json", where=str(reader.folder),
                            fix="the weights and config.json belong to different models: take both from one source")


def _check_unused(reader: CheckpointReader, canonical: Iterable[CanonicalTensor], unused: Iterable[str]) -> None:
    """Refuse an unused tensor in a layer of the model: the computation would silently drop it."""
    layers = {match[0] for tensor in canonical if (match := _LAYER.match(tensor.name))}
    for name in sorted(unused):
        match = _LAYER.match(name)
        if match and match[0] in layers and not name.endswith("rotary_emb.inv_freq"):
            raise UserError(f"the checkpoint has {name}, which the architecture in config.json has no place for",
                            where=str(reader.folder), fix="check attention_bias, mlp_bias and model_type in "
                                                          "config.json")


def _check_tied_head(reader: CheckpointReader, layouts: Iterable[ParamLayout]) -> None:
    """Check a tied model whose checkpoint has a head: it is harmless if it equals the embedding, otherwise ambiguous.

    Only the rows that this rank holds are compared. Together, the ranks cover the vocabulary."""
    boxes = {tile.box for layout in layouts for tile in layout.tiles if tile.tensor == EMBEDDING}
    for start, shape in sorted(boxes):
        if reader.shape(HEAD) != reader.shape(EMBEDDING) or not torch.equal(
                reader.read(HEAD, start, shape), reader.read(EMBEDDING, start, shape)):
            raise UserError(f"config.json ties the embeddings, but {HEAD} and {EMBEDDING} differ in the checkpoint",
                            where=str(reader.folder),
                            fix="set tie_word_embeddings to false in config.json, or remove lm_head.weight")
