"""Coefficients of weight sync: the share of a NIC's rate that a transfer gets, the cost of a chunk, the fixed parts.

The second class describes published systems by engine class, to check bounds and orders of magnitude against their
measurements (`launch.accuracy.weight_sync`). The planner's own predictions use only the first class. Both share the
NIC efficiency.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.coefficients.base import Coefficients, Range, coefficient

_DESIGN = "design value, to be replaced by `megatron-rl sync bench` on the site"
_FIT = "fitted to benchmarks/measured/weight_sync.yaml (`launch.accuracy.weight_sync.calibrate`)"


@dataclass(frozen=True)
class SyncCoefficients(Coefficients):
    """Coefficients of `launch.fabric`."""

    PREFIX = "coefficients.sync"

    nic_efficiency: float = coefficient(
        0.92, "", "share of a NIC's line rate that a large transfer gets",
        "46 of 50 GB/s: what the NCCL tests' maintainer expects of a healthy 400 Gb/s NIC (46 to 48)")
    nvlink_efficiency: float = coefficient(
        0.8, "", "share of a GPU's NVLink rate that a copy to another GPU of the node gets",
        "360 of 450 GB/s: bus bandwidth of large collectives inside an H100 node")
    chunk_latency_s: float = coefficient(
        1e-4, "s", "cost of a chunk at a NIC besides its bytes: launch, wire latency, hand-over to the next hop",
        f"between 20 us (wire) and 1 ms (hand-over in Python); {_DESIGN}")
    copy_rate: float = coefficient(
        1.4e12, "bytes/s", "packing on the sender and unpacking on the receiver, per GPU",
        f"reads and writes HBM once each on an H100; {_DESIGN}")
    digest_rate: float = coefficient(
        2.7e12, "bytes/s", "position-dependent digest of weights, per GPU",
        f"reads HBM once at 80 % of an H100's 3.35 TB/s; {_DESIGN}")
    quantise_rate: float = coefficient(
        5e11, "bytes/s", "quantising bf16 weights in the engine (FP8 rollout), per GPU", _DESIGN)
    pause_s: float = coefficient(
        0.125, "s", "pausing and resuming the engines", f"middle of 50 to 200 ms; {_DESIGN}")
    communicator_nic_bytes: float = coefficient(
        64 * 2**20, "bytes", "per GPU and communicator over its NIC, besides torch's and the engine's pools",
        "a pool of channels x 16 steps x 128 KiB (NCCL src/transport/net.cc, NCCL_P2P_NET_CHUNKSIZE) for each "
        "direction, at most 8 channels, and the same again for the communicator itself; not measured on a multi-GPU "
        "run")
    communicator_nvlink_bytes: float = coefficient(
        320 * 2**20, "bytes", "per GPU and communicator over NVLink, besides torch's and the engine's pools",
        "32 channels x 10 MiB on the receiving side, 2 MiB on the sending one: allocations seen on an H100 (nccl#1685)")
    communicator_open_s: float = coefficient(
        2.0, "s", "forming a communicator of two GPUs and its first message",
        f"1.5 to 2 s are usual between nodes; {_DESIGN}")
    uncertainty: float = coefficient(
        2.0, "", "a sync may take this many times its prediction, or this part of it",
        "a choice: the largest coefficients are design values; `megatron-rl sync bench` on the site measures them",
        Range(1.0, 10.0))
    barrier_s: float = coefficient(
        0.035, "s", "the protocol's barriers (prepare, verify, commit)", f"middle of 20 to 50 ms; {_DESIGN}")


DEFAULT = SyncCoefficients()


@dataclass(frozen=True)
class PublishedSyncCoefficients(Coefficients):
    """Coefficients of published systems, by engine class: seconds = fixed + bytes/rate + tensors x cost per tensor."""

    PREFIX = "coefficients.published_sync"

    nic_efficiency: float = coefficient(
        DEFAULT.nic_efficiency, "", "share of a NIC's line rate", "as coefficients.sync.nic_efficiency")
    tensor_s: float = coefficient(
        4.01e-4, "s", "gather_broadcast: one collective or call per tensor", _FIT)
    gather_fixed_s: float = coefficient(
        3.55, "s", "gather_broadcast: pausing, gathering, waking", _FIT)
    gather_share: float = coefficient(
        0.115, "", "gather_broadcast: share of one NIC's rate that full tensors get from one sender", _FIT)
    bucket_share: float = coefficient(
        0.164, "", "bucket_broadcast: share of one NIC's rate for each sending pipeline stage", _FIT)
    reshard_fixed_s: float = coefficient(
        0.184, "s", "reshard: around the transfer", _FIT)
    reshard_tensor_s: float = coefficient(
        0.000171, "s", "reshard: packing and loading, per tensor", _FIT)
    send_plan_rate: float = coefficient(
        3.26e10, "bytes/s", "send_plan: payload over a plan of small sends", _FIT)
    host_fixed_s: float = coefficient(
        0.349, "s", "host_checkpoint: metadata, registration, loading", _FIT)
    host_rate: float = coefficient(
        7e10, "bytes/s", "host_checkpoint: payload from host memory to all GPUs", _FIT)
    handover_fixed_s: float = coefficient(
        3.93, "s", "handover on shared GPUs: waking and offloading", _FIT)
    handover_rate: float = coefficient(
        1.27e10, "bytes/s", "handover: payload gathered and passed on within the device", _FIT)
    delta_rate: float = coefficient(
        2.86e8, "bytes/s", "delta: encoded bytes, from encoding to applying", _FIT)


DEFAULT_PUBLISHED = PublishedSyncCoefficients()
