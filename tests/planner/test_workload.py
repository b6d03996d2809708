"""The workload of a configuration, and what one optimizer step of it computes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.errors import UserError
from launch.plan.layouts import TrainingLayout
from launch.planner.from_config import workload_of
from launch.planner.workload.lengths import Counted, LogNormal
from launch.planner.workload.work import PackedWork
from tests.planner.problems import loaded, workload


def test_the_shipped_one():
    work = workload_of(loaded("70b/grpo.yaml"))
    assert (work.prompts, work.group, work.updates, work.sequences) == (256, 16, 1, 4096)
    assert (work.prompt_tokens, work.max_prompt_tokens, work.longest) == (512, 512, 8704)
    assert isinstance(work.lengths, LogNormal) and work.lengths.mean == 2048 and work.mean_tokens == 2560
    assert not work.logprob_pass and not work.reference and work.target == 10000


def test_the_careful_recipe():
    work = workload_of(loaded("70b/grpo.yaml", "algorithm.old_logprobs=recompute", "algorithm.kl.beta=0.001",
                              "algorithm.kl.reference_offload=true"))
    assert work.logprob_pass and work.reference and work.reference_offload


def test_what_is_not_said_is_taken_from_the_limits():
    work = workload_of(loaded("70b/grpo.yaml", "workload={}"))
    assert work.prompt_tokens == 256 and work.lengths.mean == 2048 and work.target is None


def test_dynamic_sampling_generates_the_flat_groups_in_addition():
    off, on = (workload_of(loaded("70b/grpo.yaml", "workload.flat_groups=0.2",
                                  f"algorithm.dynamic_sampling.enabled={enabled}")) for enabled in ("false", "true"))
    assert (off.generated_prompts, on.generated_prompts) == (256, 320)
    assert on.sequences == off.sequences == 4096        # what is trained


def test_fixed_histogram_and_file(tmp_path):
    fixed = workload_of(loaded("70b/grpo.yaml", "workload.response.distribution=fixed"))
    assert fixed.lengths == Counted.of({2048: 1.0}, cap=8192)
    histogram = workload_of(loaded("70b/grpo.yaml", "workload.response={distribution: histogram, values: [100, 300], "
                                                    "counts: [1, 3]}"))
    assert histogram.lengths.mean == 250
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps({"completion_tokens": n}) + "\n" for n in (10, 20, 30)))
    try:
        measured = workload_of(loaded("70b/grpo.yaml", f"workload.response={{distribution: file, path: {path}}}"))
    except UserError as error:              # another name of the field: the message says which ones are known
        assert "samples.jsonl" in str(error)
    else:
        assert measured.lengths.mean == 20


@pytest.mark.parametrize("words, part", [
    (["workload.prompt_tokens=513"], "max_prompt_tokens"), (["workload.response.mean=8192"], "8192"),
    (["workload.response={distribution: histogram, values: [1], counts: []}"], "1 values, 0 counts"),
    (["workload.response={distribution: histogram, values: [5], counts: [0]}"], "weights"),
    (["workload.response={distribution: file}"], "workload.response.path"),
    (["workload.response={distribution: file, path: nowhere}"], "nowhere")])
def test_impossible_ones(words, part):
    with pytest.raises(UserError) as error:
        workload_of(loaded("70b/grpo.yaml", *words))
    assert part in str(error.value) and error.value.where and error.value.fix


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 8), st.sampled_from([1, 2, 5]),
       st.integers(4096, 65536))
def test_micro_batches_hold_all_tokens(updates, pp, dp, vpp, budget):
    work = workload(updates=updates, prompts=64)
    layout = TrainingLayout(pp=pp, dp=dp, vpp=vpp if pp > 1 else 1)
    made = PackedWork(work, layout, budget)
    assert made.sequences == work.sequences // updates
    assert made.tokens == round(made.sequences * work.mean_tokens)
    assert made.micro_batches * made.micro_batch_tokens * dp >= made.tokens
    assert made.micro_batch_tokens <= budget
    assert made.micro_batches % (pp if layout.vpp > 1 else 1) == 0
    more = PackedWork(work, replace(layout, dp=2 * dp), budget)
    assert more.micro_batches <= made.micro_batches


def test_attention_counts_as_if_all_had_one_length():
    """E[t^2] / E[t] by hand, for two lengths."""
    work = workload(prompt_tokens=100, lengths=Counted.of({100: 1.0, 300: 1.0}, cap=300))
    made = PackedWork(work, TrainingLayout(), 8192)
    assert made.attention_length == pytest.approx((200 ** 2 + 400 ** 2) / (200 + 400))
