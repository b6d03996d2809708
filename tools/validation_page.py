"""Writes docs/validation.md.

    python -m tools.validation_page
"""

from __future__ import annotations

from pathlib import Path

from launch.validate.points import load
from launch.validate.report import Report, evaluate
from launch.validate.score import DEVELOPMENT
from launch.validate.table import markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "validation.md"

TEXT = """\
# The planner's models beside measured runs

    megatron-rl validate
    megatron-rl validate DIR --json

runs the planner's models over measured points and prints predicted, measured and error of each, the medians below,
and what could not be predicted and why. Without `DIR` it takes the points in
[benchmarks/measured](../benchmarks/measured/README.md), whose format any other directory of points must have; it may
hold only some of the files. Points with unknown GPUs, with models that are described in words, or without a field
that the model needs are listed with the reason.

An error is (predicted - measured) / measured: above 0 the model says too much. Inside a published range it is 0,
outside it counts from the nearer end. "absolute" and "signed" are medians over a group's quantities. Targets apply to
kinds and to regimes of eight points or more.

`fits` is a verdict, right or wrong, and enters no median. The coefficients (`launch/planner/coefficients/`) are
fitted to these very points by `calibrate` in `launch/planner/validate/<kind>.py`; a prediction sees neither a point's
id nor its source nor its framework, except for the engine class that the coefficients' docstrings name. How far the
models hold for runs that they have not seen is what the section on sources says: each source is taken out of the
calibration in turn, and the points of that source are predicted with what the others give.

This page was written by `make docs`.

"""


def page(report: Report) -> str:
    return TEXT + markdown(report)


if __name__ == "__main__":
    PAGE.write_text(page(evaluate(load(DEVELOPMENT))), encoding="utf-8")
