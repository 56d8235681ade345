"""Epilogue of a split: its pages' records become the sums that the merge makes the certificate from."""

from __future__ import annotations

import triton
import triton.language as tl

from ..storage import SOURCE_CODES, Note
from . import records as rec
from .primitives import exponential_minus_one
from .radii import page_radius
from .records import group_terms, record_address, store_sums

#: Pages whose records are summed at a time: with 8 rows, one for each thread of a warp.
EPILOGUE_BLOCK = 4

_TOP = tl.constexpr(rec.TOP)
_MASS = tl.constexpr(rec.MASS)
_SCALED_MASS = tl.constexpr(rec.SCALED_MASS)
_UNIT = tl.constexpr(rec.UNIT)
_SQUARE = tl.constexpr(rec.SQUARE)
_CENTRE = tl.constexpr(rec.CENTRE)
_RADIUS = tl.constexpr(rec.RADIUS)
_NORM = tl.constexpr(rec.NORM)
_CODE_TOKENS = tl.constexpr(rec.CODE_TOKENS)
_SCALED_ERROR = tl.constexpr(rec.SCALED_ERROR)
_CODE_MASS = tl.constexpr(rec.CODE_MASS)
_CODE_NORM = tl.constexpr(rec.CODE_NORM)
_SQUARED_NORM = tl.constexpr(rec.SQUARED_NORM)
_SPREAD = tl.constexpr(rec.SPREAD)
_WEIGHTED = tl.constexpr(rec.WEIGHTED)
_EPILOGUE = tl.constexpr(EPILOGUE_BLOCK)
_CODES = tl.constexpr(SOURCE_CODES)
_NOTES = tl.constexpr(Note.COUNT)
_VALUE_NORM = tl.constexpr(Note.VALUE_NORM)
_VALUE_ERROR = tl.constexpr(Note.VALUE_ERROR)


@triton.jit
def sum_pages(
    statistic, plane, heaviest_page, maximum, records, notes_of_head, page_table, source_map, oldest, is_valid, q_norm,
    bypass_norm, q_is_finite, deviation, row_block, pages_per_row, begin, end, code_step, code_fixed_point, code_zero, exact_dot,
    score_steps, lost_mass,
    STEP_RADIUS: tl.constexpr, RESIDUAL_RADIUS: tl.constexpr, PROBABILISTIC_RADIUS: tl.constexpr,
    K_MAX_ERROR: tl.constexpr, K_ASYMMETRIC: tl.constexpr, KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of the split's certificate over pages [begin, end), relative to `maximum`, into its statistics."""
    reference = tl.where(maximum == float("-inf"), 0.0, maximum)[None, :]
    nothing = tl.zeros([_EPILOGUE, ROWS], tl.float32)
    radius_max, norm_max, tokens = nothing, nothing, nothing
    error, norms, squares, spread, weighted = nothing, nothing, nothing, nothing, nothing
    masses, excess, lower, shrunk, pinsker = nothing, nothing, nothing, nothing, nothing
    heaviest_mass, heaviest_radius = nothing, nothing
    # Everything is [pages, rows] from the start: a vector of pages would have to change its layout.
    lane = tl.arange(0, _EPILOGUE)[:, None] + tl.zeros([1, ROWS], tl.int32)
    for start in range(begin, end, _EPILOGUE):
        page = start + lane
        planes = record_address(records, row_block, pages_per_row, page, ROWS) + tl.arange(0, ROWS)[None, :]
        is_page = page < end
        source = tl.load(source_map + page, mask=is_page, other=0)
        in_page = (page + 1) * PAGE_SIZE - tl.maximum(oldest[None, :] + 1, page * PAGE_SIZE)
        is_read = is_page & (source == _CODES) & is_valid[None, :] & (in_page > 0)
        share = tl.exp2(tl.load(planes + _TOP * ROWS, mask=is_read, other=float("-inf")) - reference)
        mass = share * tl.load(planes + _MASS * ROWS, mask=is_read, other=0.0)
        scaled_mass = share * tl.load(planes + _SCALED_MASS * ROWS, mask=is_read, other=0.0)
        unit = tl.load(planes + _UNIT * ROWS, mask=is_read, other=0.0)
        square = tl.load(planes + _SQUARE * ROWS, mask=is_read, other=0.0)
        centre = nothing
        if K_ASYMMETRIC:
            centre = tl.load(planes + _CENTRE * ROWS, mask=is_read, other=0.0)
        physical = tl.load(page_table + page, mask=is_read, other=0).to(tl.int64)
        notes = notes_of_head + physical * (KV_HEADS * _NOTES)
        radius = page_radius(
            unit, square, centre, q_norm, bypass_norm, q_is_finite, deviation, notes, is_read, code_step, code_fixed_point,
            code_zero, exact_dot, score_steps, STEP_RADIUS, RESIDUAL_RADIUS, PROBABILISTIC_RADIUS, K_MAX_ERROR,
        )  # fmt: skip
        radius = tl.where(is_read, radius, 0.0)
        norm = tl.load(notes + _VALUE_NORM, mask=is_read, other=0.0)
        note = tl.load(notes + _VALUE_ERROR, mask=is_read, other=0.0)

        radius_max = tl.maximum(radius_max, radius)
        norm_max = tl.maximum(norm_max, norm)
        tokens += tl.where(is_read, in_page, 0).to(tl.float32)
        error += scaled_mass * note
        norms += mass * norm
        squares += mass * norm * norm
        grow = exponential_minus_one(radius)
        spread += mass * grow * grow
        weighted += mass * grow * norm
        is_heaviest = page == heaviest_page[None, :]
        heaviest_mass += tl.where(is_heaviest, mass, 0.0)
        heaviest_radius += tl.where(is_heaviest, radius, 0.0)
        mass = tl.where(is_heaviest, 0.0, mass)
        more = group_terms(mass, mass, radius)
        masses += more[0]
        excess += more[1]
        lower += more[2]
        shrunk += more[3]
        pinsker += more[4]
    others = (tl.sum(masses, 0), tl.sum(excess, 0), tl.sum(lower, 0), tl.sum(shrunk, 0), tl.sum(pinsker, 0))
    heaviest_mass, heaviest_radius = tl.sum(heaviest_mass, 0), tl.sum(heaviest_radius, 0)
    tl.store(statistic + _RADIUS * plane, tl.max(radius_max, 0))
    tl.store(statistic + _NORM * plane, tl.max(norm_max, 0))
    tl.store(statistic + _CODE_TOKENS * plane, tl.sum(tokens, 0))
    tl.store(statistic + _SCALED_ERROR * plane, tl.sum(error, 0))
    tl.store(statistic + _CODE_MASS * plane, others[0] + heaviest_mass)
    tl.store(statistic + _CODE_NORM * plane, tl.sum(norms, 0))
    tl.store(statistic + _SQUARED_NORM * plane, tl.sum(squares, 0))
    tl.store(statistic + _SPREAD * plane, tl.sum(spread, 0))
    tl.store(statistic + _WEIGHTED * plane, tl.sum(weighted, 0))
    store_sums(statistic, plane, others, heaviest_mass, heaviest_radius, lost_mass)
