"""Boxes of tensors: integers, checked against counted elements."""

from __future__ import annotations

import pytest

from megatron_rl.layouts.boxes import NotABox, first_overlap, local_box, subtract
from megatron_rl.layouts.tiles import Tile


def test_a_tile_that_is_no_box_of_its_parameter_is_refused():
    parameter = (4, 6)
    assert local_box(parameter, Tile("w", (0, 0), (2, 3), (6, 1), 13)) == ((2, 1), (2, 3))
    with pytest.raises(NotABox, match="not a box"):
        local_box(parameter, Tile("w", (0, 0), (3, 2), (1, 3), 0))
    with pytest.raises(NotABox, match="exceeds"):
        local_box(parameter, Tile("w", (0, 0), (2, 6), (6, 1), 3))


def test_box_arithmetic():
    columns = [((0, c), (100, 3)) for c in range(0, 30, 3)]
    assert first_overlap(columns) is None
    assert first_overlap([*columns, ((50, 29), (1, 5))]) == ((50, 29), (1, 1))
    assert first_overlap([((0, 0), (0, 5)), ((0, 0), (3, 5))]) is None, "a box without elements overlaps nothing"
    left = subtract(((0, 0), (4, 4)), [((1, 1), (2, 2))])
    assert sum(rows * columns for _, (rows, columns) in left) == 12 and first_overlap(left) is None
