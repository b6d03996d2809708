"""The cluster that a measured point ran on, in the terms of the network model."""

from __future__ import annotations

import re

from launch.accuracy.points import Point
from launch.cluster.spec import ClusterSpec, Gpu

GBIT = 1e9 / 8
NIC_GBIT = {"A100": 200.0}
"""Rate of a GPU's own NIC if the source does not state it: DGX A100 200, DGX H100 and later 400."""


def plain_cluster(point: Point, gpu: Gpu, gpus: int) -> ClusterSpec:
    """Nodes for `gpus` GPUs with one 400 Gb/s NIC per GPU, whatever NICs the source states."""
    per_node = max(1, point.integer("hardware.gpus_per_node", 8))
    return _cluster(gpus, per_node, gpu, per_node, 400 * GBIT)


def cluster_of(point: Point, gpu: Gpu) -> ClusterSpec:
    """Nodes, GPUs and NICs of a point with this GPU. `8x400Gbit` means eight NICs, `3200Gbit EFA` all NICs of a node
    together. The default is one NIC per GPU."""
    per_node = max(1, point.integer("hardware.gpus_per_node", 8) or 8)
    nics, each = per_node, next((rate for name, rate in NIC_GBIT.items() if name in gpu.name), 400.0)
    stated = re.search(r"(?:(\d{1,3})\s*x\s*)?(\d{1,5})\s*G(?:bit|b/s|bps)", point.text("hardware.nic", ""))
    if stated and int(stated[2]):
        each = float(stated[2])
        if stated[1] and int(stated[1]):
            nics = int(stated[1])
        elif each > 800:
            each /= per_node
    return _cluster(point.num_gpus or 1, per_node, gpu, nics, each * GBIT)


def _cluster(gpus: int, per_node: int, gpu: Gpu, nics: int, bandwidth: float) -> ClusterSpec:
    names = tuple(f"node{number}" for number in range(-(-gpus // per_node)))
    return ClusterSpec("measured", names, per_node, gpu, nics, bandwidth, nics, 0)
