"""Book entries of the memory models: which key, which formula, which inputs. The numbers come from the models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from launch.cluster.spec import Gpu
from launch.model.shape import ModelShape
from launch.plan.book import Book
from launch.plan.layouts import TrainingLayout
from launch.planner.memory.activations import LayerActivations

if TYPE_CHECKING:
    from launch.planner.memory.rollout import ColocatedMemory, RolloutMemory
    from launch.planner.memory.training import StageMemory, TrainingMemory

C = "coefficients.memory"
KEY = "memory.training"
ATTENTION = tuple(f"model.{name}" for name in ("hidden", "heads", "kv_heads", "head_dim", "mlp_matrices", "qk_norm"))


class TrainingNotes:
    """Writes the entries of one `training_memory`. Published FSDP runs are checked, never planned: no entries."""

    def __init__(self, book: Book, shape: ModelShape, layout: TrainingLayout, gpu: Gpu, reference: str,
                 expandable_segments: bool, last: int, tokens_key: str) -> None:
        self.book, self.shape, self.layout, self.gpu, self.reference = book, shape, layout, gpu, reference
        self.expandable, self.last, self.tokens_key = expandable_segments, last, tokens_key
        self.experts = ("trainer.etp",) if shape.experts else ()

    def common(self, tokens: int, each: LayerActivations, head: int, working: int) -> None:
        """What all stages share."""
        kept, again = self._tensors()
        self._put("tokens", tokens, "tokens of a micro-batch on a CP rank", (self.tokens_key, "trainer.cp"), "tokens")
        self._put("layer_bytes", each.kept, "bytes a token and layer that the backward pass needs: 12 h + 4 kv + 6 "
                  "ffn in bf16, over TP (arXiv 2205.05198 with GQA and SwiGLU)", kept)
        self._put("layer_working", working, "tokens x (what one layer's backward recomputes + gradient of its widest "
                  "tensor + inputs gathered over TP)", (f"{KEY}.tokens", *again))
        self._put("head", head, "tokens x (padded V/TP x bytes of the loss's copies + head's input and gradient)",
                  (f"{KEY}.tokens", "model.vocab", "model.hidden", "trainer.tp", "trainer.precision"))

    def _tensors(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What the bytes that a layer keeps rest on, and those with which its backward works: all of its tensors are
        among the ones or the others, as `recompute` has it."""
        recompute, tp = self.layout.recompute, self.layout.tp
        how = ("trainer.tp", "trainer.precision", "trainer.recompute")
        outside = ("trainer.sequence_parallel",) if tp > 1 else ()
        widths = tuple(name for name in _widths(self.shape) if name != "model.experts")
        every = (*ATTENTION, *widths, *how, *outside, *self.experts)
        if "full" in recompute:
            return ("model.hidden", *how, *outside), every
        gathered = ("model.hidden",) if tp > 1 or "layernorm" in recompute or self.experts and recompute else ()
        recomputed = (*outside, *self.experts) if recompute else ()
        return every, (*gathered, "model.mlp_matrices", *widths, *how, *recomputed)

    def stage(self, stage: StageMemory, chunks: int) -> None:
        """The components of one stage."""
        number, mine = stage.stage, f"{KEY}.stage{stage.stage}"
        self._put(f"stage{number}.chunks", chunks, "1F1B: min(m, PP - i); interleaved: min(m v, 2 (PP - i - 1) + "
                  "(v - 1) PP + 1) (arXiv 2104.04473)", ("trainer.pp", "trainer.vpp", "work.micro_batches"), "chunks")
        rows, written = self._components(number), []
        for name, (formula, inputs) in rows.items():
            if name in stage.components:
                self._put(f"stage{number}.{name}", stage.components[name], formula, inputs)
                written.append(f"{mine}.{name}")
        self._put(f"stage{number}.allocated", stage.allocated, "sum of the components", written)
        fragmented = self.last > 0 and not self.expandable
        share = "expandable_share" if self.expandable else "slack_share"
        self._put(f"stage{number}.allocator", stage.reserved - stage.allocated,
                  "share x allocated" + (" + fragmentation x activations" if fragmented else ""),
                  (f"{mine}.allocated", f"{C}.{share}",
                   *((f"{C}.fragmentation_share", f"{mine}.activations") if fragmented else ())))
        self._put(f"stage{number}.total", stage.total, "allocated + allocator + context",
                  (f"{mine}.allocated", f"{mine}.allocator", _context(self.gpu, "context_bytes")))

    def _components(self, number: int) -> dict[str, tuple[str, Iterable[str]]]:
        """Component -> formula and inputs, an input before what rests on it."""
        counts = [f"parameters.stage{number}.dense"]
        shards: tuple[str, ...] = ("trainer.distributed_optimizer",)
        if self.layout.distributed_optimizer:
            shards += ("trainer.dp", "trainer.cp")
        expert_shards: tuple[str, ...] = ()
        if self.shape.experts:
            counts.append(f"parameters.stage{number}.experts")
            expert_shards = ("trainer.tp", "trainer.ep", *self.experts)
        layers, mine = f"parameters.stage{number}.layers", f"{KEY}.stage{number}"
        here = (f"{KEY}.head",) if number == self.last else ()
        on_device = self.reference == "device"
        return {
            "weights": ("2 bytes a parameter (fp32: 4; FP8: twice 1)", (*counts, "trainer.precision")),
            "gradients": ("grad_bytes a parameter", (*counts, "trainer.grad_bytes")),
            "optimizer": ("12 bytes a parameter (fp32: 8) / (DP x CP)",
                          (*counts, *shards, *expert_shards, "trainer.precision")),
            "adapters": ("layers x r (in + out) x (2 + gradients + 12 / (DP x CP))",
                         (layers, "model.lora_rank", *ATTENTION[:-1], _dense_width(self.shape), "trainer.tp",
                          "trainer.precision", "trainer.grad_bytes", *shards)),
            "sync": ("staging of the weight sync", ("sync.bucket_bytes", "trainer.pp")),
            "activations": ("chunks x layers / VPP x tokens x bytes a token and layer",
                            (f"{mine}.chunks", layers, "trainer.vpp", f"{KEY}.tokens", f"{KEY}.layer_bytes")),
            "reference": ("weights again" + ("" if on_device else ", beyond the activations' bytes"),
                          (*counts, "trainer.precision", *(() if on_device else (f"{mine}.activations",)))),
            "logits": ("of the head, last stage", (*here, "trainer.pp")),
            "workspace": ("max(0, layer's working set - logits)", (f"{KEY}.layer_working", "trainer.pp", *here)),
        }

    def whole(self, worst: int, total: int, limit: int) -> None:
        """The worst stage against the limit."""
        stages = tuple(f"{KEY}.stage{number}.total" for number in range(self.last + 1))
        self._put("worst_stage", worst, "stage with the largest total", stages, "")
        self._put("total", total, "of the worst stage", stages)
        self._put("limit", limit, "usable bytes x (1 - margin)", ("gpu.usable_bytes", f"{C}.margin_share"))

    def _put(self, name: str, value: float, formula: str, inputs: Iterable[str], unit: str = "bytes") -> None:
        self.book.computed(f"{KEY}.{name}", value, unit, formula, dict.fromkeys(inputs))


def write_rollout(book: Book, shape: ModelShape, gpu: Gpu, memory: RolloutMemory) -> None:
    """Entries of one `rollout_memory`."""
    widths = _widths(shape)
    held = tuple(name for name in widths if name != "model.experts_per_token")
    sizes = (*ATTENTION, *held, "model.qkv_bias", "model.all_biases")
    stage = ("model.layers", "rollout.pp")
    rows = {
        "weights": ("layers x (matrices/TP, KV heads at least 1 a rank) x bytes + padded V h/TP, twice unless tied",
                    (*sizes, *stage, "model.vocab", "model.tied", "rollout.tp", "rollout.weight_bytes")),
        "shadow": ("weights again: the next version is received beside the one that is served",
                   ("memory.rollout.weights", "sync.shadow")),
        "received": ("layers x matrices/TP x 2: received in bf16 beside the quantised weights",
                     (*ATTENTION[:-1], *held, *stage, "rollout.tp", "rollout.weight_bytes")),
        "graphs": ("CUDA graphs", (f"{C}.graph_bytes", "rollout.cuda_graphs")),
        "workspace": ("profiling pass of one iteration, and the sampler's fp32 logits",
                      ("model.hidden", "model.mlp_matrices", "model.vocab", *(name for name in widths if
                       name != "model.experts"), "rollout.tp", "rollout.max_num_seqs")),
        "sync": ("staging of the weight sync", ("sync.bucket_bytes",)),
        "context": ("CUDA context and NCCL", (_context(gpu, "engine_context_bytes"),)),
    }
    written = []
    for name, (formula, inputs) in rows.items():
        if name in memory.components:
            book.computed(f"memory.rollout.{name}", memory.components[name], "bytes", formula, dict.fromkeys(inputs))
            written.append(f"memory.rollout.{name}")
    book.computed("memory.rollout.limit", memory.limit, "bytes", "memory_utilization x usable bytes",
                  ("gpu.usable_bytes", "rollout.memory_utilization"))
    book.computed("memory.rollout.kv_cache", memory.kv_bytes, "bytes", "limit - all else",
                  ("memory.rollout.limit", *written))
    book.computed("memory.rollout.kv_bytes_per_token", memory.kv_bytes_per_token, "bytes",
                  "2 x layers/PP x ceil(n_kv/TP) x d x bytes, on one rank",
                  (*stage, "model.kv_heads", "model.head_dim", "rollout.tp", "rollout.kv_bytes"))
    book.computed("memory.rollout.kv_tokens", memory.kv_tokens, "tokens", "cache / bytes a token: of one replica",
                  ("memory.rollout.kv_cache", "memory.rollout.kv_bytes_per_token"))
    book.computed("memory.rollout.total", memory.total, "bytes", "sum of the components",
                  ("memory.rollout.kv_cache", *written))


def write_colocated(book: Book, memory: ColocatedMemory, gpu: Gpu, training: TrainingMemory, rollout: RolloutMemory,
                    offloaded: bool) -> None:
    """Entries of one `colocated_memory`."""
    from launch.planner.memory.training import RESIDENT
    resident = [f"{KEY}.stage{stage.stage}.{name}" for stage in training.stages for name in RESIDENT
                if name in stage.components]
    book.computed("memory.colocated.generating", memory.generating, "bytes",
                  "trainer's context" + ("" if offloaded else " and largest resident state") + " + engine's total",
                  (_context(gpu, "context_bytes"), "memory.rollout.total", *(() if offloaded else resident)))
    asleep = [f"memory.rollout.{name}" for name in ("graphs", "context") if name in rollout.components]
    book.computed("memory.colocated.training", memory.training, "bytes", "trainer's total + sleeping engine's graphs "
                  "and context", (f"{KEY}.total", *asleep))
    book.computed("memory.colocated.limit", memory.limit, "bytes", "usable bytes x (1 - margin)",
                  ("gpu.usable_bytes", f"{C}.margin_share"))


def _widths(shape: ModelShape) -> tuple[str, ...]:
    """Keys of the MLP's sizes."""
    names = ("experts", "experts_per_token", "moe_ffn", "shared_ffn") if shape.experts else ("ffn",)
    return tuple(f"model.{name}" for name in names)


def _dense_width(shape: ModelShape) -> str:
    return "model.shared_ffn" if shape.experts else "model.ffn"


def _context(gpu: Gpu, name: str) -> str:
    return f"{C}.process_bytes" if gpu.device == "cpu" else f"{C}.{name}"
