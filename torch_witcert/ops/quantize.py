"""Quantizers in torch: what a page of codes means, and the notes that bound its error.

K^ = zero + scale * (value of the code - dither); values likewise. Both quantize with the STORED (rounded) scale and zero, so
|x - x^| <= scale * max_error (1 + 4.6e-5) holds for what is read back. Outlier channels are stored exact and take no part in a range.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import arithmetic as ar
from .codes import decode, encode, pack, unpack
from .formats import DEFAULT, KEY_GROUP, VALUE_GROUP, Grid, KeyFormat, StoreFormat, ValueFormat
from .storage import Note, code_dtype


def midpoint(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """(low + high) / 2 in float32 without overflow, rounded once; halving first would lose the last bit of a subnormal."""
    total = low + high
    return torch.where(total.isfinite(), total * 0.5, low * 0.5 + high * 0.5)


class QuantizedPage(NamedTuple):
    """Pages of every KV head, leading dimensions [..., Hkv]; shapes and dtypes as in `tensor_shapes`, absent parts empty."""

    k_codes: torch.Tensor
    k_scale: torch.Tensor
    k_zero: torch.Tensor
    k_bypass: torch.Tensor
    v_codes: torch.Tensor
    v_scale: torch.Tensor
    v_zero: torch.Tensor
    page_notes: torch.Tensor


class _Quantized(NamedTuple):
    """Keys or values [..., P, D]."""

    codes: torch.Tensor  # stored codes, unpacked, int16
    scale: torch.Tensor  # bf16 [..., P or 1, scales]
    zero: torch.Tensor | None  # model dtype, like scale
    step: torch.Tensor  # float32 scale of each element, broadcast to [..., P or 1, D]
    error: torch.Tensor  # float32 [..., P, D], x^ - x up to RESIDUAL_ROUNDING


def round_up_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Smallest bfloat16 >= x, for x >= 0 in float32."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def scale_of(half_range: torch.Tensor, grid: Grid) -> torch.Tensor:
    """bfloat16 scale with which the grid reaches half_range: rounded up, never below the floor."""
    return round_up_to_bfloat16((half_range / grid.levels).clamp_min(ar.SCALE_FLOOR))


def norm_up(x: torch.Tensor) -> torch.Tensor:
    """Upper bound of the norm over the last dimension, float32."""
    return x.square().sum(-1).sqrt() * (1 + ar.NOTE_RELATIVE) + ar.NORM_ABSOLUTE


def outlier_mask(outlier_channels: torch.Tensor, head_dim: int) -> torch.Tensor:
    """bool [Hkv, D] from int32 [Hkv, 2m]."""
    mask = torch.zeros(outlier_channels.shape[0], head_dim, dtype=torch.bool, device=outlier_channels.device)
    return mask.scatter(1, outlier_channels.long(), True)


def quantize_page(
    keys: torch.Tensor,
    values: torch.Tensor,
    store_format: StoreFormat = DEFAULT,
    outlier_channels: torch.Tensor | None = None,
    k_dither: torch.Tensor | None = None,
    v_dither: torch.Tensor | None = None,
) -> QuantizedPage:
    """Quantize full pages.

    Args:
        keys, values: exact [..., Hkv, P, D] in the model's dtype. A page that holds a NaN or an Inf is stored with that entry as 0
            and with infinite notes, so that every read of it is marked.
        store_format: formats of keys and values.
        outlier_channels: int32 [Hkv, 2m], distinct in a row; None for a format without outlier pairs.
        k_dither, v_dither: float32 like keys, where the format is dithered; None otherwise.

    Returns:
        The page as it is stored.
    """
    key, value = store_format.key, store_format.value
    k, v = keys.float(), values.float()
    finite = (k.isfinite() & v.isfinite()).all(-1).all(-1)
    k, v = torch.where(k.isfinite(), k, 0.0), torch.where(v.isfinite(), v, 0.0)
    none = torch.empty(0, dtype=keys.dtype, device=keys.device)
    is_outlier, bypass = None, none
    if key.outlier_pairs:
        is_outlier = outlier_mask(outlier_channels, keys.shape[-1])[:, None, :]
        index = outlier_channels.long()[:, None, :].expand(*k.shape[:-1], -1)
        bypass = k.gather(-1, index).to(keys.dtype)
    quantized = _quantize_keys(k, keys.dtype, key, is_outlier, k_dither)

    notes = torch.empty(*finite.shape, Note.COUNT, dtype=torch.float32, device=keys.device)
    notes[..., Note.VALUE_NORM] = norm_up(v).amax(-1)
    notes[..., Note.KEY_NORM] = norm_up(k).amax(-1)
    rounding = ar.RESIDUAL_ROUNDING * norm_up(quantized.step).amax(-1)
    notes[..., Note.KEY_ERROR] = norm_up(quantized.error).amax(-1) + rounding
    step = quantized.step.clamp_min(ar.SCALE_FLOOR)
    scaled_rounding = ar.scaled_residual_rounding(keys.shape[-1])
    notes[..., Note.KEY_ERROR_SCALED] = norm_up(quantized.error / step).amax(-1) + scaled_rounding
    k_codes = pack(quantized.codes, key.grid.bits).view(code_dtype(key.element))
    k_scale = quantized.scale if key.per_token else quantized.scale[..., 0, :]
    k_zero = quantized.zero[..., 0, :] if key.is_asymmetric else none

    if value.is_exact:
        notes[..., Note.VALUE_ERROR] = 0
        stored = (v.to(values.dtype).mT.contiguous(), torch.empty(0, dtype=torch.bfloat16, device=keys.device), none)
    else:
        part = _quantize_values(v, values.dtype, value, v_dither)
        largest = part.scale.float().amax(-1, keepdim=True)
        notes[..., Note.VALUE_ERROR] = norm_up(part.error / largest).amax(-1) + scaled_rounding
        codes = pack(part.codes.mT, value.grid.bits).view(code_dtype(value.element))
        stored = (codes.contiguous(), part.scale, part.zero if value.is_grouped else none)
    notes[~finite] = float("inf")
    return QuantizedPage(k_codes, k_scale, k_zero, bypass, *stored, notes)


def _quantize_keys(
    k: torch.Tensor,
    dtype: torch.dtype,
    key: KeyFormat,
    is_outlier: torch.Tensor | None,
    dither: torch.Tensor | None,
) -> _Quantized:
    if is_outlier is not None:
        k = torch.where(is_outlier, 0.0, k)
    if key.per_token:
        grouped = k.unflatten(-1, (-1, KEY_GROUP))
        scale = scale_of(grouped.abs().amax(-1), key.grid)
        step = scale.float().repeat_interleave(KEY_GROUP, -1)
        return _quantize(k, scale, None, step, None, key.grid, is_outlier, dither)
    high, low = k.amax(-2, keepdim=True), k.amin(-2, keepdim=True)
    zero = midpoint(low, high).to(dtype) if key.is_asymmetric else None
    centre = 0.0 if zero is None else zero.float()
    scale = scale_of(torch.maximum(high - centre, centre - low), key.grid)
    if is_outlier is not None:
        # A scale of 0 keeps the channel out of every radius.
        scale = torch.where(is_outlier, torch.zeros_like(scale), scale)
    step = scale.float()
    return _quantize(k, scale, zero, step, centre, key.grid, is_outlier, dither)


def _quantize_values(
    v: torch.Tensor, dtype: torch.dtype, value: ValueFormat, dither: torch.Tensor | None
) -> _Quantized:
    if not value.is_grouped:
        scale = scale_of(v.abs().amax(-1, keepdim=True), value.grid)
        return _quantize(v, scale, None, scale.float(), None, value.grid, None, dither)
    grouped = v.unflatten(-1, (-1, VALUE_GROUP))
    high, low = grouped.amax(-1), grouped.amin(-1)
    zero = midpoint(low, high).to(dtype)
    scale = scale_of(torch.maximum(high - zero.float(), zero.float() - low), value.grid)
    step, centre = (part.float().repeat_interleave(VALUE_GROUP, -1) for part in (scale, zero))
    return _quantize(v, scale, zero, step, centre, value.grid, None, dither)


def _quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    step: torch.Tensor,
    centre: torch.Tensor | float | None,
    grid: Grid,
    is_outlier: torch.Tensor | None,
    dither: torch.Tensor | None,
) -> _Quantized:
    offset = x if zero is None else x - centre
    value, codes = encode(offset / step.clamp_min(ar.SCALE_FLOOR), grid, dither)
    if dither is not None:
        value = value - dither
    error = value * step - offset
    if is_outlier is not None:
        error = torch.where(is_outlier, 0.0, error)
    return _Quantized(codes, scale, zero, step, error)


def dequantize_keys(
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    k_bypass: torch.Tensor | None = None,
    store_format: StoreFormat = DEFAULT,
    outlier_channels: torch.Tensor | None = None,
    k_dither: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """K^ [..., Hkv, P, D] of stored pages; float64 holds it exactly for bf16 and fp16 models."""
    key = store_format.key
    value = decode(unpack(k_codes, key.grid.bits), key.grid).to(dtype)
    if k_dither is not None:
        value = value - k_dither.to(dtype)
    scale = k_scale.to(dtype)
    scale = scale.repeat_interleave(KEY_GROUP, -1) if key.per_token else scale[..., None, :]
    keys = scale * value
    if key.is_asymmetric:
        keys = keys + k_zero.to(dtype)[..., None, :]
    if key.outlier_pairs:
        index = outlier_channels.long()[:, None, :].expand(*keys.shape[:-1], -1)
        keys = keys.scatter(-1, index, k_bypass.to(dtype))
    return keys


def dequantize_values(
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    v_zero: torch.Tensor | None = None,
    store_format: StoreFormat = DEFAULT,
    v_dither: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """V^ [..., P, D] of stored pages, channel-major [..., D, P] as they are stored."""
    value = store_format.value
    if value.is_exact:
        return v_codes.to(dtype).mT
    codes = decode(unpack(v_codes, value.grid.bits), value.grid).to(dtype).mT
    if v_dither is not None:
        codes = codes - v_dither.to(dtype)
    if not value.is_grouped:
        return codes * v_scale.to(dtype)
    scale, zero = (part.to(dtype).repeat_interleave(VALUE_GROUP, -1) for part in (v_scale, v_zero))
    return codes * scale + zero
