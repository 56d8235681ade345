"""Quantizers of the default recipe, in torch: what a page of codes means, and the notes that bound its error.

Keys: asymmetric int8 per page and channel, K^ = zero + scale * code. Values: symmetric int8 per token, V^ = scale * code.
Both quantize with the STORED (rounded) scale and zero, so |x - x^| <= scale / 2 (1 + 4.6e-5) holds for what is read back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import arithmetic as ar
from .storage import Note

LEVELS = 127


def midpoint(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """(low + high) / 2 in float32 without overflow, rounded once; halving first would lose the last bit of a subnormal."""
    total = low + high
    return torch.where(total.isfinite(), total * 0.5, low * 0.5 + high * 0.5)


class QuantizedPage(NamedTuple):
    """One page of every KV head; leading dimensions [...]."""

    k_codes: torch.Tensor  # int8 [..., P, D]
    k_scale: torch.Tensor  # bf16 [..., D]
    k_zero: torch.Tensor  # model dtype [..., D]
    v_codes: torch.Tensor  # int8 [..., D, P]
    v_scale: torch.Tensor  # bf16 [..., P, 1]
    page_notes: torch.Tensor  # fp32 [..., Note.COUNT]


def round_up_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Smallest bfloat16 >= x, for x >= 0 in float32."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def scale_of(half_range: torch.Tensor) -> torch.Tensor:
    """bfloat16 scale that reaches half_range with LEVELS steps: rounded up, never below the floor."""
    return round_up_to_bfloat16((half_range / LEVELS).clamp_min(ar.SCALE_FLOOR))


def norm_up(x: torch.Tensor) -> torch.Tensor:
    """Upper bound of the norm over the last dimension, float32."""
    return x.square().sum(-1).sqrt() * (1 + ar.NOTE_RELATIVE) + ar.NORM_ABSOLUTE


def quantize_page(keys: torch.Tensor, values: torch.Tensor) -> QuantizedPage:
    """Quantize full pages.

    Args:
        keys, values: exact [..., P, D] in the model's dtype. A page that holds a NaN or an Inf is stored with that entry as 0
            and with infinite notes, so that every read of it is marked.

    Returns:
        The page as it is stored.
    """
    k, v = keys.float(), values.float()
    finite = (k.isfinite() & v.isfinite()).all(-1).all(-1)
    k, v = torch.where(k.isfinite(), k, 0.0), torch.where(v.isfinite(), v, 0.0)

    high, low = k.amax(-2), k.amin(-2)
    zero = midpoint(low, high).to(keys.dtype)
    centre = zero.float()
    scale = scale_of(torch.maximum(high - centre, centre - low))
    step = scale.float()
    offset = k - centre[..., None, :]
    codes = (offset / step[..., None, :]).round().clamp(-LEVELS, LEVELS)
    error = codes * step[..., None, :] - offset

    value_scale = scale_of(v.abs().amax(-1, keepdim=True))
    value_step = value_scale.float()
    value_codes = (v / value_step).round().clamp(-LEVELS, LEVELS)
    value_error = value_codes * value_step - v

    notes = torch.empty(*finite.shape, Note.COUNT, dtype=torch.float32, device=keys.device)
    notes[..., Note.VALUE_NORM] = norm_up(v).amax(-1)
    notes[..., Note.VALUE_ERROR] = norm_up(value_error / value_step).amax(-1)
    notes[..., Note.KEY_NORM] = norm_up(k).amax(-1)
    rounding = ar.RESIDUAL_ROUNDING * norm_up(step)
    notes[..., Note.KEY_ERROR] = norm_up(error).amax(-1) + rounding
    scaled_rounding = ar.RESIDUAL_ROUNDING * keys.shape[-1] ** 0.5 * (1 + ar.NOTE_RELATIVE)
    notes[..., Note.KEY_ERROR_SCALED] = norm_up(error / step[..., None, :]).amax(-1) + scaled_rounding
    notes[~finite] = float("inf")
    return QuantizedPage(
        codes.to(torch.int8), scale, zero, value_codes.to(torch.int8).mT.contiguous(), value_scale, notes
    )


def dequantize_keys(
    k_codes: torch.Tensor, k_scale: torch.Tensor, k_zero: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """K^ [..., P, D] = zero + scale * code; float64 holds it exactly for bf16 and fp16 models."""
    return k_zero.to(dtype)[..., None, :] + k_scale.to(dtype)[..., None, :] * k_codes.to(dtype)


def dequantize_values(v_codes: torch.Tensor, v_scale: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """V^ [..., P, D] = scale * code from channel-major codes [..., D, P]."""
    return v_codes.to(dtype).mT * v_scale.to(dtype)
