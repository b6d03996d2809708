"""The book of a plan: every number with its formula, its inputs and where they came from.

A model is a class that computes its numbers on demand. Its lines are the numbers that `megatron-rl plan explain`
prints:

    @dataclass(frozen=True)
    class TrainingTime:
        PREFIX = "training"
        layout: TrainingLayout
        ...

        @line("s", "(sum of slots - slowest) / v (arXiv 2104.04473)")
        def pp_bubble_s(self) -> float:
            return (sum(self.slots) - self.slot_s) / self.layout.vpp

A search reads `time.pp_bubble_s`, a property like any other. An explanation reads the same attribute of
`book.view(time)`. The view records every attribute that the method reads, and these become the inputs of the line. So
no formula is written twice and no input can be forgotten:

- A method gets numbers only through `self`. The view records each attribute, whether it decides a value or a branch, so
  the inputs include guards ("is it 1?").
- A `part` is a value without a line of its own. Reading it counts as reading everything that it was computed from.
- An object that a part creates carries the inputs of that part. Reading a field of the object counts as reading them.
  For an object that is `made` of attributes, reading a field counts as reading the inputs of that attribute only.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, Generic, Self, TypeVar, cast, overload

from launch.plan.forecast import Number

T = TypeVar("T")


class part(Generic[T]):
    """A value that is computed when it is first read, and then kept. It is `functools.cached_property` without the
    lock, which costs more than most formulas."""

    line: LineSpec | None = None

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...

    @overload
    def __get__(self, owner: object, kind: type) -> T: ...

    def __get__(self, owner: object | None, kind: type) -> Self | T:
        if owner is None:
            return self
        value = owner.__dict__[self.name] = self.function(owner)
        return value


class made(part[T]):
    """A part that is an object made of attributes of its owner. Each attribute is an argument of `kind`:
    `made(Demand, prompts="problem.workload.prompts", ...)`. The arguments are the first parameters of `kind`."""

    def __init__(self, kind: Callable[..., T], /, **fields: str) -> None:
        names = list(inspect.signature(kind).parameters)[:len(fields)]
        if set(names) != fields.keys():
            raise TypeError(f"{kind} is made of {', '.join(names)}, not {', '.join(fields)}")
        self.kind, self.fields, self.read = kind, fields, attrgetter(*(fields[name] for name in names))

    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return self
        value = owner.__dict__[self.name] = self.kind(*self.read(owner))
        return value


@dataclass(frozen=True)
class LineSpec:
    """What the book says about a number, besides its value and its inputs; see `line`."""

    unit: str
    formula: str | Callable[[Any], str]
    key: str
    written: Callable[[Any, Any], bool]
    shown: Callable[[Any], Any]


class _Property(property):
    """A line that is computed at every read."""

    line: LineSpec | None = None


def line(unit: str, formula: str | Callable[[Any], str], *, key: str = "",
         written: Callable[[Any, Any], bool] = lambda owner, value: True,
         shown: Callable[[Any], Any] = lambda value: value) -> Callable[[Callable[[Any], T] | part[T]], part[T]]:
    """Decorates a method that computes a number of the book. The method becomes a property, or a part if it is
    decorated as a `part` too, for a number that is read more than once.

    Args:
        unit: bytes, s, FLOP, tokens/s, ... or empty.
        formula: the formula in the field's symbols, with its paper or page unless it is plain arithmetic; or a function
            that returns the formula of an object.
        key: the whole key if it contains a dot; otherwise a name that replaces the method's name after the object's
            `PREFIX`.
        written: (object, value) -> whether the line is written. A line that is not written counts as a part.
        shown: value -> the value that the book shows, such as `round`.
    """
    def decorated(function: Callable[[Any], T] | part[T]) -> part[T]:
        found = function if isinstance(function, part) else _Property(function)
        found.line = LineSpec(unit, formula, key, written, shown)
        return cast("part[T]", found)       # for a type checker, both are descriptors that return T
    return decorated


def nonzero(owner: Any, value: float) -> bool:
    """For `line(written=...)`: a number that is 0 has no line."""
    return value != 0


class Book:
    """Entries in the order in which they were written. Inputs precede the numbers that are computed from them. Writing
    the same number again under a key is allowed; writing another number is a bug."""

    def __init__(self) -> None:
        self._entries: dict[str, Number] = {}
        self._views: dict[int, _View] = {}
        self._reading: list[dict[str, None]] = []
        """The keys that each line or part in computation has read so far, the innermost last."""

    def given(self, key: str, value: float, unit: str, source: str) -> float:
        """Write an input and return it."""
        self._write(Number(key=key, value=value, unit=unit, source=source))
        return value

    def computed(self, key: str, value: float, unit: str, formula: str, inputs: Iterable[str]) -> float:
        """Write a result and return it. Every input must have been written before."""
        entry = Number(key=key, value=value, unit=unit, formula=formula, inputs=tuple(inputs))
        missing = [name for name in entry.inputs if name not in self._entries]
        if missing:
            raise KeyError(f"{key} is computed from numbers that are not in the book: {', '.join(missing)}")
        self._write(entry)
        return value

    def name(self, target: object, attribute: str, key: str) -> None:
        """Reading this attribute of `target` counts as reading the number `key`."""
        self._view(target)._keys[attribute] = key

    def describe(self, target: object, *keys: str) -> None:
        """Reading any other attribute of `target`, or calling a method, counts as reading all of these numbers."""
        self._view(target)._others = keys

    def view(self, target: T) -> T:
        """`target` as an object that computes its attributes anew and records which of them are read."""
        return cast(T, self._view(target))

    def write(self, *targets: object) -> None:
        """Write all lines of these objects, in the order of their definition, those of base classes first."""
        for target in targets:
            view = self._view(target)
            for kind in reversed(type(view._target).__mro__):
                for name, found in vars(kind).items():
                    if isinstance(found, (part, _Property)) and found.line:
                        getattr(view, name)

    def _view(self, target: object) -> _View:
        if isinstance(target, _View):
            return target
        if id(target) not in self._views:
            self._views[id(target)] = _View(self, target)
        return self._views[id(target)]

    def _read(self, view: _View, name: str) -> Any:
        """An attribute of a view, computed once. Its keys are added to those that the current computation has read."""
        if name not in view._known:
            self._reading.append({})
            try:
                value = self._value(view, name)
                view._known[name] = value, self._reading[-1]
            finally:
                self._reading.pop()
        value, keys = view._known[name]
        if self._reading:
            self._reading[-1].update(keys)
        return value

    def _value(self, view: _View, name: str) -> Any:
        """Computes an attribute. The keys that are recorded meanwhile are the attribute's keys."""
        target, noted = view._target, self._reading[-1]
        if name in view._keys or view._others:
            noted.update(dict.fromkeys([view._keys[name]] if name in view._keys else view._others))
            return getattr(target, name)
        if name in view._makers:
            value = attrgetter(view._makers[name])(view._maker)
            return self._seen(value, tuple(noted))
        found = next((vars(kind)[name] for kind in type(target).__mro__ if name in vars(kind)), None)
        if isinstance(found, made):
            value = self._view(found.kind(*found.read(view)))
            value._makers, value._maker = found.fields, view
            noted.clear()                   # each field has its own keys
            return value
        if isinstance(found, (part, property)):
            value = (found.function if isinstance(found, part) else found.fget)(view)       # type: ignore[misc]
            value = self._seen(value, tuple(noted), view)
            told = getattr(found, "line", None)
            if told and told.written(view, value):
                inputs, key = tuple(noted), told.key or name
                key = key if "." in key else f"{target.PREFIX}.{key}"        # type: ignore[attr-defined]
                formula = told.formula if isinstance(told.formula, str) else told.formula(target)
                self.computed(key, told.shown(value), told.unit, formula, inputs)
                noted.clear()
                noted[key] = None
            return value
        if isinstance(found, FunctionType):
            return MethodType(found, view)
        value = getattr(target, name)
        if name in getattr(target, "__dataclass_fields__", ()) and value is not view._maker:
            noted.update(dict.fromkeys(view._made_from))
        return self._seen(value, view._made_from)

    def _seen(self, value: Any, made_from: tuple[str, ...] = (), maker: _View | None = None) -> Any:
        """A value as a line sees it. An object becomes a view, which carries the keys that it was made from."""
        if type(value) is tuple:
            return tuple(self._seen(each, made_from, maker) for each in value)
        if type(value) is dict:
            return {key: self._seen(each, made_from, maker) for key, each in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            fresh = id(value) not in self._views
            value = self._view(value)
            if fresh:
                value._made_from, value._maker = made_from, maker
        return value

    def _write(self, entry: Number) -> None:
        if self._entries.setdefault(entry.key, entry) != entry:
            raise ValueError(f"{entry.key} is already in the book as {self._entries[entry.key]}, not {entry}")

    def __getitem__(self, key: str) -> Number:
        return self._entries[key]

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Number]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)


_HASHES = itertools.count()


class _View:
    """An object that records which of its attributes are read."""

    __slots__ = ("_book", "_keys", "_known", "_made_from", "_maker", "_makers", "_others", "_target")

    def __init__(self, book: Book, target: object) -> None:
        self._book, self._target = book, target
        self._keys: dict[str, str] = {}
        self._others: tuple[str, ...] = ()
        self._made_from: tuple[str, ...] = ()
        self._makers: Mapping[str, str] = {}
        self._maker: _View | None = None
        self._known: dict[str, tuple[Any, dict[str, None]]] = {}

    def __getattr__(self, name: str) -> Any:
        return self._book._read(self, name)

    def __hash__(self) -> int:
        """A new value at every call, so that no `lru_cache` returns a cached result instead of reading, or keeps a
        result of this view."""
        return next(_HASHES)
