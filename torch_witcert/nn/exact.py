"""Exact causal attention: the first chunk of a prompt, and layers that stay dense.

By SDPA, which has no soft capping and no sinks: models that have one of them are computed in float32 here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

#: Rows of a mask at a time: a mask of all rows would grow with the square of the prompt.
ROWS = 1024


class Scores(NamedTuple):
    """How an attention layer makes weights of q . k."""

    scale: float
    window: int = 0  # a query at position s sees positions in (s - window, s]; 0 for all up to s
    softcap: float = 0.0  # scores are softcap * tanh(score / softcap); 0 for none
    sinks: torch.Tensor | None = None  # float32 [H], the score of one more token of each head that has no value

    @property
    def is_plain(self) -> bool:
        """Whether SDPA can do it."""
        return not self.softcap and self.sinks is None

    def mask_rows(self, q: torch.Tensor, k: torch.Tensor) -> int:
        """Rows of a mask, or of a matrix of scores, for each query token of q [B, H, T, D] over k [B, Hkv, S, D]."""
        return q.shape[1] // k.shape[1] if self.is_plain else q.shape[1]


def query_blocks(new_tokens: int, rows: int) -> Iterator[slice]:
    """Query tokens that together have at most ROWS rows, `rows` each."""
    step = max(1, ROWS // rows)
    return (slice(start, min(start + step, new_tokens)) for start in range(0, new_tokens, step))


def eager_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scores: Scores,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention with soft capping and sinks, in float32; differentiable.

    Args:
        q: [B, H, T, D]; k, v: [B, Hkv, S, D].
        mask: bool, True where seen, or added to the scores; broadcast to [B, 1, T, S].
        scores: scale, soft capping and sinks; what a window hides is part of the mask.
        dropout: probability of dropping a weight.

    Returns:
        [B, H, T, D] in q's dtype. A query that sees nothing and has no sink sees everything, as in transformers.
    """
    with torch.autocast(q.device.type, enabled=False):
        grouped = q.float().unflatten(1, (k.shape[1], -1))
        logits = grouped @ k.float()[:, :, None].mT * scores.scale
        if scores.softcap:
            logits = scores.softcap * torch.tanh(logits / scores.softcap)
        mask = mask[:, :, None]
        if mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask, torch.finfo(torch.float32).min)
        else:
            logits = logits + mask
        if scores.sinks is None:
            weights = logits.softmax(-1)
        else:
            sink = scores.sinks.view(k.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)
            weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
        weights = F.dropout(weights, dropout)
        return (weights @ v.float()[:, :, None]).flatten(1, 2).to(q.dtype)


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """Attention where a query at position s sees keys at positions up to s that the window leaves.

    Args:
        q: [B, H, T, D].
        k, v: [B, Hkv, S, D], finite.
        query_positions: int32 [B, T]; a negative one is no query and gives 0.
        key_positions: int32 [B, S]; a negative one is no token.
        scores: of the layer.

    Returns:
        [B, H, T, D] in q's dtype.
    """
    kv_heads, new_tokens = k.shape[1], q.shape[2]
    group = q.shape[1] // kv_heads
    at, token = query_positions[:, :, None], key_positions[:, None, :]
    seen = (token >= 0) & (token <= at)
    if scores.window:
        seen = seen & (token > at - scores.window)
    # A row that sees nothing would divide 0 by 0: it sees everything instead, and is cleared.
    mask = (seen | (at < 0))[:, None]
    if scores.is_plain:
        packed = q.unflatten(1, (kv_heads, group)).flatten(2, 3)
        mask = mask.repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(packed, k, v, attn_mask=mask, scale=scores.scale)
        out = out.unflatten(2, (group, new_tokens)).flatten(1, 2)
    else:
        out = eager_attention(q, k, v, mask, scores)
    return torch.where((at >= 0)[:, None], out, 0.0)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    ragged: bool,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of a first chunk over its own keys and values.

    Args:
        q: [B, H, T, D]; k, v: [B, Hkv, T, D]. Padding may hold any bytes; a NaN or an Inf of a token is read as 0.
        positions: int32 [B, T], negative where there is no token.
        ragged: whether any position can be negative.
        scores: of the layer.

    Returns:
        Output [B, H, T, D], and bool [B, H]: a token's query, key, value or output was not finite.
    """
    finite_k, finite_v = k.isfinite(), v.isfinite()
    token = (positions >= 0)[:, None]
    group, new_tokens = q.shape[1] // k.shape[1], q.shape[2]
    poisoned = (token & ~(finite_k & finite_v).all(-1)).any(-1).repeat_interleave(group, 1)
    k = torch.where(finite_k & token[..., None], k, 0.0)
    v = torch.where(finite_v & token[..., None], v, 0.0)
    if scores.is_plain and not ragged and not 0 < scores.window < new_tokens:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scores.scale, enable_gqa=group > 1)
    else:
        out = _in_blocks(q, k, v, positions, ragged, scores)
    finite = (q.isfinite() & out.isfinite()).all(-1)
    return out, poisoned | (token & ~finite).any(-1)


def _in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, ragged: bool, scores: Scores
) -> torch.Tensor:
    """Masked attention of a chunk over itself, a block of queries at a time."""
    new_tokens, window, parts = q.shape[2], scores.window, []
    for rows in query_blocks(new_tokens, scores.mask_rows(q, k)):
        # A window is counted in positions; only without padding does it also bound the columns.
        keys = slice(0 if ragged or not window else max(0, rows.start - window + 1), rows.stop)
        at, of = positions[:, rows], positions[:, keys]
        parts.append(masked_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], at, of, scores))
    return torch.cat(parts, 2)
