"""Compares the token ids of two model folders, with the standard library only."""

from __future__ import annotations

import json
from pathlib import Path

from launch.errors import UserError

FILE = "tokenizer.json"


def check_same_ids(policy: Path, teacher: Path, where: str) -> None:
    """Check that every token of the policy has the same id in the teacher, which may have more tokens.

    Args:
        where: the teacher's key and folder, for messages.

    Raises:
        UserError: a token is missing or has another id, or a folder has no readable tokenizer.json.
    """
    mine, theirs = _ids(policy, where), _ids(teacher, where)
    other = [token for token, number in mine.items() if theirs.get(token) != number]
    if other:
        token = min(other, key=mine.__getitem__)
        has = f"id {theirs[token]}" if token in theirs else "no such token"
        raise UserError(f"the teacher has another tokenizer: {len(other)} of the policy's {len(mine)} tokens differ, "
                        f"the first is {token!r} (policy: id {mine[token]}, teacher: {has})", where=where,
                        fix=f"use a teacher with the tokenizer of {policy}: it scores the ids that the policy sampled")


def _ids(folder: Path, where: str) -> dict[str, int]:
    """Token -> id, added tokens included."""
    file = folder / FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):                     # Unigram: [token, score], in the order of the ids
            vocab = {token: number for number, (token, _) in enumerate(vocab)}
        return {**vocab, **{each["content"]: each["id"] for each in content.get("added_tokens", ())}}
    except FileNotFoundError:
        raise UserError(f"{folder} has no {FILE}, by which the tokenizers of policy and teacher are compared",
                        where=where, fix="save the tokenizer with save_pretrained of a fast tokenizer") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a tokenizer: {error!r}", where=where, fix="copy the file again") from error
