"""Loading of reward functions: what is passed to them, and every mistake named with its key."""

from __future__ import annotations

import numpy as np
import pytest

from launch.config.schema import Reward as RewardConfig
from launch.errors import UserError
from launch.exit_codes import ExitCode
from megatron_rl.data.batch import Group, Prompt, Trajectory
from megatron_rl.rewards.load import load_rewards
from megatron_rl.rewards.sample import Sample, group_samples

HERE = "tests.rewards.graders"


def load(*entries: dict, columns: list[str] | None = None):
    return load_rewards(RewardConfig.model_validate({"functions": list(entries)}), columns)


SAMPLE = Sample("three", "3", prompt="how far?", columns={"unit": "km", "level": 4}, finish_reason="length",
                completion_tokens=8)


def test_a_function_gets_what_its_signature_names():
    (reward,) = load({"function": f"{HERE}:all_offered", "args": {"scale": 0.5}}, columns=["unit", "level"])
    assert reward(SAMPLE) == 4.0


def test_a_function_without_keywords_gets_none_and_one_with_kwargs_gets_all():
    plain, every = load({"function": f"{HERE}:length_of"}, {"function": f"{HERE}:any_keywords", "args": {"x": 1}})
    assert plain(SAMPLE) == 5.0
    assert every(SAMPLE) == 2 + 3 + 1


def test_args_win_over_columns():
    (reward,) = load({"function": f"{HERE}:all_offered", "args": {"unit": "km"}})
    assert reward(Sample("", "", "how far?", {"unit": "miles"}, "length", 2)) == 2.0


def test_a_column_is_no_argument_of_a_built_in():
    """Data sets of reasoning have columns such as `thinking`, and one may be called like any argument."""
    columns = {"thinking": ["5", "6"], "anywhere": "text", "prompt": "<think>", "pattern": ".*"}
    (reward,) = load({"function": "exact_match"}, columns=list(columns))
    assert reward(Sample("#### 5", "5", columns=columns)) == 1.0
    with pytest.raises(UserError, match="needs pattern"):
        load({"function": "format"}, columns=list(columns))


def test_names_stay_apart_where_a_function_is_used_twice():
    rewards = load({"function": "format", "args": {"pattern": "a"}}, {"function": "format", "args": {"pattern": "b"}})
    assert [reward.name for reward in rewards] == ["format", "format#2"]


@pytest.mark.parametrize("completion, value", [("numpy", 0.5), ("bool", 1.0)])
def test_numbers_of_other_kinds_are_numbers(completion, value):
    (reward,) = load({"function": f"{HERE}:by_completion"})
    assert reward(Sample(completion, None)) == value


@pytest.mark.parametrize("completion", ["nan", "inf", "none", "text"])
def test_what_is_no_finite_number_is_an_error(completion):
    (reward,) = load({"function": f"{HERE}:by_completion"})
    with pytest.raises((TypeError, ValueError), match="returned .* number"):
        reward(Sample(completion, None))


BAD = [
    ({"function": "exact_mach"}, "functions.1.function", "write exact_match "),
    ({"function": "pattern"}, "functions.1.function", "exact_match, math, format, length"),
    ({"function": "no.such.module:f"}, "functions.1.function", "PYTHONPATH"),
    ({"function": f"{HERE}:lenght_of"}, "functions.1.function", f"write {HERE}:length_of"),
    ({"function": f"{HERE}:NOT_CALLABLE"}, "functions.1.function", "f(completion, answer"),
    ({"function": f"{HERE}:one_parameter"}, "functions.1.function", "f(completion, answer"),
    ({"function": f"{HERE}:asynchronous"}, "functions.1.function", "plain function"),
    ({"function": f"{HERE}:length_of", "args": {"scale": 2}}, "functions.1.args.scale", "remove it"),
    ({"function": f"{HERE}:all_offered", "args": {"scal": 2}}, "functions.1.args.scal", "write scale"),
    ({"function": f"{HERE}:any_keywords", "args": {"answer": "1"}}, "functions.1.args.answer", "remove it"),
    ({"function": f"{HERE}:all_offered"}, "functions.1.args", "functions.1.args.unit"),
    ({"function": "format"}, "functions.1.args", "functions.1.args.pattern"),
    ({"function": "format", "args": {"pattern": "("}}, "functions.1.args.pattern", "correct the expression"),
    ({"function": "math", "args": {"anywhere": "box"}}, "functions.1.args.anywhere", "'boxed' or 'last'"),
    ({"function": "math", "args": {"boxed": "first"}}, "functions.1.args.boxed", "'last' or 'all'"),
    ({"function": "math", "args": {"anywhere": "last", "boxed": "all"}}, "functions.1.args.boxed", "anywhere = boxed"),
    ({"function": "math", "args": {"thinking": "</think>"}}, "functions.1.args.thinking", "'str' instances"),
    ({"function": "exact_match", "args": {"thinking": ["</think>"]}}, "functions.1.args.thinking", "2 items"),
    ({"function": "length", "args": {"max_tokens": "9", "buffer_tokens": 1}}, "functions.1.args.max_tokens",
     "integer"),
    ({"function": "length", "args": {"max_tokens": 0, "buffer_tokens": 1}}, "functions.1.args.max_tokens",
     "greater"),
    ({"function": "length", "args": {"max_tokens": 5, "buffer_tokens": 9}}, "functions.1.args.buffer_tokens",
     "at most 5"),
]


@pytest.mark.parametrize("entry, key, fix", BAD)
def test_mistakes_are_user_errors_with_key_and_way_out(entry, key, fix):
    with pytest.raises(UserError) as caught:
        load({"function": "exact_match"}, entry, columns=["level"])
    assert caught.value.exit_code is ExitCode.USER_ERROR
    assert caught.value.where == f"reward.{key}"
    assert fix in caught.value.fix and entry["function"] in str(caught.value)


def test_a_module_that_raises_on_import_is_a_user_error(tmp_path, monkeypatch):
    (tmp_path / "broken_grader.py").write_text("raise SystemExit('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="importing broken_grader fails with SystemExit: no licence"):
        load({"function": "broken_grader:f"})


def test_group_to_samples():
    def trajectory(text: str, sampled: list[bool], reason: str) -> Trajectory:
        ids = np.arange(len(sampled), dtype=np.int32)
        return Trajectory(ids, np.array(sampled), np.zeros(len(sampled), np.float32), ids, reason, text)

    prompt = Prompt(np.int64(17), np.arange(3, dtype=np.int32), "how far?", "3", {"unit": "km"})
    group = Group(prompt, (trajectory("a", [True] * 2, "stop"), trajectory("b", [True, True, False, True], "length")))
    assert group_samples(group) == [
        Sample("a", "3", "how far?", {"unit": "km"}, "stop", 2, 17, 0),
        Sample("b", "3", "how far?", {"unit": "km"}, "length", 3, 17, 1)], "a tool's tokens are not the policy's"
