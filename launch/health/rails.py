"""Which NIC of a node belongs to which rail: the GPUs of a rail and its NIC hang under one PCI switch.

A DGX H100 has twelve RDMA devices: eight beside its eight GPUs, and four for storage and management. Their numbers say
nothing of the GPU beside them; where they hang in the PCI tree does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from launch import envvars
from launch.cluster.rdma import Nic, PciPath
from launch.files.waiting import listed
from launch.health.check import Check
from launch.slurm.profiles import Profile


def for_nccl(reports: Mapping[str, Sequence[Check]], nodes: Sequence[str], count: int, profile: Profile,
             say: Callable[[str], None] = lambda line: None) -> dict[str, tuple[str, ...]]:
    """Node -> NICs for NCCL by name: the site's, else the `count` that the preflight found beside the GPUs. {} where
    the user or the site names them to NCCL, or where one node's are not known."""
    if profile.interfaces.nccl:
        return {node: tuple(profile.interfaces.nccl) for node in nodes}
    if envvars.get("NCCL_IB_HCA") or "NCCL_IB_HCA" in profile.environment:
        return {}
    found = {node: next((tuple(check.value) for check in reports[node] if check.name == "nic.rails"), ())
             for node in nodes}
    unclear = [node for node, names in found.items() if len(names) != count]
    if unclear and count:
        say(f"warning nic.rails: NCCL chooses among the NICs by itself, since those beside the GPUs of "
            f"{listed(unclear)} are not known; name them in interfaces.nccl of the site profile")
    return {} if unclear else found


def candidates(active: Sequence[Nic], count: int, gbit_per_s: float) -> list[Nic]:
    """Active NICs that may be one of `count` rails: of the planned rate, and, where that leaves more, of the one link
    layer that exactly so many of them have."""
    fast = [nic for nic in active if nic.gbit_per_s >= gbit_per_s]
    if len(fast) > count:
        layers = Counter(nic.link_layer for nic in fast)
        fitting = [layer for layer, number in layers.items() if number == count]
        if len(fitting) == 1:
            return [nic for nic in fast if nic.link_layer == fitting[0]]
    return fast


def rails_of(nics: Sequence[Nic], count: int, gpus: Sequence[PciPath]) -> tuple[tuple[str, ...], str]:
    """(the NIC of each rail by name, "") or ((), why they cannot be told apart).

    Args:
        nics: candidates, no fewer than rails, in the order of their numbers.
        count: rails of the plan; GPU `g` of `n` uses rail `g * count // n`.
        gpus: where each GPU hangs, in the placement's order; () where that is not known.
    """
    placed = bool(gpus) and all(gpus) and all(nic.pci for nic in nics)
    if not placed:
        if len(nics) == count:
            return tuple(nic.name for nic in nics), ""
        return (), f"{len(nics)} candidates ({_names(nics)}), and where they hang in the PCI tree is not known"
    near = {(rail, number): sum(_common(gpu, nic.pci) for index, gpu in enumerate(gpus)
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


def _common(one: PciPath, other: PciPath) -> int:
    """Bridges and switches above both."""
    shared = 0
    for here, there in zip(one, other, strict=False):
        if here != there:
            break
        shared += 1
    return shared


def _names(nics: Sequence[Nic]) -> str:
    return ", ".join(nic.name for nic in nics)
