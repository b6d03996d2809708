"""What `choose.predict` writes into the book of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launch.planner.book import Book
from launch.planner.coefficients.sync import SyncCoefficients

if TYPE_CHECKING:
    from launch.fabric.choose import SyncPrediction

_SHAPE = tuple(f"model.{name}" for name in (
    "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "tied", "mlp_matrices", "qkv_bias",
    "qk_norm", "all_biases", "learned_positions", "experts", "moe_ffn", "shared_ffn"))
_TRAINER = tuple(f"trainer.{name}" for name in ("tp", "pp", "vpp", "cp", "dp", "ep"))
_ROLLOUT = ("rollout.tp", "rollout.pp", "rollout.replicas")
_NODE = ("cluster.gpus_per_node", "cluster.nics_per_node", "cluster.rails")
_NIC, _NVLINK = "cluster.nic_bandwidth", "gpu.nvlink_bandwidth"
_OPTIONAL = ("trainer.precision", "trainer.layers_of_stage", "trainer.etp", "model.lora_rank", "rollout.weight_bytes",
             "sync.bucket_bytes")
"""Inputs of some plans only: named where somebody wrote them down."""


def write(prediction: SyncPrediction, coefficients: SyncCoefficients, book: Book) -> None:
    """Every number and what it rests on: `sync.*`."""
    extra = {key: (key,) if key in book else () for key in _OPTIONAL}
    lora, bucket, precision = extra["model.lora_rank"], extra["sync.bucket_bytes"], extra["trainer.precision"]
    places = (*_SHAPE, *_TRAINER, *extra["trainer.layers_of_stage"],
              *extra["trainer.etp"], *_ROLLOUT, *_NODE, *lora, *precision)
    name = {each: f"{coefficients.PREFIX}.{each}" for each in (
        "nic_efficiency", "nvlink_efficiency", "chunk_latency_s", "pause_s", "barrier_s", "copy_rate", "digest_rate",
        "quantise_rate")}
    around = [name["pause_s"], name["barrier_s"], name["copy_rate"], name["digest_rate"]]
    around += [*extra["rollout.weight_bytes"], *([name["quantise_rate"]] if prediction.quantise else [])]
    book.computed("sync.replica_bytes", prediction.replica_bytes, "bytes",
                  "sum of the overlaps of training shards and engine ranks; padding never travels",
                  (*_SHAPE, "trainer.tp", "rollout.tp", "rollout.pp", *lora, *precision))
    for kind, cost in prediction.routes.items():
        key = f"sync.{kind}"
        for each, formula in (("trainer_nic_out_bytes", "busiest training NIC: its shard x its receivers"),
                              ("rollout_nic_in_bytes", "busiest rollout NIC: one copy for its node over its NICs"),
                              ("rollout_nic_out_bytes", "busiest rollout NIC: what it forwards"),
                              ("nvlink_bytes", "into a GPU from engines that share its node")):
            book.computed(f"{key}.{each}", getattr(cost, each), "bytes", formula, places)
        book.computed(f"{key}.hops", cost.hops, "", "NIC hops: receivers / senders (chain), its log2 (tree)", places)
        bytes_ = [f"{key}.{each}" for each in ("trainer_nic_out_bytes", "rollout_nic_in_bytes",
                                               "rollout_nic_out_bytes", "nvlink_bytes")]
        book.computed(f"{key}.lower_bound_s", cost.lower_bound_s, "s", "bytes of the busiest NIC / its line rate",
                      (*bytes_, _NIC, _NVLINK, *_NODE))
        book.computed(f"{key}.chunk_bytes", cost.chunk_bytes, "bytes", "sqrt(W a B / fill), at most a bucket",
                      (*bytes_, f"{key}.hops", _NIC, *_NODE, name["nic_efficiency"], name["chunk_latency_s"],
                       *bucket))
        book.computed(f"{key}.wire_s", cost.wire_s, "s",
                      "W/(e B) + (W/c) a + fill (c/(e B) + a); fill = H - 1 (chain), 2 (H - 1) (tree)",
                      (*bytes_, f"{key}.hops", f"{key}.chunk_bytes", _NIC, _NVLINK, name["nic_efficiency"],
                       name["nvlink_efficiency"], name["chunk_latency_s"], *places))
        book.computed(f"{key}.seconds", cost.expected_s, "s",
                      "pause + barriers + wire + 2 c/copy rate + held/digest rate (+ held/quantise rate)",
                      (f"{key}.wire_s", f"{key}.chunk_bytes", f"{key}.rollout_nic_in_bytes", f"{key}.nvlink_bytes",
                       *around))
        for each, formula in (("trainer_staging_bytes", "2 chunks"),
                              ("rollout_staging_bytes", "2 chunks x transfers into a GPU at the same time")):
            book.computed(f"{key}.{each}", getattr(cost, each), "bytes", formula, (f"{key}.chunk_bytes", *places))
    book.computed("sync.floor_s", prediction.floor_s, "s",
                  "max(one node's ingress, all egress with relays, one copy out of each stage, spine, NVLink)",
                  (*places, _NIC, _NVLINK))
    book.computed("sync.cross_rail_bytes", prediction.cross_rail_bytes, "bytes",
                  "into GPUs on whose rail no holder of the shard sits, engines' GPUs in the solved order", places)
    book.computed("sync.natural_cross_rail_bytes", prediction.natural_cross_rail_bytes, "bytes",
                  "the same with GPUs in the natural order", places)
    book.computed("sync.seconds", prediction.seconds, "s", f"expected time of the chosen route, {prediction.chosen}",
                  tuple(f"sync.{kind}.seconds" for kind in prediction.routes))
