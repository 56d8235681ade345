"""Stage 1: attention over one split of the code pages, or over all exact tokens, and a record per page.

One source, specialised at compile time. A program owns (row, KV head, block of query rows, split); a query row is a
(fresh token, head of the KV group) pair. K tiles are the M operand and query rows N, so that int8 codes stay in registers
and no row is padding; the page's scale is folded into q, never applied to the codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import arithmetic as ar
from ..storage import SOURCE_CODES, Note
from .primitives import (
    LN_2,
    NORM_ABSOLUTE,
    NORM_FLOOR,
    NOTE_RELATIVE,
    is_finite,
    round_to_bfloat16,
)

#: Query rows of a program. 16 hits an illegal memory access with int8 operands on Triton 3.6.
QUERY_ROWS = 8
#: Planes of the page records [RECORDS, B * Hkv, query rows, M + 1]; the last slot is the exact pass.
REFERENCE, MASS, SCALED_MASS, TOP, RADIUS = range(5)
RECORDS = 5
#: Planes of the split statistics [STATISTICS, B * Hkv, query rows, splits + 1].
MAXIMUM, SUM = range(2)
STATISTICS = 2

_RECORD_REFERENCE = tl.constexpr(REFERENCE)
_RECORD_MASS = tl.constexpr(MASS)
_RECORD_SCALED_MASS = tl.constexpr(SCALED_MASS)
_RECORD_TOP = tl.constexpr(TOP)
_RECORD_RADIUS = tl.constexpr(RADIUS)
_STATISTIC_SUM = tl.constexpr(SUM)
_TILE = tl.constexpr(ar.EXACT_TILE)
_RADIUS_RELATIVE = tl.constexpr(1.0 + ar.RADIUS_RELATIVE)
_CODES = tl.constexpr(SOURCE_CODES)
_NOTES = tl.constexpr(Note.COUNT)
_KEY_NORM = tl.constexpr(Note.KEY_NORM)
_KEY_ERROR = tl.constexpr(Note.KEY_ERROR)
_KEY_ERROR_SCALED = tl.constexpr(Note.KEY_ERROR_SCALED)


@triton.jit
def _as_operand(x, OPERAND: tl.constexpr):
    """x rounded to bf16, in the operand type of the matrix product."""
    if OPERAND == tl.bfloat16:
        return x.to(tl.bfloat16)
    else:
        return round_to_bfloat16(x)


@triton.jit
def _product(a, b, OPERAND: tl.constexpr):
    if OPERAND == tl.float32:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _advance(maximum, total, accumulator, scores):
    """New running maximum, its weights, and the sums rescaled to it; -inf scores weigh 0, also before the first token."""
    top = tl.max(scores, 0)
    raised = tl.maximum(maximum, top)
    reference = tl.where(raised == float("-inf"), 0.0, raised)
    weights = tl.exp2(scores - reference[None, :])
    rescale = tl.exp2(maximum - reference)
    return raised, reference, top, weights, total * rescale, accumulator * rescale[None, :]


@triton.jit
def _page_scores(
    scaled_q, k_codes, k_scale, k_zero, block, token, channel, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Scores [P, rows] of a code page, with the page's sum |q| scale and sum |q zero| for the radius, all in log2 units."""
    scale = tl.load(k_scale + block * HEAD_DIM + channel).to(tl.float32)
    zero = tl.load(k_zero + block * HEAD_DIM + channel).to(tl.float32)
    codes = tl.load(k_codes + block * PAGE_SIZE * HEAD_DIM + token[:, None] * HEAD_DIM + channel[None, :])
    codes = codes.to(OPERAND)
    folded = scaled_q * scale[:, None]
    high = _as_operand(folded, OPERAND)
    low = _as_operand(folded - high.to(tl.float32), OPERAND)
    scores = _product(codes, low, OPERAND) + _product(codes, high, OPERAND)
    scores += tl.sum(scaled_q * zero[:, None], 0)[None, :]
    step = tl.sum(tl.abs(folded), 0)
    square = tl.sum(folded * folded, 0)
    centre = tl.sum(tl.abs(scaled_q * zero[:, None]), 0)
    return scores, step, square, centre


@triton.jit(
    do_not_specialize=[
        "window",
        "new_tokens",
        "first_token",
        "chunk_tokens",
        "row_blocks",
        "q_stride_row",
        "q_stride_head",
        "q_stride_token",
        "k_stride_row",
        "k_stride_head",
        "k_stride_token",
        "v_stride_row",
        "v_stride_head",
        "v_stride_token",
        "scratch_rows",
        "record_plane",
        "statistic_plane",
        "pages_per_row",
        "pages_per_split",
        "code_splits",
    ],
    do_not_specialize_on_alignment=["q", "k", "v", "positions", "lengths"],
)
def attend_kernel(
    q,
    k,
    v,
    positions,
    lengths,
    page_table,
    source_map,
    k_codes,
    k_scale,
    k_zero,
    v_codes,
    v_scale,
    page_notes,
    k_tail,
    v_tail,
    accumulators,  # fp32 [B * Hkv, query rows, splits + 1, D]
    statistics,
    records,
    exact_norms,  # fp32 [B * Hkv, query rows], largest ||V_t|| read exact
    scale_log2,
    window,
    new_tokens,
    first_token,
    chunk_tokens,
    row_blocks,
    q_stride_row,
    q_stride_head,
    q_stride_token,
    k_stride_row,
    k_stride_head,
    k_stride_token,
    v_stride_row,
    v_stride_head,
    v_stride_token,
    scratch_rows,
    record_plane,
    statistic_plane,
    code_step,
    code_zero,
    exact_dot,
    score_steps,
    pages_per_row,
    pages_per_split,
    code_splits,
    EXACT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    record_plane = record_plane.to(tl.int64)
    statistic_plane = statistic_plane.to(tl.int64)
    pid = tl.program_id(0)
    if EXACT:
        split = code_splits
    else:
        split = pid % code_splits
        pid = pid // code_splits
    block_of_rows = pid % row_blocks
    head = (pid // row_blocks) % KV_HEADS
    row = (pid // row_blocks // KV_HEADS).to(tl.int64)

    query = block_of_rows * ROWS + tl.arange(0, ROWS)
    query_token = first_token + query // GROUP
    query_head = head * GROUP + query % GROUP
    is_query = query < chunk_tokens * GROUP
    position = tl.load(positions + row * new_tokens + query_token, mask=is_query, other=-1)
    is_valid = position >= 0
    oldest = tl.where(window > 0, position - window, -1)

    length = tl.load(lengths + row)
    pages = length // PAGE_SIZE
    channel = tl.arange(0, HEAD_DIM)
    q_offset = row * q_stride_row + query_head.to(tl.int64) * q_stride_head + query_token.to(tl.int64) * q_stride_token
    scaled_q = tl.load(q + q_offset[None, :] + channel[:, None], mask=is_query[None, :], other=0.0)
    scaled_q = scaled_q.to(tl.float32) * scale_log2
    magnitude = tl.maximum(tl.abs(scaled_q), NORM_FLOOR)
    q_norm = tl.sqrt(tl.sum(magnitude * magnitude, 0)) * (1.0 + NOTE_RELATIVE) * LN_2
    # Asked of every channel, because a maximum drops a NaN.
    q_is_finite = tl.min(is_finite(scaled_q).to(tl.int32), 0) > 0

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([HEAD_DIM, ROWS], tl.float32)
    row_head = row * KV_HEADS + head
    scratch = row_head * scratch_rows + query

    if EXACT:
        code_end = pages * PAGE_SIZE
        tail_tiles = tl.cdiv(length - code_end, _TILE)
        # Columns are in causal order: none after the last query token of this block is visible to it.
        last_token = first_token + tl.minimum(block_of_rows * ROWS + ROWS - 1, chunk_tokens * GROUP - 1) // GROUP
        fresh_tiles = tl.cdiv(last_token + 1, _TILE)
        tail = row_head * (2 * PAGE_SIZE * HEAD_DIM)
        k_fresh = k + row * k_stride_row + head.to(tl.int64) * k_stride_head
        v_fresh = v + row * v_stride_row + head.to(tl.int64) * v_stride_head
        lane = tl.arange(0, _TILE)
        key_norm = tl.zeros([ROWS], tl.float32)
        value_norm = tl.zeros([ROWS], tl.float32)
        for tile in range(tail_tiles + fresh_tiles):
            in_tail = tile < tail_tiles
            at_tail = code_end + tile * _TILE + lane
            column = (tile - tail_tiles) * _TILE + lane
            is_old = in_tail & (at_tail < length)
            is_column = (column >= 0) & (column < new_tokens)
            at_fresh = tl.load(positions + row * new_tokens + column, mask=is_column, other=-1)
            is_new = is_column & (at_fresh >= 0)
            key_position = tl.where(in_tail, tl.where(is_old, at_tail, -1), at_fresh)
            seen = (key_position[:, None] >= 0) & (key_position[:, None] <= position[None, :])
            seen = seen & (key_position[:, None] > oldest[None, :])

            slot = (at_tail % (2 * PAGE_SIZE))[:, None] * HEAD_DIM + channel[None, :]
            old = tl.load(k_tail + tail + slot, mask=is_old[:, None], other=0.0).to(tl.float32)
            new = column[:, None].to(tl.int64) * k_stride_token + channel[None, :]
            new = tl.load(k_fresh + new, mask=is_new[:, None], other=0.0).to(tl.float32)
            keys = tl.where(is_old[:, None], old, new)
            old = tl.load(v_tail + tail + slot, mask=is_old[:, None], other=0.0).to(tl.float32)
            new = column[:, None].to(tl.int64) * v_stride_token + channel[None, :]
            new = tl.load(v_fresh + new, mask=is_new[:, None], other=0.0).to(tl.float32)
            values = tl.where(is_old[:, None], old, new)

            keys_finite, values_finite = is_finite(keys), is_finite(values)
            poisoned = tl.max(1 - (keys_finite & values_finite).to(tl.int32), 1) > 0
            keys = tl.where(keys_finite, keys, 0.0)
            values = tl.where(values_finite, values, 0.0)
            norm = tl.sqrt(tl.sum(keys * keys, 1)) * (1.0 + NOTE_RELATIVE) + NORM_ABSOLUTE
            norm = tl.where(poisoned, float("inf"), norm)
            key_norm = tl.maximum(key_norm, tl.max(tl.where(seen, norm[:, None], 0.0), 0))
            norm = tl.sqrt(tl.sum(values * values, 1)) * (1.0 + NOTE_RELATIVE) + NORM_ABSOLUTE
            value_norm = tl.maximum(value_norm, tl.max(tl.where(seen, norm[:, None], 0.0), 0))

            scores = tl.dot(keys, scaled_q, input_precision="ieee")
            scores = tl.where(seen, scores, float("-inf"))
            maximum, reference, top, weights, total, accumulator = _advance(maximum, total, accumulator, scores)
            total += tl.sum(weights, 0)
            accumulator += tl.dot(tl.trans(values), weights, input_precision="ieee")
        radius = tl.where(q_is_finite, q_norm * key_norm * exact_dot + score_steps, float("inf"))
        record = scratch * (pages_per_row + 1) + pages_per_row
        tl.store(records + _RECORD_REFERENCE * record_plane + record, maximum, mask=is_query)
        tl.store(records + _RECORD_MASS * record_plane + record, total, mask=is_query)
        tl.store(records + _RECORD_SCALED_MASS * record_plane + record, tl.zeros_like(total), mask=is_query)
        tl.store(records + _RECORD_TOP * record_plane + record, maximum, mask=is_query)
        tl.store(records + _RECORD_RADIUS * record_plane + record, radius, mask=is_query)
        tl.store(exact_norms + scratch, value_norm, mask=is_query)
    else:
        begin = split * pages_per_split
        end = tl.minimum(begin + pages_per_split, pages)
        # A page that no row of this block sees is not read; position -1 (padding) sees nothing.
        first_seen = tl.min(tl.where(is_valid, tl.maximum(oldest + 1, 0), length), 0)
        begin = tl.maximum(begin, first_seen // PAGE_SIZE)
        if begin >= end:
            return
        token = tl.arange(0, PAGE_SIZE)
        for page in range(begin, end):
            physical = tl.load(page_table + row * pages_per_row + page).to(tl.int64)
            source = tl.load(source_map + row_head * pages_per_row + page)
            block = physical * KV_HEADS + head
            scores, step, square, centre = _page_scores(
                scaled_q, k_codes, k_scale, k_zero, block, token, channel, PAGE_SIZE, HEAD_DIM, OPERAND
            )
            seen = is_valid[None, :] & (page * PAGE_SIZE + token[:, None] > oldest[None, :]) & (source == _CODES)
            scores = tl.where(seen, scores, float("-inf"))
            maximum, reference, top, weights, total, accumulator = _advance(maximum, total, accumulator, scores)
            mass = tl.sum(weights, 0)
            total += mass

            value_scale = tl.load(v_scale + block * PAGE_SIZE + token).to(tl.float32)
            scaled = weights * value_scale[:, None]
            values = tl.load(v_codes + block * PAGE_SIZE * HEAD_DIM + channel[:, None] * PAGE_SIZE + token[None, :])
            accumulator += _product(values.to(OPERAND), _as_operand(scaled, OPERAND), OPERAND)

            notes = page_notes + block * _NOTES
            radius = tl.minimum(
                step * 0.5 * LN_2,
                tl.minimum(
                    q_norm * tl.load(notes + _KEY_ERROR),
                    tl.sqrt(square) * LN_2 * tl.load(notes + _KEY_ERROR_SCALED),
                ),
            )
            radius = radius * _RADIUS_RELATIVE + 127.0 * LN_2 * step * code_step + LN_2 * centre * code_zero
            radius = tl.where(is_finite(tl.load(notes + _KEY_NORM)), radius + score_steps, float("inf"))
            radius = tl.where(q_is_finite, radius, float("inf"))

            record = scratch * (pages_per_row + 1) + page
            tl.store(records + _RECORD_REFERENCE * record_plane + record, reference, mask=is_query)
            tl.store(records + _RECORD_MASS * record_plane + record, mass, mask=is_query)
            tl.store(records + _RECORD_SCALED_MASS * record_plane + record, tl.sum(scaled, 0), mask=is_query)
            tl.store(records + _RECORD_TOP * record_plane + record, top, mask=is_query)
            tl.store(records + _RECORD_RADIUS * record_plane + record, radius, mask=is_query)

    statistic = scratch * (code_splits + 1) + split
    tl.store(statistics + statistic, maximum, mask=is_query)
    tl.store(statistics + _STATISTIC_SUM * statistic_plane + statistic, total, mask=is_query)
    where = statistic[None, :] * HEAD_DIM + channel[:, None]
    tl.store(accumulators + where, accumulator, mask=is_query[None, :])
