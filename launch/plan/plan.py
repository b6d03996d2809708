"""The plan and the placement. The launcher decides both, and every process reads them.

A plan is logical and immutable: it holds the parallel sizes, the coordinates of every rank and the engines. A placement
binds a plan to nodes, GPUs and ports for one attempt. No process derives a coordinate a second time.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, computed_field, model_validator

from launch.model.architecture import Architecture
from launch.plan.forecast import Forecast

SCHEMA_VERSION = 3
OPENED = ("route", "expected_s", "chunk_bytes", "communicators", "communicator_bytes", "communicators_total",
          "opening_rounds", "opening_s")
"""What `weight_sync` of a plan's JSON says of its route."""
VIEWS = ("weight_sync",)
"""Parts of a plan's JSON that repeat others. They are written and never read."""


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class RankCoordinates(Frozen):
    """One training rank: rank = tp + TP (cp + CP (dp + DP pp)), Megatron's order."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int


class TrainingPlan(Frozen):
    tp: int
    pp: int
    vpp: int
    cp: int
    dp: int
    sequence_parallel: bool
    padded_vocab: int
    """Vocabulary rounded up to a multiple of 128 x TP, as Megatron shards it."""
    layers_of_stage: tuple[tuple[tuple[int, ...], ...], ...]
    """Global layer numbers, in order: `layers_of_stage[pp][vpp]`."""
    ranks: tuple[RankCoordinates, ...]

    @property
    def world_size(self) -> int:
        return len(self.ranks)


class EnginePlan(Frozen):
    replica: int
    tp: int


class RolloutPlan(Frozen):
    tp: int
    engines: tuple[EnginePlan, ...]


PARTS = 8
"""Maximum number of parts in which a batch is trained (`algorithm.overlap`): a part has at least this share of it."""


class BatchPlan(Frozen):
    prompts_per_step: int
    group_size: int
    samples_per_step: int
    updates_per_batch: int
    """Optimizer steps on a rollout batch, over all epochs."""
    token_budget: int
    """Maximum number of tokens of a packed micro-batch."""
    sequence_multiple: int
    """Each sequence is padded to a multiple of this number: 2 CP if CP > 1, times TP with sequence parallelism."""
    share_prompts: bool = False
    """Whether the completions of a group share one copy of their prompt in a micro-batch."""


class TeacherPlan(Frozen):
    """The frozen teacher of on-policy distillation. It is on the policy's ranks, with the same parallel sizes."""

    architecture: Architecture
    padded_vocab: int
    layers_of_stage: tuple[tuple[tuple[int, ...], ...], ...]


class Plan(Frozen):
    schema_version: int = SCHEMA_VERSION
    config_hash: str
    architecture: Architecture
    device: Literal["cpu", "gpu"]
    training: TrainingPlan
    rollout: RolloutPlan
    batch: BatchPlan
    teacher: TeacherPlan | None = None
    """None without `algorithm.distillation.teacher`."""
    no_forecast: str = ""
    """The reason if nothing is predicted."""
    chosen: dict[str, bool | int | float | str] = {}
    """Dotted keys of the configuration -> values that the user did not write: values of keys that were `auto`, and
    changes by an attempt (fewer nodes, a longer start). Only the plan holds them. An attempt's `config.yaml` keeps the
    user's `auto`, and `launch.run.attempts.Attempt.config` combines the two."""

    @model_validator(mode="before")
    @classmethod
    def _without_views(cls, content: Any) -> Any:
        return {key: value for key, value in content.items() if key not in VIEWS} if isinstance(content, dict) else \
            content

    def fingerprint(self) -> str:
        """Hash of everything that a run depends on. A better forecast of the same plan does not change it. The chosen
        values enter through `config_hash`."""
        prediction = {"forecast", "no_forecast", "chosen", *VIEWS}
        return hashlib.sha256(self.model_dump_json(exclude=prediction).encode()).hexdigest()[:16]

    def of_teacher(self) -> Plan:
        """This plan with the teacher as its model."""
        assert self.teacher is not None, "the run has no teacher"
        training = self.training.model_copy(update={
            "padded_vocab": self.teacher.padded_vocab, "layers_of_stage": self.teacher.layers_of_stage})
        return self.model_copy(update={"architecture": self.teacher.architecture, "training": training})

    def predicted(self, forecast: Forecast) -> ForecastPlan:
        """The same plan with its forecast."""
        return ForecastPlan(**{**dict(self), "forecast": forecast})


class ForecastPlan(Plan):
    """A plan with a forecast. Every plan for a cluster has one. A plan for this machine has one if the machine's kind
    of GPU and the lengths of the data are known."""

    forecast: Forecast

    @computed_field         # type: ignore[prop-decorator]  # the order that pydantic asks for
    @property
    def weight_sync(self) -> dict[str, str | int | float]:
        """The route that a run takes, with what it opens at the start: a view of `forecast.sync.routes`, for readers of
        the JSON."""
        sync = self.forecast.sync
        chosen = (route.model_dump(include=set(OPENED)) for route in sync.routes if route.route == sync.chosen)
        return next(chosen, {})


def forecast_of(plan: Plan) -> Forecast | None:
    """The forecast of a plan, if it has one."""
    return plan.forecast if isinstance(plan, ForecastPlan) else None


def read_plan(content: object) -> Plan:
    """A plan from parsed JSON, with its forecast if there is one. Raises ValidationError."""
    if isinstance(content, dict) and content.get("forecast") is None:       # older plans wrote a null
        return Plan.model_validate({key: value for key, value in content.items() if key != "forecast"})
    return ForecastPlan.model_validate(content)


class RankPlacement(Frozen):
    rank: int
    node: str
    """Ray node name."""
    gpu: int | None
    """Local GPU index; None on a CPU."""
    port: int
    """Port of this rank's weight-sync lane. The rank listens on its node's job interface."""
    nic: int | None = None
    """Index of the NIC next to the GPU; None if it is unknown."""


class EnginePlacement(Frozen):
    replica: int
    node: str
    """Node of the engine's first rank."""
    gpus: tuple[int, ...]
    """Local GPU of each rank of the engine, in rank order."""
    nics: tuple[int, ...] = ()
    """The NIC next to each of `gpus`; () if they are unknown."""
    nodes: tuple[str, ...] = ()
    """Node of each of `gpus`; () for an engine inside one node."""


class Placement(Frozen):
    attempt: int
    plan_fingerprint: str
    nodes: tuple[str, ...]
    addresses: dict[str, str]
    """Ray node name -> address in the job's network."""
    training: tuple[RankPlacement, ...]
    rollout: tuple[EnginePlacement, ...]
    master_port: int
    """Port of the training ranks' rendezvous, on the node of rank 0."""
    rewards: tuple[str, ...] = ()
    """Node of each reward actor: every node that trains. (): an attempt of an older version."""
    spares: tuple[str, ...] = ()
    """Nodes of the allocation that no process runs on."""
    ports: dict[str, int] = {}
    """Node -> first port of its block (`launch.ports`). Empty: one block serves all nodes."""
    interfaces: dict[str, str] = {}
    """Node -> the network interface of its address. Empty: the job runs on one machine and uses loopback."""
    leaves: dict[str, int] = {}
    """Node -> number of its leaf switch. Empty: all nodes share one."""

    nics: dict[str, tuple[str, ...]] = {}
    """Node -> names of its NICs in rail order, such as `mlx5_0`. Empty: NCCL finds them."""

    def interface(self, node: str) -> str:
        return self.interfaces.get(node, "lo")
