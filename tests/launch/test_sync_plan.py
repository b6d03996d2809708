"""`megatron-rl sync plan`: routes compared and drawn, as text and as JSON."""

from __future__ import annotations

import json
import re

import pytest

from launch.plan.plan import read_plan

WIDE = "configs/70b/grpo_wide_rollout.yaml"


def test_three_routes_beside_each_other_and_the_choice_with_its_reason(cli):
    code, out, err = cli("sync", "plan", WIDE)
    assert code == 0, err
    lines = out.splitlines()
    rows = [line for line in lines[1:4]]
    assert [row.lstrip("> ").split()[0] for row in rows] == ["direct", "chain", "tree"]
    assert [row.startswith(">") for row in rows] == [False, True, False]
    assert re.search(r"\nchain: chain 0\.\d\d s against direct 6\.\d\d s, tree 0\.\d\d s: direct would have 120 "
                     "communicators on a GPU, which can use 32; tree is as fast within the prediction's range, a "
                     r"factor of 2, and chain has the fewest communicators, 518 against 1,036 \(floor", out)
    assert "518 communicators, opened at the start in 8 rounds" in out
    assert "chain (chosen): the last byte arrives after" in out and "lines more (--all)" in out
    assert lines[0].endswith("communicators a GPU") and " 4 + 9, 604 MB" in rows[2]
    assert max(map(len, lines)) < 300


def test_a_chain_is_drawn_straight_down_and_all_its_lines_are_there_when_asked_for(cli):
    code, out, _ = cli("sync", "plan", WIDE, "--route", "chain", "--all")
    links = [line for line in out.splitlines() if " rollout " in line and " GB, " in line]
    assert code == 0 and len(links) == 4 * 60                      # four stages, each through all sixty nodes
    assert "more (--all)" not in out and "tree: the last byte" not in out
    assert "(node0" in out                                        # names of the cluster file


def test_json_holds_the_same_routes_with_exact_bytes(cli):
    code, out, _ = cli("sync", "plan", WIDE, "--json")
    document = json.loads(out)
    assert code == 0 and document["chosen"] == "chain" and document["predicted"]
    taken: dict[int, int] = {}
    for tree in next(each for each in document["drawn"] if each["route"] == "tree")["trees"]:
        _collect(tree, taken)
    assert len(taken) == 60 and set(taken.values()) == {document["replica_bytes"]}
    assert document["routes"]["tree"]["communicators"] == {
        "training": 4, "rollout": 9, "training_bytes": 4 * 64 * 2**20, "rollout_bytes": 9 * 64 * 2**20, "total": 1036,
        "rounds": 10, "opening_s": 20.0}
    assert document["routes"]["tree"]["expected_s"] < document["routes"]["direct"]["expected_s"]


def test_the_plan_says_what_a_run_opens(cli):
    """In one place of the JSON, for the chosen route, and in the text."""
    code, out, _ = cli("plan", WIDE, "--json")
    document = json.loads(out)
    sync, opened = document["forecast"]["sync"], document["weight_sync"]
    assert code == 0 and opened["route"] == sync["chosen"] == "chain"
    assert (opened["communicators_total"], opened["opening_rounds"], opened["opening_s"]) == (518, 8, 16.0)
    assert opened.items() <= next(each for each in sync["routes"] if each["route"] == "chain").items()
    plan = read_plan(document)
    assert json.loads(plan.model_dump_json()) == document
    assert read_plan(document | {"forecast": None}).fingerprint() == plan.fingerprint()


def _collect(branch: dict, taken: dict[int, int]) -> None:
    if branch.get("via") == "nic":
        taken[branch["node"]] = taken.get(branch["node"], 0) + branch["bytes"]
    for child in branch["children"]:
        _collect(child, taken)


def test_on_this_machine_there_is_one_way(cli, run_yaml):
    code, out, err = cli("sync", "plan", run_yaml, "--device", "cpu", "--route", "direct")
    assert code == 0, err
    assert "communicators" not in out and "direct (chosen)" in out and "training 0\n  └─ rollout 0" in out


@pytest.mark.parametrize("words, fragment", [
    (("configs/70b/grpo.yaml", "placement.mode=hybrid", "algorithm.max_staleness=0"), "no route to draw"),
    (("nowhere.yaml",), "no configuration file nowhere.yaml")])
def test_what_cannot_be_drawn_is_an_error_with_a_way_out(cli, words, fragment):
    code, out, err = cli("sync", "plan", *words)
    assert code == 2 and out == "" and fragment in err and "fix:" in err
