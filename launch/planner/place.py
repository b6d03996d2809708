"""Placement: binds a plan to hosts and GPUs for one attempt. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launch.errors import UserError
from launch.planner.plan import EnginePlacement, Placement, Plan, RankPlacement
from launch.ports import Ports

LOCAL_NODE = "local"
LOOPBACK = "127.0.0.1"


def place_local(plan: Plan, attempt: int, ports: Ports, *, gpus: Sequence[int] = (), node: str = LOCAL_NODE,
                address: str = LOOPBACK) -> Placement:
    """Everything on one machine: training ranks first, in rank order, then the engines, each GPU used once.

    Args:
        plan: the plan; with `device == "cpu"` nobody gets a GPU.
        attempt: number of the attempt.
        ports: the attempt's block of ports.
        gpus: indices of this machine's GPUs that may be used, in order (GPU plans only).
        node, address: Ray's name of this machine and where its processes listen.

    Raises:
        UserError: fewer GPUs than the plan needs, or more training ranks than the port table has lanes.
    """
    training, engines = plan.training.ranks, plan.rollout.engines
    rollout_gpus = sum(engine.tp for engine in engines)
    free = list(gpus)
    if plan.device == "gpu" and len(set(free)) < len(training) + rollout_gpus:
        raise UserError(
            f"the plan needs {len(training) + rollout_gpus} GPUs ({len(training)} for training, {rollout_gpus} for "
            f"rollout) and this machine offers {len(set(free))}",
            where="trainer.tp x pp x cp x dp, rollout.replicas x rollout.tp",
            fix="lower these sizes, use a larger machine, or run on the CPU with --device cpu")
    on_gpu = plan.device == "gpu"
    ranks = tuple(RankPlacement(rank=each.rank, node=node, gpu=free.pop(0) if on_gpu else None,
                                port=ports.lane(each.rank)) for each in training)
    replicas = tuple(EnginePlacement(replica=engine.replica, node=node,
                                     gpus=tuple(free.pop(0) for _ in range(engine.tp)) if on_gpu else ())
                     for engine in engines)
    return Placement(attempt=attempt, plan_fingerprint=plan.fingerprint(), nodes=(node,), addresses={node: address},
                     training=ranks, rollout=replicas, master_port=ports.rendezvous)
