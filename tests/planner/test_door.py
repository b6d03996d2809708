"""Configurations end at the planner's door, and choices leave it in one document."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import launch.planner
from launch.config.load import ResolvedLoaded, load_config
from launch.config.resolved import KEYS, ResolvedConfig, resolve
from launch.errors import UserError
from launch.plan.plan import ForecastPlan
from launch.planner import prepare as preparing
from launch.planner.prepare import prepare, prepare_for
from launch.planner.search.problem import with_token_budget
from launch.planner.seats.local import place_local
from launch.ports import Ports
from launch.run.attempts import Attempt
from tests.planner.problems import CONFIGS, h100, loaded

DOOR = {"prepare.py", "from_config.py"}
TINY = str(CONFIGS / "tiny" / "grpo.yaml")


def test_only_the_door_knows_configurations():
    folder = Path(launch.planner.__file__).parent
    knows = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else \
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            full = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(
                node, ast.ImportFrom) else names
            if any(name.startswith("launch.config") for name in (*names, *full)):
                knows.add(file.relative_to(folder).as_posix())
    assert knows == DOOR


@pytest.mark.parametrize("name, words", [("7b/grpo.yaml", ()), ("7b/grpo.yaml", ("placement.mode=auto",)),
                                         ("70b/grpo.yaml", ("rollout.tp=8",))])
def test_a_configuration_is_checked_once(monkeypatch, name, words):
    """Also where nothing fits, and every remedy is planned with."""
    calls = []
    real = preparing.check
    monkeypatch.setattr(preparing, "check", lambda *args, **named: calls.append(real(*args, **named)))
    try:
        prepare_for(load_config(CONFIGS / name, words), h100(2))
        assert name.startswith("7b")
    except UserError as error:
        assert "no plan fits" in str(error) and name.startswith("70b")
    assert len(calls) == 1


def test_what_is_searched_goes_with_the_other_keys():
    """Sizes that a check would refuse are not chosen: CP and sequence parallelism where prompts are shared or fp32 is
    asked for, more sequences at once than an iteration has tokens."""
    def config(*words: str) -> ResolvedConfig:
        return prepare_for(loaded("7b/grpo.yaml", *words), h100(4)).config

    few = config("rollout.max_num_batched_tokens=48")
    assert few.rollout.max_num_seqs <= 48
    assert config("trainer.dtype=fp32", "rollout.dtype=fp32", "trainer.tp=1").trainer.cp == 1
    sharded = config("trainer.sequence_parallel=true", "rollout.max_new_tokens=512", "workload.response.mean=200")
    assert sharded.trainer.tp > 1


def test_the_budget_follows_what_is_pinned():
    problem = preparing.posed(loaded("7b/grpo.yaml", "trainer.cp=3"), replace(h100(2), gpus_per_node=6))
    assert problem.token_budget % (2 * 6 * 3) == 0
    assert with_token_budget(replace(problem, pins=problem.pins.without("cp"))).token_budget < problem.token_budget


# ---- one document ---------------------------------------------------------------------------------------------------

def attempt_of(folder: Path, *words: str) -> Attempt:
    """An attempt of the tiny configuration, planned for two nodes of the cluster."""
    made = prepare_for(load_config(TINY, ("cluster=configs/clusters/h100x2.yaml", *words)))
    attempt = Attempt(folder)
    placement = place_local(made.plan.model_copy(update={"device": "cpu"}), 1, Ports(20480))
    attempt.write(made.loaded.config, made.plan, placement, {})
    assert attempt.config() == made.config
    return attempt


OPEN = ("trainer.tp=auto", "trainer.dp=auto", "trainer.pp=1", "rollout.replicas=auto", "rollout.max_num_seqs=auto",
        "placement.training_nodes=1")


def test_choices_travel_in_the_plan_alone(tmp_path):
    attempt = attempt_of(tmp_path, *OPEN)
    written = yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))
    assert written["rollout"]["max_num_seqs"] == written["trainer"]["dp"] == "auto"
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert plan["chosen"]["rollout.max_num_seqs"] == attempt.config().rollout.max_num_seqs
    assert "trainer.pp" not in plan["chosen"] and "placement.training_nodes" not in plan["chosen"]
    plan["chosen"]["rollout.max_num_seqs"] = 77
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    assert attempt.config().rollout.max_num_seqs == 77


def test_an_attempt_of_an_older_version_can_be_read(tmp_path):
    """All values stood in `config.yaml`, no choices in the plan, and a null where nothing was predicted."""
    attempt = attempt_of(tmp_path, *OPEN)
    config = attempt.config()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    del plan["chosen"]
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"forecast": None}), encoding="utf-8")
    assert attempt.config() == config
    assert attempt.plan().training.tp == config.trainer.tp and not isinstance(attempt.plan(), ForecastPlan)


def test_an_attempt_that_leaves_a_size_open_is_refused(tmp_path):
    attempt = attempt_of(tmp_path, *OPEN)
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    del plan["chosen"]["trainer.dp"]
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    with pytest.raises(UserError, match=r"trainer\.dp") as error:
        attempt.config()
    assert "new attempt" in error.value.fix


def test_a_changed_key_keeps_the_plan():
    made = prepare_for(loaded("7b/grpo.yaml"))
    slower = made.changed({"run.deadline_s": 999.0})
    assert slower.config.run.deadline_s == 999 and slower.plan.fingerprint() == made.plan.fingerprint()
    assert slower.config.trainer == made.config.trainer


# ---- resolved --------------------------------------------------------------------------------------------------------

def test_a_resolved_configuration_has_the_keys_of_the_schema():
    config = prepare(TINY, (), "cpu").config
    assert list(config.model_dump()) == list(load_config(TINY).config.model_dump())
    for name in ("trainer", "rollout", "placement"):
        assert list(getattr(config, name).model_dump()) == list(getattr(load_config(TINY).config, name).model_dump())


def test_nothing_is_resolved_by_halves():
    asked = load_config(CONFIGS / "7b" / "grpo.yaml")
    assert not isinstance(asked, ResolvedLoaded)
    chosen = dict(prepare_for(asked, h100(2)).plan.chosen)
    assert isinstance(resolve(asked.config, chosen), ResolvedConfig)
    for key in chosen.keys() & set(KEYS):
        with pytest.raises(ValueError, match=key.replace(".", r"\.")):
            resolve(asked.config, {name: value for name, value in chosen.items() if name != key})
        with pytest.raises(ValueError, match=key.replace(".", r"\.")):
            resolve(asked.config, {**chosen, key: -1})
