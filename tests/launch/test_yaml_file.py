from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.config.yaml_file import parse, parse_value
from launch.errors import UserError


@pytest.mark.parametrize("text, value", [
    ("1e-3", 1e-3), ("1.0e-3", 1e-3), ("3e5", 3e5), (".5", 0.5), ("-2.", -2.0), ("5", 5), ("010", 10), ("0x10", 16),
    ("0o17", 15), ("true", True), ("False", False), ("on", "on"), ("yes", "yes"), ("1:30", "1:30"),
    ("1_000", "1_000"), ("2026-01-01", "2026-01-01"), ("null", None), ("~", None), ("", None), ("'5'", "5"),
    ("[1, 2.5, x]", [1, 2.5, "x"]), ("{a: 1e-3}", {"a": 1e-3}), ("Answer: 5", "Answer: 5"), ("a # b", "a # b"),
    ("pkg.module:function", "pkg.module:function")])
def test_scalars_are_those_of_yaml_1_2(text, value):
    """YAML 1.1 reads 1e-3 as text, on as true, 010 as 8, 1:30 as 90 and a date as a date."""
    got = parse_value(text)
    assert got == value and type(got) is type(value)


def test_file_and_override_read_the_same_scalar():
    for text in ("1e-3", "on", "010", "1:30", "true", "text", "~"):
        assert parse(f"key: {text}", "f.yaml").values["key"] == parse_value(text)


def test_lines_of_keys_and_items():
    lines = parse("a:\n  b: 1\n\n  c:\n    - x\n    - y: 2\n", "f.yaml").lines
    assert lines[("a",)] == 1 and lines[("a", "b")] == 2 and lines[("a", "c")] == 4
    assert lines[("a", "c", 0)] == 5 and lines[("a", "c", 1, "y")] == 6


@pytest.mark.parametrize("text, fragments", [
    ("a:\n  b: 1\n  c: 2\n  b: 3\n", ["a.b is given twice", "f.yaml:4", "line 2"]),
    ("a: &x 1\nb: *x\n", ["*x is a YAML alias", "f.yaml:2"]),
    ("a: 1\nb: [1, 2\nc: 3\n", ["not valid YAML", "f.yaml:"]),
    ("a: 1\n\tb: 2\n", ["not valid YAML", "f.yaml:2"]),
    ("a: !!python/object/apply:os.system ['true']\n", ["not valid YAML", "python/object", "f.yaml:1"]),
    ("1: 2\n", ["a key must be a plain word", "f.yaml:1"]),
    ("? [a]\n: 1\n", ["a key must be a plain word", "f.yaml:1"]),
    ("a: 1\n---\nb: 2\n", ["not valid YAML", "f.yaml:"]),
    ("a: " + "9" * 5000, ["not a configuration", "f.yaml"]),
    ("a: " + "[" * 600, ["f.yaml"])])
def test_what_is_refused(text, fragments):
    with pytest.raises(UserError) as error:
        parse(text, "f.yaml")
    for fragment in fragments:
        assert fragment in str(error.value)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab:-[]{}&*!#'\"\n\t 01?|>%@`,.~\x00é", max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        parse(text, "f.yaml")
    except UserError as error:
        assert "f.yaml" in str(error)
