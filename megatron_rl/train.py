"""The driver: the GRPO loop, top to bottom. `python -m megatron_rl.train ATTEMPT_FOLDER`.

    roll out -> reward -> advantage -> (old, reference, teacher log-probs) -> update -> weight sync -> eval, save

Log-probs of the trainer stay on its ranks.
The actors behind `Job` do all heavy work. This process needs neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence

from launch import envvars
from launch.config.checks import cautions
from launch.config.resolved import ResolvedConfig
from launch.errors import UserError
from launch.run.attempts import Attempt
from launch.run.components import Failure, await_silently_lost, first_failure
from launch.run.outcome import Groups, Outcome, write_outcome
from launch.run.stop import stop_requested
from megatron_rl.algorithms.batch import batch_statistics, build_policy_batches
from megatron_rl.data import carried
from megatron_rl.data.batch import PolicyBatch
from megatron_rl.driver import component, step_metrics
from megatron_rl.driver.clock import StepClock
from megatron_rl.driver.cluster import death_reason
from megatron_rl.driver.job import Job, PlacedBatch
from megatron_rl.driver.start import start_actors
from megatron_rl.driver.state import RunState, newest_checkpoint, refuse_old_export
from megatron_rl.layouts.step_folder import checkpoint_folder
from megatron_rl.monitor.monitor import Monitor
from megatron_rl.rollout import refill
from megatron_rl.rollout.pending import ScoredGroups
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.weight_sync.disk import NotWritten

log = logging.getLogger("megatron_rl.train")

OTHER_NODES_S = 3.0
"""How long a failed attempt waits for other nodes to report a dead process."""


def main() -> int:
    """Entry point of the driver process. Writes the outcome of the attempt to outcome.json."""
    node = envvars.get(envvars.NODE) or ""
    attempt = component.begin(sys.argv[1], "driver", node, own_log=False)
    clock = StepClock(attempt.folder)
    try:
        outcome = asyncio.run(train(attempt, clock))
    except Exception as error:  # any exception ends the attempt, with its cause on record
        component.report(attempt, "driver", error)
        if not isinstance(error, UserError) and len(attempt.placement().nodes) > 1:
            await_silently_lost(attempt, OTHER_NODES_S)
        outcome = failed(clock, first_failure(attempt, node), death_reason(error))
    write_outcome(attempt.folder, outcome)
    return int(outcome.exit_code)


def failed(clock: StepClock, failure: Failure, reason: str | None) -> Outcome:
    """The outcome of a failed attempt: a user error or a crash."""
    return Outcome(status="user_error" if failure.user_error else "crash", step=clock.steps_done,
                   message=f"{failure.message}\n{reason}" if reason else failure.message,
                   component=failure.component, log=failure.log)


async def train(attempt: Attempt, clock: StepClock) -> Outcome:
    """Run the attempt to its last step, or to the step at which a stop is requested."""
    config = attempt.config()
    clock.start_up("reading the data")
    state = RunState.from_data(config, attempt)
    actors = await start_actors(attempt, state.columns, state.identity["template"], clock)
    async with Job(attempt, actors, clock) as job:
        checkpoint = newest_checkpoint(attempt, config)
        loaded = await job.load(checkpoint, state.identity)
        state.resume(loaded)
        refuse_old_export(state, attempt)
        await job.open_sync()
        component.settle()
        monitor = Monitor(config, attempt.folder, first_step=state.step + 1)
        for line in state.changes:
            monitor.note("CHANGED", line)
        for line in state.overlong:
            monitor.note("OVERLONG", line)
        for code, line in cautions(config):
            monitor.note(code, line)
        job.open_stream(state.draw, carried.read(checkpoint / carried.FILE) if checkpoint else [],
                        loaded["extra"]["bounds_ahead"] if loaded else [], monitor.note)
        await job.sync(state.step, state.staleness.now)
        job.forget_versions_after(state.step)
        if state.step == 0 and state.saved < 0 and config.eval.at_start:
            monitor.log(0, await evaluate(job, state, clock))

        while state.step < config.run.steps and not stop_requested(attempt.folder):
            clock.begin(state.step + 1)
            try:
                metrics = await take_step(job, state, clock, monitor)
            except refill.CannotBeFilled:      # the weights are those of the step before
                await save_last(job, state, clock)
                raise
            last = state.step == config.run.steps
            try:
                metrics |= await job.saved(wait=False)
                if due(state.step, config.eval.every) or (last and config.eval.at_end):
                    metrics |= await evaluate(job, state, clock)
                if due(state.step, config.checkpoint.every) or last:
                    metrics |= await save(job, state, clock, background=config.checkpoint.async_save and not last)
            finally:  # the step's row is logged even if the checkpoint fails
                monitor.log(state.step, metrics)

        await settle_disk(job, clock, monitor, "save")
        stopped = state.step < config.run.steps
        await save_last(job, state, clock)
        if not stopped and state.exports:
            with clock.span("export", "Hugging Face folder"):
                await job.export(attempt.exported(state.step))
        ledger = state.ledger
        groups = Groups(**job.groups, trained=ledger.trained, lost=ledger.lost, duplicated=ledger.duplicated)
        log.info("groups: %s", groups)
        if groups.lost + groups.duplicated:
            monitor.note("GROUPS", f"not every prompt was trained exactly once: {groups}")
        monitor.close()
        clock.ending()
    return Outcome(status="stopped" if stopped else "finished", step=state.step, groups=groups)


async def take_step(job: Job, state: RunState, clock: StepClock, monitor: Monitor) -> dict[str, float]:
    """Take one GRPO step. Afterwards the engines serve the new weights and `state.step` has advanced. Every sync lets
    the rollout stream (`megatron_rl.rollout.stream`) hand out further batches, which the engines generate while this
    loop goes on."""
    config, step = state.config, state.step + 1
    while (part := await job.part(step)) is not None:       # while others of the batch are generated
        await accumulate(job, clock, policy_batches(config, part, step))
    batch = await job.batch(step)
    state.taken(batch.heard)
    statistics = batch_statistics(batch.groups, batch.rewards, config.algorithm)
    batches = [job.place(each) for each in policy_batches(config, batch.rest, step)]
    waited = await settle_disk(job, clock, monitor)
    with clock.span("log-prob"):
        for each in batches:
            await keep_fixed_logprobs(job, each)
    order: Sequence[PlacedBatch | None] = batches * config.algorithm.epochs or [None]   # None: parts have all there is
    with clock.span("train", f"{len(order)} update(s)"):
        updates = [await job.update(step, each, index, more=index + 1 < len(order)) for index, each in enumerate(order)]
    control_staleness(state, step, batch.bound, updates, monitor)
    report = await job.sync(step, state.staleness.now)
    state.trained(step, [group.prompt for group in batch.groups],
                  [group.prompt for group, _ in batch.replaced or ()])
    times = clock.end() | waited
    if due(step, config.weight_sync.disk.every) and not stop_requested(job.attempt.folder):
        job.begin_to_disk(step)
    monitor.samples(step, batch.groups, batch.rewards)
    await monitor.rollouts(step, batch.groups, batch.scores)
    metrics = step_metrics.of_step(step, batch.groups, batch.scores, statistics, updates, report, times)
    if batch.replaced is not None:
        metrics |= refill.metrics(batch.replaced, len(batch.groups))
    return metrics | job.engine_metrics() | {"staleness/bound": float(state.staleness.now)}


def control_staleness(state: RunState, step: int, bound: int, updates: Sequence[Mapping[str, float]],
                      monitor: Monitor) -> None:
    """Adapt the bound on the staleness of the batches that are handed out from now on (`StalenessBound`). `bound` is
    that of the batch."""
    divergence = step_metrics.divergence(updates)
    change = state.staleness.observe(divergence, bound)
    if change is not None:
        monitor.note("STALENESS", change, {"divergence": divergence or 0.0, "bound": state.staleness.now,
                                           "max_staleness": state.staleness.most}, step=step)


def policy_batches(config: ResolvedConfig, scored: ScoredGroups, step: int) -> list[PolicyBatch]:
    """The mini-batches of scored groups; none if no group has two answers to compare."""
    return build_policy_batches(scored.groups, scored.rewards, config.algorithm, config.rollout.max_new_tokens,
                                version=step - 1)


async def accumulate(job: Job, clock: StepClock, batches: Sequence[PolicyBatch]) -> None:
    """Run forward and backward on a part of the batch (`algorithm.overlap`). The weights do not change."""
    for batch in batches:
        placed = job.place(batch)
        with clock.span("log-prob"):
            await keep_fixed_logprobs(job, placed)
        with clock.span("train", f"{len(batch.lengths_B)} sequences"):
            await job.accumulate(placed)


async def settle_disk(job: Job, clock: StepClock, monitor: Monitor, phase: str = "disk") -> dict[str, float]:
    """Wait until the version that is being written is on disk: the trainer may not change weights before that. A failed
    write is only a warning, because the run does not need it. `phase`: `disk` inside a step, `save` after the last."""
    if not job.writes:
        return {}
    with clock.span(phase, "a version of the weights"):
        try:
            await job.version_on_disk()
        except NotWritten as error:
            monitor.note("DISK", str(error))
    return {"time/disk": clock.last(phase)}


async def keep_fixed_logprobs(job: Job, batch: PlacedBatch) -> None:
    """Let the ranks compute the log-probs that stay fixed during the update: proximal, reference and teacher."""
    algorithm = job.config.algorithm
    if algorithm.old_logprobs == "recompute":
        await job.keep_logprobs(batch, "policy")
    if algorithm.kl.beta > 0:
        await job.keep_logprobs(batch, "reference")
    if algorithm.distillation.teacher is not None:
        await job.keep_logprobs(batch, "teacher")


async def evaluate(job: Job, state: RunState, clock: StepClock) -> dict[str, float]:
    """Answer the held-out questions greedily, write the answers to eval-<step>.jsonl and return their metrics."""
    with clock.span("eval", f"{len(state.held_out)} questions"):
        groups = await job.generate(state.held_out, Sampling.greedy(state.config), state.step)
        scores = await job.score(groups)
        file = job.attempt.folder / f"eval-{state.step:06d}.jsonl"
        metrics = step_metrics.of_evaluation(file, groups, scores, state.config)
    return metrics | {"time/eval": clock.last("eval")}


async def save(job: Job, state: RunState, clock: StepClock, *, background: bool) -> dict[str, float]:
    """Write a checkpoint of the latest step, after the one that is still being written. In the background, the run goes
    on as soon as the ranks have copied their state."""
    with clock.span("save", f"step {state.step}"):
        metrics = await job.saved(wait=True)
        await job.begin_save(checkpoint_folder(job.attempt.checkpoints, state.step), state.extra(),
                             background=background)
        state.saved = state.step
        if not background:
            metrics = await job.saved(wait=True)
    return metrics | {"time/checkpoint": clock.last("save")}


async def save_last(job: Job, state: RunState, clock: StepClock) -> None:
    """Leave a complete checkpoint of the latest step."""
    if state.step > state.saved:
        await save(job, state, clock, background=False)
    elif job.saves:
        with clock.span("save", f"step {state.saved}"):
            await job.saved(wait=True)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


if __name__ == "__main__":
    sys.exit(main())
