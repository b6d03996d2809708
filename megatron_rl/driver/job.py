"""The running job as the loop sees it: training ranks, engines and reward workers behind a few verbs. The loop awaits
every verb on its own event loop."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from launch.run.attempts import Attempt
from launch.run.components import component, dismiss, record_error
from launch.run.progress import INSIDE_FIRST
from megatron_rl.data import carried
from megatron_rl.data.batch import Group, PolicyBatch, Prompt
from megatron_rl.data.carried import CarriedGroup
from megatron_rl.driver.clock import StepClock
from megatron_rl.driver.cluster import gather
from megatron_rl.driver.engines import ASK_EVERY_S, Engines, Means, Note
from megatron_rl.driver.handles import shared
from megatron_rl.driver.rewards import Rewards
from megatron_rl.driver.start import Actors
from megatron_rl.driver.sync_plan import announced, differences, sync_plan
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.layouts.step_folder import Transferred
from megatron_rl.rewards.sample import Score, group_samples
from megatron_rl.rollout.parts import FairShare
from megatron_rl.rollout.pending import ScoredBatch, ScoredGroups
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.scheduler import RolloutScheduler
from megatron_rl.rollout.stream import RolloutStream
from megatron_rl.weight_sync.coordinator import Endpoint, SyncCoordinator
from megatron_rl.weight_sync.disk import VersionsOnDisk, WrittenVersion, write_folder
from megatron_rl.weight_sync.protocol import SyncError, SyncReport

if TYPE_CHECKING:
    from megatron_rl.trainer.fixed_logprobs import Model

log = logging.getLogger(__name__)
Result = TypeVar("Result")

SCORED_AT_ONCE = 64
"""Samples of an evaluation that a node scores between two signs of life."""
STOP_S = 180.0
"""How long the actors may take to close, independent of `run.deadline_s`."""
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""An engine with an untied head loads the head from the trainer's embedding."""


@dataclass(frozen=True)
class PlacedBatch:
    """A batch in Ray's store. A node fetches it once, and all its ranks read that copy."""

    stored: PolicyBatch
    """For the type checker. It is a reference, which only a call of an actor turns into the batch."""


class Job:
    """All actors of an attempt. `async with` closes them at its end.

    Args:
        attempt: the attempt, with its configuration, plan and placement.
        actors: the actors that `start_actors` returned.
        clock: receives signs of life in its open spans.
    """

    def __init__(self, attempt: Attempt, actors: Actors, clock: StepClock) -> None:
        self.attempt, self.config, self.plan = attempt, attempt.config(), attempt.plan()
        self._trainers, self._actors = actors.trainers, actors
        self._clock = clock
        self._scheduler = RolloutScheduler(
            actors.engines, max_num_seqs=self.config.rollout.max_num_seqs, vocabulary=self.plan.architecture.vocab,
            deterministic=self.config.rollout.deterministic)
        self._engines: Engines | None = None
        self._rewards: Rewards | None = None
        self._stream: RolloutStream | None = None
        self._coordinator = self._make_coordinator(attempt)
        self._writers = dict(enumerate(self._trainers))
        self._disk = VersionsOnDisk(self._writers, attempt.weights, self.config.weight_sync.disk.keep)
        self._writing: asyncio.Task[WrittenVersion] | None = None
        self._numbers = itertools.count()
        self._saving: Path | None = None

    async def __aenter__(self) -> Job:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._stream is not None:
            await self._stream.close()
        if kind is None:  # after a failure the actors stay unchanged, so that the cause can be found
            if self._engines is not None:
                await self._engines.stop(STOP_S)
            if self._rewards is not None:
                await self._rewards.close(STOP_S)
            self._coordinator.close()
            ray.shutdown()

    # ---- before the first step ---------------------------------------------------------------------------------

    async def load(self, checkpoint: Path | None, identity: dict[str, str]) -> dict[str, Any] | None:
        """Load weights and optimizer state into every rank. Without a checkpoint, load the initial weights and return
        None. Otherwise return the result of `MegatronTrainer.load`. Bytes that are read are signs of life."""
        if checkpoint is None:
            self._clock.start_up("loading the initial weights")
            await gather({rank.name: rank.load_initial_weights() for rank in self._trainers}, "loading")
            return None
        self._clock.start_up(f"loading {checkpoint}")
        folder = str(checkpoint)
        await gather({rank.name: rank.begin_load(folder) for rank in self._trainers}, "loading")
        read = await self._transferred("loading")
        log.info("read %s: %.2f GB in %.1f s", folder, read.nbytes / 1e9, read.seconds)
        loaded = await gather({rank.name: rank.finish_load(folder, identity) for rank in self._trainers}, "loading")
        return next(iter(loaded.values()))

    async def open_sync(self) -> None:
        """Build and check the weight-sync manifest, then open its lanes."""
        self._clock.start_up("tracing layouts and opening the weight-sync lanes")
        manifest = await self._coordinator.setup()
        log.info("weight sync: route %s %s, %d streams over %d hops, %.1f MiB a sync, manifest %s", manifest.kind,
                 manifest.route_fingerprint(), len(manifest.streams), sum(len(each.hops) for each in manifest.streams),
                 manifest.total_bytes / 2**20, manifest.fingerprint())
        if manifest.requantised:
            quantised = manifest.requantised_bytes
            log.info("weight sync: the engines quantise %.1f MiB (%d parameters per worker) and write "
                     "%.1f MiB in place", quantised / 2**20, len(manifest.requantised),
                     (manifest.total_bytes - quantised) / 2**20)
        for line in differences(announced(self.config, self.plan), self.plan, manifest):
            log.warning("weight sync: %s", line)

    def open_stream(self, draw: Callable[[], Sequence[Prompt]], carried: Sequence[CarriedGroup],
                    bounds: Sequence[int], note: Note) -> None:
        """Start the rollout stream at the next `sync`, and watch engines and rewards. `draw` returns the prompts of the
        next batch. `carried` and `bounds` are the groups and the batches ahead that a checkpoint holds. `note` records
        a warning."""
        config, attempt, most = self.config, self.attempt, self.config.algorithm.max_staleness
        means = Means(self._actors.start_again, functools.partial(dismiss, attempt), functools.partial(blame, attempt),
                      note)
        self._engines = Engines(self._actors.engines, self._scheduler, self._coordinator, means,
                                hang_s=config.run.hang_min_s / INSIDE_FIRST, first_s=config.run.deadline_s)
        self._rewards = Rewards(self._actors.rewards, config.reward.workers, means.dismiss, note)
        self._stream = RolloutStream(
            draw, self._scheduler, self._rewards, Sampling.training(config), last=config.run.steps,
            max_staleness=most, batch_size=config.algorithm.prompts_per_step, timed=self._clock.generating,
            share=FairShare.of(self.plan) if config.algorithm.overlap else None)
        self._stream.carry_over(carried, [min(bound, most) for bound in bounds])

    # ---- the verbs of a step -----------------------------------------------------------------------------------

    async def part(self, step: int) -> ScoredGroups | None:
        """Wait for groups of the batch that `step` trains: generated, then scored. None: all of the batch is there, and
        what no part has is left to train. That is the whole batch without `algorithm.overlap`."""
        assert self._stream is not None
        with self._clock.span("rollout", f"batch {step}"):
            await self._watched(self._stream.generated(step, self._clock.alive))
        with self._clock.span("reward"):
            return await self._stream.part(step, self._clock.alive)

    async def batch(self, step: int) -> ScoredBatch:
        """Take the complete batch that `step` trains, after its last `part`."""
        assert self._stream is not None
        return await self._stream.batch(step)

    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
        """Generate the trajectories of every prompt. Returns the groups in the order of the prompts. They are sent
        before the groups of batches that are under way, and all of them are sampled at the current version."""
        return await self._watched(self._scheduler.rollout(prompts, sampling, step))

    async def _watched(self, generation: Coroutine[Any, Any, Result]) -> Result:
        """Await what the engines generate. An engine that samples tokens or finishes requests is alive."""
        assert self._engines is not None
        task, before = asyncio.create_task(generation), None
        try:
            while not (await asyncio.wait([task], timeout=ASK_EVERY_S))[0]:
                if self._engines.statuses != before:
                    before = dict(self._engines.statuses)
                    self._clock.alive()
            return task.result()
        finally:
            task.cancel()

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        """Score the trajectories of every group. Returns the scores in the order of the groups."""
        assert self._rewards is not None
        samples = [sample for group in groups for sample in group_samples(group)]
        calls = {f"samples from {at}": self._rewards.score(samples[at:at + SCORED_AT_ONCE])
                 for at in range(0, len(samples), SCORED_AT_ONCE)}
        parts = await gather(calls, "score", arrived=self._clock.alive)
        scores = (score for part in parts.values() for score in part)
        return [[next(scores) for _ in group.trajectories] for group in groups]

    def place(self, batch: PolicyBatch) -> PlacedBatch:
        """Put a batch into Ray's store, once for all passes over it."""
        return PlacedBatch(shared(replace(batch, number=next(self._numbers))))

    async def keep_logprobs(self, batch: PlacedBatch, model: Model) -> None:
        """Let every rank compute its log-probs of a batch under a model, and keep them for the updates on it."""
        await gather({rank.name: rank.keep_logprobs(batch.stored, model) for rank in self._trainers}, "logprobs")

    async def accumulate(self, batch: PlacedBatch) -> None:
        """Add the gradient of a part of the next optimizer step's batch."""
        await gather({rank.name: rank.accumulate(batch.stored) for rank in self._trainers}, "accumulate")

    async def update(self, step: int, batch: PlacedBatch | None, index: int, more: bool) -> Mapping[str, float]:
        """Take one optimizer step on what was accumulated and on a last part, if there is one. Every rank returns the
        same metrics. For `index` and `more` see `MegatronTrainer.update`."""
        stored = None if batch is None else batch.stored
        answers = await gather({rank.name: rank.update(step, stored, index, more) for rank in self._trainers}, "update")
        return next(iter(answers.values()))

    async def sync(self, version: int, max_staleness: int) -> SyncReport:
        """Update every engine to the trainer's weights. Returns once all have committed `version`, and hands out the
        batches that this admits under the bound `max_staleness`. With `rollout.swap: border` the engines first finish
        every batch that they have."""
        assert self._engines is not None and self._stream is not None
        if self.config.rollout.swap == "border":
            with self._clock.span("rollout", "border"):
                await self._watched(self._stream.drained(self._clock.alive))
        self._scheduler.hold(version)
        with self._clock.span("sync", f"version {version}"):
            await self._engines.before_sync()
            report = await self._coordinator.sync(version, self._clock.alive)
        self._engines.after_sync(report)
        self._scheduler.committed(version)
        self._stream.max_staleness = max_staleness
        self._stream.committed(version)
        return report

    def engine_metrics(self) -> dict[str, float]:
        """Metrics of the engines after a step."""
        return self._engines.metrics() if self._engines is not None else {}

    @property
    def groups(self) -> Mapping[str, int]:
        """What became of the groups that this attempt handed out (`RolloutStream.counts`)."""
        assert self._stream is not None
        return self._stream.counts

    async def begin_save(self, folder: Path, extra: dict[str, Any], *, background: bool) -> None:
        """Begin to write a checkpoint, with the groups that were generated ahead. `saved` has ended the one before.

        Args:
            background: the ranks write a copy, so that the run may go on. Otherwise it must wait for `saved`.
        """
        assert self._stream is not None and self._saving is None
        ahead, extra = self._stream.finished_ahead(), extra | {"bounds_ahead": self._stream.bounds_ahead()}
        rollouts = [carried.encode(ahead) if ahead else b"", *[b""] * (len(self._trainers) - 1)]
        await gather({rank.name: rank.begin_save(str(folder), extra, part, background)
                      for rank, part in zip(self._trainers, rollouts, strict=True)}, "saving")
        self._saving = folder

    @property
    def saves(self) -> bool:
        """Whether a checkpoint is being written, or its end has not been noticed yet."""
        return self._saving is not None

    async def saved(self, *, wait: bool) -> dict[str, float]:
        """The end of the checkpoint that is being written, as metrics. {} if there is none, or, without `wait`, if it
        is not complete yet. Bytes that are written are signs of life.

        Raises:
            UserError: it could not be written. Earlier ones are unchanged.
        """
        if self._saving is None:
            return {}
        written = await self._transferred("saving", wait)
        if not written.finished:
            return {}
        log.info("checkpoint %s written: %.2f GB in %.1f s", self._saving.name, written.nbytes / 1e9, written.seconds)
        self._saving = None
        return {"time/checkpoint_write": written.seconds}

    async def _transferred(self, what: str, wait: bool = True) -> Transferred:
        """What all ranks have read or written of a checkpoint."""
        before = -1
        while True:
            ranks = await gather({rank.name: rank.checkpoint_progress(ASK_EVERY_S if wait else 0.0)
                                  for rank in self._trainers}, what)
            all_ranks = Transferred(sum(rank.nbytes for rank in ranks.values()),
                                    max(rank.seconds for rank in ranks.values()),
                                    all(rank.finished for rank in ranks.values()))
            if all_ranks.finished or not wait:
                return all_ranks
            if all_ranks.nbytes > before:
                self._clock.alive()
            before = all_ranks.nbytes

    async def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder.

        Raises:
            NotWritten: the export failed. Unlike a failed version on disk, this fails the run.
        """
        await write_folder(self._writers, folder, self._clock.alive)

    # ---- versions on disk --------------------------------------------------------------------------------------

    def forget_versions_after(self, step: int) -> None:
        """Remove the versions after `step`. The attempt continues from `step` and repeats their steps."""
        for folder in self._disk.forget_after(step):
            log.info("removed %s: its step will be repeated", folder)

    def begin_to_disk(self, version: int) -> None:
        """Start to write the trainer's weights, which must not change until `version_on_disk` returns."""
        self._writing = asyncio.create_task(self._disk.write(version))

    @property
    def writes(self) -> bool:
        """Whether a version is being written."""
        return self._writing is not None

    async def version_on_disk(self) -> None:
        """Wait for the version that is being written, if any.

        Raises:
            NotWritten: the write failed. It affects neither earlier versions nor the run.
            SyncError: an engine holds different weights (`weight_sync.disk.compare`).
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        self._disk.alive = self._clock.alive_here()     # the writing task was created in an earlier span
        written = await writing
        log.info("wrote the version in %s: %.2f GB in %.1f s (%.2f GB/s), read back in %.1f s", written.folder,
                 written.nbytes / 1e9, written.write_s, written.nbytes / 1e9 / written.write_s, written.read_back_s)
        if self.config.weight_sync.disk.compare:
            assert self._engines is not None
            found = await self._engines.compare(str(written.folder))
            lines = [f"{name}: {line}" for name, each in found.items() for line in each]
            if lines:
                raise SyncError("\n".join([f"{len(lines)} differences from {written.folder}", *lines[:20]]))

    def _make_coordinator(self, attempt: Attempt) -> SyncCoordinator:
        placement = attempt.placement()
        way = sync_plan(self.config, self.plan, placement)
        return SyncCoordinator(
            self._trainers, self._actors.engines,
            [Endpoint(placement.addresses[rank.node], rank.port) for rank in placement.training],
            canonical_tensors(self.plan.architecture), backend="gloo" if self.plan.device == "cpu" else "nccl",
            bucket_bytes=way.bucket_bytes, timeout_s=self.config.weight_sync.timeout_s,
            aliases=TIED if self.plan.architecture.tied else None, route=way.route, seats=way.seats,
            address=placement.addresses[placement.nodes[0]])


def blame(attempt: Attempt, name: str, error: Exception) -> None:
    """Record an error that the driver found in what a component did."""
    record_error(attempt, name, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)),
                 pid=component(attempt, name).process.pid)
