"""Trainer ranks and rollout workers of a plan as member processes, with the handles that a `SyncCoordinator` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import envvars
from launch.config.schema import RunConfig
from launch.planner.plan import Plan
from launch.ports import Ports
from megatron_rl.rollout.weights import EngineWeights
from megatron_rl.sync_bench.members import Host, Member, Members, together
from megatron_rl.weight_sync.coordinator import Endpoint

RANK, WORKER = "megatron_rl.sync_bench.rank:TrainerRank", "megatron_rl.sync_bench.worker:RolloutWorker"
RATES, LANE = "megatron_rl.sync_bench.rates:RateProbe", "megatron_rl.sync_bench.lane_probe:LaneProbe"
PRELOAD = ("torch", "torch.distributed", "megatron_rl.weight_sync.sender", "megatron_rl.weight_sync.vllm_plugin",
           "vllm.engine.arg_utils", "vllm.model_executor.model_loader.utils",
           "vllm.model_executor.models.llama", "vllm.model_executor.models.qwen2")
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
BUILD_S = 300.0
"""For a process to import vLLM and build its model, on a machine that is busy with fifteen others."""


class TrainerHandle:
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


class EngineHandle:
    """An engine, as the coordinator sees it: the real `EngineWeights` over pipes instead of vLLM's executor."""

    def __init__(self, workers: Sequence[Member], replica: int, dtype: str, timeout_s: float) -> None:
        self.workers, self._timeout_s = workers, timeout_s
        self.weights = EngineWeights(self, replica, len(workers), dtype, workers[0].host.address)
        self.unfinished = 0                                  # requests: nobody asks anything of this engine

    async def rpc(self, method: str, *args: Any) -> list:
        timeout_s = BUILD_S if method == "sync_layout" else 4 * self._timeout_s
        return await together(worker.call(method, *args, timeout_s=timeout_s) for worker in self.workers)

    async def open_transfer(self, init_info: dict) -> None:
        await self.rpc("init_weight_transfer_engine", init_info)

    async def update(self, update_info: dict) -> None:
        await self.rpc("update_weights", update_info)

    async def label_version(self, version: str) -> None:
        """There is no engine core that would label tokens."""

    async def reset_prefix_cache(self, *, preempt: bool) -> bool:
        return True

    def sync_describe(self, canonical):
        return self.weights.describe(canonical)

    def sync_open(self, part):
        return self.weights.open(part)

    def sync_prepare(self, epoch):
        return self.weights.prepare(epoch)

    def sync_receive(self, epoch):
        return self.weights.receive(epoch)

    def sync_commit(self, epoch, version):
        return self.weights.commit(epoch, version)

    def sync_discard(self, epoch, reason):
        return self.weights.discard(epoch, reason)


@dataclass(frozen=True)
class World:
    """Both partitions, started."""

    trainers: tuple[TrainerHandle, ...]
    engines: tuple[EngineHandle, ...]
    endpoints: tuple[Endpoint, ...]

    async def on_ranks(self, method: str, *args: Any) -> list:
        """A method of every training rank at the same time; the answers by rank."""
        return await together(each.member.call(method, *args, timeout_s=BUILD_S) for each in self.trainers)

    async def on_workers(self, method: str, *args: Any) -> list:
        """A method of every rollout worker at the same time; the answers by replica, then worker."""
        return await together(worker.call(method, *args, timeout_s=BUILD_S)
                              for engine in self.engines for worker in engine.workers)


def start_world(members: Members, config: RunConfig, plan: Plan, model_folder: Path, *, rank_hosts: Sequence[Host],
                engine_hosts: Sequence[Host], ports: Mapping[str, Ports], rank_kind: str = RANK,
                worker_kind: str = WORKER) -> World:
    """Start every training rank and every rollout worker of a plan.

    Args:
        model_folder: its `config.json` is all that is read.
        rank_hosts, engine_hosts: where each rank and each engine lives.
        ports: block of ports of each host, by its name; rank i of a host takes the i-th lane.
        rank_kind, worker_kind: other objects with the same methods.
    """
    timeout_s, dtype, gpus = config.weight_sync.timeout_s, TORCH_NAMES[config.trainer.dtype], iter(range(1 << 16))

    def start(name: str, role: str, host: Host, kind: str, *args: Any) -> Member:
        on_gpu = plan.device == "gpu"
        variables = envvars.environment(role, plan.device, config, job=f"sync-bench-{host.name}",
                                        gpus=(next(gpus),) if on_gpu else (), address=host.address)
        return members.start(name, host, kind, *args, "cuda" if on_gpu else "cpu", variables=variables)

    trainers, endpoints, on_host = [], [], dict.fromkeys(ports, 0)
    for each, host in zip(plan.training.ranks, rank_hosts, strict=True):
        member = start(f"trainer rank {each.rank}", "trainer", host, rank_kind, plan.architecture, plan.training,
                       each.rank, dtype, host.address)
        trainers.append(TrainerHandle(member, timeout_s))
        endpoints.append(Endpoint(host.address, ports[host.name].lane(on_host[host.name])))
        on_host[host.name] += 1
    engines = []
    for each, host in zip(plan.rollout.engines, engine_hosts, strict=True):
        workers = [start(f"engine {each.replica} worker {worker}", "rollout", host, worker_kind, str(model_folder),
                         each.tp, worker, dtype) for worker in range(each.tp)]
        engines.append(EngineHandle(workers, each.replica, dtype, timeout_s))
    return World(tuple(trainers), tuple(engines), tuple(endpoints))
