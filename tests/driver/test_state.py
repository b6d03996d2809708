"""The state that a checkpoint stores, and what it refuses to go on from."""

from __future__ import annotations

import pytest

from launch.errors import UserError
from launch.planner.prepare import prepare
from launch.run.attempts import Attempt
from megatron_rl.driver.state import RunState

STEPS = 24


@pytest.fixture
def state(tmp_path) -> RunState:
    config = prepare("configs/tiny/grpo.yaml", (f"run.steps={STEPS}", "algorithm.max_staleness=2"), "cpu").config
    return RunState.from_data(config, Attempt(tmp_path))


def loaded(state: RunState, step: int, **identity: str) -> dict:
    """A checkpoint of this run at a step, as `Job.load` returns it."""
    return {"extra": {**state.extra(), "step": step, "identity": state.identity | identity}, "changes": []}


def test_it_goes_on_at_the_step_and_the_prompt_of_the_checkpoint(state, tmp_path):
    for step in (1, 2, 3):
        prompts = state.draw()
        state.taken([(prompt.index, [1.0]) for prompt in prompts])
        state.trained(step, prompts)
    state.staleness.now, state.ledger.trained = 1, 7
    checkpoint, following = loaded(state, 3), state.draw()
    other = RunState.from_data(state.config, Attempt(tmp_path))
    other.resume(checkpoint)
    assert (other.step, other.saved) == (3, 3)
    assert (other.staleness.now, other.ledger.trained, other.ledger.lost) == (1, 7, 0)
    assert [prompt.text for prompt in other.draw()] == [prompt.text for prompt in following]


def test_a_finished_run_says_so(state):
    state.exports = False       # the model is exported already
    with pytest.raises(UserError, match=f"'tiny' has already made its {STEPS} steps") as caught:
        state.resume(loaded(state, STEPS))
    assert "--fresh" in caught.value.fix


def test_a_finished_run_that_was_not_exported_is_exported(state):
    state.resume(loaded(state, STEPS))
    assert state.step == STEPS and state.exports


def test_another_template_is_refused(state):
    with pytest.raises(UserError, match="template changed"):
        state.resume(loaded(state, 3, template="another"))


def test_other_data_are_refused(state):
    """NeMo-RL#2519."""
    with pytest.raises(UserError, match="the data set changed since the checkpoint: fingerprint another then"):
        state.resume(loaded(state, 3, data="another"))
