"""Models and a cluster that the tests of the rollout models share."""

from __future__ import annotations

from launch.cluster import gpus
from launch.cluster.spec import ClusterSpec
from launch.coefficients.rollout import RolloutCoefficients
from launch.model.architecture import Architecture

LLAMA_70B = Architecture(80, 8192, 28672, 64, 8, 128, 128256, False)
LLAMA_8B = Architecture(32, 4096, 14336, 32, 8, 128, 128256, False)
MOE = Architecture(48, 2048, 6144, 32, 4, 128, 151936, False, qk_norm=True, experts=128, experts_per_token=8,
                 moe_ffn=768)
H100 = ClusterSpec("h100", tuple(f"n{number}" for number in range(8)), 8, gpus.find("h100"), 8, 50e9, 8, 10**12)
C = RolloutCoefficients()

