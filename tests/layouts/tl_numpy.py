"""As much of Triton's language as the digest's kernel uses, on numpy. It runs a kernel's text where Triton is not
installed, program by program, and counts what the kernel loads."""

from __future__ import annotations

import builtins
import ctypes
from types import ModuleType

import numpy as np

constexpr = int
"""Both an annotation and a constructor. Constants adapt to the other operand, as in Triton."""


class Element:
    """An integer type."""

    def __init__(self, name: str) -> None:
        self.numpy = np.dtype(name)
        self.primitive_bitwidth = 8 * self.numpy.itemsize
        self.ctypes = getattr(ctypes, f"c_{name}")


int8, int16, int32, int64 = map(Element, ("int8", "int16", "int32", "int64"))
uint8, uint16, uint32, uint64 = map(Element, ("uint8", "uint16", "uint32", "uint64"))
_OF_NUMPY = {each.numpy: each for each in (int8, int16, int32, int64, uint8, uint16, uint32, uint64)}


class PointerType:
    def __init__(self, element: Element) -> None:
        self.element = element


class Value:
    """A block of integers; shape () is a scalar."""

    def __init__(self, of) -> None:
        self.of = np.asarray(of)

    def to(self, kind: Element | PointerType, bitcast: bool = False):
        if isinstance(kind, PointerType):
            return Pointer(self.of, kind.element)
        return Value(self.of.view(kind.numpy) if bitcast else self.of.astype(kind.numpy))

    def __index__(self) -> int:
        return int(self.of)

    def __bool__(self) -> bool:
        return bool(self.of)


def _operator(name: str):
    def apply(self: Value, other):
        other = other.of if isinstance(other, Value) else other
        if isinstance(other, np.ndarray) and name != "__rshift__":
            both = {self.of.dtype.kind, other.dtype.kind}
            assert len(both) == 1, f"{name} of {self.of.dtype} and {other.dtype}: Triton would convert one"
        with np.errstate(over="ignore"):
            made = getattr(self.of, name)(other)
        assert made is not NotImplemented and made.dtype.kind in "iub", f"{name} gives {made}"
        return Value(made)

    return apply


for _name in ("add", "radd", "sub", "mul", "rmul", "floordiv", "mod", "and", "or", "xor", "rshift", "lshift", "lt",
              "eq"):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))


class Pointer:
    def __init__(self, address, element: Element) -> None:
        self.address, self.element = np.asarray(address), element

    def __add__(self, by):
        by = by.of if isinstance(by, Value) else np.asarray(by)
        return Pointer(self.address + by.astype(np.int64) * self.element.numpy.itemsize, self.element)

    def read(self, mask: np.ndarray, other: int) -> np.ndarray:
        flat = [self.element.ctypes.from_address(int(at)).value if inside else other
                for at, inside in zip(self.address.ravel(), mask.ravel(), strict=True)]
        return np.array(flat, self.element.numpy).reshape(self.address.shape)


loaded: list[int] = []
"""Bytes of each load with a mask, without masked elements."""
_program = 0


def program_id(axis: int) -> Value:
    assert axis == 0
    return Value(np.int32(_program))


def load(pointer: Pointer, mask: Value | None = None, other: int = 0) -> Value:
    inside = np.ones(pointer.address.shape, bool) if mask is None else mask.of
    if mask is not None:
        loaded.append(int(inside.sum()) * pointer.element.numpy.itemsize)
    return Value(pointer.read(inside, other))


def atomic_add(pointer: Pointer, value: Value, sem: str) -> None:
    cell = pointer.element.ctypes.from_address(int(pointer.address))
    with np.errstate(over="ignore"):
        cell.value = int(np.int64(cell.value) + value.of)


def arange(start: int, stop: int) -> Value:
    return Value(np.arange(start, stop, dtype=np.int32))


def zeros(shape, element: Element) -> Value:
    return Value(np.zeros(shape, element.numpy))


def where(condition: Value, value: Value, other: int) -> Value:
    return Value(np.where(condition.of, value.of, value.of.dtype.type(other)))


def sum(value: Value) -> Value:
    with np.errstate(over="ignore"):
        return Value(value.of.sum(dtype=value.of.dtype))


def minimum(a: Value, b: Value) -> Value:
    return Value(np.minimum(a.of, b.of))


def cdiv(a: Value, b: int) -> Value:
    return Value(-(-a.of // b))


def multiple_of(value, by: int):
    address = value.address if isinstance(value, Pointer) else value.of
    assert not (address % by).any(), f"{address} is no multiple of {by}"
    return value


def range(start: Value, stop: Value, loop_unroll_factor: int = 1):
    return map(Value, np.arange(start.of, stop.of, dtype=np.int32))


pointer_type = PointerType


class _Jit:
    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __call__(self, *arguments):
        return self.kernel(*arguments)

    def __getitem__(self, grid: tuple[int]):
        def launch(*tensors, num_warps: int, **constants) -> None:
            global _program
            pointers = [Pointer(np.int64(each.data_ptr()), _OF_NUMPY[each.numpy().dtype]) for each in tensors]
            for _program in builtins.range(*grid):
                self.kernel(*pointers, **constants)

        return launch


def triton() -> ModuleType:
    """A module to import as `triton`."""
    module = ModuleType("triton")
    module.jit = _Jit
    return module
