"""The driver of a rehearsal with Ray (`run.rehearse=ray`): `python -m megatron_rl.driver.ray_census ATTEMPT_FOLDER`.

It joins Ray as the driver does, once every node of the placement is counted, pins an actor to each node as the driver
pins its ranks, and writes what each actor found in its own process. The rehearsal holds that against the placement."""

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
    """An actor that says where it is."""

    def look(self) -> tuple[str, str]:
        """(what the supervisor of its node calls the node, Ray's id of the node)."""
        return envvars.get(envvars.NODE) or "", ray.get_runtime_context().get_node_id()


def main() -> int:
    asyncio.run(count())
    return 0


async def count() -> None:
    attempt, began = Attempt(Path(sys.argv[1])), time.monotonic()
    placement, deadline_s = attempt.placement(), attempt.config().run.deadline_s
    # The supervisors keep the deadline of each node.
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
