"""Checks that communication variables are equal on both partitions and on all nodes (`launch.health.compare`)."""

from __future__ import annotations

from collections.abc import Mapping

from launch import envvars
from launch.health.check import Check, critical, ok
from launch.health.expected import Expected

PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "CUDA_DEVICE_ORDER")
PER_NODE = frozenset({"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_DEBUG_FILE",
                      "UCX_NET_DEVICES"})
"""These may differ with the node's hardware. Other checks judge them."""


def check(expected: Expected, environment: Mapping[str, str]) -> list[Check]:
    """Variables that this node's processes inherit, overridden by those that the launcher sets for each partition."""
    inherited = envvars.masked({name: value for name, value in environment.items()
                                if name.startswith(PREFIXES) and name not in PER_NODE})
    effective = {partition: {**inherited, **own} for partition, own in expected.environment.items()}
    told = ", ".join(f"{name}={value}" for name, value in inherited.items()) or "nothing inherited"
    checks = [ok("env.communication", inherited, told)]
    if "training" in effective and "rollout" in effective:
        checks.append(_partitions(effective["training"], effective["rollout"]))
    return checks


def _partitions(training: Mapping[str, str], rollout: Mapping[str, str]) -> Check:
    """NCCL_* must agree, because the weight sync's communicators have members in both partitions."""
    differ = {name: [training.get(name), rollout.get(name)] for name in sorted({*training, *rollout})
              if name.startswith("NCCL_") and training.get(name) != rollout.get(name)}
    if differ:
        name, (here, there) = next(iter(differ.items()))
        return critical("env.partitions", differ, f"{name} is {here or 'not set'} for training and "
                        f"{there or 'not set'} for rollout: the weight sync's communicators would hang",
                        "set it for both partitions or for neither")
    return ok("env.partitions", {}, "NCCL_* equal on both partitions")
