"""Write kernel: append tokens to the exact tail and quantize the pages that fill (reference: `kv_write_reference`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import arithmetic as ar
from ..quantize import LEVELS
from ..storage import Note
from .launch import on_device, unit_stride
from .primitives import (
    NORM_ABSOLUTE,
    NOTE_RELATIVE,
    is_finite,
    round_to_dtype,
    round_to_integer,
    round_up_to_bfloat16,
)

_LEVELS = tl.constexpr(float(LEVELS))
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
def _scale_of(half_range):
    return round_up_to_bfloat16(tl.maximum(tl.div_rn(half_range, _LEVELS), _SCALE_FLOOR))


@triton.jit
def _midpoint(low, high):
    """(low + high) / 2 without overflow, rounded once: nothing that the compiler could fuse differently."""
    total = low + high
    return tl.where(is_finite(total), total * 0.5, low * 0.5 + high * 0.5)


@triton.jit
def _load_token_rows(tail, fresh, is_old, is_new, slot, column, fresh_stride, channel, HEAD_DIM: tl.constexpr):
    """Rows of tokens [tokens, D] in float32, each from the exact tail or from the fresh tensor; zeros elsewhere."""
    old = tl.load(tail + slot[:, None] * HEAD_DIM + channel[None, :], mask=is_old[:, None], other=0.0)
    new = tl.load(fresh + column[:, None] * fresh_stride + channel[None, :], mask=is_new[:, None], other=0.0)
    return tl.where(is_old[:, None], old.to(tl.float32), new.to(tl.float32))


@triton.jit(
    do_not_specialize=[
        "new_tokens",
        "page_programs",
        "pages_per_row",
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
    k_codes,
    k_scale,
    k_zero,
    v_codes,
    v_scale,
    page_notes,
    k_tail,
    v_tail,
    new_tokens,
    page_programs,
    pages_per_row,
    k_stride_row,
    k_stride_head,
    k_stride_token,
    v_stride_row,
    v_stride_head,
    v_stride_token,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
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
    channel = tl.arange(0, HEAD_DIM)
    k_fresh = k + row * k_stride_row + head.to(tl.int64) * k_stride_head
    v_fresh = v + row * v_stride_row + head.to(tl.int64) * v_stride_head
    tail = (row * KV_HEADS + head) * (2 * PAGE_SIZE * HEAD_DIM)

    if page < last:
        position = page * PAGE_SIZE + token
        is_old = position < length
        is_new = position >= length
        slot = position % (2 * PAGE_SIZE)
        column = tl.load(columns + row * new_tokens + (position - length), mask=is_new, other=0).to(tl.int64)
        keys = _load_token_rows(k_tail + tail, k_fresh, is_old, is_new, slot, column, k_stride_token, channel, HEAD_DIM)
        values = _load_token_rows(
            v_tail + tail, v_fresh, is_old, is_new, slot, column, v_stride_token, channel, HEAD_DIM
        )
        keys_finite, values_finite = is_finite(keys), is_finite(values)
        bad = 1 - (keys_finite & values_finite).to(tl.int32)
        poisoned = tl.max(tl.max(bad, 1), 0) > 0
        keys = tl.where(keys_finite, keys, 0.0)
        values = tl.where(values_finite, values, 0.0)

        physical = tl.load(page_table + row * pages_per_row + page).to(tl.int64)
        block = physical * KV_HEADS + head

        high = tl.max(keys, 0)
        low = tl.min(keys, 0)
        zero = round_to_dtype(_midpoint(low, high), k_zero.dtype.element_ty)
        centre = zero.to(tl.float32)
        scale = _scale_of(tl.maximum(high - centre, centre - low))
        offset = keys - centre[None, :]
        codes = round_to_integer(tl.div_rn(offset, tl.broadcast_to(scale[None, :], (PAGE_SIZE, HEAD_DIM))))
        codes = tl.minimum(tl.maximum(codes, -_LEVELS), _LEVELS)
        error = codes * scale[None, :] - offset
        scaled_error = error / scale[None, :]
        tl.store(
            k_codes + block * PAGE_SIZE * HEAD_DIM + token[:, None] * HEAD_DIM + channel[None, :], codes.to(tl.int8)
        )
        tl.store(k_scale + block * HEAD_DIM + channel, scale.to(tl.bfloat16))
        tl.store(k_zero + block * HEAD_DIM + channel, zero)

        value_scale = _scale_of(tl.max(tl.abs(values), 1))
        value_codes = round_to_integer(tl.div_rn(values, tl.broadcast_to(value_scale[:, None], (PAGE_SIZE, HEAD_DIM))))
        value_codes = tl.minimum(tl.maximum(value_codes, -_LEVELS), _LEVELS)
        value_error = (value_codes * value_scale[:, None] - values) / value_scale[:, None]
        tl.store(
            v_codes + block * PAGE_SIZE * HEAD_DIM + channel[None, :] * PAGE_SIZE + token[:, None],
            value_codes.to(tl.int8),
        )
        tl.store(v_scale + block * PAGE_SIZE + token, value_scale.to(tl.bfloat16))

        notes = page_notes + block * _NOTES
        infinity = float("inf")
        value_norm = tl.max(_norm_up(tl.sum(values * values, 1)), 0)
        value_note = tl.max(_norm_up(tl.sum(value_error * value_error, 1)), 0)
        key_norm = tl.max(_norm_up(tl.sum(keys * keys, 1)), 0)
        key_error = tl.max(_norm_up(tl.sum(error * error, 1)), 0)
        key_error += _RESIDUAL_ROUNDING * _norm_up(tl.sum(scale * scale, 0))
        key_error_scaled = tl.max(_norm_up(tl.sum(scaled_error * scaled_error, 1)), 0)
        # Twice the root of D covers it for every head dim: 2^-17 * sqrt(D) rounded up.
        key_error_scaled += _RESIDUAL_ROUNDING * _norm_up(HEAD_DIM * 1.0)
        tl.store(notes + _VALUE_NORM, tl.where(poisoned, infinity, value_norm))
        tl.store(notes + _VALUE_ERROR, tl.where(poisoned, infinity, value_note))
        tl.store(notes + _KEY_NORM, tl.where(poisoned, infinity, key_norm))
        tl.store(notes + _KEY_ERROR, tl.where(poisoned, infinity, key_error))
        tl.store(notes + _KEY_ERROR_SCALED, tl.where(poisoned, infinity, key_error_scaled))

    # Every lane must have read the old half before any lane overwrites it.
    tl.debug_barrier()
    if touched < 2:
        kept = last - ((last + page) & 1)
        position = kept * PAGE_SIZE + token
        is_new = (position >= length) & (position < total)
        slot = position % (2 * PAGE_SIZE)
        column = tl.load(columns + row * new_tokens + (position - length), mask=is_new, other=0).to(tl.int64)
        where = tail + slot[:, None] * HEAD_DIM + channel[None, :]
        source = column[:, None] * k_stride_token + channel[None, :]
        tl.store(k_tail + where, tl.load(k_fresh + source, mask=is_new[:, None]), mask=is_new[:, None])
        source = column[:, None] * v_stride_token + channel[None, :]
        tl.store(v_tail + where, tl.load(v_fresh + source, mask=is_new[:, None]), mask=is_new[:, None])


def kv_write_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    columns: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    page_table: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_zero: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    page_notes: torch.Tensor,
    k_tail: torch.Tensor,
    v_tail: torch.Tensor,
) -> None:
    """Launch the write kernel once on the tensors' device and current stream. Shapes: DESIGN section 5."""
    batch, kv_heads, new_tokens, head_dim = k.shape
    page_size = k_codes.shape[2]
    page_programs = max(2, -(-new_tokens // page_size) + 1)
    k, v = unit_stride(k), unit_stride(v)
    if batch == 0 or new_tokens == 0:
        return
    with on_device(k):
        kv_write_kernel[(batch * kv_heads * page_programs,)](
            k,
            v,
            columns.contiguous(),
            lengths.contiguous(),
            counts.contiguous(),
            page_table.contiguous(),
            k_codes,
            k_scale,
            k_zero,
            v_codes,
            v_scale,
            page_notes,
            k_tail,
            v_tail,
            new_tokens,
            page_programs,
            page_table.shape[1],
            *k.stride()[:3],
            *v.stride()[:3],
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            PAGE_SIZE=page_size,
            num_warps=8 if page_size * head_dim >= 8192 else 4,
        )
