"""Each rule of launch/config/checks.py: the message holds value, key, place and remedy; the remedy is accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.config.checks import cautions, check
from launch.config.load import load_config
from launch.errors import UserError
from launch.model.hf_config import from_hf_dict
from tests.launch.conftest import TINY_MODEL
from tests.planner.problems import ROOT

# The model: 4 layers, 8 heads, 4 KV heads of 32, ffn 384, vocabulary 96, 128 positions.
# (overrides, what the message holds, overrides that follow the remedy)
CASES = [
    (["trainer.tp=3"], ["trainer.tp = 3 does not divide the 8 attention heads", "override 'trainer.tp=3', trainer.tp",
                        "use trainer.tp = 1, 2 or 4"], ["trainer.tp=4"]),
    (["trainer.tp=8"], ["trainer.tp = 8 does not divide the 4 KV heads", "use trainer.tp = 1, 2 or 4",
                        "rollout.tp may be larger"], ["trainer.tp=1", "rollout.tp=8"]),
    (["trainer.tp=1", "trainer.sequence_parallel=true"], ["trainer.sequence_parallel = true", "trainer.tp = 1",
                                                          "use trainer.tp >= 2"], ["trainer.tp=2"]),
    (["trainer.pp=1", "trainer.vpp=2"], ["trainer.vpp = 2", "trainer.pp = 1", "use trainer.pp >= 2"],
     ["trainer.pp=2"]),
    (["trainer.vpp=3"], ["trainer.pp x trainer.vpp = 2 x 3 does not divide the 4 layers",
                         "with trainer.pp = 2 use trainer.vpp = 1 or 2"], ["trainer.vpp=2"]),
    (["trainer.pp=3", "trainer.vpp=2"], ["3 x 2 does not divide the 4 layers", "choose trainer.pp from 1, 2 or 4"],
     ["trainer.pp=2"]),
    (["trainer.pp=5"], ["trainer.pp = 5 has more stages than the model has layers (4)", "use trainer.pp <= 4"],
     ["trainer.pp=4"]),
    (["rollout.tp=3"], ["rollout.tp = 3 does not divide the 8 attention heads", "use rollout.tp = 1, 2, 4 or 8"],
     ["rollout.tp=8"]),
    (["rollout.dtype=bf16"], ["trainer.dtype = fp32 and rollout.dtype = bf16 differ", "the same value"],
     ["trainer.dtype=bf16"]),
    (["rollout.max_prompt_tokens=121"], ["121 + 8 = 129 exceeds the model's 128 positions", "<= 128"],
     ["rollout.max_prompt_tokens=120", "trainer.token_budget=128"]),
    (["trainer.token_budget=23"], ["trainer.token_budget = 23 is below the longest sequence of 24",
                                   "use trainer.token_budget >= 24"], ["trainer.token_budget=24"]),
    (["trainer.cp=3", "trainer.sequence_parallel=true", "trainer.token_budget=30", "rollout.max_prompt_tokens=18"],
     ["trainer.token_budget = 30 is below the longest sequence of 26 tokens (padded to 36, a multiple of 12)",
      "use trainer.token_budget >= 36"], ["trainer.token_budget=36"]),
    (["trainer.cp=2", "trainer.sequence_parallel=true", "trainer.token_budget=60"],
     ["trainer.token_budget = 60 is not a multiple of 8", "trainer.token_budget = 64"], ["trainer.token_budget=64"]),
    (["trainer.share_prompts=on", "trainer.cp=2"], ["trainer.share_prompts = on with trainer.cp = 2",
                                                    "use trainer.share_prompts = auto"], ["trainer.cp=1"]),
    (["trainer.share_prompts=on", "trainer.sequence_parallel=true"],
     ["trainer.share_prompts = on with trainer.sequence_parallel = true", "or sequence_parallel: false"],
     ["trainer.share_prompts=auto"]),
    (["weight_sync.staging=shadow", "model.lora_rank=8"],
     ["weight_sync.staging = shadow with model.lora_rank = 8", "use weight_sync.staging = in_place"],
     ["weight_sync.staging=in_place"]),
    (["weight_sync.staging=shadow", "trainer.dtype=bf16", "rollout.dtype=fp8"],
     ["weight_sync.staging = shadow with rollout.dtype = fp8", "quantised weights"], ["weight_sync.staging=in_place"]),
    (["rollout.dtype=fp8"], ["rollout.dtype = fp8 with trainer.dtype = fp32", "use trainer.dtype = bf16"],
     ["trainer.dtype=bf16"]),
    (["weight_sync.staging=shadow", "placement.mode=colocated"],
     ["weight_sync.staging = shadow with placement.mode = colocated", "alternate"], ["placement.mode=disaggregated"]),
    (["algorithm.updates_per_batch=3"], ["algorithm.prompts_per_step = 16 does not divide into",
                                         "updates_per_batch = 3", "updates_per_batch = 1, 2, 4, 8 or 16"],
     ["algorithm.updates_per_batch=4"]),
    (["algorithm.prompts_per_step=1", "algorithm.group_size=2", "trainer.dp=4"],
     ["an update has 2 sequences", "trainer.dp = 4 needs 4", "use algorithm.prompts_per_step >= 2"],
     ["algorithm.prompts_per_step=2"]),
    (["algorithm.prompts_per_step=1", "algorithm.group_size=2", "trainer.dp=2", "trainer.vpp=2"],
     ["an update has 2 sequences", "trainer.dp = 2 x trainer.pp = 2 (interleaved) needs 4"],
     ["algorithm.prompts_per_step=2"]),
    (["rollout.replicas=17"], ["rollout.replicas = 17 engines share algorithm.prompts_per_step = 16",
                               "use rollout.replicas <= 16"], ["rollout.replicas=16"]),
    (["trainer.optimizer.min_lr=1", "trainer.optimizer.schedule=cosine"],
     ["trainer.optimizer.min_lr = 1 exceeds trainer.optimizer.lr = 0.001", "<= 0.001"],
     ["trainer.optimizer.min_lr=1e-4"]),
    (["trainer.overlap_param_gather=true", "trainer.distributed_optimizer=false"],
     ["overlap_param_gather = true with trainer.distributed_optimizer = false", "nothing is gathered", "= auto"],
     ["trainer.overlap_param_gather=auto"]),
    (["trainer.overlap_param_gather=true", "trainer.overlap_grad_reduce=false"],
     ["overlap_param_gather = true with trainer.overlap_grad_reduce = false", "one bucket", "= auto"],
     ["trainer.overlap_param_gather=false"]),
    (["trainer.gradient_accumulation_fusion=true"],
     ["trainer.gradient_accumulation_fusion = true needs Transformer Engine's kernels", "= auto"],
     ["trainer.gradient_accumulation_fusion=auto"]),
    (["trainer.optimizer.min_lr=1e-4"], ["min_lr = 0.0001 has no effect", "schedule = constant", "linear or cosine"],
     ["trainer.optimizer.schedule=linear"]),
    (["algorithm.dynamic_sampling={enabled: true, max_refill: 0}"],
     ["algorithm.dynamic_sampling.enabled = true with algorithm.dynamic_sampling.max_refill = 0: there is no reserve",
      "max_refill >= 1"], ["algorithm.dynamic_sampling={enabled: true, max_refill: 1}"]),
    (["workload.flat_groups=0.5"],
     ["workload.flat_groups = 0.5 has no effect with algorithm.dynamic_sampling.enabled = false"],
     ["workload.flat_groups=0.5", "algorithm.dynamic_sampling.enabled=true"]),
    (["algorithm.dynamic_sampling.enabled=true", "algorithm.advantage=reinforce_pp"],
     ["its advantages have no baseline of the group", "reinforce_pp_baseline"],
     ["algorithm.dynamic_sampling.enabled=true", "algorithm.advantage=reinforce_pp_baseline"]),
    (["trainer.optimizer.warmup_steps=200", "algorithm.updates_per_batch=2"],
     ["warmup_steps = 200 covers all 200 optimizer steps of the run", "warmup_steps <= 199"],
     ["trainer.optimizer.warmup_steps=199"]),
    (["rollout.max_num_batched_tokens=64"],
     ["rollout.max_num_batched_tokens = 64 is below rollout.max_num_seqs = 256", ">= 256"],
     ["rollout.max_num_batched_tokens=256"]),
    (["rollout.deterministic=true", "rollout.max_num_batched_tokens=8", "rollout.max_num_seqs=8"],
     ["rollout.deterministic = true with prompts of up to 16 tokens, above the chunked-prefill limit of 8",
      "use rollout.max_num_batched_tokens >= 16"], ["rollout.max_num_batched_tokens=16"]),
    (["rollout.keep_kv=true", "weight_sync.in_flight=abort"],
     ["rollout.keep_kv = true with weight_sync.in_flight = abort", "no request is running with a KV cache"],
     ["weight_sync.in_flight=keep"]),
    (["rollout.kv_cache_gb=1e-5"], ["rollout.kv_cache_gb = 1e-05 holds 2 tokens, fewer than one sequence of 24",
                                    "use rollout.kv_cache_gb >= 0.01"], ["rollout.kv_cache_gb=0.01"]),
    (["eval.every=5", "eval.at_end=true"], ["eval.every and eval.at_end cannot be used with data.eval = null"],
     ["data.eval=held_out.jsonl"]),
    (["eval.right=formatt"], ["eval.right = formatt is not one of reward.functions"], ["eval.right=null"]),
    (["data.system=Think.", "data.chat_template=none"], ["data.system needs a chat template",
                                                         "data.chat_template = none"], ["data.chat_template=auto"]),
    (["weight_sync.disk.compare=true"], ["disk.compare = true", "weight_sync.disk.every = 0"],
     ["weight_sync.disk.every=10"]),
    (["algorithm.overlap=true", "algorithm.advantage=reinforce_pp_baseline"],
     ["algorithm.overlap = true with algorithm.advantage = reinforce_pp_baseline", "whitened", "rloo"],
     ["algorithm.advantage=rloo"]),
    (["algorithm.overlap=true", "algorithm.updates_per_batch=2", "algorithm.epochs=3"],
     ["algorithm.overlap = true with 6 optimizer steps per batch", "updates_per_batch 2 x epochs 3"],
     ["algorithm.updates_per_batch=1", "algorithm.epochs=1"]),
    (["algorithm.loss=gspo"], ["algorithm.loss = gspo with algorithm.aggregation = token_mean", "sequence_mean"],
     ["algorithm.aggregation=sequence_mean"]),
    (["algorithm.loss=cispo", "algorithm.dual_clip=3"], ["algorithm.dual_clip = 3 has no effect", "cispo"],
     ["algorithm.dual_clip=null"]),
    (["algorithm.importance_weight=sequence", "algorithm.importance_cap=null"],
     ["algorithm.importance_weight = sequence", "algorithm.importance_cap = null"], ["algorithm.importance_cap=2.0"]),
    (["algorithm.importance_weight=sequence", "algorithm.epochs=2"],
     ["algorithm.importance_weight = sequence compares old log-probs", "2 optimizer steps per batch"],
     ["algorithm.old_logprobs=recompute"]),
    (["algorithm.rejection.rule=geometric", "algorithm.updates_per_batch=4"],
     ["algorithm.rejection.rule = geometric compares old log-probs", "4 optimizer steps per batch"],
     ["algorithm.old_logprobs=interpolate"]),
    (["algorithm.rejection.high=2"], ["algorithm.rejection.high = 2 has no effect", "rule = none"],
     ["algorithm.rejection.rule=icepop"]),
    (["algorithm.rejection.rule=off_policy"], ["algorithm.rejection.rule = off_policy needs its bound"],
     ["algorithm.rejection.high=0.1"]),
    (["algorithm.rejection.rule=off_policy", "algorithm.rejection.high=0.1", "algorithm.rejection.low=0.5"],
     ["algorithm.rejection.low = 0.5 has no effect"], ["algorithm.rejection.low=null"]),
    (["algorithm.rejection.rule=icepop", "algorithm.rejection.high=0.4"],
     ["algorithm.rejection.low = 0.5 is not below algorithm.rejection.high = 0.4"], ["algorithm.rejection.low=0.2"]),
    (["trainer.optimizer.warmup_steps=300", "algorithm.epochs=3"],
     ["warmup_steps = 300 covers all 300 optimizer steps of the run"], ["trainer.optimizer.warmup_steps=299"]),
    (["algorithm.kl.reference_offload=true"], ["reference_offload = true", "algorithm.kl.beta = 0"],
     ["algorithm.kl.beta=0.01"]),
    (["algorithm.distillation.coef=2.0"], ["algorithm.distillation.coef = 2.0 has no effect", "teacher = null"],
     ["algorithm.distillation.teacher=a/folder"]),
    (["reward.functions=[{function: exact_match, weight: 0}]"],
     ["every weight of reward.functions is 0, and there is no teacher", "or algorithm.distillation.teacher"],
     ["algorithm.distillation.teacher=a/folder"]),
    (["reward.functions=[{function: exact_match, weight: 0}]", "algorithm.distillation.teacher=configs/tiny/model",
      "algorithm.dynamic_sampling.enabled=true"],
     ["dynamic_sampling.enabled = true, and every weight of reward.functions is 0"],
     ["algorithm.dynamic_sampling.enabled=false"]),
    (["algorithm.distillation.estimator=k3", "algorithm.distillation.teacher=configs/tiny/model"],
     ["algorithm.distillation.estimator = k3 has no effect", "form = advantage"],
     ["algorithm.distillation.form=loss"]),
]


@pytest.mark.parametrize("words, fragments, remedy", CASES, ids=[" ".join(words) for words, _, _ in CASES])
def test_rule(run_yaml, tiny_architecture, cli, words, fragments, remedy):
    code, out, err = cli("plan", run_yaml, "--device", "cpu", *words)
    assert code == 2 and out == ""
    for fragment in fragments:
        assert fragment in err
    check(load_config(run_yaml, [*words, *remedy]), tiny_architecture, "cpu")


def test_the_untouched_config_passes(run_yaml, tiny_architecture):
    check(load_config(run_yaml), tiny_architecture, "cpu")


@pytest.mark.parametrize("words, warned", [
    (["algorithm.max_staleness=2"], True), (["algorithm.max_staleness=1"], False), ([], False),
    (["algorithm.max_staleness=2", "algorithm.old_logprobs=recompute"], False),
    (["algorithm.max_staleness=2", "algorithm.old_logprobs=interpolate"], False),
    (["algorithm.max_staleness=2", "algorithm.epochs=2"], False),
])
def test_a_run_without_a_clip_on_stale_tokens_is_warned(run_yaml, words, warned):
    found = cautions(load_config(run_yaml, words).config)
    assert [code for code, _ in found] == ["NO_CLIP"] * warned
    assert not warned or "algorithm.max_staleness = 2 with algorithm.old_logprobs = none" in found[0][1]


@pytest.mark.parametrize("words, warned", [
    (["reward.functions=[{function: math}]"], True), ([], False),
    (["reward.functions=[{function: math}]", "reward.on_error=zero"], False),
    (["reward.functions=[{function: format, args: {pattern: x}}, {function: math}]"], True),
])
def test_a_run_that_one_answer_can_end_is_warned(run_yaml, words, warned):
    found = cautions(load_config(run_yaml, words).config)
    assert [code for code, _ in found] == ["MATH_STOP"] * warned
    assert not warned or "use reward.on_error=zero" in found[0][1]


@pytest.mark.parametrize("template", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("configs/*/*.yaml")
                                            if "\nreward:" in path.read_text(encoding="utf-8")))
def test_no_template_is_warned_of_its_rewards(template):
    assert "MATH_STOP" not in [code for code, _ in cautions(load_config(str(ROOT / template)).config)]


def test_all_problems_at_once(run_yaml, cli):
    code, _, err = cli("plan", run_yaml, "trainer.tp=3", "rollout.tp=3", "trainer.pp=5")
    assert code == 2 and "3 errors in" in err
    assert all(key in err for key in ("trainer.tp = 3", "rollout.tp = 3", "trainer.pp = 5"))


@pytest.mark.parametrize("change, words, fragments", [
    ({"intermediate_size": 386}, ["trainer.tp=4"], ["trainer.tp = 4 does not divide the 386 columns"]),
    ({"intermediate_size": 386}, ["rollout.tp=4"], ["rollout.tp = 4 does not divide the 386 columns"]),
    ({"num_attention_heads": 12, "num_key_value_heads": 4}, ["rollout.tp=6"],
     ["rollout.tp = 6 neither divides the 4 KV heads nor is a multiple of them", "use rollout.tp = 1, 2 or 4"]),
    ({"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}, ["rollout.tp=8"],
     ["rollout.tp = 8 exceeds the 4 KV heads", "use rollout.tp = 1, 2 or 4"]),
    ({"num_attention_heads": 12, "num_key_value_heads": 3}, ["trainer.tp=3", "rollout.tp=3"],
     ["rollout.tp = 3 does not divide the padded vocabulary of 128"]),
    ({"head_dim": 16}, [], ["vLLM's CPU attention does not take the model's head size 16", "32, 64"])])
def test_rules_about_the_model(run_yaml, change, words, fragments):
    architecture = from_hf_dict(TINY_MODEL | change)
    with pytest.raises(UserError) as error:
        check(load_config(run_yaml, words), architecture, "cpu")
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize("change, words, fragments", [
    ({"num_key_value_heads": 1}, [], ["trainer.tp = 2 does not divide the teacher's 1 KV heads", "use trainer.tp = 1"]),
    ({"num_attention_heads": 12, "num_key_value_heads": 6}, ["trainer.tp=4"],
     ["trainer.tp = 4 does not divide the teacher's 6 KV heads", "use trainer.tp = 1 or 2, which also divides"]),
    ({"num_hidden_layers": 1}, [], ["trainer.pp = 2 has more stages than the teacher has layers (1)"]),
    ({"num_hidden_layers": 6}, ["trainer.vpp=2"],
     ["trainer.pp x trainer.vpp = 2 x 2 does not divide the teacher's 6 layers", "use trainer.vpp = 1"]),
    ({"vocab_size": 64}, [], ["the teacher has 64 token ids and the policy 96"]),
    ({"max_position_embeddings": 16}, [], ["max_new_tokens = 24 exceeds the teacher's 16 positions"])])
def test_a_teacher_must_run_where_the_policy_does(run_yaml, tmp_path, cli, change, words, fragments):
    """A teacher of other sizes, otherwise the policy's own folder, which passes."""
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    words = [f"algorithm.distillation.teacher={teacher}", *words]
    (teacher / "config.json").write_text(json.dumps(TINY_MODEL | {"num_hidden_layers": 4}))
    assert cli("plan", run_yaml, "--device", "cpu", *words)[0] == 0
    (teacher / "config.json").write_text(json.dumps(TINY_MODEL | change))
    code, out, err = cli("plan", run_yaml, "--device", "cpu", *words)
    assert code == 2 and out == ""
    for fragment in [*fragments, "algorithm.distillation.teacher"]:
        assert fragment in err


def test_a_missing_teacher_is_told_with_its_key(run_yaml, cli):
    code, _, err = cli("plan", run_yaml, "--device", "cpu", "algorithm.distillation.teacher=models/none")
    assert code == 2 and "the model folder models/none does not exist" in err
    assert "set algorithm.distillation.teacher to" in err and str(Path.cwd() / "models/none") in err


def test_kv_heads_below_rollout_tp_are_legal(run_yaml, tiny_architecture):
    """vLLM replicates KV heads: 4 KV heads on TP 8."""
    check(load_config(run_yaml, ["rollout.tp=8"]), tiny_architecture, "cpu")


def test_context_parallel_and_uneven_pipelines_are_legal_on_a_cpu(run_yaml, tiny_architecture):
    check(load_config(run_yaml, ["trainer.cp=2", "trainer.pp=3"]), tiny_architecture, "cpu")


def test_gpus_are_counted_on_a_gpu_machine_only(run_yaml, tiny_architecture):
    loaded = load_config(run_yaml, ["rollout.replicas=2", "rollout.tp=2"])
    check(loaded, tiny_architecture, "cpu", gpus=0)
    check(loaded, tiny_architecture, "gpu", gpus=8)
    with pytest.raises(UserError, match=r"needs 8 GPUs \(training: tp 2 x pp 2 .* = 4; rollout: .* = 4\).* has 7"):
        check(loaded, tiny_architecture, "gpu", gpus=7)


def test_fp32_under_context_parallelism_is_refused_on_gpus_only(run_yaml, tiny_architecture):
    words = ["trainer.cp=2", "trainer.pp=1"]
    check(load_config(run_yaml, words), tiny_architecture, "cpu")
    with pytest.raises(UserError, match="trainer.dtype = fp32 with trainer.cp = 2: on a GPU") as error:
        check(load_config(run_yaml, words), tiny_architecture, "gpu", gpus=8)
    assert "override 'trainer.cp=2'" in str(error.value) and "or trainer.cp = 1" in str(error.value)
    for remedy in (["trainer.dtype=bf16", "rollout.dtype=bf16"], ["trainer.cp=1"]):
        check(load_config(run_yaml, words + remedy), tiny_architecture, "gpu", gpus=8)


def test_shared_prompts_are_refused_on_gpus(run_yaml, tiny_architecture):
    words = ["trainer.share_prompts=on"]
    check(load_config(run_yaml, words), tiny_architecture, "cpu")
    with pytest.raises(UserError, match="trainer.share_prompts = on, but on a GPU Transformer Engine") as error:
        check(load_config(run_yaml, words), tiny_architecture, "gpu", gpus=8)
    assert "override 'trainer.share_prompts=on'" in str(error.value)
    check(load_config(run_yaml, ["trainer.share_prompts=auto"]), tiny_architecture, "gpu", gpus=8)


def test_rules_that_are_the_cpus_do_not_bind_gpus(run_yaml):
    architecture = from_hf_dict(TINY_MODEL | {"head_dim": 16})
    check(load_config(run_yaml, ["rollout.kv_cache_gb=1e-5"]), architecture, "gpu", gpus=8)


def test_missing_or_broken_files(run_yaml, cli, tmp_path):
    code, _, err = cli("plan", run_yaml, "model.path=models/none")
    assert code == 2 and "the model folder models/none does not exist" in err
    assert str(Path.cwd() / "models/none") in err and "model.path" in err
    code, _, err = cli("plan", run_yaml, f"model.path={run_yaml}")
    assert code == 2 and "is a file, not a folder" in err
    empty = tmp_path / "empty"
    empty.mkdir()
    code, _, err = cli("plan", run_yaml, f"model.path={empty}")
    assert code == 2 and "holds no config.json" in err
    (empty / "config.json").write_text(json.dumps(TINY_MODEL)[:50])
    code, _, err = cli("plan", run_yaml, f"model.path={empty}")
    assert code == 2 and "is not JSON" in err and "cut short" in err


@pytest.mark.parametrize("value, fragments", [
    ("none.jsonl", ["the data file none.jsonl does not exist"]), (".", ["is a folder"]),
    ("table.csv", ["has the suffix '.csv'", "use .jsonl or .parquet"]), ("zero.jsonl", ["is empty"])])
def test_data_files(run_yaml, tmp_path, monkeypatch, value, fragments):
    from launch.config.locate import data_file

    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "zero.jsonl").write_text("")
    with pytest.raises(UserError) as error:
        data_file(load_config(run_yaml, [f"data.eval={value}"]), "data.eval")
    for fragment in (*fragments, str(tmp_path), "data.eval"):
        assert fragment in str(error.value)
