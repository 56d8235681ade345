"""Pre-pass: radii of all code pages, and q . zero, for every query row; outside the loop that reads the codes."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import arithmetic as ar
from ..dither import GRID_ERROR
from ..formats import KEY_GROUP
from ..storage import Note
from .primitives import LN_2, NORM_FLOOR, is_finite, norm_of_query, outlier_lanes
from .records import QZERO, RADIUS, record_address

#: Pages of a program.
PAGE_BLOCK = 32

_RADIUS = tl.constexpr(RADIUS)
_QZERO = tl.constexpr(QZERO)
_RADIUS_RELATIVE = tl.constexpr(1.0 + ar.RADIUS_RELATIVE)
_GRID_ERROR = tl.constexpr(GRID_ERROR)
_KEY_GROUP = tl.constexpr(KEY_GROUP)
_NOTES = tl.constexpr(Note.COUNT)
_KEY_NORM = tl.constexpr(Note.KEY_NORM)
_KEY_ERROR = tl.constexpr(Note.KEY_ERROR)
_KEY_ERROR_SCALED = tl.constexpr(Note.KEY_ERROR_SCALED)


@triton.jit
def _radius(
    unit, square, centre, q_norm, bypass_norm, q_is_finite, deviation, notes, code_step, code_zero, exact_dot, score_steps,
    STEP_RADIUS: tl.constexpr, RESIDUAL_RADIUS: tl.constexpr, PROBABILISTIC_RADIUS: tl.constexpr,
    K_MAX_ERROR: tl.constexpr,
):  # fmt: skip
    """The smallest radius allowed [pages, rows], arithmetic included (reference: `ops.certificate.CodeRadius.total`).

    `unit`, `square` and `centre` [pages, rows] are sum |q| scale, sum q^2 scale^2 and sum |q zero| in log2 units, `notes` [pages]
    where each page's notes are.
    """
    key_norm = tl.load(notes + _KEY_NORM)[:, None]
    arithmetic = LN_2 * (unit * code_step + centre * code_zero) + score_steps + bypass_norm * key_norm * exact_dot
    square = tl.sqrt(square) * LN_2
    radius = tl.full(unit.shape, float("inf"), tl.float32)
    if STEP_RADIUS:
        radius = unit * K_MAX_ERROR * LN_2
    if RESIDUAL_RADIUS:
        scaled = square * tl.load(notes + _KEY_ERROR_SCALED)[:, None]
        radius = tl.minimum(radius, tl.minimum(q_norm * tl.load(notes + _KEY_ERROR)[:, None], scaled))
    if PROBABILISTIC_RADIUS:
        probable = square * deviation + unit * LN_2 * _GRID_ERROR
        # An exhausted budget makes it infinite, or 0 times infinity: no smaller than any other.
        radius = tl.where(probable < radius, probable, radius)
    radius = tl.where(is_finite(key_norm), radius * _RADIUS_RELATIVE + arithmetic, float("inf"))
    return tl.where(q_is_finite, radius, float("inf"))


@triton.jit(
    do_not_specialize=[
        "new_tokens",
        "first_token",
        "chunk_tokens",
        "row_blocks",
        "scratch_blocks",
        "q_stride_row",
        "q_stride_head",
        "q_stride_token",
        "pages_per_row",
        "page_blocks",
        "window",
    ],
    do_not_specialize_on_alignment=["q", "lengths", "positions"],
)
def radii_kernel(
    q,
    positions,
    lengths,
    page_table,
    log_risk,
    outlier_channels,
    k_scale,
    k_zero,
    page_notes,
    records,
    scale_log2,
    window,
    new_tokens,
    first_token,
    chunk_tokens,
    row_blocks,
    scratch_blocks,
    q_stride_row,
    q_stride_head,
    q_stride_token,
    code_step,
    code_zero,
    exact_dot,
    score_steps,
    pages_per_row,
    page_blocks,
    STEP_RADIUS: tl.constexpr,
    RESIDUAL_RADIUS: tl.constexpr,
    PROBABILISTIC_RADIUS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    K_MAX_ERROR: tl.constexpr,
    K_ASYMMETRIC: tl.constexpr,
    K_PER_TOKEN: tl.constexpr,
    OUTLIERS: tl.constexpr,
    OUTLIER_BLOCK: tl.constexpr,
):
    """A program owns BLOCK pages of (row, KV head, block of query rows)."""
    pid = tl.program_id(0)
    first_page = pid % page_blocks * BLOCK
    pid = pid // page_blocks
    block_of_rows = pid % row_blocks
    row_head = (pid // row_blocks).to(tl.int64)
    head = row_head % KV_HEADS
    row = row_head // KV_HEADS
    pages = tl.load(lengths + row) // PAGE_SIZE
    if first_page >= pages:
        return

    query = block_of_rows * ROWS + tl.arange(0, ROWS)
    query_token = first_token + query // GROUP
    query_head = (head * GROUP + query % GROUP).to(tl.int64)
    is_query = query < chunk_tokens * GROUP
    position = tl.load(positions + row * new_tokens + query_token, mask=is_query, other=-1)
    # A page that no row of this block sees may not be stored any more; position -1 (padding) sees nothing.
    oldest = tl.where(window > 0, position - window, -1)
    first_seen = tl.min(tl.where(position >= 0, tl.maximum(oldest + 1, 0), pages * PAGE_SIZE), 0) // PAGE_SIZE
    if first_page + BLOCK <= first_seen:
        return

    channel = tl.arange(0, DIM_BLOCK)
    is_channel = channel < HEAD_DIM
    q_rows = q + row * q_stride_row + query_head * q_stride_head + query_token.to(tl.int64) * q_stride_token
    q_mask = is_query[None, :] & is_channel[:, None]
    scaled_q = tl.load(q_rows[None, :] + channel[:, None], mask=q_mask, other=0.0).to(tl.float32) * scale_log2
    # Asked of every channel, because a maximum drops a NaN.
    q_is_finite = (tl.min(is_finite(scaled_q).to(tl.int32), 0) > 0)[None, :]
    bypass_norm = tl.zeros([1, ROWS], tl.float32)
    if OUTLIERS > 0:
        lane = tl.arange(0, OUTLIER_BLOCK)
        outlier_of = tl.load(outlier_channels + head * OUTLIERS + lane, mask=lane < OUTLIERS, other=-1)
        # Channels that do not exist, or are named twice, would be multiplied wrongly: no guarantee.
        twice = (
            (outlier_of[:, None] == outlier_of[None, :]) & (lane[:, None] < lane[None, :]) & (lane < OUTLIERS)[None, :]
        )
        beyond = (lane < OUTLIERS) & ((outlier_of < 0) | (outlier_of >= HEAD_DIM))
        wrong = tl.max(tl.max(twice.to(tl.int32), 1) | beyond.to(tl.int32), 0)
        q_is_finite = tl.where(wrong > 0, False, q_is_finite)
        is_outlier = outlier_lanes(channel, outlier_of)[:, None]
        bypass_norm = norm_of_query(tl.where(is_outlier, scaled_q, 0.0))[None, :]
        scaled_q = tl.where(is_outlier, 0.0, scaled_q)
    q_norm = norm_of_query(scaled_q)[None, :]
    deviation = q_norm
    if PROBABILISTIC_RADIUS:
        risk = tl.load(log_risk + row * new_tokens + query_token, mask=is_query, other=float("inf"))
        # Every quantized token that the row holds shares the read's failure probability.
        deviation = tl.sqrt((risk + tl.log((pages * PAGE_SIZE).to(tl.float32))) * 0.16666667163372040)[None, :]

    row_block = row_head * scratch_blocks + block_of_rows
    record_row = tl.arange(0, ROWS)[None, :]
    magnitude = tl.abs(scaled_q)
    # Squares of smaller numbers would be 0, and their products with large ones lost.
    square_of_q = tl.maximum(magnitude, NORM_FLOOR)
    square_of_q = square_of_q * square_of_q
    if K_PER_TOKEN:
        GROUPS: tl.constexpr = HEAD_DIM // _KEY_GROUP
        token = tl.arange(0, PAGE_SIZE)
        for page in range(tl.maximum(first_page, first_seen), tl.minimum(first_page + BLOCK, pages)):
            block = tl.load(page_table + row * pages_per_row + page).to(tl.int64) * KV_HEADS + head
            units = tl.zeros([PAGE_SIZE, ROWS], tl.float32)
            squares = tl.zeros([PAGE_SIZE, ROWS], tl.float32)
            for group in tl.static_range(GROUPS):
                in_group = (channel // _KEY_GROUP == group)[:, None]
                part = tl.sum(tl.where(in_group, magnitude, 0.0), 0)[None, :]
                square = tl.sum(tl.where(in_group, square_of_q, 0.0), 0)[None, :]
                scale = tl.load(k_scale + (block * PAGE_SIZE + token) * GROUPS + group).to(tl.float32)[:, None]
                units += part * scale
                floored = tl.maximum(scale, NORM_FLOOR)
                squares += square * (floored * floored)
            # The page's largest, for each row.
            unit = tl.max(units, 0)[None, :]
            largest_square = tl.max(squares, 0)[None, :]
            notes = page_notes + block * _NOTES + tl.zeros([1], tl.int64)
            radius = _radius(
                unit, largest_square, tl.zeros_like(unit), q_norm, bypass_norm, q_is_finite, deviation, notes, code_step, code_zero, exact_dot,
                score_steps, STEP_RADIUS, RESIDUAL_RADIUS, PROBABILISTIC_RADIUS, K_MAX_ERROR,
            )  # fmt: skip
            tl.store(record_address(records, row_block, pages_per_row, page, _RADIUS, ROWS) + record_row, radius)
    else:
        page = first_page + tl.arange(0, BLOCK)
        is_page = (page >= first_seen) & (page < pages)
        block = tl.load(page_table + row * pages_per_row + page, mask=is_page, other=0).to(tl.int64) * KV_HEADS + head
        mask = is_page[:, None] & is_channel[None, :]
        where = block[:, None] * HEAD_DIM + channel[None, :]
        scale = tl.load(k_scale + where, mask=mask, other=0.0).to(tl.float32)
        unit = tl.dot(scale, magnitude, input_precision="ieee")
        floored = tl.maximum(scale, NORM_FLOOR)
        square = tl.dot(floored * floored, square_of_q, input_precision="ieee")
        centre = tl.zeros_like(unit)
        address = record_address(records, row_block, pages_per_row, page[:, None], 0, ROWS) + record_row
        if K_ASYMMETRIC:
            zero = tl.load(k_zero + where, mask=mask, other=0.0).to(tl.float32)
            centre = tl.dot(tl.abs(zero), magnitude, input_precision="ieee")
            product = tl.dot(zero, scaled_q, input_precision="ieee")
            tl.store(address + _QZERO * ROWS, product, mask=is_page[:, None])
        radius = _radius(
            unit, square, centre, q_norm, bypass_norm, q_is_finite, deviation, page_notes + block * _NOTES, code_step,
            code_zero, exact_dot, score_steps, STEP_RADIUS, RESIDUAL_RADIUS, PROBABILISTIC_RADIUS, K_MAX_ERROR,
        )  # fmt: skip
        tl.store(address + _RADIUS * ROWS, radius, mask=is_page[:, None])
