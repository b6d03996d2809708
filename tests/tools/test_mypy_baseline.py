from __future__ import annotations

from tools.mypy_baseline import CLEAN, judge, known, why_not

ONE = 'launch/a.py:3: error: Name "x" already defined on line 1  [no-redef]'
MOVED = 'launch/a.py:13: error: Name "x" already defined on line 11  [no-redef]'
OTHER = 'launch/b.py:5: error: Item "None" of "int | None" has no attribute "y"  [union-attr]'
NOTE = "launch/b.py:5: note: see the documentation"


def test_known_errors_pass_wherever_they_have_moved() -> None:
    assert judge([MOVED, NOTE, OTHER], [known(ONE), known(OTHER)]) == []


def test_a_new_error_fails_with_its_line_and_so_does_a_second_of_the_same_text() -> None:
    assert judge([ONE, OTHER], [known(ONE)]) == [OTHER]
    assert judge([ONE, MOVED], [known(ONE)]) == [MOVED]


def test_a_fixed_error_fails_until_it_is_taken_out() -> None:
    fixed, remedy = judge([ONE], [known(ONE), known(OTHER)])
    assert fixed == f"fixed: {known(OTHER)}" and "--shrink" in remedy


def test_the_baseline_only_shrinks() -> None:
    assert why_not([ONE], [known(ONE), known(OTHER)]) is None
    assert why_not([OTHER], [known(ONE)]) is None           # a file renamed
    assert "only shrinks" in str(why_not([ONE, OTHER], [known(ONE)]))


def test_no_error_is_tolerated_in_a_clean_folder() -> None:
    line = f"{CLEAN[0]}a.py:1: error: wrong  [misc]"
    assert judge([line], [known(line)]) == [line]
    assert line in str(why_not([line], [known(line)]))
