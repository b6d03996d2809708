"""Quantised engines: what is received in the loader's form and quantised again equals vLLM's own loading, bit for bit.

vLLM's `fp8_per_channel` (a scale for each output channel, made while it loads) runs on a CPU: all of it is vLLM's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from megatron_rl.layouts.disk_check import read_tiles
from megatron_rl.layouts.tiles import CanonicalTensor
from megatron_rl.layouts.vllm import LayoutError, trace_layout, write_padding
from megatron_rl.weight_sync.ends.quantised import Quantised
from megatron_rl.weight_sync.ends.vllm_internals import offline_model
from tests.rollout.engines import engine_environment
from tests.tiny_models import make_tiny
from tests.weight_sync.receivers import load_as_vllm_does

SCHEME = "fp8_per_channel"
SIZES = dict(vocab_size=321, dtype=torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def _environment():
    with engine_environment():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Biases, a padded vocabulary; before and after an update."""
    return [make_tiny(tmp_path_factory.mktemp("quantised") / "model", "qwen2", seed, **SIZES) for seed in (0, 1)]


@contextmanager
def _loaded(folder: Path, tp: int, rank: int, weights: Path | None) -> Iterator[nn.Module]:
    with offline_model(folder, tp, rank, torch.bfloat16, "cpu", SCHEME) as model:
        load_as_vllm_does(model, weights)
        yield model


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("tp", [1, 2])
def test_swapped_in_is_what_vllm_loads_itself(folders, tp):
    """Three times in a row, every tensor of the model, at the same addresses. Compared beside it, nothing changes."""
    for rank in range(tp):
        with _loaded(folders[0], tp, rank, None) as model:
            quantised = Quantised(model)
            live = _tensors(model)
            addresses = {name: each.data_ptr() for name, each in live.items()}
            canonical = [CanonicalTensor(name, tuple(each.shape))
                         for name, each in load_file(folders[0] / "model.safetensors").items()]
            with quantised.as_loaded():
                traced = trace_layout(model, canonical, torch.bfloat16)
            write_padding(quantised.parameters, traced.padding)
            assert all("_proj.weight" in name for name in quantised.copies) and len(quantised.copies) == 4 * 2
            for folder in (folders[0], folders[1], folders[0]):
                read_tiles(quantised.parameters, traced.layouts, folder)
                assert len(quantised.unlike()) == 2 * len(quantised.copies)     # weights and their scales
                quantised.swap()
                assert quantised.unlike() == []
                with _loaded(folder, tp, rank, folder) as itself:
                    expected = _tensors(itself)
                found = _tensors(model)
                assert found.keys() == expected.keys() == live.keys()
                for name, each in expected.items():
                    assert found[name] is live[name] and each.dtype == found[name].dtype
                    assert torch.equal(_bits(each), _bits(found[name])), name
            assert {name: each.data_ptr() for name, each in live.items()} == addresses
            assert sum(each.dtype == torch.float8_e4m3fn for each in live.values()) == len(quantised.copies)


def test_a_parameter_that_can_neither_be_written_nor_quantised_again_is_refused(folders):
    """By name, before anything is received; the model is left as it was."""
    with _loaded(folders[0], 1, 0, None) as model:
        norm, layer = model.model.norm, model.model.layers[1].mlp.down_proj
        true = norm.weight
        norm.weight = nn.Parameter(true.detach().float(), requires_grad=False)
        with pytest.raises(LayoutError, match="model.norm.weight is float32 .*, vLLM loads bfloat16 .*neither"):
            Quantised(model)
        norm.weight = true
        layer.weight = None
        with pytest.raises(LayoutError, match="Fp8Ptpc.* keeps what it makes of model.layers.1.mlp.down_proj"):
            Quantised(model)
        assert layer._parameters["weight"] is None and layer.weight_scale.dtype == torch.float32


def test_what_vllm_quantises_to_another_form_is_not_copied(folders):
    """The layer goes back to what the engine computes with, and says which tensor it was."""
    with _loaded(folders[0], 1, 0, None) as model:
        quantised, live = Quantised(model), _tensors(model)
        method = model.model.layers[0].mlp.down_proj.quant_method
        true = method.process_weights_after_loading

        def transposed(layer) -> None:
            true(layer)
            layer.weight = nn.Parameter(layer.weight.t(), requires_grad=False)

        method.process_weights_after_loading = transposed
        with pytest.raises(LayoutError, match=r"quantised model.layers.0.mlp.down_proj.weight to .* \[128, 256\]"):
            quantised.swap()
        assert all(_tensors(model)[name] is each for name, each in live.items())
