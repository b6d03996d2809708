"""A plugin of pytest: Hypothesis repeats its examples, and one that fails is enough (shrinking it takes a minute)."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), derandomize=True, database=None)
settings.load_profile("mutants")
