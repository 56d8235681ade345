"""Small Triton functions that more than one kernel uses."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import arithmetic as ar

LN_2 = tl.constexpr(0.6931471805599453)
NORM_FLOOR = tl.constexpr(ar.NORM_FLOOR)
NORM_ABSOLUTE = tl.constexpr(ar.NORM_ABSOLUTE)
NOTE_RELATIVE = tl.constexpr(ar.NOTE_RELATIVE)
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def round_to_bfloat16(x):
    """Nearest bfloat16 (ties to even) as float32, NaN for NaN. In integers, because the interpreter truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # noqa: PLR0124


@triton.jit
def round_up_to_bfloat16(x):
    """Smallest bfloat16 >= x as float32, for x >= 0."""
    bits = (x.to(tl.uint32, bitcast=True) + 0xFFFF) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_to_dtype(x, dtype: tl.constexpr):
    """Nearest value of a storage dtype, as that dtype."""
    if dtype == tl.bfloat16:
        x = round_to_bfloat16(x)
    return x.to(dtype)


@triton.jit
def round_to_integer(x):
    """Nearest integer, ties to even, for |x| < 2^22."""
    magic: tl.constexpr = 12582912.0
    return (x + magic) - magic


@triton.jit
def is_finite(x):
    """False for NaN and Inf."""
    return tl.abs(x) <= LARGEST


@triton.jit
def exponential_gap(c):
    """e^c - 1 - c for c >= 0, without cancellation."""
    series = 1.0 + c / 9.0
    series = 1.0 + series * c / 8.0
    series = 1.0 + series * c / 7.0
    series = 1.0 + series * c / 6.0
    series = 1.0 + series * c / 5.0
    series = 1.0 + series * c / 4.0
    series = 1.0 + series * c / 3.0
    return tl.where(c < 0.5, c * c * 0.5 * series, tl.exp(c) - 1.0 - c)


@triton.jit
def exponential_minus_one(c):
    """e^c - 1 for c >= 0, without cancellation."""
    return c + exponential_gap(c)


@triton.jit
def outlier_lanes(channel, outlier_of):
    """Which channels are outliers; `outlier_of` holds their indices, -1 beyond the last one."""
    return tl.max((channel[:, None] == outlier_of[None, :]).to(tl.int32), 1) > 0


@triton.jit
def norm_of_query(scaled_q):
    """Upper bound of sm_scale * ||q|| [rows], from q [D, rows] in log2 units."""
    magnitude = tl.maximum(tl.abs(scaled_q), NORM_FLOOR)
    return tl.sqrt(tl.sum(magnitude * magnitude, 0)) * (1.0 + NOTE_RELATIVE) * LN_2
