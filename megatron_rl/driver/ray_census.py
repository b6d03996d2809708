"""The driver of a rehearsal with Ray (`run.rehearse=ray`): `python -m megatron_rl.driver.ray_census ATTEMPT_FOLDER`.

Like the real driver, it joins Ray once every node of the placement has registered and pins an actor to each node. It
writes what each actor finds in its own process, and the rehearsal compares this with the placement."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import ray

from launch import envvars
from launch.files.shared import write_atomically
from launch.run.attempts import Attempt
from launch.runtime.rehearsal import RayReport, ray_file
from megatron_rl.driver.cluster import answer, connect, gather, pinned


class Witness:
    """An actor that reports where it runs."""

    def look(self) -> tuple[str, str]:
        """Return (the node's name from its supervisor, Ray's id of the node)."""
        return envvars.get(envvars.NODE) or "", ray.get_runtime_context().get_node_id()


def main() -> int:
    asyncio.run(count())
    return 0


async def count() -> None:
    attempt, began = Attempt(Path(sys.argv[1])), time.monotonic()
    placement, deadline_s = attempt.placement(), attempt.config().run.deadline_s
    # The supervisors enforce the deadline of each single node.
    ids = await connect(placement, deadline_s * len(placement.nodes))
    counted_s = time.monotonic() - began
    actors = {node: pinned(Witness, ids[node], {}) for node in placement.nodes}
    calls = {node: answer(node, actor.look.remote()) for node, actor in actors.items()}
    seen = await gather(calls, "start", deadline_s)
    found = {node: name if raylet == ids[node] else f"{name}, of another raylet"
             for node, (name, raylet) in seen.items()}
    report = RayReport(counted_s, time.monotonic() - began - counted_s, found)
    write_atomically(ray_file(attempt), json.dumps(asdict(report), indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
