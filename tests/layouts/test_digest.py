"""The digest against a reference in Python's integers, and against every kind of damage it must see."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.layouts.digest import MODULUS, add, digest_layouts, digest_tiles
from megatron_rl.layouts.digest_boxes import OFFSET
from megatron_rl.layouts.tiles import ParamLayout, Tile, cut

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
ROWS, COLUMNS = 13, 17


def matrix(seed: int = 0, dtype: torch.dtype = torch.bfloat16, shape=(ROWS, COLUMNS)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(tensor: torch.Tensor, name: str = "w") -> Tile:
    return Tile(name, (0,) * tensor.dim(), tuple(tensor.shape), tensor.stride(), 0)


def digest(tensor: torch.Tensor, name: str = "w") -> int:
    return digest_tiles(tensor, [whole(tensor, name)])


def _mix(x: int) -> int:
    """splitmix64's finaliser, as published."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % MODULUS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % MODULUS
    return x ^ (x >> 31)


def reference(tensor: torch.Tensor, name: str) -> int:
    """Element by element, in Python's unbounded integers."""
    golden = 0x9E3779B97F4A7C15
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    total = 0
    for index in torch.cartesian_prod(*[torch.arange(n) for n in tensor.shape]).view(-1, tensor.dim()).tolist():
        row = seed
        for coordinate in index[:-1]:
            row = _mix((row + (coordinate + 1) * golden) % MODULUS)
        column = _mix(((index[-1] + 1) * golden + 0x5851F42D4C957F2D) % MODULUS)
        bits = int(tensor.view(integer)[tuple(index)])
        total += (bits + OFFSET) * (row | 1) * (column | 1)
    return total % MODULUS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(29,), (ROWS, COLUMNS), (3, 4, 5)])
def test_equals_the_reference(dtype, shape):
    tensor = matrix(1, dtype, shape)
    assert digest(tensor, "model.layers.0.w") == reference(tensor, "model.layers.0.w")


@st.composite
def tilings(draw):
    """The matrix cut at random into boxes, each moved into a parameter of its own with its own strides."""
    boxes = [((0, 0), (ROWS, COLUMNS))]
    for _ in range(draw(st.integers(0, 8))):
        start, shape = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, 1))
        if shape[d] == 1:
            boxes.append((start, shape))
            continue
        at = draw(st.integers(1, shape[d] - 1))
        first, second = list(shape), list(shape)
        first[d], second[d] = at, shape[d] - at
        moved = list(start)
        moved[d] += at
        boxes += [(start, tuple(first)), (tuple(moved), tuple(second))]
    return draw(st.permutations(boxes)), draw(st.sampled_from(DTYPES))


def hold(tensor: torch.Tensor, start, shape, name: str = "w") -> tuple[torch.Tensor, Tile]:
    """A box in a wider parameter of its own, as a rank would hold it."""
    (r, c), (rows, columns) = start, shape
    parameter = torch.full((rows + 2, columns + 3), 7.0).to(tensor.dtype)
    parameter[1:1 + rows, 2:2 + columns] = tensor[r:r + rows, c:c + columns]
    return parameter, Tile(name, start, shape, (columns + 3, 1), columns + 3 + 2)


@given(tilings())
@settings(max_examples=60, deadline=None)
def test_any_tiling_of_the_same_elements_gives_the_same_sum(tiling):
    boxes, dtype = tiling
    tensor = matrix(3, dtype)
    parts = [digest_tiles(parameter, [tile]) for parameter, tile in (hold(tensor, *box) for box in boxes)]
    assert add(*parts) == digest(tensor)
    assert digest_tiles(tensor, [cut(whole(tensor), *box) for box in boxes]) == digest(tensor)


@given(st.data(), st.sampled_from(DTYPES))
@settings(max_examples=60, deadline=None)
def test_any_swap_gives_another_sum(data, dtype):
    tensor = matrix(data.draw(st.integers(0, 99)), dtype)
    bits = tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    i, j = (data.draw(st.integers(0, tensor.numel() - 1)) for _ in range(2))
    swapped = bits.clone()
    swapped.view(-1)[[i, j]] = bits.view(-1)[[j, i]]
    assert (digest(swapped.view(dtype)) == digest(tensor)) == torch.equal(swapped, bits)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_swapped_rows_columns_and_tiles_give_another_sum(data):
    tensor = matrix(data.draw(st.integers(0, 99)))
    d = data.draw(st.integers(0, 1))
    size = data.draw(st.integers(1, tensor.shape[d] // 2))
    i = data.draw(st.integers(0, tensor.shape[d] - 2 * size))
    order = list(range(tensor.shape[d]))
    order[i:i + size], order[i + size:i + 2 * size] = order[i + size:i + 2 * size], order[i:i + size]
    assert digest(tensor.index_select(d, torch.tensor(order))) != digest(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_is_seen(dtype):
    tensor = matrix(4, dtype, (5, 3))
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    seen = {digest(tensor)}
    for element in range(tensor.numel()):
        for bit in range(8 * tensor.element_size()):
            damaged = tensor.view(integer).clone()
            damaged.view(-1)[element] ^= torch.tensor(1, dtype=integer) << bit
            seen.add(digest(damaged.view(dtype)))
    assert len(seen) == 1 + tensor.numel() * 8 * tensor.element_size()


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_a_dropped_or_doubled_tile_is_seen_even_if_all_its_elements_are_equal(fill):
    tensor = torch.full((6, 4), fill, dtype=torch.bfloat16)
    halves = [cut(whole(tensor), (0, 0), (3, 4)), cut(whole(tensor), (3, 0), (3, 4))]
    right = digest_tiles(tensor, halves)
    assert right == digest(tensor)
    assert len({right, digest_tiles(tensor, halves[:1]), digest_tiles(tensor, [*halves, halves[0]]),
                digest_tiles(tensor, [halves[0], halves[0]])}) == 4


def test_the_same_values_under_another_name_or_of_another_shape_differ():
    tensor = matrix()
    assert len({digest(tensor), digest(tensor, "w2"), digest(tensor.t().contiguous()), digest(tensor.flatten()),
                digest(tensor[None].contiguous())}) == 5


def test_signed_zero_and_nan_payloads_are_bits_like_others():
    zero, minus_zero = torch.tensor([0.0, 0.0]), torch.tensor([0.0, -0.0])
    nan_a, nan_b = (torch.tensor([x], dtype=torch.int32).view(torch.float32) for x in (0x7FC00000, 0x7FC00001))
    assert digest(zero) != digest(minus_zero)
    assert digest(nan_a) != digest(nan_b)


def test_padding_is_not_digested_and_ranks_add_up():
    tensor = matrix()
    layouts, parameters = [], {}
    for rank, rows in enumerate([(0, 8), (8, 5)]):
        parameter = torch.full((8, COLUMNS), float(rank)).bfloat16()
        parameter[:rows[1]] = tensor[rows[0]:rows[0] + rows[1]]
        parameters[f"p{rank}"] = parameter
        layouts.append(ParamLayout(f"p{rank}", (8, COLUMNS),
                                   (Tile("w", (rows[0], 0), (rows[1], COLUMNS), (COLUMNS, 1), 0),)))
    assert digest_layouts(layouts, parameters) == digest(tensor)
    assert digest_layouts([], {}) == 0


def test_elements_of_eight_bytes_are_refused():
    with pytest.raises(TypeError, match="float64"):
        digest(torch.zeros(3, dtype=torch.float64))
