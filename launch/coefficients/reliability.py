"""Coefficients of the reliability model."""

from __future__ import annotations

from dataclasses import dataclass

from launch.coefficients.base import Coefficients, coefficient


@dataclass(frozen=True)
class ReliabilityCoefficients(Coefficients):
    PREFIX = "coefficients.reliability"

    node_mtbf_hours: float = coefficient(
        6335.0, "h", "mean time between unexpected failures of one node of eight H100",
        "419 unexpected interruptions in 54 days on 2,048 nodes: The Llama 3 Herd of Models (arXiv 2407.21783), "
        "section 3.3.4 and table 5")
    checkpoint_bandwidth: float = coefficient(
        2e9, "bytes/s per training node", "rate at which a node writes a checkpoint to the shared file system",
        "assumption: a fifth of a 100 Gb/s storage network; measure yours")
    checkpoint_read_bandwidth: float = coefficient(
        2e9, "bytes/s per training node", "rate at which a node reads a checkpoint from the shared file system",
        "assumption: as for writing; measure yours")
    file_system_bandwidth: float = coefficient(
        100e9, "bytes/s", "most that the shared file system writes or reads for all nodes together",
        "assumption: a parallel file system of a GPU cluster; measure yours")
    host_copy_bandwidth: float = coefficient(
        20e9, "bytes/s per GPU", "rate at which a GPU copies to page-locked host memory while its neighbours do too",
        "assumption: a third of PCIe 5.0 x16, because the GPUs of a node share its host memory")
    restart_s: float = coefficient(
        600.0, "s", "from a failure to the first step after it: detection, requeue, start-up, loading",
        "assumption: preflight, start of Ray, Megatron and vLLM, and a checkpoint read")
