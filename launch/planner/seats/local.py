"""Placements that need no search: on this machine, and of a CPU job on the nodes of an allocation. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.errors import UserError
from launch.plan.plan import EnginePlacement, Placement, Plan, RankPlacement
from launch.ports import Ports

LOCAL_NODE = "local"
LOOPBACK = "127.0.0.1"


def place_local(plan: Plan, attempt: int, ports: Ports, *, gpus: Sequence[int] = (), node: str = LOCAL_NODE,
                address: str = LOOPBACK) -> Placement:
    """Place everything on one machine: training ranks first, in rank order, then the engines. Each GPU is used once.

    Args:
        plan: the plan; with `device == "cpu"` no process gets a GPU.
        attempt: number of the attempt.
        ports: the attempt's block of ports.
        gpus: indices of this machine's GPUs that may be used, in order (GPU plans only).
        node, address: Ray's name of this machine, and the address on which its processes listen.

    Raises:
        UserError: there are fewer GPUs than the plan needs, or more training ranks than the port table has lanes.
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
                     training=ranks, rollout=replicas, master_port=ports.rendezvous, rewards=(node,))


def place_cpu(plan: Plan, attempt: int, nodes: Sequence[str], training_nodes: int, addresses: Mapping[str, str],
              ports: Mapping[str, Ports], interfaces: Mapping[str, str] | None = None) -> Placement:
    """Place a job without GPUs on several nodes. The first `training_nodes` nodes get equal runs of consecutive
    training ranks, so that TP groups stay together. The engines are dealt out to the other nodes, or to all if none are
    left.

    Args:
        plan: a plan with `device == "cpu"`.
        nodes: the nodes in the order of use. The first one gets rank 0, the driver and Ray's head.
        addresses, ports, interfaces: as in `launch.planner.seats.cluster.bind`.

    Raises:
        UserError: the ranks do not divide over `training_nodes` nodes, or there are fewer nodes.
    """
    count, engines = len(plan.training.ranks), plan.rollout.engines
    if not 1 <= training_nodes <= len(nodes) or count % training_nodes:
        raise UserError(f"{count} training ranks do not divide over {training_nodes} of {len(nodes)} node(s)",
                        where="placement.training_nodes", fix=f"use a divisor of {count}, at most {len(nodes)}")
    share = count // training_nodes
    others = list(nodes[training_nodes:]) or list(nodes)
    ranks = tuple(RankPlacement(rank=each.rank, node=nodes[each.rank // share], gpu=None,
                                port=ports[nodes[each.rank // share]].lane(each.rank % share))
                  for each in plan.training.ranks)
    replicas = tuple(EnginePlacement(replica=engine.replica, node=others[engine.replica % len(others)], gpus=())
                     for engine in engines)
    busy = {*(rank.node for rank in ranks), *(engine.node for engine in replicas)}
    used = tuple(node for node in nodes if node in busy)
    return Placement(attempt=attempt, plan_fingerprint=plan.fingerprint(), nodes=used,
                     addresses={node: addresses[node] for node in used}, training=ranks, rollout=replicas,
                     master_port=ports[nodes[0]].rendezvous, rewards=tuple(nodes[:training_nodes]),
                     spares=tuple(node for node in nodes if node not in busy),
                     ports={node: ports[node].base for node in used},
                     interfaces={node: interfaces[node] for node in used} if interfaces else {})
