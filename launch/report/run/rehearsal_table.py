"""The report of a rehearsal as a table of at most 100 columns. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from launch.files.waiting import listed
from launch.report.lines import WIDTH, field, ranges
from launch.report.quantities import plural, seconds


def text(document: Mapping[str, Any]) -> str:
    """`rehearsal.json` for people: one line per node, then the checks, then every difference."""
    nodes = document["nodes"]
    lines = [f"rehearsal of attempt {document['attempt']}: {document['processes']} processes on {len(nodes)} nodes, "
             f"plan {document['plan_fingerprint']}", ""]
    width = max([4, *map(len, nodes)])
    leaf_width = max([4, *(len(node["leaf"]) for node in nodes.values())])
    lines.append(f"{'leaf':<{leaf_width}}  {'node':<{width}}  processes")
    for name, node in nodes.items():
        head = f"{node['leaf'] or '-':<{leaf_width}}  {name:<{width}}  "
        for part in wrap(_processes(node["processes"]), WIDTH - len(head)):
            lines.append(head + part)
            head = " " * len(head)
    lines += ["", *(field(label, value) for label, value in _leaves(document))]
    if document["spares"]:
        lines.append(field("spare", listed(document["spares"])))
    if "ray" in document:
        lines.append(field("Ray", f"{len(document['ray']['found'])} nodes counted after "
                                  f"{document['ray']['counted_s']:.1f} s, an actor on each after "
                                  f"{document['ray']['actors_s']:.1f} s more"))
    if "run" in document:
        lines.append(field("rollouts", _rollouts(document["run"])))
    lines.append("")
    for check in document["checks"]:
        word = "ok" if not check["findings"] else "WRONG"
        lines.append(f"{word:<5}  {check['name']}: {check['held']} of {check['asked']}")
        for finding in check["findings"]:
            lines.append(f"         {finding['process']}: {finding['found']}, placed: {finding['placed']}")
    lines += ["", "the processes are where the placement wants them" if document["ok"] else
              "the processes are NOT where the placement wants them"]
    return "\n".join(line.rstrip() for line in lines)


def _processes(members: Sequence[Mapping[str, Any]]) -> str:
    """`ranks 0-3 on GPUs 0-3; engines 0, 1 on GPUs 4-5 | 6-7`, with GPUs in the order of their ranks."""
    ranks = sorted((int(each["process"].partition("-")[2]), each) for each in members if each["role"] == "trainer")
    parts = [f"ranks {ranges([rank for rank, _ in ranks])}{_where([[each for _, each in ranks]])}"] if ranks else []
    engines: dict[int, list[Mapping[str, Any]]] = {}
    for each in sorted((each for each in members if each["role"] == "rollout"),
                       key=lambda each: _number(each["process"])):
        engines.setdefault(_number(each["process"])[0], []).append(each)
    if engines:
        word = "engines" if len(engines) > 1 else "engine"
        parts.append(f"{word} {ranges(list(engines))}{_where(list(engines.values()))}")
    parts += [each["process"] for each in members if each["role"] not in ("trainer", "rollout")]
    return "; ".join(parts)


def _rollouts(run: Mapping[str, Any]) -> str:
    """`asynchronous: samples are at most 4 versions old, ...`."""
    bound = run["max_staleness"]
    text = (f"asynchronous: samples are at most {plural(bound, 'version')} old, rollout.swap {run['swap']}" if bound
            else "synchronous")
    if "step_s" in run:
        text += f"; planned: a step of {seconds(run['step_s'])}, {run['prompts_per_hour']:,.0f} prompts/h"
    return text


def _number(process: str) -> tuple[int, int]:
    """(engine, rank in it) of `rollout-3.1`."""
    engine, _, rank = process.partition("-")[2].partition(".")
    return int(engine), int(rank)


def _where(groups: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """` on GPUs 0-3 | 4-7`, and the NICs if their numbers differ from those of the GPUs."""
    gpus, nics = ([[each[key] for each in group] for group in groups] for key in ("gpu", "nic"))
    if any(None in group for group in gpus):
        return ""
    if all(len(group) == 1 for group in groups):
        gpus, nics = [sum(gpus, [])], [sum(nics, [])]
    there = " on GPU" + ("s " if sum(map(len, gpus)) > 1 else " ") + " | ".join(map(ranges, gpus))
    return there + (f", NICs {' | '.join(map(ranges, nics))}" if nics != gpus and None not in sum(nics, []) else "")


def _leaves(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The leaf switches of each partition, and those that both share."""
    of: dict[str, dict[str, int]] = {"trainer": {}, "rollout": {}}
    for node in document["nodes"].values():
        for role in {each["role"] for each in node["processes"]} & set(of):
            of[role][node["leaf"]] = of[role].get(node["leaf"], 0) + 1
    if not any(leaf for leaves in of.values() for leaf in leaves):
        return [("leaves", "Slurm reports no topology (no topology plug-in): nodes were taken in order")]
    rows = [(label, "nodes: " + ", ".join(f"{count} on {leaf}" for leaf, count in of[role].items()))
            for label, role in (("training", "trainer"), ("rollout", "rollout")) if of[role]]
    shared = [leaf for leaf in of["trainer"] if leaf in of["rollout"]]
    return [*rows, ("shared", f"leaves with both: {', '.join(shared)}" if shared else "no leaf: each belongs to one "
            "partition")]
