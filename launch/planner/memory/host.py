"""What a plan puts into the memory of a node's host: the weights of an offloaded reference, and the trainer's state while a
colocated engine generates. Pages of both are pinned, so that none can be swapped out."""

from __future__ import annotations

from launch.model.shape import ModelShape
from launch.plan.book import NO_BOOK, Book
from launch.plan.layouts import TrainingLayout
from launch.planner.memory.training import RESIDENT, WEIGHT_BYTES, TrainingMemory
from launch.planner.parameters import stage_parameters
from launch.planner.workload.workload import Workload

KEY = "memory.host"


def host_bytes(shape: ModelShape, workload: Workload, gpus_per_node: int, layout: TrainingLayout,
               memory: TrainingMemory, colocated: bool, book: Book = NO_BOOK) -> int:
    """Bytes on the fullest node, all of its ranks of the largest stage; 0 where nothing is offloaded."""
    needed, ranks = 0, min(gpus_per_node, layout.gpus)
    inputs: list[str] = []
    if workload.reference and workload.reference_offload:
        held = stage_parameters(shape, layout)
        needed += ranks * WEIGHT_BYTES[layout.precision] * max(stage.total for stage in held)
        kinds = ("dense", "experts") if shape.experts else ("dense",)
        inputs += [f"parameters.stage{number}.{kind}" for number in range(len(held)) for kind in kinds]
        inputs.append("trainer.precision")
    if colocated:
        needed += ranks * max(stage.resident for stage in memory.stages)
        inputs += [f"memory.training.stage{stage.stage}.{name}" for stage in memory.stages for name in RESIDENT
                   if name in stage.components and not (name == "reference" and workload.reference_offload)]
    if needed and book.keeps:
        book.computed(f"{KEY}.needed", needed, "bytes", "ranks of a node x (reference's weights, where offloaded + "
                      "resident state, where colocated), largest stage",
                      dict.fromkeys((*inputs, "cluster.gpus_per_node", "trainer.tp", "trainer.pp", "trainer.cp",
                                     "trainer.dp")))
    return needed
