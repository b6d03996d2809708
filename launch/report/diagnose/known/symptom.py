"""One row of the table of known failures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Symptom:
    """One row."""

    code: str
    see: str
    """What people see first, as it is printed; part of a recorded sample (tests/report/samples)."""
    cause: str
    remedy: str
    logs: str = ""
    slurm: str = ""
    outcome: str = ""
    weight: int = 1
    """0: explains whatever else is found; 1: a cause; 2: only follows from one, or is the least specific."""

    @cached_property
    def in_logs(self) -> re.Pattern | None:
        return re.compile(self.logs) if self.logs else None
