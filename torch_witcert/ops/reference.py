"""CPU reference of the operators: float32 torch, readable as the mathematics. Same signatures as the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import certificate as cert
from .arithmetic import Arithmetic
from .quantize import norm_up, quantize_page
from .storage import POSITION_OVERFLOW, SOURCE_CODES, Note, PagedStore

#: Query rows that the reference scores at a time, to bound its memory.
QUERY_CHUNK = 256


def kv_write_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    columns: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    page_table: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    page_notes: torch.Tensor,
    k_tail: torch.Tensor,
    v_tail: torch.Tensor,
) -> None:
    """Append tokens to rows and quantize the pages that fill. Shapes: DESIGN section 5."""
    page_size, ring = k_codes.shape[2], k_tail.shape[2]
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        if count == 0:
            continue
        total = length + count
        chosen = columns[row, :count].long()
        new_k, new_v = k[row][:, chosen], v[row][:, chosen]
        first, last = length // page_size, total // page_size
        if last > first:
            kept = torch.arange(first * page_size, length) % ring
            end = last * page_size - length
            full_k = torch.cat([k_tail[row][:, kept], new_k[:, :end]], 1).unflatten(1, (-1, page_size))
            full_v = torch.cat([v_tail[row][:, kept], new_v[:, :end]], 1).unflatten(1, (-1, page_size))
            page = quantize_page(full_k.transpose(0, 1), full_v.transpose(0, 1))
            physical = page_table[row, first:last].long()
            for tensor, part in zip((k_codes, k_scale, k_zero, v_codes, v_scale, page_notes), page, strict=True):
                tensor[physical] = part
        start = max(length, (last - 1) * page_size)
        slots = torch.arange(start, total) % ring
        k_tail[row][:, slots] = new_k[:, start - length :]
        v_tail[row][:, slots] = new_v[:, start - length :]


class _Row(NamedTuple):
    """Everything that one batch row can read, float32; Hkv heads, m code pages, e exact tokens."""

    page_positions: torch.Tensor  # [m, P]
    is_code: torch.Tensor  # bool [Hkv, m], read as codes by that head
    k_codes: torch.Tensor  # [Hkv, m, P, D]
    k_scale: torch.Tensor  # [Hkv, m, D]
    k_zero: torch.Tensor  # [Hkv, m, D]
    v_codes: torch.Tensor  # [Hkv, m, P, D]
    v_scale: torch.Tensor  # [Hkv, m, P]
    notes: torch.Tensor  # [Hkv, m, Note.COUNT]
    exact_positions: torch.Tensor  # [e], negative where there is no token
    exact_k: torch.Tensor  # [Hkv, e, D], 0 where not finite
    exact_v: torch.Tensor  # [Hkv, e, D], 0 where not finite
    key_norm: torch.Tensor  # [Hkv, e], +inf where K or V is not finite
    value_norm: torch.Tensor  # [Hkv, e], likewise


def certified_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    source_map: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    page_notes: torch.Tensor,
    k_tail: torch.Tensor,
    v_tail: torch.Tensor,
    sm_scale: float,
    window: int,
    pages_per_split: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention over code pages, exact tail and fresh tokens, with its certificate. Shapes: DESIGN section 5."""
    batch, heads, new_tokens, dim = q.shape
    kv_heads, page_size = k.shape[1], k_codes.shape[2]
    group = heads // kv_heads
    store = PagedStore(k_codes, k_scale, k_zero, v_codes, v_scale, page_notes, k_tail, v_tail)
    arithmetic = Arithmetic.of(dim, page_size, page_table.shape[1], pages_per_split, new_tokens, q.dtype)
    out = q.new_empty((batch, heads, new_tokens, dim))
    lse = q.new_empty((batch, heads, new_tokens), dtype=torch.float32)
    certificate = q.new_empty((batch, heads, new_tokens, cert.Field.COUNT), dtype=torch.float32)
    # A row is computed alone, on its own shapes, so that its bits do not depend on its neighbours.
    for index, length in enumerate(lengths.tolist()):
        row = _gather_row(
            k[index], v[index], positions[index], length, page_table[index], source_map[index], index, store
        )
        for start in range(0, new_tokens, QUERY_CHUNK):
            here = slice(start, start + QUERY_CHUNK)
            queries = q[index, :, here].float().unflatten(0, (kv_heads, group)).flatten(1, 2)
            parts = _attend(row, queries, positions[index, here].repeat(group), sm_scale, window, arithmetic)
            for target, part in zip((out, lse, certificate), parts, strict=True):
                target[index, :, here] = part.unflatten(1, (group, -1)).flatten(0, 1).to(target.dtype)
    return out, lse, certificate


def _gather_row(
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    length: int,
    page_table: torch.Tensor,
    source_map: torch.Tensor,
    index: int,
    store: PagedStore,
) -> _Row:
    """Code pages, exact tail and fresh tokens of one row; k, v [Hkv, T, D], page_table [M], source_map [Hkv, M]."""
    page_size, ring = store.page_size, store.k_tail.shape[2]
    slots = (source_map == SOURCE_CODES).any(0).nonzero()[:, 0]
    physical = page_table[slots].long()
    old = torch.arange(length // page_size * page_size, length, device=k.device)
    exact_k = torch.cat([store.k_tail[index][:, old % ring], k], 1).float()
    exact_v = torch.cat([store.v_tail[index][:, old % ring], v], 1).float()
    finite = (exact_k.isfinite() & exact_v.isfinite()).all(-1)
    return _Row(
        page_positions=slots[:, None] * page_size + torch.arange(page_size, device=k.device),
        is_code=source_map[:, slots] == SOURCE_CODES,
        k_codes=store.k_codes[physical].transpose(0, 1).float(),
        k_scale=store.k_scale[physical].transpose(0, 1).float(),
        k_zero=store.k_zero[physical].transpose(0, 1).float(),
        v_codes=store.v_codes[physical].permute(1, 0, 3, 2).float(),
        v_scale=store.v_scale[physical].transpose(0, 1)[..., 0].float(),
        notes=store.page_notes[physical].transpose(0, 1),
        exact_positions=torch.cat([old, positions]),
        exact_k=torch.where(exact_k.isfinite(), exact_k, 0.0),
        exact_v=torch.where(exact_v.isfinite(), exact_v, 0.0),
        key_norm=torch.where(finite, norm_up(exact_k), float("inf")),
        value_norm=torch.where(finite, norm_up(exact_v), float("inf")),
    )


def _attend(
    row: _Row, queries: torch.Tensor, position: torch.Tensor, sm_scale: float, window: int, arithmetic: Arithmetic
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, lse and certificate of query rows [Hkv, R, D] at positions [R]."""
    at = position[:, None]
    oldest = at - window if window else torch.full_like(at, -1)
    seen = (row.page_positions.flatten() > oldest) & (at >= 0)
    seen = seen.unflatten(-1, row.page_positions.shape) & row.is_code[:, None, :, None]
    exact_seen = (row.exact_positions >= 0) & (row.exact_positions <= at) & (row.exact_positions > oldest)

    scaled_q = queries * sm_scale
    scores = torch.einsum("hmrd,hmpd->hrmp", scaled_q[:, None] * row.k_scale[:, :, None], row.k_codes)
    scores = scores + torch.einsum("hrd,hmd->hrm", scaled_q, row.k_zero)[..., None]
    scores = scores.masked_fill(~seen, float("-inf"))
    exact_scores = (scaled_q @ row.exact_k.mT).masked_fill(~exact_seen, float("-inf"))

    reference = torch.cat([scores.flatten(2), exact_scores], -1).amax(-1)
    reference = torch.where(reference.isneginf(), 0.0, reference)
    weights = torch.exp(scores - reference[..., None, None])
    exact_weights = torch.exp(exact_scores - reference[..., None])
    total = weights.sum((-1, -2)) + exact_weights.sum(-1)
    divisor = torch.where(total == 0, 1.0, total)
    scaled = weights * row.v_scale[:, None]
    output = torch.einsum("hrmp,hmpd->hrd", scaled, row.v_codes) + exact_weights @ row.exact_v
    output = output / divisor[..., None]

    read_page, read_exact = seen.any(-1), exact_seen.any(-1).expand_as(total)
    key_norm = torch.where(exact_seen, row.key_norm[:, None], 0.0).amax(-1)
    value_norm = torch.where(exact_seen, row.value_norm[:, None], 0.0).amax(-1)
    radius = cert.code_radius(queries, row.k_scale, row.k_zero, row.notes, sm_scale).total(arithmetic)

    def join(pages: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        """Groups of the certificate: code pages, then the exact tokens; 0 where nothing is read."""
        exact = torch.where(read_exact, exact, 0.0)
        return torch.cat([torch.where(read_page, pages, 0.0), exact[..., None]], -1)

    nothing = torch.zeros_like(total)
    code_tokens = seen.sum((-1, -2)).float()
    fields = cert.certify(
        cert.Read(
            cert.Groups(
                mass=join(weights.sum(-1), exact_weights.sum(-1)) / divisor[..., None],
                radius=join(radius, cert.exact_radius(queries, key_norm, sm_scale, arithmetic)),
                top=join(weights.amax(-1), exact_weights.amax(-1)) / divisor[..., None],
            ),
            value_norm=join(row.notes[..., None, :, Note.VALUE_NORM], value_norm),
            scaled_mass=join(scaled.sum(-1), nothing) / divisor[..., None],
            value_error_note=join(row.notes[..., None, :, Note.VALUE_ERROR], nothing),
            output_norm=output.norm(dim=-1),
            code_tokens=code_tokens,
            tokens=code_tokens + exact_seen.sum(-1),
        ),
        arithmetic,
    )
    fields = torch.where(at >= 0, fields, 0.0)
    fields[:, position == POSITION_OVERFLOW, : cert.Field.OUTPUT + 1] = float("inf")
    lse = torch.where(position >= 0, reference + total.log(), float("-inf"))
    return torch.where(at >= 0, output, 0.0), lse, fields
