"""SmolLM2-135M through the whole job: PP2 with tied embeddings on two stages, its own chat template, vLLM TP1."""

from __future__ import annotations

import json
import signal

from launch.exit_codes import ExitCode
from tests.job.runner import launch
from tests.real_model import smollm2_folder


def test_megatron_and_vllm_agree_on_the_logprobs_of_a_real_model_in_fp32(tmp_path):
    job = launch(tmp_path, "real", f"model.path={smollm2_folder()}", "algorithm.prompts_per_step=2",
                 "algorithm.group_size=4", "trainer.dtype=fp32", "rollout.dtype=fp32", "eval.at_start=false",
                 "monitor.samples_every=1", "trainer.optimizer.warmup_steps=0",
                 config="configs/135m/grpo.yaml")
    job.at_step(2)
    job.process.send_signal(signal.SIGINT)
    job.until(lambda: "again to end at once" in job.text(), "the answer to Ctrl-C")
    job.process.send_signal(signal.SIGINT)      # no checkpoint and no export: gigabytes that other tests look at
    assert job.end() == ExitCode.INTERRUPTED, job.text()
    for row in job.rows():
        assert 0 < row["mismatch/abs_max"] < 1e-3
        assert row["sync/bytes"] > 4 * 134e6  # every element, once
    samples = [json.loads(line) for line in (job.attempt.folder / "samples.jsonl").read_text().splitlines()]
    assert all(sample["prompt"].startswith("<|im_start|>") for sample in samples)
