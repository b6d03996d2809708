"""Book entries of the training model: which key, which formula, which inputs. The numbers come from `training_time`.

Entries that a layout has no use for (TP collectives at TP 1) are written with 0, so that a plan has the same keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from launch.planner.book import Book
from launch.planner.layer_time import PassCost
from launch.planner.layouts import TrainingLayout, TrainingWork
from launch.planner.parameters import flops_per_token, stage_layers, stage_parameters
from launch.planner.shape import ModelShape

if TYPE_CHECKING:
    from launch.planner.training_time import TrainingTime

C = "coefficients.training"
WIDTHS = tuple(f"model.{name}" for name in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "mlp_matrices",
                                            "experts", "experts_per_token", "moe_ffn", "shared_ffn"))
ENGINE = ("trainer.precision", "trainer.fsdp", f"{C}.fsdp_rate")
TENSOR = ("gpu.bf16_flops", "gpu.fp8_flops", "gpu.fp32_flops", "gpu.sustained", f"{C}.gemm_bf16", f"{C}.gemm_fp8")
STREAM = ("gpu.hbm_bandwidth", f"{C}.hbm", *ENGINE)
NVLINK = ("gpu.nvlink_bandwidth", "cluster.gpus_per_node")
NETWORK = (*NVLINK, "cluster.nics_per_node", "cluster.nic_bandwidth",
           *(f"coefficients.collectives.{name}" for name in ("ring_share", "switch_share", "nic_share", "launch_s",
                                                             "hop_s", "network_s", "node_hop_s", "chunk_s")))
PARTS = {
    "matmul": "2 T n k / rate + unhidden time of operands on the HBM, of each product; twice more backward (once "
              "with LoRA), recomputed ones again",
    "attention": "2 T l A / rate forward, 2.5 times that backward (arXiv 2205.14135)",
    "elementwise": "bytes of norms, residuals, rotary, activation, FP8 casts / (HBM bandwidth x share)",
    "gaps": "layer_s for each pass",
    "tp": "(2 all-gathers + 2 reduce-scatters) each way x exposed share",
    "cp": "what the ring of keys and values takes beyond attention",
    "ep": "tokens to their experts and back, each way",
}
"""Part of a layer -> formula."""


def write(book: Book, prefix: str, shape: ModelShape, layout: TrainingLayout, work: TrainingWork, lora_rank: int,
          layer: PassCost, head: PassCost, time: TrainingTime) -> None:
    """All numbers of one step, `prefix` before their keys: training or logprob."""
    stage_parameters(shape, layout, book=book)
    lora = ("model.lora_rank",) if lora_rank else ()
    split = ("trainer.tp", "trainer.sequence_parallel")
    again = ("trainer.recompute",)

    def put(name: str, value: float, formula: str, *inputs: str, unit: str = "s") -> str:
        key = f"{prefix}.{name}"
        book.computed(key, value, unit, formula, inputs)
        return key

    tokens = put("tokens_per_rank", work.micro_batch_tokens / layout.cp, "tokens of a micro-batch / CP",
                 "work.micro_batch_tokens", "trainer.cp", unit="tokens")
    common = (tokens, *WIDTHS, "trainer.tp", *again)
    inputs = {
        "matmul": (*common, "trainer.ep", "trainer.grad_bytes", f"{C}.gemm_memory", *TENSOR, *STREAM, *lora),
        "attention": (*common, "work.attention_length", "trainer.fused_attention", f"{C}.attention", *TENSOR,
                      *STREAM),
        "elementwise": (*common, "model.qk_norm", "trainer.cp", *split, *STREAM, "gpu.bf16_flops", "gpu.fp8_flops"),
        "gaps": (f"{C}.layer_s", *again),
        "tp": (tokens, "model.hidden", *split, *again, "trainer.precision", "trainer.fsdp", f"{C}.tp_exposed",
               *NETWORK),
        "cp": (*common, "trainer.cp", "work.attention_length", "trainer.fused_attention", f"{C}.attention", *TENSOR,
               *STREAM, *NETWORK),
        "ep": (*common, "trainer.ep", "trainer.precision", *NETWORK),
    }
    parts = [put(f"layer.{name}_s", getattr(layer, f"{name}_s"), formula, *dict.fromkeys(inputs[name]))
             for name, formula in PARTS.items()]
    each = put("layer_s", time.layer_s, "sum of the parts: one layer, one micro-batch", *parts)
    head_inputs = dict.fromkeys((tokens, "model.hidden", "model.vocab", "trainer.tp", "trainer.grad_bytes",
                                 f"{C}.gemm_memory", *TENSOR, *STREAM, *lora))
    head_parts = [put("head.matmul_s", head.matmul_s, "2 T h V / TP and its gradients, in bf16", *head_inputs),
                  put("head.elementwise_s", head.elementwise_s, "bytes a logit of loss and log-probs x T V / TP",
                      *head_inputs)]
    last = put("head_s", time.head_s, "head and loss, one micro-batch", *head_parts)
    counts = tuple(f"parameters.stage{number}.layers" for number in range(len(stage_layers(shape, layout))))
    slots = (each, last, *counts)
    number = put("slowest_stage", time.slowest_stage, "stage with the largest layers x layer_s (+ head_s)", *slots,
                 unit="")

    many = ("work.micro_batches", number, *counts)
    sums = [put(f"{name}_s", getattr(time, f"{name}_s"), "micro-batches x (layers x layer's part + head's) of the "
                "slowest stage", part, *(head_parts if name in ("matmul", "elementwise") else ()), *many)
            for name, part in zip(PARTS, parts, strict=True)]
    sizes = tuple(f"parameters.stage{stage}.{kind}" for stage in range(len(counts))
                  for kind in ("dense", *(["experts"] if shape.experts else [])))
    overlap = (*slots, f"{C}.overlap_cost", "trainer.dp", "trainer.cp", "trainer.tp", "trainer.ep", "trainer.pp",
               "trainer.vpp", "work.micro_batches", "trainer.grad_bytes", "trainer.precision", "trainer.fsdp", *sizes)
    sums += [
        put("pp_bubble_s", time.pp_bubble_s, "(sum of slots - slowest) / v (arXiv 2104.04473)", *slots,
            "trainer.vpp"),
        put("pp_p2p_s", time.pp_p2p_s, "T h bytes / TP a send; all of them with v = 1, else overlap_cost of them + "
            "fill", tokens, "model.hidden", "trainer.tp", "trainer.cp", "trainer.dp", "trainer.pp", "trainer.vpp",
            "trainer.precision", "work.micro_batches", f"{C}.overlap_cost", *NETWORK),
        put("dp_s", time.dp_s, "gradients and parameters over DP x CP: what the compute does not hide + overlap_cost "
            "of what it does", *overlap, *NETWORK, *lora),
        put("optimizer_s", time.optimizer_s, "30 bytes a parameter of the shard / HBM + step_s", f"{C}.step_s",
            *STREAM, "trainer.dp", "trainer.cp", "trainer.ep", "trainer.distributed_optimizer", *sizes, *lora),
    ]
    total = put("total_s", time.total_s, "sum of the parts", *sums)
    put("tokens_per_s_per_gpu", work.tokens / (time.total_s * layout.gpus), "real tokens / (total x GPUs)", total,
        "work.tokens", "trainer.tp", "trainer.pp", "trainer.cp", "trainer.dp", unit="tokens/s")
    if prefix == "training":
        flops = flops_per_token(shape, work.attention_length, book=book)
        put("model_flops_per_s_per_gpu", flops * work.tokens / (time.total_s * layout.gpus),
            "FLOPs a token (causal, nothing recomputed) x real tokens / (total x GPUs)", "parameters.flops_per_token",
            total, "work.tokens", "trainer.tp", "trainer.pp", "trainer.cp", "trainer.dp", unit="FLOP/s")
