"""Stage 1: attention over one split of the code pages, or over all exact tokens, and the sums of its certificate.

One source, specialised at compile time. A program owns (row, KV head, block of query rows, split); a query row is a
(fresh token, head of the KV group) pair. K tiles are the M operand and query rows N, so that no row is padding. Codes are
multiplied as they are: the page's scale is folded into q, never applied to the codes. One warp walks through a page, because
what the other layout pays for are maxima and sums over tokens that cross warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import KEY_GROUP, VALUE_GROUP
from ..storage import SOURCE_CODES, Note
from . import records as rec
from .codes import dither_bytes, dither_tile, load_code_values
from .exact import attend_exact, cap
from .primitives import NORM_FLOOR, is_finite, norm_of_query, outlier_lanes
from .products import as_operand, fixed_point, integer_product, limb_product, product
from .radii import page_products, probable_deviation
from .records import record_address, statistics_address
from .sums import sum_pages

#: Query rows of a program.
QUERY_ROWS = 8
#: Pages that are multiplied with q at a time before the loop.
PROLOGUE_BLOCK = 16

_TOP = tl.constexpr(rec.TOP)
_MASS = tl.constexpr(rec.MASS)
_SCALED_MASS = tl.constexpr(rec.SCALED_MASS)
_UNIT = tl.constexpr(rec.UNIT)
_SQUARE = tl.constexpr(rec.SQUARE)
_CENTRE = tl.constexpr(rec.CENTRE)
_QZERO = tl.constexpr(rec.QZERO)
_MAXIMUM = tl.constexpr(rec.MAXIMUM)
_SUM = tl.constexpr(rec.SUM)
_NORM = tl.constexpr(rec.NORM)
_KEY_NORM = tl.constexpr(rec.KEY_NORM)
_SINK_ERROR = tl.constexpr(rec.SINK_ERROR)
_PROLOGUE = tl.constexpr(PROLOGUE_BLOCK)
_KEY_GROUP = tl.constexpr(KEY_GROUP)
_VALUE_GROUP = tl.constexpr(VALUE_GROUP)
_CODES = tl.constexpr(SOURCE_CODES)
_NOTES = tl.constexpr(Note.COUNT)


@triton.jit
def _code_products(
    x, square, k_codes, page_key, layer, head, block, token, first_channel, is_channel,
    PAGE_SIZE: tl.constexpr, CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, K_BITS: tl.constexpr,
    K_OFFSET: tl.constexpr, K_FLOAT: tl.constexpr, K_DITHER: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """(value of the code - dither) @ x [PAGE_SIZE, rows], over the CHANNELS channels from `first_channel` on.

    x [CHANNELS, rows] is q times what the scales fold into it, `square` [rows] its sum of squares at least.
    """
    row_bytes: tl.constexpr = HEAD_DIM * K_BITS // 8
    rows = (block * PAGE_SIZE + token[:, None]) * row_bytes
    index = first_channel + tl.arange(0, CHANNELS)[None, :]
    mask = is_channel[None, :]
    if K_FLOAT:
        codes = load_code_values(k_codes, rows, index, mask, HEAD_DIM, K_BITS, K_OFFSET, True, OPERAND)
        result = limb_product(codes, x, OPERAND)
        if K_DITHER > 0:
            dither = dither_tile(page_key, layer, head, first_channel, PAGE_SIZE, CHANNELS, False, K_DITHER)
            result -= limb_product(dither.to(OPERAND), x, OPERAND)
        return result
    else:
        # Codes of a centred grid lie half a step above integers, and so does the dither, in steps of 1 / 256.
        CENTRE: tl.constexpr = (K_OFFSET + 0.5) // 1
        SHIFT: tl.constexpr = CENTRE - K_OFFSET - (0.001953125 if K_DITHER > 0 else 0.0)
        codes = load_code_values(k_codes, rows, index, mask, HEAD_DIM, K_BITS, CENTRE, False, tl.int8)
        integers, step = fixed_point(x, square)
        result = integer_product(codes, integers)
        if K_DITHER > 0:
            byte = dither_bytes(page_key, layer, head, first_channel, PAGE_SIZE, CHANNELS, False, K_DITHER)
            result -= integer_product((byte.to(tl.int32) - 128).to(tl.int8), integers) * 0.00390625
        if SHIFT != 0.0:
            result += (tl.sum(integers, 0).to(tl.float32) * SHIFT)[None, :]
        return result * step[None, :]


@triton.jit
def _page_scores(
    scaled_q, q_rows, planes, scale_log2, is_query, outlier_of, k_codes, k_scale, page_key, layer, head, block, token,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, K_BITS: tl.constexpr,
    K_OFFSET: tl.constexpr, K_FLOAT: tl.constexpr, K_PER_TOKEN: tl.constexpr,
    K_DITHER: tl.constexpr, OUTLIERS: tl.constexpr, OPERAND: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Scores [P, rows] of a page's codes in log2 units, without zeros and outlier channels.

    `scaled_q` is 0 in outlier channels; `planes` is the page's record, which a page scaled per token gets its sums |q| scale and
    q^2 scale^2 in here, the largest over its tokens.
    """
    if K_PER_TOKEN:
        scores = tl.zeros([PAGE_SIZE, ROWS], tl.float32)
        units = tl.zeros([PAGE_SIZE, ROWS], tl.float32)
        squares = tl.zeros([PAGE_SIZE, ROWS], tl.float32)
        GROUPS: tl.constexpr = HEAD_DIM // _KEY_GROUP
        for group in tl.static_range(GROUPS):
            channel = group * _KEY_GROUP + tl.arange(0, _KEY_GROUP)
            part_q = tl.load(q_rows[None, :] + channel[:, None], mask=is_query[None, :], other=0.0)
            part_q = part_q.to(tl.float32) * scale_log2
            if OUTLIERS > 0:
                part_q = tl.where(outlier_lanes(channel, outlier_of)[:, None], 0.0, part_q)
            floored = tl.maximum(tl.abs(part_q), NORM_FLOOR)
            square = tl.sum(floored * floored, 0)
            part = _code_products(
                part_q, square, k_codes, page_key, layer, head, block, token, group * _KEY_GROUP, channel >= 0,
                PAGE_SIZE, _KEY_GROUP, HEAD_DIM, K_BITS, K_OFFSET, K_FLOAT, K_DITHER, OPERAND,
            )  # fmt: skip
            scale = tl.load(k_scale + (block * PAGE_SIZE + token) * GROUPS + group).to(tl.float32)[:, None]
            scores += part * scale
            units += tl.sum(tl.abs(part_q), 0)[None, :] * scale
            floored_scale = tl.maximum(scale, NORM_FLOOR)
            squares += square[None, :] * (floored_scale * floored_scale)
        tl.store(planes + _UNIT * ROWS, tl.max(units, 0))
        tl.store(planes + _SQUARE * ROWS, tl.max(squares, 0))
        return scores
    else:
        channel = tl.arange(0, DIM_BLOCK)
        is_channel = channel < HEAD_DIM
        scale = tl.load(k_scale + block * HEAD_DIM + channel, mask=is_channel, other=0.0).to(tl.float32)
        return _code_products(
            scaled_q * scale[:, None], tl.load(planes + _SQUARE * ROWS), k_codes, page_key, layer, head, block, token, 0,
            is_channel, PAGE_SIZE, DIM_BLOCK, HEAD_DIM, K_BITS, K_OFFSET, K_FLOAT, K_DITHER, OPERAND,
        )  # fmt: skip


@triton.jit
def _page_values(
    weights, v_codes, v_scale, v_zero, page_key, layer, head, block, token,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, V_BITS: tl.constexpr,
    V_OFFSET: tl.constexpr, V_FLOAT: tl.constexpr, V_EXACT: tl.constexpr, V_GROUPS: tl.constexpr,
    V_DITHER: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Sum of weights times values [D, rows] of a page, and the sum of weights times each token's largest scale [rows]."""
    channel = tl.arange(0, DIM_BLOCK)
    is_channel = (channel < HEAD_DIM)[:, None]
    value_bytes: tl.constexpr = PAGE_SIZE if V_EXACT else PAGE_SIZE * V_BITS // 8
    rows = (block * HEAD_DIM + channel[:, None]) * value_bytes
    if V_EXACT:
        values = tl.load(v_codes + rows + token[None, :], mask=is_channel, other=0.0).to(tl.float32)
        return tl.dot(values, weights, input_precision="ieee"), tl.sum(weights * 0.0, 0)
    elif V_GROUPS > 1:
        values = load_code_values(
            v_codes, rows, token[None, :], is_channel, PAGE_SIZE, V_BITS, V_OFFSET, V_FLOAT, tl.float32
        )
        where = (block * PAGE_SIZE + token[None, :]) * V_GROUPS + channel[:, None] // _VALUE_GROUP
        scale = tl.load(v_scale + where, mask=is_channel, other=0.0).to(tl.float32)
        values = values * scale + tl.load(v_zero + where, mask=is_channel, other=0.0).to(tl.float32)
        return tl.dot(values, weights, input_precision="ieee"), tl.sum(weights * tl.max(scale, 0)[:, None], 0)
    else:
        scale = tl.load(v_scale + block * PAGE_SIZE + token).to(tl.float32)
        scaled = weights * scale[:, None]
        operand = as_operand(scaled, OPERAND)
        values = load_code_values(
            v_codes, rows, token[None, :], is_channel, PAGE_SIZE, V_BITS, V_OFFSET, V_FLOAT, OPERAND
        )
        result = product(values, operand, OPERAND)
        if V_DITHER > 0:
            dither = dither_tile(page_key, layer, head, 0, PAGE_SIZE, DIM_BLOCK, True, V_DITHER)
            result -= product(tl.trans(dither).to(OPERAND), operand, OPERAND)
        return result, tl.sum(scaled, 0)


@triton.jit(
    do_not_specialize=[
        "layer",
        "window",
        "new_tokens",
        "first_token",
        "chunk_tokens",
        "row_blocks",
        "exact_programs",
        "q_stride_row",
        "q_stride_head",
        "q_stride_token",
        "k_stride_row",
        "k_stride_head",
        "k_stride_token",
        "v_stride_row",
        "v_stride_head",
        "v_stride_token",
        "scratch_blocks",
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
    log_risk,
    sinks,
    outlier_channels,
    k_codes,
    k_scale,
    k_zero,
    k_bypass,
    v_codes,
    v_scale,
    v_zero,
    page_notes,
    page_keys,
    k_tail,
    v_tail,
    accumulators,
    statistics,
    records,
    scale_log2,
    softcap_log2,
    layer,
    window,
    new_tokens,
    first_token,
    chunk_tokens,
    row_blocks,
    exact_programs,
    q_stride_row,
    q_stride_head,
    q_stride_token,
    k_stride_row,
    k_stride_head,
    k_stride_token,
    v_stride_row,
    v_stride_head,
    v_stride_token,
    scratch_blocks,
    code_step,
    code_fixed_point,
    code_zero,
    exact_dot,
    score_steps,
    lost_mass,
    pages_per_row,
    pages_per_split,
    code_splits,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STEP_RADIUS: tl.constexpr,
    RESIDUAL_RADIUS: tl.constexpr,
    PROBABILISTIC_RADIUS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    K_BITS: tl.constexpr,
    K_OFFSET: tl.constexpr,
    K_MAX_ERROR: tl.constexpr,
    K_ASYMMETRIC: tl.constexpr,
    K_PER_TOKEN: tl.constexpr,
    K_DITHER: tl.constexpr,
    OUTLIERS: tl.constexpr,
    OUTLIER_BLOCK: tl.constexpr,
    V_BITS: tl.constexpr,
    V_OFFSET: tl.constexpr,
    V_FLOAT: tl.constexpr,
    V_EXACT: tl.constexpr,
    V_GROUPS: tl.constexpr,
    V_DITHER: tl.constexpr,
):
    """The first `exact_programs` programs read exact tokens, so that they run beside the others."""
    pid = tl.program_id(0)
    split = code_splits
    if pid >= exact_programs:
        split = (pid - exact_programs) % code_splits
        pid = (pid - exact_programs) // code_splits
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
    channel = tl.arange(0, DIM_BLOCK)
    is_channel = channel < HEAD_DIM
    q_offset = row * q_stride_row + query_head.to(tl.int64) * q_stride_head + query_token.to(tl.int64) * q_stride_token
    q_mask = is_query[None, :] & is_channel[:, None]
    scaled_q = tl.load(q + q_offset[None, :] + channel[:, None], mask=q_mask, other=0.0)
    scaled_q = scaled_q.to(tl.float32) * scale_log2
    row_head = row * KV_HEADS + head
    row_block = row_head * scratch_blocks + block_of_rows
    lane_of_row = tl.arange(0, ROWS)
    statistic = statistics_address(statistics, row_block, code_splits + 1, lane_of_row, split, ROWS)
    plane = ROWS * (code_splits + 1)
    partial = accumulators + (row_block * (code_splits + 1) + split) * (ROWS * HEAD_DIM)
    partial = partial + lane_of_row[None, :] * HEAD_DIM + channel[:, None]

    if split == code_splits:
        # Columns are in causal order: none after the last query token of this block is visible to it.
        last_token = first_token + tl.minimum(block_of_rows * ROWS + ROWS - 1, chunk_tokens * GROUP - 1) // GROUP
        tail = row_head * (2 * PAGE_SIZE * HEAD_DIM)
        maximum, total, accumulator, key_norm, value_norm, sink_error = attend_exact(
            scaled_q, k + row * k_stride_row + head.to(tl.int64) * k_stride_head,
            v + row * v_stride_row + head.to(tl.int64) * v_stride_head, k_tail + tail, v_tail + tail,
            positions + row * new_tokens, sinks, position, oldest, is_query, query_head, length, last_token + 1, new_tokens,
            k_stride_token, v_stride_token, softcap_log2,
            TILE, HAS_SOFTCAP, HAS_SINKS, PAGE_SIZE, HEAD_DIM, DIM_BLOCK, OPERAND, ROWS,
        )  # fmt: skip
        tl.store(statistic + _MAXIMUM * plane, maximum)
        tl.store(statistic + _SUM * plane, total)
        tl.store(statistic + _NORM * plane, value_norm)
        tl.store(statistic + _KEY_NORM * plane, key_norm)
        tl.store(statistic + _SINK_ERROR * plane, sink_error)
        tl.store(partial, accumulator, mask=is_channel[:, None])
        return

    begin = split * pages_per_split
    end = tl.minimum(begin + pages_per_split, pages)
    # A page that no row of this block sees is not read; position -1 (padding) sees nothing.
    first_seen = tl.min(tl.where(is_valid, tl.maximum(oldest + 1, 0), length), 0)
    begin = tl.maximum(begin, first_seen // PAGE_SIZE)
    if begin >= end:
        return
    token = tl.arange(0, PAGE_SIZE)
    # Asked of every channel, because a maximum drops a NaN.
    q_is_finite = tl.min(is_finite(scaled_q).to(tl.int32), 0) > 0
    outlier_of = tl.full([16], -1, tl.int32)
    bypass_norm = tl.zeros([1, ROWS], tl.float32)
    if OUTLIERS > 0:
        lane = tl.arange(0, OUTLIER_BLOCK)
        outlier_of = tl.load(outlier_channels + head * OUTLIERS + lane, mask=lane < OUTLIERS, other=-1)
        # Channels that do not exist, or are named twice, would be multiplied wrongly: no guarantee.
        twice = (outlier_of[:, None] == outlier_of[None, :]) & (lane[:, None] < lane[None, :])
        twice = twice & (lane < OUTLIERS)[None, :]
        beyond = (lane < OUTLIERS) & ((outlier_of < 0) | (outlier_of >= HEAD_DIM))
        wrong = tl.max(tl.max(twice.to(tl.int32), 1) | beyond.to(tl.int32), 0)
        q_is_finite = tl.where(wrong > 0, False, q_is_finite)
        is_outlier = (outlier_of >= 0) & (outlier_of < HEAD_DIM)
        bypass_mask = is_query[None, :] & is_outlier[:, None]
        bypass_q = tl.load(q + q_offset[None, :] + outlier_of[:, None], mask=bypass_mask, other=0.0)
        bypass_q = bypass_q.to(tl.float32) * scale_log2
        bypass_norm = norm_of_query(bypass_q)[None, :]
        scaled_q = tl.where(outlier_lanes(channel, outlier_of)[:, None], 0.0, scaled_q)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([DIM_BLOCK, ROWS], tl.float32)
    heaviest_page = tl.full([ROWS], -1, tl.int32)
    if not K_PER_TOKEN:
        for start in range(begin, end, _PROLOGUE):
            page = start + tl.arange(0, _PROLOGUE)
            is_page = page < end
            physical = tl.load(page_table + row * pages_per_row + page, mask=is_page, other=0).to(tl.int64)
            unit, square, centre, q_zero = page_products(
                scaled_q,
                k_scale,
                k_zero,
                physical * KV_HEADS + head,
                is_page,
                HEAD_DIM,
                DIM_BLOCK,
                K_ASYMMETRIC,
                OPERAND,
            )
            planes = record_address(records, row_block, pages_per_row, page[:, None], ROWS) + lane_of_row[None, :]
            tl.store(planes + _UNIT * ROWS, unit, mask=is_page[:, None])
            tl.store(planes + _SQUARE * ROWS, square, mask=is_page[:, None])
            if K_ASYMMETRIC:
                tl.store(planes + _CENTRE * ROWS, centre, mask=is_page[:, None])
                tl.store(planes + _QZERO * ROWS, q_zero, mask=is_page[:, None])
        # What the warps of this program have stored.
        tl.debug_barrier()
    for page in range(begin, end):
        physical = tl.load(page_table + row * pages_per_row + page).to(tl.int64)
        source = tl.load(source_map + row_head * pages_per_row + page)
        block = physical * KV_HEADS + head
        page_key = block
        if K_DITHER + V_DITHER > 0:
            page_key = tl.load(page_keys + block)
        planes = record_address(records, row_block, pages_per_row, page, ROWS) + lane_of_row
        scores = _page_scores(
            scaled_q, q + q_offset, planes, scale_log2, is_query, outlier_of, k_codes, k_scale, page_key, layer, head, block,
            token, PAGE_SIZE, HEAD_DIM, DIM_BLOCK, K_BITS, K_OFFSET, K_MAX_ERROR != 0.5, K_PER_TOKEN, K_DITHER, OUTLIERS,
            OPERAND, ROWS,
        )  # fmt: skip
        if K_ASYMMETRIC:
            scores += tl.load(planes + _QZERO * ROWS)[None, :]
        if OUTLIERS > 0:
            where = (block * PAGE_SIZE + token[:, None]) * OUTLIERS + lane[None, :]
            bypass = tl.load(k_bypass + where, mask=lane[None, :] < OUTLIERS, other=0.0).to(tl.float32)
            scores += tl.dot(bypass, bypass_q, input_precision="ieee")
        scores = cap(scores, softcap_log2, HAS_SOFTCAP)
        scores = tl.where((is_valid & (source == _CODES))[None, :], scores, float("-inf"))
        if HAS_WINDOW:
            scores = tl.where(page * PAGE_SIZE + token[:, None] > oldest[None, :], scores, float("-inf"))
        top = tl.max(scores, 0)
        weights = tl.exp2(scores - tl.where(top == float("-inf"), 0.0, top)[None, :])
        mass = tl.sum(weights, 0)
        values, scaled_mass = _page_values(
            weights, v_codes, v_scale, v_zero, page_key, layer, head, block, token, PAGE_SIZE, HEAD_DIM, DIM_BLOCK,
            V_BITS, V_OFFSET, V_FLOAT, V_EXACT, V_GROUPS, V_DITHER, OPERAND,
        )  # fmt: skip
        raised = tl.maximum(maximum, top)
        reference = tl.where(raised == float("-inf"), 0.0, raised)
        rescale, share = tl.exp2(maximum - reference), tl.exp2(top - reference)
        heaviest_page = tl.where(top > maximum, page, heaviest_page)
        maximum = raised
        total = total * rescale + mass * share
        accumulator = accumulator * rescale[None, :] + values * share[None, :]
        tl.store(planes + _TOP * ROWS, top)
        tl.store(planes + _MASS * ROWS, mass)
        tl.store(planes + _SCALED_MASS * ROWS, scaled_mass)

    tl.store(partial, accumulator, mask=is_channel[:, None])
    tl.store(statistic + _MAXIMUM * plane, maximum)
    tl.store(statistic + _SUM * plane, total)
    deviation = tl.zeros([1, ROWS], tl.float32)
    if PROBABILISTIC_RADIUS:
        risk = tl.load(log_risk + row * new_tokens + query_token, mask=is_query, other=float("inf"))
        deviation = probable_deviation(risk, pages * PAGE_SIZE)[None, :]
    tl.debug_barrier()
    sum_pages(
        statistic, plane, heaviest_page, maximum, records, page_notes + head * _NOTES, page_table + row * pages_per_row,
        source_map + row_head * pages_per_row, oldest, is_valid, norm_of_query(scaled_q)[None, :], bypass_norm, q_is_finite[None, :],
        deviation, row_block, pages_per_row, begin, end, code_step, code_fixed_point, code_zero, exact_dot, score_steps, lost_mass,
        STEP_RADIUS, RESIDUAL_RADIUS, PROBABILISTIC_RADIUS, K_MAX_ERROR, K_ASYMMETRIC, KV_HEADS, PAGE_SIZE, ROWS,
    )  # fmt: skip
