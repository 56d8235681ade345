"""Codes of a grid: rounding, packing and their inverses, in torch. The kernels do the same, bit for bit."""

from __future__ import annotations

import torch

from .formats import Grid


def encode(x: torch.Tensor, grid: Grid, dither: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to the grid.

    Args:
        x: float32, in units of the scale; |x| <= grid.levels up to rounding.
        grid: of the format.
        dither: float32 like x, or None.

    Returns:
        The value of each code in float32, dither not subtracted; and the code as stored, int16.
    """
    if grid.is_float:
        return _encode_e4m3(x)
    if dither is not None:
        x = x + dither
    lowest, highest = (-127, 127) if grid.offset == 0 else (0, 2**grid.bits - 1)
    code = (x + grid.offset).round().clamp(lowest, highest)
    return code - grid.offset, code.to(torch.int16)


def decode(code: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Values of stored codes (int8, or unpacked bytes), float32."""
    return _decode_e4m3(code) if grid.is_float else code.to(torch.float32) - grid.offset


def _encode_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest fp8 (e4m3), ties to even: three bits of mantissa from 2^-6 up, steps of 2^-9 below."""
    bits = x.contiguous().view(torch.int32)
    magnitude, sign = bits & 0x7FFFFFFF, (bits >> 24) & 0x80
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    small = (x.abs() * 512).round().to(torch.int32)
    code = torch.where(x.abs() < 2.0**-6, small, rounded - (120 << 3)).clamp_max(126) | sign
    return _decode_e4m3(code), code.to(torch.int16)


def _decode_e4m3(code: torch.Tensor) -> torch.Tensor:
    code = code.to(torch.int32)
    exponent, mantissa = (code >> 3) & 15, (code & 7).to(torch.float32)
    normal = (1 + mantissa / 8) * torch.exp2(exponent.to(torch.float32) - 7)
    value = torch.where(exponent == 0, mantissa / 512, normal)
    return torch.where(code & 0x80 != 0, -value, value)


def pack(code: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of the last dimension as stored: int8 for 8 signed bits, else bytes.

    4 bits: neighbours share a byte, the first one in the low half. 6 bits: their low halves as for 4 bits, then their two
    high bits, four neighbours in a byte.
    """
    if bits == 8:
        return (code & 0xFF).to(torch.uint8)
    if bits == 4:
        return _join(code, 4)
    return torch.cat([_join(code & 15, 4), _join(code >> 4, 2)], -1)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of :func:`pack`, int16."""
    packed = packed.to(torch.int16)
    if bits == 8:
        return packed
    if bits == 4:
        return _separate(packed, 4)
    split = packed.shape[-1] * 2 // 3
    return _separate(packed[..., :split], 4) | (_separate(packed[..., split:], 2) << 4)


def _join(code: torch.Tensor, bits: int) -> torch.Tensor:
    count = 8 // bits
    shifts = torch.arange(0, 8, bits, dtype=torch.int16, device=code.device)
    return (code.unflatten(-1, (-1, count)) << shifts).sum(-1).to(torch.uint8)


def _separate(packed: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.int16, device=packed.device)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
