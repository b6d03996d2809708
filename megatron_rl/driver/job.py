"""The running job as the loop sees it: training ranks, engines and reward workers behind a handful of verbs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from launch import envvars
from launch.errors import UserError
from launch.run.attempts import Attempt
from megatron_rl.data.batch import Group, PolicyBatch, Prompt
from megatron_rl.driver.actors import RewardActor, RolloutActor, TrainerActor
from megatron_rl.driver.cluster import connect, gather, pinned
from megatron_rl.driver.sync_plan import announced, differences, sync_plan
from megatron_rl.facts import disagreements, shared_gpus
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.rewards.sample import Score, group_samples
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.scheduler import RolloutScheduler
from megatron_rl.weight_sync.coordinator import Endpoint, SyncCoordinator
from megatron_rl.weight_sync.disk import VersionsOnDisk, WrittenVersion, write_folder
from megatron_rl.weight_sync.protocol import SyncError, SyncReport

log = logging.getLogger(__name__)

SCORED_AT_ONCE = 64
"""Samples a reward process gets between two signs of life."""
STOP_S = 180.0
"""How long the actors may take to close, however long they may take to start."""
ASK_EVERY_S = 2.0
"""How often the engines are asked for signs of progress during a rollout."""
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""An engine that unties the head takes it from the embedding that the trainer holds."""


class Job:
    """All actors of an attempt. Use it as a context manager: the end closes what was started.

    Args:
        attempt: the attempt, with its configuration, plan and placement.
        columns: further columns of the data set, offered to the rewards.
        template_fingerprint: of what the driver rendered the prompts with; the engines must decode with the same.
        say: called with a line for each thing that start-up waits for.
    """

    def __init__(self, attempt: Attempt, columns: Sequence[str], template_fingerprint: str,
                 say: Callable[[str], None]) -> None:
        self.attempt, self.columns, self.say = attempt, columns, say
        self.template_fingerprint = template_fingerprint
        self.config, self.plan, self.placement = attempt.config(), attempt.plan(), attempt.placement()
        self.deadline_s = self.config.run.deadline_s
        self.trainers: dict[str, Any] = {}
        self.engines: dict[str, Any] = {}
        self.rewards: dict[str, Any] = {}
        self._events = asyncio.Runner()
        self._coordinator: SyncCoordinator | None = None
        self._writing: asyncio.Task[WrittenVersion] | None = None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:  # after a failure the actors stay as they are, so that the cause can be told
            gather({name: engine.stop.remote() for name, engine in self.engines.items()}, "stopping the engines",
                   STOP_S)
            gather({name: worker.close.remote() for name, worker in self.rewards.items()}, "stopping the rewards",
                   STOP_S)
            if self._coordinator is not None:
                self._coordinator.close()
            ray.shutdown()
        self._events.close()

    # ---- start -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every actor and wait until each has built its part. All start at the same time."""
        self.say(f"waiting for {len(self.placement.nodes)} Ray node(s)")
        nodes = connect(self.placement, self.deadline_s)
        folder = str(self.attempt.folder.resolve())
        for engine in self.placement.rollout:
            self.engines[f"rollout-{engine.replica}"] = pinned(
                RolloutActor, nodes[engine.node], self._environment("rollout", engine.node, engine.gpus), folder,
                engine.replica, concurrent=True)
        for rank in self.placement.training:
            gpus = () if rank.gpu is None else (rank.gpu,)
            self.trainers[f"trainer-{rank.rank}"] = pinned(
                TrainerActor, nodes[rank.node], self._environment("trainer", rank.node, gpus), folder, rank.rank)
        node = self.placement.nodes[0]
        self.rewards["reward-0"] = pinned(RewardActor, nodes[node], self._environment("reward", node, ()), folder, 0,
                                          node, list(self.columns))
        self.say(f"starting {len(self.trainers)} training rank(s), {len(self.engines)} vLLM engine(s) and the rewards")
        actors = {**self.trainers, **self.engines, **self.rewards}
        facts = gather({name: actor.start.remote() for name, actor in actors.items()}, "start", self.deadline_s)
        refuse_disagreement({"driver": {"template_fingerprint": self.template_fingerprint}, **facts})
        self._scheduler = RolloutScheduler([Handle(actor) for actor in self.engines.values()],
                                           max_sequences=self.config.rollout.max_num_seqs,
                                           deterministic=self.config.rollout.deterministic)

    def load(self, checkpoint: Path | None, identity: dict[str, str]) -> dict[str, Any] | None:
        """Weights and optimizer into every rank: the initial ones (None is returned), or those of a checkpoint; then
        what `MegatronTrainer.load` returns."""
        if checkpoint is None:
            self.say("loading the initial weights")
            self._trainers("load_initial_weights")
            return None
        self.say(f"loading {checkpoint}")
        return self._trainers("load_checkpoint", str(checkpoint), identity)[0]

    def open_sync(self) -> None:
        """Prove the weight-sync manifest and open its lanes."""
        self.say("tracing layouts and opening the weight-sync lanes")
        way = sync_plan(self.config, self.plan, self.placement)
        endpoints = [Endpoint(self.placement.addresses[rank.node], rank.port) for rank in self.placement.training]
        self._coordinator = SyncCoordinator(
            [Handle(actor) for actor in self.trainers.values()], [Handle(actor) for actor in self.engines.values()],
            endpoints, canonical_tensors(self.plan.architecture),
            backend="gloo" if self.plan.device == "cpu" else "nccl", bucket_bytes=way.bucket_bytes,
            timeout_s=self.config.weight_sync.timeout_s,
            aliases=TIED if self.plan.architecture.tied_embeddings else None, route=way.route, seats=way.seats,
            address=self.placement.addresses[self.placement.nodes[0]],
            go_on=False)    # the death of any process ends the attempt: nothing is gained by healing the others first
        manifest = self._events.run(self._coordinator.setup())
        log.info("weight sync: route %s %s, %d streams over %d hops, %.1f MiB a sync, manifest %s", manifest.kind,
                 manifest.route_fingerprint(), len(manifest.streams), sum(len(each.hops) for each in manifest.streams),
                 manifest.total_bytes / 2**20, manifest.fingerprint())
        if manifest.requantised:
            quantised = manifest.requantised_bytes
            log.info("weight sync: %.1f MiB of them are quantised by the engines at COMMIT (%d parameters a worker), "
                     "%.1f MiB are written in place", quantised / 2**20, len(manifest.requantised),
                     (manifest.total_bytes - quantised) / 2**20)
        for line in differences(announced(self.config, self.plan), self.plan, manifest):
            log.warning("weight sync: %s", line)

    # ---- the verbs of a step -----------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int,
                 alive: Callable[[], None]) -> list[Group]:
        """The completions of every prompt, in the order of the prompts. `alive` is called while completions arrive."""
        return self._events.run(self._watched(self._scheduler.rollout(prompts, sampling, step), alive))

    def score(self, groups: Sequence[Group], alive: Callable[[], None]) -> list[list[Score]]:
        """The scores of every group, in order. `alive` is called as they come in."""
        samples = [sample for group in groups for sample in group_samples(group)]
        size = SCORED_AT_ONCE * self.config.reward.workers
        worker = self.rewards["reward-0"]
        calls = {f"reward-0 from {at}": worker.score.remote(samples[at:at + size])
                 for at in range(0, len(samples), size)}
        scores = (score for part in gather(calls, "score", arrived=alive).values() for score in part)
        return [[next(scores) for _ in group.completions] for group in groups]

    def logprobs(self, batch: PolicyBatch, model: str) -> np.ndarray:
        """float32 [N]: log-probs of the batch's tokens under the trainer's `policy` or `reference`."""
        return self._trainers("logprobs", ray.put(batch), model)[0]

    def update(self, step: int, batch: PolicyBatch) -> Mapping[str, float]:
        """One optimizer step; every rank returns the same metrics."""
        return self._trainers("update", step, ray.put(batch))[0]

    def sync(self, version: int) -> SyncReport:
        """Bring every engine to the trainer's weights; returns once all have committed `version`."""
        report = self._events.run(self._coordinator.sync(version))
        self._scheduler.committed(version)
        return report

    def save(self, folder: Path, extra: dict) -> None:
        self._trainers("save_checkpoint", str(folder), extra)

    async def _watched(self, rollout: Coroutine[Any, Any, list[Group]], alive: Callable[[], None]) -> list[Group]:
        """Wait for a rollout and ask the engines meanwhile for their status: whoever finishes requests is alive."""
        task, before = asyncio.ensure_future(rollout), None
        while not (await asyncio.wait([task], timeout=ASK_EVERY_S))[0]:
            status = await asyncio.gather(*[engine.status.remote() for engine in self.engines.values()])
            if status != before:
                before = status
                alive()
        return task.result()

    def _trainers(self, method: str, *args: Any) -> list[Any]:
        calls = {name: getattr(actor, method).remote(*args) for name, actor in self.trainers.items()}
        return list(gather(calls, method).values())

    def export(self, folder: Path, alive: Callable[[], None]) -> None:
        """Write the weights as a Hugging Face folder. `alive` is called whenever a rank has done a part.

        Raises:
            NotWritten: the run needs this one.
        """
        self._events.run(write_folder(self._writers(), folder, alive))

    # ---- versions on disk ------------------------------------------------------------------------------------------

    def open_disk(self, step: int) -> None:
        """The attempt goes on from `step`: versions after it are removed, since their steps are made again."""
        self._disk = VersionsOnDisk(self._writers(), self.attempt.weights, self.config.weight_sync.disk.keep)
        for folder in self._disk.forget_after(step):
            log.info("%s removed: its step is made again", folder)

    def begin_to_disk(self, version: int) -> None:
        """Write what the trainer holds while the engines generate; nothing may change it before `version_on_disk`."""
        self._writing = self._events.get_loop().create_task(self._disk.write(version))

    @property
    def writes(self) -> bool:
        """Whether a version is being written."""
        return self._writing is not None

    def version_on_disk(self, alive: Callable[[], None]) -> WrittenVersion:
        """Wait for the version that is being written. `alive` is called whenever a rank has done a part.

        Raises:
            NotWritten: earlier versions are untouched, and so is the run.
            SyncError: an engine holds other weights (`weight_sync.disk.compare`).
        """
        writing, self._writing = self._writing, None
        self._disk.alive = alive
        written = self._events.run(_result(writing))
        log.info("version in %s written: %.2f GB in %.1f s (%.2f GB/s), read back in %.1f s", written.folder,
                 written.nbytes / 1e9, written.write_s, written.nbytes / 1e9 / written.write_s, written.read_back_s)
        if self.config.weight_sync.disk.compare:
            found = gather({name: engine.compare.remote(str(written.folder)) for name, engine in self.engines.items()},
                           "comparing the engines with the disk")
            lines = [f"{name}: {line}" for name, each in found.items() for line in each]
            if lines:
                raise SyncError("\n".join([f"{len(lines)} differences from {written.folder}", *lines[:20]]))
        return written

    def _writers(self) -> dict[int, Handle]:
        return dict(enumerate(map(Handle, self.trainers.values())))

    def _environment(self, role: envvars.Role, node: str, gpus: Sequence[int]) -> dict[str, str]:
        variables = envvars.environment(role, self.plan.device, self.config, job=self.attempt.mark, gpus=gpus,
                                        interface=self.placement.interface(node),
                                        address=self.placement.addresses[node],
                                        nics=self.placement.nics.get(node, ()))
        return {**variables, envvars.NODE: node}


def refuse_disagreement(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises:
        UserError: the processes of the job do not run the same versions, NCCL settings or tokenizer, or share a GPU.
    """
    lines = disagreements(facts) + shared_gpus(facts)
    if lines:
        raise UserError("the processes of this job do not fit together\n  " + "\n  ".join(lines),
                        where="environment and packages of the nodes",
                        fix="one environment, one model folder and the placement's GPUs for all of them")


async def _result(task: asyncio.Task[WrittenVersion]) -> WrittenVersion:
    return await task


class Handle:
    """An actor whose methods answer with awaitables, as the coordinator wants them."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return getattr(self._actor, method).remote


