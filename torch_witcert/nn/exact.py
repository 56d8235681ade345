"""Exact causal attention by SDPA: the first chunk of a prompt, and layers that stay dense."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

#: Rows of a mask at a time: a mask of all rows would grow with the square of the prompt.
ROWS = 1024


def query_blocks(new_tokens: int, group: int) -> Iterator[slice]:
    """Query tokens whose masks, one row for each head of a group, have at most ROWS rows."""
    step = max(1, ROWS // group)
    return (slice(start, min(start + step, new_tokens)) for start in range(0, new_tokens, step))


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    window: int,
    scale: float,
) -> torch.Tensor:
    """Attention where a query at position s sees keys at positions in (s - window, s].

    Args:
        q: [B, H, T, D].
        k, v: [B, Hkv, S, D], finite.
        query_positions: int32 [B, T]; a negative one is no query and gives 0.
        key_positions: int32 [B, S]; a negative one is no token.
        window: 0 for none.
        scale: softmax scale.

    Returns:
        [B, H, T, D] in q's dtype.
    """
    kv_heads, new_tokens = k.shape[1], q.shape[2]
    group = q.shape[1] // kv_heads
    at, token = query_positions[:, :, None], key_positions[:, None, :]
    seen = (token >= 0) & (token <= at)
    if window:
        seen = seen & (token > at - window)
    # A row that sees nothing would divide 0 by 0: it sees everything instead, and is cleared.
    mask = (seen | (at < 0))[:, None].repeat(1, 1, group, 1)
    packed = q.unflatten(1, (kv_heads, group)).flatten(2, 3)
    out = F.scaled_dot_product_attention(packed, k, v, attn_mask=mask, scale=scale)
    out = out.unflatten(2, (group, new_tokens)).flatten(1, 2)
    return torch.where((at >= 0)[:, None], out, 0.0)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    ragged: bool,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of a first chunk over its own keys and values.

    Args:
        q: [B, H, T, D]; k, v: [B, Hkv, T, D]. Padding may hold any bytes; a NaN or an Inf of a token is read as 0.
        positions: int32 [B, T], negative where there is no token.
        ragged: whether any position can be negative.
        window: 0 for none.
        scale: softmax scale.

    Returns:
        Output [B, H, T, D], and bool [B, H]: a token's query, key, value or output was not finite.
    """
    finite_k, finite_v = k.isfinite(), v.isfinite()
    token = (positions >= 0)[:, None]
    group, new_tokens = q.shape[1] // k.shape[1], q.shape[2]
    poisoned = (token & ~(finite_k & finite_v).all(-1)).any(-1).repeat_interleave(group, 1)
    k = torch.where(finite_k & token[..., None], k, 0.0)
    v = torch.where(finite_v & token[..., None], v, 0.0)
    if not ragged and not 0 < window < new_tokens:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=group > 1)
    else:
        out = _in_blocks(q, k, v, positions, ragged, window, scale)
    finite = (q.isfinite() & out.isfinite()).all(-1)
    return out, poisoned | (token & ~finite).any(-1)


def _in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, ragged: bool, window: int, scale: float
) -> torch.Tensor:
    """Masked attention of a chunk over itself, a block of queries at a time."""
    new_tokens, parts = q.shape[2], []
    for rows in query_blocks(new_tokens, q.shape[1] // k.shape[1]):
        # A window is counted in positions; only without padding does it also bound the columns.
        keys = slice(0 if ragged or not window else max(0, rows.start - window + 1), rows.stop)
        at, of = positions[:, rows], positions[:, keys]
        parts.append(masked_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], at, of, window, scale))
    return torch.cat(parts, 2)
