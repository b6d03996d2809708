"""The load of `make bench-async`: a job whose decode, update and lengths are given, so that sleeps and not the machine
decide the times. Everything else is the product: driver, engines, trainer, weight sync."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.data.batch import Group, Prompt
from megatron_rl.driver.actors import RolloutActor, TrainerActor
from megatron_rl.rollout.sampling import Sampling

FILE = "load.json"
IDLE = 3.0
"""A micro-batch that comes later than this multiple of the time of another did not follow it."""
WORKER = "benchmarks.async_worker.SlowWorker"


@dataclass(frozen=True)
class Load:
    """What a run is made to take. `load.json`, in the folder of the run."""

    iteration_s: float
    """Seconds of an engine's iteration."""
    token_s: float
    """Seconds of the trainer for each token."""
    mean: float
    """Mean length of a completion."""
    sigma: float
    cap: int
    former: bool = False
    """The loop before the rollout stream: generate all, then score, then update."""

    def lengths(self, prompt: Prompt, count: int) -> list[int]:
        """Lengths of the completions of a prompt, the same in every run."""
        source = random.Random(prompt.index)
        return [max(1, min(self.cap, round(self.mean * source.lognormvariate(-self.sigma**2 / 2, self.sigma))))
                for _ in range(count)]

    def write(self, run: Path) -> None:
        run.mkdir(parents=True, exist_ok=True)
        (run / FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def of_attempt(folder: Path) -> Load:
        return Load(**json.loads((folder.parents[1] / FILE).read_text(encoding="utf-8")))


def iterations(run: Path) -> list[float]:
    """Seconds of the engines' iterations in a run."""
    return [float(line) for file in sorted(run.glob("iterations-*.txt")) for line in file.read_text().splitlines()]


class SlowTrainer(TrainerActor):
    """A rank that takes a given time for every token, the time in which it computes included."""

    def start(self) -> dict[str, Any]:
        facts = super().start()
        from megatron_rl.trainer import step

        token_s, pack, done = Load.of_attempt(self.attempt.folder).token_s, step.pack, 0.0

        def slow(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            micro = pack(*args, **kwargs)
            wanted, computed = token_s * micro.tokens_T.numel(), time.monotonic() - done
            time.sleep(max(0.0, wanted - computed) if computed < IDLE * wanted else wanted)
            done = time.monotonic()
            return micro

        step.pack = slow
        return facts


class SlowRollout(RolloutActor):
    """An engine with iterations of a given length, whose completions have given lengths."""

    async def start(self) -> dict[str, Any]:
        from megatron_rl.rollout import engine

        self._load, arguments = Load.of_attempt(self.attempt.folder), engine.engine_arguments
        engine.engine_arguments = lambda *args: {**arguments(*args), "worker_extension_cls": WORKER}
        facts = await super().start()
        file = self.attempt.folder.parents[1] / f"iterations-{self.name}.txt"
        await self.engine._vllm.rpc("slow_down", self._load.iteration_s, str(file))
        self.engine._stop_ids = []
        return facts

    async def generate_group(self, prompt: Prompt, sampling: Sampling, seed: int | None = None) -> Group:
        """A request for each completion: the completions of one request share a limit."""
        one = [replace(sampling, n=1, max_new_tokens=length) for length in self._load.lengths(prompt, sampling.n)]
        groups = await asyncio.gather(*[super(SlowRollout, self).generate_group(prompt, each, seed) for each in one])
        return replace(groups[0], trajectories=tuple(each for group in groups for each in group.trajectories))
