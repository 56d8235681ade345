"""Rounding of the arithmetic that the kernels really do, as bounds that the certificate adds to its radii and sums.

One place for every constant: the reference and the Triton kernels take their numbers from here. Units are natural-log
units for scores and relative errors for sums. DESIGN section 7 derives them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .formats import KEY_GROUP, StoreFormat

#: A radius above this is no guarantee: e^c would drown every mass.
RADIUS_LIMIT = 40.0
#: Two bf16 limbs of q * scale leave |q s - hi - lo| <= 2^-17 |q s|: half a unit in the last place of a residual below 2^-8.
LIMB_ERROR = 2.0**-17
#: Error of a bf16 matrix instruction over 16 products, per instruction, relative to the sum of magnitudes. Measured on an
#: H200: 2^-22.15 on random numbers, 2^-20.84 at worst (one product of 1, fifteen just below its last bit).
MMA_STEP_ERROR = 2.0**-20
#: Soft capping, in units of the cap: tanh from one exponential and one division, 2^-22 each.
SOFTCAP_ERROR = 2.0**-20
#: Natural logarithm of 2^126: a weight further below the heaviest one is 0.
FLUSHED = 87.34
#: The logit of a sink, multiplied by log2(e): relative to its magnitude.
SINK_ERROR = 2.0**-22
#: Relative excess of |x - x^| over scale / 2 that fp32 rounding allows (at most 4.6e-5), and the rounding of the radius itself.
RADIUS_RELATIVE = 2.0**-12
#: exp2 arguments lie in [-126, 0] or flush: three differences rounded to fp32 cost at most 3 * 126 * 2^-24 * ln 2.
EXPONENT_ERROR = 2.0**-15
#: Smallest magnitude whose square is a normal fp32 number, with room: norms replace smaller entries by it.
NORM_FLOOR = 2.0**-60
#: What entries below NORM_FLOOR can hide in a norm over at most 256 channels.
NORM_ABSOLUTE = 2.0**-55
#: Rounding up of a page note computed in fp32.
NOTE_RELATIVE = 2.0**-14
#: |fl(x - zero) - (x - zero)| <= 2^-24 * 127.5 * scale, and as much for scale * (code - dither), which has 25 bits.
RESIDUAL_ROUNDING = 2.0**-16
#: Weights times value scale are rounded to bf16 (8 significant bits) before the second matrix product.
WEIGHT_ROUNDING = 2.0**-8 * (1 + 2.0**-6)
#: Floor of a scale: a constant channel would give 0 / 0.
SCALE_FLOOR = 2.0**-100
#: Mass that a flushed weight, a lost subtraction or a rounded exponential may hide in a sum of weights.
SUM_ABSOLUTE = 2.0**-20
#: The same in sums of differences that are computed without cancellation.
GAP_ABSOLUTE = 2.0**-40

#: Rounding of the output to the model's dtype: (relative to its norm, absolute per vector of at most 256 channels).
OUTPUT_ROUNDING = {
    torch.bfloat16: (2.0**-8, 0.0),
    torch.float16: (2.0**-11, 2.0**-21),
    torch.float32: (2.0**-23, 0.0),
}


def exact_tile(head_dim: int) -> int:
    """Tokens that the exact pass multiplies at a time; wide heads would not fit into shared memory otherwise."""
    return 64 if head_dim <= 128 else 32


def triton_block(size: int) -> int:
    """Power of two that a kernel pads a dimension to."""
    return 1 << (size - 1).bit_length()


def scaled_residual_rounding(head_dim: int) -> float:
    """What RESIDUAL_ROUNDING can hide in the norm of a residual in units of its scales."""
    return RESIDUAL_ROUNDING * head_dim**0.5 * (1 + NOTE_RELATIVE)


@dataclass(frozen=True)
class Arithmetic:
    """Sizes that decide how much rounding a read can collect.

    Args:
        head_dim: D.
        page_size: P.
        pages_per_split: pages that one program walks through.
        num_splits: splits of code pages in a full cache, plus one for the exact pass.
        exact_tokens: most tokens that the exact pass can read: P of the tail and T fresh ones.
        dtype: the model's dtype.
        store_format: how keys and values are stored.
        softcap: scores are softcap * tanh(score / softcap); 0 for none.
    """

    head_dim: int
    page_size: int
    pages_per_split: int
    num_splits: int
    exact_tokens: int
    dtype: torch.dtype
    store_format: StoreFormat
    softcap: float

    @classmethod
    def of(
        cls,
        head_dim: int,
        page_size: int,
        pages_per_row: int,
        pages_per_split: int,
        new_tokens: int,
        dtype: torch.dtype,
        store_format: StoreFormat,
        softcap: float,
    ) -> Arithmetic:
        num_splits = -(-pages_per_row // pages_per_split) + 1
        tokens = page_size + new_tokens
        return cls(head_dim, page_size, pages_per_split, num_splits, tokens, dtype, store_format, softcap)

    @property
    def exact_tiles(self) -> int:
        return -(-self.exact_tokens // exact_tile(self.head_dim)) + 1

    @property
    def rescalings(self) -> int:
        """Most rescalings of an accumulator by a new running maximum."""
        return max(self.pages_per_split, self.exact_tiles)

    @property
    def score_steps(self) -> float:
        """Relative error of a weight from exponentials and rescalings, and of a soft cap, as an error of its score."""
        exponentials = 2.0**-21 * (4 + 2 * self.rescalings + self.num_splits) + EXPONENT_ERROR
        return exponentials + SOFTCAP_ERROR * self.softcap

    @property
    def code_step(self) -> float:
        """Score error of the products with codes, per unit of sm_scale * sum |q_c| scale_c."""
        key = self.store_format.key
        matrix_steps = 2 * triton_block(self.head_dim) // 16 * (2 if key.is_dithered else 1)
        sums = 2.0**-21 + (self.head_dim // KEY_GROUP * 2.0**-23 if key.per_token else 0.0)
        # With dither the code and the dither are multiplied apart: together one step more than the largest value.
        return (key.grid.levels + 1) * (LIMB_ERROR + matrix_steps * MMA_STEP_ERROR + sums)

    @property
    def code_zero(self) -> float:
        """Score error per unit of sm_scale * sum |q_c zero_c| on a code page."""
        return (self.head_dim + 8) * 2.0**-24 + 2.0**-21

    @property
    def exact_dot(self) -> float:
        """Score error per unit of sm_scale * ||q|| ||K_t|| of an exact token, or of the outlier channels of a code page."""
        return (self.head_dim + 8) * 2.0**-24 + 2.0**-21

    @property
    def sum_relative(self) -> float:
        """Relative error of a sum of page masses against the weights that made the output."""
        return 2.0**-12 + 2.0**-20 * (4 + 2 * self.rescalings + self.num_splits)

    @property
    def lost_mass(self) -> float:
        """Relative error of a group's mass less its heaviest token, which is subtracted from the rounded sum."""
        return 2.0**-16 + self.exact_tiles * 2.0**-22

    @property
    def weight_rounding(self) -> float:
        """Relative rounding of the weights before they multiply values; int4 and exact values are multiplied in float32."""
        value = self.store_format.value
        return 0.0 if value.is_grouped or value.is_exact else WEIGHT_ROUNDING

    @property
    def code_values(self) -> float:
        """Output error per unit of the mass-weighted norm of values read as codes."""
        value = self.store_format.value
        instructions = self.pages_per_split * self.page_size / 16
        # Code and dither are multiplied apart, and their magnitudes are at most three times that of their difference.
        instructions *= 4 if value.is_dithered else 1
        # A group's zero and range are at most its largest entry: 16 entries rounded twice.
        dequantized = 2.0**-20 if value.is_grouped else 0.0
        rescaled = self.pages_per_split * 2.0**-22 + (self.num_splits + 8) * 2.0**-23
        return self.weight_rounding + dequantized + instructions * MMA_STEP_ERROR + rescaled

    @property
    def exact_values(self) -> float:
        """Output error per unit of the mass-weighted norm of exact values."""
        return (
            (self.exact_tokens + exact_tile(self.head_dim)) * 2.0**-24
            + self.exact_tiles * 2.0**-22
            + (self.num_splits + 8) * 2.0**-23
        )

    @property
    def normaliser(self) -> float:
        """Output error per unit of its norm, from the sum of weights that divides it."""
        tokens = max(self.pages_per_split * self.page_size, self.exact_tokens)
        return (tokens + self.num_splits + 8) * 2.0**-24
