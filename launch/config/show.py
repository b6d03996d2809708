"""A resolved configuration for people and for programs."""

from __future__ import annotations

import json
from typing import Any

from launch.config.keys import dotted
from launch.config.load import LoadedConfig, leaves


def rows(loaded: LoadedConfig) -> list[tuple[str, Any, str]]:
    """(dotted key, value, source) of every value, in the schema's order."""
    return [(dotted(path), value, str(loaded.sources[dotted(path)])) for path, value in leaves(loaded.config)]


def as_text(loaded: LoadedConfig) -> str:
    """Three aligned columns. `key=value` with a value as printed is a valid override."""
    table = [(key, json.dumps(value, ensure_ascii=False), source) for key, value, source in rows(loaded)]
    key_width = max(len(key) for key, _, _ in table)
    value_width = min(40, max(len(value) for _, value, _ in table))
    return "\n".join(f"{key:<{key_width}}  {value:<{value_width}}  {source}" for key, value, source in table)


def as_json(loaded: LoadedConfig) -> str:
    """`{"path", "config": nested values, "sources": {dotted key: source}}`."""
    sources = {key: str(source) for key, source in loaded.sources.items()}
    return json.dumps({"path": loaded.path, "config": loaded.config.model_dump(), "sources": sources}, indent=2,
                      ensure_ascii=False)
