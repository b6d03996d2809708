"""Shared by the trainer's tests: plans, batches, Hugging Face's answer, and what a real rank computes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from transformers import AutoModelForCausalLM

from launch.config.auto import on_this_machine
from launch.config.resolved import ResolvedConfig
from launch.config.schema import RunConfig
from launch.model.hf_config import from_hf_config
from launch.plan.plan import Plan
from launch.planner.from_config import plan_of
from megatron_rl.data.batch import PolicyBatch
from megatron_rl.layouts.hf_read import CheckpointReader, load_layout
from megatron_rl.layouts.megatron import canonical_tensors, megatron_layout
from megatron_rl.layouts.tiles import ParamLayout, tile_view
from megatron_rl.trainer import parallel, step
from megatron_rl.trainer.model import build_model, sum_model_grads
from tests.ranks import Rank


def run_config(folder: Path | str, **trainer) -> ResolvedConfig:
    """A run's configuration in which only the trainer matters."""
    trainer = {"dtype": "fp32", "token_budget": 128, "optimizer": {"lr": 1e-3}, **trainer}
    return on_this_machine(RunConfig.model_validate({
        "run": {"name": "test", "steps": 1}, "model": {"path": str(folder)}, "trainer": trainer,
        "rollout": {"max_prompt_tokens": 64, "max_new_tokens": 64, "dtype": trainer["dtype"]},
        "algorithm": {"group_size": 2, "prompts_per_step": 2}, "reward": {"functions": [{"function": "length"}]},
        "data": {"train": "none.jsonl"}}))


def make_plan(config: ResolvedConfig, device: Literal["cpu", "gpu"] = "cpu") -> Plan:
    folder = config.algorithm.distillation.teacher
    teacher = None if folder is None else from_hf_config(folder)
    return plan_of(config, from_hf_config(config.model.path), device, teacher=teacher)


def make_batch(lengths: list[int], vocab: int, seed: int = 0, tools: float = 0.0) -> PolicyBatch:
    """Random tokens (0, the padding id, among them), advantages, and weights that differ from token to token. Of the
    tokens after the prompts a share of `tools` was not sampled."""
    rng = np.random.default_rng(seed)
    tokens_N = rng.integers(0, vocab, sum(lengths), dtype=np.int32)
    return _batch(tokens_N, np.array(lengths, np.int32), np.maximum(1, np.array(lengths, np.int32) // 3), rng,
                  tools)


def make_groups(groups: list[tuple[int, list[int]]], vocab: int, seed: int = 0, tools: float = 0.0) -> PolicyBatch:
    """As `make_batch`, of groups: the length of a prompt, and those of the completions to it."""
    rng = np.random.default_rng(seed)
    tokens = []
    for prompt, completions in groups:
        prompt_P = rng.integers(0, vocab, prompt, dtype=np.int32)
        tokens += [np.concatenate([prompt_P, rng.integers(0, vocab, n, dtype=np.int32)]) for n in completions]
    prompts_B = np.repeat([prompt for prompt, _ in groups], [len(completions) for _, completions in groups])
    return _batch(np.concatenate(tokens), np.array([len(x) for x in tokens], np.int32), prompts_B.astype(np.int32), rng,
                  tools)


def _batch(tokens_N: np.ndarray, lengths_B: np.ndarray, prompt_B: np.ndarray,
           rng: np.random.Generator, tools: float) -> PolicyBatch:
    n = len(tokens_N)
    completion_N = np.concatenate([np.arange(length) >= prompt
                                   for length, prompt in zip(lengths_B, prompt_B, strict=True)])
    if tools:
        completion_N &= np.random.default_rng(n).random(n) >= tools
    return PolicyBatch(
        tokens_N=tokens_N, lengths_B=lengths_B, prompt_lengths_B=prompt_B, sampled_N=completion_N,
        loss_weights_N=(completion_N * rng.uniform(0.5, 1.5, n) / max(1, completion_N.sum())).astype(np.float32),
        advantages_N=rng.normal(size=n).astype(np.float32),
        behaviour_logprobs_N=(completion_N * -rng.uniform(1, 6, n)).astype(np.float32),
        ages_N=np.zeros(n, np.int32))


ENTROPY_BONUS = 0.1


def reinforce(*, logprobs_T, entropy_T, advantages_T, weights_T, entropy_bonus: float = ENTROPY_BONUS, **_):
    """A policy gradient with an entropy bonus: small enough to be written again for Hugging Face."""
    loss = -(weights_T * (advantages_T * logprobs_T + entropy_bonus * entropy_T)).sum()
    return loss, {"weights": weights_T.sum(), "logprobs": (weights_T * logprobs_T).sum()}


def hugging_face(folder: Path | str, batch: PolicyBatch, temperature: float = 1.0, *,
                 entropy_bonus: float = ENTROPY_BONUS, weights: dict[str, np.ndarray] | None = None) -> tuple:
    """log-probs [N], loss and gradients by canonical name; every sequence on its own, unpacked and unpadded.

    `weights` by canonical name take the place of the folder's. Without an entropy bonus the gradient is that of GRPO
    on its first update, where the ratio is 1.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if weights is not None:
        parameters = dict(model.named_parameters())
        assert parameters.keys() == weights.keys()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(torch.from_numpy(weights[name]))
    model.get_input_embeddings().padding_idx = None     # it would withhold the gradient of a sampled pad token
    logprobs_N, total = np.zeros(len(batch.tokens_N), np.float32), 0.0
    for start, stop in itertools.pairwise(batch.offsets_B1):
        tokens = torch.from_numpy(batch.tokens_N[start:stop].astype(np.int64))
        log_p = torch.log_softmax(model(tokens[None]).logits[0, :-1].float() / temperature, -1)
        chosen = log_p.gather(1, tokens[1:, None]).squeeze(1)
        logprobs_N[start + 1:stop] = chosen.detach().numpy()
        weights_T, advantages_T = (torch.from_numpy(x[start + 1:stop])
                                   for x in (batch.loss_weights_N, batch.advantages_N))
        loss, _ = reinforce(logprobs_T=chosen, entropy_T=-(log_p.exp() * log_p).sum(-1), advantages_T=advantages_T,
                            weights_T=weights_T, entropy_bonus=entropy_bonus)
        loss.backward()
        total += loss.item()
    return logprobs_N, total, {name: p.grad.float().numpy() for name, p in model.named_parameters()}


def of_batch(values: list[torch.Tensor], plan: Plan, batch: PolicyBatch) -> np.ndarray:
    """What `run_logprobs` gives each rank, of the whole batch on every rank: float32 [N], 0 for tokens that were not
    sampled. Collective."""
    values_N = torch.zeros(len(batch.tokens_N))
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for index_P, values_P in zip(_predicted(plan, batch), values, strict=False):
            real_P = index_P >= 0
            assert not values_N[index_P[real_P]].any(), "a token has one rank"
            values_N[index_P[real_P]] = values_P.cpu()[real_P]
    values_N = values_N.to(parallel.device_of_rank())
    dist.all_reduce(values_N)
    return values_N.cpu().numpy()


def of_rank(values_N: np.ndarray, plan: Plan, batch: PolicyBatch) -> list[torch.Tensor]:
    """The reverse: values of a batch as `run_logprobs` would give them to this rank."""
    return [torch.from_numpy(np.where(index_P >= 0, values_N[index_P], 0)) for index_P in _predicted(plan, batch)]


def _predicted(plan: Plan, batch: PolicyBatch) -> list[torch.Tensor]:
    """The tokens on the N axis that this rank predicts, by micro-batch."""
    schedule = step.schedule_of(batch, plan)
    length = step._padded_length(schedule, batch, plan)
    return [step.micro_batch(plan, batch, schedule, index, length).predictions.index_P
            for index in range(len(schedule[0]))]


class TrainingRank:
    """A real rank with Hugging Face's weights and Megatron's DDP around its chunks."""

    def __init__(self, rank: Rank, config: ResolvedConfig, plan: Plan | None = None) -> None:
        self.plan = plan or make_plan(config)
        parallel.initialise(self.plan, rank.rank, rank.address, rank.port, rank.timeout_s)
        chunks = build_model(self.plan.architecture, self.plan.training, config.trainer, torch.device("cpu"))
        self.layouts = megatron_layout(self.plan.architecture, self.plan.training, rank.rank, "local")
        with CheckpointReader(config.model.path) as reader:
            load_layout(reader, canonical_tensors(self.plan.architecture), self.layouts, self._named(chunks))
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=True)
        self.chunks = [DistributedDataParallel(chunks[0].config, ddp, chunk) for chunk in chunks]

    def gradients(self, normaliser: float = 1.0) -> dict[str, np.ndarray] | None:
        """On rank 0 the gradients of the whole model by canonical name; every element from each of its holders. Once
        after the passes of a step."""
        sum_model_grads(self.chunks, normaliser)
        return gather_gradients(self._named([chunk.module for chunk in self.chunks]), self.layouts, self.plan)

    def logprobs(self, batch: PolicyBatch, temperature: float = 1.0) -> np.ndarray:
        """float32 [N] on every rank."""
        return of_batch(step.run_logprobs(self.chunks, self.plan, batch, temperature), self.plan, batch)

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    @staticmethod
    def _named(chunks) -> dict[str, torch.Tensor]:
        return {f"chunk{i}.{name}": p for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}


def gather_gradients(parameters: dict[str, torch.nn.Parameter], layouts: list[ParamLayout],
                     plan: Plan) -> dict[str, np.ndarray] | None:
    """On rank 0 the whole model's `main_grad` by canonical name. Collective."""
    first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return gather({name: each.main_grad for name, each in parameters.items()}, layouts if first else [], plan, 1e-6)


def gather(values: dict[str, torch.Tensor], layouts: list[ParamLayout], plan: Plan,
           atol: float) -> dict[str, np.ndarray] | None:
    """On rank 0 what all ranks' layouts hold of the model, as float32 by canonical name; copies on several ranks may
    differ by `atol`. Collective."""
    parts = [(tile.tensor, tile.slices, tile_view(values[layout.name], tile).float().cpu().numpy().copy())
             for layout in layouts for tile in layout.tiles]
    gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(parts, gathered)
    if gathered is None:
        return None
    out = {t.name: np.full(t.shape, np.nan, np.float32) for t in canonical_tensors(plan.architecture)}
    for tensor, box, found in (part for rank in gathered for part in rank):
        held = out[tensor][box]
        if not np.isnan(held).all():
            np.testing.assert_allclose(held, found, rtol=1e-7 if atol else 0, atol=atol,
                                       err_msg=f"two holders of {tensor} disagree")
        held[...] = found
    return out


def assert_gradients_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float = 2e-4) -> None:
    """Every tensor within `rtol` of its own largest element."""
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        worst = np.abs(found[name] - truth).max() / np.abs(truth).max()
        assert worst < rtol, f"gradient of {name} is off by {worst:.1e} of its largest element"
