"""The processes of a placement: where each one runs and its environment. Pure.

A training rank is one process. An engine has one process for each of its GPUs. As with vLLM's workers, each process
sees all GPUs of the engine on its node, and the i-th process uses the i-th GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch import envvars
from launch.config.resolved import ResolvedConfig
from launch.plan.plan import Placement

NICS = "MEGATRON_RL_NICS"
"""Variable with the NIC next to each GPU of a process, in the order of CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True)
class PlacedProcess:
    """One process of a job."""

    process: str
    """`trainer-3`; `rollout-0.1` is the second process of the first engine."""
    role: envvars.Role
    node: str
    gpu: int | None
    nic: int | None
    visible: tuple[int, ...] = ()
    """GPUs that the process sees; its own is the `index`-th."""
    visible_nics: tuple[int, ...] = ()
    index: int = 0


def places(placement: Placement) -> tuple[PlacedProcess, ...]:
    """Every process of the placement: training ranks in order, then the engines."""
    found = [PlacedProcess(f"trainer-{each.rank}", "trainer", each.node, each.gpu, each.nic,
                   () if each.gpu is None else (each.gpu,), () if each.nic is None else (each.nic,))
             for each in placement.training]
    for engine in placement.rollout:
        nodes = engine.nodes or (engine.node,) * max(1, len(engine.gpus))
        for number, node in enumerate(nodes):
            mine = [rank for rank, other in enumerate(nodes) if other == node]
            found.append(PlacedProcess(
                f"rollout-{engine.replica}.{number}", "rollout", node,
                engine.gpus[number] if engine.gpus else None, engine.nics[number] if engine.nics else None,
                tuple(engine.gpus[rank] for rank in mine) if engine.gpus else (),
                tuple(engine.nics[rank] for rank in mine) if engine.nics else (), mine.index(number)))
    return tuple(found)


def variables(place: PlacedProcess, config: ResolvedConfig, placement: Placement, device: envvars.Device,
              mark: str) -> dict[str, str]:
    """Variables of this process, in addition to those that its node's supervisor inherited."""
    return {**envvars.environment(place.role, device, config, job=mark, gpus=place.visible,
                                  interface=placement.interface(place.node), address=placement.addresses[place.node],
                                  nics=placement.nics.get(place.node, ())),
            envvars.NODE: place.node, NICS: ",".join(map(str, place.visible_nics))}
