"""Write kernel: append tokens to the exact tail and quantize the pages that fill (reference: `kv_write_reference`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import arithmetic as ar
from ..arithmetic import scaled_residual_rounding
from ..dither import PAGE_KEYS
from ..formats import KEY_GROUP, VALUE_GROUP, StoreFormat
from ..storage import Note
from .codes import decode_e4m3, dither_tile, encode_e4m3, join_codes
from .launch import format_parameters, on_device, unit_stride
from .primitives import (
    NORM_ABSOLUTE,
    NOTE_RELATIVE,
    is_finite,
    outlier_lanes,
    round_to_dtype,
    round_to_integer,
    round_up_to_bfloat16,
)

_PAGE_KEYS = tl.constexpr(PAGE_KEYS)
_KEY_GROUP = tl.constexpr(KEY_GROUP)
_VALUE_GROUP = tl.constexpr(VALUE_GROUP)
_SCALE_FLOOR = tl.constexpr(ar.SCALE_FLOOR)
_RESIDUAL_ROUNDING = tl.constexpr(ar.RESIDUAL_ROUNDING)
_NOTES = tl.constexpr(Note.COUNT)
_VALUE_NORM = tl.constexpr(Note.VALUE_NORM)
_VALUE_ERROR = tl.constexpr(Note.VALUE_ERROR)
_KEY_NORM = tl.constexpr(Note.KEY_NORM)
_KEY_ERROR = tl.constexpr(Note.KEY_ERROR)
_KEY_ERROR_SCALED = tl.constexpr(Note.KEY_ERROR_SCALED)


@triton.jit
def _norm_up(square_sum):
    return tl.sqrt(square_sum) * (1.0 + NOTE_RELATIVE) + NORM_ABSOLUTE


@triton.jit
def _scale_of(half_range, LEVELS: tl.constexpr):
    return round_up_to_bfloat16(tl.maximum(tl.div_rn(half_range, LEVELS), _SCALE_FLOOR))


@triton.jit
def _midpoint(low, high):
    """(low + high) / 2 without overflow, rounded once: nothing that the compiler could fuse differently."""
    total = low + high
    return tl.where(is_finite(total), total * 0.5, low * 0.5 + high * 0.5)


@triton.jit
def _encode(x, dither, BITS: tl.constexpr, OFFSET: tl.constexpr, FLOAT: tl.constexpr, DITHER: tl.constexpr):
    """Value of each code in float32, dither not subtracted, and the code as stored, int32 (reference: `ops.codes.encode`)."""
    if FLOAT:
        code = encode_e4m3(x)
        return decode_e4m3(code), code
    else:
        if DITHER:
            x = x + dither
        lowest: tl.constexpr = -127.0 if OFFSET == 0.0 else 0.0
        highest: tl.constexpr = 127.0 if OFFSET == 0.0 else 2.0**BITS - 1.0
        code = tl.minimum(tl.maximum(round_to_integer(x + OFFSET), lowest), highest)
        return code - OFFSET, code.to(tl.int32)


@triton.jit
def _store_codes(
    codes, row, code, AXIS_LENGTH: tl.constexpr, COUNT: tl.constexpr, OTHER: tl.constexpr, BITS: tl.constexpr
):
    """Store rows of COUNT codes, padded to [OTHER, AXIS_LENGTH]; `row` [OTHER, 1] is where each begins."""
    if BITS == 8:
        index = tl.arange(0, AXIS_LENGTH)[None, :]
        tl.store(codes + row + index, code.to(codes.dtype.element_ty), mask=index < COUNT)
    else:
        index = tl.arange(0, AXIS_LENGTH // 2)[None, :]
        low = join_codes(code & 15, AXIS_LENGTH, OTHER, 4)
        tl.store(codes + row + index, low.to(codes.dtype.element_ty), mask=index < COUNT // 2)
        if BITS == 6:
            index = tl.arange(0, AXIS_LENGTH // 4)[None, :]
            high = join_codes(code >> 4, AXIS_LENGTH, OTHER, 2)
            tl.store(codes + row + COUNT // 2 + index, high.to(codes.dtype.element_ty), mask=index < COUNT // 4)


@triton.jit
def _load_token_rows(
    tail, fresh, is_old, is_new, slot, column, fresh_stride, channel, is_channel, HEAD_DIM: tl.constexpr
):
    """Entries of tokens [tokens, channels] in float32, each from the exact tail or from the fresh tensor; zeros elsewhere."""
    old = is_old[:, None] & is_channel[None, :]
    new = is_new[:, None] & is_channel[None, :]
    of_old = tl.load(tail + slot[:, None] * HEAD_DIM + channel[None, :], mask=old, other=0.0)
    of_new = tl.load(fresh + column[:, None] * fresh_stride + channel[None, :], mask=new, other=0.0)
    return tl.where(is_old[:, None], of_old.to(tl.float32), of_new.to(tl.float32))


@triton.jit
def _spread(x, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """[ROWS, GROUPS] to [ROWS, GROUPS * GROUP], each entry for the channels of its group."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, GROUPS, GROUP)), (ROWS, GROUPS * GROUP))


@triton.jit(
    do_not_specialize=[
        "new_tokens",
        "page_programs",
        "pages_per_row",
        "layer",
        "k_stride_row",
        "k_stride_head",
        "k_stride_token",
        "v_stride_row",
        "v_stride_head",
        "v_stride_token",
    ],
    do_not_specialize_on_alignment=["k", "v", "columns", "lengths", "counts"],
)
def kv_write_kernel(
    k,
    v,
    columns,
    lengths,
    counts,
    page_table,
    seeds,
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
    new_tokens,
    page_programs,
    pages_per_row,
    layer,
    k_stride_row,
    k_stride_head,
    k_stride_token,
    v_stride_row,
    v_stride_head,
    v_stride_token,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    K_BITS: tl.constexpr,
    K_LEVELS: tl.constexpr,
    K_OFFSET: tl.constexpr,
    K_MAX_ERROR: tl.constexpr,
    K_ASYMMETRIC: tl.constexpr,
    K_PER_TOKEN: tl.constexpr,
    K_DITHER: tl.constexpr,
    OUTLIERS: tl.constexpr,
    OUTLIER_BLOCK: tl.constexpr,
    V_BITS: tl.constexpr,
    V_LEVELS: tl.constexpr,
    V_OFFSET: tl.constexpr,
    V_FLOAT: tl.constexpr,
    V_EXACT: tl.constexpr,
    V_GROUPS: tl.constexpr,
    V_DITHER: tl.constexpr,
    SCALED_ROUNDING: tl.constexpr,
):
    """One program: (row, KV head, i) quantizes the i-th page that this write touches, if it fills.

    Programs 0 and 1 also write one half of the tail ring each. Program 0 alone reads the old tail (the page that was
    unfinished), and only it overwrites the half that it has read.
    """
    pid = tl.program_id(0)
    touched = pid % page_programs
    head = (pid // page_programs) % KV_HEADS
    row = (pid // page_programs // KV_HEADS).to(tl.int64)

    length = tl.load(lengths + row)
    total = length + tl.load(counts + row)
    last = total // PAGE_SIZE
    page = length // PAGE_SIZE + touched
    token = tl.arange(0, PAGE_SIZE)
    channel = tl.arange(0, DIM_BLOCK)
    is_channel = channel < HEAD_DIM
    k_fresh = k + row * k_stride_row + head.to(tl.int64) * k_stride_head
    v_fresh = v + row * v_stride_row + head.to(tl.int64) * v_stride_head
    tail = (row * KV_HEADS + head) * (2 * PAGE_SIZE * HEAD_DIM)

    # A page that is not stored, because a sliding window has left it already, has no physical page.
    physical = tl.load(page_table + row * pages_per_row + page, mask=page < last, other=-1).to(tl.int64)
    if physical >= 0:
        position = page * PAGE_SIZE + token
        is_old = position < length
        is_new = position >= length
        slot = position % (2 * PAGE_SIZE)
        column = tl.load(columns + row * new_tokens + (position - length), mask=is_new, other=0).to(tl.int64)
        keys = _load_token_rows(
            k_tail + tail, k_fresh, is_old, is_new, slot, column, k_stride_token, channel, is_channel, HEAD_DIM
        )
        values = _load_token_rows(
            v_tail + tail, v_fresh, is_old, is_new, slot, column, v_stride_token, channel, is_channel, HEAD_DIM
        )
        keys_finite, values_finite = is_finite(keys), is_finite(values)
        bad = 1 - (keys_finite & values_finite).to(tl.int32)
        poisoned = tl.max(tl.max(bad, 1), 0) > 0
        keys = tl.where(keys_finite, keys, 0.0)
        values = tl.where(values_finite, values, 0.0)

        block = physical * KV_HEADS + head
        notes = page_notes + block * _NOTES
        infinity = float("inf")
        page_key = block
        if K_DITHER + V_DITHER > 0:
            page_key = tl.load(seeds + row) * _PAGE_KEYS + page
            tl.store(page_keys + block, page_key)

        key_norm = tl.max(_norm_up(tl.sum(keys * keys, 1)), 0)
        tl.store(notes + _KEY_NORM, tl.where(poisoned, infinity, key_norm))
        is_outlier = channel < 0
        if OUTLIERS > 0:
            outlier = tl.arange(0, OUTLIER_BLOCK)
            outlier_of = tl.load(outlier_channels + head * OUTLIERS + outlier, mask=outlier < OUTLIERS, other=-1)
            is_outlier = outlier_lanes(channel, outlier_of)
            bypass = _load_token_rows(
                k_tail + tail,
                k_fresh,
                is_old,
                is_new,
                slot,
                column,
                k_stride_token,
                outlier_of,
                (outlier_of >= 0) & (outlier_of < HEAD_DIM),
                HEAD_DIM,
            )
            bypass = tl.where(is_finite(bypass), bypass, 0.0).to(k_bypass.dtype.element_ty)
            where = (block * PAGE_SIZE + token[:, None]) * OUTLIERS + outlier[None, :]
            tl.store(k_bypass + where, bypass, mask=outlier[None, :] < OUTLIERS)
            keys = tl.where(is_outlier[None, :], 0.0, keys)
        k_dither = keys
        if K_DITHER > 0:
            k_dither = dither_tile(page_key, layer, head, 0, PAGE_SIZE, DIM_BLOCK, False, K_DITHER)

        offset = keys
        if K_PER_TOKEN:
            GROUPS: tl.constexpr = DIM_BLOCK // _KEY_GROUP
            grouped = tl.reshape(tl.abs(keys), (PAGE_SIZE, GROUPS, _KEY_GROUP))
            scale = _scale_of(tl.max(grouped, 2), K_LEVELS)
            group = tl.arange(0, GROUPS)[None, :]
            stored: tl.constexpr = HEAD_DIM // _KEY_GROUP
            where = (block * PAGE_SIZE + token[:, None]) * stored + group
            tl.store(k_scale + where, scale.to(tl.bfloat16), mask=group < stored)
            step = _spread(scale, PAGE_SIZE, GROUPS, _KEY_GROUP)
        else:
            high = tl.max(keys, 0)
            low = tl.min(keys, 0)
            centre = tl.zeros_like(high)
            if K_ASYMMETRIC:
                zero = round_to_dtype(_midpoint(low, high), k_zero.dtype.element_ty)
                tl.store(k_zero + block * HEAD_DIM + channel, zero, mask=is_channel)
                centre = zero.to(tl.float32)
                offset = keys - centre[None, :]
            scale = _scale_of(tl.maximum(high - centre, centre - low), K_LEVELS)
            # A scale of 0 keeps an outlier channel out of every radius.
            stored = tl.where(is_outlier, 0.0, scale)
            tl.store(k_scale + block * HEAD_DIM + channel, stored.to(tl.bfloat16), mask=is_channel)
            step = tl.broadcast_to(scale[None, :], (PAGE_SIZE, DIM_BLOCK))
        value, codes = _encode(tl.div_rn(offset, step), k_dither, K_BITS, K_OFFSET, K_MAX_ERROR != 0.5, K_DITHER > 0)
        if K_DITHER > 0:
            value = value - k_dither
        is_coded = is_channel & (is_outlier == 0)
        error = tl.where(is_coded[None, :], value * step - offset, 0.0)
        scaled_error = error / step
        row_bytes: tl.constexpr = HEAD_DIM * K_BITS // 8
        rows = (block * PAGE_SIZE + token[:, None]) * row_bytes
        _store_codes(k_codes, rows, codes, DIM_BLOCK, HEAD_DIM, PAGE_SIZE, K_BITS)
        key_error = tl.max(_norm_up(tl.sum(error * error, 1)), 0)
        coded_step = tl.where(is_coded[None, :], step, 0.0)
        key_error += _RESIDUAL_ROUNDING * tl.max(_norm_up(tl.sum(coded_step * coded_step, 1)), 0)
        key_error_scaled = tl.max(_norm_up(tl.sum(scaled_error * scaled_error, 1)), 0) + SCALED_ROUNDING
        tl.store(notes + _KEY_ERROR, tl.where(poisoned, infinity, key_error))
        tl.store(notes + _KEY_ERROR_SCALED, tl.where(poisoned, infinity, key_error_scaled))

        value_norm = tl.max(_norm_up(tl.sum(values * values, 1)), 0)
        tl.store(notes + _VALUE_NORM, tl.where(poisoned, infinity, value_norm))
        value_rows = block * HEAD_DIM + channel[None, :]
        if V_EXACT:
            where = value_rows * PAGE_SIZE + token[:, None]
            tl.store(v_codes + where, round_to_dtype(values, v_codes.dtype.element_ty), mask=is_channel[None, :])
            tl.store(notes + _VALUE_ERROR, tl.where(poisoned, infinity, 0.0))
        else:
            offset = values
            if V_GROUPS > 1:
                V_BLOCK: tl.constexpr = DIM_BLOCK // _VALUE_GROUP
                grouped = tl.reshape(values, (PAGE_SIZE, V_BLOCK, _VALUE_GROUP))
                high = tl.max(grouped, 2)
                low = tl.min(grouped, 2)
                zero = round_to_dtype(_midpoint(low, high), v_zero.dtype.element_ty)
                centre = zero.to(tl.float32)
                scale = _scale_of(tl.maximum(high - centre, centre - low), V_LEVELS)
                group = tl.arange(0, V_BLOCK)[None, :]
                where = (block * PAGE_SIZE + token[:, None]) * V_GROUPS + group
                tl.store(v_zero + where, zero, mask=group < V_GROUPS)
                tl.store(v_scale + where, scale.to(tl.bfloat16), mask=group < V_GROUPS)
                step = _spread(scale, PAGE_SIZE, V_BLOCK, _VALUE_GROUP)
                offset = values - _spread(centre, PAGE_SIZE, V_BLOCK, _VALUE_GROUP)
                largest = tl.max(scale, 1)
            else:
                largest = _scale_of(tl.max(tl.abs(values), 1), V_LEVELS)
                tl.store(v_scale + block * PAGE_SIZE + token, largest.to(tl.bfloat16))
                step = tl.broadcast_to(largest[:, None], (PAGE_SIZE, DIM_BLOCK))
            v_dither = values
            if V_DITHER > 0:
                v_dither = dither_tile(page_key, layer, head, 0, PAGE_SIZE, DIM_BLOCK, True, V_DITHER)
            value, codes = _encode(tl.div_rn(offset, step), v_dither, V_BITS, V_OFFSET, V_FLOAT, V_DITHER > 0)
            if V_DITHER > 0:
                value = value - v_dither
            error = tl.where(is_channel[None, :], value * step - offset, 0.0) / largest[:, None]
            value_error = tl.max(_norm_up(tl.sum(error * error, 1)), 0) + SCALED_ROUNDING
            tl.store(notes + _VALUE_ERROR, tl.where(poisoned, infinity, value_error))
            value_bytes: tl.constexpr = PAGE_SIZE * V_BITS // 8
            if V_BITS == 8:
                where = value_rows * value_bytes + token[:, None]
                tl.store(v_codes + where, codes.to(v_codes.dtype.element_ty), mask=is_channel[None, :])
            else:
                rows = (block * HEAD_DIM + channel[:, None]) * value_bytes
                packed = join_codes(tl.trans(codes), PAGE_SIZE, DIM_BLOCK, V_BITS)
                where = rows + tl.arange(0, value_bytes)[None, :]
                tl.store(v_codes + where, packed.to(v_codes.dtype.element_ty), mask=is_channel[:, None])

    # Every lane must have read the old half before any lane overwrites it.
    tl.debug_barrier()
    if touched < 2:
        kept = last - ((last + page) & 1)
        position = kept * PAGE_SIZE + token
        is_new = (position >= length) & (position < total)
        slot = position % (2 * PAGE_SIZE)
        column = tl.load(columns + row * new_tokens + (position - length), mask=is_new, other=0).to(tl.int64)
        where = tail + slot[:, None] * HEAD_DIM + channel[None, :]
        mask = is_new[:, None] & is_channel[None, :]
        source = column[:, None] * k_stride_token + channel[None, :]
        tl.store(k_tail + where, tl.load(k_fresh + source, mask=mask), mask=mask)
        source = column[:, None] * v_stride_token + channel[None, :]
        tl.store(v_tail + where, tl.load(v_fresh + source, mask=mask), mask=mask)


def kv_write_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    columns: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    page_table: torch.Tensor,
    seeds: torch.Tensor,
    outlier_channels: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    k_bypass: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    v_zero: torch.Tensor,
    page_notes: torch.Tensor,
    page_keys: torch.Tensor,
    k_tail: torch.Tensor,
    v_tail: torch.Tensor,
    layer: int,
    store_format: str,
) -> None:
    """Launch the write kernel once on the tensors' device and current stream. Shapes: DESIGN section 5."""
    batch, kv_heads, new_tokens, head_dim = k.shape
    page_size = k_tail.shape[2] // 2
    page_programs = max(2, -(-new_tokens // page_size) + 1)
    k, v = unit_stride(k), unit_stride(v)
    if batch == 0 or new_tokens == 0:
        return
    parsed = StoreFormat.parse(store_format)
    parameters = format_parameters(parsed, head_dim)
    entries = page_size * parameters["DIM_BLOCK"]
    with on_device(k):
        kv_write_kernel[(batch * kv_heads * page_programs,)](
            k,
            v,
            columns.contiguous(),
            lengths.contiguous(),
            counts.contiguous(),
            page_table.contiguous(),
            seeds.contiguous(),
            outlier_channels.contiguous(),
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
            new_tokens,
            page_programs,
            page_table.shape[1],
            layer,
            *k.stride()[:3],
            *v.stride()[:3],
            KV_HEADS=kv_heads,
            PAGE_SIZE=page_size,
            K_LEVELS=float(parsed.key.grid.levels),
            V_LEVELS=float(parsed.value.grid.levels),
            SCALED_ROUNDING=scaled_residual_rounding(head_dim),
            num_warps=16 if entries >= 32768 else 8 if entries >= 8192 else 4,
            **parameters,
        )
