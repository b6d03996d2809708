"""What a quantised engine refuses. test_sync_matrix.py compares what it holds with what vLLM itself loads.

vLLM's `fp8_per_channel` (a scale for each output channel, made while it loads) runs on a CPU: all of it is vLLM's code.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from megatron_rl.layouts.vllm import LayoutError
from megatron_rl.weight_sync.ends.quantised import Quantised
from megatron_rl.weight_sync.ends.vllm_internals import offline_model
from tests.rollout.engines import engine_environment
from tests.tiny_models import make_tiny
from tests.weight_sync.receivers import load_as_vllm_does


@pytest.fixture
def model(tmp_path) -> Iterator[nn.Module]:
    """With vLLM's dummy weights."""
    folder = make_tiny(tmp_path, "qwen2", vocab_size=321, dtype=torch.bfloat16)
    with engine_environment(), offline_model(folder, 1, 0, torch.bfloat16, "cpu", "fp8_per_channel") as made:
        load_as_vllm_does(made, None)
        yield made


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_a_parameter_that_can_neither_be_written_nor_quantised_again_is_refused(model):
    """By name, before anything is received; the model is left as it was."""
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


def test_what_vllm_quantises_to_another_form_is_not_copied(model):
    """The layer goes back to what the engine computes with, and says which tensor it was."""
    quantised, live = Quantised(model), _tensors(model)
    method = model.model.layers[0].mlp.down_proj.quant_method
    true = method.process_weights_after_loading

    def transposed(layer) -> None:
        true(layer)
        layer.weight = nn.Parameter(layer.weight.t(), requires_grad=False)

    method.process_weights_after_loading = transposed
    name = "model.layers.0.mlp.down_proj"
    values = {f"{name}.weight": torch.ones_like(quantised.forms[f"{name}.weight"], device="cpu")}
    with pytest.raises(LayoutError, match=rf"quantised {name}.weight to .* \[128, 256\]"):
        quantised.quantise(name, values)
    assert all(_tensors(model)[name] is each for name, each in live.items())
