"""Measured points in the format of `benchmarks/measured/README.md`: typed access that tolerates omissions of the
sources.

Values that are null or `not_stated` count as absent. A point whose model is only described in words, or whose GPU is
not in the table, is loaded with `model` or `gpu` None, and `model_problem` or `gpu_problem` gives the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import yaml

from launch.cluster import gpus
from launch.cluster.spec import Gpu
from launch.errors import UserError
from launch.model.architecture import Architecture

FILE_KINDS = ("training", "memory", "rl_steps", "decode", "weight_sync", "collectives")
NOT_STATED = "not_stated"
LARGEST = 10 ** 15
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)     # the C loader is ten times faster
_MLP_MATRICES = {"swiglu": 3, "geglu": 3, "gelu": 2, "squared_relu": 2, "relu": 2}
_MISSING = object()


@dataclass(frozen=True)
class Point:
    """One measured configuration."""

    id: str
    kind: str
    """One of `FILE_KINDS`, or `parameters` for a model whose exact count is given."""
    regime: str
    """Group for scoring. Errors are compared within a group."""
    source: str
    """Repository or site: the unit that is left out of a calibration."""
    confidence: str
    """read, transcribed or secondary."""
    data: Mapping[str, Any]
    """The point as written in the file."""
    model: Architecture | None
    model_name: str
    model_data: Mapping[str, Any] = field(default_factory=dict)
    """The model's entry in the file, with the point's `model_overrides` applied."""
    model_problem: str = ""
    gpu: Gpu | None = None
    gpu_problem: str = ""

    @property
    def calibrates(self) -> bool:
        """Whether the point may be used to calibrate. False for pages that quote another source."""
        return self.confidence != "secondary"

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path ("measured.step_time_s"); `default` if it is absent, null or not stated."""
        value: Any = self.data
        for name in path.split("."):
            value = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
        return default if value is _MISSING or value is None or value == NOT_STATED else value

    @overload
    def number(self, path: str, default: None = None) -> float | None: ...
    @overload
    def number(self, path: str, default: float) -> float: ...
    def number(self, path: str, default: float | None = None) -> float | None:
        """A finite number >= 0 at a path. Numbers in text ("1e9") count; anything else is absent."""
        value = self.get(path)
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            return default
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return default
        return number if 0 <= number < float("inf") else default      # NaN compares false

    @overload
    def integer(self, path: str, default: None = None) -> int | None: ...
    @overload
    def integer(self, path: str, default: int) -> int: ...
    def integer(self, path: str, default: int | None = None) -> int | None:
        """A whole number at a path, at most `LARGEST`."""
        number = self.number(path)
        return default if number is None or number != int(number) or number > LARGEST else int(number)

    @overload
    def text(self, path: str, default: None = None) -> str | None: ...
    @overload
    def text(self, path: str, default: str) -> str: ...
    def text(self, path: str, default: str | None = None) -> str | None:
        """A text at a path. `not stated (rank 0 ...)` is a text."""
        value = self.get(path)
        return value if isinstance(value, str) and value else default

    @overload
    def flag(self, path: str, default: None = None) -> bool | None: ...
    @overload
    def flag(self, path: str, default: bool) -> bool: ...
    def flag(self, path: str, default: bool | None = None) -> bool | None:
        value = self.get(path)
        return value if isinstance(value, bool) else default

    def sizes(self, path: str = "parallelism") -> dict[str, int]:
        """The stated sizes of a parallel layout (tp, pp, cp, dp, vpp, ep, fsdp). Others are absent."""
        names = self.get(path)
        if not isinstance(names, Mapping):
            return {}
        sizes = {str(name): self.integer(f"{path}.{name}") for name in names}
        return {name: size for name, size in sizes.items() if size is not None and size > 0}

    def recompute(self) -> tuple[str, ...]:
        """Recomputed modules: () for none or if not stated, ("full",), ("core_attn", "layernorm").
        "selective" and "selective_attention" are Megatron's names for recomputing core attention."""
        value = self.get("recompute", "none")
        names = value if isinstance(value, list) else str(value).replace(",", "+").split("+")
        names = [str(name).strip() for name in names]
        return tuple("core_attn" if name in ("selective", "selective_attention") else name
                     for name in names if name and name != "none")

    @property
    def num_gpus(self) -> int | None:
        return self.integer("hardware.num_gpus")


def load(directory: str | Path) -> list[Point]:
    """All points of the YAML files of a directory, which may hold any of `FILE_KINDS`, sorted by file name.

    Raises:
        UserError: the directory is missing or has no YAML file, or a file cannot be read, is not YAML, has an unknown
            kind or no list of points.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a directory", where="megatron-rl plan accuracy DIR",
                        fix=f"name a directory with files like {', '.join(f'{kind}.yaml' for kind in FILE_KINDS)}")
    files = sorted(file for file in folder.iterdir() if file.suffix in (".yaml", ".yml") and file.is_file())
    if not files:
        raise UserError(f"no measured points (*.yaml) in {folder}", where="megatron-rl plan accuracy DIR",
                        fix=f"put files like {', '.join(f'{kind}.yaml' for kind in FILE_KINDS)} there")
    points: list[Point] = []
    counts: dict[str, Point] = {}
    for file in files:
        document = _read(file)
        if file.stem not in FILE_KINDS and not {"kind", "points"} & set(document):
            continue        # another file kept next to the points
        models = _mapping(document.get("models"), f"{file}, models")
        points += _points(document, models, file)
        for name, fields in models.items():
            point = _count_point(str(name), fields, file)
            if point is not None:
                counts.setdefault(f"{name}={point.data['measured']['parameters']}", point)
    return points + list(counts.values())


def _read(file: Path) -> Mapping[str, Any]:
    try:
        document = yaml.load(file.read_text(encoding="utf-8"), Loader=_LOADER)   # a safe loader: plain values only
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read this file: {error}", where=str(file), fix="save it as UTF-8 text") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"not valid YAML: {' '.join(str(error).split())}", where=str(file),
                        fix="correct the syntax") from error
    if not isinstance(document, Mapping):
        raise UserError("not a file of measured points: a mapping with `kind` and `points` is expected",
                        where=str(file), fix="see benchmarks/measured/README.md for the format")
    return document


def _points(document: Mapping[str, Any], models: Mapping[str, Any], file: Path) -> list[Point]:
    kind = document.get("kind") or file.stem
    if kind not in FILE_KINDS:
        raise UserError(f"unknown kind of points: {kind}", where=f"{file}, kind",
                        fix=f"use one of {', '.join(FILE_KINDS)}, or keep other YAML files elsewhere")
    listed = document.get("points")
    if listed is not None and not isinstance(listed, list):
        raise UserError("`points` is not a list", where=f"{file}, points",
                        fix="write `points:` and one `- id: ...` each")
    points = []
    for number, data in enumerate(listed or []):
        if not isinstance(data, Mapping):
            raise UserError(f"point {number + 1} is not a mapping", where=f"{file}, points",
                            fix="write `- id: ...` and its fields")
        points.append(_point(str(kind), data, models, f"{file.stem}#{number + 1}"))
    return points


def _point(kind: str, data: Mapping[str, Any], models: Mapping[str, Any], fallback_id: str) -> Point:
    model_name = _text(data.get("model"))
    model_data, model, model_problem = _model(model_name, data, models)
    gpu, gpu_problem = _gpu(data)
    return Point(
        id=_text(data.get("id")) or fallback_id, kind=kind, regime=_text(data.get("regime")) or NOT_STATED,
        source=_source(data.get("source")), confidence=_text(data.get("confidence")) or NOT_STATED, data=data,
        model=model, model_name=model_name or NOT_STATED, model_data=model_data, model_problem=model_problem,
        gpu=gpu, gpu_problem=gpu_problem)


def _count_point(name: str, fields: Any, file: Path) -> Point | None:
    """A model with an exact number of parameters is a point by itself."""
    if not isinstance(fields, Mapping) or not isinstance(fields.get("params"), int):
        return None
    shape, problem = _shape(name, fields)
    return Point(id=name, kind="parameters", regime="exact", source=f"{file.name}, models", confidence="read",
                 data={"measured": {"parameters": fields["params"]}}, model=shape, model_name=name, model_data=fields,
                 model_problem=problem)


def _model(name: str, data: Mapping[str, Any],
           models: Mapping[str, Any]) -> tuple[Mapping[str, Any], Architecture | None, str]:
    if not name:
        return {}, None, "no model is named"
    fields, overrides = models.get(name), data.get("model_overrides")
    if not isinstance(fields, Mapping):
        return {}, None, f"model {name} is not described in this file"
    if isinstance(overrides, Mapping):
        fields = {**fields, **overrides}
        if "params" not in overrides:
            fields.pop("params", None)     # the count of the model without the overrides
    shape, problem = _shape(name, fields)
    return fields, shape, problem


def _shape(name: str, fields: Mapping[str, Any]) -> tuple[Architecture | None, str]:
    """A model's entry as a shape, or the reason why there is none."""
    if isinstance(fields.get("architecture"), str):
        return None, f"model {name}: {fields['architecture']}"
    experts = _whole(fields.get("num_experts")) or 0
    needed = ["layers", "hidden", "heads", "vocab", *(["experts_per_token", "moe_ffn"] if experts else ["ffn"])]
    missing = [key for key in needed if not _whole(fields.get(key))]
    mlp = fields.get("mlp") or "swiglu"
    if missing:
        return None, f"model {name}: {', '.join(missing)} not given"
    if not isinstance(mlp, str) or mlp not in _MLP_MATRICES:
        return None, f"model {name}: mlp {mlp} is not modelled"
    if not isinstance(fields.get("tied", False), bool):
        return None, f"model {name}: tied embeddings not stated"
    size = {key: _whole(fields.get(key)) or 0 for key in (*needed, "kv_heads", "head_dim", "ffn", "shared_ffn")}
    return Architecture(
        layers=size["layers"], hidden=size["hidden"], ffn=size["ffn"], heads=size["heads"],
        kv_heads=size["kv_heads"] or size["heads"], head_dim=size["head_dim"] or size["hidden"] // size["heads"],
        vocab=size["vocab"], tied=fields.get("tied", False), mlp_matrices=_MLP_MATRICES[mlp],
        qkv_bias=fields.get("qkv_bias") is True, qk_norm=fields.get("qk_norm") is True, experts=experts,
        experts_per_token=size.get("experts_per_token", 0), moe_ffn=size.get("moe_ffn", 0),
        shared_ffn=size["shared_ffn"]), ""


def _gpu(data: Mapping[str, Any]) -> tuple[Gpu | None, str]:
    hardware = data.get("hardware")
    name = _text(hardware.get("gpu")) if isinstance(hardware, Mapping) else ""
    if not name or name == NOT_STATED:
        return None, "the GPU is not stated"
    try:
        gpu = gpus.find(name)
    except UserError as error:
        return None, error.what
    return gpu, "" if gpu is not None else f"GPU {name} is not in the table"


def _source(source: Any) -> str:
    if isinstance(source, Mapping):
        source = next((source[key] for key in ("repo", "url", "site", "path") if source.get(key)), None)
    return _text(source) or NOT_STATED


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise UserError("a mapping is expected here", where=where, fix="see benchmarks/measured/README.md")
    return value or {}


def _text(value: Any) -> str:
    return "" if value is None or isinstance(value, (Mapping, list)) else str(value)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
