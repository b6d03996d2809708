"""Assigns the NICs of a node to rails: the GPUs of a rail and its NIC are under one PCI switch.

A DGX H100 has twelve RDMA devices: eight next to its eight GPUs, and four for storage and management. Device numbers do
not tell which GPU is nearest; the positions in the PCI tree do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from launch import envvars
from launch.cluster.rdma import Nic, PciPath
from launch.cluster.tree import common
from launch.files.waiting import listed
from launch.health.check import Check
from launch.slurm.profiles import Profile


def for_nccl(reports: Mapping[str, Sequence[Check]], nodes: Sequence[str], count: int, profile: Profile,
             say: Callable[[str], None] = lambda line: None) -> dict[str, tuple[str, ...]]:
    """Node -> names of the NICs for NCCL: from the site profile, else the `count` NICs that the preflight found next to
    the GPUs. {} if the user or the site sets NCCL_IB_HCA, or if the NICs of any node are unknown."""
    if profile.interfaces.nccl:
        return {node: tuple(profile.interfaces.nccl) for node in nodes}
    if envvars.get("NCCL_IB_HCA") or "NCCL_IB_HCA" in profile.environment:
        return {}
    found = {node: next((tuple(check.value) for check in reports[node] if check.name == "nic.rails"), ())
             for node in nodes}
    unclear = [node for node, names in found.items() if len(names) != count]
    if unclear and count:
        say(f"warning nic.rails: NCCL chooses its own NICs, because the NICs next to the GPUs of "
            f"{listed(unclear)} are unknown; list them in interfaces.nccl of the site profile")
    return {} if unclear else found


def candidates(active: Sequence[Nic], count: int, gbit_per_s: float) -> list[Nic]:
    """Active NICs that may serve one of `count` rails: those with the planned rate. If there are more than `count`,
    those of the one link layer that exactly `count` of them have."""
    fast = [nic for nic in active if nic.gbit_per_s >= gbit_per_s]
    if len(fast) > count:
        layers = Counter(nic.link_layer for nic in fast)
        fitting = [layer for layer, number in layers.items() if number == count]
        if len(fitting) == 1:
            return [nic for nic in fast if nic.link_layer == fitting[0]]
    return fast


def rails_of(nics: Sequence[Nic], count: int, gpus: Sequence[PciPath]) -> tuple[tuple[str, ...], str]:
    """(names of the NICs, one per rail, "") or ((), why they cannot be assigned).

    Args:
        nics: candidates, at least as many as rails, ordered by device number.
        count: number of rails in the plan. GPU `g` of `n` uses rail `g * count // n`.
        gpus: PCI path of each GPU, in the placement's order; () if unknown.
    """
    placed = bool(gpus) and all(gpus) and all(nic.pci for nic in nics)
    if not placed:
        if len(nics) == count:
            return tuple(nic.name for nic in nics), ""
        return (), f"{len(nics)} candidates ({_names(nics)}) whose positions in the PCI tree are unknown"
    near = {(rail, number): sum(common(gpu, nic.pci) for index, gpu in enumerate(gpus)
                                if index * count // len(gpus) == rail)
            for rail in range(count) for number, nic in enumerate(nics)}
    chosen: dict[int, int] = {}
    for rail, number in sorted(near, key=lambda pair: (-near[pair], pair)):     # the nearest pairs first
        if rail not in chosen and number not in chosen.values():
            chosen[rail] = number
    left = [number for number in range(len(nics)) if number not in chosen.values()]
    for rail in range(count):
        rivals = [number for number in left if near[rail, number] >= near[rail, chosen[rail]]]
        if rivals:
            return (), f"{_names([nics[number] for number in (chosen[rail], *rivals)])} are equally near to the GPUs " \
                       f"of rail {rail}"
    return tuple(nics[chosen[rail]].name for rail in range(count)), ""


def _names(nics: Sequence[Nic]) -> str:
    return ", ".join(nic.name for nic in nics)
