"""The Ray actors: thin shells around plain classes that do not use Ray. Each is one process, pinned by the driver.

Heavy imports are inside the methods, because the driver imports this module and needs neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.run import faults
from launch.run.components import component, register_children
from launch.runtime.teardown import end_earlier
from megatron_rl.data.batch import Group, PolicyBatch, Prompt
from megatron_rl.driver.component import begin, guarded, logged, settle
from megatron_rl.layouts.step_folder import Exported, Part, Transferred

if TYPE_CHECKING:
    from megatron_rl.layouts.tiles import CanonicalTensor
    from megatron_rl.rewards.sample import Sample, Score
    from megatron_rl.rollout.engine import RolloutEngine
    from megatron_rl.rollout.sampling import Sampling
    from megatron_rl.trainer.fixed_logprobs import Model
    from megatron_rl.trainer.trainer import MegatronTrainer
    from megatron_rl.weight_sync.ends.sender import WeightSender
    from megatron_rl.weight_sync.plan.copies import Destination, Source
    from megatron_rl.weight_sync.protocol import Held, SyncPart, TransferReport


class TrainerActor:
    """One Megatron rank."""

    def __init__(self, attempt_folder: str, rank: int) -> None:
        self.rank, self.name = rank, f"trainer-{rank}"
        self.attempt = begin(attempt_folder, self.name, self._placement(attempt_folder, rank))
        self.plan, self.placement, self.config = self.attempt.plan(), self.attempt.placement(), self.attempt.config()
        self.trainer: MegatronTrainer
        """Set by `start`: building it takes the whole training world."""
        self.sender: WeightSender
        """Set by `sync_describe`."""

    @staticmethod
    def _placement(attempt_folder: str, rank: int) -> str:
        from launch.run.attempts import Attempt

        return Attempt(Path(attempt_folder)).placement().training[rank].node

    @guarded
    def start(self) -> dict[str, Any]:
        """Join the training world and build this rank's part of the model. Returns the facts that all must share."""
        from megatron_rl.facts import process_facts
        from megatron_rl.trainer import parallel
        from megatron_rl.trainer.trainer import MegatronTrainer

        address = self.placement.addresses[self.placement.training[0].node]
        parallel.initialise(self.plan, self.rank, address, self.placement.master_port, self.config.run.deadline_s,
                            self.config.trainer.threads, self.config.run.seed,
                            self.config.trainer.collective_timeout_s)
        self.trainer = MegatronTrainer(self.config, self.plan, self.rank)
        return process_facts(self.plan.device)

    @guarded
    def load_initial_weights(self) -> None:
        self.trainer.load_initial_weights()

    @guarded
    def begin_load(self, folder: str) -> None:
        self.trainer.begin_load(folder)

    @guarded
    def finish_load(self, folder: str, identity: dict[str, str]) -> dict[str, Any]:
        return self.trainer.finish_load(folder, identity)

    @guarded
    def begin_save(self, folder: str, extra: dict[str, Any], rollouts: bytes, background: bool) -> None:
        self.trainer.begin_save(folder, extra, rollouts, background=background)

    @guarded
    def checkpoint_progress(self, within_s: float) -> Transferred:
        return self.trainer.checkpoint_progress(within_s)

    @guarded
    def accumulate(self, batch: PolicyBatch) -> None:
        self.trainer.accumulate(batch)

    @guarded
    def update(self, step: int, batch: PolicyBatch | None, index: int, more: bool) -> dict[str, float]:
        faults.strike(self.name, "update", step)
        return self.trainer.update(batch, index, more)

    @guarded
    def keep_logprobs(self, batch: PolicyBatch, model: Model) -> None:
        self.trainer.keep_logprobs(batch, model)

    @guarded
    def export(self, folder: str, part: Part) -> Exported:
        return self.trainer.export(folder, part)

    # ---- weight sync (megatron_rl.weight_sync.protocol.TrainerHandle)

    @guarded
    def sync_describe(self) -> Source:
        from megatron_rl.weight_sync.ends.sender import WeightSender

        placement = self.placement.training[self.rank]
        self.sender = WeightSender(self.plan.training.ranks[self.rank], self.trainer.layout(),
                                   self.trainer.parameters(), address=self.placement.addresses[placement.node])
        return self.sender.sync_describe()

    @logged
    def sync_open(self, part: SyncPart) -> Held:
        held = self.sender.sync_open(part)
        settle()
        return held

    @logged
    def sync_send(self, epoch: int) -> TransferReport:
        faults.strike(self.name, "sync", epoch)
        self.trainer.require_whole()
        return self.sender.sync_send(epoch)

    @logged
    def sync_discard(self, epoch: int, reason: str) -> None:
        self.sender.sync_discard(epoch, reason)


class RolloutActor:
    """One vLLM replica. It is asynchronous and generates many groups at once."""

    def __init__(self, attempt_folder: str, replica: int) -> None:
        from launch.run.attempts import Attempt

        self.name = f"rollout-{replica}"
        placement = Attempt(Path(attempt_folder)).placement()
        node = placement.rollout[replica].node
        end_earlier(Attempt(Path(attempt_folder)), node, self.name)
        self.attempt = begin(attempt_folder, self.name, node)
        self._parts = (self.attempt.config(), self.attempt.plan(), placement, replica,
                       self.attempt.logs / f"{self.name}.log")
        self.engine: RolloutEngine
        """Set by `start`: vLLM needs some time and an event loop to start."""

    @guarded
    async def start(self) -> dict[str, Any]:
        from megatron_rl.rollout.engine import RolloutEngine

        self.engine = await RolloutEngine.start(*self._parts)
        register_children(self.attempt, component(self.attempt, self.name))
        return self.engine.facts

    @guarded
    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
        return await self.engine.generate(prompts, sampling, step)

    @guarded
    async def generate_group(self, prompt: Prompt, sampling: Sampling, seed: int | None = None) -> Group:
        return await self.engine.generate_group(prompt, sampling, seed)

    @guarded
    async def ended(self, count: int) -> int:
        return await self.engine.ended(count)

    async def status(self) -> dict[str, Any]:
        """Not guarded: the driver asks again and again, and decides what an error means."""
        return self.engine.status()

    @guarded
    async def stop(self) -> None:
        await self.engine.stop()

    # ---- weight sync (megatron_rl.weight_sync.protocol.EngineHandle)

    @guarded
    async def sync_describe(self, canonical: Sequence[CanonicalTensor]) -> list[Destination]:
        return await self.engine.weights.sync_describe(canonical)

    @logged
    async def sync_open(self, part: SyncPart) -> list[Held]:
        return await self.engine.weights.sync_open(part)

    @logged
    async def sync_prepare(self, epoch: int) -> None:
        await self.engine.weights.sync_prepare(epoch)

    @logged
    async def sync_receive(self, epoch: int) -> list[TransferReport]:
        faults.strike(self.name, "receive", epoch)
        return await self.engine.weights.sync_receive(epoch)

    @logged
    async def sync_commit(self, epoch: int, version: int) -> float:
        return await self.engine.weights.sync_commit(epoch, version)

    @logged
    async def sync_discard(self, epoch: int, reason: str) -> None:
        await self.engine.weights.sync_discard(epoch, reason)

    @guarded
    async def compare(self, folder: str) -> list[str]:
        return await self.engine.compare(folder)


class RewardActor:
    """The reward processes of one node. It is asynchronous and scores several groups at once."""

    def __init__(self, attempt_folder: str, index: int, columns: Sequence[str]) -> None:
        from launch.run.attempts import Attempt
        from megatron_rl.rewards.worker import RewardWorker

        self.name = f"reward-{index}"
        self.attempt = begin(attempt_folder, self.name, Attempt(Path(attempt_folder)).placement().rewards[index])
        config = self.attempt.config().reward
        self.worker = RewardWorker(config, self.attempt.folder, index=index, columns=columns)
        self._threads = ThreadPoolExecutor(max(2, 2 * config.workers), "score")
        """They wait for scores; see `driver.rewards` for how many calls are under way."""

    @guarded
    async def start(self) -> dict[str, Any]:
        await asyncio.to_thread(self.worker.start)
        return {}

    @guarded
    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.worker.score, samples)

    async def stay(self) -> None:
        """Never answers: the call ends with this process."""
        await asyncio.Event().wait()

    @guarded
    async def close(self) -> None:
        await asyncio.to_thread(self.worker.close)
