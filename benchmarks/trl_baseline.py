"""The baseline of `make bench`: TRL's GRPOTrainer with its plain generation, on the configuration of one of our runs.

    python -m benchmarks.trl_baseline configs/tiny/grpo.yaml --packages .bench-packages --out trl.json

It uses the same model folder, rendered prompts, rewards, G, prompts per step, completion limit, temperature, learning
rate and precision. Settings that TRL leaves open get the faster value: weights purely in the configured type (no
autocast), no gradient checkpointing unless the configuration recomputes, no KL, one update per batch, the largest
batch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

from launch.config.auto import on_this_machine
from launch.config.load import load_config
from launch.config.resolved import ResolvedConfig


def main() -> int:
    arguments = parse_arguments()
    sys.path.insert(0, str(arguments.packages.resolve()))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local; transformers reads this at import
    config = on_this_machine(load_config(arguments.config, arguments.overrides).config)
    result = run(config, arguments)
    text = json.dumps(result, indent=2)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a run's YAML")
    parser.add_argument("overrides", nargs="*", help="key=value words, as for megatron-rl launch")
    parser.add_argument("--packages", type=Path, default=Path(".bench-packages"), help="folder that contains trl")
    parser.add_argument("--steps", type=int, default=12, help="total number of steps")
    parser.add_argument("--warmup", type=int, default=2, help="number of first steps that are not counted")
    parser.add_argument("--micro-batch", type=int, help="sequences per forward pass; default: all of a step")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    if not 1 <= arguments.warmup < arguments.steps:
        parser.error("--warmup must be at least 1 and less than --steps")
    return arguments


def run(config: ResolvedConfig, arguments: argparse.Namespace) -> dict:
    """Train `arguments.steps` steps and return the measured rates."""
    import datasets
    import torch
    import trl
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed

    torch.set_num_threads(arguments.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    set_seed(config.run.seed)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.trainer.dtype]
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    if config.model.init == "random":
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model.path), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype)

    class Clock(TrainerCallback):
        """Records when each step ended and what TRL logged for it."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.logs: list[dict] = []

        def on_step_end(self, args, state, control, **kwargs) -> None:
            self.ends.append(time.perf_counter())

        def on_log(self, args, state, control, logs=None, **kwargs) -> None:
            if logs and "reward" in logs:
                self.logs.append(logs)

    samples = config.algorithm.prompts_per_step * config.algorithm.group_size
    micro_batch = arguments.micro_batch or samples
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            output_dir=folder, use_cpu=not torch.cuda.is_available(), max_steps=arguments.steps, seed=config.run.seed,
            per_device_train_batch_size=micro_batch, gradient_accumulation_steps=samples // micro_batch,
            num_generations=config.algorithm.group_size, max_completion_length=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature, learning_rate=config.trainer.optimizer.lr,
            lr_scheduler_type="constant", max_grad_norm=config.trainer.optimizer.clip_grad, beta=0.0,
            loss_type="dapo", use_vllm=False, bf16=False, fp16=False,
            gradient_checkpointing=config.trainer.recompute == "full", save_strategy="no", report_to=[],
            logging_steps=1, disable_tqdm=True, dataloader_num_workers=0)
        trainer = trl.GRPOTrainer(model=model, args=settings, processing_class=tokenizer, callbacks=[clock],
                                  train_dataset=datasets.Dataset.from_list(prompt_rows(config, tokenizer)),
                                  reward_funcs=reward_function(config))
        trainer.train()
    ends = clock.ends[arguments.warmup - 1:]
    step_seconds = [round(end - start, 4) for start, end in itertools.pairwise(ends)]
    seconds = fmean(step_seconds)
    logs = clock.logs[arguments.warmup:]
    return {
        "system": f"TRL {trl.__version__} GRPOTrainer", "torch": torch.__version__, "dtype": config.trainer.dtype,
        "threads": torch.get_num_threads(), "samples_per_step": samples, "steps_measured": len(step_seconds),
        "seconds_per_step": seconds, "step_seconds": step_seconds, "samples_per_s": samples / seconds,
        "length_mean": fmean(row["completions/mean_length"] for row in logs),
        "reward_first": clock.logs[0]["reward"], "reward_last": clock.logs[-1]["reward"]}


def prompt_rows(config: ResolvedConfig, tokenizer) -> list[dict]:
    """The rendered prompts of our own loader. TRL tokenises them again; it must get the same IDs."""
    from megatron_rl.data.dataset import load_prompts

    prompts = load_prompts(config, tokenizer, "train")
    for prompt in prompts[:32]:
        ids = tokenizer(prompt.text)["input_ids"]
        if ids != prompt.token_ids.tolist():
            raise SystemExit(f"TRL would tokenise row {prompt.index} differently: {ids}, not "
                             f"{prompt.token_ids.tolist()}")
    return [{"prompt": prompt.text, "answer": prompt.answer, "columns": json.dumps(prompt.columns)}
            for prompt in prompts]


def reward_function(config: ResolvedConfig):
    """Our rewards, called in TRL's process."""
    from megatron_rl.rewards.load import load_rewards
    from megatron_rl.rewards.sample import Sample

    rewards = load_rewards(config.reward)

    def total_reward(prompts, completions, answer, columns, **_) -> list[float]:
        samples = [Sample(completion, gold, prompt, json.loads(row))
                   for prompt, completion, gold, row in zip(prompts, completions, answer, columns, strict=True)]
        return [sum(reward.weight * reward(sample) for reward in rewards) for sample in samples]

    return total_reward


if __name__ == "__main__":
    raise SystemExit(main())
