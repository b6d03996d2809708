"""Weights read back from disk: digests of the files, and a comparison with a live engine's parameters.

    python -m megatron_rl.layouts.disk_check runs/NAME/weights/step-000060

reads a folder again and names the tensors that differ from the trainer's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from torch import Tensor

from launch.errors import UserError
from megatron_rl.layouts import step_folder
from megatron_rl.layouts.digest import BITS, add, digest_tiles
from megatron_rl.layouts.hf_read import CheckpointReader
from megatron_rl.layouts.tiles import ParamLayout, Tile, contiguous_stride, tile_view

AT_ONCE = 1 << 24
"""Number of elements read at once."""


def digests_of_files(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Digest of each named tensor of a Hugging Face folder, read one block of rows at a time."""
    digests = {}
    with CheckpointReader(folder) as reader:
        for name in names:
            shape = reader.shape(name)
            rows = max(1, AT_ONCE // max(1, prod(shape[1:])))
            digests[name] = 0
            for row in range(0, shape[0], rows):
                start, box = (row, *[0] * (len(shape) - 1)), (min(rows, shape[0] - row), *shape[1:])
                tile = Tile(name, start, box, contiguous_stride(box), 0)
                digests[name] = add(digests[name], digest_tiles(reader.read(name, start, box).contiguous(), (tile,)))
    return digests


def recorded_digests(folder: Path) -> dict[str, int]:
    """Digests of the trainer's tensors, by name, for a version that was written completely.

    Raises:
        UserError: the version is not complete, or was written without digests.
    """
    if problem := step_folder.incomplete_because(folder):
        raise UserError(f"these weights are not complete: {problem}", where=str(folder),
                        fix="use an older version; `weight_sync.disk.keep` sets how many there are")
    facts = json.loads((folder / step_folder.COMPLETE).read_text())
    if "digests" not in facts:
        raise UserError(f"{step_folder.COMPLETE} has no digests of weights", where=str(folder),
                        fix="give a folder under runs/NAME/weights or runs/NAME/hf")
    return {name: int(digest, 16) for name, digest in facts["digests"].items()}


def changed(folder: Path) -> tuple[list[str], int]:
    """Names of the tensors in a version's files that differ from the trainer's, and the number of tensors.

    Raises:
        UserError: the version is not complete or cannot be read.
    """
    recorded = recorded_digests(folder)
    return step_folder.unlike(recorded, digests_of_files(folder, recorded)), len(recorded)


def refuse_changed(folder: Path) -> None:
    """Raise UserError unless a version is complete and its files hold the trainer's weights."""
    wrong, _ = changed(folder)
    if wrong:
        raise UserError(f"{len(wrong)} tensors are not what the trainer had: {', '.join(wrong[:5])}", where=str(folder),
                        fix="use another version, and check the file system for faults")


def differences(parameters: Mapping[str, Tensor], layouts: Iterable[ParamLayout], folder: str | Path) -> list[str]:
    """Compare live parameters with the weights in a folder, bit for bit, except for padding.

    Returns:
        One line per box of a tensor that differs, with the parameter and the number of elements; [] if all are equal.
    """
    lines = []
    with CheckpointReader(folder) as reader:
        for layout in layouts:
            live = parameters[layout.name]
            for tile in layout.tiles:
                lines += _difference(tile_view(live, tile), reader.read(tile.tensor, tile.start, tile.shape),
                                     f"{layout.name}: {tile.tensor} from {list(tile.start)}")
    return lines


def read_tiles(parameters: Mapping[str, Tensor], layouts: Iterable[ParamLayout], folder: str | Path) -> None:
    """Read the weights in a folder into parameters."""
    with CheckpointReader(folder) as reader:
        for layout in layouts:
            for tile in layout.tiles:
                tile_view(parameters[layout.name], tile).copy_(reader.read(tile.tensor, tile.start, tile.shape))


def _difference(live: Tensor, stored: Tensor, what: str) -> list[str]:
    if live.dtype != stored.dtype:
        return [f"{what}: {live.dtype} in the engine, {stored.dtype} on disk"]
    bits = BITS[live.element_size()]
    wrong = int((live.cpu().contiguous().view(bits) != stored.contiguous().view(bits)).sum())
    return [f"{what}: {wrong:,} of {stored.numel():,} elements differ"] if wrong else []


def main(arguments: list[str]) -> int:
    """Check one folder. Returns 0 if it matches the trainer's weights, 1 if not, 2 if it cannot be checked."""
    if len(arguments) != 1:
        print("usage: python -m megatron_rl.layouts.disk_check FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        wrong, tensors = changed(folder)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for name in wrong:
        print(f"{name}: not what the trainer had")
    print(f"{folder}: {tensors - len(wrong)} of {tensors} tensors are what the trainer had")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
