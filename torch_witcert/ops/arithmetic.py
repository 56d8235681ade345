"""Rounding of the arithmetic that the kernels really do, as bounds that the certificate adds to its radii and sums.

One place for every constant: the reference and the Triton kernels take their numbers from here. Units are natural-log
units for scores and relative errors for sums. DESIGN section 7 derives them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Tokens that the exact pass multiplies at a time.
EXACT_TILE = 64
#: A radius above this is no guarantee: e^c would drown every mass.
RADIUS_LIMIT = 40.0
#: Two bf16 limbs of q * scale leave |q s - hi - lo| <= 2^-17 |q s|: half a unit in the last place of a residual below 2^-8.
LIMB_ERROR = 2.0**-17
#: Error of a bf16 matrix instruction over 16 products, per instruction, relative to the sum of magnitudes (measured: 2^-22.15).
MMA_STEP_ERROR = 2.0**-20
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
#: |fl(x - zero) - (x - zero)| <= 2^-24 * 127.1 * scale.
RESIDUAL_ROUNDING = 2.0**-17
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
    """

    head_dim: int
    page_size: int
    pages_per_split: int
    num_splits: int
    exact_tokens: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        head_dim: int,
        page_size: int,
        pages_per_row: int,
        pages_per_split: int,
        new_tokens: int,
        dtype: torch.dtype,
    ) -> Arithmetic:
        num_splits = -(-pages_per_row // pages_per_split) + 1
        return cls(head_dim, page_size, pages_per_split, num_splits, page_size + new_tokens, dtype)

    @property
    def exact_tiles(self) -> int:
        return -(-self.exact_tokens // EXACT_TILE) + 1

    @property
    def rescalings(self) -> int:
        """Most rescalings of an accumulator by a new running maximum."""
        return max(self.pages_per_split, self.exact_tiles)

    @property
    def score_steps(self) -> float:
        """Relative error of a weight from exponentials and rescalings, as an error of its score."""
        return 2.0**-21 * (4 + 2 * self.rescalings + self.num_splits) + EXPONENT_ERROR

    @property
    def code_step(self) -> float:
        """Score error per unit of 254 c_L1 = sm_scale * 127 * sum |q_c| scale_c on a code page."""
        matrix_steps = 2 * self.head_dim // 16
        return LIMB_ERROR + matrix_steps * MMA_STEP_ERROR + 2.0**-22

    @property
    def code_zero(self) -> float:
        """Score error per unit of sm_scale * sum |q_c zero_c| on a code page."""
        return (self.head_dim + 8) * 2.0**-24 + 2.0**-22

    @property
    def exact_dot(self) -> float:
        """Score error per unit of sm_scale * ||q|| ||K_t|| of an exact token."""
        return (self.head_dim + 8) * 2.0**-24 + 2.0**-22

    @property
    def sum_relative(self) -> float:
        """Relative error of a sum of page masses against the weights that made the output."""
        return 2.0**-12 + 2.0**-20 * (4 + 2 * self.rescalings + self.num_splits)

    @property
    def lost_mass(self) -> float:
        """Relative error of a group's mass less its heaviest token, which is subtracted from the rounded sum."""
        return 2.0**-16 + self.exact_tiles * 2.0**-22

    @property
    def code_values(self) -> float:
        """Output error per unit of the mass-weighted norm of values read as codes."""
        instructions = self.pages_per_split * self.page_size / 16
        rescaled = self.pages_per_split * 2.0**-22 + (self.num_splits + 8) * 2.0**-23
        return WEIGHT_ROUNDING + instructions * MMA_STEP_ERROR + rescaled

    @property
    def exact_values(self) -> float:
        """Output error per unit of the mass-weighted norm of exact values."""
        return (
            (self.exact_tokens + EXACT_TILE) * 2.0**-24 + self.exact_tiles * 2.0**-22 + (self.num_splits + 8) * 2.0**-23
        )

    @property
    def normaliser(self) -> float:
        """Output error per unit of its norm, from the sum of weights that divides it."""
        tokens = max(self.pages_per_split * self.page_size, self.exact_tokens)
        return (tokens + self.num_splits + 8) * 2.0**-24
