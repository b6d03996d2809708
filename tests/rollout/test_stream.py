"""The rollout stream on engines that answer in any order: what a batch holds never depends on timing."""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data import carried
from megatron_rl.data.batch import Group, Trajectory
from megatron_rl.data.curriculum import Guarded
from megatron_rl.data.sampler import BatchSampler, PromptSampler
from megatron_rl.driver.ledger import Ledger
from megatron_rl.rewards.sample import Score
from megatron_rl.rollout.parts import FairShare
from megatron_rl.rollout.pending import ScoredBatch
from megatron_rl.rollout.refill import CannotBeFilled
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.scheduler import RolloutScheduler
from megatron_rl.rollout.stream import RolloutStream
from tests.report.plan_example import example_plan
from tests.rollout.engines import VOCABULARY, make_prompts

SAMPLING = Sampling(n=2, temperature=1.0, max_new_tokens=8)
ROWS, PER_STEP, STEPS = 10, 4, 7
PROMPTS = make_prompts(ROWS)
RESERVE = 3 * PER_STEP


class _Clock:
    """The order of events: every pending call waits for its turn, drawn by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    async def later(self) -> None:
        for _ in range(self.random.randrange(1, 40)):
            await asyncio.sleep(0)


@dataclass
class _World:
    """Engines and rewards that take any time, and the version that the engines serve."""

    seed: int
    flat: frozenset[int] = frozenset()
    """Rows whose groups get equal rewards."""
    version: int = 0
    generated: list[tuple[int, int]] = field(default_factory=list)
    """(prompt, version at the end of each group)."""

    def __post_init__(self) -> None:
        self.clock = _Clock(self.seed)

    async def generate_group(self, prompt, sampling, seed=None) -> Group:
        """A token for each version that is live while the group runs."""
        versions = [self.version]
        for _ in range(self.clock.random.randrange(1, 4)):
            await self.clock.later()
            versions.append(self.version)
        self.generated.append((prompt.index, self.version))
        trajectories = tuple(
            Trajectory.one_turn(np.array([prompt.index, sample] * len(versions))[:len(versions)].astype(np.int32),
                                np.zeros(len(versions), np.float32), np.array(versions, np.int32), "stop",
                                f"{prompt.index}.{sample}") for sample in range(sampling.n))
        return Group(prompt, trajectories)

    async def ended(self, count):
        return await asyncio.get_running_loop().create_future()     # whole groups make room

    async def generate(self, prompts, sampling, step):
        return list(await asyncio.gather(*[self.generate_group(prompt, sampling) for prompt in prompts]))

    async def score(self, samples) -> list[Score]:
        await self.clock.later()
        return [Score(1.0 if sample.prompt_index in self.flat else float(sample.completion)) for sample in samples]


@dataclass
class _Run:
    """A run that may be killed and resumed: what each step trained, and what a checkpoint holds."""

    max_staleness: int
    deterministic: bool = False
    reserve: int = 0
    per_step: int = PER_STEP
    sampling: Sampling = SAMPLING
    share: FairShare | None = None
    parts: dict[int, list[list[int]]] = field(default_factory=dict)
    """Step -> prompts of its parts, and of the rest."""
    trained: dict[int, list[tuple[int, list[float]]]] = field(default_factory=dict)
    """Step -> (prompt, rewards) of its groups, in order."""
    ages: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Step -> ages of its youngest and its oldest token."""
    bounds: dict[int, int] = field(default_factory=dict)
    """Step -> bound under which it was handed out."""
    change: Callable[[int], int] | None = None
    """Step -> bound from then on."""
    fault: Callable[[int, ScoredBatch], ScoredBatch] = staticmethod(lambda step, batch: batch)
    """What a broken stream would give instead of a batch."""
    heard: list[tuple[int, list[float]]] = field(default_factory=list)
    """Row and rewards of every group, replaced ones included, of the trained batches."""
    step: int = 0
    sampler: dict | None = None
    rollouts: bytes = b""
    ahead: list[int] = field(default_factory=list)
    ledger: str = "null"

    @property
    def counted(self) -> tuple[int, int, int]:
        """(trained, lost, duplicated) by the ledger."""
        ledger = self._ledger()
        return ledger.trained, ledger.lost, ledger.duplicated

    def _ledger(self) -> Ledger:
        ledger = Ledger(PromptSampler(ROWS, 0))
        if state := json.loads(self.ledger):
            ledger.load_state_dict(state)
        return ledger

    async def go(self, world: _World, until: int, tmp_path=None) -> dict[str, int]:
        """Resume from the checkpoint, train up to a step and write a checkpoint there. Returns the stream's counts."""
        sampler, ledger = BatchSampler(Guarded(PromptSampler(ROWS, 0), "", ROWS), self.per_step,
                                       self.reserve, self.max_staleness), self._ledger()
        if self.sampler is not None:
            sampler.load_state_dict(json.loads(json.dumps(self.sampler)))
        scheduler = RolloutScheduler([world, world], max_num_seqs=6, vocabulary=VOCABULARY,
                                     deterministic=self.deterministic)
        stream = RolloutStream(lambda: [PROMPTS[row] for row in sampler.draw()], scheduler, world,
                               self.sampling, max_staleness=self.max_staleness, last=STEPS, batch_size=self.per_step,
                               share=self.share)
        if self.rollouts:
            (tmp_path / carried.FILE).write_bytes(self.rollouts)
            stream.carry_over(carried.read(tmp_path / carried.FILE),
                              [min(bound, self.max_staleness) for bound in self.ahead])
        world.version = self.step
        scheduler.committed(self.step)
        if self.change is not None:
            stream.max_staleness = self.change(self.step)
        stream.committed(self.step)
        while self.step < until:
            step = self.step + 1
            parts = []
            await stream.generated(step)
            while (part := await stream.part(step)) is not None:
                parts.append(part)
                await world.clock.later()           # forward and backward
                await stream.generated(step)
            whole = await stream.batch(step)
            self._check_parts(step, [*parts, whole.rest], whole)
            sampler.taken(whole.heard)
            batch = self.fault(step, whole)
            self.heard += batch.heard
            assert step not in self.trained
            self.bounds[step] = batch.bound
            self.trained[step] = [(group.prompt.index, [score.total for score in scores])
                                  for group, scores in zip(batch.groups, batch.scores, strict=True)]
            ages = [int(step - 1 - version) for group in batch.groups for each in group.trajectories
                    for version in each.weight_versions]
            self.ages[step] = min(ages), max(ages)
            await world.clock.later()               # the update
            if self.deterministic:
                await stream.drained()
            scheduler.hold(step)
            await world.clock.later()               # the sync
            world.version = self.step = step
            picked = sampler.trained()
            ledger.settle([PROMPTS[row].index for row in picked], [group.prompt.index for group in batch.groups],
                          [group.prompt.index for group, _ in batch.replaced or ()],
                          [PROMPTS[row].index for row in sampler.waiting])
            if self.change is not None:
                stream.max_staleness = self.change(step)
            scheduler.committed(step)
            stream.committed(step)
        self.sampler, self.ledger = sampler.state_dict(), json.dumps(ledger.state_dict())
        self.rollouts, self.ahead = carried.encode(stream.finished_ahead()), stream.bounds_ahead()
        await stream.close()
        assert len(asyncio.all_tasks()) == 1
        return dict(stream.counts)

    def _check_parts(self, step, parts, batch) -> None:
        """Every group is in one part, with its scores; all but the last are large enough."""
        rows = [(group.prompt.index, [score.total for score in scores]) for part in parts
                for group, scores in zip(part.groups, part.scores, strict=True)]
        whole = [(group.prompt.index, rewards.tolist()) for group, rewards
                 in zip(batch.groups, batch.rewards, strict=True)]
        assert sorted(rows) == sorted(whole)
        assert all(len(part.groups) >= self.share.groups for part in parts[:-1]) and parts[-1].groups
        self.parts[step] = [[group.prompt.index for group in part.groups] for part in parts]


def _reference(flat: frozenset[int] = frozenset(), reserve: int = 0, bounds: Mapping[int, int] | None = None
               ) -> dict[int, list[tuple[int, list[float]]]]:
    """Without a stream, one batch after the other: the first rows with spread. The rows behind them come back first in
    the batch that is handed out when this one is trained, `bounds[step] + 1` steps later."""
    fresh, back, behind, heard, trained = PromptSampler(ROWS, 0), deque(), {}, 0, {}
    for step in range(1, STEPS + 1):
        while heard < step - 1 - (bounds or {}).get(step, 0):
            heard += 1
            back.extend(behind[heard])
        rows = [back.popleft() if back else fresh.pick(1)[0] for _ in range(PER_STEP + reserve)]
        kept = [at for at, row in enumerate(rows) if PROMPTS[row].index not in flat][:PER_STEP]
        behind[step] = rows[kept[-1] + 1:] if len(kept) == PER_STEP else []
        trained[step] = [(row, [float(f"{row}.{sample}") for sample in range(SAMPLING.n)])
                         for row in (PROMPTS[rows[at]].index for at in kept)]
    return trained


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10_000), bounds=st.lists(st.integers(0, 4), min_size=1, max_size=4),
       deterministic=st.booleans(), flat=st.one_of(st.none(), st.frozensets(st.integers(0, ROWS - 1), max_size=6)),
       share=st.sampled_from([None, FairShare(1, 0), FairShare(2, 0), FairShare(1, 25)]), data=st.data())
def test_every_group_is_trained_once_in_its_batch_whatever_the_timing_and_the_resumes(
        tmp_path_factory, seed, bounds, deterministic, flat, share, data):
    """Also with another bound after each resume, with dynamic sampling (`flat`: rows without spread), and in parts. No
    token is older than the bound. The ledger says so."""
    reserve, flat = (0, frozenset()) if flat is None else (RESERVE, frozenset(PROMPTS[row].index for row in flat))
    run, folder = _Run(bounds[0], deterministic, reserve, share=share), tmp_path_factory.mktemp("run")
    bound_of: dict[int, int] = {}
    for number, bound in enumerate(bounds):
        until = STEPS if number == len(bounds) - 1 else data.draw(st.integers(run.step, STEPS))
        run.max_staleness, began = bound, run.step
        try:
            asyncio.run(run.go(_World(seed + number, flat), until, folder))
        except CannotBeFilled:
            bound_of |= dict.fromkeys(range(began + 1, STEPS + 1), bound)
            assert len(_reference(flat, reserve, bound_of)[run.step + 1]) < PER_STEP
            return
        assert all(run.ages[step][1] <= run.bounds[step] <= bound for step in range(began + 1, until + 1))
        assert run.counted == (until * PER_STEP, 0, 0)
        bound_of |= dict.fromkeys(range(began + 1, until + 1), bound)
    assert run.trained == _reference(flat, reserve, bound_of)
    if share is None:
        assert all(len(parts) == 1 for parts in run.parts.values())
    elif deterministic and not share.tokens:
        assert all(list(map(len, parts)) == ([1] * 4 if share.groups == 1 else [2, 2]) for parts in run.parts.values())


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_reserve_is_generated_only_as_far_as_it_is_needed(deterministic):
    """A batch is generated up to its last group that is trained, in whatever order its groups arrive."""
    flat = frozenset(PROMPTS[row].index for row in range(4))
    world, run = _World(1, flat), _Run(0, deterministic, RESERVE)
    counts = asyncio.run(run.go(world, STEPS))
    assert run.trained == _reference(flat, RESERVE)
    assert counts["handed_out"] == counts["generated"] == len(world.generated)
    order = [PROMPTS[row].index for row in PromptSampler(ROWS, 0).pick(len(world.generated))]
    assert sorted(row for row, _ in world.generated) == sorted(order)
    assert [row for row in order if row not in flat] == [row for step in run.trained.values() for row, _ in step]


def test_groups_that_are_complete_are_given_while_others_run():
    """The third group of four never ends by itself."""
    async def run() -> None:
        class Slow(_World):
            async def generate_group(self, prompt, sampling, seed=None):
                if prompt.index == PROMPTS[2].index:
                    await release.wait()
                return await super().generate_group(prompt, sampling)

        release, world = asyncio.Event(), Slow(0)
        scheduler = RolloutScheduler([world], max_num_seqs=64, vocabulary=VOCABULARY, deterministic=False)
        stream = RolloutStream(lambda: PROMPTS[:4], scheduler, world, SAMPLING, max_staleness=0, last=1,
                               share=FairShare(groups=3, tokens=0))
        scheduler.committed(0)
        stream.committed(0)
        part = await asyncio.wait_for(stream.part(1), 30)
        assert [group.prompt.index for group in part.groups] == [PROMPTS[place].index for place in (0, 1, 3)]
        release.set()
        assert await stream.part(1) is None
        batch = await stream.batch(1)
        assert [group.prompt.index for group in batch.rest.groups] == [PROMPTS[2].index]
        assert [group.prompt.index for group in batch.groups] == [prompt.index for prompt in PROMPTS[:4]]
        await stream.close()

    asyncio.run(run())


def test_a_fair_share_fills_the_pipelines():
    """An eighth of the batch with a sequence for every rank; with a pipeline, PP micro-batches on each of them."""
    def share(pp: int, dp: int, prompts: int) -> FairShare:
        plan = example_plan(pp=pp, vpp=1, dp=dp)
        return FairShare.of(plan.model_copy(update={"batch": plan.batch.model_copy(update={
            "prompts_per_step": prompts, "group_size": 4, "token_budget": 100})}))

    assert share(1, 2, 64) == FairShare(8, 0) and share(1, 2, 65) == FairShare(9, 0)
    assert share(1, 13, 16) == FairShare(4, 0)
    assert share(2, 4, 64) == FairShare(8, 800)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), changes=st.lists(st.integers(0, 3), min_size=STEPS + 1, max_size=STEPS + 1),
       killed=st.integers(0, STEPS))
def test_a_bound_that_changes_during_a_deterministic_run_repeats_over_a_resume(tmp_path_factory, seed, changes, killed):
    """Batches that were handed out under an old, larger bound are trained, resumed or not, with the same versions."""
    folder = tmp_path_factory.mktemp("run")
    whole, broken = (_Run(3, deterministic=True, change=changes.__getitem__) for _ in range(2))
    asyncio.run(whole.go(_World(seed), STEPS, folder))
    asyncio.run(broken.go(_World(seed + 1), killed, folder))
    counts = asyncio.run(broken.go(_World(seed + 2), STEPS, folder))
    assert (broken.trained, broken.ages, broken.bounds) == (whole.trained, whole.ages, whole.bounds)
    assert whole.trained == _reference() and all(youngest == oldest for youngest, oldest in whole.ages.values())
    assert all(oldest <= whole.bounds[step] <= 3 for step, (_, oldest) in whole.ages.items())
    assert counts["carried"] + counts["generated"] == counts["handed_out"] == (STEPS - killed) * PER_STEP


def _without_a_group(step: int, batch: ScoredBatch) -> ScoredBatch:
    return replace(batch, groups=batch.groups[:-1], scores=batch.scores[:-1]) if step == 3 else batch


def _with_a_group_twice(step: int, batch: ScoredBatch) -> ScoredBatch:
    return replace(batch, groups=[*batch.groups, batch.groups[0]], scores=[*batch.scores, batch.scores[0]]
                   ) if step == 3 else batch


def _with_a_group_for_another(step: int, batch: ScoredBatch) -> ScoredBatch:
    return replace(batch, groups=[*batch.groups[:-1], batch.groups[0]]) if step == 3 else batch


@pytest.mark.parametrize("fault, counted", [(_without_a_group, (STEPS * PER_STEP - 1, 1, 0)),
                                            (_with_a_group_twice, (STEPS * PER_STEP + 1, 0, 1)),
                                            (_with_a_group_for_another, (STEPS * PER_STEP, 1, 1))])
@pytest.mark.parametrize("reserve", [0, RESERVE])
def test_the_ledger_sees_a_group_that_is_dropped_or_trained_twice(tmp_path, fault, counted, reserve):
    """Also after a resume."""
    run = _Run(2, fault=fault, reserve=reserve)
    asyncio.run(run.go(_World(0), 4, tmp_path))
    asyncio.run(run.go(_World(1), STEPS, tmp_path))
    assert run.counted == counted


@pytest.mark.parametrize("batches", [1, -1])
def test_the_ledger_sees_a_checkpoint_whose_position_skips_or_repeats_a_batch(tmp_path, batches):
    run = _Run(1)
    asyncio.run(run.go(_World(0), 4, tmp_path))
    position = PromptSampler(ROWS, 0)
    position.pick((4 + batches) * PER_STEP)
    run.sampler = {**run.sampler, "state": position.state_dict()}
    asyncio.run(run.go(_World(1), 5, tmp_path))
    trained, lost, duplicated = run.counted
    assert trained == 5 * PER_STEP and lost == duplicated > 0


def test_generation_runs_ahead_by_the_bound_and_no_further():
    async def ahead(bound: int) -> list[int]:
        world, drawn = _World(0), []
        scheduler = RolloutScheduler([world], max_num_seqs=64, vocabulary=VOCABULARY, deterministic=False)
        stream = RolloutStream(lambda: drawn.append(0) or PROMPTS[:2], scheduler, world, SAMPLING,
                               max_staleness=bound, last=5)
        scheduler.committed(0)
        stream.committed(0)
        seen = [len(drawn)]
        for step in range(1, 6):
            await stream.batch(step)
            world.version = step
            scheduler.committed(step)
            stream.committed(step)
            seen.append(len(drawn))
        await stream.close()
        return seen

    assert asyncio.run(ahead(0)) == [1, 2, 3, 4, 5, 5]
    assert asyncio.run(ahead(2)) == [3, 4, 5, 5, 5, 5]


@pytest.mark.parametrize("reserve", [0, RESERVE])
def test_finished_groups_of_a_checkpoint_are_not_generated_again(tmp_path, reserve):
    """Killed after step 2 with two batches ahead: what was finished is used as it was, with its versions. A group
    without spread stays replaced."""
    flat = frozenset({PROMPTS[5].index, PROMPTS[6].index} if reserve else ())
    whole, unbroken = _Run(max_staleness=2, reserve=reserve), _World(3, flat)
    asyncio.run(whole.go(unbroken, STEPS))
    run, world = _Run(max_staleness=2, reserve=reserve), _World(3, flat)
    asyncio.run(run.go(world, 2))
    (tmp_path / carried.FILE).write_bytes(run.rollouts)
    kept = [(group.step, group.place) for group in carried.read(tmp_path / carried.FILE)]
    assert kept and all(step > 2 for step, _ in kept)
    trained = [group for step in (1, 2) for group in run.trained[step]]
    replaced = len(run.heard) - len(trained)
    again = _World(4, flat)
    asyncio.run(run.go(again, STEPS, tmp_path))
    assert len(trained) + replaced + len(kept) + len(again.generated) == len(unbroken.generated)
    assert run.trained == whole.trained == _reference(flat, reserve, dict.fromkeys(range(1, STEPS + 1), 2))


@pytest.mark.parametrize("change", [{"sampling": Sampling(n=3, temperature=1.0, max_new_tokens=8)}, {"per_step": 3}])
def test_another_group_or_batch_size_after_a_resume_generates_what_is_ahead_again(tmp_path, change):
    """No row is lost or repeated, and no group has the old size."""
    run = _Run(max_staleness=2)
    asyncio.run(run.go(_World(3), 2))
    assert run.rollouts
    for name, value in change.items():
        setattr(run, name, value)
    again = _World(4)
    asyncio.run(run.go(again, STEPS, tmp_path))
    rows = [row for step in range(1, STEPS + 1) for row, _ in run.trained[step]]
    assert rows == [PROMPTS[row].index for row in PromptSampler(ROWS, 0).pick(len(rows))]
    assert len(rows) == 2 * PER_STEP + (STEPS - 2) * run.per_step
    assert {len(rewards) for step in range(3, STEPS + 1) for _, rewards in run.trained[step]} == {run.sampling.n}
    if "sampling" in change:
        assert len(again.generated) == (STEPS - 2) * PER_STEP


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_that_its_reserve_does_not_fill_ends_the_run_at_its_own_step(seed, deterministic):
    """Batch 3 is hopeless, and is known to be while batch 1 is generated: batches 1 and 2 are trained first."""
    async def run() -> list[int]:
        world, drawn, trained = _World(seed, frozenset(PROMPTS[row].index for row in (6, 7, 8))), iter(range(99)), []
        scheduler = RolloutScheduler([world], max_num_seqs=64, vocabulary=VOCABULARY, deterministic=deterministic)
        batches = [PROMPTS[0:3], PROMPTS[3:6], [*PROMPTS[6:8], PROMPTS[8], PROMPTS[9]]]
        stream = RolloutStream(lambda: batches[next(drawn)], scheduler, world, SAMPLING, max_staleness=2, last=3,
                               batch_size=2)
        scheduler.committed(0)
        stream.committed(0)
        await stream.drained()
        with pytest.raises(CannotBeFilled) as caught:
            for step in (1, 2, 3):
                batch = await stream.batch(step)
                assert batch.replaced == [] and len(batch.groups) == len(batch.heard) == 2
                trained.append(step)
        assert "step 3: dynamic sampling generated 4 groups, and 1 of them have different rewards, where the batch " \
               "needs 2 (algorithm.dynamic_sampling.max_refill = 1): the prompts are too easy" in str(caught.value)
        await stream.close()
        return trained

    assert asyncio.run(run()) == [1, 2]


def test_a_failure_in_a_later_batch_is_raised_at_once():
    class Broken(_World):
        async def score(self, samples):
            if samples[0].prompt_index == PROMPTS[5].index:
                raise RuntimeError("the reward broke")
            await asyncio.sleep(3600)

    async def run() -> None:
        world = Broken(0)
        scheduler = RolloutScheduler([world], max_num_seqs=64, vocabulary=VOCABULARY, deterministic=False)
        batches = iter([PROMPTS[:4], PROMPTS[4:8]])
        stream = RolloutStream(lambda: next(batches), scheduler, world, SAMPLING,
                               max_staleness=1, last=2)
        scheduler.committed(0)
        stream.committed(0)
        with pytest.raises(RuntimeError, match="the reward broke"):
            await asyncio.wait_for(stream.batch(1), 30)
        await stream.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_token_older_than_the_bound_is_refused():
    class Stale(_World):
        async def generate_group(self, prompt, sampling, seed=None):
            self.version = 0
            return await super().generate_group(prompt, sampling)

    async def run() -> None:
        world = Stale(0)
        scheduler = RolloutScheduler([world], max_num_seqs=64, vocabulary=VOCABULARY, deterministic=False)
        stream = RolloutStream(lambda: PROMPTS[:2], scheduler, world, SAMPLING, max_staleness=0, last=2)
        for version in (0, 1):
            scheduler.committed(version)
        stream.committed(1)
        try:
            await stream.batch(2)
        finally:
            await stream.close()

    with pytest.raises(RuntimeError, match="sampled at versions 0 to 0, with a bound of 0 on the"):
        asyncio.run(run())


def test_carried_groups_come_back_from_the_file_bit_for_bit(tmp_path):
    group = Group(PROMPTS[3], (
        Trajectory(np.array([5, 6, 7], np.int32), np.array([True, False, True]), np.array([-.5, 0, -1e-7], np.float32),
                   np.array([2, 0, 3], np.int32), "length", "naïve ✓"),
        Trajectory(np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")),
        engine=1)
    (tmp_path / carried.FILE).write_bytes(carried.encode([carried.CarriedGroup.of(4, 1, group)]))
    (read,) = carried.read(tmp_path / carried.FILE)
    assert (read.step, read.place, read.prompt_index, read.engine, read.oldest) == (4, 1, PROMPTS[3].index, 1, 2)
    for before, after in zip(group.trajectories, read.trajectories, strict=True):
        for name in ("token_ids", "sampled", "logprobs", "weight_versions"):
            assert getattr(before, name).tobytes() == getattr(after, name).tobytes()
        assert (before.finish_reason, before.text) == (after.finish_reason, after.text)
    assert carried.read(tmp_path / "none.npz") == []
