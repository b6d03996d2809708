"""What a view notes: rules that make a forgotten input impossible."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pytest

from launch.plan.book import Book, line, made, nonzero, part


@dataclass(frozen=True)
class Sizes:
    a: int = 2
    b: int = 3
    c: int = 5


@lru_cache(maxsize=8)
def _square(sizes: Sizes) -> int:
    return sizes.a ** 2


@dataclass(eq=False)
class Child:
    PREFIX = "child"
    number: int
    other: int

    @line("", "number")
    def value(self) -> int:
        return self.number


@dataclass(eq=False)
class Model:
    PREFIX = "model"
    sizes: Sizes

    precise = made(Child, number="sizes.a", other="sizes.b")

    @line("", "a if b else c")
    def guarded(self) -> int:
        return self.sizes.a if self.sizes.b else self.sizes.c

    @part
    def between(self) -> int:
        return self.sizes.b + self.sizes.c

    @line("", "twice what lies between")
    def twice(self) -> int:
        return 2 * self.between

    @line("", "twice, and a")
    @part
    def more(self) -> int:
        return self.twice + self.sizes.a

    @line("", "nothing", written=nonzero)
    def nothing(self) -> int:
        return 0 * self.sizes.c

    @line("", "more and nothing")
    def total(self) -> int:
        return self.more + self.nothing

    @line("", "a^2")
    def squared(self) -> int:
        return _square(self.sizes)

    @part
    def coarse(self) -> Child:
        return Child(self.sizes.a + self.sizes.c, 0)


@pytest.fixture
def book() -> Book:
    sizes, book = Sizes(), Book()
    for name in ("a", "b", "c"):
        book.given(f"sizes.{name}", getattr(sizes, name), "", "here")
        book.name(sizes, name, f"sizes.{name}")
    book.model = book.view(Model(sizes))
    return book


@pytest.mark.parametrize("name, value, inputs", [
    ("guarded", 2, ("sizes.b", "sizes.a")),                 # what decides a branch
    ("twice", 16, ("sizes.b", "sizes.c")),                  # what a part has read
    ("more", 18, ("model.twice", "sizes.a")),               # a line stands for what it was made from
    ("total", 18, ("model.more", "sizes.c")),               # one that is not written does not
    ("squared", 4, ("sizes.a",))])
def test_inputs_are_what_was_read(book, name, value, inputs):
    _square(Sizes())                                        # a cache that knows the answer does not give it
    for _ in range(2):                                      # nor does what was read before
        assert getattr(book.model, name) == value
    assert book[f"model.{name}"].inputs == inputs and "model.nothing" not in book
    assert getattr(Model(Sizes()), name) == value           # without a book


def test_a_cache_keeps_nothing_of_a_view(book):
    assert book.model.squared == 4 and type(_square(Sizes())) is int
    before = _square.cache_info().hits
    assert _square(Sizes()) == 4 and _square.cache_info().hits == before + 1


def test_an_object_carries_what_it_was_made_from(book):
    """One that a part makes, all of it; one that is made of attributes, each field its own."""
    book.write(book.model.precise)
    assert book["child.value"].inputs == ("sizes.a",)
    other = Book()
    for name in ("a", "b", "c"):
        other.given(f"sizes.{name}", 1, "", "here")
        other.name(book.model.sizes._target, name, f"sizes.{name}")
    other.write(other.view(Model(book.model.sizes._target)).coarse)
    assert other["child.value"].inputs == ("sizes.a", "sizes.c")


def test_what_describes_an_object_is_read_with_any_of_its_attributes():
    book, sizes = Book(), Sizes()
    for name in ("mean", "spread"):
        book.given(f"lengths.{name}", 1, "", "here")
    book.name(sizes, "a", "lengths.mean")
    book.describe(sizes, "lengths.mean", "lengths.spread")
    model = book.view(Model(sizes))
    assert model.guarded == 2 and book["model.guarded"].inputs == ("lengths.mean", "lengths.spread")
    assert model.squared == 4 and book["model.squared"].inputs == ("lengths.mean",)


def test_a_key_is_written_once_and_rests_on_what_is_written():
    book = Book()
    book.given("x", 1, "", "here")
    book.given("x", 1, "", "here")
    with pytest.raises(ValueError, match="x is already in the book"):
        book.given("x", 2, "", "here")
    with pytest.raises(KeyError, match="z is computed from numbers that are not in the book: y"):
        book.computed("z", 1, "", "y", ("y",))


def test_an_object_is_made_of_its_first_parameters():
    with pytest.raises(TypeError, match="is made of"):
        made(Child, other="sizes.a")
