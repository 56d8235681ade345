"""Matrix products of stage 1: codes as they are times fixed-point integers, and exact values times bf16 limbs."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import arithmetic as ar
from .primitives import round_to_bfloat16

_FRACTION = tl.constexpr(ar.FIXED_POINT_BITS)
#: 1.5 * 2^23: adding it leaves a number below 2^22 rounded to an integer, in the low bits.
_MAGIC = tl.constexpr(12582912.0)
_MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def as_operand(x, OPERAND: tl.constexpr):
    """x rounded to bf16, in the operand type of the matrix product."""
    if OPERAND == tl.bfloat16:
        return x.to(tl.bfloat16)
    else:
        return round_to_bfloat16(x)


@triton.jit
def product(a, b, OPERAND: tl.constexpr):
    """a @ b of operands."""
    if OPERAND == tl.float32:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def limb_product(a, x, OPERAND: tl.constexpr):
    """a @ x for an `a` that is exact in bf16 and a float32 x, which is multiplied as two bf16 limbs."""
    high = as_operand(x, OPERAND)
    low = as_operand(x - high.to(tl.float32), OPERAND)
    return product(a, low, OPERAND) + product(a, high, OPERAND)


@triton.jit
def split_bfloat16(x):
    """The leading 8 significant bits of x as bf16, and the rest."""
    bits = x.to(tl.int32, bitcast=True)
    rest = x - (bits & -65536).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), rest


@triton.jit
def exact_operand(x, USED: tl.constexpr):
    """x as `exact_product` takes it: three bf16 limbs, which are all of its 24 bits; or itself, where USED is no bf16 operand."""
    if USED:
        high, rest = split_bfloat16(x)
        middle, rest = split_bfloat16(rest)
        low, rest = split_bfloat16(rest)
        return high, middle, low
    else:
        return x, x, x


@triton.jit
def exact_product(a, operand, USED: tl.constexpr):
    """a @ x in float32 accuracy, for the operand of x; limbs multiply an `a` that is stored in bf16 itself."""
    high, middle, low = operand
    if USED:
        return (tl.dot(a, low) + tl.dot(a, middle)) + tl.dot(a, high)
    else:
        return tl.dot(a.to(tl.float32), high, input_precision="ieee")


@triton.jit
def fixed_point(x, square):
    """Integers of at most 22 bits and a sign, int32 [channels, rows], and the step of each row: x = integer * step to half a step.

    `square` [rows] is the sum of x^2, rounded, and at least 2^-120. The step is a power of two, at least sqrt(square) * 2^-22 and
    at most twice that.
    """
    # With room for the rounding of the sum, so that no integer has more bits.
    square = square * 1.0009765625
    exponent = ((square.to(tl.int32, bitcast=True) >> 23) - (127 - 2)) >> 1
    step = ((exponent + (127 - _FRACTION)) << 23).to(tl.float32, bitcast=True)
    inverse = ((-exponent + (127 + _FRACTION)) << 23).to(tl.float32, bitcast=True)
    integer = (x * inverse[None, :] + _MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS
    return integer, step


@triton.jit
def integer_product(a, x):
    """a @ x as float32, for int8 codes and integers of `fixed_point`: three digits to the base 256, summed exactly."""
    low = x.to(tl.int8)
    carried = (x + 128) >> 8
    middle = carried.to(tl.int8)
    high = ((carried + 128) >> 8).to(tl.int8)
    return tl.dot(a, high).to(tl.float32) * 65536.0 + (tl.dot(a, middle) * 256 + tl.dot(a, low)).to(tl.float32)
