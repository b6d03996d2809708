"""The given numbers of a plan, written into the book: fields of the model's shape, the layouts and the GPU, by the
keys under which the models name them as inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from launch.cluster.spec import Gpu
from launch.model.shape import ModelShape
from launch.plan.book import Book
from launch.plan.layouts import RolloutLayout, TrainingLayout

PRECISION_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
RECOMPUTE_SHARE = {(): 0.0, ("full",): 1.0}
"""How a choice of recomputation stands in the book: 0 none, 1 full, 0.5 some modules."""
ROLLOUT_KEYS = {"weight_precision": "weight_bytes", "kv_precision": "kv_bytes"}
UNITS = {"hbm_bytes": "bytes", "usable_bytes": "bytes", "hbm_bandwidth": "bytes/s", "nvlink_bandwidth": "bytes/s",
         "bf16_flops": "FLOP/s", "fp8_flops": "FLOP/s", "fp32_flops": "FLOP/s", "weight_bytes": "bytes",
         "kv_bytes": "bytes", "grad_bytes": "bytes", "precision": "bytes"}

Source = Callable[[str], str]
"""Key -> where its value came from."""


def write_model(book: Book, shape: ModelShape, source: Source) -> None:
    """`model.<field of ModelShape>`."""
    _write(book, "model", shape, source)


def write_trainer(book: Book, layout: TrainingLayout, source: Source) -> None:
    """`trainer.<field of TrainingLayout>`; a precision stands as bytes, recomputation as a share, and
    `layers_of_stage` as the layers of its first stage."""
    _write(book, "trainer", layout, source)


def write_rollout(book: Book, layout: RolloutLayout, source: Source) -> None:
    """`rollout.<field of RolloutLayout>`, the precisions as `weight_bytes` and `kv_bytes`."""
    _write(book, "rollout", layout, source)


def write_gpu(book: Book, gpu: Gpu, source: Source) -> None:
    """`gpu.<field of Gpu>`."""
    _write(book, "gpu", gpu, source)


def _write(book: Book, prefix: str, values: Any, source: Source) -> None:
    for each in fields(values):
        name = ROLLOUT_KEYS.get(each.name, each.name) if prefix == "rollout" else each.name
        number = _number(each.name, getattr(values, each.name))
        if number is not None:
            book.given(f"{prefix}.{name}", number, UNITS.get(name, ""), source(f"{prefix}.{name}"))


def _number(name: str, value: Any) -> float | None:
    if name == "recompute":
        return RECOMPUTE_SHARE.get(value, 0.5)
    if name == "layers_of_stage":
        return value[0] if value else None
    if isinstance(value, str):
        return PRECISION_BYTES.get(value)
    return int(value) if isinstance(value, bool) else value
