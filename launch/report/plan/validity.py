"""`megatron-rl validate`: whether a configuration is valid, and what was checked."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from launch.config.checks import cautions, check_runnable
from launch.config.load import LoadedConfig, load_config
from launch.config.locate import check_data_files, check_model_files
from launch.errors import UserError
from launch.model.architecture import parameter_count
from launch.model.builtin import known
from launch.plan.plan import ForecastPlan
from launch.planner.prepare import Prepared, prepare
from launch.report.quantities import plural
from launch.run.faults import trains

SCHEMA_VERSION = 1
WIDTH = 100
LABEL = 11
"""Width of the first word of a line."""


@dataclass(frozen=True)
class Checked:
    """One thing that was checked and found right."""

    subject: str
    evidence: str


@dataclass(frozen=True)
class Caution:
    """Something that does not make the configuration invalid."""

    subject: str
    """`run`, `model`, `data`, `plan`, or the code of a plan's warning."""
    what: str
    where: str | None = None
    fix: str | None = None


@dataclass(frozen=True)
class Validity:
    """A valid configuration, with the checks made and the warnings."""

    config: str
    checked: tuple[Checked, ...]
    warnings: tuple[Caution, ...]

    def as_json(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, "config": self.config, "valid": True, "error": None,
                "checked": list(map(asdict, self.checked)), "warnings": list(map(asdict, self.warnings))}

    def as_text(self) -> str:
        """At most 100 columns wide, except for long paths."""
        lines = [line for each in self.checked for line in _field(each.subject, each.evidence)]
        for warning in self.warnings:
            lines += _field("warning", f"{warning.subject}: {warning.what}")
            lines += _field("", f"where: {warning.where}") if warning.where else []
            lines += _field("", f"fix: {warning.fix}") if warning.fix else []
        told = f", with {plural(len(self.warnings), 'warning')}" if self.warnings else ""
        return "\n".join([*lines, f"{self.config} is valid{told}"])


def refused(config: str, error: UserError) -> dict[str, Any]:
    """The JSON document of a configuration that is not valid."""
    return {"schema_version": SCHEMA_VERSION, "config": config, "valid": False,
            "error": {"what": error.what, "where": error.where, "fix": error.fix, "exit_code": int(error.exit_code)},
            "checked": [], "warnings": []}


def validate(config: str, overrides: Sequence[str] = (), device: Literal["auto", "cpu", "gpu"] = "auto") -> Validity:
    """Load, check and plan a configuration, except for what only a run needs.

    Raises:
        UserError: it is not valid (`USER_ERROR`), or no plan fits its cluster (`NO_FEASIBLE_PLAN`).
    """
    loaded = load_config(config, overrides)
    prepared = prepare(config, overrides, device)
    return Validity(config, tuple(_checked(loaded, prepared)), tuple(_warnings(loaded, prepared)))


def _checked(loaded: LoadedConfig, prepared: Prepared) -> Iterator[Checked]:
    sources = Counter(source.kind for source in loaded.sources.values())
    yield Checked("keys", f"{sum(sources.values())} values have the right type and range: {sources['file']} from the "
                          f"file, {plural(sources['override'], 'override')}, "
                          f"{sources['default'] + sources['auto']} defaults")
    architecture = prepared.plan.architecture
    yield Checked("model", f"{loaded.config.model.path}: {architecture.family}, {architecture.layers} layers, "
                           f"{parameter_count(architecture):,} parameters")
    yield Checked("agreement", "parallel sizes, lengths, batch, precision and engines agree with each other and with "
                               "the model")
    plan = prepared.plan
    where = "this machine" if loaded.config.cluster == "local" else loaded.config.cluster
    rate = (f", {plan.forecast.throughput.nominal:,.0f} prompts/h predicted" if isinstance(plan, ForecastPlan)
            else "")
    yield Checked("plan", f"{plan.fingerprint()} fits {where} ({plan.device.upper()}): "
                          f"{plural(plan.training.world_size, 'training rank')}, "
                          f"{plural(len(plan.rollout.engines), 'engine')} of TP {plan.rollout.tp}{rate}")


def _warnings(loaded: LoadedConfig, prepared: Prepared) -> Iterator[Caution]:
    here = loaded.config.cluster == "local"
    try:
        check_runnable(loaded, here=here, on="local" if here else "slurm")
    except UserError as error:
        yield _caution("run", error)
    if trains(loaded.config):
        yield from _files(loaded)
    if prepared.plan.no_forecast:
        yield Caution("plan", f"no forecast: {prepared.plan.no_forecast}")
    if isinstance(prepared.plan, ForecastPlan):
        yield from (Caution(each.code, each.message) for each in prepared.plan.forecast.warnings)
    else:
        yield from (Caution(code, message) for code, message in cautions(prepared.config))


def _files(loaded: LoadedConfig) -> Iterator[Caution]:
    """Check what a run reads but a plan does not."""
    config = loaded.config
    if not Path(config.model.path).is_dir() and known(config.model.path):
        yield Caution("model", f"{config.model.path} is a built-in architecture, which can be planned; a run needs a "
                               "model folder", loaded.where("model.path"), "set model.path to it")
    else:
        try:
            check_model_files(loaded)
        except UserError as error:
            yield _caution("model", error)
    try:
        check_data_files(loaded)
    except UserError as error:
        yield _caution("data", error)


def _caution(subject: str, error: UserError) -> Caution:
    return Caution(subject, error.what, error.where, error.fix)


def _field(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{label:<{LABEL}}", subsequent_indent=" " * (LABEL + 2),
                         break_long_words=False, break_on_hyphens=False)
