"""Replacements for Transformer Engine's modules on a CPU. `model` builds them if `cpu.needed()`; GPUs do not use them.

* `PackedAttention` and `PackedRotary`: attention and rotary embedding over packed documents, also under context
  parallelism (Megatron's own local attention refuses both);
* `RMSNorm`: torch's, marked for sequence parallelism (Megatron's wrapper refuses that).

Documents of similar length share one padded sub-batch. `scaled_dot_product_attention` therefore runs on dense
[documents, heads, length, d] blocks with at most twice the queries and keys, and there is never a mask over the whole
pack. The keys of a prefix are gathered before the keys of the document that continues it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.data.packing import Documents, zigzag_positions


@dataclass
class _SubBatch:
    """`documents` documents padded to `query` tokens (this CP rank's share) and `key` tokens (prefix, then the whole
    document)."""

    documents: int
    query: int
    key: int
    mask: torch.Tensor | None = None
    """bool [documents, 1, query, key]; None if plain causality is enough (no prefix, no CP)."""


@dataclass
class PackedDocuments(PackedSeqParams):
    """Megatron's `PackedSeqParams`, plus the position of each token in the padded sub-batches."""

    positions_T: torch.Tensor = field(kw_only=True)
    """int64, position in its sequence of each token of this CP rank."""
    sub_batches: tuple[_SubBatch, ...] = ()
    query_rows_T: torch.Tensor | None = None
    """int64, row of each of this rank's tokens in the padded queries; None if they are already in that order."""
    key_tokens_K: torch.Tensor | None = None
    """int64, token (rank-major over CP) for each of the padded keys; None as above."""
    cos_sin: torch.Tensor | None = None
    """RoPE of these tokens, computed once per micro-batch by `PackedRotary`."""


def plan_documents(documents: Documents, positions_T: torch.Tensor, cp: int, cp_rank: int) -> PackedDocuments:
    """Sub-batches and index maps of documents. With CP > 1, their lengths are multiples of 2 CP.

    Args:
        positions_T: position in its sequence of each token of this CP rank.
    """
    lengths, prefixes = documents.lengths_D, documents.prefix_lengths_D
    starts = np.cumsum(lengths) - lengths
    local = lengths // cp
    # Position of each token, in the order of the documents, among those gathered from the CP ranks.
    place_of = np.empty(lengths.sum(), np.int64)
    place_of[np.concatenate([np.repeat(starts, local) + zigzag_positions(lengths, cp, r) for r in range(cp)])] = \
        np.arange(len(place_of))

    sub_batches, query_start, key_tokens, queries = [], np.zeros(len(lengths), np.int64), [], 0
    for members in _similar_documents(lengths, prefixes):
        batch = _SubBatch(len(members), int(local[members].max()), int((prefixes + lengths)[members].max()))
        query_start[members] = queries + np.arange(len(members)) * batch.query
        queries += len(members) * batch.query
        key_tokens += [_keys_of(documents, starts, d, batch.key) for d in members]
        sub_batches.append(batch)
    query_rows_T = np.repeat(query_start - (np.cumsum(local) - local), local) + np.arange(local.sum())
    key_tokens_K = place_of[np.concatenate(key_tokens)]
    _add_masks(sub_batches, query_rows_T, positions_T, cp)

    cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    longest = int(lengths.max())
    return PackedDocuments(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest,
        max_seqlen_kv=longest, positions_T=positions_T, sub_batches=tuple(sub_batches),
        query_rows_T=_rows(query_rows_T, queries), key_tokens_K=_rows(key_tokens_K, len(place_of)))


def _similar_documents(lengths: np.ndarray, prefixes: np.ndarray) -> Iterator[np.ndarray]:
    """Groups of documents, with or without a prefix, whose numbers of keys and queries are within a factor of two."""
    for with_prefix in (False, True):
        documents = np.flatnonzero((prefixes > 0) == with_prefix)
        for of_similar_keys in _similar(documents, (prefixes + lengths)[documents]):
            yield from _similar(of_similar_keys, lengths[of_similar_keys])


def _similar(documents: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    order = np.argsort(-lengths, kind="stable")
    while len(order):
        count = int((2 * lengths[order] >= lengths[order[0]]).sum())
        yield documents[order[:count]]
        order = order[count:]


def _keys_of(documents: Documents, starts: np.ndarray, document: int, padded: int) -> np.ndarray:
    """Tokens of the prefix and of the document, padded with any token, because no query attends to those."""
    prefix, length = int(documents.prefix_lengths_D[document]), int(documents.lengths_D[document])
    tokens = np.full(padded, starts[document], np.int64)
    tokens[:prefix] = documents.prefix_starts_D[document] + np.arange(prefix)
    tokens[prefix:prefix + length] = starts[document] + np.arange(length)
    return tokens


def _add_masks(sub_batches: list[_SubBatch], query_rows_T: np.ndarray, positions_T: torch.Tensor, cp: int) -> None:
    """A query attends to the keys up to its own position. A padding query attends to the first key, never to none."""
    positions = torch.zeros(sum(b.documents * b.query for b in sub_batches), dtype=torch.int64)
    positions[torch.from_numpy(query_rows_T)] = positions_T
    sizes = [b.documents * b.query for b in sub_batches]
    for batch, mine in zip(sub_batches, positions.split(sizes), strict=True):
        if cp > 1 or batch.key > batch.query:
            batch.mask = mine.view(batch.documents, 1, batch.query, 1) >= torch.arange(batch.key)


def _rows(rows: np.ndarray, total: int) -> torch.Tensor | None:
    return None if np.array_equal(rows, np.arange(total)) else torch.from_numpy(rows)


class PackedAttention(torch.nn.Module):
    """Causal core attention over packed documents. With CP, the keys and values of the CP group are gathered and the
    queries stay in place: each rank has two mirrored chunks of every document (zig-zag, as in Transformer Engine).
    """

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None,
                 pg_collection: Any = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp

    def forward(self, q_Thd: torch.Tensor, k_Tgd: torch.Tensor, v_Tgd: torch.Tensor, attention_mask: None,
                packed_seq_params: PackedDocuments, **_: Any) -> torch.Tensor:
        """Tokens of this rank: [T, heads, d] and twice [T, kv heads, d]. Returns [T, heads x d]."""
        documents, dtype = packed_seq_params, q_Thd.dtype
        if self.cp_group.size() > 1:
            k_Tgd, v_Tgd = _GatherOverGroup.apply(torch.cat((k_Tgd, v_Tgd), dim=1), self.cp_group).chunk(2, dim=1)
        q_Thd = _ToRows.apply(q_Thd, documents.query_rows_T, sum(b.documents * b.query for b in documents.sub_batches))
        # In fp32 even for bf16 models: torch's CPU kernel is slower in bf16, up to six times for short documents, and
        # the gradient of a shared prompt is a sum over its trajectories.
        q_Thd, k_Kgd, v_Kgd = q_Thd.float(), k_Tgd.float(), v_Tgd.float()
        if documents.key_tokens_K is not None:
            k_Kgd, v_Kgd = (x.index_select(0, documents.key_tokens_K) for x in (k_Kgd, v_Kgd))

        outputs, query, key = [], 0, 0
        for batch in documents.sub_batches:
            q_stop, k_stop = query + batch.documents * batch.query, key + batch.documents * batch.key
            out_BhTd = F.scaled_dot_product_attention(
                _dense(q_Thd[query:q_stop], batch.documents), _dense(k_Kgd[key:k_stop], batch.documents),
                _dense(v_Kgd[key:k_stop], batch.documents), attn_mask=batch.mask, is_causal=batch.mask is None,
                scale=self.scale, enable_gqa=q_Thd.shape[1] != k_Tgd.shape[1])
            outputs.append(out_BhTd.to(dtype).transpose(1, 2).flatten(0, 1).flatten(1))
            query, key = q_stop, k_stop
        return _FromRows.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], documents.query_rows_T)


def _dense(x_Thd: torch.Tensor, documents: int) -> torch.Tensor:
    return x_Thd.unflatten(0, (documents, -1)).transpose(1, 2)


class _ToRows(torch.autograd.Function):
    """out[rows] = x, zero elsewhere. The map is one-to-one, so its gradient is a plain read (no index_add)."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, rows: torch.Tensor | None, total: int) -> torch.Tensor:
        ctx.rows = rows
        return x if rows is None else x.new_zeros(total, *x.shape[1:]).index_copy_(0, rows, x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad if ctx.rows is None else grad.index_select(0, ctx.rows), None, None


class _FromRows(torch.autograd.Function):
    """out = x[rows], the inverse of `_ToRows`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        ctx.rows, ctx.total = rows, x.shape[0]
        return x if rows is None else x.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        if ctx.rows is None:
            return grad, None
        return grad.new_zeros(ctx.total, *grad.shape[1:]).index_copy_(0, ctx.rows, grad), None


class _GatherOverGroup(torch.autograd.Function):
    """[T, ...] of each rank -> [W x T, ...] rank-major. The gradient is reduce-scattered back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        out = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class PackedRotary(torch.nn.Module):
    """Replaces Megatron's `RotaryEmbedding`: cos and sin of each packed token, [2, T, 1, d] in fp32, computed once per
    micro-batch from its positions."""

    def __init__(self, inv_freq: torch.Tensor) -> None:
        super().__init__()
        self.inv_freq = inv_freq        # not a buffer, so that a cast of the module to bf16 does not change it
        self._documents: PackedDocuments        # of the micro-batch; Megatron calls get_rotary_seq_len first

    def get_rotary_seq_len(self, inference_context: None, transformer: Any, transformer_input: Any, config: Any,
                           packed_seq_params: PackedDocuments) -> int:
        self._documents = packed_seq_params
        return packed_seq_params.max_seqlen_q

    def forward(self, max_seq_len: int, packed_seq: bool, cp_group: Any) -> torch.Tensor:
        documents = self._documents
        if documents.cos_sin is None:
            angles_Td = torch.outer(documents.positions_T.float(), self.inv_freq).repeat(1, 2)
            documents.cos_sin = torch.stack((angles_Td.cos(), angles_Td.sin())).unsqueeze(2)
        return documents.cos_sin


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with its weight marked so that Megatron sums its gradient over TP in sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel    # type: ignore[attr-defined]  # Megatron's own mark
