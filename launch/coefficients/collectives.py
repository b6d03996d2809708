"""Coefficients of `planner.collectives`."""

from __future__ import annotations

from dataclasses import dataclass

from launch.coefficients.base import Coefficients, Range, coefficient

_FIT = "calibrated: launch/accuracy/collectives.py on benchmarks/measured/collectives.yaml"


@dataclass(frozen=True)
class CollectiveCoefficients(Coefficients):
    """How NCCL uses links. Bandwidths are shares of the link's datasheet figure."""

    PREFIX = "coefficients.collectives"

    ring_share: float = coefficient(
        0.838, "", "bus bandwidth of a ring inside a node over the NVLink bandwidth", _FIT)
    switch_share: float = coefficient(
        1.06, "", "bus bandwidth of an all-reduce summed by the NVLink switch (NVLS) over the NVLink bandwidth", _FIT,
        Range(1e-3, 2))
    nic_share: float = coefficient(
        0.877, "", "bus bandwidth of a ring across nodes over the bandwidth of its NICs", _FIT)
    launch_s: float = coefficient(4.2e-06, "s", "launch of a collective, from first flag to last", _FIT)
    hop_s: float = coefficient(9.94e-07, "s", "latency of a step between GPUs of a node", _FIT)
    network_s: float = coefficient(
        6.38e-05, "s", "start-up time of a ring across nodes, before its first byte arrives", _FIT)
    node_hop_s: float = coefficient(2.49e-05, "s", "latency of a step between nodes", _FIT)
    chunk_s: float = coefficient(7.43e-06, "s", "time lost on a chunk while the pipeline of chunks fills", _FIT)
