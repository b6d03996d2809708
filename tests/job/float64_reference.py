"""GRPO in one process, in float64, from the papers' formulas: Hugging Face's model, torch's AdamW, and nothing of this
project. It is told the rollouts of a run, and says which weights the run must end with.

    pi_old   the weights before the first update of a batch
    A        (R - mean) / (std + 1e-6) of the group, std with n - 1                     (arXiv:2402.03300)
    L        min(pi_old / mu, cap) max(-A r, -A clip(r, 1 - low, 1 + high)), r = pi / pi_old        (TIS, PPO)
    KL       exp(x) - 1 - x, x = log pi_ref - log pi                                    (Schulman's k3)
    loss     mean over the tokens of the mini-batch of L + beta KL - c H
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

Rollout = dict
"""A trajectory as it was recorded: prompt_token_ids, token_ids, logprobs, weight_versions, reward, group."""


@dataclass(frozen=True)
class Recipe:
    temperature: float
    mini_batches: int
    """Of a batch, each an update on an equal share of its groups."""
    epochs: int
    """Passes over all mini-batches of a batch."""
    cap: float
    clip_low: float
    clip_high: float
    beta: float
    entropy_coef: float
    rate: Callable[[int], float]
    """Learning rate of the update with this number, from 0."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    """Of matrices."""
    clip_grad: float


@dataclass(frozen=True)
class Tokens:
    """The completions of B trajectories, flattened: N tokens."""

    input_BL: torch.Tensor
    """Prompt and completion, padded at the right, which causal attention does not see."""
    rows_N: torch.Tensor
    places_N: torch.Tensor
    """Token n is `input_BL[rows_N[n], places_N[n]]`."""


class Reference:
    """The policy, its optimizer and the frozen model."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self.model.get_input_embeddings().padding_idx = None    # it would withhold the gradient of a sampled pad token
        for module in self.model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = _Norm(module)      # Hugging Face's own computes in float32
        self._frozen = copy.deepcopy(self.model).requires_grad_(False)
        parameters = list(self.model.parameters())
        self._adam = torch.optim.AdamW(
            [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": recipe.weight_decay},
             {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}],
            betas=recipe.betas, eps=recipe.eps)
        self._updates = 0

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def logprobs(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """log pi of all tokens of the completions, [N]."""
        with torch.no_grad():
            return self._logprobs(self.model, _tokens(rollouts))[0]

    def step(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[dict[str, float]]:
        """Train a batch. Returns loss, norm of the gradient and mean KL of each update."""
        advantages = _advantages([each["group"] for each in rollouts], rewards)
        parts = list(_shares([each["group"] for each in rollouts], self.recipe.mini_batches))
        fixed = []
        for part in parts:
            tokens = _tokens([rollouts[b] for b in part])
            with torch.no_grad():
                fixed.append((self._logprobs(self.model, tokens)[0], self._logprobs(self._frozen, tokens)[0]))
        return [self._update([rollouts[b] for b in part], [advantages[b] for b in part], *each)
                for _ in range(self.recipe.epochs) for part, each in zip(parts, fixed, strict=True)]

    def _update(self, rollouts: Sequence[Rollout], advantages: Sequence[float], old_N: torch.Tensor,
                reference_N: torch.Tensor) -> dict[str, float]:
        recipe, tokens = self.recipe, _tokens(rollouts)
        behaviour_N = torch.tensor([value for each in rollouts for value in each["logprobs"]], dtype=torch.float64)
        advantage_N = torch.tensor(advantages, dtype=torch.float64)[tokens.rows_N]
        current_N, entropy_N = self._logprobs(self.model, tokens)
        ratio_N = (current_N - old_N).exp()
        surrogate_N = torch.maximum(-advantage_N * ratio_N,
                                    -advantage_N * ratio_N.clamp(1 - recipe.clip_low, 1 + recipe.clip_high))
        behind_N = (old_N - behaviour_N).exp().clamp(max=recipe.cap)
        x_N = reference_N - current_N
        kl_N = torch.expm1(x_N) - x_N
        loss = (behind_N * surrogate_N + recipe.beta * kl_N - recipe.entropy_coef * entropy_N).mean()
        self._adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_grad)
        for group in self._adam.param_groups:
            group["lr"] = recipe.rate(self._updates)
        self._adam.step()
        self._updates += 1
        return {"loss": loss.item(), "grad_norm": norm.item(), "kl": kl_N.mean().item()}

    def _logprobs(self, model: torch.nn.Module, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Of every token of the completions its log-prob and the entropy where it was sampled."""
        logits_BLV = model(tokens.input_BL).logits / self.recipe.temperature
        log_p_NV = logits_BLV[tokens.rows_N, tokens.places_N - 1].log_softmax(-1)
        label_N = tokens.input_BL[tokens.rows_N, tokens.places_N]
        return log_p_NV.gather(1, label_N[:, None]).squeeze(1), -(log_p_NV.exp() * log_p_NV).sum(-1)


class _Norm:
    """RMSNorm as in arXiv:1910.07467."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._module.variance_epsilon)
        return self._module.weight * (x * scale)


def _tokens(rollouts: Sequence[Rollout]) -> Tokens:
    sequences = [[*each["prompt_token_ids"], *each["token_ids"]] for each in rollouts]
    longest = max(map(len, sequences))
    places = [(b, place) for b, each in enumerate(rollouts)
              for place in range(len(each["prompt_token_ids"]), len(sequences[b]))]
    rows_N, places_N = torch.tensor(places).T
    return Tokens(torch.tensor([each + [0] * (longest - len(each)) for each in sequences]), rows_N, places_N)


def _advantages(groups: Sequence[int], rewards: Sequence[float]) -> list[float]:
    found = []
    for group, reward in zip(groups, rewards, strict=True):
        others = torch.tensor([r for g, r in zip(groups, rewards, strict=True) if g == group], dtype=torch.float64)
        flat = bool((others == others[0]).all())
        found.append(0.0 if flat else ((reward - others.mean()) / (others.std() + 1e-6)).item())
    return found


def _shares(groups: Sequence[int], count: int) -> Iterator[list[int]]:
    """The trajectories of each mini-batch: an equal share of the groups, in order."""
    size = len(set(groups)) // count
    for share in range(count):
        yield [b for b, group in enumerate(groups) if group // size == share]
