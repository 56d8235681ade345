"""Stage 1: attention over one split of the code pages, or over all exact tokens, and a record per page.

One source, specialised at compile time. A program owns (row, KV head, block of query rows, split); a query row is a
(fresh token, head of the KV group) pair. K tiles are the M operand and query rows N, so that int8 codes stay in registers
and no row is padding; the page's scale is folded into q, never applied to the codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import arithmetic as ar
from ..formats import KEY_GROUP, VALUE_GROUP
from ..storage import SOURCE_CODES
from .codes import dither_tile, load_code_values
from .primitives import (
    LN_2,
    NORM_ABSOLUTE,
    NOTE_RELATIVE,
    is_finite,
    norm_of_query,
    outlier_lanes,
    round_to_bfloat16,
)
from .records import (
    MASS,
    QZERO,
    RADIUS,
    REFERENCE,
    SCALED_MASS,
    STATISTICS,
    TOP,
    record_address,
)

#: Query rows of a program. 16 hits an illegal memory access with int8 operands on Triton 3.6.
QUERY_ROWS = 8
_RECORD_REFERENCE = tl.constexpr(REFERENCE)
_RECORD_MASS = tl.constexpr(MASS)
_RECORD_SCALED_MASS = tl.constexpr(SCALED_MASS)
_RECORD_TOP = tl.constexpr(TOP)
_RECORD_RADIUS = tl.constexpr(RADIUS)
_RECORD_QZERO = tl.constexpr(QZERO)
_STATISTICS = tl.constexpr(STATISTICS)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SINK_ERROR = tl.constexpr(ar.SINK_ERROR)
_FLUSHED = tl.constexpr(ar.FLUSHED)
_KEY_GROUP = tl.constexpr(KEY_GROUP)
_VALUE_GROUP = tl.constexpr(VALUE_GROUP)
_CODES = tl.constexpr(SOURCE_CODES)


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
def _limb_product(a, x, OPERAND: tl.constexpr):
    """a @ x for an `a` that is exact in bf16 and a float32 x, which is multiplied as two bf16 limbs."""
    high = _as_operand(x, OPERAND)
    low = _as_operand(x - high.to(tl.float32), OPERAND)
    return _product(a, low, OPERAND) + _product(a, high, OPERAND)


@triton.jit
def _cap(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap * tanh(scores / softcap); both in log2 units."""
    if HAS_SOFTCAP:
        return softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2_E / softcap)) + 1.0))
    else:
        return scores


@triton.jit
def _coded_values(
    codes, block, token, first_channel, is_channel,
    PAGE_SIZE: tl.constexpr, CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, BITS: tl.constexpr,
    OFFSET: tl.constexpr, FLOAT: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Values of a page's key codes [PAGE_SIZE, CHANNELS] from `first_channel` on, exact in the operand type."""
    row_bytes: tl.constexpr = HEAD_DIM * BITS // 8
    rows = (block * PAGE_SIZE + token[:, None]) * row_bytes
    index = first_channel + tl.arange(0, CHANNELS)[None, :]
    return load_code_values(codes, rows, index, is_channel[None, :], HEAD_DIM, BITS, OFFSET, FLOAT, OPERAND)


@triton.jit
def _page_scores(
    scaled_q, q_rows, scale_log2, is_query, outlier_of, k_codes, k_scale, page_key, layer, head, block, token,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, K_BITS: tl.constexpr,
    K_OFFSET: tl.constexpr, K_FLOAT: tl.constexpr, K_PER_TOKEN: tl.constexpr,
    K_DITHER: tl.constexpr, OUTLIERS: tl.constexpr, OPERAND: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Scores [P, rows] of a page's codes in log2 units, without zeros and outlier channels. `scaled_q` is 0 in outlier channels."""
    if K_PER_TOKEN:
        scores = tl.zeros([PAGE_SIZE, ROWS], tl.float32)
        GROUPS: tl.constexpr = HEAD_DIM // _KEY_GROUP
        for group in tl.static_range(GROUPS):
            channel = group * _KEY_GROUP + tl.arange(0, _KEY_GROUP)
            part_q = tl.load(q_rows[None, :] + channel[:, None], mask=is_query[None, :], other=0.0)
            part_q = part_q.to(tl.float32) * scale_log2
            if OUTLIERS > 0:
                part_q = tl.where(outlier_lanes(channel, outlier_of)[:, None], 0.0, part_q)
            codes = _coded_values(
                k_codes, block, token, group * _KEY_GROUP, channel >= 0,
                PAGE_SIZE, _KEY_GROUP, HEAD_DIM, K_BITS, K_OFFSET, K_FLOAT, OPERAND,
            )  # fmt: skip
            part = _limb_product(codes, part_q, OPERAND)
            if K_DITHER > 0:
                dither = dither_tile(page_key, layer, head, group * _KEY_GROUP, PAGE_SIZE, _KEY_GROUP, False, K_DITHER)
                part -= _limb_product(dither.to(OPERAND), part_q, OPERAND)
            scores += part * tl.load(k_scale + (block * PAGE_SIZE + token) * GROUPS + group).to(tl.float32)[:, None]
        return scores
    else:
        channel = tl.arange(0, DIM_BLOCK)
        is_channel = channel < HEAD_DIM
        scale = tl.load(k_scale + block * HEAD_DIM + channel, mask=is_channel, other=0.0).to(tl.float32)
        codes = _coded_values(
            k_codes, block, token, 0, is_channel,
            PAGE_SIZE, DIM_BLOCK, HEAD_DIM, K_BITS, K_OFFSET, K_FLOAT, OPERAND,
        )  # fmt: skip
        folded = scaled_q * scale[:, None]
        scores = _limb_product(codes, folded, OPERAND)
        if K_DITHER > 0:
            dither = dither_tile(page_key, layer, head, 0, PAGE_SIZE, DIM_BLOCK, False, K_DITHER)
            scores -= _limb_product(dither.to(OPERAND), folded, OPERAND)
        return scores


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
        operand = _as_operand(scaled, OPERAND)
        values = load_code_values(
            v_codes, rows, token[None, :], is_channel, PAGE_SIZE, V_BITS, V_OFFSET, V_FLOAT, OPERAND
        )
        product = _product(values, operand, OPERAND)
        if V_DITHER > 0:
            dither = dither_tile(page_key, layer, head, 0, PAGE_SIZE, DIM_BLOCK, True, V_DITHER)
            product -= _product(tl.trans(dither).to(OPERAND), operand, OPERAND)
        return product, tl.sum(scaled, 0)


@triton.jit(
    do_not_specialize=[
        "layer",
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
    sinks,
    outlier_channels,
    k_codes,
    k_scale,
    k_bypass,
    v_codes,
    v_scale,
    v_zero,
    page_keys,
    k_tail,
    v_tail,
    accumulators,
    statistics,
    records,
    exact_norms,  # fp32 [B * Hkv * row blocks, ROWS], largest ||V_t|| read exact
    scale_log2,
    softcap_log2,
    layer,
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
    scratch_blocks,
    exact_dot,
    score_steps,
    pages_per_row,
    pages_per_split,
    code_splits,
    EXACT: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
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
    channel = tl.arange(0, DIM_BLOCK)
    is_channel = channel < HEAD_DIM
    q_offset = row * q_stride_row + query_head.to(tl.int64) * q_stride_head + query_token.to(tl.int64) * q_stride_token
    q_mask = is_query[None, :] & is_channel[:, None]
    scaled_q = tl.load(q + q_offset[None, :] + channel[:, None], mask=q_mask, other=0.0)
    scaled_q = scaled_q.to(tl.float32) * scale_log2
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([DIM_BLOCK, ROWS], tl.float32)
    row_head = row * KV_HEADS + head
    row_block = row_head * scratch_blocks + block_of_rows
    lane_of_row = tl.arange(0, ROWS)

    if EXACT:
        # Asked of every channel, because a maximum drops a NaN.
        q_is_finite = tl.min(is_finite(scaled_q).to(tl.int32), 0) > 0
        if HAS_SINKS:
            sink = tl.load(sinks + query_head, mask=is_query, other=float("-inf"))
            maximum = sink * _LOG2_E
            # An exact token without a value: its weight is 1 at its own maximum.
            total = tl.where(sink == float("-inf"), 0.0, 1.0)
        code_end = pages * PAGE_SIZE
        tail_tiles = tl.cdiv(length - code_end, TILE)
        # Columns are in causal order: none after the last query token of this block is visible to it.
        last_token = first_token + tl.minimum(block_of_rows * ROWS + ROWS - 1, chunk_tokens * GROUP - 1) // GROUP
        fresh_tiles = tl.cdiv(last_token + 1, TILE)
        tail = row_head * (2 * PAGE_SIZE * HEAD_DIM)
        k_fresh = k + row * k_stride_row + head.to(tl.int64) * k_stride_head
        v_fresh = v + row * v_stride_row + head.to(tl.int64) * v_stride_head
        lane = tl.arange(0, TILE)
        key_norm = tl.zeros([ROWS], tl.float32)
        value_norm = tl.zeros([ROWS], tl.float32)
        for tile in range(tail_tiles + fresh_tiles):
            in_tail = tile < tail_tiles
            at_tail = code_end + tile * TILE + lane
            column = (tile - tail_tiles) * TILE + lane
            is_old = in_tail & (at_tail < length)
            is_column = (column >= 0) & (column < new_tokens)
            at_fresh = tl.load(positions + row * new_tokens + column, mask=is_column, other=-1)
            is_new = is_column & (at_fresh >= 0)
            key_position = tl.where(in_tail, tl.where(is_old, at_tail, -1), at_fresh)
            seen = (key_position[:, None] >= 0) & (key_position[:, None] <= position[None, :])
            seen = seen & (key_position[:, None] > oldest[None, :])

            old_mask = is_old[:, None] & is_channel[None, :]
            new_mask = is_new[:, None] & is_channel[None, :]
            slot = (at_tail % (2 * PAGE_SIZE))[:, None] * HEAD_DIM + channel[None, :]
            old = tl.load(k_tail + tail + slot, mask=old_mask, other=0.0).to(tl.float32)
            new = column[:, None].to(tl.int64) * k_stride_token + channel[None, :]
            new = tl.load(k_fresh + new, mask=new_mask, other=0.0).to(tl.float32)
            keys = tl.where(is_old[:, None], old, new)
            old = tl.load(v_tail + tail + slot, mask=old_mask, other=0.0).to(tl.float32)
            new = column[:, None].to(tl.int64) * v_stride_token + channel[None, :]
            new = tl.load(v_fresh + new, mask=new_mask, other=0.0).to(tl.float32)
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

            scores = _cap(tl.dot(keys, scaled_q, input_precision="ieee"), softcap_log2, HAS_SOFTCAP)
            scores = tl.where(seen, scores, float("-inf"))
            maximum, reference, top, weights, total, accumulator = _advance(maximum, total, accumulator, scores)
            total += tl.sum(weights, 0)
            accumulator += tl.dot(tl.trans(values), weights, input_precision="ieee")
        radius = norm_of_query(scaled_q) * key_norm * exact_dot + score_steps
        if HAS_SINKS:
            # A sink so far below that its weight is 0 in any rounding costs nothing.
            charge = tl.abs(sink) * _SINK_ERROR
            is_flushed = (sink == float("-inf")) | (sink < maximum * LN_2 - _FLUSHED - charge)
            radius += tl.where(is_flushed, 0.0, charge)
        radius = tl.where(q_is_finite, radius, float("inf"))
        record = record_address(records, row_block, pages_per_row, pages_per_row, 0, ROWS) + lane_of_row
        tl.store(record + _RECORD_MASS * ROWS, total)
        tl.store(record + _RECORD_RADIUS * ROWS, radius)
        tl.store(exact_norms + row_block * ROWS + lane_of_row, value_norm)
    else:
        begin = split * pages_per_split
        end = tl.minimum(begin + pages_per_split, pages)
        # A page that no row of this block sees is not read; position -1 (padding) sees nothing.
        first_seen = tl.min(tl.where(is_valid, tl.maximum(oldest + 1, 0), length), 0)
        begin = tl.maximum(begin, first_seen // PAGE_SIZE)
        if begin >= end:
            return
        token = tl.arange(0, PAGE_SIZE)
        outlier_of = tl.full([16], -1, tl.int32)
        if OUTLIERS > 0:
            lane = tl.arange(0, OUTLIER_BLOCK)
            outlier_of = tl.load(outlier_channels + head * OUTLIERS + lane, mask=lane < OUTLIERS, other=-1)
            is_outlier = (outlier_of >= 0) & (outlier_of < HEAD_DIM)
            bypass_mask = is_query[None, :] & is_outlier[:, None]
            bypass_q = tl.load(q + q_offset[None, :] + outlier_of[:, None], mask=bypass_mask, other=0.0)
            bypass_q = bypass_q.to(tl.float32) * scale_log2
            scaled_q = tl.where(outlier_lanes(channel, outlier_of)[:, None], 0.0, scaled_q)
        for page in range(begin, end):
            physical = tl.load(page_table + row * pages_per_row + page).to(tl.int64)
            source = tl.load(source_map + row_head * pages_per_row + page)
            block = physical * KV_HEADS + head
            page_key = block
            if K_DITHER + V_DITHER > 0:
                page_key = tl.load(page_keys + block)
            scores = _page_scores(
                scaled_q, q + q_offset, scale_log2, is_query, outlier_of, k_codes, k_scale, page_key, layer, head, block,
                token, PAGE_SIZE, HEAD_DIM, DIM_BLOCK, K_BITS, K_OFFSET, K_MAX_ERROR != 0.5, K_PER_TOKEN, K_DITHER, OUTLIERS,
                OPERAND, ROWS,
            )  # fmt: skip
            record = record_address(records, row_block, pages_per_row, page, 0, ROWS) + lane_of_row
            if K_ASYMMETRIC:
                scores += tl.load(record + _RECORD_QZERO * ROWS)[None, :]
            if OUTLIERS > 0:
                where = (block * PAGE_SIZE + token[:, None]) * OUTLIERS + lane[None, :]
                bypass = tl.load(k_bypass + where, mask=lane[None, :] < OUTLIERS, other=0.0).to(tl.float32)
                scores += tl.dot(bypass, bypass_q, input_precision="ieee")
            scores = _cap(scores, softcap_log2, HAS_SOFTCAP)
            seen = is_valid[None, :] & (page * PAGE_SIZE + token[:, None] > oldest[None, :]) & (source == _CODES)
            scores = tl.where(seen, scores, float("-inf"))
            maximum, reference, top, weights, total, accumulator = _advance(maximum, total, accumulator, scores)
            mass = tl.sum(weights, 0)
            total += mass
            product, scaled_mass = _page_values(
                weights, v_codes, v_scale, v_zero, page_key, layer, head, block, token, PAGE_SIZE, HEAD_DIM, DIM_BLOCK,
                V_BITS, V_OFFSET, V_FLOAT, V_EXACT, V_GROUPS, V_DITHER, OPERAND,
            )  # fmt: skip
            accumulator += product

            tl.store(record + _RECORD_REFERENCE * ROWS, reference)
            tl.store(record + _RECORD_MASS * ROWS, mass)
            tl.store(record + _RECORD_SCALED_MASS * ROWS, scaled_mass)
            tl.store(record + _RECORD_TOP * ROWS, top)

    split_block = row_block * (code_splits + 1) + split
    tl.store(statistics + split_block * _STATISTICS * ROWS + lane_of_row, maximum)
    tl.store(statistics + (split_block * _STATISTICS + 1) * ROWS + lane_of_row, total)
    where = (split_block * HEAD_DIM + channel[:, None]) * ROWS + lane_of_row[None, :]
    tl.store(accumulators + where, accumulator, mask=is_channel[:, None])
