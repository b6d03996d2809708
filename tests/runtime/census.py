"""`python -m tests.runtime.census ATTEMPT_FOLDER`: joins the job's Ray as the driver does, counts its nodes, pins an
actor to each and prints what each actor reads from its own process, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import psutil
import ray

from launch import envvars
from launch.run.attempts import Attempt
from megatron_rl.driver.cluster import answer, connect, gather, pinned
from tests.patience import patient


class Witness:
    def look(self) -> dict:
        raylet = next(each for each in psutil.Process().parents() if each.name() == "raylet")
        name = next(word for word in raylet.cmdline() if word.startswith("--node-name=")).partition("=")[2]
        return {"raylet": name, "node": os.environ[envvars.NODE], "mark": os.environ[envvars.JOB_MARK],
                "extra": os.environ["EXTRA"], "pid": os.getpid(), "id": ray.get_runtime_context().get_node_id()}


async def main() -> None:
    placement = Attempt(Path(sys.argv[1])).placement()
    ids = await connect(placement, deadline_s=patient(30))
    actors = {node: pinned(Witness, ids[node], {"EXTRA": f"for {node}"}) for node in placement.nodes}
    seen = await gather({node: answer(node, actor.look.remote()) for node, actor in actors.items()}, "look", 30)
    print(json.dumps({"ids": ids, "seen": seen}), flush=True)
    sys.stdin.readline()    # the actors live until the test has looked at their ports


if __name__ == "__main__":
    asyncio.run(main())
