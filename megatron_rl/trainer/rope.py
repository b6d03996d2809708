"""Inverse frequencies of rotary embeddings. A wrong one fails silently, so transformers' own functions compute them."""

from __future__ import annotations

import torch

from launch.errors import UserError
from launch.model.architecture import Architecture
from launch.model.hf_config import ROPE_TYPES


def inverse_frequencies(architecture: Architecture) -> torch.Tensor:
    """float32 [head_dim / 2] for `architecture.rope` (Hugging Face's `rope_parameters`).

    Raises:
        UserError: the type's frequencies depend on the sequence or it also scales cos and sin (dynamic, yarn,
            longrope), or it rotates only a part of the head.
    """
    rope = {"rope_type": "default", **architecture.rope}
    if rope["rope_type"] not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"RoPE {rope} is not supported", where="config.json of the model, rope_parameters",
                        fix=f"use a model with rope_type {', '.join(ROPE_TYPES)} over the whole head")
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.float) / architecture.head_dim
        return 1.0 / (rope["rope_theta"] ** exponents)
    # Imported here, because the import takes a second in every rank.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=architecture.hidden, num_attention_heads=architecture.heads,
                         head_dim=architecture.head_dim, max_position_embeddings=architecture.max_positions,
                         rope_parameters=rope)
    inv_freq, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    if scale != 1.0:
        raise UserError(f"RoPE {rope} scales cos and sin by {scale}", where="config.json of the model",
                        fix="use a model without attention scaling in its RoPE")
    return inv_freq
