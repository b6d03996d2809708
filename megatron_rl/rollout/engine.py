"""A rollout replica: vLLM's AsyncLLM with its tensor parallel workers, as a plain class with async methods.

The driver wraps it in a Ray actor; nothing here knows Ray. The engine starts with dummy weights and serves nothing
until the weight sync has committed a version, unless it starts with one from disk; `weights` (EngineWeights) holds
that side of it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from launch.config.schema import RunConfig
from launch.errors import UserError
from launch.plan.plan import Placement, Plan
from megatron_rl.data import template
from megatron_rl.data.batch import Completion, Group, Prompt
from megatron_rl.facts import process_facts
from megatron_rl.layouts.disk_check import refuse_changed
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.layouts.step_folder import step_of
from megatron_rl.layouts.tiles import CanonicalTensor
from megatron_rl.rollout.sampling import Sampling, engine_seed, group_seed, instances
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.weights import EngineWeights
from megatron_rl.weight_sync.plan.copies import Destination
from megatron_rl.weight_sync.protocol import Held, NotServing, SyncPart, TransferReport, vllm_backend

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp8": "bfloat16"}
"""Of what travels and of what vLLM computes with."""
_QUANTISATION = {"fp8": "fp8_per_channel"}
"""vLLM's own, while it loads: matrices of the layers in e4m3 with a scale for each output channel, activations for each
token. Embedding, head, norms and biases stay bf16."""
_DEFAULT_CHUNK = 8192
"""Tokens of one engine iteration when the configuration leaves it to us."""


class RolloutEngine:
    """One replica. All methods are called from one event loop.

    Args:
        config, plan, placement: the run's.
        replica: which engine of `plan.rollout.engines` this is.
        log_path: file for the output of vLLM's processes; None leaves it on this process's own.
    """

    def __init__(self, config: RunConfig, plan: Plan, placement: Placement, replica: int,
                 log_path: str | Path | None = None) -> None:
        self._config, self._plan, self._replica = config, plan, replica
        self._log_path = Path(log_path) if log_path else None
        node = placement.rollout[replica].node
        self._address = placement.addresses[node]
        self._tp = plan.rollout.engines[replica].tp
        self._max_model_len = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
        self._deterministic = config.rollout.deterministic
        self._chunk_tokens = _chunk_tokens(config, self._deterministic and plan.device == "cpu")
        self._seed = engine_seed(config.run.seed, placement.attempt, replica)
        self._requests = 0
        self._vllm: VllmEngine | None = None
        self.weights: EngineWeights | None = None
        self.facts: dict[str, Any] = {}
        """What `start` returned."""

    async def start(self, version_folder: Path | None = None) -> dict[str, Any]:
        """Start vLLM with dummy weights; returns when it answers. Serves nothing yet.

        Args:
            version_folder: a version on disk (`weight_sync.disk`), which vLLM's own loader reads in place of dummy
                weights. If the files have the trainer's digests and the live weights equal the files, bit for bit, the
                engine serves that version; a run sends it requests after the next sync.

        Returns:
            What this end must have in common with the driver and the trainer: `template_fingerprint`
            (`PromptTemplate.fingerprint` of the tokenizer that it decodes with), `vllm` (version), and
            `process_facts`.
        Raises:
            EngineDied: vLLM did not start.
            UserError: the model folder's tokenizer cannot be used, or the version on disk is not whole.
            SyncError: vLLM did not load what lies on disk.
        """
        if version_folder is not None:
            await asyncio.to_thread(refuse_changed, version_folder)
        self._template = self._load_template()
        self._stop_ids = list(template.stop_token_ids(self._template.tokenizer, self._config.model.path))
        self._vllm = VllmEngine(self._engine_arguments(version_folder), f"engine {self._replica}", self._log_path)
        dtype = _DTYPES[self._config.rollout.dtype]
        self.weights = EngineWeights(self._vllm, self._replica, self._tp, dtype, self._address,
                                     self._config.weight_sync.staging, self._config.weight_sync.in_flight,
                                     self._config.weight_sync.timeout_s)
        if version_folder is not None:
            await self.weights.adopt(version_folder, step_of(version_folder), self._canonical())
        # A full collection walks everything that torch, transformers and vLLM imported: 0.4 s in mid-rollout.
        gc.collect()
        gc.freeze()
        self.facts = {"template_fingerprint": self._template.fingerprint(), "vllm": self._vllm.version,
                      **process_facts(self._plan.device)}
        return self.facts

    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
        """The groups of `prompts`, in their order.

        With `rollout.deterministic` the prompts are enqueued in sorted order while the engine is paused, on a cold
        prefix cache, with seeds from (run seed, step, prompt, instance, sample): on a CPU the result repeats bit
        for bit, whatever the engine did before.

        Raises:
            UserError: a prompt is longer than the configuration allows.
            EngineDied: vLLM ended.
            NotServing: no weight version is committed on this engine.
        """
        for prompt in prompts:
            self._check_prompt(prompt)
        seeds = [group_seed(self._config.run.seed, step, prompt.index, instance)
                 for prompt, instance in zip(prompts, instances(prompts))]
        if not self._deterministic:
            return list(await asyncio.gather(*[self.generate_group(prompt, sampling) for prompt in prompts]))

        order = sorted(range(len(prompts)), key=lambda i: (prompts[i].index, seeds[i]))
        groups: list[Group | None] = [None] * len(prompts)
        async with self.weights.admission():
            await self._vllm.freeze(clear_cache=True)
            try:
                queues = [await self._enqueue(prompts[i], sampling, seeds[i]) for i in order]
            finally:
                await self._vllm.resume()
        for i, queue in zip(order, queues):
            groups[i] = await self._group(prompts[i], sampling, queue)
        return groups

    async def generate_group(self, prompt: Prompt, sampling: Sampling, seed: int | None = None) -> Group:
        """G completions of one prompt. Groups of concurrent calls share the engine's batch as they come."""
        self._check_prompt(prompt)
        async with self.weights.admission():
            queue = await self._enqueue(prompt, sampling, seed)
        return await self._group(prompt, sampling, queue)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End vLLM and its workers; none is left when this returns."""
        if self._vllm is not None:
            vllm, self._vllm = self._vllm, None
            await vllm.stop(timeout_s)

    def status(self) -> dict:
        """State, committed version, unfinished requests and tokens sampled so far, for routing and health checks.

        `generated_tokens` rises with every iteration of the engine, long before a request is finished.
        """
        if self.weights is None:
            return {"replica": self._replica, "state": "starting", "version": None, "unfinished": 0,
                    "generated_tokens": 0}
        unfinished, generated = (self._vllm.unfinished, self._vllm.generated_tokens) if self._vllm else (0, 0)
        return {"replica": self._replica, "state": self.weights.state.value, "version": self.weights.version,
                "unfinished": unfinished, "generated_tokens": generated}

    async def compare(self, folder: str | Path) -> list[str]:
        """A line for each piece of a live parameter that is not, bit for bit, what lies in a Hugging Face folder."""
        return await self.weights.compare(Path(folder), self._canonical())

    # The engine's part of a weight sync (`weight_sync.protocol.EngineHandle`).

    async def sync_describe(self, canonical: Sequence[CanonicalTensor]) -> list[Destination]:
        return await self.weights.describe(canonical)

    async def sync_open(self, part: SyncPart) -> list[Held]:
        return await self.weights.open(part)

    async def sync_prepare(self, epoch: int) -> None:
        await self.weights.prepare(epoch)

    async def sync_receive(self, epoch: int) -> list[TransferReport]:
        return await self.weights.receive(epoch)

    async def sync_commit(self, epoch: int, version: int) -> float:
        return await self.weights.commit(epoch, version)

    async def sync_discard(self, epoch: int, reason: str) -> None:
        await self.weights.discard(epoch, reason)

    # Inside.

    def _canonical(self) -> list[CanonicalTensor]:
        return canonical_tensors(self._plan.architecture)

    def _load_template(self) -> template.PromptTemplate:
        tokenizer = template.load_tokenizer(self._config.model.path)
        data = self._config.data
        return template.PromptTemplate(tokenizer, chat_template=data.chat_template, system=data.system)

    def _engine_arguments(self, version_folder: Path | None) -> dict:
        rollout = self._config.rollout
        cpu = self._plan.device == "cpu"
        # Without tensor parallelism the worker lives in the engine core's process: one process and one hop less.
        arguments = dict(
            model=str(version_folder or self._config.model.path), skip_tokenizer_init=True,
            load_format="safetensors" if version_folder else "dummy",
            dtype=_DTYPES[rollout.dtype], quantization=_QUANTISATION.get(rollout.dtype), seed=self._seed,
            tensor_parallel_size=self._tp, distributed_executor_backend="mp" if self._tp > 1 else "uni",
            max_model_len=self._max_model_len, max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=self._chunk_tokens, enforce_eager=rollout.enforce_eager,
            enable_prefix_caching=rollout.prefix_caching, logprobs_mode="processed_logprobs",
            disable_log_stats=True, enable_log_requests=False,
            worker_extension_cls="megatron_rl.weight_sync.ends.vllm_plugin.WeightSyncWorker",
            weight_transfer_config={"backend": vllm_backend(self._config.weight_sync.staging)},
        )
        if cpu:
            arguments["kv_cache_memory_bytes"] = int(rollout.kv_cache_gb * 2**30)
            # The smallest that vLLM's fast CPU attention takes. Only whole blocks are shared by the completions of a
            # prompt, and few prompts have as many tokens as vLLM's default block, 128.
            arguments["block_size"] = 32
        else:
            arguments["gpu_memory_utilization"] = rollout.memory_utilization
        if cpu and self._deterministic:
            # vLLM's CPU sampler cannot rewind the generator of a seeded request whose prefill was split.
            arguments["enable_chunked_prefill"] = False
        return arguments

    async def _enqueue(self, prompt: Prompt, sampling: Sampling, seed: int | None):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            n=sampling.n, temperature=sampling.temperature, max_tokens=sampling.max_new_tokens, seed=seed,
            stop_token_ids=self._stop_ids, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True)
        self._requests += 1
        return await self._vllm.enqueue(str(self._requests), prompt.token_ids.tolist(), parameters)

    async def _group(self, prompt: Prompt, sampling: Sampling, queue) -> Group:
        """The completions of a request, once it is over; those that a sync has cut off are asked again."""
        output = await self._vllm.finished(queue)
        cut = [_completion(each) for each in sorted(output.outputs, key=lambda completion: completion.index)]
        whole = cut if self.weights.in_flight != "abort" else await asyncio.gather(
            *[self._whole(prompt, sampling, each) for each in cut])
        return Group(prompt, tuple(replace(each, text=self._template.decode(each.token_ids)) for each in whole),
                     self._replica)

    async def _whole(self, prompt: Prompt, sampling: Sampling, completion: Completion) -> Completion:
        """A completion to its end: as often as it is cut off, the prompt with the tokens so far is a new request."""
        while completion.finish_reason == "abort":
            await self.weights.until_serving()
            so_far = replace(prompt, token_ids=np.concatenate([prompt.token_ids, completion.token_ids]))
            rest = replace(sampling, n=1, max_new_tokens=sampling.max_new_tokens - len(completion.token_ids))
            try:
                async with self.weights.admission():
                    queue = await self._enqueue(so_far, rest, None)
            except NotServing:      # the next sync was faster
                continue
            (output,) = (await self._vllm.finished(queue)).outputs
            completion = _joined(completion, _completion(output))
        return completion

    def _check_prompt(self, prompt: Prompt) -> None:
        limit = self._config.rollout.max_prompt_tokens
        if len(prompt.token_ids) > limit:
            raise UserError(f"prompt {prompt.index} has {len(prompt.token_ids)} tokens, more than "
                            f"rollout.max_prompt_tokens = {limit}", where="rollout.max_prompt_tokens",
                            fix="raise it or drop the prompt")


def _completion(output) -> Completion:
    """Without its text."""
    token_ids_R = np.asarray(output.token_ids, dtype=np.int32)
    logprobs_R = np.asarray(output.logprobs.logprobs if output.logprobs is not None else [], dtype=np.float32)
    versions_R = np.empty(len(token_ids_R), dtype=np.int32)
    covered = 0
    for span in output.weight_versions or ():
        versions_R[span.start:span.end] = int(span.version)
        covered += span.end - span.start
    if covered != len(token_ids_R) or len(logprobs_R) != len(token_ids_R):
        raise RuntimeError(f"vLLM returned {len(token_ids_R)} tokens, {len(logprobs_R)} log-probs and weight "
                           f"versions for {covered}")
    return Completion(token_ids_R, logprobs_R, "", output.finish_reason, versions_R)


def _joined(first: Completion, rest: Completion) -> Completion:
    """Tokens, log-probs and versions one after the other, ended as the second one ended."""
    return replace(rest, **{name: np.concatenate([getattr(first, name), getattr(rest, name)])
                            for name in ("token_ids", "logprobs", "weight_versions")})


def _chunk_tokens(config: RunConfig, seeded_on_cpu: bool) -> int:
    """Tokens of one engine iteration. A seeded request whose prefill is split kills vLLM's CPU engine."""
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    chosen = rollout.max_num_batched_tokens
    if chosen is None:
        return max(_DEFAULT_CHUNK, longest)
    if seeded_on_cpu and rollout.max_prompt_tokens > chosen:
        raise UserError(
            f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens} exceeds rollout.max_num_batched_tokens = "
            f"{chosen}: on a CPU a seeded prompt must be prefilled in one piece",
            where="rollout.max_num_batched_tokens", fix=f"at least {longest}, null, or rollout.deterministic: false")
    return max(chosen, longest) if seeded_on_cpu else chosen
