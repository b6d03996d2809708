"""Reads a JSONL or Parquet file into a list of rendered, tokenised `Prompt`s, or fails with one clear message."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from launch.config.resolved import ResolvedConfig
from launch.config.schema import Data
from launch.errors import UserError, nearest
from megatron_rl.data.batch import Prompt
from megatron_rl.data.overlong import Overlong, fitted
from megatron_rl.data.template import PromptTemplate

Row = dict[str, Any]
Split = Literal["train", "eval"]


class DataSet(NamedTuple):
    """The prompts that a run uses, and those over the limit, if there were any."""

    prompts: list[Prompt]
    overlong: Overlong | None


def load_prompts(config: ResolvedConfig, tokenizer: PreTrainedTokenizerBase, split: Split) -> list[Prompt]:
    """The prompts of `load`."""
    return load(config, tokenizer, split).prompts


def load(config: ResolvedConfig, tokenizer: PreTrainedTokenizerBase, split: Split) -> DataSet:
    """Load the prompts of `data.train` or `data.eval` in file order. `Prompt.index` counts from 0.

    Raises UserError if the file is missing, empty or broken, if a column is missing or has the wrong type, or if a
    prompt is longer than `rollout.max_prompt_tokens` and `data.overlong` does not help.
    """
    path = config.data.train if split == "train" else config.data.eval
    if path is None:
        raise UserError("there is no data set to evaluate on", where="data.eval",
                        fix="set data.eval to a JSONL or Parquet file, or eval.every=0, at_start and at_end false")
    where = f"data.{split}: {path}"
    rows = read_rows(Path(path), where)
    template = PromptTemplate(tokenizer, chat_template=config.data.chat_template, system=config.data.system)
    prompts = [_prompt(index, row, config.data, template, where) for index, row in enumerate(rows)]
    return DataSet(*fitted(prompts, config.rollout.max_prompt_tokens, config.data.overlong, where, template.text_of))


def fingerprint(prompts: list[Prompt]) -> str:
    """16 hex digits over the part of a data set that training uses: ids, answers and further columns, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.token_ids.tobytes())
        digest.update(json.dumps([prompt.answer, prompt.columns], sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def read_rows(path: Path, where: str) -> list[Row]:
    """Read all rows of a `.jsonl` or `.parquet` file. `where` is the location in error messages."""
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise UserError(f"{path.name} is neither .jsonl nor .parquet", where=where,
                        fix="write one JSON object per line to a .jsonl file, or a Parquet file")
    if path.is_dir():
        raise UserError(f"{path} is a folder", where=where, fix="name one file")
    if not path.is_file():
        near = nearest(path.name, (each.name for each in path.parent.glob("*")))
        raise UserError(f"{path} does not exist", where=where,
                        fix=f"did you mean {path.parent / near}?" if near
                        else "correct the path (it is relative to the working directory)")
    rows = list(readers[path.suffix](path, where))
    if not rows:
        raise UserError(f"{path} holds no rows", where=where, fix="write at least one row")
    return rows


def _jsonl_rows(path: Path, where: str) -> Iterator[Row]:
    """Read one object per line. `datasets` is not used because it infers the type of a column from the first block and
    does not name the line when it fails."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except ValueError as error:
                raise UserError(f"line {number} of {path} is not JSON: {error}", where=f"{where}, line {number}",
                                fix="write one JSON object per line, in UTF-8") from error
            if not isinstance(row, dict):
                raise UserError(f"line {number} of {path} is a JSON {type(row).__name__}, not an object",
                                where=f"{where}, line {number}",
                                fix='write {"prompt": ..., "answer": ...} on each line')
            yield row


def _parquet_rows(path: Path, where: str) -> Iterator[Row]:
    """Read with the reader that `datasets` itself uses. `datasets` would copy the file into a cache, keyed by name and
    time, on hosts where that cache may not be writable, and it fails on a file without rows."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for block in file.iter_batches():
                yield from block.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable Parquet file: {error}", where=where,
                        fix="write the file again") from error


def _prompt(index: int, row: Row, data: Data, template: PromptTemplate, where: str) -> Prompt:
    content = _content(index, row, data, where)
    try:
        text = template.render(content)
    except UserError as error:
        raise UserError(f"row {index}: {error.what}", where=f"{where}; {error.where}", fix=error.fix) from error
    token_ids = template.tokenize(text)
    if len(token_ids) == 0:
        raise UserError(f"row {index} renders to an empty prompt", where=where, fix="write text into the row")
    answer = _answer(index, row, data, where)
    used = (data.prompt_column, data.messages_column, data.answer_column)
    return Prompt(index=index, token_ids=token_ids, text=text, answer=answer,
                  columns={name: value for name, value in row.items() if name not in used})


def _content(index: int, row: Row, data: Data, where: str) -> str | list[dict]:
    """The row's messages if it has any, otherwise its prompt."""
    messages, prompt = row.get(data.messages_column), row.get(data.prompt_column)
    if messages is not None:
        well_formed = isinstance(messages, list) and messages and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages)
        if not well_formed:
            raise UserError(f"row {index}: {data.messages_column!r} is not a list of messages with role and content",
                            where=where, fix='write [{"role": "user", "content": "..."}]')
        if messages[-1]["role"] == "assistant":
            raise UserError(f"row {index}: the last message is the assistant's, so there is nothing to answer",
                            where=where, fix="end the messages with the user's question")
        return messages
    if prompt is None:
        raise _missing_column(index, row, where, {"data.prompt_column": data.prompt_column,
                                                  "data.messages_column": data.messages_column})
    if not isinstance(prompt, str):
        raise UserError(f"row {index}: {data.prompt_column!r} is {type(prompt).__name__}, not a string", where=where,
                        fix=f"write text, or put a chat under {data.messages_column!r}")
    return prompt


def _answer(index: int, row: Row, data: Data, where: str) -> str | None:
    """The answer as text. Numbers are converted. The answer may be null, for rewards that need none."""
    if data.answer_column not in row:
        raise _missing_column(index, row, where, {"data.answer_column": data.answer_column})
    answer = row[data.answer_column]
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        return str(answer)
    raise UserError(f"row {index}: {data.answer_column!r} is {type(answer).__name__}, not a string or a number",
                    where=where, fix="write the answer as text")


def _missing_column(index: int, row: Row, where: str, wanted: dict[str, str]) -> UserError:
    """`wanted`: configuration key -> the column name that it requests."""
    names = " or ".join(repr(name) for name in wanted.values())
    near = [(key, match) for key, name in wanted.items() if (match := nearest(name, row))]
    fix = (f"did you mean {near[0][1]!r}? Then set {near[0][0]}={near[0][1]}" if near
           else f"add the column, or name another one in {' or '.join(wanted)}")
    columns = ", ".join(sorted(row)) or "none"
    return UserError(f"row {index} has no {names}; its columns are {columns}", where=where, fix=fix)
