"""A rollout replica: vLLM's AsyncLLM with its tensor parallel workers, as a plain class with async methods.

The driver wraps it in a Ray actor, but this module does not use Ray. The engine starts with dummy weights and serves
nothing until the weight sync has committed a version, unless it loads a version from disk. `weights` (EngineWeights)
manages the version.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from launch.config.resolved import ResolvedConfig
from launch.errors import UserError
from launch.plan.plan import Placement, Plan
from megatron_rl.data import template
from megatron_rl.data.batch import Group, Prompt, Trajectory
from megatron_rl.facts import process_facts
from megatron_rl.layouts.disk_check import refuse_changed
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.layouts.step_folder import step_of
from megatron_rl.rollout.arguments import DTYPES, engine_arguments
from megatron_rl.rollout.sampling import Sampling, group_seed
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.weights import EngineWeights
from megatron_rl.weight_sync.protocol import NotServing

STOP_S = 10.0
"""How long vLLM's processes may take to exit on their own."""


class RolloutEngine:
    """A running replica, created with `start`. All methods must be called from one event loop."""

    def __init__(self, config: ResolvedConfig, plan: Plan, replica: int, rendering: template.PromptTemplate,
                 vllm: VllmEngine, weights: EngineWeights, facts: dict[str, Any]) -> None:
        self._config, self._plan, self._replica = config, plan, replica
        self._template, self._vllm = rendering, vllm
        self._stop_ids = list(template.stop_token_ids(rendering.tokenizer, config.model.path))
        self._requests = 0
        self._taken = 0
        """Sequences of all groups so far."""
        self._cut = 0
        """Sequences that a sync aborted and that are not asked again yet."""
        self._stopped = False
        self.weights = weights
        self.facts = facts
        """Facts that this end must share with the driver and the trainer: `template_fingerprint`
        (`PromptTemplate.fingerprint` of the tokenizer that decodes), `vllm` (version), and `process_facts`."""

    @classmethod
    async def start(cls, config: ResolvedConfig, plan: Plan, placement: Placement, replica: int,
                    log_path: str | Path | None = None, version_folder: Path | None = None) -> RolloutEngine:
        """Start vLLM with dummy weights. Returns once vLLM answers. The engine serves nothing yet.

        Args:
            config, plan, placement: those of the run.
            replica: index of this engine in `plan.rollout.engines`.
            log_path: file for the output of vLLM's processes, or None to use this process's output.
            version_folder: a version on disk (`weight_sync.disk`), which vLLM's own loader reads instead of dummy
                weights. If the files have the trainer's digests and the live weights equal the files bit for bit, the
                engine serves that version. A run sends it requests only after the next sync.

        Raises:
            EngineDied: vLLM did not start.
            UserError: the model folder's tokenizer cannot be used, or the version on disk is incomplete or changed.
            SyncError: the weights that vLLM loaded differ from those on disk.
        """
        arguments = engine_arguments(config, plan, placement, replica, version_folder)
        if version_folder is not None:
            await asyncio.to_thread(refuse_changed, version_folder)
        rendering = load_template(config)
        vllm = VllmEngine(arguments, f"engine {replica}", Path(log_path) if log_path else None)
        try:
            weights = EngineWeights(vllm, replica, plan.rollout.engines[replica].tp, DTYPES[config.rollout.dtype],
                                    placement.addresses[placement.rollout[replica].node], config.weight_sync.staging,
                                    config.weight_sync.in_flight, config.rollout.keep_kv,
                                    config.weight_sync.timeout_s)
            if version_folder is not None:
                await weights.adopt(version_folder, step_of(version_folder), canonical_tensors(plan.architecture))
        except BaseException:
            await vllm.stop(STOP_S)
            raise
        # A full collection scans everything that torch, transformers and vLLM imported: 0.4 s during a rollout.
        gc.collect()
        gc.freeze()
        facts = {"template_fingerprint": rendering.fingerprint(), "vllm": vllm.version, **process_facts(plan.device)}
        return cls(config, plan, replica, rendering, vllm, weights, facts)

    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
        """Generate the groups of `prompts`, in their order.

        With `rollout.deterministic` the prompts are enqueued in sorted order while the engine is paused, with an empty
        prefix cache and seeds from (run seed, step, prompt, instance, sample). On a CPU the result is then
        reproducible bit for bit and does not depend on earlier requests.

        Raises:
            UserError: a prompt is longer than the configuration allows.
            EngineDied: vLLM ended.
            NotServing: no weight version is committed on this engine.
        """
        for prompt in prompts:
            self._check_prompt(prompt)
        seeds = [group_seed(self._config.run.seed, step, prompt.index, prompt.instance) for prompt in prompts]
        if not self._config.rollout.deterministic:
            return list(await asyncio.gather(*[self.generate_group(prompt, sampling) for prompt in prompts]))

        order = sorted(range(len(prompts)), key=lambda i: (prompts[i].index, seeds[i]))
        groups: dict[int, Group] = {}
        async with self.weights.admission():
            await self._vllm.freeze(clear_cache=True)
            try:
                queues = [await self._enqueue(prompts[i], sampling, seeds[i]) for i in order]
            finally:
                await self._vllm.resume()
        for i, queue in zip(order, queues, strict=True):
            groups[i] = await self._group(prompts[i], sampling, queue)
        return [groups[i] for i in range(len(prompts))]

    async def generate_group(self, prompt: Prompt, sampling: Sampling, seed: int | None = None) -> Group:
        """Generate G trajectories of one prompt. Groups of concurrent calls share the engine's batch."""
        self._check_prompt(prompt)
        async with self.weights.admission():
            queue = await self._enqueue(prompt, sampling, seed)
            self._taken += sampling.n
        return await self._group(prompt, sampling, queue)

    async def ended(self, count: int) -> int:
        """Wait until `count` of the sequences that `generate_group` took have ended. Returns how many have. A group
        ends with its longest sequence. The others leave room for further groups before that."""
        while self._ended() < count:
            await self._vllm.sequence_ended()
        return self._ended()

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """End vLLM and all its workers before returning. A second call does nothing."""
        if not self._stopped:
            self._stopped = True
            await self._vllm.stop(timeout_s)

    def status(self) -> dict[str, Any]:
        """State, committed version, unfinished requests and tokens sampled so far, for routing and health checks.

        `generated_tokens` increases with every engine iteration, long before a request finishes.

        Raises:
            EngineDied: vLLM ended.
        """
        self._vllm.check_alive()
        return {"replica": self._replica, "state": self.weights.state.value, "version": self.weights.version,
                "unfinished": self._vllm.unfinished, "generated_tokens": self._vllm.generated_tokens}

    async def compare(self, folder: str | Path) -> list[str]:
        """One line for each piece of a live parameter that differs in any bit from a Hugging Face folder."""
        return await self.weights.compare(Path(folder), canonical_tensors(self._plan.architecture))

    async def _enqueue(self, prompt: Prompt, sampling: Sampling, seed: int | None):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            n=sampling.n, temperature=sampling.temperature, max_tokens=sampling.max_new_tokens, seed=seed,
            stop_token_ids=self._stop_ids, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True)
        self._requests += 1
        # A kept cache holds blocks of older weights too: the salt is the version, so that no new request reads them.
        return await self._vllm.enqueue(str(self._requests), prompt.token_ids.tolist(), parameters,
                                        str(self.weights.version))

    def _ended(self) -> int:
        return self._taken - self._vllm.unfinished - self._cut

    async def _group(self, prompt: Prompt, sampling: Sampling, queue) -> Group:
        """Await the trajectories of a request. Trajectories that a sync aborted are continued."""
        output = await self._vllm.finished(queue)
        cut = [_turn(each) for each in sorted(output.outputs, key=lambda each: each.index)]
        whole = cut if self.weights.in_flight != "abort" else await asyncio.gather(
            *[self._whole(prompt, sampling, each) for each in cut])
        return Group(prompt, tuple(replace(each, text=self._template.decode(each.token_ids)) for each in whole),
                     self._replica)

    async def _whole(self, prompt: Prompt, sampling: Sampling, trajectory: Trajectory) -> Trajectory:
        """Complete a trajectory. After each abort, the prompt with the tokens so far becomes a new request."""
        while trajectory.finish_reason == "abort":
            so_far = replace(prompt, token_ids=np.concatenate([prompt.token_ids, trajectory.token_ids]))
            rest = replace(sampling, n=1, max_new_tokens=sampling.max_new_tokens - trajectory.length)
            self._cut += 1
            try:
                await self.weights.until_serving()
                async with self.weights.admission():
                    queue = await self._enqueue(so_far, rest, None)
            except NotServing:      # the next sync has already begun
                continue
            finally:
                self._cut -= 1
            (output,) = (await self._vllm.finished(queue)).outputs
            trajectory = _joined(trajectory, _turn(output))
        return trajectory

    def _check_prompt(self, prompt: Prompt) -> None:
        limit = self._config.rollout.max_prompt_tokens
        if len(prompt.token_ids) > limit:
            raise UserError(f"prompt {prompt.index} has {len(prompt.token_ids)} tokens, more than "
                            f"rollout.max_prompt_tokens = {limit}", where="rollout.max_prompt_tokens",
                            fix="raise it or remove the prompt")


def load_template(config: ResolvedConfig) -> template.PromptTemplate:
    """The template with which this end decodes."""
    return template.PromptTemplate(template.load_tokenizer(config.model.path), chat_template=config.data.chat_template,
                                   system=config.data.system)


def _turn(output) -> Trajectory:
    """The trajectory of a vLLM output, without its text."""
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
    return Trajectory.one_turn(token_ids_R, logprobs_R, versions_R, output.finish_reason)


def _joined(first: Trajectory, rest: Trajectory) -> Trajectory:
    """Concatenate two trajectories. The second one gives the finish reason."""
    return replace(rest, **{name: np.concatenate([getattr(first, name), getattr(rest, name)])
                            for name in ("token_ids", "sampled", "logprobs", "weight_versions")})
