"""Random states of a training rank: seed by coordinates, capture, restore.

Policies trained here have no dropout, so an update draws nothing. The states are saved anyway, so that anything that
draws later (a new layer, a user's code) continues where it stopped.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from launch.plan.plan import RankCoordinates

_TRACKER = "tracker."


def derived_seed(seed: int, *parts: object) -> int:
    """A seed below 2^31 for one purpose. Equal parts give equal seeds, different parts unrelated ones."""
    text = "\0".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def seed_rank(seed: int, coordinates: RankCoordinates, *, step: int = 0) -> None:
    """Seed Python, NumPy, torch and Megatron's tracker.

    Ranks of one TP group share the default stream, because replicated activations must drop the same elements, and
    differ in Megatron's model-parallel stream. All other coordinates get their own streams. `step` keeps a run that
    continues in another layout from drawing the numbers of its first steps again.
    """
    base = derived_seed(seed, "rank", step, coordinates.pp, coordinates.dp, coordinates.cp)
    random.seed(base)
    np.random.seed(base)
    torch.manual_seed(base)
    model_parallel_cuda_manual_seed(base, force_reset_rng=True)


def capture() -> dict[str, torch.Tensor]:
    """This process's random states as flat CPU tensors, for `restore`."""
    _, words, gauss = random.getstate()
    drawn = np.random.get_state(legacy=False)
    states = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(drawn["state"]["key"].astype(np.int64)),
        "numpy.rest": torch.tensor([drawn["state"]["pos"], drawn["has_gauss"], drawn["gauss"]], dtype=torch.float64),
        "torch": torch.get_rng_state().clone(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().cpu().clone()
    for name, state in get_cuda_rng_tracker().get_states().items():
        states[_TRACKER + name] = state.cpu().clone()
    return states


def restore(states: dict[str, torch.Tensor]) -> None:
    """Set the states that `capture` returned in a process of the same layout."""
    gauss = states["python.gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss, cached = states["numpy.rest"].tolist()
    np.random.set_state(("MT19937", states["numpy"].numpy().astype(np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name.removeprefix(_TRACKER): state for name, state in states.items()
                        if name.startswith(_TRACKER)})
