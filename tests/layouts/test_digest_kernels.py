"""The digest's three implementations against each other, and what each of them moves.

The GPU's kernel runs here without a GPU: in `tl_numpy`, which also counts what it loads, and in Triton's interpreter if
Triton is installed and TRITON_INTERPRET=1 was set when Python started.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.layouts import digest as digest_module
from megatron_rl.layouts import digest_cpu, digest_torch
from megatron_rl.layouts.digest import BITS, Digester, digest_tiles
from megatron_rl.layouts.digest_boxes import MASK, boxes_of, mix, unmix
from megatron_rl.layouts.tiles import ParamLayout, Tile, contiguous_stride, cut
from tests.layouts import tl_numpy
from tests.layouts.test_digest import DTYPES, reference

CACHE_BYTES = 1 << 20
"""Temporaries below this stay in a core's cache."""


@pytest.fixture(params=["numpy", "triton"])
def kernel(request, monkeypatch):
    """`digest_triton` with small blocks, interpreted."""
    if request.param == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
            pytest.skip("needs Triton and TRITON_INTERPRET=1")
    else:
        monkeypatch.setitem(sys.modules, "triton", tl_numpy.triton())
        monkeypatch.setitem(sys.modules, "triton.language", tl_numpy)
    spec = importlib.util.find_spec("megatron_rl.layouts.digest_triton")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROWS, module.COLUMNS = 4, 32
    tl_numpy.loaded.clear()
    return module


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.element_size()])


def tensor_of(shape, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit pattern may occur, NaNs too."""
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8,
                        generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype)


def held(tensor: torch.Tensor, tile: Tile) -> list[tuple]:
    return [(bits_of(tensor), tuple(boxes_of(tile)))]


def run(kernel, held, cells=None, count: int = 1) -> list[int]:
    bits, boxes = zip(*held, strict=True)
    table = kernel.BoxTable(list(bits), list(boxes), cells or [0] * len(bits), count)
    return [each % (MASK + 1) for each in table.results().tolist()]


def cases(dtype: torch.dtype):
    """(parameter, tile): aligned rows; rows, columns and starts that fit no block; a slice of columns; a transposed
    matrix; a vector; three and four dimensions."""
    yield tensor_of((9, 64), dtype), Tile("w", (0, 0), (9, 64), (64, 1), 0)
    yield tensor_of((5, 37), dtype), Tile("w", (7, 3), (5, 37), (37, 1), 0)
    yield tensor_of((6, 80), dtype), Tile("w", (2, 16), (6, 48), (80, 1), 16)
    yield tensor_of((6, 80), dtype), Tile("w", (2, 16), (6, 48), (80, 1), 17)
    yield tensor_of((40, 6), dtype), Tile("w", (0, 5), (6, 40), (1, 6), 0)
    yield tensor_of((70,), dtype), Tile("norm", (11,), (70,), (1,), 0)
    yield tensor_of((3, 5, 33), dtype), Tile("experts", (4, 1, 2), (3, 5, 33), (165, 33, 1), 0)
    yield tensor_of((2, 2, 2, 8), dtype), Tile("four", (0, 1, 0, 3), (2, 2, 2, 8), (32, 16, 8, 1), 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpus_kernel_and_torchs_operations_give_the_cpus_digests(kernel, dtype):
    for tensor, tile in cases(dtype):
        expected = digest_tiles(tensor, [tile])
        assert run(kernel, held(tensor, tile)) == [expected], tile
        assert digest_torch.digests(*zip(*held(tensor, tile), strict=True), [0], 1) == [
            expected - (MASK + 1) * (expected > MASK >> 1)], tile


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpus_kernel_equals_the_reference(kernel, dtype):
    for shape in ((70,), (6, 32), (3, 4, 5)):
        tensor = tensor_of(shape, dtype)
        whole = Tile("model.layers.0.w", (0,) * len(shape), shape, tensor.stride(), 0)
        assert run(kernel, held(tensor, whole)) == [reference(tensor, "model.layers.0.w")]


def test_one_launch_takes_parameters_of_several_types_and_keeps_their_digests_apart(kernel, monkeypatch):
    bucket = [pair for dtype in DTYPES for pair in cases(dtype)]
    parts = [held(*pair)[0] for pair in bucket]
    launches = []
    launcher = kernel._add_digests

    class Counting:
        def __getitem__(self, grid):
            launches.append(grid)
            return launcher[grid]

    monkeypatch.setattr(kernel, "_add_digests", Counting())
    each = run(kernel, parts, list(range(len(parts))), len(parts))
    assert each == [digest_tiles(*pair[:1], pair[1:]) for pair in bucket]
    assert run(kernel, parts) == [sum(each) % (MASK + 1)]
    assert len(launches) == 2                                               # one for each call
    if tl_numpy.loaded:                                                     # and every element was loaded once
        assert sum(tl_numpy.loaded) == 2 * sum(tile.numel * tensor.element_size() for tensor, tile in bucket)


def test_a_table_follows_changed_weights(kernel):
    tensor = tensor_of((9, 64), torch.bfloat16)
    tile = Tile("w", (0, 0), (9, 64), (64, 1), 0)
    table = kernel.BoxTable([bits_of(tensor)], [tuple(boxes_of(tile))], [0], 1)
    for seed in range(3):
        tensor.copy_(tensor_of((9, 64), torch.bfloat16, seed))
        assert table.results().item() % (MASK + 1) == digest_tiles(tensor, [tile])


def test_a_digester_keeps_a_table_for_each_of_two_copies_of_the_weights(kernel, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron_rl.layouts.digest_triton", kernel)
    tile = Tile("w", (0, 0), (9, 64), (64, 1), 0)
    live, shadow, third = (tensor_of((9, 64), torch.bfloat16, seed) for seed in range(3))
    digester = Digester([ParamLayout("p", (9, 64), (tile,))])
    for tensor in (live, shadow, live, shadow, third, live):
        assert digester._on_gpu([bits_of(tensor)], [0], 1)[0] % (MASK + 1) == digest_tiles(tensor, [tile])
        assert len(digester._tables) <= 2


def test_where_the_kernel_does_not_run_the_log_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(digest_module, "_fused", True)
    monkeypatch.setitem(sys.modules, "megatron_rl.layouts.digest_triton", None)
    tensor = tensor_of((9, 64), torch.bfloat16)
    tile = Tile("w", (0, 0), (9, 64), (64, 1), 0)
    digester = Digester([ParamLayout("p", (9, 64), (tile,))])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert digester._on_gpu([bits_of(tensor)], [0], 1)[0] % (MASK + 1) == digest_tiles(tensor, [tile])
    assert len(caplog.records) == 1 and "17 times the bytes" in caplog.text


def test_the_finaliser_is_inverted():
    for x in (0, 1, MASK, 0x123456789ABCDEF, *(mix(i) for i in range(100))):
        assert unmix(mix(x)) == x == mix(unmix(x))


class Moved(TorchDispatchMode):
    """Bytes that torch's operations read and write in tensors larger than a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        schema = function._schema
        if "empty" in schema.name or any(each.alias_info and not each.alias_info.is_write for each in schema.returns):
            return result                                                   # it moves nothing
        self.calls += 1
        for argument, value in zip(schema.arguments, args, strict=False):
            if isinstance(value, torch.Tensor):
                written = argument.alias_info is not None
                self._add(value, 2 if written and "copy_" not in schema.name else 1)
        if not any(each.alias_info is not None for each in schema.returns) and isinstance(result, torch.Tensor):
            self._add(result, 1)
        return result

    def _add(self, tensor: torch.Tensor, times: int) -> None:
        if tensor.nbytes > CACHE_BYTES:
            self.bytes += times * tensor.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_cpu_every_byte_is_read_once_and_none_is_written(dtype, monkeypatch):
    """At most the traffic of two copies is asked for; this is half of one."""
    tensor = tensor_of((2048, 2048), dtype)
    whole = Tile("w", (0, 0), (2048, 2048), (2048, 1), 0)
    tiles = [cut(whole, (0, 0), (2048, 700)), cut(whole, (0, 700), (1000, 1348)), cut(whole, (1000, 700), (1048, 1348))]
    read = []
    loop = digest_cpu._digest_box

    def counting(elements, offset, row_stride, column_stride, rows, columns, *keys):
        read.append(rows * columns * elements.itemsize)
        return loop(elements, offset, row_stride, column_stride, rows, columns, *keys)

    monkeypatch.setattr(digest_cpu, "_digest_box", counting)
    digester = Digester([ParamLayout("p", (2048, 2048), tuple(tiles))])
    with Moved() as digested:
        digester.total({"p": tensor})
    with Moved() as copied:
        torch.empty_like(tensor).copy_(tensor)
    assert copied.bytes == 2 * tensor.nbytes                                # the counter counts
    assert digested.bytes == 0 and sum(read) == tensor.nbytes == copied.bytes / 2
    assert digested.calls == 0


def test_torchs_operations_move_17_times_the_bytes():
    tensor = tensor_of((2048, 2048), torch.bfloat16)
    with Moved() as moved:
        digest_torch.digests(*zip(*held(tensor, Tile("w", (0, 0), (2048, 2048), (2048, 1), 0)), strict=True), [0], 1)
    assert moved.bytes == 17 * tensor.nbytes


def test_wide_rows_are_taken_in_blocks_of_columns(monkeypatch):
    tensor = tensor_of((6, 301), torch.bfloat16)
    whole = Tile("w", (0, 0), (6, 301), contiguous_stride((6, 301)), 0)
    expected = digest_tiles(tensor, [whole])
    for columns in (1, 40, 300):
        monkeypatch.setattr(digest_cpu, "BLOCK", columns)
        assert digest_tiles(tensor, [whole]) == expected
    for elements in (1, 40, 700):
        monkeypatch.setattr(digest_torch, "CHUNK", elements)
        assert digest_torch.digests(*zip(*held(tensor, whole), strict=True), [0], 1)[0] % (MASK + 1) == expected


def test_parameters_that_no_table_can_address_are_refused():
    matrix = tensor_of((4, 4), torch.bfloat16)
    with pytest.raises(ValueError, match="w, which is not contiguous"):
        Digester([ParamLayout("w", (4, 4), ())]).total({"w": matrix.t()})
    two = Digester([ParamLayout(name, (4, 4), ()) for name in "ab"])
    with pytest.raises(ValueError, match="one device, these are on .'cpu', 'meta'."):
        two.total({"a": matrix, "b": matrix.to("meta")})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_digests_a_bucket_in_one_launch_and_gives_the_cpus_digests(dtype):
    pairs = [*cases(dtype), (tensor_of((257, 3000), dtype), Tile("large", (0, 0), (257, 3000), (3000, 1), 0))]
    layouts = [ParamLayout(str(i), (), (tile,)) for i, (_, tile) in enumerate(pairs)]
    on_cpu = {str(i): tensor for i, (tensor, _) in enumerate(pairs)}
    on_gpu = {name: tensor.cuda() for name, tensor in on_cpu.items()}
    digester = Digester(layouts)
    assert digester.each(on_gpu) == Digester(layouts).each(on_cpu)
    digester.total(on_gpu)                                                  # compiled, and its table is on the device
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        total = digester.total(on_gpu)
    assert total == Digester(layouts).total(on_cpu) and digest_module._fused
    kernels = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert sum("_add_digests" in name for name in kernels) == 1 and len(kernels) <= 3, kernels
