"""Dynamic sampling, a curriculum and a grader that fails in a real job, one ahead, until a batch cannot be filled."""

from __future__ import annotations

from launch.exit_codes import ExitCode
from megatron_rl.layouts.step_folder import complete_checkpoints
from tests.job.levels import LEARNS
from tests.job.runner import launch
from tests.patience import patient


def test_flat_groups_are_replaced_until_the_reserve_does_not_suffice(tmp_path):
    job = launch(tmp_path, "prompts", "trainer.tp=1", "trainer.pp=1", "data.curriculum=tests.job.levels:Nines",
                 "algorithm.prompts_per_step=2", "algorithm.dynamic_sampling={enabled: true, max_refill: 1}",
                 "algorithm.max_staleness=1", "rollout.deterministic=true", "rollout.swap=border",
                 f"reward.functions=[{{function: 'tests.job.levels:parity', args: {{hung: {tmp_path}/hung}}}}]",
                 "reward.on_error=zero", f"reward.timeout_s={patient(3)}")
    assert job.end() == ExitCode.USER_ERROR, job.text()
    rows = job.rows()
    assert [row["step"] for row in rows] == list(range(1, LEARNS + 1))
    for row in rows:
        assert row["group/zero_variance"] == 0 and row["group/generated_per_trained"] == 1.5
        assert [row[f"group/replaced_{reason}"] for reason in ("right", "wrong", "other")] == [0, 0, 1]
    assert [row["reward/timeouts"] for row in rows] == [row["reward/errors"] for row in rows] == [1 / 32, 0, 0]
    assert [row["train/sequences"] for row in rows] == [31, 32, 32], "what was not graded is not in the loss"
    text = job.text()
    assert f"step {LEARNS + 1}: dynamic sampling generated 4 groups, and 0 of them have different rewards" in text
    assert "the reward is broken. All right: 0, all wrong: 0, neither: 4" in text
    assert ": tests.job.levels:parity failed: ValueError: no answer" in text
    assert "Traceback" not in text
    assert [folder.name for folder in complete_checkpoints(job.attempt.checkpoints)] == [f"step-{LEARNS:06d}"]
