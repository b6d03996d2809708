"""Reads a plan written by `megatron-rl plan --out`, and requires its forecast."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from launch.errors import UserError
from launch.plan.plan import SCHEMA_VERSION, ForecastPlan, Plan, read_plan
from launch.report.quantities import plain


def load_plan(path: str | Path) -> Plan:
    """The plan in a JSON file.

    Raises:
        UserError: the file is missing, not JSON, of another schema version, or not a plan; the message names the file
            and the first invalid field.
    """
    name = plain(str(path))
    again = "write it again: megatron-rl plan CONFIG --out FILE"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the plan {name}: {error.strerror}", where=name,
                        fix="give a file written by megatron-rl plan CONFIG --out FILE") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON: {plain(str(error))}", where=name, fix=again) from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version is None:
        raise UserError(f"{name} is not a plan: it has no schema_version", where=name,
                        fix="give a file written by megatron-rl plan CONFIG --out FILE")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{name} has schema_version {plain(repr(version))}, this version reads {SCHEMA_VERSION}",
            where=f"{name}: schema_version",
            fix=f"{again}, with this version",
        )
    try:
        return read_plan(content)
    except (ValidationError, RecursionError) as error:
        field, why = "", "nested too deeply"
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            field, why = plain(".".join(map(str, first["loc"]))), first["msg"]
        field = field or "the whole file"
        raise UserError(f"{name} is not a valid plan: {field}: {plain(why)}",
                        where=f"{name}: {field}", fix=again) from error


def with_forecast(plan: Plan, so: str) -> ForecastPlan:
    """The plan, if it has a forecast.

    Raises:
        UserError: it has none. `so` is what follows from that: `there is nothing to draw`.
    """
    if not isinstance(plan, ForecastPlan):
        raise UserError(f"this plan has no forecast, so {so}", where="plan: forecast",
                        fix="plan for a cluster: megatron-rl plan CONFIG --cluster FILE")
    return plan
