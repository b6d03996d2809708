"""From a configuration to a plan for a cluster: choices fill what was `auto`, pins stay, every GPU is used once."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from launch.config.load import load_config
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.planner.explain.choices import choices
from launch.planner.from_config import pins_of
from launch.planner.planning import best_of
from launch.planner.prepare import OnCluster, posed, prepare_for
from launch.planner.search.search import Search
from launch.planner.search.space import Pins
from tests.planner.problems import CONFIGS, builtin, h100, loaded, problem, workload


def planned(*words: str, name: str = "7b/grpo.yaml", nodes: int = 4) -> OnCluster:
    return prepare_for(load_config(CONFIGS / name, words), h100(nodes))


def test_nothing_is_auto_any_more():
    made = planned()
    config, layout, engines = made.config, made.found.training.layout, made.found.rollout.layout
    assert (config.trainer.tp, config.trainer.pp, config.trainer.vpp, config.trainer.cp, config.trainer.dp) == (
        layout.tp, layout.pp, layout.vpp, layout.cp, layout.dp)
    assert (config.rollout.tp, config.rollout.replicas, config.rollout.max_num_seqs) == (
        engines.tp, engines.replicas, engines.max_num_seqs)
    assert config.placement.training_nodes == made.found.training.units
    assert len(made.plan.training.ranks) == layout.gpus and len(made.plan.rollout.engines) == engines.replicas
    assert made.loaded.config.trainer.tp == "auto" and made.plan.chosen["trainer.tp"] == layout.tp


def test_pins_keep_their_source():
    made = planned("trainer.tp=2", "rollout.tp=2")
    assert made.config.trainer.tp == made.found.training.layout.tp == 2
    assert made.found.rollout.layout.tp == 2
    assert "override" in made.loaded.where("trainer.tp") and "trainer.tp" not in made.plan.chosen


@pytest.mark.parametrize("nodes, words", [(1, ()), (2, ()), (4, ("placement.spare_nodes=1",)), (5, ("trainer.pp=2",)),
                                          (4, ("trainer.cp=4",)), (4, ("placement.mode=hybrid",
                                                                       "algorithm.max_staleness=0"))])
def test_every_gpu_is_used_once(nodes, words):
    made = planned(*words, nodes=nodes)
    seats = [*made.seating.training]
    if made.found.mode == "disaggregated":
        seats += [seat for engine in made.seating.rollout for seat in engine]
    places = [(seat.node, seat.gpu) for seat in seats]
    assert len(places) == len(set(places))
    assert len(made.seating.training) == made.found.training.layout.gpus
    assert sum(map(len, made.seating.rollout)) == made.found.rollout.layout.gpus
    spare = made.config.placement.spare_nodes
    assert len(made.seating.spares) >= spare == (1 if "placement.spare_nodes=1" in words else 0)


def test_spare_nodes_are_left_alone():
    """Of ten nodes with one spare, the plan of nine."""
    assert planned("placement.spare_nodes=1", nodes=5).found.step_s == planned(nodes=4).found.step_s


def test_auto_takes_the_fastest_mode():
    found = {mode: planned(f"placement.mode={mode}", "algorithm.max_staleness=0").found
             for mode in ("disaggregated", "colocated", "hybrid", "auto")}
    fastest = min((found[mode] for mode in ("disaggregated", "colocated", "hybrid")), key=lambda each: each.step_s)
    assert (found["auto"].mode, found["auto"].step_s) == (fastest.mode, fastest.step_s)


def test_auto_of_a_mode_that_takes_turns_is_synchronous():
    """A configuration that asks for asynchronous training and gets shared GPUs says that it is synchronous."""
    made = planned("placement.mode=auto", "rollout.max_new_tokens=1024", "workload.response.mean=512",
                   "algorithm.prompts_per_step=256", nodes=1, name="7b/grpo.yaml")
    config = made.config
    assert config.placement.mode == made.found.mode
    asynchronous = config.algorithm.max_staleness > 0
    assert asynchronous == (made.found.mode == "disaggregated") == made.plan.forecast.asynchronous


def test_a_small_step_is_synchronous_unless_the_bound_says_otherwise():
    """128 prompts x 8 x 512 tokens is half a million."""
    words = "rollout.max_new_tokens=1024", "workload.response.mean=512"
    small, bounded = (planned(*words, f"algorithm.max_staleness={bound}", nodes=2, name="7b/grpo.yaml")
                      for bound in ("auto", 2))
    assert not small.plan.forecast.asynchronous and small.config.algorithm.max_staleness == 0
    assert bounded.plan.forecast.asynchronous and bounded.config.algorithm.max_staleness == 2


def test_overlap_hides_a_part_of_the_update_and_none_of_the_rollout():
    words = "algorithm.max_staleness=0", "trainer.tp=4", "trainer.pp=1", "rollout.tp=2", "placement.training_nodes=1"
    made, other_made = (planned(*words, f"algorithm.overlap={word}", nodes=3, name="7b/grpo.yaml")
                        for word in ("true", "false"))
    hidden, plain = made.found, other_made.found
    assert hidden.problem.overlap and not hidden.problem.asynchronous
    update_s, other = hidden.training.seconds, 1 + hidden.problem.coefficients.rl.other_share
    saved_s = plain.step_s - hidden.step_s
    assert 0 < saved_s <= (1 - 1 / 8) * update_s * other * 1.0001
    phases = {phase.name: phase for phase in made.plan.forecast.phases}
    assert phases["train"].starts < phases["rollout"].seconds
    assert phases["train"].starts + phases["train"].seconds == pytest.approx(phases["sync"].starts)
    assert hidden.step_s >= (hidden.rollout.seconds + update_s / 8 + hidden.sync_s) * other * 0.9999


@pytest.mark.parametrize("words, reduce, gathers, fused", [
    ((), True, 0.0, True),                                  # the weight sync follows the only update of a step
    (("algorithm.updates_per_batch=4",), True, 0.75, True),
    (("algorithm.updates_per_batch=2", "algorithm.epochs=2", "trainer.overlap_param_gather=false"), True, 0.0, True),
    (("algorithm.updates_per_batch=4", "trainer.overlap_grad_reduce=false", "trainer.overlap_param_gather=auto"), False,
     0.0, True),
    (("trainer.distributed_optimizer=false", "trainer.overlap_param_gather=auto"), True, 1.0, True),
    (("trainer.gradient_accumulation_fusion=false",), True, 0.0, False),
])
def test_the_plan_hides_what_the_run_will_hide(words, reduce, gathers, fused):
    pins = pins_of(loaded("7b/grpo.yaml", *words), "gpu")
    assert (pins.overlap_grad_reduce, pins.hidden_gathers, pins.fused_gradients) == (reduce, gathers, fused)


def test_the_engines_share_is_written_down():
    made = planned("placement.mode=hybrid", "algorithm.max_staleness=0", nodes=2)
    share = made.found.rollout.layout.memory_utilization
    assert made.config.rollout.memory_utilization == share < 0.85


@pytest.mark.parametrize("gpus_per_node, words", [(8, ()), (6, ("trainer.cp=3",)), (4, ()),
                                                  (8, ("trainer.token_budget=9216",))])
def test_the_token_budget_suits_the_layout(gpus_per_node, words):
    cluster = replace(h100(6), gpus_per_node=gpus_per_node, nics_per_node=gpus_per_node, rails=gpus_per_node)
    made = prepare_for(load_config(CONFIGS / "7b/grpo.yaml", words), cluster)
    assert made.plan.batch.token_budget % made.plan.batch.sequence_multiple == 0


def test_a_pinned_budget_leaves_out_what_it_does_not_divide():
    made = planned("trainer.token_budget=8193")
    layout = made.found.training.layout
    assert layout.cp == 1 and (layout.tp == 1 or not layout.sequence_parallel)


def test_two_problems_at_once_are_told_at_once():
    with pytest.raises(UserError) as error:
        planned("trainer.tp=16", "placement.training_nodes=9")
    assert "trainer.tp = 16" in str(error.value) and "training_nodes = 9" in str(error.value)


def test_a_route_that_a_run_cannot_open_is_refused_with_a_way_out():
    """Pinned: another route works. Chosen: no route does with these sizes, and each remedy was planned."""
    with pytest.raises(UserError) as error:
        best_of(posed(load_config(CONFIGS / "70b/grpo_wide_rollout.yaml", ["weight_sync.route=direct"])))
    assert "120 communicators of the weight sync, and it can use 32" in error.value.what
    assert error.value.fix == "set weight_sync.route to chain or tree, or to auto"
    assert error.value.exit_code == ExitCode.NO_FEASIBLE_PLAN

    pins = Pins(tp=8, pp=16, dp=1, cp=1, rollout_tp=1)
    with pytest.raises(UserError) as error:
        best_of(problem(builtin("llama3-8b"), 20, pins, workload(prompts=256)))
    assert "more than 32 communicators of the weight sync on a GPU, whatever the route" in error.value.what
    assert "rollout.tp=auto" in error.value.fix


def test_best_of_is_what_the_plan_holds():
    problem = posed(load_config(CONFIGS / "7b/grpo.yaml", ["weight_sync.disk.every=20"]), h100(3))
    assert problem.disk_every == 20
    assert planned(nodes=3).plan.forecast.step_s == best_of(problem)[1].step_s


def test_where_rollout_sets_the_pace_the_trainer_gets_the_slack():
    """The sync of one layout is microseconds shorter; a trainer that is done a second earlier is worth more."""
    problem = posed(loaded("7b/grpo.yaml"))
    search = Search(problem)
    shortest, chosen = search.best(), best_of(problem)[1]
    assert chosen.training.seconds == min(option.seconds for option in search.training_options(chosen.training.units))
    assert chosen.step_s == pytest.approx(shortest.step_s, rel=1e-4)
    choice = next(each for each in choices(search, chosen) if each.key == "trainer")
    assert choice.reason.startswith("the fastest")


@pytest.mark.parametrize("name", ["7b/grpo.yaml", "70b/grpo_lora.yaml"])
def test_no_rejected_layout_beats_the_chosen_one(name):
    found = prepare_for(loaded(name))
    choice = next(each for each in found.plan.forecast.choices if each.key == "trainer")
    for each in choice.alternatives:
        if seconds := re.match(r"training ([\d.]+) s against ([\d.]+) s", each.rejected_by):
            assert float(seconds[1]) >= float(seconds[2]), each


def test_what_the_planner_chose_is_not_given_by_the_file():
    """`rollout.max_num_seqs: auto` stands in a line of the file; its value does not."""
    found = prepare_for(loaded("7b/grpo.yaml"))
    sources = {number.key: number.source for number in found.plan.forecast.numbers}
    assert sources["rollout.max_num_seqs"] == "planner" and "grpo.yaml:" in sources["rollout.memory_utilization"]
