"""Writes measured coefficients into a cluster file. Comments and layout of the file are kept."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import yaml

from launch.cluster.file import parse_cluster, read_text
from launch.cluster.known_coefficients import PREFIX, faults
from launch.cluster.spec import ClusterSpec
from launch.config.yaml_file import CoreLoader
from launch.errors import UserError
from launch.files.shared import write_atomically


def with_coefficients(path: str | os.PathLike[str], values: Mapping[str, float], run: str) -> ClusterSpec:
    """Replace or add coefficients in a cluster file. Coefficients that `values` does not name are kept.

    Args:
        path: the cluster file.
        values: by key, as in the book: `coefficients.training.efficiency`, or without the first part.
        run: recorded as the source of each value.

    Returns:
        The cluster as the new file describes it.

    Raises:
        UserError: the file does not load, a key is unknown, a value is out of range, or the layout leaves no place for
            the section. The file is then unchanged.
    """
    file = os.fspath(path)
    old = read_text(file)
    before = parse_cluster(old, file)
    measured = {key.removeprefix(PREFIX): value for key, value in values.items()}
    for fault in faults({**before.coefficients, **{PREFIX + key: value for key, value in measured.items()}}):
        raise UserError(fault.what, where=run,
                        fix="calibrate with runs that finished several steps and were planned with this cluster file")
    new = edited(old, measured, run)
    try:
        after = parse_cluster(new, file)
    except UserError:
        after = None
    wanted = {**before.coefficients, **{PREFIX + key: float(_number(value)) for key, value in measured.items()}}
    if after is None or after.coefficients != wanted:
        raise UserError("the calibrated coefficients cannot be inserted into this file", where=file,
                        fix="add a section `coefficients:` at the end of the file, starting in the first column")
    _write(Path(file), new)
    return after


def edited(text: str, values: Mapping[str, float], run: str) -> str:
    """The text of a cluster file with these coefficients. Pure."""
    section = _section(text)
    newline = "\r\n" if "\r\n" in text else "\n"
    entries = {key: f"{key}: {{value: {_number(value)}, source: {_quoted(run)}}}" for key, value in values.items()}
    edits: list[tuple[int, int, str]] = []
    if section is None:
        lead = "" if not text or text.endswith("\n") else newline
        lines = ["coefficients:", *(f"  {entry}" for entry in entries.values())]
        return text + lead + newline + newline.join(lines) + newline if entries else text
    for key_node, node in section.value:
        if key_node.value in entries:
            del entries[key_node.value]
            for inner, scalar in node.value:
                replacement = _number(values[key_node.value]) if inner.value == "value" else _quoted(run)
                edits.append((scalar.start_mark.index, scalar.end_mark.index, replacement))
    if entries and section.flow_style:
        kept = [text[key.start_mark.index:node.end_mark.index] for key, node in section.value]
        lines = ["", *(f"  {entry}" for entry in (*kept, *entries.values()))]
        if edits:   # replace the existing values first, then add the others to the result
            return edited(_apply(text, edits), {key: values[key] for key in entries}, run)
        edits.append((section.start_mark.index, section.end_mark.index, newline.join(lines)))
    elif entries:
        at = text.find("\n", _end(section))
        at = len(text) if at < 0 else at - (text[at - 1] == "\r")
        indent = " " * section.value[0][0].start_mark.column
        edits.append((at, at, "".join(f"{newline}{indent}{entry}" for entry in entries.values())))
    return _apply(text, edits)


def _section(text: str) -> yaml.MappingNode | None:
    root = yaml.compose(text, Loader=CoreLoader)
    return next((value for key, value in root.value if key.value == "coefficients"), None) if root else None


def _end(node: yaml.Node) -> int:
    """Position after the last character of a node. A block mapping's own end mark lies after trailing comments."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _end(node.value[-1][1])
    return node.end_mark.index


def _apply(text: str, edits: list[tuple[int, int, str]]) -> str:
    for start, end, replacement in sorted(edits, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text


def _number(value: float) -> str:
    return f"{value:.6g}"


def _quoted(text: str) -> str:
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=math.inf).strip()


def _write(path: Path, text: str) -> None:
    """Write the file atomically. Keeps its mode and follows a symbolic link."""
    path = path.resolve()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        write_atomically(path, text, mode)
        path.chmod(mode)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", where=str(path),
                        fix="make the file and its folder writable, or copy it to a writable folder") from error
