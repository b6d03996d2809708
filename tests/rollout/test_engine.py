"""A real vLLM engine in deterministic mode: repeatability, log-probs, versions, refusals, death."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time

import numpy as np
import psutil
import pytest
import torch
from tokenizers import Tokenizer

from launch.errors import UserError
from launch.model.hf_config import from_hf_config
from megatron_rl.data.template import PromptTemplate, load_tokenizer
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.rollout.arguments import engine_arguments
from megatron_rl.rollout.engine import RolloutEngine, load_template
from megatron_rl.rollout.sampling import Sampling, numbered
from megatron_rl.rollout.vllm_engine import EngineDied
from megatron_rl.weight_sync.coordinator import SyncCoordinator
from megatron_rl.weight_sync.disk import VersionsOnDisk
from megatron_rl.weight_sync.ends.vllm_internals import TESTED_VERSION
from megatron_rl.weight_sync.protocol import NotServing
from tests.patience import patient
from tests.rollout.engines import (
    hf_greedy,
    hf_logprobs,
    hf_model,
    local_placement,
    make_prompts,
    run_config,
    run_plan,
    running_engine,
)
from tests.tiny_models import make_tiny
from tests.weight_sync.sources import endpoints, source_ranks

EOS = 2
NEW_TOKENS = 300
SAMPLED = Sampling(n=16, temperature=0.7, max_new_tokens=10)
PROMPTS = make_prompts(6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=321, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def config(folder):
    """400 tokens an iteration: 6 x 16 prompts of 9 tokens do not fit in one, so prefills would be split."""
    return run_config(folder, deterministic=True, trainer={"pp": 2}, max_new_tokens=NEW_TOKENS,
                      max_num_batched_tokens=400)


@pytest.fixture(scope="module")
def sources(folder, config):
    with source_ranks(folder, run_plan(config).training) as ranks:
        yield ranks


def _coordinator(engine, sources, folder) -> SyncCoordinator:
    canonical = canonical_tensors(from_hf_config(folder))
    return SyncCoordinator(sources, [engine.weights], endpoints(len(sources)), canonical, backend="gloo",
                           bucket_bytes=1 << 20, timeout_s=patient(20),
                           aliases={"lm_head.weight": "model.embed_tokens.weight"})


@pytest.fixture(scope="module")
def served(folder, config, sources, tmp_path_factory):
    """(event loop, engine, coordinator) with version 0 committed."""
    with running_engine(config, tmp_path_factory.mktemp("logs") / "engine.log") as (runner, engine):
        coordinator = _coordinator(engine, sources, folder)
        runner.run(coordinator.setup())
        runner.run(coordinator.sync(0))
        yield runner, engine, coordinator


def _content(groups) -> list:
    return [(c.token_ids.tolist(), c.logprobs.tobytes(), c.finish_reason) for g in groups for c in g.trajectories]


def test_rollouts_repeat_bit_for_bit(served, config, folder, sources, tmp_path):
    """After other work, in another order of prompts, in a fresh engine that loads the weights from disk. Another step
    or sample is another draw."""
    runner, engine, _ = served
    first = runner.run(engine.generate(PROMPTS, SAMPLED, 3))
    runner.run(engine.generate(make_prompts(5, length=30), Sampling(3, 1.0, 20), 9))
    again = runner.run(engine.generate(PROMPTS, SAMPLED, 3))
    assert _content(first) == _content(again)
    backwards = runner.run(engine.generate(PROMPTS[::-1], SAMPLED, 3))
    assert [group.prompt.index for group in backwards] == [5, 4, 3, 2, 1, 0]
    assert _content(backwards[::-1]) == _content(first)

    assert _content(runner.run(engine.generate(PROMPTS, SAMPLED, 4))) != _content(first)
    assert all(len({tuple(c.token_ids.tolist()) for c in group.trajectories}) > 8 for group in first)
    twice = runner.run(engine.generate(numbered([PROMPTS[0], PROMPTS[0]]), SAMPLED, 3))
    assert _content(twice[:1]) != _content(twice[1:]), "two instances of a prompt drew the same completions"

    version = runner.run(VersionsOnDisk(dict(enumerate(sources)), tmp_path, keep=1).write(7)).folder
    with running_engine(config, tmp_path / "engine.log", version_folder=version) as (other_runner, fresh):
        assert fresh.status()["state"] == "serving"
        _assert_repeats(other_runner, fresh, first, 7)
        assert other_runner.run(fresh.compare(version)) == []
        _assert_takes_part_in_the_next_sync(other_runner, fresh, sources, folder, first)
        other = make_tiny(tmp_path / "other", "qwen3", seed=1, vocab_size=321, tie_word_embeddings=True)
        different = other_runner.run(fresh.compare(other))
        assert different and all("model." in line and " elements differ" in line for line in different)
        _assert_death_is_noticed(other_runner, fresh)
    runner.run(_again(served, sources, folder))


def _assert_repeats(runner: asyncio.Runner, engine: RolloutEngine, first, version: int) -> None:
    groups = runner.run(engine.generate(PROMPTS, SAMPLED, 3))
    assert _content(groups) == _content(first)
    assert {v for g in groups for c in g.trajectories for v in c.weight_versions.tolist()} == {version}


def _assert_takes_part_in_the_next_sync(runner: asyncio.Runner, engine: RolloutEngine, sources, folder, first) -> None:
    coordinator = _coordinator(engine, sources, folder)
    runner.run(coordinator.setup())
    runner.run(coordinator.admit(0, engine.weights))
    runner.run(coordinator.sync(8))
    _assert_repeats(runner, engine, first, 8)


def _assert_death_is_noticed(runner: asyncio.Runner, engine: RolloutEngine) -> None:
    """The engine core is killed in mid-generation."""
    core = engine._vllm._llm.engine_core.resources.engine_manager.processes[0].pid

    async def killed() -> None:
        task = asyncio.ensure_future(engine.generate(PROMPTS, Sampling(16, 1.0, NEW_TOKENS), 0))
        while engine.status()["unfinished"] < 96:
            await asyncio.sleep(0.001)
        os.kill(core, signal.SIGKILL)
        await task

    started = time.monotonic()
    with pytest.raises(EngineDied, match=r"(?s)engine 0 died; the end of .*engine\.log"):
        runner.run(killed())
    assert time.monotonic() - started < 30
    with pytest.raises(EngineDied):
        runner.run(engine.generate(PROMPTS, SAMPLED, 0))


async def _again(served, sources, folder) -> None:
    """The sources' lanes went to the fresh engine: give them back."""
    _, engine, coordinator = served
    await coordinator.setup()
    await coordinator.sync(coordinator.version + 1)


def test_logprobs_are_those_of_the_processed_distribution(served, folder):
    """Behaviour log-probs at temperature 0.7 equal Hugging Face's of logits / 0.7 (TRL#4159, prime-rl#697)."""
    runner, engine, _ = served
    model = hf_model(folder)
    for group in runner.run(engine.generate(PROMPTS[:3], SAMPLED, 0)):
        for completion in group.trajectories[:4]:
            expected = hf_logprobs(model, group.prompt, completion.token_ids.tolist(), 0.7)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_greedy_tokens_and_finish_reasons_are_hugging_faces(served, folder):
    runner, engine, coordinator = served
    model = hf_model(folder)
    groups = runner.run(engine.generate(PROMPTS, Sampling(n=1, temperature=0.0, max_new_tokens=40), 0))
    reasons = set()
    for group in groups:
        (completion,) = group.trajectories
        tokens = completion.token_ids.tolist()
        assert tokens == hf_greedy(model, group.prompt, 40)
        assert completion.finish_reason == ("stop" if tokens[-1] == EOS else "length")
        assert completion.weight_versions.tolist() == [coordinator.version] * len(tokens)
        assert completion.logprobs.dtype == np.float32 and completion.token_ids.dtype == np.int32
        reasons.add(completion.finish_reason)
    assert "length" in reasons


def test_the_stop_token_is_kept_and_not_in_the_text(served, folder):
    """TRL#5988: without the end token in the completion the model never learns to stop."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    runner, engine, _ = served
    groups = runner.run(engine.generate(PROMPTS, Sampling(16, 1.0, NEW_TOKENS), 1))
    stopped = [c for g in groups for c in g.trajectories if c.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] == EOS and EOS not in completion.token_ids[:-1]
        assert "<|eos|>" not in completion.text
        assert completion.text == tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
    assert len({completion.text for completion in stopped}) > 1


def test_start_tells_what_both_ends_must_have_in_common(served, folder):
    """The fingerprint is that of the driver's template, made from the same folder."""
    _, engine, _ = served
    assert engine.facts["template_fingerprint"] == PromptTemplate(load_tokenizer(folder)).fingerprint()
    assert (engine.facts["torch"], engine.facts["device"], engine.facts["nccl"]) == (torch.__version__, "cpu", None)
    assert engine.facts["vllm"].startswith(TESTED_VERSION)


def test_an_engine_with_another_tokenizer_or_template_has_another_fingerprint(folder, config, tmp_path):
    """Template drift: one node holds an older copy of the tokenizer files."""
    driver = PromptTemplate(load_tokenizer(folder)).fingerprint()

    def fingerprint(**changes) -> str:
        other = config.model_copy(update={name: getattr(config, name).model_copy(update=change)
                                          for name, change in changes.items()})
        return load_template(other).fingerprint()

    assert fingerprint() == driver
    assert fingerprint(data={"chat_template": "none"}) != driver
    assert fingerprint(data={"system": "Be brief."}) != driver
    shutil.copytree(folder, tmp_path / "older")
    template = tmp_path / "older" / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant: ", "assistant:"))
    assert fingerprint(model={"path": str(tmp_path / "older")}) != driver


def test_a_request_that_runs_across_a_sync_knows_which_tokens_came_from_which_version(served, sources):
    runner, engine, coordinator = served
    old = coordinator.version

    async def across():
        task = asyncio.ensure_future(engine.generate_group(PROMPTS[0], Sampling(32, 1.0, NEW_TOKENS)))
        before = engine.status()["generated_tokens"]
        while engine.status()["generated_tokens"] < before + 32 * 3:
            await asyncio.sleep(0.001)                 # some tokens under the old version
        assert engine.status()["unfinished"] > 0, "the tokens were told only once their requests had ended"
        report = await coordinator.sync(old + 1)
        return report, await task

    report, group = runner.run(across())
    assert report.version == old + 1
    spanning = [c for c in group.trajectories if set(c.weight_versions.tolist()) == {old, old + 1}]
    assert spanning, "no completion was running when the weights changed"
    for completion in group.trajectories:
        assert len(completion.weight_versions) == len(completion.token_ids) == len(completion.logprobs)
        assert (np.diff(completion.weight_versions) >= 0).all()


def test_generated_tokens_are_counted_exactly(served):
    runner, engine, _ = served
    before = engine.status()["generated_tokens"]
    groups = runner.run(engine.generate(PROMPTS, SAMPLED, 2))
    tokens = sum(len(completion.token_ids) for group in groups for completion in group.trajectories)
    assert engine.status()["generated_tokens"] - before == tokens


def test_ended_sequences_are_told_before_their_group_ends(served):
    runner, engine, _ = served

    async def one_by_one():
        before = await engine.ended(0)
        long, short = (asyncio.ensure_future(engine.generate_group(PROMPTS[0], Sampling(4, 1.0, length)))
                       for length in (NEW_TOKENS, 2))
        assert 4 <= await engine.ended(before + 4) - before < 8 and not long.done()
        await asyncio.gather(long, short)
        return await engine.ended(0) - before

    assert runner.run(asyncio.wait_for(one_by_one(), patient(60))) == 8


def test_requests_at_the_door_of_a_sync_are_served_or_refused(served):
    """verl#5698: what was handed over before the sync began is finished; what comes after it began is refused or
    waits; every token names its version."""
    runner, engine, coordinator = served
    old = coordinator.version

    async def together():
        return await asyncio.gather(engine.generate(PROMPTS, SAMPLED, 0), coordinator.sync(old + 1),
                                    engine.generate(PROMPTS, SAMPLED, 0), return_exceptions=True)

    before, report, after = runner.run(together())
    assert report.version == old + 1
    assert not isinstance(before, Exception)
    assert isinstance(after, NotServing) or len(after) == len(PROMPTS)
    served_groups = before if isinstance(after, NotServing) else before + after
    versions = {v for group in served_groups for c in group.trajectories for v in c.weight_versions.tolist()}
    assert versions <= {old, old + 1}


def test_aborted_completions_carry_versions_too(served):
    """slime#327: samples cut off by an abort came back without a version."""
    runner, engine, coordinator = served

    async def aborted():
        task = asyncio.ensure_future(engine.generate_group(PROMPTS[0], Sampling(32, 1.0, NEW_TOKENS)))
        while engine.status()["unfinished"] < 32:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        await engine._vllm.abort_all()
        return await task

    cut = [c for c in runner.run(aborted()).trajectories if c.finish_reason == "abort"]
    assert cut and any(len(completion.token_ids) for completion in cut)
    for completion in cut:
        assert completion.weight_versions.tolist() == [coordinator.version] * len(completion.token_ids)
        assert len(completion.logprobs) == len(completion.token_ids)


def test_a_prompt_over_the_limit_is_refused(served):
    runner, engine, _ = served
    with pytest.raises(UserError, match="prompt 0 has 49 tokens.*max_prompt_tokens = 48"):
        runner.run(engine.generate(make_prompts(1, length=49), SAMPLED, 0))


def test_prompts_that_a_seeded_engine_would_split_are_refused(folder):
    """vLLM's CPU sampler cannot rewind the generator of a request whose prefill was split: the engine dies."""
    config = run_config(folder, deterministic=True, max_num_batched_tokens=40)
    plan = run_plan(config)
    with pytest.raises(UserError, match="max_prompt_tokens = 48 exceeds rollout.max_num_batched_tokens = 40"):
        engine_arguments(config, plan, local_placement(plan), 0, None)


def test_stop_leaves_no_process(served):
    """The last test of this engine."""
    runner, engine, _ = served
    core = psutil.Process(engine._vllm._llm.engine_core.resources.engine_manager.processes[0].pid)
    processes = [core, *core.children(recursive=True)]
    runner.run(engine.stop())
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    runner.run(engine.stop())                          # a second stop does nothing
