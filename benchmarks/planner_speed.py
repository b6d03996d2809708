"""`make bench-plan`: measures the speed of the search alone, and of the whole command with all explanations.

The limits apply to the CPU time of one core, so other load on the machine does not count.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch.cluster.file import load_cluster
from launch.cluster.spec import ClusterSpec
from launch.config.load import LoadedConfig, load_config
from launch.planner.explain.remedies import with_nodes
from launch.planner.prepare import posed, prepare_for
from launch.planner.search.search import Search

CONFIGS = Path(__file__).parents[1] / "configs"
LIMITS = {("search", 32): 1.0, ("search", 512): 5.0, ("whole plan", 32): 3.0, ("whole plan", 512): 15.0}
"""(what, nodes) -> CPU seconds."""


@dataclass(frozen=True)
class Case:
    what: str
    name: str
    nodes: int
    seconds: float

    @property
    def limit(self) -> float:
        return LIMITS[self.what, self.nodes]


def measure(name: str, nodes: int) -> list[Case]:
    """Both times for one configuration."""
    loaded, cluster = load_config(CONFIGS / name), _cluster(nodes)
    return [Case("search", name, nodes, _cpu_seconds(lambda: _search(loaded, cluster))),
            Case("whole plan", name, nodes, _cpu_seconds(lambda: _plan(loaded, cluster)))]


def _cluster(nodes: int) -> ClusterSpec:
    return with_nodes(load_cluster(CONFIGS / "clusters" / "h100x128.yaml"), nodes)


def _search(loaded: LoadedConfig, cluster: ClusterSpec) -> None:
    if Search(posed(loaded, cluster)).best() is None:
        raise SystemExit(f"no plan for {loaded.path}")


def _plan(loaded: LoadedConfig, cluster: ClusterSpec) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        prepare_for(loaded, cluster)


def _cpu_seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> int:
    """Print a table. Returns 1 if a limit is exceeded."""
    over = False
    print(f"{'':<11}{'configuration':<28}{'nodes':>6}{'CPU s':>9}{'limit s':>9}{'of limit':>10}")
    for nodes in (32, 512):
        for name in ("70b/grpo.yaml", "70b/grpo_fp8_rollout.yaml", "70b/grpo_lora.yaml"):
            for case in measure(name, nodes):
                over |= case.seconds > case.limit
                print(f"{case.what:<11}{case.name:<28}{case.nodes:>6}{case.seconds:>9.2f}{case.limit:>9.0f}"
                      f"{case.seconds / case.limit:>10.0%}", flush=True)
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
