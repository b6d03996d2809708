"""A job under the load of `benchmarks.async_load`.

    python -m benchmarks.async_job launch CONFIG --on local ...     `megatron-rl`, which starts this module as driver
    python -m benchmarks.async_job ATTEMPT_FOLDER                   the driver
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import megatron_rl.driver.job
import megatron_rl.driver.start
import megatron_rl.train
from benchmarks.async_load import Load, SlowRollout, SlowTrainer
from launch.cli.main import main as megatron_rl_command
from launch.runtime import local
from megatron_rl.rollout.stream import RolloutStream


class FormerStream(RolloutStream):
    """Scores the groups of a batch when all of them are generated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._all_there: dict[int, asyncio.Event] = {}

    async def _score(self, batch: Any, place: int) -> None:
        all_there = self._all_there.setdefault(batch.step, asyncio.Event())
        if batch.generated:
            all_there.set()
        await all_there.wait()
        await super()._score(batch, place)


def main() -> int:
    if sys.argv[1] == "launch":
        local.DRIVER = "benchmarks.async_job"
        return megatron_rl_command()
    megatron_rl.driver.start.RolloutActor = SlowRollout      # type: ignore[misc]
    megatron_rl.driver.start.TrainerActor = SlowTrainer      # type: ignore[misc]
    if Load.of_attempt(Path(sys.argv[1])).former:
        megatron_rl.driver.job.RolloutStream = FormerStream      # type: ignore[misc]
    return megatron_rl.train.main()


if __name__ == "__main__":
    sys.exit(main())
