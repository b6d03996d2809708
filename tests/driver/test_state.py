"""The state that a checkpoint stores, and what it refuses to go on from."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from launch.errors import UserError
from launch.planner.prepare import prepare
from launch.run.attempts import Attempt
from megatron_rl.driver.state import RunState
from tests.planner.problems import ROOT

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


def test_a_row_that_a_batch_has_twice_is_two_instances(tmp_path):
    """Whichever engines generate them: with the same seed their groups would be equal."""
    config = prepare("configs/tiny/grpo.yaml", ("algorithm.prompts_per_step=200",), "cpu").config
    state = RunState.from_data(config, Attempt(tmp_path))
    drawn = [(prompt.index, prompt.instance) for prompt in state.draw()]
    assert len(state.prompts) < len(drawn) == len(set(drawn)) == 200


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


def test_a_class_of_the_users_picks_and_hears_and_its_reserve_counts(tmp_path):
    config = prepare("configs/tiny/grpo.yaml", ("data.curriculum=tests.data.test_curriculum:Log", "run.seed=4",
                                                "algorithm.prompts_per_step=2", "algorithm.max_staleness=1",
                                                "algorithm.dynamic_sampling.enabled=true",
                                                "algorithm.dynamic_sampling.max_refill=1"), "cpu").config
    state = RunState.from_data(config, Attempt(tmp_path))
    first, _ = state.draw(), state.draw()
    state.taken([(prompt.index, [0.5, 1.0]) for prompt in first[:3]])
    state.trained(1, first[1:3], first[:1])
    assert (state.ledger.trained, state.ledger.lost, state.ledger.duplicated) == (2, 0, 0)
    state.draw()
    calls = state.sampler.state_dict()["unheard"], state.sampler._ahead[-1].state["calls"]
    rows = [prompt.index for prompt in first]
    assert len(rows) == 4 and calls[0] == [{"rewards": [[row, [0.5, 1.0]] for row in rows[:3]], "unused": rows[3:]}]
    assert calls[1][0] == ["seed", 4] and [call[0] for call in calls[1][1:]] == [
        "pick", "pick", "hear", "hear", "hear", "put_back", "pick"]


@pytest.fixture
def dropping(tmp_path):
    """Some rows are too long, of which no prompt is trained."""
    rows = (ROOT / "configs/tiny/train.jsonl").read_text(encoding="utf-8").splitlines()[:20]
    long = [json.dumps({"prompt": f"{row} 1 2 3=", "answer": "3"}) for row in range(5)]
    mixed = [line for at, line in enumerate(rows) for line in ([long[at // 4], line] if at % 4 == 0 else [line])]
    (tmp_path / "mixed.jsonl").write_text("\n".join(mixed), encoding="utf-8")

    def made(*words: str) -> RunState:
        config = prepare("configs/tiny/grpo.yaml", (f"data.train={tmp_path / 'mixed.jsonl'}", "data.overlong=drop",
                                                    "algorithm.prompts_per_step=6", *words), "cpu").config
        return RunState.from_data(config, Attempt(tmp_path))
    return made


def train(state: RunState, first: int, last: int) -> list[str]:
    texts = []
    for step in range(first, last + 1):
        prompts = state.draw()
        state.taken([(prompt.index, [1.0]) for prompt in prompts])
        state.trained(step, prompts)
        texts += [prompt.text for prompt in prompts]
    return texts


def test_every_row_within_the_limit_is_trained_once_an_epoch_and_no_other_over_a_resume(dropping):
    state = dropping()
    assert state.overlong[0].startswith("data.train: 5 of 25 prompts are longer than rollout.max_prompt_tokens = 4;")
    assert {prompt.row for prompt in state.prompts} == set(range(25)) - {0, 5, 10, 15, 20}
    texts, resumed = train(state, 1, 4), dropping()
    resumed.resume(loaded(state, 4))
    texts += train(resumed, 5, 10)
    assert Counter(texts) == {prompt.text: 3 for prompt in state.prompts} and len(state.prompts) == 20
    assert (resumed.ledger.trained, resumed.ledger.lost, resumed.ledger.duplicated) == (60, 0, 0)
    assert texts == train(dropping(), 1, 10)


@pytest.mark.parametrize("words", [("data.overlong=truncate_left",), ("rollout.max_prompt_tokens=9",)])
def test_another_treatment_of_long_prompts_is_refused(dropping, words):
    with pytest.raises(UserError, match="prompts over the limit was 'drop above 4 tokens' when .* and is") as caught:
        dropping(*words).resume(loaded(dropping(), 3))
    assert caught.value.where == "data.overlong, rollout.max_prompt_tokens"
