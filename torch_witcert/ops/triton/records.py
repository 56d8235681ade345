"""Scratch that the launches of a read hand on: a record for each page and block of query rows, statistics for each split.

Rows of a block lie side by side, so that a program writes whole sectors:
page records fp32 [B * Hkv * row blocks, M + 1, RECORDS, ROWS] (the last page is the exact pass),
split statistics fp32 [B * Hkv * row blocks, splits + 1, STATISTICS, ROWS],
accumulators fp32 [B * Hkv * row blocks, splits + 1, D, ROWS].
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Planes of a page record. Radius and q . zero come from the pre-pass.
REFERENCE, MASS, SCALED_MASS, TOP, RADIUS, QZERO = range(6)
RECORDS = 6
#: Planes of a split's statistics.
MAXIMUM, SUM = range(2)
STATISTICS = 2

_RECORDS = tl.constexpr(RECORDS)


@triton.jit
def record_address(records, row_block, pages_per_row, page, PLANE: tl.constexpr, ROWS: tl.constexpr):
    """Where the rows of a plane of a page's record begin."""
    return records + ((row_block * (pages_per_row + 1) + page) * _RECORDS + PLANE) * ROWS
