"""A class that picks the prompts: what it hears and when, its state over resumes, and its mistakes."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.errors import UserError
from megatron_rl.data.curriculum import Curriculum, Guarded, load_curriculum
from megatron_rl.data.sampler import BatchSampler, PromptSampler
from tests.rollout.engines import make_prompts

ROWS, SIZE, RESERVE = 7, 2, 3


class Log(Curriculum):
    """Picks by all that it has heard, and remembers every call."""

    def __init__(self, prompts, seed):
        self.n, self.calls = len(prompts), [["seed", seed]]

    def pick(self, count):
        digest = int.from_bytes(json.dumps(self.calls).encode()[-6:], "little")
        self.calls.append(["pick", [(digest + i) % self.n for i in range(count)]])
        return self.calls[-1][1]

    def hear(self, row, rewards):
        self.calls.append(["hear", row, rewards])

    def put_back(self, rows):
        self.calls.append(["put_back", rows])

    def state_dict(self):
        return {"calls": self.calls}        # the live list: the caller has to copy it

    def load_state_dict(self, state):
        self.calls = list(state["calls"])


class Broken(Log):
    def pick(self, count):
        raise KeyError("level")


class Weird(Log):
    returns: object = None

    def pick(self, count):
        return self.returns


class Unsaved(Log):
    saved: object = None

    def state_dict(self):
        return self.saved


class Unready(Log):
    def __init__(self, prompts, seed):
        raise ValueError("no levels")


class Unfinished(Curriculum):
    def pick(self, count):
        return [0] * count


def results(step: int) -> list[tuple[int, list[float]]]:
    """Two trained groups and step mod 4 replaced ones of a batch, as the trainer reports them. The third has no
    rewards: it is no result, but its row is used."""
    return [(place, [float(step), place / 2] if place != 2 else []) for place in range(SIZE + step % (RESERVE + 1))]


def sampler(curriculum: Curriculum, lag: int) -> BatchSampler:
    return BatchSampler(Guarded(curriculum, type(curriculum).__name__, ROWS), SIZE, RESERVE, lag)


def run(made: BatchSampler, lag: int, first: int, last: int) -> list[list[int]]:
    """Train the batches `first` to `last`, each drawn `lag` steps ahead. Returns the rows of all that were drawn."""
    drawn = [made.draw() for _ in range(lag + 1)]
    for step in range(first, last + 1):
        made.taken(results(step))
        made.trained()
        drawn.append(made.draw())
    return drawn


@settings(max_examples=80, deadline=None)
@given(lag=st.integers(0, 3), stops=st.lists(st.integers(0, 4), max_size=4), default=st.booleans())
def test_resumed_anywhere_the_curriculum_picks_and_hears_what_it_does_unbroken(lag, stops, default):
    def make() -> Curriculum:
        return PromptSampler(ROWS, 0) if default else Log(make_prompts(ROWS), 0)

    last = sum(stops) + 3
    unbroken = sampler(whole := make(), lag)
    expected = run(unbroken, lag, 1, last)

    done, state, drawn = 0, None, []
    for count in [*stops, 3]:
        made = sampler(latest := make(), lag)
        if state is not None:
            made.load_state_dict(state)
        part = run(made, lag, done + 1, done + count)
        drawn = [*drawn[:done], *part]
        done += count
        state = json.loads(json.dumps(made.state_dict()))
    assert drawn == expected
    assert state == json.loads(json.dumps(unbroken.state_dict()))
    assert latest.state_dict() == whole.state_dict()


@pytest.mark.parametrize("lag", [0, 2])
def test_it_hears_a_batch_just_before_the_pick_that_may_depend_on_it(lag):
    """All groups of the batch in order, replaced ones too, and then the reserve that was not used."""
    made = sampler(log := Log(make_prompts(ROWS), 5), lag)
    drawn = run(made, lag, 1, 3)
    expected = [["seed", 5], *(["pick", rows] for rows in drawn[:lag + 1])]
    for step, rows in enumerate(drawn[lag + 1:], start=1):
        heard = results(step)
        expected += [["hear", row, rewards] for row, rewards in heard if rewards]
        if len(heard) < SIZE + RESERVE:
            expected.append(["put_back", drawn[step - 1][len(heard):]])
        expected.append(["pick", rows])
    assert log.calls == expected


@pytest.mark.parametrize(("then", "now"), [(0, 2), (2, 0), (1, 3), (3, 1)])
def test_another_bound_after_a_resume_neither_repeats_nor_loses_what_was_heard(then, now):
    before = sampler(Log(make_prompts(ROWS), 0), then)
    run(before, then, 1, 4)
    after = sampler(log := Log(make_prompts(ROWS), 0), now)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    run(after, now, 5, 9)
    heard = [call[1:] for call in log.calls if call[0] == "hear"]
    assert heard == [list(pair) for step in range(1, 10) for pair in results(step) if pair[1]]


def test_the_shuffled_epoch_keeps_no_rewards_in_the_checkpoint():
    made = sampler(PromptSampler(ROWS, 0), 1)
    run(made, 1, 1, 3)
    assert [result["rewards"] for result in made.state_dict()["unheard"]] == [[], []]


def refusal(curriculum: Curriculum) -> UserError:
    with pytest.raises(UserError) as caught:
        made = sampler(curriculum, 0)
        made.draw()
        made.taken(results(1))
        made.trained()
        made.draw()
    assert caught.value.where == "data.curriculum" and caught.value.fix
    return caught.value


@pytest.mark.parametrize(("returns", "message"), [
    (None, "'Weird': pick(5) returned None"),
    (["a"] * 5, "'Weird': pick(5) returned ['a', 'a', 'a', 'a', 'a']"),
    ([0, 1], "'Weird': pick(5) returned 2 rows"),
    ([0, 1, 2, 3, ROWS], f"'Weird': pick(5) returned {ROWS}, which is no row of the data"),
    ([0, 1, 2, 3, -1], "'Weird': pick(5) returned -1, which is no row of the data")])
def test_a_pick_that_is_no_list_of_rows_is_refused(monkeypatch, returns, message):
    monkeypatch.setattr(Weird, "returns", returns)
    assert message in refusal(Weird(make_prompts(ROWS), 0)).what


def test_an_array_of_rows_is_a_list_of_rows(monkeypatch):
    monkeypatch.setattr(Weird, "returns", np.arange(5))
    assert sampler(Weird(make_prompts(ROWS), 0), 0).draw() == [0, 1, 2, 3, 4]


def test_a_method_that_raises_is_named_with_its_call_and_place(monkeypatch):
    assert re.search(r"'Broken': pick\(5\) raised KeyError: 'level' \(test_curriculum.py:\d+\)",
                     refusal(Broken(make_prompts(ROWS), 0)).what)
    monkeypatch.setattr(Log, "hear", lambda self, row, rewards: 1 / 0)
    assert "'Log': hear(0, [1.0, 0.0]) raised ZeroDivisionError" in refusal(Log(make_prompts(ROWS), 0)).what


@pytest.mark.parametrize(("saved", "message"), [
    ({"a": {1, 2}}, "state_dict() returned what JSON cannot store"),
    ({"a": float("nan")}, "state_dict() returned what JSON cannot store"),
    ({"a": np.float32(1)}, "state_dict() returned what JSON cannot store"),
    ({3: 1}, "state_dict() returned what JSON changes: {3: 1} comes back as {'3': 1}"),
    ({"a": (1, 2)}, "state_dict() returned what JSON changes"),
    ([1], "state_dict() returned what JSON changes")])
def test_a_state_that_json_does_not_keep_is_refused_before_the_first_step(monkeypatch, saved, message):
    monkeypatch.setattr(Unsaved, "saved", saved)
    assert message in refusal(Unsaved(make_prompts(ROWS), 0)).what


def test_a_checkpoint_of_another_class_is_refused():
    state = sampler(PromptSampler(ROWS, 0), 0).state_dict()
    with pytest.raises(UserError, match="picked by PromptSampler, and now by Log"):
        sampler(Log(make_prompts(ROWS), 0), 0).load_state_dict(state)


@pytest.mark.parametrize(("path", "message"), [
    ("tests.data.nowhere:Log", "curriculum .*importing tests.data.nowhere fails with ModuleNotFoundError"),
    ("tests.data.test_curriculum:Lag", "has no 'Lag'"),
    ("tests.data.test_curriculum:refusal", "is not a subclass of megatron_rl.data.curriculum.Curriculum"),
    ("tests.data.test_curriculum:Unfinished", "has no load_state_dict and no state_dict"),
    ("tests.data.test_curriculum:Unready", r"Unready\(prompts, seed=3\) raised ValueError: no levels \(test_curr")])
def test_a_class_that_cannot_be_loaded_is_refused(path, message):
    with pytest.raises(UserError, match=message) as caught:
        load_curriculum(path, make_prompts(ROWS), 3)
    assert caught.value.where == "data.curriculum" and caught.value.fix


def test_the_users_class_gets_the_prompts_and_the_seed():
    made = load_curriculum("tests.data.test_curriculum:Log", make_prompts(ROWS), 3)
    assert (made.n, made.calls) == (ROWS, [["seed", 3]])


def test_the_class_of_the_page_works(tmp_path, monkeypatch):
    """docs/prompts.md."""
    page = (Path(__file__).parents[2] / "docs/prompts.md").read_text(encoding="utf-8")
    block = re.search(r"^    from megatron_rl.*?(?=^\S)", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    (tmp_path / "class_of_the_page.py").write_text(textwrap.dedent(block.group()), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    prompts = [replace(prompt, columns={"level": at % 2}) for at, prompt in enumerate(make_prompts(ROWS))]
    made = BatchSampler(Guarded(load_curriculum("class_of_the_page:Levels", prompts, 0), "Levels", ROWS), SIZE)
    seen = []
    for _ in range(40):
        seen.append(made.draw())
        made.taken([(row, [1.0, 1.0]) for row in seen[-1]])
        made.trained()
    assert seen[:3] == [[0, 2], [4, 6], [0, 2]] and seen[-1][0] % 2 == 1
