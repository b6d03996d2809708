"""Trainer ranks and rollout workers of a plan as member processes, with the handles that a `SyncCoordinator` needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from launch import envvars
from launch.config.resolved import ResolvedConfig
from launch.plan.plan import Placement, Plan
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.weights import EngineWeights
from megatron_rl.sync_bench.members import Host, Member, Members, together
from megatron_rl.weight_sync.coordinator import Endpoint
from megatron_rl.weight_sync.protocol import Staging

RANK, WORKER = "megatron_rl.sync_bench.rank:TrainerRank", "megatron_rl.sync_bench.worker:RolloutWorker"
RATES, LANE = "megatron_rl.sync_bench.rates:RateProbe", "megatron_rl.sync_bench.lane_probe:LaneProbe"
PRELOAD = ("torch", "torch.distributed", "megatron_rl.weight_sync.ends.sender",
           "megatron_rl.weight_sync.ends.vllm_plugin", "vllm.engine.arg_utils",
           "vllm.model_executor.model_loader.utils", "vllm.model_executor.models.llama",
           "vllm.model_executor.models.qwen2")
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
BUILD_S = 300.0
"""Time limit for a process to import vLLM and build its model, on a machine that is busy with fifteen others."""


class PipedTrainer:
    """A training rank, as the coordinator sees it."""

    def __init__(self, member: Member, timeout_s: float) -> None:
        self.member, self._timeout_s = member, timeout_s

    def sync_describe(self):
        return self.member.call("sync_describe", timeout_s=BUILD_S)

    def sync_open(self, part):
        return self.member.call("sync_open", part, timeout_s=4 * self._timeout_s)

    def sync_send(self, epoch):
        return self.member.call("sync_send", epoch, timeout_s=2 * self._timeout_s)

    def sync_discard(self, epoch, reason):
        return self.member.call("sync_discard", epoch, reason, timeout_s=2 * self._timeout_s)


class PipedEngine:
    """An engine without vLLM's executor. The coordinator calls `weights`, which reach their workers over pipes."""

    def __init__(self, workers: Sequence[Member], replica: int, dtype: str, timeout_s: float) -> None:
        self.workers, self._timeout_s = workers, timeout_s
        self.weights = EngineWeights(cast(VllmEngine, self), replica, len(workers), dtype, workers[0].host.address)
        self.unfinished = 0                                  # this engine never has requests

    async def stage(self, staging: Staging) -> None:
        """From now on, receive in place or into a second copy. The next sync needs a new set-up."""
        await self.rpc("stage", staging)
        self.weights.shadow = staging == "shadow"

    async def rpc(self, method: str, *args: Any) -> list:
        timeout_s = BUILD_S if method == "sync_layout" else 4 * self._timeout_s
        return await together(worker.call(method, *args, timeout_s=timeout_s) for worker in self.workers)

    async def open_transfer(self, init_info: dict) -> None:
        await self.rpc("init_weight_transfer_engine", init_info)

    async def update(self, update_info: dict) -> None:
        await self.rpc("update_weights", update_info)

    async def label_version(self, version: str) -> None:
        """Do nothing: there is no engine core that labels tokens."""

    async def reset_prefix_cache(self, *, preempt: bool) -> bool:
        return True


@dataclass(frozen=True)
class World:
    """Both partitions, started."""

    trainers: tuple[PipedTrainer, ...]
    engines: tuple[PipedEngine, ...]
    endpoints: tuple[Endpoint, ...]

    async def on_ranks(self, method: str, *args: Any) -> list:
        """Call a method of all training ranks at the same time. Returns the answers by rank."""
        return await together(each.member.call(method, *args, timeout_s=BUILD_S) for each in self.trainers)

    async def on_workers(self, method: str, *args: Any) -> list:
        """Call a method of all rollout workers at the same time. Returns the answers by replica, then worker."""
        return await together(worker.call(method, *args, timeout_s=BUILD_S)
                              for engine in self.engines for worker in engine.workers)


def start_world(members: Members, config: ResolvedConfig, plan: Plan, model_folder: Path, placement: Placement,
                hosts: Mapping[str, Host], *, rank_kind: str = RANK, worker_kind: str = WORKER) -> World:
    """Start all training ranks and rollout workers of a plan.

    Args:
        model_folder: only its `config.json` is read.
        placement: node and GPU of each process.
        hosts: by node of the placement.
        rank_kind, worker_kind: other objects with the same methods.
    """
    timeout_s, dtype = config.weight_sync.timeout_s, TORCH_NAMES[config.trainer.dtype]
    device = "cuda" if plan.device == "gpu" else "cpu"

    def start(name: str, role: envvars.Role, node: str, gpu: int | None, kind: str, *args: Any) -> Member:
        variables = envvars.environment(role, plan.device, config, job=f"sync-bench-{node}",
                                        gpus=() if gpu is None else (gpu,), interface=placement.interface(node),
                                        address=hosts[node].address)
        return members.start(name, hosts[node], kind, *args, device, variables=variables)

    trainers, endpoints = [], []
    for each in placement.training:
        host = hosts[each.node]
        member = start(f"trainer rank {each.rank}", "trainer", each.node, each.gpu, rank_kind, plan.architecture,
                       plan.training, each.rank, dtype, host.address)
        trainers.append(PipedTrainer(member, timeout_s))
        endpoints.append(Endpoint(host.address, each.port))
    engines = []
    for engine, seat in zip(plan.rollout.engines, placement.rollout, strict=True):
        workers = [start(f"engine {engine.replica} worker {worker}", "rollout",
                         seat.nodes[worker] if seat.nodes else seat.node, seat.gpus[worker] if seat.gpus else None,
                         worker_kind, str(model_folder), engine.tp, worker, dtype) for worker in range(engine.tp)]
        engines.append(PipedEngine(workers, engine.replica, dtype, timeout_s))
    return World(tuple(trainers), tuple(engines), tuple(endpoints))
