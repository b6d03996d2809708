"""The layouts that the search tries: all that divide the model, obey the pins, and keep TP groups within NVLink.

Layouts are rejected here by arithmetic only, for example a TP that does not divide the heads. Each reason is kept for
the explanation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from launch.model.architecture import Architecture
from launch.model.padding import VLLM_VOCAB_MULTIPLE, round_up
from launch.plan.layouts import Precision, RolloutLayout, TrainingLayout, layers_of_stage

MAX_PP = 16
RECOMPUTE: dict[str, tuple[str, ...]] = {"none": (), "selective": ("core_attn",), "full": ("full",)}


@dataclass(frozen=True)
class Pins:
    """Sizes that the configuration fixes. The search chooses those that are None."""

    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    dp: int | None = None
    sequence_parallel: bool | None = None
    recompute: str | None = None
    token_budget: int | None = None
    training_nodes: int | None = None
    replicas: int | None = None
    rollout_tp: int | None = None
    max_num_seqs: int | None = None
    precision: Precision = "bf16"
    rollout_precision: Precision = "bf16"
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = True
    hidden_gathers: float = 1.0
    """See `TrainingLayout`, as the next."""
    fused_gradients: bool = True
    memory_utilization: float = 0.85
    cuda_graphs: bool = True
    tp_across_nodes: bool = False
    max_num_batched_tokens: int | None = None
    """Upper bound on the sequences that an engine runs at once."""
    kv_cache_bytes: int | None = None
    """Cache of an engine on a CPU."""
    allow_cp: bool = True
    """The other keys of the configuration allow context parallelism."""
    allow_sequence_parallel: bool = True

    def of(self, key: str) -> Any:
        """The size for a dotted key of `KEY_OF_PIN`; None if it is searched."""
        return getattr(self, PIN_OF_KEY[key])

    def without(self, *names: str) -> Pins:
        """The same pins without these fields, which are then searched."""
        searched: dict[str, Any] = dict.fromkeys(names)
        return replace(self, **searched)


KEY_OF_PIN = {
    "tp": "trainer.tp", "pp": "trainer.pp", "vpp": "trainer.vpp", "cp": "trainer.cp", "dp": "trainer.dp",
    "sequence_parallel": "trainer.sequence_parallel", "recompute": "trainer.recompute", "replicas": "rollout.replicas",
    "rollout_tp": "rollout.tp", "max_num_seqs": "rollout.max_num_seqs",
    "training_nodes": "placement.training_nodes", "token_budget": "trainer.token_budget"}
"""Field of `Pins` -> key of the configuration, for the fields that may also be searched."""
PIN_OF_KEY = {key: name for name, key in KEY_OF_PIN.items()}


@dataclass
class Space:
    """All layouts of one model on nodes of one size."""

    shape: Architecture
    gpus_per_node: int
    pins: Pins
    teacher: Architecture | None = None
    """Has the parallel sizes of the training ranks, but need not divide evenly over the pipeline."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Rejected value, such as `TP 16` -> the reason."""

    def training(self) -> Iterator[TrainingLayout]:
        """Layouts of one replica (DP 1), those with the least recomputation first."""
        for tp in self._training_tp():
            for cp in self._cp(tp):
                for pp in self._pp():
                    for vpp in self._vpp(pp):
                        yield from (self._layout(tp, cp, pp, vpp, ep) for ep in self._ep(tp))

    def _layout(self, tp: int, cp: int, pp: int, vpp: int, ep: int) -> TrainingLayout:
        parallel = self.pins.sequence_parallel
        if parallel is None:
            parallel = tp > 1 and self.pins.allow_sequence_parallel
        stages = layers_of_stage(self.shape.layers, pp, vpp)
        return TrainingLayout(
            tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, sequence_parallel=parallel,
            precision=self.pins.precision, distributed_optimizer=self.pins.distributed_optimizer,
            overlap_grad_reduce=self.pins.overlap_grad_reduce, hidden_gathers=self.pins.hidden_gathers,
            fused_gradients=self.pins.fused_gradients, recompute=RECOMPUTE[self.pins.recompute or "none"],
            layers_of_stage=tuple(sum(map(len, stage)) for stage in stages))

    def _ep(self, tp: int) -> tuple[int, ...]:
        """Expert parallel sizes that stay inside a node with TP. The search checks that DP x CP is a multiple."""
        if not self.shape.experts:
            return (1,)
        return tuple(ep for ep in _divisors(max(1, self.gpus_per_node // tp)) if self.shape.experts % ep == 0)

    def recomputations(self, layout: TrainingLayout) -> Iterator[TrainingLayout]:
        """The layout with each allowed amount of recomputation, the least first. `auto` tries none, then full: with
        flash attention, `selective` saves no memory."""
        for name in (self.pins.recompute,) if self.pins.recompute else ("none", "full"):
            yield replace(layout, recompute=RECOMPUTE[name])

    def rollout(self) -> Iterator[RolloutLayout]:
        """Layouts of one engine. The number of engines and `max_num_seqs` are chosen later."""
        shape = self.shape
        for tp in self._sizes(self.pins.rollout_tp, "rollout TP"):
            kv_ok = shape.engine_divides_kv_heads(tp)
            ffn = shape.moe_ffn or shape.ffn
            if shape.heads % tp or not kv_ok:
                self._reject(f"rollout TP {tp}", f"{shape.heads} heads and {shape.kv_heads} KV heads do not divide")
            elif ffn % tp or round_up(shape.vocab, VLLM_VOCAB_MULTIPLE) % tp:
                self._reject(f"rollout TP {tp}", f"the MLP of {ffn} or the vocabulary does not divide")
            else:
                yield RolloutLayout(tp=tp, weight_precision=self.pins.rollout_precision,
                                    memory_utilization=self.pins.memory_utilization,
                                    cuda_graphs=self.pins.cuda_graphs)

    def _training_tp(self) -> Iterator[int]:
        for tp in self._sizes(self.pins.tp, "TP"):
            if tp == 1 and self.pins.sequence_parallel and self.pins.tp is None:
                self._reject("TP 1", "trainer.sequence_parallel shards the sequence over a TP group")
                continue
            for what, size in (*_divided_by_tp(self.shape, ""),
                               *(_divided_by_tp(self.teacher, " of the teacher") if self.teacher else ())):
                if size % tp:
                    self._reject(f"TP {tp}", f"it does not divide the {size} {what}")
                    break
            else:
                yield tp

    def _sizes(self, pinned: int | None, what: str) -> Iterator[int]:
        across = (2 * self.gpus_per_node,) if self.pins.tp_across_nodes and what == "rollout TP" else ()
        for size in (pinned,) if pinned else (*_divisors(self.gpus_per_node), *across):
            if self.gpus_per_node % size and not (self.pins.tp_across_nodes and size % self.gpus_per_node == 0):
                self._reject(f"{what} {size}", f"a node has {self.gpus_per_node} GPUs: TP groups stay inside a node "
                                               "(placement.tp_across_nodes allows whole nodes)")
            else:
                yield size

    def _cp(self, tp: int) -> Iterator[int]:
        room = max(1, self.gpus_per_node // tp)
        for cp in (self.pins.cp,) if self.pins.cp else _divisors(room) if self.pins.allow_cp else (1,):
            if room % cp and (tp * cp) % self.gpus_per_node:
                self._reject(f"TP {tp} CP {cp}", f"blocks of {tp * cp} GPUs do not fill a whole number of nodes of "
                                                 f"{self.gpus_per_node}")
            else:
                yield cp

    def _pp(self) -> Iterator[int]:
        for pp in (self.pins.pp,) if self.pins.pp else range(1, min(MAX_PP, self.shape.layers) + 1):
            if self.pins.pp is None and pp > 1 and self.shape.layers % pp:
                self._reject(f"PP {pp}", f"it does not divide the {self.shape.layers} layers (pin trainer.pp for "
                                         "uneven stages)")
            elif pp > self.shape.layers:
                self._reject(f"PP {pp}", f"the model has {self.shape.layers} layers")
            elif self.teacher and pp > self.teacher.layers:
                self._reject(f"PP {pp}", f"the teacher has {self.teacher.layers} layers")
            else:
                yield pp

    def _vpp(self, pp: int) -> Iterator[int]:
        per_stage, rest = divmod(self.shape.layers, pp)
        for vpp in (self.pins.vpp,) if self.pins.vpp else _divisors(per_stage):
            if vpp > 1 and (pp == 1 or rest or per_stage % vpp):
                self._reject(f"PP {pp} VPP {vpp}", f"PP x VPP does not divide the {self.shape.layers} layers"
                             if pp > 1 else "VPP interleaves pipeline stages")
            elif vpp > 1 and self.teacher and self.teacher.layers % (pp * vpp):
                self._reject(f"PP {pp} VPP {vpp}", f"PP x VPP does not divide the {self.teacher.layers} layers of the "
                                                   "teacher")
            else:
                yield vpp

    def _reject(self, what: str, why: str) -> None:
        self.rejected.setdefault(what, why)


def _divided_by_tp(shape: Architecture, whose: str) -> Iterator[tuple[str, int]]:
    yield from ((f"heads{whose}", shape.heads), (f"KV heads{whose}", shape.kv_heads),
                (f"MLP columns{whose}", shape.moe_ffn or shape.ffn))


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)
