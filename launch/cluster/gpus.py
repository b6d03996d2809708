"""The table of GPUs: dense rates from NVIDIA's datasheets, memory as CUDA reports it.

Datasheets print tensor rates with 2:4 sparsity. The figures here are the dense rates, which are half of that.
`usable_bytes` is the "total capacity" that a CUDA process sees (`cudaMemGetInfo`, torch's out-of-memory message). It is
0.3 to 3 GB below NVML's total and varies by some hundred MB with the driver. The table holds a low observed value.
"""

from __future__ import annotations

import difflib
import re

from launch.cluster.spec import Gpu
from launch.errors import UserError

GIB = 1024 ** 3
FIGURES = ("bf16_flops", "fp8_flops", "fp32_flops", "hbm_bytes", "usable_bytes", "hbm_bandwidth", "nvlink_bandwidth",
           "power_w")
"""Fields of `Gpu` that are numbers: `gpu.<field>` in the book."""

H100 = Gpu(name="H100-SXM-80GB", bf16_flops=989.4e12, fp8_flops=1978.9e12, fp32_flops=66.9e12, hbm_bytes=80 * 10**9,
           usable_bytes=int(79.1 * GIB), hbm_bandwidth=3.35e12, nvlink_bandwidth=450e9, power_w=700,
           source="NVIDIA H100 Tensor Core GPU datasheet and architecture whitepaper (SXM5)")

KNOWN: tuple[Gpu, ...] = (
    Gpu(name="A100-SXM-40GB", bf16_flops=312e12, fp8_flops=312e12, fp32_flops=19.5e12, hbm_bytes=40 * 10**9,
        usable_bytes=int(39.38 * GIB), hbm_bandwidth=1.555e12, nvlink_bandwidth=300e9, power_w=400,
        sustained=0.86,
        source="NVIDIA A100 Tensor Core GPU datasheet (SXM4 40GB)"),
    Gpu(name="A100-SXM-80GB", bf16_flops=312e12, fp8_flops=312e12, fp32_flops=19.5e12, hbm_bytes=80 * 10**9,
        usable_bytes=int(79.14 * GIB), hbm_bandwidth=2.039e12, nvlink_bandwidth=300e9, power_w=400,
        sustained=0.86,
        source="NVIDIA A100 Tensor Core GPU datasheet (SXM4 80GB)"),
    Gpu(name="A800-SXM-80GB", bf16_flops=312e12, fp8_flops=312e12, fp32_flops=19.5e12, hbm_bytes=80 * 10**9,
        usable_bytes=int(79.14 * GIB), hbm_bandwidth=2.039e12, nvlink_bandwidth=200e9, power_w=400,
        source="NVIDIA A800 datasheet (SXM4 80GB): an A100 with NVLink at 400 GB/s, 200 each way"),
    Gpu(name="H20-96GB", bf16_flops=148e12, fp8_flops=296e12, fp32_flops=44e12, hbm_bytes=96 * 10**9,
        usable_bytes=int(95.0 * GIB), hbm_bandwidth=4.0e12, nvlink_bandwidth=450e9, power_w=500,
        sustained=0.95,
        source="NVIDIA H20 product brief as reported by the press (NVIDIA publishes no datasheet)"),
    H100,
    Gpu(name="H100-96GB-HBM2e-500W", bf16_flops=989.4e12, fp8_flops=1978.9e12, fp32_flops=66.9e12,
        hbm_bytes=96 * 10**9, usable_bytes=int(94.9 * GIB), hbm_bandwidth=2.4e12, nvlink_bandwidth=450e9, power_w=500,
        sustained=0.68,
        source="torchtitan benchmarks (H100 with 96 GB of HBM2e at 2.4 TB/s, 500 W); rates of the H100 datasheet, "
               "which it reaches only below its power cap"),
    Gpu(name="H200-SXM-141GB", bf16_flops=989.4e12, fp8_flops=1978.9e12, fp32_flops=66.9e12, hbm_bytes=141 * 10**9,
        usable_bytes=int(139.72 * GIB), hbm_bandwidth=4.8e12, nvlink_bandwidth=450e9, power_w=700,
        source="NVIDIA H200 Tensor Core GPU datasheet (SXM)"),
    Gpu(name="H800-SXM-80GB", bf16_flops=989.4e12, fp8_flops=1978.9e12, fp32_flops=66.9e12, hbm_bytes=80 * 10**9,
        usable_bytes=int(79.1 * GIB), hbm_bandwidth=3.35e12, nvlink_bandwidth=200e9, power_w=700,
        source="NVIDIA H800 product brief (SXM5): an H100 with NVLink at 400 GB/s, 200 each way"),
    Gpu(name="B200-SXM-180GB", bf16_flops=2250e12, fp8_flops=4500e12, fp32_flops=75e12, hbm_bytes=180 * 10**9,
        usable_bytes=int(178.35 * GIB), hbm_bandwidth=8.0e12, nvlink_bandwidth=900e9, power_w=1000,
        sustained=0.78,
        source="NVIDIA DGX B200 datasheet (1.44 TB, 64 TB/s, 36 PFLOP/s dense FP8 for eight)"),
    # One core, not one socket: a local run puts one rank on each core. A rough value; calibration replaces it.
    Gpu(name="CPU-core", bf16_flops=460e9, fp8_flops=460e9, fp32_flops=95e9, hbm_bytes=8 * 10**9,
        usable_bytes=8 * 10**9, hbm_bandwidth=8e9, nvlink_bandwidth=2e9, device="cpu",
        sustained=1.0,
        source="rough: torch matrix products measured on one core of an EPYC with avx512_bf16, two cores sharing "
               "about 16 GB/s; `megatron-rl plan calibrate RUN` measures yours"),
)

# The plain name of a family means its most common card.
_COMMON = {"a100": "A100-SXM-80GB", "h100": "H100-SXM-80GB", "h20": "H20-96GB", "h200": "H200-SXM-141GB",
           "h800": "H800-SXM-80GB", "a800": "A800-SXM-80GB", "b200": "B200-SXM-180GB", "cpu": "CPU-core"}
_NOISE = {"nvidia", "tesla", "hgx", "dgx", "gpu", "tensor", "core", "sxm", "sxm4", "sxm5", "sxm6", "hbm3", "hbm3e"}
"""Words that do not distinguish rows. Any other word (PCIe, NVL, GH200) names a different card."""


def find(name: str, where: str | None = None, *, memory_bytes: int | None = None) -> Gpu:
    """The GPU that a name means: a row of the table (`H100-SXM-80GB`), a short name (`h100`), a product name from NVML
    (`NVIDIA H100 80GB HBM3`), or a gres type from Slurm (`nvidia_a100-sxm4-40gb`).

    Args:
        name: the name. If it lists alternatives (`A100/A800-80GB`), the first counts.
        where: the file and key that hold the name, for the message.
        memory_bytes: total memory as the driver reports it, if known. Selects among rows that match the name.

    Raises:
        UserError: the card is not in the table (PCIe and NVL cards have other rates). Lists the nearest and all rows.
    """
    words = [word for word in re.split(r"[^a-z0-9]+", name.partition("/")[0].lower()) if word]
    families = {word for word in words if word in _COMMON}
    details = set(words) - families - _NOISE
    if len(families) == 1:
        family = families.pop()
        rows = [gpu for gpu in KNOWN if family in _parts(gpu)]
        fits = [gpu for gpu in rows if details <= _parts(gpu)]
        if "hbm3" in words:
            fits = [gpu for gpu in fits if "hbm2e" not in _parts(gpu)]
        if fits and memory_bytes is not None:
            return min(fits, key=lambda gpu: abs(gpu.usable_bytes - memory_bytes))
        if fits:
            return next((gpu for gpu in fits if gpu.name == _COMMON[family]), fits[0])
    raise UserError(f"no figures for a GPU named {name!r}", where=where,
                    fix=f"nearest: {nearest(name)}; known: {', '.join(gpu.name for gpu in KNOWN)}")


def nearest(name: str) -> str:
    """The name of the row whose spelling is nearest to a word of `name`."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and word not in _NOISE]
    likeness = {row: max((difflib.SequenceMatcher(None, word, family).ratio() for word in words), default=0.0)
                for family, row in _COMMON.items()}
    best = max(likeness, key=lambda row: likeness[row])
    return best if likeness[best] else H100.name


def table() -> str:
    """The table as Markdown, for docs/clusters.md."""
    rows = ["| Kind | BF16 | FP8 | FP32 | Memory, usable GB | Memory GB/s | NVLink GB/s | Source |",
            "|---|---|---|---|---|---|---|---|"]
    rows += [f"| {gpu.name} | {_rate(gpu.bf16_flops)} | {_rate(gpu.fp8_flops)} | {_rate(gpu.fp32_flops)} | "
             f"{gpu.usable_bytes / 1e9:.1f} | {gpu.hbm_bandwidth / 1e9:g} | {gpu.nvlink_bandwidth / 1e9:g} | "
             f"{gpu.source} |" for gpu in KNOWN]
    return "\n".join(rows) + "\n"


def _rate(flops: float) -> str:
    return f"{flops / 1e12:g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:g} GFLOP/s"


def _parts(gpu: Gpu) -> set[str]:
    return set(gpu.name.lower().split("-"))
