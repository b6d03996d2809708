"""The one real model of the tests, SmolLM2-135M-Instruct, where configs/135m expects it."""

from __future__ import annotations

import functools
from pathlib import Path

from megatron_rl.models import smollm2

SMOLLM2 = Path(__file__).parent.parent / "models/smollm2-135m"


@functools.cache
def smollm2_folder() -> Path:
    """Made from its package if it is not there yet (about half a minute and 93 MB, once)."""
    smollm2.get(SMOLLM2)
    return SMOLLM2
