"""`make bench-plan`: measures the speed of the search alone, and of the whole command with all explanations.

The limits apply to the CPU time of one core, so other load on the machine does not count.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
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


def _search(loaded: LoadedConfig, cluster: ClusterSpec) -> None:
    if Search(posed(loaded, cluster)).best() is None:
        raise SystemExit(f"no plan for {loaded.path}")


def _plan(loaded: LoadedConfig, cluster: ClusterSpec) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        prepare_for(loaded, cluster)


def main() -> int:
    """Print a table. Returns 1 if a limit is exceeded."""
    over = False
    print(f"{'':<11}{'configuration':<28}{'nodes':>6}{'CPU s':>9}{'limit s':>9}{'of limit':>10}")
    for nodes in (32, 512):
        cluster = with_nodes(load_cluster(CONFIGS / "clusters" / "h100x128.yaml"), nodes)
        for name in ("70b/grpo.yaml", "70b/grpo_fp8_rollout.yaml", "70b/grpo_lora.yaml"):
            loaded = load_config(CONFIGS / name)
            for what, work in (("search", _search), ("whole plan", _plan)):
                began, limit = time.process_time(), LIMITS[what, nodes]
                work(loaded, cluster)
                seconds = time.process_time() - began
                over |= seconds > limit
                print(f"{what:<11}{name:<28}{nodes:>6}{seconds:>9.2f}{limit:>9.0f}{seconds / limit:>10.0%}", flush=True)
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
