"""How trajectories are drawn, and the seeds that make them repeat."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from launch.config.schema import RunConfig
from megatron_rl.data.batch import Prompt


@dataclass(frozen=True)
class Sampling:
    """Sampling of one rollout call, the same for all of its prompts."""

    n: int
    """Trajectories a prompt (G)."""
    temperature: float
    """0 is greedy."""
    max_new_tokens: int

    @staticmethod
    def training(config: RunConfig) -> Sampling:
        """G trajectories at the run's temperature."""
        return Sampling(config.algorithm.group_size, config.rollout.temperature, config.rollout.max_new_tokens)

    @staticmethod
    def greedy(config: RunConfig) -> Sampling:
        """One greedy trajectory, for evaluation."""
        return Sampling(1, 0.0, config.rollout.max_new_tokens)


def group_seed(run_seed: int, step: int, prompt_index: int, instance: int) -> int:
    """Seed of a prompt instance's group; sample g of the group draws with `seed + g`.

    A hash, not a sum: neighbouring steps, prompts and samples must not share streams. 62 bits, so that adding the
    sample number stays inside int64.
    """
    key = f"{run_seed}/{step}/{prompt_index}/{instance}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 2


def engine_seed(run_seed: int, attempt: int, replica: int) -> int:
    """Seed of an engine's own generator, which draws when requests carry no seed. Replicas must not draw alike, nor
    an attempt repeat the draws of the one before."""
    key = f"{run_seed}/{attempt}/{replica}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 1


def instances(prompts: Sequence[Prompt]) -> list[int]:
    """For each prompt, how many times its data row came before it in this batch."""
    seen: Counter[int] = Counter()
    numbers = []
    for prompt in prompts:
        numbers.append(seen[prompt.index])
        seen[prompt.index] += 1
    return numbers
