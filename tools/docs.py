"""Writes the generated parts of docs/config.md, docs/plan.md and docs/slurm.md and the whole of docs/exit-codes.md.

    python -m tools.docs            write the files again
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from launch import envvars, exit_codes, ports
from launch.config.checks import CAUTIONS
from launch.config.keys import Key, all_keys, type_in_words
from launch.config.reference import default_in_words, meaning
from launch.model import builtin as architectures
from launch.planner.explain import warnings as cautions
from launch.slurm.profiles import Profile
from tools.pages import with_block

DOCS = Path(__file__).resolve().parents[1] / "docs"
PLAIN = re.compile(r"(text|true or false|(integer|number)( >=? 0)?|mapping|"
                   r"list of (texts|sections|integer > 0s|number >= 0s)(, at least 1)?)"
                   r"( and <= 1000000000.0)?( or null| or auto| or ray)*")
"""Types that need no explanation."""


def config_page(text: str) -> str:
    """docs/config.md with new tables."""
    for name, table in (("keys", keys_table()), ("ports", ports_table()), ("environment", environment_table())):
        text = with_block(text, name, table)
    return text


def plan_page(text: str) -> str:
    """docs/plan.md with new tables."""
    text = with_block(text, "warnings", _table(("Code", "Meaning"), list((cautions.DOCUMENTED | CAUTIONS).items())))
    return with_block(text, "models", ", ".join(f"`{name}`" for name in architectures.published()))


def slurm_page(text: str) -> str:
    """docs/slurm.md with a new table of a site profile's keys."""
    rows = [(f"`{key.dotted}`", _default(key), _meaning(key)) for key in all_keys(Profile) if key.section is None]
    return with_block(text, "profile keys", _keys(rows))


def exit_codes_page() -> str:
    """docs/exit-codes.md."""
    rows = [(f"{int(code)}", code.name, meaning) for code, meaning in exit_codes.MEANINGS.items()]
    table = _table(("Code", "Name", "Meaning"), rows)
    return f"# Exit codes\n\nGenerated from `launch/exit_codes.py`.\n\n{table}\n"


def keys_table() -> str:
    """One list per top-level section."""
    parts: list[str] = []
    rows: list[tuple[str, ...]] = []
    for key in all_keys():
        if "." not in key.dotted:
            parts += _flush(rows)
            if key.section is not None:
                parts.append(f"### {key.dotted}\n\n{meaning(key)}")
                continue
            parts.append(f"### {key.dotted}")
        elif key.section is not None and "*" not in key.dotted and key.field.annotation is key.section:
            continue
        rows.append((f"`{key.dotted}`", _default(key), _meaning(key)))
    return "\n\n".join(parts + _flush(rows))


def ports_table() -> str:
    return _keys([(f"`{name}`", f"+{offset}" + (f" to +{offset + count - 1}" if count > 1 else ""), purpose)
                  for name, (offset, count, purpose) in ports.TABLE.items()])


def environment_table() -> str:
    """Variables with the same reason share an item."""
    rows: dict[tuple[str, str], list[str]] = {}
    for each in envvars.TABLE:
        roles = "all" if each.roles == envvars.ROLES else ", ".join(each.roles)
        devices = "" if len(each.devices) == 2 else f", {each.devices[0].upper()} only"
        rows.setdefault((roles + devices, each.why), []).append(f"`{each.name}={each.value}`")
    return _keys([(", ".join(names), *row) for row, names in rows.items()])


def _flush(rows: list[tuple[str, ...]]) -> list[str]:
    part = [_keys(rows)] if rows else []
    rows.clear()
    return part


def _keys(rows: Sequence[tuple[str, ...]]) -> str:
    """A wrapped list item for each (key, default or place, meaning)."""
    return "\n".join(item(f"{key} ({default}): {meaning}") for key, default, meaning in rows)


def item(text: str) -> str:
    """A list item in lines of at most 120 columns, none of which looks like an item itself."""
    text = re.sub(r" ([-+]) ", "\0\\1\0", text)
    return textwrap.fill(f"- {text}", 120, subsequent_indent="  ", break_long_words=False,
                         break_on_hyphens=False).replace("\0", " ")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _default(key: Key) -> str:
    default = default_in_words(key)
    return default if default == "required" else f"`{default}`"


def _meaning(key: Key) -> str:
    """The key's text, followed by the allowed values if neither the text nor the default shows them."""
    text, kind = meaning(key), type_in_words(key.field)
    shown = f"{text} `{key.field.default}`"
    if PLAIN.fullmatch(kind) or (kind.startswith("one of ") and
                                 all(f"`{word}`" in shown for word in kind.removeprefix("one of ").split(", "))):
        return text
    return f"{text} {kind[0].upper()}{kind[1:]}."


def main() -> None:
    for name, made in (("config.md", config_page), ("plan.md", plan_page), ("slurm.md", slurm_page)):
        page = DOCS / name
        page.write_text(made(page.read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / "exit-codes.md").write_text(exit_codes_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
