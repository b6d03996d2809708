"""Independent truths for the layout tests: what each side holds, cut with torch operations and no tiles.

`megatron_shards` follows Megatron's own storage rules (reshape by query group, chunk over TP), `vllm_shards` vLLM's
(separate cuts of q, k, v; repeated KV heads; vocabulary padded to 64). Every element of a model is a unique number.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import torch
from torch import Tensor

from launch.model.architecture import Architecture
from launch.model.padding import round_up
from launch.plan.layouts import layers_of_stage, rank_coordinates
from launch.plan.plan import TrainingPlan
from megatron_rl.layouts.megatron import EMBEDDING, HEAD, canonical_tensors, megatron_layout
from megatron_rl.layouts.tiles import ParamLayout, Tile, contiguous_stride, tile_view
from megatron_rl.weight_sync.plan.buckets import Copy
from megatron_rl.weight_sync.plan.copies import Destination, Source
from megatron_rl.weight_sync.plan.manifest import SyncManifest

PADDING = -1.0
Q_K_V = ("q", "k", "v")


def architecture(**changes) -> Architecture:
    """A small model with sizes that do not fit one another by chance."""
    sizes = dict(family="qwen3", layers=4, hidden=7, ffn=20, heads=8, kv_heads=4, head_dim=3, vocab=301,
                 tied=False, qkv_bias=True, qk_norm=True, norm_eps=1e-6, max_positions=64,
                 initializer_range=0.02, rope={"rope_type": "default", "rope_theta": 10000.0})
    return Architecture(**{**sizes, **changes})


def training_plan(a: Architecture, tp: int = 1, pp: int = 1, vpp: int = 1, cp: int = 1, dp: int = 1,
                  stages: tuple | None = None) -> TrainingPlan:
    return TrainingPlan(tp=tp, pp=pp, vpp=vpp, cp=cp, dp=dp, sequence_parallel=tp > 1,
                        padded_vocab=round_up(a.vocab, 128 * tp),
                        layers_of_stage=stages or layers_of_stage(a.layers, pp, vpp),
                        ranks=rank_coordinates(tp, cp, dp, pp))


def numbered(a: Architecture, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every tensor of the model; every element a number that no other element has."""
    tensors, count = {}, 0
    for tensor in canonical_tensors(a):
        size = torch.Size(tensor.shape).numel()
        tensors[tensor.name] = torch.arange(count, count + size, dtype=torch.int64).view(tensor.shape).to(dtype)
        count += size
    assert count < 2 ** 24 or dtype != torch.float32, "float32 cannot number so many elements"
    return tensors


def megatron_shards(a: Architecture, training: TrainingPlan, rank: int,
                    tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a training rank (local spec), padding rows set to PADDING."""
    at, tp = training.ranks[rank], training.tp
    shards: dict[str, Tensor] = {}
    for chunk, layers in enumerate(training.layers_of_stage[at.pp]):
        for local, layer in enumerate(layers):
            hf = {name.removeprefix(f"model.layers.{layer}."): tensor for name, tensor in tensors.items()}
            for name, value in _megatron_layer(a, hf, at.tp, tp).items():
                shards[f"chunk{chunk}.decoder.layers.{local}.{name}"] = value
    last_chunk = f"chunk{training.vpp - 1}."

    def vocabulary(name: str) -> Tensor:
        padding = torch.full((training.padded_vocab - a.vocab, a.hidden), PADDING)
        return torch.cat([tensors[name], padding.to(tensors[name].dtype)]).chunk(tp)[at.tp]

    if at.pp == 0:
        shards["chunk0.embedding.word_embeddings.weight"] = vocabulary(EMBEDDING)
    if at.pp == training.pp - 1:
        shards[f"{last_chunk}decoder.final_layernorm.weight"] = tensors["model.norm.weight"]
        if not a.tied:
            shards[f"{last_chunk}output_layer.weight"] = vocabulary(HEAD)
        elif training.pp > 1:
            shards[f"{last_chunk}output_layer.weight"] = vocabulary(EMBEDDING)
    return {name: value.clone() for name, value in shards.items()}


def _megatron_layer(a: Architecture, hf: dict[str, Tensor], t: int, tp: int) -> dict[str, Tensor]:
    def by_query_group(kind: str) -> Tensor:
        groups = [hf[f"self_attn.{p}_proj.{kind}"].unflatten(0, (a.kv_heads, -1)) for p in Q_K_V]
        return torch.cat(groups, dim=1).flatten(0, 1).chunk(tp)[t]

    norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    if a.post_norm:
        norms = {"self_attn_bda.norm": "post_attention_layernorm", "mlp_bda.norm": "post_feedforward_layernorm"}
    shards = {
        **{f"{name}.weight": hf[f"{theirs}.weight"] for name, theirs in norms.items()},
        "self_attention.linear_qkv.weight": by_query_group("weight"),
        "self_attention.linear_proj.weight": hf["self_attn.o_proj.weight"].chunk(tp, dim=1)[t],
        "mlp.linear_fc1.weight": torch.cat([hf[f"mlp.{half}_proj.weight"].chunk(tp)[t] for half in ("gate", "up")]),
        "mlp.linear_fc2.weight": hf["mlp.down_proj.weight"].chunk(tp, dim=1)[t],
    }
    if a.qkv_bias:
        shards["self_attention.linear_qkv.bias"] = by_query_group("bias")
    if a.qk_norm:
        parts = tp if a.qk_norm_whole else 1
        shards |= {f"self_attention.{p}_layernorm.weight": hf[f"self_attn.{p}_norm.weight"].chunk(parts)[t % parts]
                   for p in "qk"}
    return shards


def vllm_shards(a: Architecture, tp: int, worker: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a rollout worker, padding rows set to PADDING."""
    def heads(name: str, count: int) -> Tensor:
        by_head = tensors[name].unflatten(0, (count, -1))
        if count >= tp:
            return by_head.chunk(tp)[worker].flatten(0, 1)
        return by_head[worker // (tp // count)]

    def vocabulary(name: str) -> Tensor:
        padding = torch.full((round_up(a.vocab, 64) - a.vocab, a.hidden), PADDING)
        return torch.cat([tensors[name], padding.to(tensors[name].dtype)]).chunk(tp)[worker]

    shards = {"model.embed_tokens.weight": vocabulary(EMBEDDING), "model.norm.weight": tensors["model.norm.weight"]}
    if not a.tied:
        shards["lm_head.weight"] = vocabulary(HEAD)
    for layer in range(a.layers):
        hf = f"model.layers.{layer}."
        for kind in ("weight", "bias") if a.qkv_bias else ("weight",):
            parts = zip(Q_K_V, (a.heads, a.kv_heads, a.kv_heads), strict=True)
            shards[f"{hf}self_attn.qkv_proj.{kind}"] = torch.cat(
                [heads(f"{hf}self_attn.{p}_proj.{kind}", count) for p, count in parts])
        shards[f"{hf}mlp.gate_up_proj.weight"] = torch.cat(
            [tensors[f"{hf}mlp.{half}_proj.weight"].chunk(tp)[worker] for half in ("gate", "up")])
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            shards[hf + name] = tensors[hf + name].chunk(tp, dim=1)[worker]
        shards |= {name: tensors[name] for name in tensors if name.startswith(hf) and name.endswith("norm.weight")}
    return {name: value.contiguous() for name, value in shards.items()}


def layouts_from_numbers(a: Architecture, shards: dict[str, Tensor]) -> tuple[ParamLayout, ...]:
    """Layouts read off shards of `numbered` tensors: where each number comes from is known.

    Adjacent rows (elements, if there is one dimension) that are adjacent in one tensor too make one tile.
    """
    canonical = canonical_tensors(a)
    first = [0, *accumulate(torch.Size(tensor.shape).numel() for tensor in canonical)]
    layouts = []
    for name, shard in shards.items():
        columns = shard.shape[1] if shard.dim() == 2 else 1
        tiles: list[dict] = []
        for row, number in enumerate(shard.view(-1, columns)[:, 0].long().tolist()):
            if number == PADDING:
                continue
            index = bisect_right(first, number) - 1
            full = canonical[index].shape
            start = list(divmod(number - first[index], full[1])) if len(full) == 2 else [number - first[index]]
            last = tiles[-1] if tiles else None
            if last and last["tensor"] == canonical[index].name and last["start"][1:] == start[1:] \
                    and last["start"][0] + last["rows"] == start[0]:
                last["rows"] += 1
            else:
                tiles.append({"tensor": canonical[index].name, "start": start, "rows": 1, "offset": row * columns})
        layouts.append(ParamLayout(name, tuple(shard.shape), tuple(
            Tile(t["tensor"], tuple(t["start"]), (t["rows"], *shard.shape[1:]),
                 contiguous_stride(tuple(shard.shape)), t["offset"]) for t in tiles)))
    return tuple(layouts)


def sources(a: Architecture, training: TrainingPlan, dtype: str = "float32") -> list[Source]:
    built = []
    for at in training.ranks:
        layouts = tuple(megatron_layout(a, training, at.rank, "local"))
        built.append(Source(at, layouts, {layout.name: dtype for layout in layouts}))
    return built


def destinations(a: Architecture, tp: int, replicas: int = 1, dtype: str = "float32") -> list[Destination]:
    numbers, built = numbered(a), []
    for worker in range(tp):
        layouts = layouts_from_numbers(a, vllm_shards(a, tp, worker, numbers))
        built += [Destination(replica, worker, layouts, {layout.name: dtype for layout in layouts},
                              {layout.name: layout.padding for layout in layouts}) for replica in range(replicas)]
    return built


def execute(manifest: SyncManifest, trainer: dict[int, dict[str, Tensor]],
            rollout: dict[tuple[int, int], dict[str, Tensor]]) -> None:
    """Carry out a manifest over real bytes: pack each bucket, hand it over, unpack it."""
    for edge in manifest.edges:
        for bucket in edge.buckets:
            message = torch.full((bucket.nbytes,), 0xAB, dtype=torch.uint8)
            for copy in bucket.copies:
                _elements(message, copy).copy_(tile_view(trainer[edge.rank][copy.source], copy.source_tile))
            for copy in bucket.copies:
                parameter = rollout[edge.replica, edge.worker][copy.destination]
                tile_view(parameter, copy.destination_tile).copy_(_elements(message, copy))


def _elements(message: Tensor, copy: Copy) -> Tensor:
    part = message[copy.at:copy.at + copy.nbytes].view(getattr(torch, copy.dtype))
    return part.view(copy.source_tile.shape)
