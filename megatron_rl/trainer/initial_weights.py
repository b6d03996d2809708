"""Weights drawn from a seed, equal for every parallel layout.

Each Hugging Face tensor has its own generator, seeded by the run's seed and the tensor's name. A rank draws the tensors
that it holds a part of, one at a time, and keeps its tiles. Megatron's own initialiser draws per rank, so each TP and
PP would give another model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megatron_rl.layouts.hf_read import check_parameters
from megatron_rl.layouts.tiles import CanonicalTensor, ParamLayout, Tile, tile_view
from megatron_rl.trainer.rng import derived_seed


def draw_canonical(tensor: CanonicalTensor, seed: int, std: float) -> Tensor:
    """float32 on the CPU, by Hugging Face's rule for Llama and Qwen (`PreTrainedModel._init_weights`): normal with
    `initializer_range` for matrices, 1 for norms, 0 for biases."""
    if tensor.name.endswith("norm.weight"):
        return torch.ones(tensor.shape)
    if tensor.name.endswith(".bias"):
        return torch.zeros(tensor.shape)
    generator = torch.Generator().manual_seed(derived_seed(seed, "weights", tensor.name))
    return torch.empty(tensor.shape).normal_(0.0, std, generator=generator)


@torch.no_grad()
def draw_layout(canonical: Iterable[CanonicalTensor], layouts: Iterable[ParamLayout],
                parameters: Mapping[str, Tensor], seed: int, std: float) -> None:
    """Fill `parameters` in place with their parts of the drawn tensors. Padding becomes zero.

    Args:
        canonical: `canonical_tensors(architecture)`.
        layouts: this rank's layouts.
        parameters: name -> tensor for exactly the names in `layouts`, of any dtype, on any device.
        std: the architecture's `initializer_range`.
    """
    layouts = list(layouts)
    check_parameters(layouts, parameters)
    places: dict[str, list[tuple[Tensor, Tile]]] = defaultdict(list)
    for layout in layouts:
        parameters[layout.name].zero_()
        for tile in layout.tiles:
            places[tile.tensor].append((parameters[layout.name], tile))
    for tensor in canonical:
        if tensor.name not in places:
            continue
        whole = draw_canonical(tensor, seed, std)
        for parameter, tile in places[tensor.name]:
            tile_view(parameter, tile).copy_(whole[tile.slices])
