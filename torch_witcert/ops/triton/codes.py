"""Codes of a grid and subtractive dither in Triton (reference: `ops.codes`, `ops.dither`)."""

from __future__ import annotations

import triton
import triton.language as tl

from ..dither import PAGE_KEYS

#: Values of the compile-time parameters K_DITHER and V_DITHER.
DITHER_MODES = {"none": 0, "stream": 1, "tile": 2}

_TILE = tl.constexpr(DITHER_MODES["tile"])
_PAGE_KEYS = tl.constexpr(PAGE_KEYS)


@triton.jit
def decode_e4m3(code):
    """Value of fp8 bits, float32; without fp32 subnormals on the way."""
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude + 960) << 20).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    return tl.where((code & 0x80) != 0, -value, value)


@triton.jit
def encode_e4m3(x):
    """Bits of the nearest fp8, ties to even, int32; |x| <= 448."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    magic: tl.constexpr = 12582912.0
    small = ((tl.abs(x) * 512.0 + magic) - magic).to(tl.int32)
    code = tl.minimum(tl.where(tl.abs(x) < 0.015625, small, rounded - 960), 126)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def load_code_values(
    codes, row, index, mask, COUNT: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, FLOAT: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Values of codes, all exact in bfloat16.

    `row` is where a row of COUNT codes begins, `index` the code in the row; both broadcast. A masked code has any value.
    """
    if BITS == 8:
        code = tl.load(codes + row + index, mask=mask, other=0)
        if FLOAT:
            return decode_e4m3(code).to(dtype)
        else:
            return code.to(dtype)
    else:
        low = tl.load(codes + row + index // 2, mask=mask, other=0).to(tl.int32)
        code = (low >> ((index % 2) * 4)) & 15
        if BITS == 6:
            high = tl.load(codes + row + COUNT // 2 + index // 4, mask=mask, other=0).to(tl.int32)
            code = code | (((high >> ((index % 4) * 2)) & 3) << 4)
        return (code.to(tl.float32) - OFFSET).to(dtype)


@triton.jit
def join_codes(code, AXIS_LENGTH: tl.constexpr, OTHER: tl.constexpr, BITS: tl.constexpr):
    """Bytes [OTHER, AXIS_LENGTH * BITS / 8] of codes [OTHER, AXIS_LENGTH], int32: neighbours share a byte, the first one lowest."""
    COUNT: tl.constexpr = 8 // BITS
    grouped = tl.reshape(code, (OTHER, AXIS_LENGTH // COUNT, COUNT))
    shift = tl.arange(0, COUNT) * BITS
    return tl.sum(grouped << shift[None, None, :], 2)


@triton.jit
def dither_tile(
    page_key, layer, head, first_channel, PAGE_SIZE: tl.constexpr, CHANNELS: tl.constexpr, IS_VALUE: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """Dither [PAGE_SIZE, CHANNELS] of a page from `first_channel` on (both multiples of 16), float32 in (-1/2, 1/2)."""
    if MODE == _TILE:
        page_key = page_key // _PAGE_KEYS * _PAGE_KEYS
    BLOCKS: tl.constexpr = CHANNELS // 16
    none = tl.zeros([PAGE_SIZE, BLOCKS], tl.uint32)
    block = none + (tl.arange(0, BLOCKS) + first_channel // 16).to(tl.uint32)[None, :]
    token = none + tl.arange(0, PAGE_SIZE).to(tl.uint32)[:, None]
    use = none + (layer * 2 + IS_VALUE).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(page_key.to(tl.uint64), block, token, use, none + head.to(tl.uint32))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    words = tl.reshape(words, (PAGE_SIZE, BLOCKS * 4, 1))
    byte = (words >> (tl.arange(0, 4) * 8).to(tl.uint32)[None, None, :]) & 0xFF
    dither = (byte.to(tl.float32) * 2.0 - 255.0) * 0.001953125
    return tl.reshape(dither, (PAGE_SIZE, CHANNELS))
