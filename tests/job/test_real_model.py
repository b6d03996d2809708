"""SmolLM2-135M through the whole job: PP2 with tied embeddings on two stages, its own chat template, without the
questions that are too long through it, vLLM TP1. A second Ctrl-C ends it at once."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from transformers import AutoTokenizer

from launch.exit_codes import ExitCode
from launch.run.stop import stop_requested
from megatron_rl.layouts.step_folder import complete_checkpoints
from tests.job.runner import Launched, launch
from tests.job.survivors import family
from tests.real_model import smollm2_folder

LIMIT = 43
"""Tokens of a prompt."""


def test_megatron_and_vllm_agree_on_the_logprobs_of_a_real_model_in_fp32(tmp_path):
    with family() as started:
        job = _interrupted_twice(tmp_path)
        assert started.left(within_s=0) == []
    assert job.outcome().status == "interrupted" and complete_checkpoints(job.attempt.checkpoints) == []
    assert "Traceback" not in job.text()
    for row in job.rows():
        assert 0 < row["mismatch/abs_max"] < 1e-3
        assert row["sync/bytes"] > 4 * 134e6  # every element, once
    samples = [json.loads(line) for line in (job.attempt.folder / "samples.jsonl").read_text().splitlines()]
    assert all(sample["prompt"].startswith("<|im_start|>") for sample in samples)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    questions = [json.loads(line)["prompt"] for line in Path("configs/135m/train.jsonl").read_text().splitlines()]
    lengths = [len(tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                                 return_dict=False)) for question in questions]
    warnings = (job.attempt.folder / "warnings.jsonl").read_text()
    assert f"data.train: {sum(length > LIMIT for length in lengths)} of 2048 prompts are longer than" in warnings
    assert "data.overlong = drop: they are left out" in warnings
    for sample in samples:      # the row is that of the file
        assert questions[sample["row"]] in sample["prompt"] and lengths[sample["row"]] <= LIMIT


def _interrupted_twice(folder: Path) -> Launched:
    """A job after two steps and two times Ctrl-C: without a checkpoint and an export, which are gigabytes."""
    job = launch(folder, "real", f"model.path={smollm2_folder()}", "algorithm.prompts_per_step=2",
                 "algorithm.group_size=4", "trainer.dtype=fp32", "rollout.dtype=fp32", "eval.at_start=false",
                 "monitor.samples_every=1", f"rollout.max_prompt_tokens={LIMIT}", "data.overlong=drop",
                 "trainer.optimizer.warmup_steps=0", config="configs/135m/grpo.yaml")
    job.at_step(2)
    job.process.send_signal(signal.SIGINT)
    job.until(lambda: "again to end at once" in job.text(), "the answer to Ctrl-C")
    assert stop_requested(job.attempt.folder)
    job.process.send_signal(signal.SIGINT)
    assert job.end(deadline_s=30) == ExitCode.INTERRUPTED, job.text()
    return job
