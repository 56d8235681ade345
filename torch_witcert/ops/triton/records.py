"""Scratch that the launches of a read hand on: records of code pages, statistics of splits, accumulators.

fp32; ROWS query rows of a block, the splits of code pages and one more, the exact tokens:
page records [B * Hkv * row blocks, M, RECORDS, ROWS], read back by the program that wrote them,
split statistics [B * Hkv * row blocks, STATISTICS, ROWS, splits + 1], as the merge reads them,
accumulators [B * Hkv * row blocks, splits + 1, ROWS, D].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import exponential_gap, exponential_minus_one

#: Planes of a page record. Mass and scaled mass are relative to the page's own top; unit, square and centre are what its
#: radius is made of, and q . zero, in log2 units.
TOP, MASS, SCALED_MASS, UNIT, SQUARE, CENTRE, QZERO = range(7)
RECORDS = 7
#: Planes of a split's statistics: its running maximum and sum, the largest radius and norm, and sums over its pages relative
#: to the maximum. Those from HEAVIEST_RADIUS on are about the page of its heaviest token, and the sums without that token.
(
    MAXIMUM,
    SUM,
    RADIUS,
    NORM,
    CODE_TOKENS,
    SCALED_ERROR,
    CODE_MASS,
    CODE_NORM,
    SQUARED_NORM,
    SPREAD,
    WEIGHTED,
    MASS_SUM,
    EXCESS,
    LOWER,
    SHRINK,
    PINSKER,
    HEAVIEST_RADIUS,
    REST,
    REST_EXCESS,
    REST_LOWER,
    REST_SHRINK,
    REST_PINSKER,
) = range(22)
STATISTICS = 22
#: Of the exact tokens there are only the maximum, the sum, the largest norms of keys and values, and the error of the sink's score.
KEY_NORM, SINK_ERROR = RADIUS, CODE_TOKENS

_RECORDS = tl.constexpr(RECORDS)
_STATISTICS = tl.constexpr(STATISTICS)
_HEAVIEST_RADIUS = tl.constexpr(HEAVIEST_RADIUS)
_MASS_SUM = tl.constexpr(MASS_SUM)
_REST = tl.constexpr(REST)


@triton.jit
def record_address(records, row_block, pages_per_row, page, ROWS: tl.constexpr):
    """Where a page's record begins; its planes lie ROWS apart."""
    return records + (row_block * pages_per_row + page) * (_RECORDS * ROWS)


@triton.jit
def statistics_address(statistics, row_block, splits, row, split, ROWS: tl.constexpr):
    """Where a row's statistics of a split begin; its planes lie ROWS * splits apart."""
    return statistics + (row_block * (_STATISTICS * ROWS) + row) * splits + split


@triton.jit
def group_terms(mass, low_mass, radius):
    """What a group of tokens (a page, or the exact tokens) adds to the sums MASS_SUM, EXCESS, LOWER, SHRINK and PINSKER.

    Names and formulas are those of `torch_witcert.ops.certificate`; `low_mass` is the mass, or less where it is not known.
    """
    grow = exponential_minus_one(radius)
    shrink = grow / (1.0 + grow)
    return mass, mass * grow, low_mass * (1.0 - shrink), mass * shrink, mass * exponential_gap(radius)


@triton.jit
def rest_terms(mass, top, radius, lost_mass):
    """The same of a group less its heaviest token, whose weight is `top`; what its rounded mass may hide counts both ways."""
    lost = lost_mass * mass
    rest = tl.maximum(mass - top, 0.0)
    return group_terms(rest + lost, tl.maximum(rest - lost, 0.0), radius)


@triton.jit
def store_sums(statistic, plane, others, heaviest_mass, heaviest_radius, lost_mass):
    """Store the sums of a split, with its heaviest token (whose weight is 1) and without it.

    `others` are the sums of `group_terms` over the pages that do not hold that token; the page that does has the mass and
    radius given.
    """
    whole = group_terms(heaviest_mass, heaviest_mass, heaviest_radius)
    less = rest_terms(heaviest_mass, 1.0, heaviest_radius, lost_mass)
    tl.store(statistic + _HEAVIEST_RADIUS * plane, heaviest_radius)
    for i in tl.static_range(5):
        tl.store(statistic + (_MASS_SUM + i) * plane, others[i] + whole[i])
        tl.store(statistic + (_REST + i) * plane, others[i] + less[i])
