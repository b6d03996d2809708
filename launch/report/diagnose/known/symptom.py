"""One row of the table of known failures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Symptom:
    """One known failure: how to recognise it, its cause and its remedy."""

    code: str
    see: str
    """The first sign of the failure, as printed. It is part of a recorded sample (tests/report/samples)."""
    cause: str
    remedy: str
    logs: str = ""
    slurm: str = ""
    outcome: str = ""
    weight: int = 1
    """0: explains every other finding; 1: a cause; 2: a consequence; 3: the least specific."""

    @cached_property
    def in_logs(self) -> re.Pattern | None:
        return re.compile(self.logs) if self.logs else None
