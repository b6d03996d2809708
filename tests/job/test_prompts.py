"""Dynamic sampling and a curriculum in a real job, one batch ahead, until a batch cannot be filled."""

from __future__ import annotations

from launch.exit_codes import ExitCode
from megatron_rl.layouts.step_folder import complete_checkpoints
from tests.job.levels import LEARNS
from tests.job.runner import launch


def test_flat_groups_are_replaced_until_the_reserve_does_not_suffice(tmp_path):
    job = launch(tmp_path, "prompts", "trainer.tp=1", "trainer.pp=1", "data.curriculum=tests.job.levels:Nines",
                 "algorithm.prompts_per_step=2", "algorithm.dynamic_sampling={enabled: true, max_refill: 1}",
                 "algorithm.max_staleness=1", "rollout.deterministic=true", "rollout.swap=border",
                 "reward.functions=[{function: 'tests.job.levels:parity'}]")
    assert job.end() == ExitCode.USER_ERROR, job.text()
    rows = job.rows()
    assert [row["step"] for row in rows] == list(range(1, LEARNS + 1))
    for row in rows:
        assert row["group/zero_variance"] == 0 and row["group/generated_per_trained"] == 1.5
        assert [row[f"group/replaced_{reason}"] for reason in ("right", "wrong", "other")] == [0, 0, 1]
    text = job.text()
    assert f"step {LEARNS + 1}: dynamic sampling generated 4 groups, and 0 of them have different rewards" in text
    assert "the reward is broken. All right: 0, all wrong: 0, neither: 4" in text and ": reward 0.25" in text
    assert "Traceback" not in text
    assert [folder.name for folder in complete_checkpoints(job.attempt.checkpoints)] == [f"step-{LEARNS:06d}"]
