"""What `choose.predict` writes into the book of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from launch.coefficients.sync import SyncCoefficients
from launch.model.shape import ModelShape
from launch.plan.book import Book
from launch.plan.layouts import RolloutLayout, TrainingLayout

if TYPE_CHECKING:
    from launch.fabric.choose import RouteCost, SyncPrediction

_ENGINE = ("rollout.tp", "rollout.pp")
_NIC, _NVLINK = "cluster.nic_bandwidth", "gpu.nvlink_bandwidth"
_NODE = ("cluster.gpus_per_node", "cluster.nics_per_node")
_OPTIONAL = ("trainer.precision", "trainer.layers_of_stage", "trainer.etp", "rollout.weight_bytes", "sync.bucket_bytes")
"""Inputs of some plans only: named where somebody wrote them down."""


def write(prediction: SyncPrediction, shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout,
          lora_rank: int, coefficients: SyncCoefficients, book: Book) -> None:
    """Every number and what it rests on: `sync.*`."""
    _Notes(prediction, shape, training, rollout, lora_rank, coefficients, book).write()


class _Notes:
    """Inputs by subject: `copy` what one engine takes, `shards` how the trainer has cut it, `held` who has each shard."""

    def __init__(self, prediction: SyncPrediction, shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout,
                 lora_rank: int, coefficients: SyncCoefficients, book: Book) -> None:
        self.prediction, self.book, self.prefix = prediction, book, coefficients.PREFIX
        self.moves_weights = not lora_rank
        optional = {key: (key,) if key in book else () for key in _OPTIONAL}
        self.bucket, self.rollout_precision = optional["sync.bucket_bytes"], optional["rollout.weight_bytes"]
        routed = bool(shape.experts) and self.moves_weights
        self.elements = _elements(shape, lora_rank)
        self.copy = (*self.elements, *_ENGINE, *optional["trainer.precision"])
        interleaved = ("trainer.vpp",) if training.pp > 1 and rollout.pp > 1 else ()
        self.shards = ("trainer.tp", "trainer.pp", *interleaved, *optional["trainer.layers_of_stage"],
                       *(("trainer.ep", *optional["trainer.etp"]) if routed else ()))
        self.held = ("trainer.cp", "trainer.dp")

    def write(self) -> None:
        found = self.prediction
        self._put("replica_bytes", found.replica_bytes, "bytes",
                  "sum of the overlaps of training shards and engine ranks; padding never travels", self.copy)
        cost = found.cost
        self._put("transfers", cost.transfers, "transfers", "large ones into the busiest rollout NIC",
                  (*self.elements, *_ENGINE, *self.shards, *_NODE))
        for kind, each in found.routes.items():
            self._route(kind, each)
        self._floor()
        around = (*_ENGINE, *self.shards, *self.held, "rollout.replicas", *_NODE, "cluster.rails")
        if found.natural_cross_rail_bytes:
            around += self.copy
        self._put("cross_rail_bytes", found.cross_rail_bytes, "bytes",
                  "into GPUs on whose rail no holder of the shard sits, engines' GPUs in the solved order", around)
        self._put("natural_cross_rail_bytes", found.natural_cross_rail_bytes, "bytes",
                  "the same with GPUs in the natural order", around)
        self._put("seconds", found.seconds, "s", f"expected time of the chosen route, {found.chosen}",
                  tuple(f"sync.{kind}.seconds" for kind in found.routes))

    def _route(self, kind: str, cost: RouteCost) -> None:
        c, key, forwards = self.prefix, f"sync.{kind}", kind != "direct"
        self._put(f"{kind}.trainer_nic_out_bytes", cost.trainer_nic_out_bytes, "bytes",
                  "busiest training NIC: its shard" + ("" if forwards else " x its receivers"),
                  (*self.copy, *self.shards, *self.held, "rollout.replicas", *_NODE, "cluster.rails"))
        self._put(f"{kind}.rollout_nic_in_bytes", cost.rollout_nic_in_bytes, "bytes",
                  "busiest rollout NIC: one copy for its node over its NICs", (*self.copy, "rollout.replicas", *_NODE))
        self._put(f"{kind}.nvlink_bytes", cost.nvlink_bytes, "bytes", "into a GPU from engines that share its node",
                  (*(self.copy if cost.nvlink_bytes else _ENGINE), "rollout.replicas", "cluster.gpus_per_node"))
        nic = [f"{key}.trainer_nic_out_bytes", f"{key}.rollout_nic_in_bytes"]
        depth: list[str] = []
        if forwards:
            depth = [f"{key}.hops"]
            self._put(f"{kind}.hops", cost.hops, "", "NIC hops: receivers / senders" + (
                ", its log2" if kind == "tree" else ""), (*_ENGINE, "rollout.replicas", "trainer.tp", *self.held, *_NODE,
                                                          "cluster.rails"))
            self._put(f"{kind}.rollout_nic_out_bytes", cost.rollout_nic_out_bytes, "bytes",
                      "busiest rollout NIC: what it forwards",
                      (*((f"{key}.rollout_nic_in_bytes",) if cost.hops > 1 else ()), *depth))
            nic.append(f"{key}.rollout_nic_out_bytes")
        self._put(f"{kind}.lower_bound_s", cost.lower_bound_s, "s", "bytes of the busiest NIC / its line rate, or NVLink",
                  (*nic, f"{key}.nvlink_bytes", _NIC, _NVLINK))
        packed = (_NIC, f"{c}.nic_efficiency", f"{c}.chunk_latency_s") if cost.hops > 1 else ()
        self._put(f"{kind}.chunk_bytes", cost.chunk_bytes, "bytes", "sqrt(W a B / fill), or all where nobody forwards; at "
                  "most a bucket", (*nic, *depth, *packed, *self.bucket))
        twins = (_NVLINK, f"{c}.nvlink_efficiency") if cost.nvlink_bytes else ()
        self._put(f"{kind}.wire_s", cost.wire_s, "s",
                  "W/(e B) + (W/c) a + fill (c/(e B) + a); fill = H - 1 (chain), 2 (H - 1) (tree)",
                  (*nic, f"{key}.nvlink_bytes", *depth, f"{key}.chunk_bytes", "sync.transfers", _NIC,
                   f"{c}.nic_efficiency", f"{c}.chunk_latency_s", *twins))
        quantised = self.rollout_precision if self.moves_weights else ()
        quantised += (f"{c}.quantise_rate",) if self.prediction.quantise else ()
        self._put(f"{kind}.seconds", cost.expected_s, "s",
                  "pause + barriers + wire + 2 c/copy rate + held/digest rate (+ held/quantise rate)",
                  (f"{key}.wire_s", f"{key}.chunk_bytes", f"{key}.rollout_nic_in_bytes", f"{key}.nvlink_bytes",
                   *(f"{c}.{name}" for name in ("pause_s", "barrier_s", "copy_rate", "digest_rate")), *quantised))
        self._put(f"{kind}.trainer_staging_bytes", cost.trainer_staging_bytes, "bytes", "2 chunks",
                  (f"{key}.chunk_bytes",))
        self._put(f"{kind}.rollout_staging_bytes", cost.rollout_staging_bytes, "bytes",
                  "2 chunks x transfers into a GPU at the same time", (f"{key}.chunk_bytes", *(
                      "sync.transfers", *depth)))

    def _floor(self) -> None:
        limits, parts = self.prediction.limits, {
            "ingress": ("one node's copy over its NICs", ("sync.direct.rollout_nic_in_bytes", _NIC)),
            "egress": ("all copies over all NICs, relays included",
                       (*self.copy, "rollout.replicas", "trainer.tp", "trainer.pp", *self.held, *_NODE, _NIC)),
            "source": ("one copy out of the holders of the busiest shard",
                       (*self.copy, *self.shards, *self.held, *_NODE, _NIC)),
            "nvlink": ("bytes between twins of a node", ("sync.direct.nvlink_bytes", _NVLINK)),
            "spine": ("one copy into each leaf without a trainer, over its uplinks",
                      (*self.copy, "rollout.replicas", *_NODE, _NIC))}
        written = []
        for name, (formula, inputs) in parts.items():
            if getattr(limits, name):
                self._put(f"floor.{name}_s", getattr(limits, name), "s", formula, inputs)
                written.append(f"sync.floor.{name}_s")
        self._put("floor_s", self.prediction.floor_s, "s", "below which no route can be: the largest of its parts",
                  written)

    def _put(self, name: str, value: float, unit: str, formula: str, inputs: Iterable[str]) -> None:
        self.book.computed(f"sync.{name}", value, unit, formula, dict.fromkeys(inputs))


def _elements(shape: ModelShape, lora_rank: int) -> tuple[str, ...]:
    """Fields of the model that say how many elements travel."""
    names = ["layers", "hidden", "heads", "kv_heads", "head_dim"]
    names += ["shared_ffn"] if shape.experts else ["ffn"]
    if lora_rank:
        width = shape.shared_ffn if shape.experts else shape.ffn
        names += ["lora_rank", *(["mlp_matrices"] if width else [])]
    else:
        names += ["mlp_matrices", "vocab", "tied", "qkv_bias", "qk_norm", "all_biases", "learned_positions"]
        names += ["experts", "moe_ffn"] if shape.experts else []
    return tuple(f"model.{name}" for name in names)
