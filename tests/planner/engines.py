"""Models, a cluster and the book of given numbers that the tests of the rollout models share."""

from __future__ import annotations

from launch.planner.explain.givens import write_gpu, write_model, write_rollout

from launch.cluster import gpus
from launch.cluster.spec import ClusterSpec
from launch.coefficients.rollout import RolloutCoefficients
from launch.model.shape import ModelShape
from launch.plan.book import Book
from launch.plan.layouts import RolloutLayout

LLAMA_70B = ModelShape("llama3-70b", 80, 8192, 28672, 64, 8, 128, 128256, False)
LLAMA_8B = ModelShape("llama3-8b", 32, 4096, 14336, 32, 8, 128, 128256, False)
MOE = ModelShape("moe", 48, 2048, 6144, 32, 4, 128, 151936, False, qk_norm=True, experts=128, experts_per_token=8,
                 moe_ffn=768)
H100 = ClusterSpec("h100", tuple(f"n{number}" for number in range(8)), 8, gpus.find("h100"), 8, 50e9, 8, 10**12)
C = RolloutCoefficients()


def given_book(layout: RolloutLayout, cluster: ClusterSpec, shape: ModelShape = LLAMA_70B,
               coefficients: RolloutCoefficients = C) -> Book:
    book = Book()
    write_model(book, shape, lambda key: "test")
    write_rollout(book, layout, lambda key: "test")
    write_gpu(book, cluster.gpu, lambda key: "test")
    for name in ("gpus_per_node", "nics_per_node", "nic_bandwidth"):
        book.given(f"cluster.{name}", getattr(cluster, name), "", "test")
    coefficients.write(book)
    return book
