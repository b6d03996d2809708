"""Megatron's GPTModel from the plan's architecture: one chunk for every virtual pipeline stage of this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers as layers_of_megatron
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model

from launch.config.resolved import ResolvedTrainer
from launch.model.architecture import Architecture
from launch.plan.plan import TrainingPlan
from megatron_rl.trainer import cpu
from megatron_rl.trainer.norms import NormThenAdd, WholeProjectionNorm
from megatron_rl.trainer.packed_attention import PackedAttention, PackedRotary, RMSNorm
from megatron_rl.trainer.rope import inverse_frequencies

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model(architecture: Architecture, plan: TrainingPlan, trainer: ResolvedTrainer,
                device: torch.device) -> list[GPTModel]:
    """This rank's model chunks, in order of their virtual stage, with random weights (`initializer_range`).

    Parallel state must be initialised. The chunks are bare modules in `trainer.dtype` (not wrapped by DDP) and share
    one `TransformerConfig`, `chunks[0].config`.

    Raises:
        UserError: the architecture's RoPE is not supported.
    """
    inv_freq = inverse_frequencies(architecture).to(device)
    config = transformer_config(architecture, plan, trainer)
    chunks = []
    for vp_stage in range(plan.vpp):
        stage = {"ignore_virtual": False, "vp_stage": vp_stage}
        layers = plan.layers_of_stage[parallel_state.get_pipeline_model_parallel_rank()][vp_stage]
        with _head_without_apex():
            chunk = GPTModel(
                config, _layer_spec(architecture, len(layers), config), vocab_size=plan.padded_vocab,
                max_sequence_length=architecture.max_positions,
                pre_process=parallel_state.is_pipeline_first_stage(**stage),
                post_process=parallel_state.is_pipeline_last_stage(**stage),
                share_embeddings_and_output_weights=architecture.tied, position_embedding_type="rope",
                parallel_output=True, vp_stage=vp_stage if plan.vpp > 1 else None)
        if chunk.post_process:
            chunk.output_layer.gradient_accumulation_fusion &= layers_of_megatron._grad_accum_fusion_available
        if cpu.needed():
            chunk.rotary_pos_emb = PackedRotary(inv_freq)
        else:
            chunk.rotary_pos_emb.inv_freq = inv_freq
        if chunk.post_process:
            chunk.output_layer.register_forward_pre_hook(_keep_selected_rows)
        chunks.append(chunk.to(device))
    return chunks


@contextmanager
def _head_without_apex() -> Iterator[None]:
    """On a GPU all linear layers but the output layer are Transformer Engine's, with kernels of its own for
    `gradient_accumulation_fusion`. Megatron's output layer takes APEX's, and cannot be built without APEX if the fusion
    is on. Inside this context it can."""
    available = layers_of_megatron._grad_accum_fusion_available
    layers_of_megatron._grad_accum_fusion_available = available or not cpu.needed()
    try:
        yield
    finally:
        layers_of_megatron._grad_accum_fusion_available = available


def named_parameters(chunks: list) -> dict[str, torch.Tensor]:
    """The live parameters of a rank's chunks, by their names in `layouts.megatron.megatron_layout`."""
    return {f"chunk{i}.{name}": parameter.detach() for i, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()}


def select_output_rows(chunk: torch.nn.Module, rows_P: torch.Tensor) -> None:
    """Let the next forward make the logits of these rows only, in this order, repeated ones as often: prompts and
    padding cost no vocabulary projection and no memory for their logits.

    Nothing changes on stages without logits, nor under sequence parallelism, where the projection itself gathers its
    input: `rows_P` must be all rows there.
    """
    model = get_attr_wrapped_model(chunk, "post_process", return_model_obj=True)
    if model.post_process and not model.config.sequence_parallel:
        model.output_layer.rows_P = rows_P


def _keep_selected_rows(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
    rows_P = layer.__dict__.pop("rows_P", None)
    return None if rows_P is None else (inputs[0].index_select(0, rows_P), *inputs[1:])


def transformer_config(architecture: Architecture, plan: TrainingPlan, trainer: ResolvedTrainer) -> TransformerConfig:
    """Megatron's config for this architecture, layout and precision."""
    dtype = DTYPES[trainer.dtype]
    on_gpu = not cpu.needed()
    fusion = trainer.gradient_accumulation_fusion
    return TransformerConfig(
        num_layers=architecture.layers, hidden_size=architecture.hidden, ffn_hidden_size=architecture.ffn,
        num_attention_heads=architecture.heads, num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_dim, normalization="RMSNorm", layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm and not architecture.qk_norm_whole,      # each head's own
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, add_qkv_bias=architecture.qkv_bias, hidden_dropout=0.0, attention_dropout=0.0,
        init_method_std=architecture.initializer_range, bf16=dtype is torch.bfloat16, params_dtype=dtype,
        pipeline_dtype=dtype, tensor_model_parallel_size=plan.tp, pipeline_model_parallel_size=plan.pp,
        virtual_pipeline_model_parallel_size=plan.vpp if plan.vpp > 1 else None,
        pipeline_model_parallel_layout=_pipeline_layout(plan), context_parallel_size=plan.cp,
        sequence_parallel=plan.sequence_parallel and plan.tp > 1,
        # The schedule then returns the loss as it is and DDP sums gradients; both read it when they are built.
        calculate_per_token_loss=True, finalize_model_grads_func=None,      # `sum_model_grads`, once a step
        # Read at every exchange; megatron_rl.trainer.step sets it where the micro-batches' lengths differ too much.
        variable_seq_lengths=False, moe_token_dispatcher_type="alltoall",
        # An interleaved pipeline of two stages sends forward and backward to the same peer: batched, the two would be
        # taken for each other.
        overlap_p2p_comm=plan.vpp > 1, batch_p2p_comm=plan.vpp == 1,
        deallocate_pipeline_outputs=True,
        apply_rope_fusion=on_gpu, bias_activation_fusion=on_gpu, masked_softmax_fusion=False,
        bias_dropout_fusion=False, gradient_accumulation_fusion=on_gpu if fusion == "auto" else fusion,
        cuda_graph_scope=[], **_recompute(trainer))


def sum_model_grads(chunks: list, normaliser: float = 1.0) -> None:
    """Complete the gradient that all passes since the last step have added up: Megatron's `finalize_model_grads`, with
    the normaliser of the loss in place of a number of tokens.

    That is the sum over DP x CP ranks (all-reduce or reduce-scatter), of norm gradients over TP (sequence parallelism,
    q/k norms), and of tied embeddings over the first and last stage, then one division. A normaliser of 0 belongs to a
    batch without a token in the loss, whose gradient is 0.
    """
    finalize_model_grads(chunks)
    for chunk in chunks:
        chunk.scale_gradients(1.0 / (normaliser or 1.0))


def _pipeline_layout(plan: TrainingPlan) -> list[list[str]] | None:
    if plan.pp == 1:
        return None
    layout = [["decoder"] * len(plan.layers_of_stage[pp][vpp]) for vpp in range(plan.vpp) for pp in range(plan.pp)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout


def _recompute(trainer: ResolvedTrainer) -> dict[str, Any]:
    if trainer.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if trainer.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def _layer_spec(architecture: Architecture, layers: int,
                config: TransformerConfig) -> ModuleSpec | TransformerBlockSubmodules:
    """Transformer Engine's layers on a GPU; on a CPU Megatron's local ones with the modules of `packed_attention`."""
    if not cpu.needed():
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        _place_norms(spec, architecture, config)
        return spec
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    _place_norms(spec, architecture, config)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm)


def _place_norms(spec: ModuleSpec, architecture: Architecture, config: TransformerConfig) -> None:
    """Norms elsewhere than Megatron's specs have them (`trainer.norms`)."""
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    if architecture.qk_norm_whole:
        attention.q_layernorm, attention.k_layernorm = (
            ModuleSpec(WholeProjectionNorm, params={"heads": heads})
            for heads in (architecture.heads, architecture.kv_heads))
    if architecture.post_norm:
        norm: type = RMSNorm
        if not cpu.needed():       # the linear layers that have the norm of their input inside, without it
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
            attention.linear_qkv = layer.mlp.submodules.linear_fc1 = TEColumnParallelLinear
            norm = TENorm
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
        layer.self_attn_bda = layer.mlp_bda = ModuleSpec(NormThenAdd, params={"norm": norm, "config": config})
