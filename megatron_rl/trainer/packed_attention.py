"""What stands in for Transformer Engine's modules on a CPU. Built by `model` where `cpu.needed()`; on a GPU unused.

* `PackedAttention` and `PackedRotary`: attention and rotary embedding over packed documents, also under context
  parallelism (Megatron's own local attention refuses both);
* `RMSNorm`: torch's, marked for sequence parallelism (Megatron's wrapper of it refuses that).

Documents of similar length share one padded sub-batch, so that `scaled_dot_product_attention` runs on dense
[documents, heads, length, d] blocks with at most twice the tokens, and no mask over the whole pack is ever made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.data.packing import zigzag_positions


@dataclass
class _SubBatch:
    """`documents` documents padded to `query` (this CP rank's share) and `key` (whole) tokens."""

    documents: int
    query: int
    key: int
    mask: torch.Tensor | None
    """bool [documents, 1, query, key]; None where plain causality is enough (no CP)."""


@dataclass
class PackedDocuments(PackedSeqParams):
    """Megatron's `PackedSeqParams` plus where each token lies in the padded sub-batches."""

    positions_T: torch.Tensor | None = None
    """int64, position inside the document of each token of this CP rank."""
    sub_batches: tuple[_SubBatch, ...] = ()
    query_rows_T: torch.Tensor | None = None
    """int64, row of each of this rank's tokens in the padded queries; None: they already lie that way."""
    key_rows_T: torch.Tensor | None = None
    """int64, row of each token (rank-major over CP) in the padded keys; None as above."""
    cos_sin: torch.Tensor | None = None
    """RoPE of these tokens, made once a micro-batch by `PackedRotary`."""


def plan_documents(lengths: np.ndarray, cp: int, cp_rank: int) -> PackedDocuments:
    """Sub-batches and index maps of documents with (padded) `lengths`, each a multiple of 2 CP if CP > 1."""
    order = np.argsort(-lengths, kind="stable")
    groups: list[list[int]] = []
    for document in order:
        if not groups or 2 * lengths[document] < lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(int(document))

    query_start, key_start = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    sub_batches, queries, keys = [], 0, 0
    for group in groups:
        longest = int(lengths[group[0]])
        for slot, document in enumerate(group):
            query_start[document] = queries + slot * (longest // cp)
            key_start[document] = keys + slot * longest
        sub_batches.append(_SubBatch(len(group), longest // cp, longest, _zigzag_mask(lengths[group], cp, cp_rank)))
        queries += len(group) * (longest // cp)
        keys += len(group) * longest

    local = lengths // cp
    place_T = np.arange(local.sum()) - np.repeat(np.cumsum(local) - local, local)
    query_rows_T = np.repeat(query_start, local) + place_T
    positions = [zigzag_positions(lengths, cp, r) for r in range(cp)]
    key_rows_T = np.concatenate([np.repeat(key_start, local) + p for p in positions])
    cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    longest = int(lengths.max())
    return PackedDocuments(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest,
        max_seqlen_kv=longest, positions_T=torch.from_numpy(positions[cp_rank]), sub_batches=tuple(sub_batches),
        query_rows_T=_rows(query_rows_T, queries), key_rows_T=_rows(key_rows_T, keys),
    )


def _rows(rows_T: np.ndarray, total: int) -> torch.Tensor | None:
    return None if np.array_equal(rows_T, np.arange(total)) else torch.from_numpy(rows_T)


def _zigzag_mask(lengths: np.ndarray, cp: int, cp_rank: int) -> torch.Tensor | None:
    if cp == 1:
        return None
    longest = int(lengths.max())
    positions = np.zeros((len(lengths), longest // cp), np.int64)   # padding rows look at key 0: never an empty row
    for row, length in zip(positions, lengths, strict=True):
        row[:length // cp] = zigzag_positions(np.array([length]), cp, cp_rank)
    return torch.from_numpy(positions)[:, None, :, None] >= torch.arange(longest)


class PackedAttention(torch.nn.Module):
    """Causal core attention over packed documents; with CP the keys and values of the CP group are gathered and the
    queries stay where they are, two mirrored chunks of every document a rank (zig-zag, as Transformer Engine has it).
    """

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None,
                 pg_collection: Any = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp

    def forward(self, q_Thd: torch.Tensor, k_Tgd: torch.Tensor, v_Tgd: torch.Tensor, attention_mask: None,
                packed_seq_params: PackedDocuments | None = None, **_: Any) -> torch.Tensor:
        """Tokens of this rank, [T, heads, d] and twice [T, kv heads, d]; returns [T, heads x d]."""
        documents = packed_seq_params
        if self.cp_group.size() > 1:
            k_Tgd, v_Tgd = _GatherOverGroup.apply(torch.cat((k_Tgd, v_Tgd), dim=1), self.cp_group).chunk(2, dim=1)
        queries = sum(s.documents * s.query for s in documents.sub_batches)
        keys = sum(s.documents * s.key for s in documents.sub_batches)
        q_Thd = _ToRows.apply(q_Thd, documents.query_rows_T, queries)
        k_Tgd = _ToRows.apply(k_Tgd, documents.key_rows_T, keys)
        v_Tgd = _ToRows.apply(v_Tgd, documents.key_rows_T, keys)

        outputs, query, key = [], 0, 0
        for batch in documents.sub_batches:
            q_stop, k_stop = query + batch.documents * batch.query, key + batch.documents * batch.key
            # In fp32 also for bf16 models: torch's CPU kernel is slower in bf16, up to six times for short documents.
            out_BhTd = F.scaled_dot_product_attention(
                _dense(q_Thd[query:q_stop], batch.documents).float(), _dense(k_Tgd[key:k_stop], batch.documents).float(),
                _dense(v_Tgd[key:k_stop], batch.documents).float(), attn_mask=batch.mask, is_causal=batch.mask is None,
                scale=self.scale, enable_gqa=q_Thd.shape[1] != k_Tgd.shape[1])
            outputs.append(out_BhTd.to(q_Thd.dtype).transpose(1, 2).flatten(0, 1).flatten(1))
            query, key = q_stop, k_stop
        return _FromRows.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], documents.query_rows_T)


def _dense(x_Thd: torch.Tensor, documents: int) -> torch.Tensor:
    return x_Thd.unflatten(0, (documents, -1)).transpose(1, 2)


class _ToRows(torch.autograd.Function):
    """out[rows] = x, zero elsewhere. The map is one to one, so its gradient is a plain read (no index_add)."""

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
    """[T, ...] of each rank -> [W x T, ...] rank-major; the gradient is reduce-scattered back."""

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
    """In the place of Megatron's `RotaryEmbedding`: cos and sin of each packed token, [2, T, 1, d] in fp32, computed
    once a micro-batch from its positions."""

    def __init__(self, inv_freq: torch.Tensor) -> None:
        super().__init__()
        self.inv_freq = inv_freq        # no buffer: a cast of the module to bf16 must not reach it
        self._documents: PackedDocuments | None = None

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
    """torch's RMSNorm, its weight marked so that Megatron sums its gradient over TP under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
