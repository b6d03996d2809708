"""The phases of an RL step, computed from the rates of its parts, and the step, computed from its phases.

    train      (updates x pre-training time x imbalance) / eta + updates x t_update
    log-prob   train x forward / training x factor            rho = log-prob / train: 1/3 in theory, more in practice
    rollout    generation / eta_rollout + responses x t_response
    step       synchronous: (sum of the phases) x (1 + other), less what `algorithm.overlap` hides
               (`overlapped_seconds`); asynchronous: (slower partition + weight sync) x
               (1 + other). With a second copy of the weights, only the trainer waits for the sync, and the engines
               stop for the swap.
    border     (slower partition + weight sync) x (1 + other), where the rollout is that of a synchronous step: engines
               that drain at the border of a batch (`rollout.swap: border`). At a commit all earlier batches are
               generated, so the one batch that the commit admits is all that the engines have, for any bound k >= 1.
               They need until its longest completion ends. The trainer updates meanwhile, on a batch that is there.

Imbalance: a sequence is not split over DP ranks. If the longest sequence of an optimizer step is longer than a rank's
share of the tokens, all ranks wait for the one that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from launch.coefficients.rl import RlCoefficients
from launch.planner.workload.lengths import Lengths

StepMode = Literal["synchronous", "one_step_off", "fully_async"]


@dataclass(frozen=True, slots=True)
class Passes:
    """Work of the trainer in one RL step, in seconds."""

    train_s: float
    """All optimizer steps."""
    pass_s: float
    """One log-prob pass over all responses."""

    @property
    def ratio(self) -> float:
        """rho = log-prob / train."""
        return self.pass_s / self.train_s


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of each phase of one RL step; 0 for a phase that the recipe does not have."""

    rollout_s: float
    train_s: float
    logprob_s: float = 0.0
    reference_s: float = 0.0
    refit_s: float = 0.0
    """Weight sync, or hand-over to engines on the same GPUs."""
    swap_s: float | None = None
    """Seconds for which the engines stop at the sync; None: for all of it."""

    @property
    def trainer_s(self) -> float:
        return self.train_s + self.logprob_s + self.reference_s


@lru_cache(maxsize=4096)
def imbalance(lengths: Lengths, prompt_tokens: float, sequences: float, dp: int) -> float:
    """Tokens of the fullest DP rank divided by the mean: 1, or the longest sequence of an optimizer step divided by a
    rank's share.

    Args:
        sequences: sequences of one optimizer step.
    """
    share = sequences * (prompt_tokens + lengths.mean) / dp
    return max(1.0, (prompt_tokens + lengths.expected_max(sequences)) / share)


def training_passes(training_s: float, forward_s: float, updates: int, *, uneven: float = 1.0, mixture: bool = False,
                    coefficients: RlCoefficients | None = None) -> Passes:
    """Seconds of the trainer's passes; see `train_seconds` and `pass_seconds`."""
    c = coefficients or RlCoefficients()
    train_s = train_seconds(training_s, updates, uneven, mixture, c)
    return Passes(train_s, pass_seconds(train_s, training_s, forward_s, c))


def train_seconds(training_s: float, updates: int, uneven: float, mixture: bool, c: RlCoefficients) -> float:
    """Seconds of the optimizer steps of an RL step.

    Args:
        training_s: seconds of one optimizer step at the pre-training rate (`training_time`).
        updates: optimizer steps per RL step.
        uneven: see `imbalance`.
        mixture: whether the model has experts.
    """
    eta = c.train_efficiency * (c.mixture_efficiency if mixture else 1.0)
    return updates * (training_s * uneven / eta + c.update_s)


def pass_seconds(train_s: float, training_s: float, forward_s: float, c: RlCoefficients) -> float:
    """Seconds of a log-prob pass over all responses.

    Args:
        train_s: see `train_seconds`.
        forward_s: seconds of a forward pass over the same sequences at the pre-training rate (`logprob_time`).
    """
    return train_s * forward_s / training_s * c.logprob_factor


def rollout_seconds(generation_s: float, responses: int, coefficients: RlCoefficients | None = None) -> float:
    """Seconds of the rollout phase, which includes the engines' `generation_s` (`RolloutTime.total_s`)."""
    c = coefficients or RlCoefficients()
    return generation_s / c.rollout_efficiency + responses * c.response_s


def refit_seconds(model_bytes: float, tensors: int, coefficients: RlCoefficients | None = None) -> float:
    """Seconds of the hand-over of weights in published colocated systems. The trainer gathers and the engine loads them
    tensor by tensor.

    Args:
        model_bytes: bytes of all weights.
        tensors: number of tensors in the checkpoint (`parameters.tensor_count`).
    """
    c = coefficients or RlCoefficients()
    return c.refit_s + tensors * c.refit_tensor_s + model_bytes / c.refit_bandwidth


def step_seconds(mode: StepMode, phases: Phases, coefficients: RlCoefficients | None = None) -> float:
    """Seconds of an RL step. Phases overlap unless it is synchronous. The weight sync stops both partitions; with
    `swap_s`, the engines stop only for the swap."""
    c = coefficients or RlCoefficients()
    return combined_seconds(mode != "synchronous", phases.rollout_s, phases.trainer_s, phases.refit_s, c.other_share,
                            swap_s=phases.swap_s)


def combined_seconds(asynchronous: bool, rollout_s: float, trainer_s: float, refit_s: float, other_share: float,
                     longest_s: float = 0.0, max_staleness: int = 0, swap_s: float | None = None,
                     completions: Sequence[float] = ()) -> float:
    """The arithmetic of `step_seconds`, which a search calls millions of times, with a bound k on the staleness.

    Batch b is handed out when the engines serve version b - 1 - k (docs/async.md), k + 1 steps before its own version.
    Its longest completion, its update and its sync must fit into these steps:

        step >= (longest + trainer + refit) / (k + 1)

    Args:
        longest_s: seconds of the longest completion; 0 without a bound.
        max_staleness: k.
        completions: see `overlapped_seconds`, for a synchronous step with `algorithm.overlap`.
    """
    training_s = (trainer_s + refit_s) * (1 + other_share)
    if asynchronous and swap_s is not None:
        seconds = max((rollout_s + swap_s) * (1 + other_share), training_s)
    else:
        parts = ((rollout_s if rollout_s > trainer_s else trainer_s) if asynchronous else
                 overlapped_seconds(rollout_s, trainer_s, completions) if completions else rollout_s + trainer_s)
        seconds = (parts + refit_s) * (1 + other_share)
    pace_s = (longest_s + training_s) / (max_staleness + 1)
    return seconds if seconds > pace_s else pace_s


def overlapped_seconds(rollout_s: float, trainer_s: float, completions: Sequence[float]) -> float:
    """Seconds of rollout and update if the trainer works on the complete groups of the batch that is generated.

    The batch is n parts of equal work. Part j is complete c_j after the start, and its forward and backward take U / n.
    The trainer takes one part after the other, so part j ends at (the recursion of a single server; Lindley, "The
    theory of queues with a single server", 1952)

        F_j = max(F_{j-1}, c_j) + U / n,   thus   F_n = max over j of c_j + (n - j + 1) U / n

    At least the last part, U / n, comes after the rollout. The run makes it smaller if it can. The optimizer step
    itself, which waits for all, is not told apart from U.

    Args:
        rollout_s: c_n.
        trainer_s: U.
        completions: c_j / c_n for each j (`RolloutTime.completions`).
    """
    n = len(completions)
    return max(share * rollout_s + (n - j) / n * trainer_s for j, share in enumerate(completions))
