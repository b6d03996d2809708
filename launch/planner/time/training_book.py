"""Book entries of the training model: which key, which formula, which inputs. The numbers come from `training_time`.

Entries that a layout has no use for (TP collectives at TP 1) are written with 0, so that a plan has the same keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from launch.cluster.spec import ClusterSpec
from launch.model.shape import ModelShape
from launch.plan.book import Book
from launch.plan.layouts import TrainingLayout, TrainingWork, stage_layers
from launch.planner.parameters import flops_per_token, stage_parameters
from launch.planner.time.layer import PassCost
from launch.planner.time.training_inputs import Inputs

if TYPE_CHECKING:
    from launch.planner.time.training import TrainingTime

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


def write(book: Book, prefix: str, shape: ModelShape, layout: TrainingLayout, work: TrainingWork, cluster: ClusterSpec,
          lora_rank: int, layer: PassCost, head: PassCost, time: TrainingTime) -> None:
    """All numbers of one step, `prefix` before their keys: training or logprob."""
    stage_parameters(shape, layout, book=book)
    inputs = Inputs(prefix, shape, layout, cluster, lora_rank, trains=prefix == "training")

    def put(name: str, value: float, formula: str, *needs: str, unit: str = "s") -> str:
        key = f"{prefix}.{name}"
        book.computed(key, value, unit, formula, dict.fromkeys(needs))
        return key

    put("tokens_per_rank", work.micro_batch_tokens / layout.cp, "tokens of a micro-batch / CP",
        "work.micro_batch_tokens", "trainer.cp", unit="tokens")
    of_layer, of_head = inputs.layer(), inputs.head()
    parts = [put(f"layer.{name}_s", getattr(layer, f"{name}_s"), formula, *of_layer[name])
             for name, formula in PARTS.items()]
    each = put("layer_s", time.layer_s, "sum of the parts: one layer, one micro-batch", *parts)
    head_parts = {
        "matmul": put("head.matmul_s", head.matmul_s, "2 T h V / TP and its gradients, in bf16", *of_head["matmul"]),
        "elementwise": put("head.elementwise_s", head.elementwise_s, "bytes a logit of loss and log-probs x T V / TP",
                           *of_head["elementwise"])}
    last = put("head_s", time.head_s, "head and loss, one micro-batch", *head_parts.values())
    stages = range(len(stage_layers(shape, layout)))
    counts = tuple(f"parameters.stage{stage}.layers" for stage in stages)
    slots = (each, last, *counts)
    alone = len(stages) == 1
    number = put("slowest_stage", time.slowest_stage, "stage with the largest layers x layer_s (+ head_s)",
                 *(("trainer.pp",) if alone else slots), unit="")
    many = ("work.micro_batches", number, counts[time.slowest_stage])
    ends = time.slowest_stage == stages[-1]      # the head is on the last stage
    sums = [put(f"{name}_s", getattr(time, f"{name}_s"), "micro-batches x (layers x layer's part + head's) of the "
                "slowest stage", part, *((head_parts[name],) if ends and name in head_parts else ()),
                *(many if getattr(layer, f"{name}_s") else ()))
            for name, part in zip(PARTS, parts, strict=True)]
    sizes = tuple(f"parameters.stage{stage}.{kind}" for stage in stages
                  for kind in ("dense", *(["experts"] if shape.experts else [])))
    sums += [
        put("pp_bubble_s", time.pp_bubble_s, "(sum of slots - slowest) / v (arXiv 2104.04473)",
            *(("trainer.pp",) if alone else (*slots, "trainer.vpp"))),
        put("pp_p2p_s", time.pp_p2p_s, "T h bytes / TP a send; all of them with v = 1, else overlap_cost of them + "
            "fill; 0 without a pipeline", *inputs.sends()),
        put("dp_s", time.dp_s, "gradients and parameters over DP x CP: what the compute does not hide + overlap_cost "
            "of what it does; 0 where no weight has a gradient", *inputs.data_parallel(sizes, slots)),
        put("optimizer_s", time.optimizer_s, "30 bytes a parameter of the shard / HBM + step_s; step_s alone where no "
            "weight is updated", *inputs.optimizer(sizes)),
    ]
    total = put("total_s", time.total_s, "sum of the parts", *sums)
    put("tokens_per_s_per_gpu", work.tokens / (time.total_s * layout.gpus), "real tokens / (total x GPUs)", total,
        "work.tokens", "trainer.tp", "trainer.pp", "trainer.cp", "trainer.dp", unit="tokens/s")
    if prefix == "training":
        flops = flops_per_token(shape, work.attention_length, book=book)
        put("model_flops_per_s_per_gpu", flops * work.tokens / (time.total_s * layout.gpus),
            "FLOPs a token (causal, nothing recomputed) x real tokens / (total x GPUs)", "parameters.flops_per_token",
            total, "work.tokens", "trainer.tp", "trainer.pp", "trainer.cp", "trainer.dp", unit="FLOP/s")
