"""Log-probs and entropy from logits that are sharded over the vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist

# Number of logits per chunk, by device: what fits into a core's cache on a CPU, and what fills a GPU.
_CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}


def vocab_parallel_logprobs(logits_TV: torch.Tensor, labels_T: torch.Tensor, *, vocab: int, temperature: float,
                            group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(label) and the entropy of softmax(logits / temperature), both float32 [T].

    Args:
        logits_TV: [T, padded vocabulary / TP], this rank's columns. **The backward pass overwrites its storage** with
            its gradient, so nothing else may read it afterwards.
        labels_T: int64, ids of the whole vocabulary, equal on all ranks of `group`.
        vocab: true vocabulary size. Columns from there on are padding: they are excluded from the softmax and get no
            gradient. (vLLM and Hugging Face have no padding columns.)
        temperature: the sampling temperature; logits, never log-probs, are divided by it.
        group: the tensor parallel group; None for a single rank.

    Memory: the logits are the only full-size tensor, forward and backward. The peak on top of
    T x V/TP x sizeof(logits) is 3 float32 buffers of one chunk (3 x 2 MiB on a CPU, 3 x 64 MiB on a GPU; 3 rows if a
    row is longer), plus O(T). The forward pass has one collective of 16 T bytes per rank, the backward pass none. All
    arithmetic is in float32 for any type of the logits.
    """
    return _VocabParallelLogprobs.apply(logits_TV, labels_T, vocab, temperature, group)


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV: torch.Tensor, labels_T: torch.Tensor, vocab: int, temperature: float,
                group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
        ranks, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        first = rank * logits_TV.shape[1]
        columns = max(0, min(logits_TV.shape[1], vocab - first))
        column_T = labels_T - first
        owned_T = (column_T >= 0) & (column_T < columns)
        column_T = torch.where(owned_T, column_T, 0)

        stats_4T = _shard_statistics(logits_TV[:, :columns], column_T, owned_T, temperature)
        if ranks > 1:
            gathered = stats_4T.new_empty(ranks * 4, stats_4T.shape[1])
            dist.all_gather_into_tensor(gathered, stats_4T, group=group)
        else:
            gathered = stats_4T
        top_RT, sum_RT, weighted_RT, label_RT = gathered.unflatten(0, (ranks, 4)).unbind(1)
        # All terms are relative to the largest logit, so its size (and rounding) cancels before, not after
        top_T = top_RT.amax(0)
        below_RT = torch.where(sum_RT > 0, top_RT - top_T, 0.0)
        scale_RT = torch.where(sum_RT > 0, below_RT.exp(), 0.0)
        sum_T = (sum_RT * scale_RT).sum(0)
        log_sum_T = sum_T.log()
        entropy_T = log_sum_T - ((weighted_RT + below_RT * sum_RT) * scale_RT).sum(0) / sum_T
        owner_RT = labels_T // logits_TV.shape[1] == torch.arange(ranks, device=labels_T.device)[:, None]
        label_T = torch.where(owner_RT, label_RT + below_RT, 0.0).sum(0)

        ctx.save_for_backward(logits_TV, column_T, owned_T, top_T, log_sum_T, entropy_T)
        ctx.columns, ctx.temperature = columns, temperature
        ctx.set_materialize_grads(False)
        return label_T - log_sum_T, entropy_T

    @staticmethod
    def backward(ctx, grad_logprobs_T: torch.Tensor | None, grad_entropy_T: torch.Tensor | None):
        logits_TV, column_T, owned_T, top_T, log_sum_T, entropy_T = ctx.saved_tensors
        with torch.no_grad():
            for rows in _chunks(logits_TV):
                out = logits_TV[rows, :ctx.columns]
                log_p = _scaled(out, ctx.temperature).sub_(top_T[rows, None]).sub_(log_sum_T[rows, None])
                g_logprobs = torch.zeros_like(top_T[rows]) if grad_logprobs_T is None else grad_logprobs_T[rows]
                if grad_entropy_T is None:                      # d log p_y/dx = 1[y] - p
                    grad = log_p.exp_().mul_(-g_logprobs[:, None])
                else:                                           # and dH/dx = -p (log p + H)
                    grad = (log_p + entropy_T[rows, None]).mul_(-grad_entropy_T[rows, None])
                    grad.sub_(g_logprobs[:, None]).mul_(log_p.exp_())
                if ctx.columns:
                    chosen = torch.where(owned_T[rows], g_logprobs, 0.0)
                    grad.scatter_add_(1, column_T[rows, None], chosen[:, None])
                out.copy_(grad if ctx.temperature == 1.0 else grad.div_(ctx.temperature))
                logits_TV[rows, ctx.columns:] = 0
        return logits_TV, None, None, None, None


def _shard_statistics(logits_TV: torch.Tensor, column_T: torch.Tensor, owned_T: torch.Tensor,
                      temperature: float) -> torch.Tensor:
    """float32 [4, T] of one shard: max x; sum exp(x - max); sum (x - max) exp(x - max); x - max of the label if this
    shard has it. A shard with only padding has a sum of 0 and the lowest finite number as its maximum."""
    stats_4T = torch.zeros(4, logits_TV.shape[0], device=logits_TV.device)
    if not logits_TV.shape[1]:
        stats_4T[0] = torch.finfo(torch.float32).min
        return stats_4T
    for rows in _chunks(logits_TV):
        x = _scaled(logits_TV[rows], temperature)
        top = x.amax(1)
        stats_4T[0, rows] = top
        x.sub_(top[:, None])
        stats_4T[3, rows] = torch.where(owned_T[rows], x.gather(1, column_T[rows, None]).squeeze(1), 0.0)
        p = x.exp()
        stats_4T[1, rows] = p.sum(1)
        stats_4T[2, rows] = torch.bmm(p.unsqueeze(1), x.unsqueeze(2)).flatten()
    return stats_4T


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """A float32 copy, divided by the temperature."""
    copy = logits.to(torch.float32, copy=True)
    return copy if temperature == 1.0 else copy.div_(temperature)


def _chunks(logits_TV: torch.Tensor):
    size = max(1, _CHUNK_ELEMENTS[logits_TV.device.type] // max(1, logits_TV.shape[1]))
    return (slice(start, start + size) for start in range(0, logits_TV.shape[0], size))
