"""The cases of `make bench-sync`: the model, the layouts on hosts, and the bound and prediction of each case."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from launch.coefficients.sync import SyncCoefficients
from launch.config.auto import on_this_machine
from launch.config.resolved import ResolvedConfig
from launch.config.schema import RunConfig
from launch.fabric.choose import SyncPrediction
from launch.fabric.lanes import Fabric, Place
from launch.fabric.seated import Seats
from launch.model.hf_config import from_hf_config
from launch.plan.layouts import RolloutLayout, TrainingLayout
from launch.plan.plan import Plan
from launch.planner.from_config import plan_of

RANKS_A_HOST = 2
MIB = 1 << 20
BESIDE = 1e9
"""bytes/s between ranks of a host, over the loopback interface."""
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048,
    "num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 5450,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16"}
"""64 MiB in bf16 with the proportions of a Llama layer. Both sides pad the vocabulary, differently."""
QUICK_MODEL = MODEL | {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
                       "num_key_value_heads": 2, "vocab_size": 1090}


@dataclass(frozen=True)
class Case:
    """Trainers and engines on hosts, with two ranks per host."""

    pp: int
    dp: int
    engines: int
    baselines: bool = True
    """Whether the common methods are measured too."""
    tp: int = 2
    route: str = "auto"

    @property
    def trainer_hosts(self) -> int:
        return self.tp * self.pp * self.dp // RANKS_A_HOST

    @property
    def hosts(self) -> int:
        return self.trainer_hosts + self.engines

    @property
    def name(self) -> str:
        return f"{self.trainer_hosts}+{self.engines}"

    @property
    def layout(self) -> str:
        sizes = (("TP", self.tp), ("PP", self.pp), ("DP", self.dp))
        return " ".join(f"{word}{size}" for word, size in sizes if size > 1) + f" -> {self.engines} x TP{self.tp}"


CASES = (Case(2, 2, 4), Case(2, 1, 6), Case(1, 1, 7, route="tree"), Case(1, 1, 1, False),
         Case(1, 1, 2, False, route="tree"), Case(1, 1, 4, False, route="tree"))
"""The last three only show how the time of the tree grows with the number of receivers."""
QUICK = (Case(1, 1, 1),)


@dataclass(frozen=True)
class Setup:
    """A case with its model, on NICs of a given rate."""

    case: Case
    folder: Path
    """Folder of the model, with only a `config.json`."""
    rate_bits: float
    bucket_bytes: int
    timeout_s: float

    @cached_property
    def config(self) -> ResolvedConfig:
        """The parts of a configuration that a sync reads."""
        case = self.case
        return on_this_machine(RunConfig.model_validate({
            "run": {"name": "sync-bench", "steps": 1},
            "model": {"path": str(self.folder), "init": "random"},
            "trainer": {"tp": case.tp, "pp": case.pp, "dp": case.dp, "dtype": "bf16", "optimizer": {"lr": 1e-3},
                        "token_budget": 256},
            "rollout": {"tp": case.tp, "replicas": case.engines, "dtype": "bf16", "max_prompt_tokens": 16,
                        "max_new_tokens": 16},
            "algorithm": {"group_size": 4, "prompts_per_step": 4},
            "reward": {"functions": [{"function": "exact_match"}]},
            "data": {"train": "unused.jsonl"},
            "weight_sync": {"bucket_mb": self.bucket_bytes / MIB, "timeout_s": self.timeout_s}}))

    @cached_property
    def plan(self) -> Plan:
        return plan_of(self.config, from_hf_config(self.folder), "cpu")

    def host_of_rank(self, rank: int) -> int:
        return rank // RANKS_A_HOST

    def host_of_engine(self, replica: int) -> int:
        return self.case.trainer_hosts + replica

    @property
    def fabric(self) -> Fabric:
        """Hosts with one NIC. The ranks of a host are neighbours."""
        return Fabric(gpus_per_node=RANKS_A_HOST, nics_per_node=1, nic_bandwidth=self.rate_bits / 8,
                      nvlink_bandwidth=BESIDE, rails=1)

    @property
    def seats(self) -> Seats:
        """Seats of all ranks, in the form that the coordinator needs."""
        return Seats(self.fabric, tuple(Place(self.host_of_rank(each.rank), each.rank % RANKS_A_HOST)
                                        for each in self.plan.training.ranks),
                     {(each.replica, worker): Place(self.host_of_engine(each.replica), worker)
                      for each in self.plan.rollout.engines for worker in range(each.tp)})

    def predicted(self, coefficients: SyncCoefficients, route: str = "auto") -> SyncPrediction:
        """Routes, bound and predicted times on this fabric."""
        case = self.case
        return SyncPrediction(self.plan.architecture, TrainingLayout(tp=case.tp, pp=case.pp, dp=case.dp),
                              RolloutLayout(tp=case.tp, replicas=case.engines), self.fabric, coefficients,
                              weight_bytes=2, rollout_precision="bf16", lora_rank=0, route=route,
                              bucket_bytes=self.bucket_bytes)


def write_model(folder: Path, values: dict) -> Path:
    """A model folder without weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder
