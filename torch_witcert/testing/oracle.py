"""Float64 attention in plain torch: what exact attention is, and what a kernel should make of its own store.

Everything runs batched on the device of its arguments. Memory is dominated by the probabilities, [B, H, T, S] in float64;
callers with many rows or query tokens pass a slice of them at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_witcert.ops.dither import dither
from torch_witcert.ops.formats import DEFAULT, StoreFormat
from torch_witcert.ops.quantize import dequantize_keys, dequantize_values
from torch_witcert.ops.storage import SOURCE_CODES, PagedStore


class Attention(NamedTuple):
    """Float64 result of an attention read."""

    output: torch.Tensor  # [B, H, T, D]
    probabilities: torch.Tensor  # [B, H, T, S]; a sink holds the rest of 1
    lse: torch.Tensor  # [B, H, T], natural logarithm, sink included


def visible(positions: torch.Tensor, key_positions: torch.Tensor, window: int = 0) -> torch.Tensor:
    """Which keys a query sees: bool [B, T, S].

    Args:
        positions: [B, T], position of each query; negative where there is none.
        key_positions: [B, S], position of each key; negative where there is none.
        window: 0, or the number of positions up to its own that a query sees.
    """
    query, key = positions[:, :, None], key_positions[:, None, :]
    seen = (query >= 0) & (key >= 0) & (key <= query)
    return seen & (key > query - window) if window else seen


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    key_positions: torch.Tensor,
    sm_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> Attention:
    """Attention in float64 over the K and V that are given.

    Args:
        q: [B, H, T, D].
        k, v: [B, Hkv, S, D]; H is a multiple of Hkv.
        positions: [B, T]; negative: not a query (output 0, lse -inf).
        key_positions: [B, S]; negative: not there, and may hold any bytes.
        sm_scale: softmax scale.
        window: 0, or the number of positions up to its own that a query sees.
        softcap: scores are softcap * tanh(score / softcap); 0 for none.
        sinks: [H], logit of a softmax term without a value, -inf allowed; None or empty for none.

    Returns:
        Float64 tensors. A read that sees a NaN or an Inf is NaN in all three, a read that sees nothing is 0, 0 and -inf.
    """
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    seen = visible(positions, key_positions, window)[:, None, None]
    finite = (k.isfinite() & v.isfinite()).all(-1)[:, :, None, None]
    keys = k.double().nan_to_num(0.0, 0.0, 0.0)
    values = v.double().nan_to_num(0.0, 0.0, 0.0)
    # The query heads of a KV head are rows of one product: broadcasting would copy K and V for each of them.
    queries = q.double().unflatten(1, (kv_heads, group)).flatten(2, 3)
    scores = (queries @ keys.mT * sm_scale).unflatten(2, (group, -1))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    if sinks is not None and sinks.numel():
        with_sink = torch.logaddexp(lse, sinks.double().view(kv_heads, group, 1))
        lse = torch.where((positions >= 0)[:, None, None], with_sink, lse)
    probabilities = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse)[..., None])
    output = (probabilities.flatten(2, 3) @ values).unflatten(2, (group, -1))
    poisoned = (seen & ~finite).any(-1)
    return Attention(
        output.masked_fill(poisoned[..., None], float("nan")).flatten(1, 2),
        probabilities.masked_fill(poisoned[..., None], float("nan")).flatten(1, 2),
        lse.masked_fill(poisoned, float("nan")).flatten(1, 2),
    )


class StoredTokens(NamedTuple):
    """What a read has before it: cached tokens as the store gives them, then the fresh ones. S = M * P + T."""

    k: torch.Tensor  # float64 [B, Hkv, S, D]
    v: torch.Tensor  # float64 [B, Hkv, S, D]
    key_positions: torch.Tensor  # int64 [B, S], -1 where there is no token
    is_code: torch.Tensor  # bool [B, Hkv, S], read as codes


def stored_tokens(
    store: PagedStore,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    source_map: torch.Tensor,
    store_format: StoreFormat = DEFAULT,
    outlier_channels: torch.Tensor | None = None,
    layer: int = 0,
) -> StoredTokens:
    """Dequantize what a read sees: K^ and V^ of code pages, the exact tail, the fresh tokens. Shapes: DESIGN section 5.

    The dither is rebuilt from the page keys of the store, as a read has to.
    """
    batch, slots = page_table.shape
    page_size, ring = store.page_size, store.k_tail.shape[2]
    heads = k.shape[1]
    physical = page_table.long()

    def by_row(pages: torch.Tensor) -> torch.Tensor:
        return pages.transpose(1, 2).flatten(2, 3)

    def of_pages(part: torch.Tensor) -> torch.Tensor:
        return part[physical] if part.numel() else part

    pages = PagedStore(*(of_pages(part) for part in store[:-2]), store.k_tail, store.v_tail)
    k_dither = v_dither = None
    if store_format.is_dithered:
        size = (page_size, store.k_tail.shape[-1])
        k_dither = dither(pages.page_keys, layer, False, store_format.key.dither, *size)
        v_dither = dither(pages.page_keys, layer, True, store_format.value.dither, *size)
    key_parts = (pages.k_codes, pages.k_scale, pages.k_zero, pages.k_bypass)
    keys = by_row(dequantize_keys(*key_parts, store_format, outlier_channels, k_dither))
    values = by_row(dequantize_values(pages.v_codes, pages.v_scale, pages.v_zero, store_format, v_dither))
    at = torch.arange(slots * page_size, device=k.device)
    is_code = (source_map == SOURCE_CODES).repeat_interleave(page_size, -1)

    length = lengths.long()[:, None]
    in_tail = (at >= length // page_size * page_size) & (at < length)
    in_tail = in_tail[:, None, :, None]
    keys = torch.where(in_tail, store.k_tail[:, :, at % ring].double(), keys)
    values = torch.where(in_tail, store.v_tail[:, :, at % ring].double(), values)
    cached = torch.where(at < length, at, -1).expand(batch, -1)
    fresh = torch.zeros(batch, heads, k.shape[2], dtype=torch.bool, device=k.device)
    return StoredTokens(
        torch.cat([keys, k.double()], 2),
        torch.cat([values, v.double()], 2),
        torch.cat([cached, positions.long()], 1),
        torch.cat([is_code, fresh], -1),
    )


def dequantized_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    source_map: torch.Tensor,
    store: PagedStore,
    sm_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    store_format: StoreFormat = DEFAULT,
    outlier_channels: torch.Tensor | None = None,
    layer: int = 0,
) -> Attention:
    """What `certified_attention` should return in real arithmetic: attention in float64 over the store's own K^ and V^,
    the exact tail and the fresh tokens. The order of the probabilities is that of :class:`StoredTokens`.
    """
    state = (positions, lengths, page_table, source_map)
    tokens = stored_tokens(store, k, v, *state, store_format, outlier_channels, layer)
    return exact_attention(q, tokens.k, tokens.v, positions, tokens.key_positions, sm_scale, window, softcap, sinks)


def total_variation(p: torch.Tensor, p2: torch.Tensor) -> torch.Tensor:
    """Total variation distance, half the sum of |p - p2| over the last dimension."""
    return (p - p2).abs().sum(-1) / 2
