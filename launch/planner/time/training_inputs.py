"""Which numbers each part of the training model reads under a given layout: the inputs that `training_book` writes.

A part that the layout does without (TP collectives at TP 1) reads nothing but the size that switches it off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from launch.cluster.spec import ClusterSpec
from launch.model.shape import ModelShape
from launch.plan.layouts import TrainingLayout
from launch.planner.time.collectives import Fabric, Group, group

C = "coefficients.training"
Keys = tuple[str, ...]


def model(*names: str) -> Keys:
    """Book keys of fields of the shape."""
    return tuple(f"model.{name}" for name in names)


def collective(*names: str) -> Keys:
    return tuple(f"coefficients.collectives.{name}" for name in names)


class Inputs:
    """Inputs of one step: `trains` with its backward pass, else a forward pass only."""

    def __init__(self, prefix: str, shape: ModelShape, layout: TrainingLayout, cluster: ClusterSpec, lora_rank: int,
                 trains: bool) -> None:
        self.shape, self.layout, self.cluster, self.lora, self.trains = shape, layout, cluster, lora_rank, trains
        self.tokens = f"{prefix}.tokens_per_rank"
        self.again: Keys = ("trainer.recompute",) if trains else ()
        self.gradients: Keys = ("trainer.grad_bytes",) if trains and not lora_rank else ()
        self.fsdp: Keys = (f"{C}.fsdp_rate",) if layout.fsdp > 1 else ()
        gpu = cluster.gpu
        self.fp8 = layout.precision == "fp8" and gpu.fp8_flops > gpu.bf16_flops

    def layer(self) -> Mapping[str, Iterable[str]]:
        """Part of a layer -> its inputs."""
        attention = model("hidden", "heads", "kv_heads", "head_dim")
        stream = self._stream()
        adapters = stream if self.lora else ()
        element = ("trainer.precision", *self._cast_threshold())
        return {
            "matmul": (self.tokens, *attention, *self._mlp(), "trainer.tp", *self.again, *self.gradients,
                       *self._product_rate(self.fp8), *self._operands(), *adapters),
            "attention": (self.tokens, *self._attention(), *self.again),
            "elementwise": (self.tokens, *attention, *self._mlp_width(), *model("qk_norm"), "trainer.tp", "trainer.cp",
                            *self._split(), *self.again, *element, *stream),
            "gaps": (f"{C}.layer_s", *self.again),
            "tp": self._tensor_parallel(), "cp": self._ring(), "ep": self._exchange(),
        }

    def head(self) -> Mapping[str, Iterable[str]]:
        each = (self.tokens, "model.vocab", "trainer.tp")
        return {"matmul": (*each, "model.hidden", *self.gradients, *self._product_rate(False), *self._operands()),
                "elementwise": (*each, *self._stream())}

    def sends(self) -> Keys:
        """Between pipeline stages."""
        layout = self.layout
        if layout.pp == 1:
            return ("trainer.pp",)
        hidden = (f"{C}.overlap_cost",) if layout.vpp > 1 else ()
        return (self.tokens, "model.hidden", "trainer.tp", "trainer.cp", "trainer.dp", "trainer.pp", "trainer.vpp",
                "trainer.precision", "work.micro_batches", *hidden,
                *self._p2p(layout.gpus <= self.cluster.gpus_per_node, layout.gpus))

    def data_parallel(self, sizes: Iterable[str], slots: Iterable[str]) -> Keys:
        """Gradients and parameters over DP x CP."""
        layout, shape = self.layout, self.shape
        if layout.fsdp > 1:
            ranks = group(layout.fsdp, layout.tp * layout.cp, self.cluster.gpus_per_node)
            return ("trainer.fsdp", "trainer.tp", "trainer.cp", "trainer.pp", "trainer.precision", *self.gradients, *sizes,
                    *slots, "work.micro_batches", f"{C}.overlap_cost", *self._ring_links(ranks))
        if not self.trains or self.lora:
            return ("trainer.fsdp",)
        shards = ("trainer.dp", "trainer.cp", *(("trainer.tp", "trainer.ep") if shape.experts else ()))
        n = layout.dp * layout.cp
        groups = [group(n, layout.tp, self.cluster.gpus_per_node)]
        if shape.experts:
            groups.append(group(n * layout.tp // layout.ep, layout.ep, self.cluster.gpus_per_node))
        groups = [each for each in groups if each.ranks > 1]
        if not groups:
            return shards
        turns = ("trainer.pp", "work.micro_batches") if layout.vpp > 1 else ()
        links = [key for each in groups for key in self._ring_links(each)]
        return (*shards, "trainer.tp", *sizes, "trainer.grad_bytes", "trainer.precision", f"{C}.overlap_cost", *slots,
                "trainer.vpp", *turns, *links)

    def optimizer(self, sizes: Iterable[str]) -> Keys:
        if not self.trains or self.lora:
            return (f"{C}.step_s",)
        shards = ("trainer.dp", "trainer.cp") if self.layout.distributed_optimizer else ()
        experts = ("trainer.tp", "trainer.ep") if self.shape.experts and shards else ()
        return (f"{C}.step_s", *self._stream(), *shards, *experts, "trainer.distributed_optimizer", *sizes)

    def _mlp(self) -> Keys:
        """Of the MLP's matrices."""
        if not self.shape.experts:
            return model("ffn", "mlp_matrices")
        return (*model("mlp_matrices", "experts", "experts_per_token", "moe_ffn", "shared_ffn"), "trainer.ep")

    def _mlp_width(self) -> Keys:
        """Of its hidden activation."""
        return model("mlp_matrices", *(("experts_per_token", "moe_ffn", "shared_ffn") if self.shape.experts else
                                       ("ffn",)))

    def _split(self) -> Keys:
        return ("trainer.sequence_parallel",) if self.layout.tp > 1 else ()

    def _cast_threshold(self) -> Keys:
        """FP8 is used where the chip is faster with it."""
        return ("gpu.fp8_flops", "gpu.bf16_flops") if self.layout.precision == "fp8" else ()

    def _plain_flops(self) -> Keys:
        gpu = self.cluster.gpu
        if self.layout.precision == "fp32":
            return ("gpu.fp32_flops",) if gpu.fp32_flops else ("gpu.fp32_flops", "gpu.bf16_flops")
        return ("gpu.bf16_flops",)

    def _product_rate(self, fp8: bool) -> Keys:
        rate = (*self._cast_threshold(), f"{C}.gemm_fp8") if fp8 else (*self._plain_flops(), f"{C}.gemm_bf16")
        return (*rate, "gpu.sustained", "trainer.precision", *self.fsdp)

    def _operands(self) -> Keys:
        return ("gpu.hbm_bandwidth", f"{C}.gemm_memory")

    def _stream(self) -> Keys:
        return ("gpu.hbm_bandwidth", f"{C}.hbm", *self.fsdp)

    def _attention(self) -> Keys:
        sizes = (*model("heads", "head_dim"), "work.attention_length", "trainer.tp", "trainer.fused_attention")
        if not self.layout.fused_attention:
            return (*sizes, *self._product_rate(False), *self._stream())
        return (*sizes, *self._plain_flops(), "gpu.sustained", "trainer.precision", f"{C}.attention", *self.fsdp)

    def _tensor_parallel(self) -> Keys:
        layout = self.layout
        if layout.tp == 1:
            return ("trainer.tp",)
        ranks = group(layout.tp, 1, self.cluster.gpus_per_node)
        exposed = () if layout.fsdp > 1 else (f"{C}.tp_exposed",)
        links = self._ring_links(ranks) if layout.sequence_parallel else self._all_reduce_links(ranks)
        return (self.tokens, "model.hidden", "trainer.tp", "trainer.precision", "trainer.sequence_parallel", *self.again,
                *exposed, *links)

    def _ring(self) -> Keys:
        layout = self.layout
        if layout.cp == 1:
            return ("trainer.cp",)
        ranks = layout.tp * layout.cp
        return (self.tokens, "trainer.cp", *model("kv_heads"), *self._attention(), *self.again,
                *self._p2p(ranks <= self.cluster.gpus_per_node, ranks))

    def _exchange(self) -> Keys:
        layout = self.layout
        if not self.shape.experts:
            return ("model.experts",)
        if layout.ep == 1:
            return ("trainer.ep",)
        ranks = group(layout.ep, 1, self.cluster.gpus_per_node)
        across = ("cluster.nic_bandwidth", "cluster.nics_per_node", *collective("nic_share", "node_hop_s"))
        return (self.tokens, *model("hidden", "experts_per_token"), "trainer.tp", "trainer.ep", "trainer.precision",
                *self.again, "gpu.nvlink_bandwidth", "cluster.gpus_per_node",
                *collective("ring_share", "launch_s", "chunk_s"), *(across if ranks.nodes > 1 else ()))

    def _p2p(self, within_node: bool, ranks: int) -> Keys:
        """`ranks` that fit into a node, or do not."""
        if within_node:
            return ("gpu.nvlink_bandwidth", *self._threshold(ranks),
                    *collective("ring_share", "launch_s", "hop_s", "chunk_s"))
        nics = ("cluster.nics_per_node", "cluster.gpus_per_node")      # no less than one NIC for a message
        return ("cluster.nic_bandwidth", *nics, *collective("nic_share", "launch_s", "node_hop_s", "chunk_s"))

    def _threshold(self, ranks: int) -> Keys:
        return ("cluster.gpus_per_node",) if ranks > 1 else ()

    def _ring_links(self, ranks: Group) -> Keys:
        inside = ("gpu.nvlink_bandwidth", "cluster.gpus_per_node", *collective("ring_share", "launch_s", "chunk_s"))
        hops = collective("hop_s") if ranks.ranks > ranks.nodes else ()
        if ranks.nodes <= 1:
            return (*inside, *hops)
        return (*inside, *hops, "cluster.nic_bandwidth", "cluster.nics_per_node",
                *collective("nic_share", "network_s", "node_hop_s"))

    def _all_reduce_links(self, ranks: Group) -> Keys:
        links = self._ring_links(ranks)
        if Fabric.summed_in_switch(self.cluster.gpu.nvlink_bandwidth, ranks):
            of_nics = ("cluster.nic_bandwidth", "cluster.nics_per_node", *collective("ring_share", "nic_share"))
            links = (*(key for key in links if key not in of_nics), *collective("switch_share"))
        # across nodes a tree, which does not pay a ring's way through the network
        return links if ranks.nodes == 1 else tuple(key for key in links if key not in collective("network_s"))
