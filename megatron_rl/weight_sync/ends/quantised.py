"""Live weights of quantised layers: what vLLM loads into them, and how vLLM makes them of it.

A quantised layer's tensors cannot be written as they arrive, because their type, shape or scale depends on the whole
weight. Its weights arrive in a buffer (`layer_buffers`), in the form in which vLLM loads them. vLLM's layer-wise reload
then builds the layer from the buffer, and the result is copied into the tensors that the engine computes with, whose
addresses do not change. Biases, norms, embedding and head are written in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn

from megatron_rl.layouts.vllm import LayoutError
from megatron_rl.weight_sync.ends.vllm_internals import loader_form, loader_shapes, processed, quantises


class Quantised:
    """The parameters of a loaded model that are written in place, and the layers that are quantised.

    Args:
        model: as loaded by vLLM, with dummy or real weights. It is left unchanged.

    Raises:
        LayoutError: a layer can neither be written in place nor be loaded again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = {name: layer for name, layer in model.named_modules() if _is_reloaded(name, layer)}
        with self.as_loaded():
            parameters = dict(model.named_parameters())
        self.in_place = {name: each for name, each in parameters.items() if not each.is_meta}
        """Parameters that the engine computes with, by name."""
        self.forms = {name: each for name, each in parameters.items() if each.is_meta}
        """Parameters of quantised layers as vLLM loads them, on the meta device."""

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that a sync writes or quantises, by the names of the destination layouts."""
        return {**self.in_place, **self.forms}

    def as_loaded(self) -> AbstractContextManager[None]:
        """Context in which the model has the parameters that vLLM's loaders fill, with those of quantised layers on the
        meta device, for `trace_layout`."""
        return loader_form(self._layers.values())

    def quantise(self, name: str, values: Mapping[str, torch.Tensor]) -> None:
        """Build a layer. The engine must not compute meanwhile. All TP ranks must build the same layers in the same
        order.

        Args:
            values: the layer's parameters, by their names in `forms`. vLLM may change them.

        Raises:
            LayoutError: vLLM made other tensors than when the engine started. Some are then new, some old.
        """
        with processed(self._layers[name], _own(name, values)) as tensors:
            for tensor, (live, made) in tensors.items():
                _check_form(f"{name}.{tensor}", live, made)
                if made is not live:
                    live.data.copy_(made)

    def unlike(self, name: str, values: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of the layer's tensors that differ in any bit from what vLLM makes of `values`. As `quantise`, but
        nothing is changed."""
        wrong = []
        with processed(self._layers[name], _own(name, values)) as tensors:
            for tensor, (live, made) in tensors.items():
                _check_form(f"{name}.{tensor}", live, made)
                if not torch.equal(_bits(live), _bits(made)):
                    wrong.append(f"{name}.{tensor}")
        return wrong


def _own(layer: str, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names that the layer itself has for them."""
    return {name.removeprefix(f"{layer}."): value for name, value in values.items()}


def _is_reloaded(name: str, layer: nn.Module) -> bool:
    shapes = loader_shapes(layer)
    changed = [each for each, shape in shapes.items() if not _same_form(layer._parameters.get(each), shape)]
    if not quantises(layer):
        for each in changed:
            live, loaded = _form(layer._parameters.get(each)), _form(shapes[each])
            raise LayoutError(f"{name}.{each} is {live}, vLLM loads {loaded}, and no quantisation converts one into "
                              "the other: it can neither be written in place nor be quantised again")
        return False
    for each in changed:
        if (kept := layer._parameters.get(each)) is None or kept.numel() == 0:
            raise LayoutError(f"{type(layer.quant_method).__name__} keeps what it makes of {name}.{each} outside the "
                              "layer's parameters: it can neither be written in place nor be quantised again")
    return bool(shapes)


def _same_form(live: torch.Tensor | None, shape: torch.Tensor) -> bool:
    return live is not None and (live.shape, live.dtype, live.stride()) == (shape.shape, shape.dtype, shape.stride())


def _check_form(name: str, live: torch.Tensor, made: torch.Tensor | None) -> None:
    if made is None or (made.shape, made.dtype) != (live.shape, live.dtype):
        raise LayoutError(f"vLLM quantised {name} to {_form(made)}, but the engine started with {_form(live)}")


def _form(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)        # a scale may have no dimension
