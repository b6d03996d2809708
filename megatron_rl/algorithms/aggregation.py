"""Aggregation of token losses: a weight for every token, and one normaliser for the whole optimizer batch.

The loss is the sum over tokens of weight x token loss, divided once by the normaliser. Both are sums, so a batch may be
trained in parts. No rank divides by a number of its own, so the gradient does not depend on DP, CP, the micro-batch
size or packing. A mean per micro-batch would give short answers more weight (open-instruct#1161).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

AggregationKind = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


def loss_weights(lengths_B: np.ndarray, kept_B: np.ndarray, kind: AggregationKind,
                 max_new_tokens: int) -> tuple[np.ndarray, float]:
    """Compute the weight of each sampled token of sequence b, and the normaliser. S are the kept sequences and l_b is
    the number of sampled tokens in sequence b. Tokens that tools or an environment wrote do not count.

    | kind | weight | normaliser | source |
    |---|---|---|---|
    | `token_mean` | 1 | sum of l over S | DAPO, arXiv:2503.14476, section 3.3 |
    | `sequence_mean` | 1 / l_b | size of S | GRPO, arXiv:2402.03300; favours short right answers |
    | `sequence_sum` | 1 | size of S | the policy-gradient estimator, unnormalised |
    | `constant` | 1 / max_new_tokens | size of S | Dr. GRPO, arXiv:2503.20783 |

    Sequences that are not kept or have no sampled token get weight 0 and are excluded from the sum and the count. If no
    sequence is kept, all weights and the normaliser are 0.

    Args:
        lengths_B: number of sampled tokens of each sequence, int [B].
        kept_B: whether each sequence is in the loss, bool [B].
        max_new_tokens: the length limit, which is the divisor of `constant`.
    Returns:
        The weights, float32 [B], and the normaliser.
    """
    lengths_B = np.asarray(lengths_B, dtype=np.float64)
    if lengths_B.shape != np.shape(kept_B):
        raise ValueError(f"lengths of shape {lengths_B.shape} do not match a mask of shape {np.shape(kept_B)}")
    kept_B = np.asarray(kept_B, dtype=bool) & (lengths_B > 0)
    if kind == "token_mean" or kind == "sequence_sum":
        weights_B = np.ones(len(lengths_B))
    elif kind == "sequence_mean":
        weights_B = 1.0 / np.maximum(lengths_B, 1.0)
    elif kind == "constant":
        weights_B = np.full(len(lengths_B), 1.0 / max_new_tokens)
    else:
        raise ValueError(f"unknown aggregation {kind!r}")
    normaliser = lengths_B[kept_B].sum() if kind == "token_mean" else kept_B.sum()
    return np.where(kept_B, weights_B, 0.0).astype(np.float32), float(normaliser)
