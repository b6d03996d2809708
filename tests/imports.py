"""What a file of Python imports, read from its text."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator


def imported(text: str) -> Iterator[tuple[str, ...]]:
    """The names that each import may mean, most exact first: (`a.b.c`, `a.b`) of `from a.b import c`. Imports inside
    functions count; those below `if TYPE_CHECKING:` do not, no process carries them out."""
    for statement in _statements(ast.parse(text)):
        if isinstance(statement, ast.Import):
            yield from ((alias.name,) for alias in statement.names)
            continue
        assert statement.level == 0, f"line {statement.lineno}: a relative import, which nothing else here uses"
        for alias in statement.names:
            yield f"{statement.module}.{alias.name}", str(statement.module)


def modules_of(text: str, known: Collection[str]) -> set[str]:
    """The modules among `known` that it imports."""
    meant = (next((name for name in names if name in known), None) for names in imported(text))
    return {name for name in meant if name is not None}


def _statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _statements(ast.Module(child.orelse, []))
        else:
            yield from _statements(child)
