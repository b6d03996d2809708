"""Turns the configuration's reward functions into callables and finds every mistake before the run starts."""

from __future__ import annotations

import inspect
import math
import numbers
import re
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pydantic

from launch.config.schema import Reward as RewardConfig
from launch.errors import UserError
from megatron_rl.rewards.final_answer import THINKING, Tags
from megatron_rl.rewards.functions import BUILTINS
from megatron_rl.rewards.sample import Sample
from megatron_rl.user_code import import_named, one_like

OFFERED = ("prompt", "finish_reason", "completion_tokens")
"""Offered to every reward function as keywords, in addition to the data row's columns."""


@dataclass(frozen=True)
class Reward:
    """One reward function of the configuration, ready to call."""

    name: str
    """Name in the configuration, numbered (`format#2`) if it is used twice."""
    function: Callable[..., Any]
    weight: float
    args: dict[str, Any]
    keywords: frozenset[str] | None
    """Keyword arguments of the function; None: all (`**kwargs`)."""

    @property
    def thinking(self) -> Tags:
        """The tags at which a built-in cuts completions; None for any other function."""
        if self.function in BUILTINS.values() and "thinking" in (self.keywords or ()):
            return self.args.get("thinking", THINKING)
        return None

    def __call__(self, sample: Sample) -> float:
        """The unweighted value for one sample. The function gets its `args`, and those of the row's columns and
        `OFFERED` that its signature names. `args` override `OFFERED`, and `OFFERED` overrides columns. A built-in gets
        no columns, because one may have the name of an argument.

        Raises:
            TypeError, ValueError: the function returned something other than a finite number.
            Anything that the function raises.
        """
        columns = {} if self.function in BUILTINS.values() else sample.columns
        offered = {**columns, "prompt": sample.prompt, "finish_reason": sample.finish_reason,
                   "completion_tokens": sample.completion_tokens, **self.args}
        if self.keywords is not None:
            offered = {name: value for name, value in offered.items() if name in self.keywords}
        else:
            offered = {name: value for name, value in offered.items() if name not in ("completion", "answer")}
        return _finite(self.function(sample.completion, sample.answer, **offered))


def load_rewards(config: RewardConfig, columns: Collection[str] | None = None) -> list[Reward]:
    """The reward functions of a run, in the order of the configuration.

    User functions are imported with the working directory on `sys.path`, as `python -m` would.

    Args:
        columns: names of the data set's further columns, if known. A function that requires another keyword is then
            refused here, not at the first sample.
    Raises:
        UserError: a name is not a built-in and cannot be imported, an attribute is missing or not callable, or
            arguments do not fit the signature.
    """
    rewards: list[Reward] = []
    for i, entry in enumerate(config.functions):
        where = f"reward.functions.{i}"
        function = _resolve(entry.function, f"{where}.function")
        keywords = _check_signature(entry.function, function, entry.args, columns, where)
        used = sum(1 for other in config.functions[:i] if other.function == entry.function)
        name = entry.function if not used else f"{entry.function}#{used + 1}"
        rewards.append(Reward(name, function, entry.weight, dict(entry.args), keywords))
    return rewards


def _resolve(path: str, where: str) -> Callable[..., Any]:
    if path in BUILTINS:
        return BUILTINS[path]
    module_name, colon, attribute = path.partition(":")
    if not (colon and module_name and attribute):
        raise UserError(f"no built-in reward is called {path!r}", where=where, fix=one_like(path, list(BUILTINS))
                        + f" (built-in: {', '.join(BUILTINS)}), or name your own function as package.module:function")
    function = import_named(path, "reward", where)
    if not callable(function):
        raise UserError(f"reward {path!r} is a {type(function).__name__}, not a function", where=where,
                        fix="name a function f(completion, answer, **columns) -> float")
    return function


def _check_signature(name: str, function: Callable[..., Any], args: dict[str, Any], columns: Collection[str] | None,
                     where: str) -> frozenset[str] | None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {name!r} has no signature that Python can read", where=f"{where}.function",
                        fix="wrap it in a plain function f(completion, answer, **columns) -> float") from error
    if inspect.iscoroutinefunction(function):
        raise UserError(f"reward {name!r} is asynchronous", where=f"{where}.function",
                        fix="write a plain function: rewards already run in processes of their own")
    kinds = inspect.Parameter
    positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    takes_two = len(positional) >= 2 or any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
    if not takes_two:
        raise UserError(f"reward {name!r} does not take a completion and an answer: its signature is "
                        f"{inspect.signature(function)}", where=f"{where}.function",
                        fix="write f(completion, answer, **columns) -> float; the first two are passed by position")
    rest = [p for p in parameters if p not in positional[:2]]
    by_keyword = {p.name: p for p in rest if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    takes_all = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    _check_args(name, function, args, by_keyword, takes_all, where)
    available = {*OFFERED, *args, *((columns or ()) if name not in BUILTINS else ())}
    required = [p.name for p in rest if p.default is kinds.empty
                and p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    missing = [parameter for parameter in required if parameter not in available]
    if missing and (columns is not None or name in BUILTINS):
        raise UserError(f"reward {name!r} needs {', '.join(missing)}, which is neither in its args nor a column of "
                        "the data that it gets", where=f"{where}.args", fix=f"set {where}.args.{missing[0]}")
    return None if takes_all else frozenset(by_keyword)


def _check_args(name: str, function: Callable[..., Any], args: dict[str, Any],
                by_keyword: dict[str, inspect.Parameter], takes_all: bool, where: str) -> None:
    for arg, value in args.items():
        if arg in ("completion", "answer"):
            raise UserError(f"reward {name!r}: {arg} is passed with every sample and cannot be set",
                            where=f"{where}.args.{arg}", fix="remove it")
        if arg not in by_keyword and not takes_all:
            choices = [parameter for parameter in by_keyword if parameter not in OFFERED]
            raise UserError(f"reward {name!r} takes no argument {arg!r} (found {value!r})",
                            where=f"{where}.args.{arg}", fix=one_like(arg, choices) if choices else "remove it")
    if name not in BUILTINS:
        return
    for arg, annotation in typing.get_type_hints(function, include_extras=True).items():
        if arg not in args:
            continue
        try:
            pydantic.TypeAdapter(annotation).validate_python(args[arg], strict=True)
        except pydantic.ValidationError as error:
            raise UserError(f"reward {name!r}: {arg} = {args[arg]!r} is not valid", where=f"{where}.args.{arg}",
                            fix=error.errors()[0]["msg"]) from error
    if name == "format":
        try:
            re.compile(args.get("pattern", ""))
        except re.error as error:
            raise UserError(f"reward 'format': pattern {args['pattern']!r} is not a regular expression: {error}",
                            where=f"{where}.args.pattern", fix="correct the expression") from error
    if name == "math" and args.get("anywhere") == "last" and "boxed" in args:
        raise UserError("reward 'math': boxed has no effect with anywhere = last", where=f"{where}.args.boxed",
                        fix="remove it, or use anywhere = boxed")
    if name == "length" and args.get("buffer_tokens", 0) > args.get("max_tokens", math.inf):
        raise UserError(f"reward 'length': buffer_tokens = {args['buffer_tokens']} is more than max_tokens = "
                        f"{args['max_tokens']}", where=f"{where}.args.buffer_tokens",
                        fix=f"use at most {args['max_tokens']}")


def _finite(value: Any) -> float:
    # Scalars of NumPy and torch are not numbers.Real; both convert with `item`.
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"returned {value!r} ({type(value).__name__}), not a number")
    if not math.isfinite(value):
        raise ValueError(f"returned {float(value)}, not a finite number")
    return float(value)
