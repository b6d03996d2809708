"""Compares the reports of a rehearsal's processes with the placement.

    attempts/<n>/
        nodes/<node>/rehearsal.json     the report of each process of a node
        ray-census.json                 with Ray: when its nodes were counted, and the report of an actor on each
        rehearsal.json rehearsal.txt    the result: every process, the checks, and the differences
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch import envvars
from launch.config.resolved import ResolvedConfig
from launch.files.shared import write_atomically
from launch.files.waiting import listed
from launch.plan.plan import Placement, Plan, forecast_of
from launch.report.run import rehearsal_table as table
from launch.run.attempts import Attempt
from launch.run.outcome import Outcome
from launch.runtime.places import PlacedProcess, places, variables

SCHEMA_VERSION = 1
NAMED = 4
"""Maximum number of processes named in a message; the report names all."""


@dataclass(frozen=True)
class RankReport:
    """The report of one process about itself (`launch/runtime/workloads/rank_report.py`)."""

    process: str
    node: str
    """SLURMD_NODENAME."""
    gpu: int | None
    """Its entry of CUDA_VISIBLE_DEVICES."""
    nic: int | None
    host: str = ""
    pid: int = 0
    cpus: int = 0
    switches: str = ""
    """SLURM_TOPOLOGY_ADDR: `core.spine1.leaf1.h100-001`; "" without the topology plug-in."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables that `launch.envvars.recordable` keeps, secrets masked."""

    @property
    def leaf(self) -> str:
        """The leaf switch of the node."""
        above = self.switches.removesuffix(self.node).rstrip(".")
        return above.rpartition(".")[2] if "[" not in above.rpartition(".")[2] else above


@dataclass(frozen=True)
class RayReport:
    """The result of the rehearsal's driver (`megatron_rl.driver.ray_census`)."""

    counted_s: float
    """Seconds from its start until every node of the placement was counted."""
    actors_s: float
    """Seconds from then until an actor on each node had answered."""
    found: Mapping[str, str]
    """Node of the placement -> node on which its actor ran."""


@dataclass(frozen=True)
class Mismatch:
    """A difference from the placement."""

    process: str
    placed: str
    found: str


@dataclass(frozen=True)
class Comparison:
    """One check, applied to many processes."""

    name: str
    asked: int
    findings: tuple[Mismatch, ...] = ()

    @property
    def held(self) -> int:
        return self.asked - len(self.findings)


def node_file(attempt: Attempt, node: str) -> Path:
    return attempt.folder / "nodes" / node / "rehearsal.json"


def ray_file(attempt: Attempt) -> Path:
    return attempt.folder / "ray-census.json"


def conclude(attempt: Attempt) -> Outcome:
    """Compare the reports of all nodes with the placement, write the result, and return the outcome."""
    config, plan, placement = attempt.config(), attempt.plan(), attempt.placement()
    reports = [RankReport(**row) for node in placement.nodes
               for row in json.loads(node_file(attempt, node).read_text(encoding="utf-8"))]
    given = {place.process: variables(place, config, placement, plan.device, attempt.mark)
             for place in places(placement)}
    census = ray_file(attempt)
    ray = RayReport(**json.loads(census.read_text(encoding="utf-8"))) if census.exists() else None
    checks = [*compare(plan, placement, reports, given), *([ray_nodes(placement, ray)] if ray else [])]
    document = (to_document(placement, reports, checks) | {"run": _run_as_planned(config, plan)}
                | ({"ray": asdict(ray)} if ray else {}))
    write_atomically(attempt.folder / "rehearsal.json", json.dumps(document, indent=1))
    write_atomically(attempt.folder / "rehearsal.txt", table.text(document) + "\n")
    failed = [check for check in checks if check.findings]
    if not failed:
        return Outcome(status="finished", step=0, message=f"rehearsed: {len(reports)} processes on "
                       f"{len(placement.nodes)} nodes are where the placement wants them")
    return Outcome(status="preflight", step=0, message="the rehearsal does not match the placement\n" +
                   "\n".join(f"  {check.name}: {_listed(check.findings)}" for check in failed) +
                   f"\n  report: {attempt.folder / 'rehearsal.txt'}")


def compare(plan: Plan, placement: Placement, reports: Sequence[RankReport],
            given: Mapping[str, Mapping[str, str]]) -> tuple[Comparison, ...]:
    """All checks, including those that hold. Pure.

    Args:
        given: process -> the variables that the launcher set for it.
    """
    wanted = {place.process: place for place in places(placement)}
    said = {report.process: report for report in reports}
    pairs = [(place, said[name]) for name, place in wanted.items() if name in said]
    checks = [
        _each_once(wanted, reports),
        _equal("node", pairs, lambda place: place.node, lambda report: report.node),
        _equal("GPU", pairs, lambda place: _on(place.node, place.gpu), lambda report: _on(report.node, report.gpu)),
        _equal("NIC", pairs, lambda place: place.nic, lambda report: report.nic),
        _one_process_a_gpu(placement, reports),
        _groups_in_a_node(plan, wanted, said),
        _rails(plan, wanted, said),
        _environment(pairs, given)]
    return tuple(check for check in checks if check.asked)


def _each_once(wanted: Mapping[str, PlacedProcess], reports: Sequence[RankReport]) -> Comparison:
    times = Counter(report.process for report in reports)
    findings = [Mismatch(name, "once", f"{times[name]} times" if times[name] else "no report")
                for name in wanted if times[name] != 1]
    findings += [Mismatch(name, "nowhere", "reported") for name in times if name not in wanted]
    return Comparison("each process once", len(wanted), tuple(findings))


def _equal(name: str, pairs: Sequence[tuple[PlacedProcess, RankReport]], placed: Callable[[PlacedProcess], Any],
           found: Callable[[RankReport], Any]) -> Comparison:
    findings = [Mismatch(place.process, str(placed(place)), str(found(report))) for place, report in pairs
                if placed(place) != found(report)]
    asked = sum(placed(place) is not None for place, _ in pairs)
    return Comparison(f"{name} as placed", asked or len(findings), tuple(findings))


def _one_process_a_gpu(placement: Placement, reports: Sequence[RankReport]) -> Comparison:
    """A GPU has as many processes as the placement assigns: one, or two if both partitions share it."""
    allowed = Counter((place.node, place.gpu) for place in places(placement) if place.gpu is not None)
    holders: dict[tuple[str, int], list[str]] = defaultdict(list)
    for report in reports:
        if report.gpu is not None:
            holders[report.node, report.gpu].append(report.process)
    findings = [Mismatch(", ".join(names), f"{allowed[seat]} on {_on(*seat)}", f"{len(names)}")
                for seat, names in holders.items() if len(names) > allowed[seat]]
    return Comparison("no GPU taken twice", len(allowed), tuple(findings))


def _groups_in_a_node(plan: Plan, wanted: Mapping[str, PlacedProcess], said: Mapping[str, RankReport]) -> Comparison:
    """TP groups and engines are inside one node, except for those placed across nodes."""
    groups: dict[str, list[str]] = defaultdict(list)
    for rank in plan.training.ranks:
        groups[f"TP group cp{rank.cp} dp{rank.dp} pp{rank.pp}"].append(f"trainer-{rank.rank}")
    for name, place in wanted.items():
        if place.role == "rollout":
            groups[name.partition(".")[0]].append(name)
    inside = {name: members for name, members in groups.items() if len({wanted[each].node for each in members}) == 1}
    findings = []
    for name, members in inside.items():
        nodes = sorted({said[each].node for each in members if each in said})
        if len(nodes) > 1:
            findings.append(Mismatch(name, "one node", ", ".join(nodes)))
    return Comparison("TP groups and engines inside a node", len(inside), tuple(findings))


def _rails(plan: Plan, wanted: Mapping[str, PlacedProcess], said: Mapping[str, RankReport]) -> Comparison:
    """Ranks that exchange gradients or activations across nodes have GPUs of equal local index, so that their NICs are
    on one rail, except for groups that the placement could not align."""
    groups: dict[str, list[str]] = defaultdict(list)
    for rank in plan.training.ranks:
        if plan.training.dp > 1:
            groups[f"DP group tp{rank.tp} cp{rank.cp} pp{rank.pp}"].append(f"trainer-{rank.rank}")
    at = {(rank.tp, rank.cp, rank.dp, rank.pp): f"trainer-{rank.rank}" for rank in plan.training.ranks}
    for (tp, cp, dp, pp), name in at.items():
        following = at.get((tp, cp, dp, pp + 1))
        if following and wanted[name].node != wanted[following].node:
            groups[f"stages {pp}-{pp + 1} tp{tp} cp{cp} dp{dp}"] = [name, following]
    aligned = {name: members for name, members in groups.items()
               if None not in (rails := _across(wanted, members)) and len(rails) == 1}
    findings = []
    for name, members in aligned.items():
        present = {each: said[each] for each in members if each in said}
        if len(rails := _across(present, present)) > 1:
            who = f"{name} ({listed(list(present), NAMED)})"
            findings.append(Mismatch(who, "equal local GPUs", ", ".join(map(str, sorted(rails, key=str)))))
    return Comparison("rails aligned", len(aligned), tuple(findings))


def _across(seats: Mapping[str, PlacedProcess | RankReport],
            members: Sequence[str] | Mapping[str, Any]) -> set[int | None]:
    return {seats[name].gpu for name in members}


def _environment(pairs: Sequence[tuple[PlacedProcess, RankReport]],
                 given: Mapping[str, Mapping[str, str]]) -> Comparison:
    """Each process has the variables that the launcher set. GPUs are checked separately."""
    findings = []
    for place, report in pairs:
        expected = envvars.recordable(given[place.process])
        wrong = {name: (value, report.environment.get(name)) for name, value in expected.items()
                 if name != "CUDA_VISIBLE_DEVICES" and report.environment.get(name) != value}
        if wrong:
            findings.append(Mismatch(place.process, ", ".join(f"{name}={value}" for name, (value, _) in wrong.items()),
                                    ", ".join(f"{name}={found}" if found is not None else f"{name} unset"
                                              for name, (_, found) in wrong.items())))
    return Comparison("environment as set", len(pairs), tuple(findings))


def ray_nodes(placement: Placement, ray: RayReport) -> Comparison:
    """An actor ran on every node to which it was pinned. Pure."""
    findings = [Mismatch(f"actor on {node}", node, ray.found.get(node, "nowhere")) for node in placement.nodes
                if ray.found.get(node) != node]
    return Comparison("an actor on every Ray node", len(placement.nodes), tuple(findings))


def to_document(placement: Placement, reports: Sequence[RankReport], checks: Sequence[Comparison]) -> dict[str, Any]:
    """The result as JSON: each process as it reported itself, without the details in its node's file."""
    roles = {place.process: place.role for place in places(placement)}
    nodes: dict[str, dict[str, Any]] = {}
    for report in sorted(reports, key=lambda report: _order(placement, report)):
        entry = nodes.setdefault(report.node, {"leaf": report.leaf, "host": report.host, "processes": []})
        entry["processes"].append({"process": report.process, "role": roles.get(report.process), "gpu": report.gpu,
                                   "nic": report.nic, "pid": report.pid, "cpus": report.cpus})
    return {"schema_version": SCHEMA_VERSION, "attempt": placement.attempt,
            "plan_fingerprint": placement.plan_fingerprint, "ok": not any(check.findings for check in checks),
            "processes": len(reports), "nodes": nodes, "spares": list(placement.spares),
            "checks": [{"name": check.name, "asked": check.asked, "held": check.held,
                        "findings": [asdict(finding) for finding in check.findings]} for check in checks],
            "environment": {role: _common([each.environment for each in reports if roles.get(each.process) == role])
                            for role in ("trainer", "rollout")}}


def _run_as_planned(config: ResolvedConfig, plan: Plan) -> dict[str, Any]:
    """How the job would roll out, and the rates of its plan. What no plan predicts is missing."""
    forecast = forecast_of(plan)
    planned = {} if forecast is None else {"step_s": forecast.step_s,
                                           "prompts_per_hour": forecast.throughput.nominal}
    return {"max_staleness": config.algorithm.max_staleness, "swap": config.rollout.swap, **planned}


def _order(placement: Placement, report: RankReport) -> tuple[int, str, int]:
    node = placement.nodes.index(report.node) if report.node in placement.nodes else len(placement.nodes)
    return node, report.node, -1 if report.gpu is None else report.gpu


def _common(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Variables with the same value in all environments."""
    if not environments:
        return {}
    first, *others = environments
    return {name: value for name, value in sorted(first.items()) if all(each.get(name) == value for each in others)}


def _on(node: str, gpu: int | None) -> str | None:
    return None if gpu is None else f"{node} GPU {gpu}"


def _listed(findings: Sequence[Mismatch]) -> str:
    shown = "; ".join(f"{each.process}: {each.found}, placed: {each.placed}" for each in findings[:NAMED])
    return shown + (f"; and {len(findings) - NAMED} more" if len(findings) > NAMED else "")
