"""Radii of code pages: the products with their scales and zeros, and what follows from them (reference: `ops.certificate`)."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import arithmetic as ar
from ..dither import GRID_ERROR
from ..storage import Note
from .primitives import LN_2, NORM_FLOOR, is_finite
from .products import exact_operand, exact_product, split_bfloat16

_RADIUS_RELATIVE = tl.constexpr(1.0 + ar.RADIUS_RELATIVE)
_GRID_ERROR = tl.constexpr(GRID_ERROR)
_KEY_NORM = tl.constexpr(Note.KEY_NORM)
_KEY_ERROR = tl.constexpr(Note.KEY_ERROR)
_KEY_ERROR_SCALED = tl.constexpr(Note.KEY_ERROR_SCALED)


@triton.jit
def page_products(
    scaled_q, k_scale, k_zero, block, is_page,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, K_ASYMMETRIC: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """sum |q| scale, sum q^2 scale^2, sum |q zero| and q . zero [pages, rows] of pages in the blocks `block`, in log2 units."""
    channel = tl.arange(0, DIM_BLOCK)
    mask = is_page[:, None] & (channel < HEAD_DIM)[None, :]
    where = block[:, None] * HEAD_DIM + channel[None, :]
    # Scales are bf16 whatever the model's dtype is.
    LIMBS: tl.constexpr = OPERAND == tl.bfloat16
    scale = tl.load(k_scale + where, mask=mask, other=0.0)
    magnitude = tl.abs(scaled_q)
    of_magnitude = exact_operand(magnitude, LIMBS)
    unit = exact_product(scale, of_magnitude, LIMBS)
    # Squares of smaller numbers would be 0, and their products with large ones lost.
    floored = tl.maximum(magnitude, NORM_FLOOR)
    of_square = exact_operand(floored * floored, LIMBS)
    square_of_scale = tl.maximum(scale.to(tl.float32), NORM_FLOOR)
    square_of_scale = square_of_scale * square_of_scale
    if LIMBS:
        # 16 significant bits: two limbs are exact.
        high, rest = split_bfloat16(square_of_scale)
        low, rest = split_bfloat16(rest)
        square = exact_product(low, of_square, LIMBS) + exact_product(high, of_square, LIMBS)
    else:
        square = exact_product(square_of_scale, of_square, LIMBS)
    centre, q_zero = tl.zeros_like(unit), tl.zeros_like(unit)
    if K_ASYMMETRIC:
        zero = tl.load(k_zero + where, mask=mask, other=0.0)
        ZERO_LIMBS: tl.constexpr = LIMBS and (zero.dtype == tl.bfloat16)
        if ZERO_LIMBS:
            centre = exact_product(tl.abs(zero), of_magnitude, True)
        else:
            centre = exact_product(tl.abs(zero), (magnitude, magnitude, magnitude), False)
        q_zero = exact_product(zero, exact_operand(scaled_q, ZERO_LIMBS), ZERO_LIMBS)
    return unit, square, centre, q_zero


@triton.jit
def probable_deviation(log_risk, tokens):
    """Factor of ||q * scale|| in a probabilistic radius. Every quantized token that the row holds shares the failure probability."""
    return tl.sqrt((log_risk + tl.log(tl.maximum(tokens, 1).to(tl.float32))) * 0.16666667163372040)


@triton.jit
def page_radius(
    unit, square, centre, q_norm, bypass_norm, q_is_finite, deviation, notes, is_read, code_step, code_fixed_point, code_zero,
    exact_dot, score_steps,
    STEP_RADIUS: tl.constexpr, RESIDUAL_RADIUS: tl.constexpr, PROBABILISTIC_RADIUS: tl.constexpr,
    K_MAX_ERROR: tl.constexpr,
):  # fmt: skip
    """The smallest radius allowed [pages, rows], arithmetic included.

    `unit`, `square` and `centre` [pages, rows] are sum |q| scale, sum q^2 scale^2 and sum |q zero| in log2 units, `notes` [pages, rows]
    where each page's notes are, for the rows that read it.
    """
    key_norm = tl.load(notes + _KEY_NORM, mask=is_read, other=0.0)
    square = tl.sqrt(square) * LN_2
    arithmetic = LN_2 * (unit * code_step + centre * code_zero) + square * code_fixed_point
    arithmetic += score_steps + bypass_norm * key_norm * exact_dot
    radius = tl.full(unit.shape, float("inf"), tl.float32)
    if STEP_RADIUS:
        radius = unit * K_MAX_ERROR * LN_2
    if RESIDUAL_RADIUS:
        scaled = square * tl.load(notes + _KEY_ERROR_SCALED, mask=is_read, other=0.0)
        plain = q_norm * tl.load(notes + _KEY_ERROR, mask=is_read, other=0.0)
        radius = tl.minimum(radius, tl.minimum(plain, scaled))
    if PROBABILISTIC_RADIUS:
        probable = square * deviation + unit * LN_2 * _GRID_ERROR
        # An exhausted budget makes it infinite, or 0 times infinity: no smaller than any other.
        radius = tl.where(probable < radius, probable, radius)
    radius = radius * _RADIUS_RELATIVE + arithmetic
    # Also where it is NaN, which a maximum would drop.
    return tl.where(is_finite(key_norm) & q_is_finite & is_finite(radius), radius, float("inf"))
