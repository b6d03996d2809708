"""Deadlines of a start know the model."""

from __future__ import annotations

from functools import cache

import pytest

from launch.config.load import load_config
from launch.planner.prepare import OnCluster, prepare
from launch.run.progress import allowed_s
from launch.runtime.job_plan import IMAGE_S, greeting_s, start_deadline_s
from launch.slurm.margin import needed
from launch.slurm.profiles import Container, Profile
from tests.progress import doing

LARGE = "configs/70b/grpo.yaml"


@cache
def large() -> OnCluster:
    return prepare(LARGE)


def deadline(*words: str, profile: Profile | None = None) -> float:
    """With words that change no plan."""
    return start_deadline_s(load_config(LARGE, words), large().plan, profile or Profile())


def test_a_large_model_has_longer_than_a_tiny_one_and_than_two_of_its_slowest_steps():
    tiny = prepare("configs/tiny/grpo.yaml", ("cluster=configs/clusters/h100x32.yaml", "placement.training_nodes=1"))
    need = needed(large().plan, Profile())
    seconds = deadline()
    assert seconds > start_deadline_s(tiny.loaded, tiny.plan, Profile()) >= 180
    assert seconds >= 2 * need.step_s and seconds > 600 + 2 * need.checkpoint_s
    config = large().changed({"run.deadline_s": seconds}).config
    (first_save,) = doing(1, "save").open
    assert allowed_s(first_save, config) > 2 * need.checkpoint_s


def test_a_slow_file_system_of_the_site_counts():
    slow = Profile(file_system_gb_per_s=1.0)
    checkpoint_s = needed(large().plan, slow).checkpoint_s
    assert checkpoint_s > 900 and deadline(profile=slow) > 2 * checkpoint_s


def test_what_the_user_sets_holds_and_a_rehearsal_starts_nothing_large():
    assert deadline("run.deadline_s=240") == 240
    assert deadline("run.rehearse=true") == 180


@pytest.mark.parametrize(("container", "more"), [(Container(), 0.0),
                                                 (Container(kind="pyxis", image="i.sqsh"), IMAGE_S)])
def test_a_container_has_time_to_fetch_its_image(container, more):
    assert greeting_s(180.0, Profile(container=container)) == 180.0 + more
