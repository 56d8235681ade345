"""How far a kernel may be from real arithmetic over its own store: the part of the certificate that rounding is given."""

from __future__ import annotations

import torch

from torch_witcert.ops import certificate as cert
from torch_witcert.ops.arithmetic import SINK_ERROR, Arithmetic
from torch_witcert.ops.formats import DEFAULT, StoreFormat
from torch_witcert.ops.splits import pages_per_split
from torch_witcert.ops.storage import PagedStore

from .oracle import Attention, StoredTokens


def arithmetic_limit(
    q: torch.Tensor,
    exact: Attention,
    tokens: StoredTokens,
    store: PagedStore,
    page_table: torch.Tensor,
    sm_scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    store_format: StoreFormat = DEFAULT,
    outlier_channels: torch.Tensor | None = None,
) -> torch.Tensor:
    """Largest error of an output against attention over K^ and V^, float64 [B, H, T]; T may be some of a forward's columns.

    It is the certificate of a read whose radii hold the arithmetic alone and whose values are V^.

    Args:
        q: [B, H, T, D].
        exact: float64 attention over `tokens`.
        tokens: what the read saw.
        store, page_table, sm_scale, softcap, sinks, store_format, outlier_channels: of the read.
    """
    heads, dim = q.shape[1], q.shape[3]
    kv_heads, page_size, slots = store.k_codes.shape[1], store.page_size, page_table.shape[1]
    new_tokens = tokens.k.shape[2] - slots * page_size
    group = heads // kv_heads
    split = pages_per_split(page_size, slots)
    arithmetic = Arithmetic.of(dim, page_size, slots, split, new_tokens, q.dtype, store_format, softcap)
    is_code = tokens.is_code.repeat_interleave(group, 1)[:, :, None]

    def join(per_token: torch.Tensor, reduce: str) -> torch.Tensor:
        """[B, H, T, S] to groups [B, H, T, M + 1]: code pages, then all exact tokens."""
        codes = torch.where(is_code, per_token, 0.0)[..., : slots * page_size].unflatten(-1, (-1, page_size))
        others = torch.where(is_code, 0.0, per_token)
        return torch.cat([getattr(codes, reduce)(-1), getattr(others, reduce)(-1, keepdim=True)], -1)

    def by_page(part: torch.Tensor) -> torch.Tensor:
        """[N, Hkv, ..] to [B, Hkv, M, ..]; a part that the format does not have stays empty."""
        return part[page_table.long()].transpose(1, 2) if part.numel() else part

    seen = exact.probabilities > 0

    def largest_norm(x: torch.Tensor) -> torch.Tensor:
        norm = x.nan_to_num(0.0, 0.0, 0.0).norm(dim=-1).repeat_interleave(group, 1)[:, :, None]
        return join(torch.where(seen, norm, 0.0), "amax")

    queries = q.double()
    parts = [by_page(part) for part in (store.k_scale, store.k_zero, store.page_notes)]
    rows = queries.unflatten(1, (kv_heads, group)).flatten(2, 3)
    code = cert.code_radius(rows, *parts, sm_scale, store_format, outlier_channels)
    # The arithmetic is added to whichever radius is taken, so that the kind of radius cancels.
    code_c = (code.total(arithmetic) - code.total()).unflatten(2, (group, -1)).flatten(1, 2)
    exact_c = cert.exact_radius(queries, largest_norm(tokens.k)[..., -1], sm_scale, arithmetic)
    mass, top = join(exact.probabilities, "sum"), join(exact.probabilities, "amax")
    if sinks is not None and sinks.numel():
        # A sink is an exact token without a value.
        logit = sinks.double()[:, None]
        weight = torch.where(exact.lse.isneginf(), 0.0, torch.exp(logit - exact.lse))
        mass[..., -1] += weight
        top[..., -1] = torch.maximum(top[..., -1], weight)
        exact_c = exact_c + torch.where(logit.isinf(), 0.0, logit.abs()) * SINK_ERROR
    radius = torch.where(mass > 0, torch.cat([code_c, exact_c[..., None]], -1), 0.0)
    none = torch.zeros_like(mass)
    read = cert.Read(
        cert.Groups(mass, radius, top),
        value_norm=largest_norm(tokens.v),
        scaled_mass=none,
        value_error_note=none,
        output_norm=exact.output.norm(dim=-1),
        code_tokens=none[..., 0],
        tokens=none[..., 0],
    )
    return cert.certify(read, arithmetic)[..., cert.Field.OUTPUT].double()
