"""Spans: what a step's times are, what the launcher is told, and the trace."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from launch.run.progress import read_progress, steps_done
from megatron_rl.driver import clock as clock_module
from megatron_rl.driver.clock import StepClock, covered


class _Time:
    """Two clocks that move when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return 1e9 + self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch) -> _Time:
    moved = _Time()
    monkeypatch.setattr(clock_module, "time", moved)
    return moved


def _open(folder: Path) -> dict[str, float]:
    """The open spans with the seconds of their last sign of life."""
    progress = read_progress(folder)
    assert progress is not None
    return {span.name: span.at - 1e9 for span in progress.open}


def test_times_of_a_step_whose_spans_follow_one_another(time, tmp_path):
    clock = StepClock(tmp_path)
    clock.begin(7)
    for name, seconds in (("rollout", 4.0), ("reward", 1.0), ("disk", 0.5), ("train", 2.0), ("train", 1.0)):
        with clock.span(name):
            time.now += seconds
        time.now += 0.25
    assert clock.end() == pytest.approx({
        "time/rollout": 4, "time/reward": 1, "time/logprob": 0, "time/train": 3, "time/sync": 0, "time/step": 9.75,
        "time/other": 1.75, "time/rollout_hidden": 0, "time/train_hidden": 0, "idle/trainer": 5 / 9.75,
        "idle/engines": 5.75 / 9.75
    }), "waiting for the disk is part of the other time"
    with clock.span("eval"):
        time.now += 3
    assert clock.last("eval") == 3 and clock.last("train") == 1


def test_generation_beside_other_work_is_hidden(time, tmp_path):
    """Batch 2 is generated from second 1 of the step to second 8 of 10. The loop waits for 3 of them."""
    clock = StepClock(tmp_path)
    clock.begin(1)
    time.now += 1
    with clock.generating(2):
        time.now += 2
        assert list(_open(tmp_path)) == ["step"], "the hang watch does not judge it"
        with clock.span("rollout"):
            time.now += 3
        time.now += 2
    time.now += 2
    times = clock.end()
    assert (times["time/rollout"], times["time/rollout_hidden"]) == (3, 4)
    assert (times["idle/trainer"], times["idle/engines"]) == pytest.approx((0.3, 0.3))


def test_training_that_hides_behind_its_own_batch(time, tmp_path):
    """Batch 1 is generated in the first 8 of 20 seconds, and batch 2, ahead of its step, from second 1 on. A part of
    batch 1 is trained from second 3 to 6, the next from second 7 to 11."""
    clock = StepClock(tmp_path)
    with clock.generating(1):
        clock.begin(1)
        time.now += 1
        with clock.generating(2):
            with clock.span("rollout"):
                time.now += 2
            with clock.span("log-prob"):
                time.now += 1
            with clock.span("train"):
                time.now += 2
            with clock.span("rollout"):
                time.now += 1
            ahead = contextlib.ExitStack()
            ahead.enter_context(clock.span("train"))
            time.now += 1
    with ahead:
        time.now += 3
    time.now += 9
    times = clock.end()
    assert times["time/train_hidden"] == 4 and times["time/train"] + times["time/logprob"] == 7
    assert (times["time/rollout"], times["time/rollout_hidden"], times["idle/trainer"]) == (3, 5, 3 / 20)
    assert sum(times[f"time/{name}"] for name in ("rollout", "train", "logprob", "other")) == times["time/step"]
    with clock.span("train"):
        assert read_progress(tmp_path).newest.expected_s == 6, "all parts of the step: one may be nearly all of it"


def test_other_time_is_what_no_span_covers(time, tmp_path):
    """A rollout that began in the step before, and goes on in the next, beside an update."""
    async def rollout(seconds: list[asyncio.Event]) -> None:
        with clock.span("rollout"):
            await seconds[0].wait()

    async def story() -> list[dict[str, float]]:
        done, found = [asyncio.Event()], []
        clock.begin(1)
        time.now += 1
        task = asyncio.create_task(rollout(done))
        await asyncio.sleep(0)
        time.now += 2
        found.append(clock.end())
        clock.begin(2)
        with clock.span("train"):
            time.now += 3
            done[0].set()
            await task
            time.now += 4
        time.now += 5
        found.append(clock.end())
        return found

    clock = StepClock(tmp_path)
    first, second = asyncio.run(story())
    assert (first["time/rollout"], first["time/step"], first["time/other"]) == (2, 3, 1)
    assert (second["time/rollout"], second["time/train"], second["time/step"]) == (3, 7, 12)
    assert second["time/other"] == 5


def test_a_sign_of_life_counts_for_the_span_of_its_task(time, tmp_path):
    async def story() -> None:
        arrived = asyncio.Event()

        async def rollout() -> None:
            with clock.span("rollout"):
                await arrived.wait()
                clock.alive()
                assert _open(tmp_path) == {"rollout": 5, "train": 0}

        task = asyncio.create_task(rollout())
        await asyncio.sleep(0)
        with clock.span("train"):
            assert _open(tmp_path) == {"rollout": 0, "train": 0}
            time.now = 0.5
            clock.alive()
            assert _open(tmp_path)["train"] == 0, "written at most once a second"
            time.now = 5.0
            arrived.set()
            await task
            assert _open(tmp_path) == {"train": 0}

    clock = StepClock(tmp_path)
    asyncio.run(story())


def test_a_task_that_was_made_outside_can_tell_of_a_span(time, tmp_path):
    """As the one that writes a version to disk, which the step waits for in a span of its own."""
    async def story() -> None:
        telling: list = []

        async def write() -> None:
            await begun.wait()
            telling[0]()

        begun = asyncio.Event()
        task = asyncio.create_task(write())
        with clock.span("disk"):
            telling.append(clock.alive_here())
            time.now = 20.0
            begun.set()
            await task
            assert _open(tmp_path) == {"disk": 20}

    clock = StepClock(tmp_path)
    asyncio.run(story())


def test_between_spans_and_in_start_up_something_is_open(time, tmp_path):
    clock = StepClock(tmp_path)
    clock.start_up("loading")
    progress = read_progress(tmp_path)
    assert (progress.step, progress.newest.name, progress.newest.detail) == (0, "start", "loading")
    clock.begin(5)
    assert _open(tmp_path) == {"step": 0} and steps_done(read_progress(tmp_path)) == clock.steps_done == 4
    with clock.span("train", "2 updates"):
        time.now = 3.0
        assert _open(tmp_path) == {"train": 0} and read_progress(tmp_path).newest.expected_s is None
    assert _open(tmp_path) == {"step": 3}
    clock.end()
    with clock.span("train"):
        assert read_progress(tmp_path).newest.expected_s == 3 and steps_done(read_progress(tmp_path)) == 5
    clock.ending()
    assert read_progress(tmp_path).is_in("end")


def test_a_span_that_fails_is_closed(time, tmp_path):
    clock = StepClock(tmp_path)
    clock.begin(1)
    with pytest.raises(RuntimeError), clock.span("train"):
        raise RuntimeError
    assert _open(tmp_path) == {"step": 0}


@pytest.mark.parametrize("parts, seconds", [
    ([], 0), ([(1, 3)], 2), ([(1, 3), (2, 5)], 4), ([(4, 5), (1, 2)], 2), ([(0, 9), (1, 2), (3, 4)], 9)])
def test_covered_counts_no_second_twice(parts, seconds):
    assert covered(parts) == seconds


def test_the_trace_is_trace_event_format_with_a_row_a_name(time, tmp_path):
    clock = StepClock(tmp_path)
    for name in ("rollout", "train", "rollout"):
        with clock.span(name, f"of {name}"):
            time.now += 1.5
    text = (tmp_path / "trace.json").read_text()
    events = json.loads(text.rstrip().rstrip(",") + "]")    # the format leaves the closing bracket out
    assert [(event["name"], event["tid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"] == [
        ("rollout", 0, 1e15, 1.5e6), ("train", 1, 1e15 + 1.5e6, 1.5e6), ("rollout", 0, 1e15 + 3e6, 1.5e6)]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rollout", "train"]
