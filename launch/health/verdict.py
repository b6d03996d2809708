"""Turns the findings of all nodes into a verdict: the nodes to use and to exclude, and whether the job may start.

Pure: the caller's ledger object is only read. `record` writes it afterwards.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch.exit_codes import ExitCode
from launch.health.check import Check, checks_to_json
from launch.health.compare import Nodes, disagreements
from launch.health.ledger import Ledger

BROKEN_SHARE = 0.5
"""A check that is critical on more than this share of at least three nodes (or on both of two) points to the site, the
configuration or the check itself, not to the nodes."""

IN_USE = ("gpu.processes", "gpu.memory")
"""Checks that processes of another job make critical. Memory in use without a process is a fault of the node."""


@dataclass(frozen=True)
class Exclusion:
    """Why a node is excluded."""

    node: str
    checks: tuple[Check, ...]
    from_ledger: bool = False

    @property
    def reason(self) -> str:
        return "; ".join(f"{check.name}: {check.evidence}" for check in self.checks)


@dataclass(frozen=True)
class Verdict:
    """The preflight's verdict on the nodes of a job."""

    needed: int
    spares: int
    """As requested."""
    accepted: tuple[str, ...]
    """Usable nodes in the given order, including spares."""
    avoid: tuple[str, ...]
    """Accepted nodes to use last, worst first: `launch.planner.seats.cluster.place(avoid=...)`."""
    excluded: dict[str, Exclusion] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """Readable lines."""
    critical: tuple[str, ...] = ()
    """Why the job may not start as planned; () if it may."""
    site: tuple[Check, ...] = ()
    """Checks that failed on (nearly) all nodes. No node was excluded for them."""
    job: tuple[Check, ...] = ()
    """Findings that belong to no single node: those of the login tier, and disagreements without a majority."""
    findings: dict[str, list[Check]] = field(default_factory=dict)
    """All checks of each node, including comparisons."""

    @property
    def ok(self) -> bool:
        return not self.critical

    @property
    def short(self) -> int:
        """Number of nodes that the plan lacks. With `run.replan` a smaller plan may be used."""
        return max(0, self.needed - len(self.accepted))

    @property
    def only_short(self) -> bool:
        """Whether the number of nodes is the only obstacle."""
        return self.short > 0 and len(self.critical) == 1

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.OK if self.ok else ExitCode.PREFLIGHT

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "needed": self.needed, "spares": self.spares, "accepted": list(self.accepted),
                "avoid": list(self.avoid), "warnings": list(self.warnings), "critical": list(self.critical),
                "site": checks_to_json(self.site), "job": checks_to_json(self.job),
                "excluded": [{**asdict(each), "checks": checks_to_json(each.checks)}
                             for each in self.excluded.values()]}


def judge(nodes: Nodes, needed: int, spares: int = 0, ledger: Ledger | None = None, *,
          job: Sequence[Check] = (), skip: Collection[str] = (), now: float | None = None) -> Verdict:
    """The verdict over the findings of all nodes.

    Args:
        nodes: node -> its checks, in the allocation's order.
        needed: nodes that the plan uses.
        spares: nodes requested beyond these.
        ledger: failures that earlier jobs recorded; None: none.
        job: findings that belong to no single node (`launch.health.login`).
        skip: names of checks (`gpu.ecc`) or subjects (`gpu`) that are at most warnings.
    """
    at = time.time() if now is None else now
    of_node, of_job = disagreements(nodes)
    findings = {node: [_softened(check, skip) for check in (*checks, *of_node.get(node, ()))]
                for node, checks in nodes.items()}
    of_job = [_softened(check, skip) for check in (*job, *of_job)]
    site_names = _site_wide(findings)
    bad = {node: [check for check in checks if check.severity == "critical" and check.name not in site_names]
           for node, checks in findings.items()}
    excluded = {node: Exclusion(node, tuple(found)) for node, found in bad.items() if found}
    notes = [f"{check.name}: {check.evidence}" for check in of_job if check.severity == "warning"]
    usable = [node for node in findings if node not in excluded]
    listed = _from_ledger(usable, needed, ledger, at, notes)
    excluded.update(listed)
    accepted = tuple(node for node in usable if node not in listed)
    suspected = set(ledger.suspected(at)) | set(ledger.excluded(at)) if ledger else set()
    avoid = _worst_first(accepted, findings, suspected)
    site = _site_checks(findings, site_names)
    stops = [f"{check.name}: {check.evidence}" for check in of_job if check.severity == "critical"]
    stops += [check.evidence for check in site]
    if len(accepted) < needed:
        stops.append(f"{needed} nodes are needed, but only {len(accepted)} of {len(findings)} are fit")
    elif len(accepted) < needed + spares:
        notes.append(f"{len(accepted) - needed} of {spares} spare nodes are left")
    notes += [f"{node}: {check.name}: {check.evidence}" for node in accepted
              for check in own_findings(node, findings)]
    return Verdict(needed, spares, accepted, avoid, excluded, tuple(notes), tuple(stops), tuple(site), tuple(of_job),
                   findings)


def record(verdict: Verdict, ledger: Ledger, evidence: Mapping[str, str | Path], job: str,
           say: Callable[[str], None] = print) -> None:
    """Write the nodes that this preflight excluded into the ledger, with their critical checks. Findings caused by
    another job's processes are left out, because they disappear when that job ends.

    Args:
        evidence: node -> file with the evidence, such as its preflight.json.
        say: receives a warning if the ledger cannot be written.
    """
    found = []
    for node, exclusion in verdict.excluded.items():
        if not exclusion.from_ledger:
            in_use = any(check.name == IN_USE[0] for check in exclusion.checks)
            for check in exclusion.checks:
                if in_use and check.name in IN_USE:
                    continue
                found.append((node, f"{check.name}: {check.evidence}", evidence.get(node, "")))
    ledger.record(found, job, say)


def _softened(check: Check, skip: Collection[str]) -> Check:
    if check.severity == "critical" and (check.name in skip or check.subject in skip):
        return Check(check.name, "warning", check.value, f"{check.evidence} (skipped)", check.remedy)
    return check


def _site_wide(findings: Nodes) -> set[str]:
    """Names of checks that are critical on too many nodes to be a fault of the nodes."""
    if len(findings) < 2:
        return set()
    counts = Counter(name for checks in findings.values()
                     for name in {check.name for check in checks if check.severity == "critical"})
    return {name for name, count in counts.items()
            if count == len(findings) or (len(findings) >= 3 and count > BROKEN_SHARE * len(findings))}


def _site_checks(findings: Nodes, names: Collection[str]) -> list[Check]:
    """One check for each site-wide failure, with an example."""
    found = []
    for name in sorted(names):
        failing = [(node, check) for node, checks in findings.items() for check in checks
                   if check.name == name and check.severity == "critical"]
        node, example = failing[0]
        count = len({each for each, _ in failing})
        found.append(Check(name, "critical", example.value,
                           f"{name} fails on {count} of {len(findings)} nodes: the cause is the site, the "
                           f"configuration or the check, so no node is excluded ({node}: {example.evidence})",
                           f"{example.remedy}; if the check is wrong, skip it: run.skip_checks=[{name}]"))
    return found


def _from_ledger(usable: Sequence[str], needed: int, ledger: Ledger | None, now: float,
                 notes: list[str]) -> dict[str, Exclusion]:
    """Usable nodes that the ledger excludes, worst first, as long as enough nodes remain."""
    out: dict[str, Exclusion] = {}
    if ledger is None:
        return out
    for node in ledger.excluded(now):
        if node not in usable:
            continue
        entries = ledger.reasons(node, now)
        if len(usable) - len(out) <= needed:
            notes.append(f"{node} is in the ledger ({entries[0].reason}) but is used, because too few nodes remain "
                         "without it")
            continue
        checks = tuple(Check("ledger", "critical", {"job": entry.job, "evidence": entry.evidence,
                                                    "expires": entry.expires},
                             f"{entry.reason} (job {entry.job or 'unknown'}, {entry.evidence or 'no evidence file'})",
                             f"if the node is repaired, remove its entries from {ledger.path}") for entry in entries)
        out[node] = Exclusion(node, checks, from_ledger=True)
    for node in ledger.over_cap(now):
        if node in usable:
            notes.append(f"{node} is in the ledger but not excluded: at most {ledger.cap} nodes are excluded "
                         "automatically")
    return out


def own_findings(node: str, findings: Nodes) -> list[Check]:
    """A node's findings without those that every node has, which are not specific to it."""
    everywhere = set.intersection(*({check.name for check in checks if check.severity != "ok"}
                                    for checks in findings.values())) if len(findings) > 1 else set()
    return [check for check in findings[node] if check.severity != "ok" and check.name not in everywhere]


def _worst_first(accepted: Sequence[str], findings: Nodes, suspected: Collection[str]) -> tuple[str, ...]:
    """Accepted nodes with findings: nodes in the ledger first, then by the number of findings."""
    badness = {node: (int(node in suspected), len(own_findings(node, findings))) for node in accepted}
    flawed = [node for node in accepted if badness[node] > (0, 0)]
    return tuple(sorted(flawed, key=badness.__getitem__, reverse=True))
