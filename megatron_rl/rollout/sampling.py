"""Sampling parameters, and the seeds that make sampling reproducible."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.config.resolved import ResolvedConfig
from megatron_rl.data.batch import Prompt


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one rollout call, the same for all its prompts."""

    n: int
    """Trajectories per prompt (G)."""
    temperature: float
    """0 means greedy."""
    max_new_tokens: int

    @staticmethod
    def training(config: ResolvedConfig) -> Sampling:
        """G trajectories at the run's temperature."""
        return Sampling(config.algorithm.group_size, config.rollout.temperature, config.rollout.max_new_tokens)

    @staticmethod
    def greedy(config: ResolvedConfig) -> Sampling:
        """One greedy trajectory, for evaluation."""
        return Sampling(1, 0.0, config.rollout.max_new_tokens)


def group_seed(run_seed: int, step: int, prompt_index: int, instance: int) -> int:
    """Seed for the group of a prompt instance. Sample g of the group draws with `seed + g`.

    The seed is a hash and not a sum, because neighbouring steps, prompts and samples must not share random streams. It
    has 62 bits, so that adding the sample number does not overflow int64.
    """
    key = f"{run_seed}/{step}/{prompt_index}/{instance}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 2


def engine_seed(run_seed: int, attempt: int, replica: int) -> int:
    """Seed of an engine's own generator, which serves requests without a seed. Replicas must draw different samples,
    and so must the attempts of a run."""
    key = f"{run_seed}/{attempt}/{replica}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 1


def numbered(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a batch, with their instance numbers: two draws of a row have different seeds."""
    seen: Counter[int] = Counter()
    numbers = []
    for prompt in prompts:
        numbers.append(seen[prompt.index])
        seen[prompt.index] += 1
    return [prompt if prompt.instance == number else replace(prompt, instance=number)
            for prompt, number in zip(prompts, numbers, strict=True)]
