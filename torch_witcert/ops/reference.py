"""CPU reference of the operators: float32 torch, readable as the mathematics. Same signatures as the kernels."""

from __future__ import annotations

import torch

from . import certificate as cert
from .arithmetic import Arithmetic
from .quantize import norm_up, quantize_page
from .storage import POSITION_OVERFLOW, SOURCE_CODES, Note

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
    kv_heads, page_size, ring = k.shape[1], k_codes.shape[2], k_tail.shape[2]
    group = heads // kv_heads
    arithmetic = Arithmetic.of(dim, page_size, page_table.shape[1], pages_per_split, new_tokens, q.dtype)
    out = q.new_zeros(batch, heads, new_tokens, dim)
    lse = torch.full((batch, heads, new_tokens), float("-inf"), dtype=torch.float32, device=q.device)
    certificate = torch.zeros(batch, heads, new_tokens, cert.Field.COUNT, dtype=torch.float32, device=q.device)

    for row, length in enumerate(lengths.tolist()):
        # A row is computed alone, on its own shapes, so that its bits do not depend on its neighbours.
        slots = (source_map[row] == SOURCE_CODES).any(0).nonzero()[:, 0]
        physical = page_table[row, slots].long()
        is_code = (source_map[row][:, slots] == SOURCE_CODES)[:, None]
        page_positions = slots[:, None] * page_size + torch.arange(page_size, device=q.device)
        codes = k_codes[physical].transpose(0, 1).float()
        scale, zero = (t[physical].transpose(0, 1).float() for t in (k_scale, k_zero))
        value_codes = v_codes[physical].permute(1, 0, 3, 2).float()
        value_scale = v_scale[physical].transpose(0, 1)[..., 0].float()
        notes = page_notes[physical].transpose(0, 1)

        old = torch.arange(length // page_size * page_size, length, device=q.device)
        exact_positions = torch.cat([old, positions[row]])
        exact_k = torch.cat([k_tail[row][:, old % ring], k[row]], 1).float()
        exact_v = torch.cat([v_tail[row][:, old % ring], v[row]], 1).float()
        key_norm = _norm_or_infinity(exact_k, exact_v)
        value_norm = _norm_or_infinity(exact_v, exact_k)
        exact_k, exact_v = (torch.where(t.isfinite(), t, 0.0) for t in (exact_k, exact_v))

        for start in range(0, new_tokens, QUERY_CHUNK):
            here = slice(start, start + QUERY_CHUNK)
            query_positions = positions[row, here]
            queries = q[row, :, here].float().unflatten(0, (kv_heads, group)).flatten(1, 2)
            at = query_positions.repeat(group)[:, None]
            oldest = at - window if window else torch.full_like(at, -1)

            seen = (page_positions.flatten() > oldest) & (at >= 0)
            seen = seen.unflatten(-1, page_positions.shape) & is_code[..., None]
            scaled_q = (queries * sm_scale)[:, None] * scale[:, :, None]
            scores = torch.einsum("hmrd,hmpd->hrmp", scaled_q, codes)
            scores = scores + torch.einsum("hrd,hmd->hrm", queries * sm_scale, zero)[..., None]
            scores = scores.masked_fill(~seen, float("-inf"))

            exact_seen = (exact_positions >= 0) & (exact_positions <= at) & (exact_positions > oldest)
            exact_scores = (queries * sm_scale) @ exact_k.mT
            exact_scores = exact_scores.masked_fill(~exact_seen, float("-inf"))

            reference = torch.cat([scores.flatten(2), exact_scores], -1).amax(-1)
            reference = torch.where(reference.isneginf(), 0.0, reference)
            weights = torch.exp(scores - reference[..., None, None])
            exact_weights = torch.exp(exact_scores - reference[..., None])
            total = weights.sum((-1, -2)) + exact_weights.sum(-1)
            divisor = torch.where(total > 0, total, 1.0)
            scaled = weights * value_scale[:, None]
            output = torch.einsum("hrmp,hmpd->hrd", scaled, value_codes) + exact_weights @ exact_v
            output = output / divisor[..., None]

            read_page, read_exact = seen.any(-1), exact_seen.any(-1)
            radius = cert.code_radius(queries, scale, zero, notes, sm_scale).total(arithmetic)
            exact_key_norm = torch.where(exact_seen, key_norm[:, None], 0.0).amax(-1)
            exact_c = cert.exact_radius(queries, exact_key_norm, sm_scale, arithmetic)
            exact_value_norm = torch.where(exact_seen, value_norm[:, None], 0.0).amax(-1)

            def join(pages: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
                pages = torch.where(read_page, pages, 0.0)
                exact = torch.where(read_exact, exact, 0.0)
                return torch.cat([pages, exact[..., None]], -1)

            groups = cert.Groups(
                mass=join(weights.sum(-1), exact_weights.sum(-1)) / divisor[..., None],
                radius=join(radius, exact_c),
                top=join(weights.amax(-1), exact_weights.amax(-1)) / divisor[..., None],
            )
            read = cert.Read(
                groups,
                value_norm=join(notes[..., None, :, Note.VALUE_NORM], exact_value_norm),
                scaled_mass=join(scaled.sum(-1), torch.zeros_like(total)) / divisor[..., None],
                value_error_note=join(notes[..., None, :, Note.VALUE_ERROR], torch.zeros_like(total)),
                output_norm=output.norm(dim=-1),
                code_tokens=seen.sum((-1, -2)).float(),
                tokens=seen.sum((-1, -2)).float() + exact_seen.sum(-1),
            )
            fields = cert.certify(read, arithmetic)
            at = at[:, 0]
            fields = torch.where((at >= 0)[:, None], fields, 0.0)
            fields[:, at == POSITION_OVERFLOW, : cert.Field.OUTPUT + 1] = float("inf")

            def rows(x: torch.Tensor) -> torch.Tensor:
                return x.unflatten(1, (group, -1)).flatten(0, 1)

            out[row, :, here] = rows(torch.where((at >= 0)[:, None], output, 0.0)).to(q.dtype)
            lse[row, :, here] = rows(torch.where(at >= 0, reference + total.log(), float("-inf")))
            certificate[row, :, here] = rows(fields)
    return out, lse, certificate


def _norm_or_infinity(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Upper bound of each token's norm; +inf where the token, or its partner in K or V, is not finite."""
    finite = (x.isfinite() & other.isfinite()).all(-1)
    return torch.where(finite, norm_up(x), float("inf"))
