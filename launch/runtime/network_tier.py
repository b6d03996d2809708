"""The network tier of the preflight (`run.preflight=fabric`) inside a job: when it is wanted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from launch.cluster.spec import ClusterSpec
from launch.config.schema import RunConfig
from launch.health import network_run
from launch.health.check import Check, worst
from launch.health.expected import Expected
from launch.run.attempt_log import PastAttempt
from launch.run.attempts import Attempt
from launch.run.faults import trains
from launch.run.node_files import Hello
from launch.slurm.profiles import Profile

COLLECTIVE = re.compile(r"(?i)nccl|gloo|collective|timed? ?out")


def wanted(config: RunConfig, before: Sequence[PastAttempt]) -> str:
    """Why it is measured; "" if it is not. A hang, or a collective that timed out, with no node to blame may be a link
    that no node sees by itself."""
    if config.run.preflight == "fabric":
        return "run.preflight = fabric"
    last = before[-1] if before and trains(config) else None
    if last is None:
        return ""
    # Of a crash, `nodes` says where the component ran that failed first; who waits longest for a bad link is no
    # culprit.
    if last.status == "hang" and not last.nodes or last.status == "crash" and COLLECTIVE.search(last.message):
        return f"attempt {last.attempt} ended with a {last.status} and no node to blame"
    return ""


def with_network(attempt: Attempt, config: RunConfig, before: Sequence[PastAttempt], reports: Mapping[str, list[Check]],
                hellos: Mapping[str, Hello], cluster: ClusterSpec, profile: Profile, say: Callable[[str], None],
                check: Callable[[], None]) -> dict[str, list[Check]]:
    """The reports, with the checks of the network of all nodes that are fit so far, where they are wanted."""
    why = wanted(config, before)
    if not why:
        return dict(reports)
    say(f"the network is measured: {why}")
    found = network_run.measure(attempt.folder, reports, hellos, Expected.read(attempt.folder), cluster, profile, say,
                                check)
    if config.run.preflight != "fabric" and found and all(worst(checks) == "critical" for checks in found.values()):
        # Nobody asked for it, and it says nothing of one node or another: no reason to end a run.
        say("the network could not be measured: going on without")
        found = {node: [replace(each, severity="warning") if each.severity == "critical" else each for each in checks]
                 for node, checks in found.items()}
    return {node: [*checks, *found.get(node, ())] for node, checks in reports.items()}
