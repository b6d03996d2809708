"""Facts that both ends of a weight sync must share, in addition to the configuration.

Trainer ranks and engines start with different environments, possibly on different nodes. A difference raises no error
of its own: communicators hang, or log-probs drift (verl#5522, SkyRL#143).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch import envvars

PER_NODE = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_DEBUG", "NCCL_DEBUG_FILE")
"""NCCL variables that may differ between nodes. All others must agree."""


def process_facts(device: str) -> dict[str, Any]:
    """The facts of this process, as plain values: `torch`, `nccl` (None on a CPU), `device`, `environment` (name ->
    value of each variable that is set) and `gpus`, the UUIDs of the GPUs that torch sees, in order.

    `device` is "cpu" or "gpu".
    """
    import torch  # imported here because the driver, which compares facts, does not import torch

    nccl, gpus = None, []
    if device == "gpu":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        gpus = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    environment = {name: value for name, value in sorted(envvars.inherited(without=PER_NODE).items())
                   if name.startswith("NCCL_")}
    return {"torch": torch.__version__, "nccl": nccl, "device": device, "environment": environment,
            "gpus": gpus}


def disagreements(facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line for each fact on which members differ, with the members that have each value. Empty if all agree.

    Args:
        facts: facts by member. A member is not compared on a fact that it does not report (trainer ranks report no
            vLLM version). A variable that is missing from a member's `environment` counts as unset.
    """
    variables = sorted({name for each in facts.values() for name in each.get("environment", {})})
    names = sorted({name for each in facts.values() for name in each} - {"environment", "gpus"})
    lines = [_difference(name, {member: each[name] for member, each in facts.items() if name in each})
             for name in names]
    lines += [_difference(name, {member: each["environment"].get(name, "unset") for member, each in facts.items()
                                 if "environment" in each}) for name in variables]
    return [line for line in lines if line]


def shared_gpus(facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line for each GPU that two members see. CUDA_VISIBLE_DEVICES was then set too late or overridden, and both
    would run on that GPU (AReaL#910, SkyRL#1577)."""
    users: dict[str, list[str]] = {}
    for member, each in facts.items():
        for gpu in each.get("gpus", []):
            users.setdefault(gpu, []).append(member)
    return [f"GPU {gpu} is seen by {' and '.join(names)}" for gpu, names in users.items() if len(names) > 1]


def _difference(name: str, values: Mapping[str, Any]) -> str:
    members: dict[Any, list[str]] = {}
    for member, value in values.items():
        members.setdefault(value, []).append(member)
    if len(members) < 2:
        return ""
    return f"{name}: " + "; ".join(f"{value} on {', '.join(names)}" for value, names in members.items())
