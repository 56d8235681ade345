"""CPU reference of the operators: float32 torch, but for the sum of values, readable as the mathematics. Same signatures as the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import arithmetic as ar
from . import certificate as cert
from .arithmetic import Arithmetic
from .codes import decode, unpack
from .dither import dither, page_key
from .formats import KEY_GROUP, StoreFormat
from .quantize import dequantize_values, norm_up, outlier_mask, quantize_page
from .radii import Radii, parse_radii
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
    seeds: torch.Tensor,
    outlier_channels: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    k_bypass: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    v_zero: torch.Tensor,
    page_notes: torch.Tensor,
    page_keys: torch.Tensor,
    k_tail: torch.Tensor,
    v_tail: torch.Tensor,
    layer: int,
    store_format: str,
) -> None:
    """Append tokens to rows and quantize the pages that fill. Shapes: DESIGN section 5."""
    parsed = StoreFormat.parse(store_format)
    store = PagedStore(
        k_codes, k_scale, k_zero, k_bypass, v_codes, v_scale, v_zero, page_notes, page_keys, k_tail, v_tail
    )
    page_size, ring = store.page_size, k_tail.shape[2]
    _check_outliers(outlier_channels, k.shape[-1])
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
            physical = page_table[row, first:last].long()
            # A page that is not stored, because a sliding window has left it already, has no physical page.
            kept_pages = physical >= 0
            physical = physical[kept_pages]
            if parsed.is_dithered:
                page_keys[physical] = page_key(seeds[row], torch.arange(first, last)[kept_pages])[:, None]
            page = quantize_page(
                full_k.transpose(0, 1)[kept_pages],
                full_v.transpose(0, 1)[kept_pages],
                parsed,
                outlier_channels,
                *_page_dither(store, physical, layer, parsed),
            )
            for name, part in page._asdict().items():
                if part.numel():
                    getattr(store, name)[physical] = part
        start = max(length, (last - 1) * page_size)
        slots = torch.arange(start, total) % ring
        k_tail[row][:, slots] = new_k[:, start - length :]
        v_tail[row][:, slots] = new_v[:, start - length :]


def _check_outliers(outlier_channels: torch.Tensor, head_dim: int) -> None:
    """The kernels cannot look: they mark every read of such a store with infinite bounds."""
    for channels in outlier_channels.tolist():
        if len(set(channels)) < len(channels) or not all(0 <= channel < head_dim for channel in channels):
            raise ValueError(f"outlier_channels must be distinct channels below head_dim {head_dim}, got {channels}")


def _page_dither(
    store: PagedStore, physical: torch.Tensor, layer: int, store_format: StoreFormat
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Dither of K and of V of physical pages [n], float32 [n, Hkv, P, D]; None where the format has none."""
    if not store_format.is_dithered:
        return None, None
    keys, size, dim = store.page_keys[physical], store.page_size, store.k_tail.shape[-1]
    return (
        dither(keys, layer, False, store_format.key.dither, size, dim),
        dither(keys, layer, True, store_format.value.dither, size, dim),
    )


class _Row(NamedTuple):
    """Everything that one batch row can read, float32; Hkv heads, m code pages, e exact tokens."""

    page_positions: torch.Tensor  # [m, P]
    is_code: torch.Tensor  # bool [Hkv, m], read as codes by that head
    keys: torch.Tensor  # [Hkv, m, P, D], K^ less its zero; 0 in outlier channels
    k_scale: torch.Tensor  # [Hkv, m, ..], as stored
    k_zero: torch.Tensor  # [Hkv, m, D], or empty
    bypass: torch.Tensor  # [Hkv, m, P, 2m], or empty
    values: torch.Tensor  # [Hkv, m, P, D], V^
    largest_scale: torch.Tensor  # [Hkv, m, P], largest scale of a token's values; 0 where they are exact
    notes: torch.Tensor  # [Hkv, m, Note.COUNT]
    exact_positions: torch.Tensor  # [e], negative where there is no token
    exact_k: torch.Tensor  # [Hkv, e, D], 0 where not finite
    exact_v: torch.Tensor  # [Hkv, e, D], 0 where not finite
    key_norm: torch.Tensor  # [Hkv, e], +inf where K or V is not finite
    value_norm: torch.Tensor  # [Hkv, e], likewise


class _Options(NamedTuple):
    """What all rows of a read share."""

    sm_scale: float
    window: int
    softcap: float
    radii: Radii
    store_format: StoreFormat
    outlier_channels: torch.Tensor
    sinks: torch.Tensor  # float32 [Hkv, R], or empty
    arithmetic: Arithmetic


def certified_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    source_map: torch.Tensor,
    log_risk: torch.Tensor,
    sinks: torch.Tensor,
    outlier_channels: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    k_bypass: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    v_zero: torch.Tensor,
    page_notes: torch.Tensor,
    page_keys: torch.Tensor,
    k_tail: torch.Tensor,
    v_tail: torch.Tensor,
    sm_scale: float,
    window: int,
    softcap: float,
    pages_per_split: int,
    layer: int,
    radii: str,
    store_format: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention over code pages, exact tail and fresh tokens, with its certificate. Shapes: DESIGN section 5."""
    batch, heads, new_tokens, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    parsed = StoreFormat.parse(store_format)
    store = PagedStore(
        k_codes, k_scale, k_zero, k_bypass, v_codes, v_scale, v_zero, page_notes, page_keys, k_tail, v_tail
    )
    arithmetic = Arithmetic.of(
        dim, store.page_size, page_table.shape[1], pages_per_split, new_tokens, q.dtype, parsed, softcap
    )
    kinds = parse_radii(radii, parsed)
    _check_outliers(outlier_channels, dim)
    out = q.new_empty((batch, heads, new_tokens, dim))
    lse = q.new_empty((batch, heads, new_tokens), dtype=torch.float32)
    certificate = q.new_empty((batch, heads, new_tokens, cert.Field.COUNT), dtype=torch.float32)
    # A row is computed alone, on its own shapes, so that its bits do not depend on its neighbours.
    for index, length in enumerate(lengths.tolist()):
        row = _gather_row(
            k[index],
            v[index],
            positions[index],
            length,
            page_table[index],
            source_map[index],
            index,
            store,
            layer,
            parsed,
        )
        for start in range(0, new_tokens, QUERY_CHUNK):
            here = slice(start, start + QUERY_CHUNK)
            queries = q[index, :, here].float().unflatten(0, (kv_heads, group)).flatten(1, 2)
            risk = log_risk[index, here].repeat(group) if kinds.probabilistic else None
            here_sinks = sinks
            if sinks.numel():
                here_sinks = sinks.view(kv_heads, group).repeat_interleave(queries.shape[1] // group, 1)
            options = _Options(sm_scale, window, softcap, kinds, parsed, outlier_channels, here_sinks, arithmetic)
            parts = _attend(row, queries, positions[index, here].repeat(group), length, risk, options)
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
    layer: int,
    store_format: StoreFormat,
) -> _Row:
    """Code pages, exact tail and fresh tokens of one row; k, v [Hkv, T, D], page_table [M], source_map [Hkv, M]."""
    page_size, ring = store.page_size, store.k_tail.shape[2]
    key, value = store_format.key, store_format.value
    slots = (source_map == SOURCE_CODES).any(0).nonzero()[:, 0]
    physical = page_table[slots].long()

    def of_pages(part: torch.Tensor) -> torch.Tensor:
        return part[physical].transpose(0, 1) if part.numel() else part

    k_dither, v_dither = _page_dither(store, physical, layer, store_format)
    # Zero and outliers are multiplied apart.
    keys = decode(unpack(store.k_codes[physical], key.grid.bits), key.grid)
    keys = keys if k_dither is None else keys - k_dither
    scale = store.k_scale[physical].float()
    keys = keys * (scale.repeat_interleave(KEY_GROUP, -1) if key.per_token else scale[..., None, :])
    parts = (store.v_codes[physical], *(p[physical] if p.numel() else p for p in (store.v_scale, store.v_zero)))
    values = dequantize_values(*parts, store_format, v_dither, torch.float32)
    old = torch.arange(length // page_size * page_size, length, device=k.device)
    exact_k = torch.cat([store.k_tail[index][:, old % ring], k], 1).float()
    exact_v = torch.cat([store.v_tail[index][:, old % ring], v], 1).float()
    finite = (exact_k.isfinite() & exact_v.isfinite()).all(-1)
    scales = of_pages(store.v_scale).float()
    return _Row(
        page_positions=slots[:, None] * page_size + torch.arange(page_size, device=k.device),
        is_code=source_map[:, slots] == SOURCE_CODES,
        keys=keys.transpose(0, 1),
        k_scale=of_pages(store.k_scale),
        k_zero=of_pages(store.k_zero).float(),
        bypass=of_pages(store.k_bypass).float(),
        values=values.transpose(0, 1),
        largest_scale=values.new_zeros(values.shape[:3]).transpose(0, 1) if value.is_exact else scales.amax(-1),
        notes=of_pages(store.page_notes),
        exact_positions=torch.cat([old, positions]),
        exact_k=torch.where(exact_k.isfinite(), exact_k, 0.0),
        exact_v=torch.where(exact_v.isfinite(), exact_v, 0.0),
        key_norm=torch.where(finite, norm_up(exact_k), float("inf")),
        value_norm=torch.where(finite, norm_up(exact_v), float("inf")),
    )


def _attend(
    row: _Row, queries: torch.Tensor, position: torch.Tensor, length: int, risk: torch.Tensor | None, options: _Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, lse and certificate of query rows [Hkv, R, D] at positions [R]."""
    at = position[:, None]
    window, arithmetic, key = options.window, options.arithmetic, options.store_format.key
    oldest = at - window if window else torch.full_like(at, -1)
    seen = (row.page_positions.flatten() > oldest) & (at >= 0)
    seen = seen.unflatten(-1, row.page_positions.shape) & row.is_code[:, None, :, None]
    exact_seen = (row.exact_positions >= 0) & (row.exact_positions <= at) & (row.exact_positions > oldest)

    def cap(scores: torch.Tensor) -> torch.Tensor:
        return options.softcap * torch.tanh(scores / options.softcap) if options.softcap else scores

    scaled_q = queries * options.sm_scale
    code_q = scaled_q
    if key.outlier_pairs:
        code_q = torch.where(outlier_mask(options.outlier_channels, scaled_q.shape[-1])[:, None, :], 0.0, scaled_q)
    scores = torch.einsum("hrd,hmpd->hrmp", code_q, row.keys)
    if key.is_asymmetric:
        scores = scores + torch.einsum("hrd,hmd->hrm", code_q, row.k_zero)[..., None]
    if key.outlier_pairs:
        index = options.outlier_channels.long()[:, None, :].expand(-1, scaled_q.shape[1], -1)
        scores = scores + torch.einsum("hrd,hmpd->hrmp", scaled_q.gather(-1, index), row.bypass)
    scores = cap(scores).masked_fill(~seen, float("-inf"))
    exact_scores = cap(scaled_q @ row.exact_k.mT).masked_fill(~exact_seen, float("-inf"))
    # A sink is an exact token without a value.
    sink = options.sinks if options.sinks.numel() else torch.full_like(scaled_q[..., 0], float("-inf"))

    reference = torch.cat([scores.flatten(2), exact_scores, sink[..., None]], -1).amax(-1)
    reference = torch.where(reference.isneginf(), 0.0, reference)
    weights = torch.exp(scores - reference[..., None, None])
    exact_weights = torch.exp(exact_scores - reference[..., None])
    sink_weight = torch.exp(sink - reference)
    exact_mass = exact_weights.sum(-1) + sink_weight
    total = weights.sum((-1, -2)) + exact_mass
    divisor = torch.where(total == 0, 1.0, total)
    # In float64: the certificate pays for float32 sums as long as a split, and this is one over all tokens of the row.
    output = torch.einsum("hrmp,hmpd->hrd", weights.double(), row.values.double())
    output = (output + exact_weights.double() @ row.exact_v.double()) / divisor.double()[..., None]
    output = output.float()

    read_page, read_exact = seen.any(-1), (exact_seen.any(-1) | (sink_weight > 0)).expand_as(total)
    key_norm = torch.where(exact_seen, row.key_norm[:, None], 0.0).amax(-1)
    value_norm = torch.where(exact_seen, row.value_norm[:, None], 0.0).amax(-1)
    tokens = torch.full_like(position, length // row.page_positions.shape[-1] * row.page_positions.shape[-1])
    radius = cert.code_radius(
        queries, row.k_scale, row.k_zero, row.notes, options.sm_scale, options.store_format, options.outlier_channels
    ).total(arithmetic, options.radii, risk, tokens)
    exact_radius = cert.exact_radius(queries, key_norm, options.sm_scale, arithmetic)
    # A sink so far below that its weight is 0 in any rounding costs nothing.
    flushed = sink < exact_scores.amax(-1) - ar.FLUSHED - sink.abs() * ar.SINK_ERROR
    exact_radius = exact_radius + torch.where(flushed | sink.isneginf(), 0.0, sink.abs() * ar.SINK_ERROR)

    def join(pages: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        """Groups of the certificate: code pages, then the exact tokens; 0 where nothing is read."""
        exact = torch.where(read_exact, exact, 0.0)
        return torch.cat([torch.where(read_page, pages, 0.0), exact[..., None]], -1)

    nothing = torch.zeros_like(total)
    code_tokens = seen.sum((-1, -2)).float()
    scaled_mass = (weights * row.largest_scale[:, None]).sum(-1)
    fields = cert.certify(
        cert.Read(
            cert.Groups(
                mass=join(weights.sum(-1), exact_mass) / divisor[..., None],
                radius=join(radius, exact_radius),
                top=join(weights.amax(-1), torch.maximum(exact_weights.amax(-1), sink_weight)) / divisor[..., None],
            ),
            value_norm=join(row.notes[..., None, :, Note.VALUE_NORM], value_norm),
            scaled_mass=join(scaled_mass, nothing) / divisor[..., None],
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
