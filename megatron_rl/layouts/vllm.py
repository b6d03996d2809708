"""The rollout side's layout, traced from vLLM's own weight loaders, without a table per model.

`model.load_weights` runs with meta tensors while a dispatch mode watches. Views cost nothing and are followed by
storage identity. A `copy_` into a live parameter becomes a tile, a `fill_` becomes padding, and nothing is written.
Anything that is not a plain copy of a box (a transpose, a cast, a sum) raises `LayoutError`. A layout is therefore
right or absent, never silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.layouts.boxes import NotABox, box_text, first_overlap, local_box, subtract
from megatron_rl.layouts.tiles import CanonicalTensor, ParamLayout, Tile, contiguous_stride, some


class LayoutError(RuntimeError):
    """vLLM's loading of this model cannot be expressed as tiles of live parameters."""


@dataclass(frozen=True)
class Padding:
    """A region of a local parameter that vLLM's loader fills with a constant (padded vocabulary rows)."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    value: float


@dataclass(frozen=True)
class TracedLayout:
    layouts: tuple[ParamLayout, ...]
    """One layout per live parameter, by its name in `model.named_parameters()`. Tied parameters appear once."""
    padding: tuple[Padding, ...]
    unused: tuple[str, ...]
    """Canonical tensors that this rank does not use (a tied head, or another rank's tensors)."""

    def padded_elements(self) -> dict[str, int]:
        """Parameter name -> number of elements that its loader fills with a constant."""
        counts: dict[str, int] = {}
        for pad in self.padding:
            counts[pad.name] = counts.get(pad.name, 0) + prod(pad.shape)
        return counts


def trace_layout(model: nn.Module, canonical: Sequence[CanonicalTensor], dtype: torch.dtype) -> TracedLayout:
    """Trace which boxes of which canonical tensors vLLM's loader copies where, for this rank's model.

    Args:
        model: a live model or one built on the meta device. It is left unchanged.
        canonical: names and shapes of the checkpoint's tensors.
        dtype: type of the checkpoint's tensors.

    Raises:
        LayoutError: a parameter is empty, an element is neither loaded nor padded, a loader does more than copy, or a
            buffer would keep a dummy value (`_check_buffers`).
    """
    parameters = dict(model.named_parameters())
    assert_not_empty(parameters)
    strided = [name for name, parameter in parameters.items() if not parameter.is_contiguous()]
    if strided:
        raise LayoutError(f"live parameters are not contiguous: {some(strided)}")
    _check_buffers(model)
    recorder = _Recorder(parameters, dict(model.named_buffers()))
    with torch.no_grad(), recorder:
        cast(Callable, model.load_weights)(iter(recorder.meta_tensor(tensor, dtype) for tensor in canonical))
    recorder.check_storages(parameters)

    layouts = tuple(ParamLayout(name, tuple(parameter.shape), tuple(recorder.tiles[name]))
                    for name, parameter in parameters.items())
    for layout in layouts:
        _check_filled(layout, [pad for pad in recorder.padding if pad.name == layout.name])
    used = {tile.tensor for layout in layouts for tile in layout.tiles}
    return TracedLayout(layouts, tuple(recorder.padding), tuple(t.name for t in canonical if t.name not in used))


def assert_not_empty(parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model whose weights were packed after loading, because writes to its parameters would have no effect."""
    empty = [name for name, parameter in parameters.items() if parameter.numel() == 0]
    if empty:
        raise LayoutError(f"{len(empty)} live parameters are empty (packed after loading): {some(empty)}")


def _check_buffers(model: nn.Module) -> None:
    """Refuse a buffer whose value only a checkpoint can provide, because a sync writes parameters.

    A buffer outside the state dict is computed from the configuration when the model is built (rotary tables). Those of
    a layer that vLLM processes after every load are set then (scales of the KV cache and of quantised weights). Any
    other is in the checkpoint, and an engine that started with dummy weights has noise there.
    """
    unset = [f"{name}.{buffer}".lstrip(".") for name, module in model.named_modules()
             for buffer, value in module._buffers.items()
             if value is not None and buffer not in module._non_persistent_buffers_set and not _processed(module)]
    if unset:
        raise LayoutError(f"no tensor of the trainer goes into {some(unset)}: these buffers are part of vLLM's "
                          "checkpoint, and a sync writes only parameters")


def _processed(module: nn.Module) -> bool:
    return any(hasattr(owner, "process_weights_after_loading")
               for owner in (module, getattr(module, "quant_method", None)))


def write_padding(parameters: Mapping[str, torch.Tensor], padding: Iterable[Padding]) -> None:
    """Fill padded regions as vLLM's loader would. An engine started with dummy weights has noise there."""
    for pad in padding:
        parameter = parameters[pad.name].detach()
        parameter.as_strided(pad.shape, pad.stride, parameter.storage_offset() + pad.offset).fill_(pad.value)


def encode_layout(layout: ParamLayout) -> list:
    """The layout as lists, strings and integers, for vLLM's msgpack RPC. `decode_layout` is the inverse."""
    return [layout.name, list(layout.shape), [[t.tensor, list(t.start), list(t.shape), list(t.stride), t.offset]
                                              for t in layout.tiles]]


def decode_layout(plain: list) -> ParamLayout:
    name, shape, tiles = plain
    return ParamLayout(name, tuple(shape), tuple(
        Tile(tensor, tuple(start), tuple(extent), tuple(stride), offset)
        for tensor, start, extent, stride, offset in tiles))


class _Recorder(TorchDispatchMode):
    """Follows source and destination storages through views and turns writes into tiles."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._buffers = {_storage(buffer): name for name, buffer in buffers.items()}
        self.tiles: dict[str, list[Tile]] = {name: [] for name in parameters}
        self.padding: list[Padding] = []
        self._destinations = {_storage(p): (name, p) for name, p in parameters.items()}
        self._sources: dict[int, CanonicalTensor] = {}
        self._alive: list[torch.Tensor] = []

    def meta_tensor(self, canonical: CanonicalTensor, dtype: torch.dtype) -> tuple[str, torch.Tensor]:
        tensor = torch.empty(canonical.shape, dtype=dtype, device="meta")
        self._sources[_storage(tensor)] = canonical
        self._alive.append(tensor)               # or the next tensor would get the identity of a freed storage
        return canonical.name, tensor

    def check_storages(self, parameters: Mapping[str, torch.Tensor]) -> None:
        moved = [name for name, p in parameters.items() if _storage(p) not in self._destinations]
        if moved:
            raise LayoutError(f"loading replaced the storage of {some(moved)}")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.is_mutable and isinstance(args[0], torch.Tensor):
            target = self._destinations.get(_storage(args[0]))
            if target is not None:
                self._write(function, target, args)
                return args[0]
            buffer = self._buffers.get(_storage(args[0]))
            if buffer is not None:
                raise LayoutError(f"vLLM's loader writes into the buffer {buffer}, and a sync writes only parameters")
        return function(*args, **(kwargs or {}))

    def _write(self, function, target: tuple[str, torch.Tensor], args: tuple) -> None:
        name, parameter = target
        view = args[0]
        operation = function.overloadpacket.__name__
        offset = view.storage_offset() - parameter.storage_offset()
        if operation in ("fill_", "zero_"):
            value = float(args[1]) if operation == "fill_" else 0.0
            self.padding.append(Padding(name, tuple(view.shape), tuple(view.stride()), offset, value))
            return
        if operation != "copy_":
            raise LayoutError(f"vLLM's loader applies {operation} to {name}; only copies can be expressed as tiles")
        source = args[1]
        canonical = self._sources.get(_storage(source))
        if canonical is None:
            raise LayoutError(f"vLLM's loader computes what it copies into {name}: not a view of a checkpoint tensor")
        if source.dtype != view.dtype:
            raise LayoutError(f"{name} is {view.dtype}, but {canonical.name} of the checkpoint is {source.dtype}")
        start = _box_start(canonical.shape, source)
        if start is None or tuple(source.shape) != tuple(view.shape):
            raise LayoutError(f"what vLLM's loader copies from {canonical.name} into {name} is not a box of it")
        self.tiles[name].append(Tile(canonical.name, start, tuple(view.shape), tuple(view.stride()), offset))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _box_start(shape: tuple[int, ...], view: torch.Tensor) -> tuple[int, ...] | None:
    """Start of the box seen by `view` in a contiguous tensor of `shape`; None if the view is not a box."""
    if view.dim() != len(shape):
        return None
    strides = contiguous_stride(shape)
    if any(n > 1 and actual != expected
           for n, actual, expected in zip(view.shape, view.stride(), strides, strict=True)):
        return None
    rest, start = int(view.storage_offset()), []
    for stride in strides:
        at, rest = divmod(rest, stride)
        start.append(at)
    inside = all(a + n <= total for a, n, total in zip(start, view.shape, shape, strict=True))
    return tuple(start) if inside else None


def _check_filled(layout: ParamLayout, padding: list[Padding]) -> None:
    """Check that every element of the parameter is loaded once or padded: boxes that are disjoint, and fill it."""
    regions: tuple[Tile | Padding, ...] = (*layout.tiles, *padding)
    try:    # a rank without padded rows fills none, behind its last row
        boxes = [local_box(layout.shape, region) for region in regions if prod(region.shape)]
    except NotABox as error:
        raise LayoutError(f"what vLLM's loader writes into {layout.name} {error}") from error
    twice = first_overlap(boxes)
    if twice:
        raise LayoutError(f"vLLM's loading writes {layout.name} more than once at {box_text(twice)}")
    missing = prod(layout.shape) - sum(prod(shape) for _, shape in boxes)
    if missing:
        whole = (0,) * len(layout.shape), layout.shape
        raise LayoutError(f"vLLM's loading leaves {missing} of {prod(layout.shape)} elements of {layout.name} unset, "
                          f"such as {box_text(subtract(whole, boxes)[0])}")
