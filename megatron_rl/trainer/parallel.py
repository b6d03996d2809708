"""Process groups of a training rank: torch.distributed, then Megatron's groups, checked against the plan."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from launch.plan.plan import Plan, RankCoordinates
from megatron_rl.stores import meet, tcp_store
from megatron_rl.trainer import cpu

with cpu.nothing_compiled():        # this is the first module that a training rank imports
    from megatron.core import parallel_state, tensor_parallel


def initialise(plan: Plan, rank: int, address: str, port: int, timeout_s: float, threads: int = 1,
               seed: int = 0, collective_timeout_s: float | None = None) -> None:
    """Join the training ranks' process group and build Megatron's groups. Call this once per process, on all ranks.

    Args:
        rank: global training rank, an index into `plan.training.ranks`.
        address, port: rendezvous on rank 0's node.
        timeout_s: deadline of the rendezvous.
        threads: CPU threads of this rank (CPU runs).
        seed: seed of weight initialisation. As Megatron requires, it differs over TP and PP ranks and is equal over DP
            and CP.
        collective_timeout_s: deadline of every later collective; default `timeout_s`.

    Raises:
        TimeoutError: not all ranks arrived in time.
        RuntimeError: Megatron derived other coordinates than the plan.
    """
    cpu.install()
    training = plan.training
    device = _use_device(plan.device, threads)
    timeout = timedelta(seconds=timeout_s)
    collective_timeout_s = collective_timeout_s or timeout_s
    try:
        store = tcp_store(address, port, host=rank == 0, timeout=timeout)
        meet(store, rank, [f"training rank {each.rank}" for each in training.ranks], timeout)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=training.world_size,
            timeout=timedelta(seconds=collective_timeout_s), device_id=device if device.type == "cuda" else None)
    except dist.DistStoreError as error:
        raise TimeoutError(f"training rank {rank} waited {timeout_s:.0f} s at {address}:{port} for "
                           f"{training.world_size} ranks: {error}") from error
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=training.tp, pipeline_model_parallel_size=training.pp,
        virtual_pipeline_model_parallel_size=training.vpp if training.vpp > 1 else None,
        context_parallel_size=training.cp, order="tp-cp-ep-dp-pp",
        distributed_timeout_minutes=collective_timeout_s / 60)
    derived = coordinates()
    if derived != training.ranks[rank]:
        raise RuntimeError(f"the plan puts rank {rank} at {training.ranks[rank]}, Megatron at {derived}")
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def coordinates() -> RankCoordinates:
    """This process's coordinates according to Megatron's groups."""
    return RankCoordinates(
        rank=dist.get_rank(), tp=parallel_state.get_tensor_model_parallel_rank(),
        cp=parallel_state.get_context_parallel_rank(), dp=parallel_state.get_data_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank())


def device_of_rank() -> torch.device:
    """The device of this rank's tensors."""
    return torch.device("cpu") if cpu.needed() else torch.device("cuda", torch.cuda.current_device())


def _use_device(kind: str, threads: int) -> torch.device:
    if kind == "cpu":
        torch.set_num_threads(threads)
    elif cpu.needed():
        raise RuntimeError("the plan is for GPUs, but torch sees no CUDA device here")
    return device_of_rank()
