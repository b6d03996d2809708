"""Tiles against plain slicing of a numbered tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.layouts.tiles import ParamLayout, Tile, contiguous_stride, cut, intersect, tile_view

SHAPE = (7, 11)
FULL = torch.arange(77).view(SHAPE)


@st.composite
def boxes(draw):
    start = [draw(st.integers(0, n - 1)) for n in SHAPE]
    return tuple(start), tuple(draw(st.integers(1, n - a)) for a, n in zip(start, SHAPE, strict=True))


def held(box, row_offset: int = 2):
    """The box of FULL at row `row_offset` of a parameter that holds nothing else."""
    (r, c), (rows, columns) = box
    parameter = torch.full((rows + row_offset, columns), -1)
    parameter[row_offset:] = FULL[r:r + rows, c:c + columns]
    return Tile("w", box[0], box[1], (columns, 1), row_offset * columns), parameter


@given(boxes(), boxes())
@settings(max_examples=60, deadline=None)
def test_intersection_is_the_common_box_seen_from_both_sides(box_a, box_b):
    (tile_a, a), (tile_b, b) = held(box_a), held(box_b, row_offset=5)
    common = intersect(tile_a, tile_b)
    in_both = set(tile_view(a, tile_a).flatten().tolist()) & set(tile_view(b, tile_b).flatten().tolist())
    if common is None:
        assert not in_both
        return
    seen_a, seen_b = tile_view(a, common[0]), tile_view(b, common[1])
    assert torch.equal(seen_a, seen_b)
    assert set(seen_a.flatten().tolist()) == in_both
    assert FULL[common[0].start] == seen_a[0, 0]


def test_tiles_of_different_tensors_share_nothing():
    assert intersect(Tile("a", (0,), (3,), (1,), 0), Tile("b", (0,), (3,), (1,), 0)) is None


def test_a_view_counts_from_the_parameter_not_from_its_storage():
    """Megatron's DDP makes parameters views of one flat buffer."""
    buffer = torch.arange(100)
    parameter = buffer[40:70].view(5, 6)
    assert torch.equal(tile_view(parameter, Tile("w", (0, 0), (2, 3), (6, 1), 13)), parameter[2:4, 1:4])


def test_a_parameter_that_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match="not contiguous"):
        tile_view(torch.zeros(4, 6).t(), Tile("w", (0, 0), (6, 4), (4, 1), 0))


def test_cut_moves_the_offset_along_the_strides():
    tile = Tile("w", (10, 20), (4, 6), (60, 2), 7)
    assert cut(tile, (11, 23), (2, 1)) == Tile("w", (11, 23), (2, 1), (60, 2), 7 + 60 + 6)


def test_padding_is_what_no_tile_covers():
    assert ParamLayout("p", (4, 5), (Tile("w", (0, 0), (3, 5), (5, 1), 0),)).padding == 5
    assert contiguous_stride((2, 3, 4)) == (12, 4, 1)
