"""The arguments of a replica's vLLM engine, from the run's configuration and plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.config.resolved import ResolvedConfig
from launch.errors import UserError
from launch.plan.plan import Placement, Plan
from megatron_rl.rollout.sampling import engine_seed
from megatron_rl.weight_sync.protocol import vllm_backend

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp8": "bfloat16"}
"""The dtype of transferred weights and of vLLM's computation."""
_QUANTISATION = {"fp8": "fp8_per_channel"}
"""vLLM's own quantisation during loading: layer matrices in e4m3 with a scale per output channel, activations with a
scale per token. Embedding, head, norms and biases stay bf16."""
_DEFAULT_CHUNK = 8192
"""Default number of tokens in one engine iteration."""


def engine_arguments(config: ResolvedConfig, plan: Plan, placement: Placement, replica: int,
                     version_folder: Path | None) -> dict[str, Any]:
    """Arguments for vLLM's `AsyncEngineArgs`.

    Args:
        version_folder: a version on disk that vLLM loads, or None for dummy weights.
    Raises:
        UserError: vLLM would split the prefill of seeded prompts on a CPU.
    """
    rollout, cpu, tp = config.rollout, plan.device == "cpu", plan.rollout.engines[replica].tp
    seeded_on_cpu = rollout.deterministic and cpu
    # Without tensor parallelism the worker runs in the engine core's process, which saves one process and one hop.
    arguments: dict[str, Any] = dict(
        model=str(version_folder or config.model.path), skip_tokenizer_init=True,
        load_format="safetensors" if version_folder else "dummy",
        dtype=DTYPES[rollout.dtype], quantization=_QUANTISATION.get(rollout.dtype),
        seed=engine_seed(config.run.seed, placement.attempt, replica),
        tensor_parallel_size=tp, distributed_executor_backend="mp" if tp > 1 else "uni",
        max_model_len=rollout.max_prompt_tokens + rollout.max_new_tokens, max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=_chunk_tokens(config, seeded_on_cpu), enforce_eager=rollout.enforce_eager,
        enable_prefix_caching=rollout.prefix_caching, logprobs_mode="processed_logprobs",
        disable_log_stats=True, enable_log_requests=False,
        worker_extension_cls="megatron_rl.weight_sync.ends.vllm_plugin.WeightSyncWorker",
        weight_transfer_config={"backend": vllm_backend(config.weight_sync.staging)},
    )
    if cpu:
        arguments["kv_cache_memory_bytes"] = int(rollout.kv_cache_gb * 2**30)
        # The smallest block size of vLLM's fast CPU attention. The trajectories of a prompt share only full blocks, and
        # few prompts fill one of vLLM's default blocks of 128 tokens.
        arguments["block_size"] = 32
    else:
        arguments["gpu_memory_utilization"] = rollout.memory_utilization
    if seeded_on_cpu:
        # vLLM's CPU sampler cannot rewind the generator of a seeded request whose prefill was split.
        arguments["enable_chunked_prefill"] = False
    return arguments


def _chunk_tokens(config: ResolvedConfig, seeded_on_cpu: bool) -> int:
    """Number of tokens in one engine iteration. A seeded request with a split prefill crashes vLLM's CPU engine."""
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    chosen = rollout.max_num_batched_tokens
    if chosen is None:
        return max(_DEFAULT_CHUNK, longest)
    if seeded_on_cpu and rollout.max_prompt_tokens > chosen:
        raise UserError(
            f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens} exceeds rollout.max_num_batched_tokens = "
            f"{chosen}: on a CPU a seeded prompt must be prefilled in one piece",
            where="rollout.max_num_batched_tokens", fix=f"set {longest} or more, null, or rollout.deterministic=false")
    return max(chosen, longest) if seeded_on_cpu else chosen
