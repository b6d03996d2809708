"""Qwen3 mixtures of experts with experts in every layer. They can be planned, but not trained."""

from __future__ import annotations

from typing import Any

from launch.errors import UserError
from launch.model.families import qwen3
from launch.model.family import RESTORE, Family, Fields


def read(config: Fields) -> dict[str, Any]:
    experts, picked = config.integer("num_experts"), config.integer("num_experts_per_tok")
    if config.config.get("mlp_only_layers") or config.config.get("decoder_sparse_step", 1) != 1:
        raise UserError("mlp_only_layers or decoder_sparse_step: experts in only some layers are not modelled",
                        where=config.where, fix="use a model with experts in every layer")
    if picked > experts:
        raise UserError(f"num_experts_per_tok = {picked} exceeds num_experts = {experts}", where=config.where,
                        fix=RESTORE)
    return qwen3.read(config) | {"experts": experts, "experts_per_token": picked,
                                 "moe_ffn": config.integer("moe_intermediate_size")}


def _model(layers: int, hidden: int, ffn: int, heads: int, moe_ffn: int) -> Any:
    return qwen3.model(layers, hidden, ffn, heads, kv_heads=4, family="qwen3_moe", experts=128, experts_per_token=8,
                       moe_ffn=moe_ffn)


FAMILY = Family("Qwen3MoeForCausalLM", "qwen3_moe", read, window_has_switch=True, trains=False, published={
    "qwen3-30b-a3b": _model(48, 2048, 6144, 32, 768),
    "qwen3-235b-a22b": _model(94, 4096, 12288, 64, 1536),
})
