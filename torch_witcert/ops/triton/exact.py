"""Stage 1 over exact tokens: the unfinished page and the fresh tokens of a read, as one more split."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import arithmetic as ar
from .primitives import LN_2, NORM_ABSOLUTE, NOTE_RELATIVE
from .products import exact_operand, exact_product

_LOG2_E = tl.constexpr(1.4426950408889634)
_SINK_ERROR = tl.constexpr(ar.SINK_ERROR)
_FLUSHED = tl.constexpr(ar.FLUSHED)


@triton.jit
def cap(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap * tanh(scores / softcap); both in log2 units."""
    if HAS_SOFTCAP:
        return softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2_E / softcap)) + 1.0))
    else:
        return scores


@triton.jit
def _norm_of_tokens(x):
    """Upper bound of each token's norm [tokens]."""
    return tl.sqrt(tl.sum(x * x, 1)) * (1.0 + NOTE_RELATIVE) + NORM_ABSOLUTE


@triton.jit
def _attend_tile(
    state, operand_of_q, k, v, k_stride, v_stride, slot, key_position, position, oldest, softcap_log2,
    HAS_SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, LIMBS: tl.constexpr,
):  # fmt: skip
    """(running maximum, sum, accumulator, largest ||K_t||, largest ||V_t||) after the tokens in `slot` [TILE], at `key_position`
    (negative for none)."""
    maximum, total, accumulator, key_norm, value_norm = state
    channel = tl.arange(0, DIM_BLOCK)
    mask = (key_position >= 0)[:, None] & (channel < HEAD_DIM)[None, :]
    keys = tl.load(k + slot[:, None].to(tl.int64) * k_stride + channel[None, :], mask=mask, other=0.0)
    values = tl.load(v + slot[:, None].to(tl.int64) * v_stride + channel[None, :], mask=mask, other=0.0)
    norm_of_key, norm_of_value = _norm_of_tokens(keys.to(tl.float32)), _norm_of_tokens(values.to(tl.float32))
    # 0 times NaN or Inf is NaN.
    poisoned = tl.sum(keys.to(tl.float32) * 0.0 + values.to(tl.float32) * 0.0, 1) != 0.0
    keys = tl.where(poisoned[:, None], tl.zeros_like(keys), keys)
    values = tl.where(poisoned[:, None], tl.zeros_like(values), values)
    norm_of_key = tl.where(poisoned, float("inf"), norm_of_key)
    norm_of_value = tl.where(poisoned, float("inf"), norm_of_value)
    seen = (key_position[:, None] >= 0) & (key_position[:, None] <= position[None, :])
    seen = seen & (key_position[:, None] > oldest[None, :])
    key_norm = tl.maximum(key_norm, tl.max(tl.where(seen, norm_of_key[:, None], 0.0), 0))
    value_norm = tl.maximum(value_norm, tl.max(tl.where(seen, norm_of_value[:, None], 0.0), 0))

    scores = cap(exact_product(keys, operand_of_q, LIMBS), softcap_log2, HAS_SOFTCAP)
    scores = tl.where(seen, scores, float("-inf"))
    raised = tl.maximum(maximum, tl.max(scores, 0))
    reference = tl.where(raised == float("-inf"), 0.0, raised)
    weights = tl.exp2(scores - reference[None, :])
    rescale = tl.exp2(maximum - reference)
    total = total * rescale + tl.sum(weights, 0)
    accumulator = accumulator * rescale[None, :] + exact_product(tl.trans(values), exact_operand(weights, LIMBS), LIMBS)
    return raised, total, accumulator, key_norm, value_norm


@triton.jit
def attend_exact(
    scaled_q, k_fresh, v_fresh, k_tail, v_tail, positions, sinks, position, oldest, is_query, query_head, length, end_column,
    new_tokens, k_stride_token, v_stride_token, softcap_log2,
    TILE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, OPERAND: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Running maximum and sum [rows], accumulator [D, rows], largest ||K_t||, largest ||V_t|| and error of the sink's score [rows].

    `k_fresh` to `v_tail` and `positions` point at the row's and head's own; `end_column` is the number of fresh columns that
    these query rows can see.
    """
    LIMBS: tl.constexpr = (OPERAND == tl.bfloat16) and (k_tail.dtype.element_ty == tl.bfloat16)
    operand_of_q = exact_operand(scaled_q, LIMBS)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([DIM_BLOCK, ROWS], tl.float32)
    key_norm = tl.zeros([ROWS], tl.float32)
    value_norm = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + query_head, mask=is_query, other=float("-inf"))
        maximum = sink * _LOG2_E
        # An exact token without a value: its weight is 1 at its own maximum.
        total = tl.where(sink == float("-inf"), 0.0, 1.0)
    lane = tl.arange(0, TILE)
    for start in range(length // PAGE_SIZE * PAGE_SIZE, length, TILE):
        at = start + lane
        maximum, total, accumulator, key_norm, value_norm = _attend_tile(
            (maximum, total, accumulator, key_norm, value_norm), operand_of_q, k_tail, v_tail, HEAD_DIM, HEAD_DIM,
            at % (2 * PAGE_SIZE), tl.where(at < length, at, -1), position, oldest, softcap_log2,
            HAS_SOFTCAP, HEAD_DIM, DIM_BLOCK, LIMBS,
        )  # fmt: skip
    for start in range(0, end_column, TILE):
        column = start + lane
        at = tl.load(positions + column, mask=column < new_tokens, other=-1)
        maximum, total, accumulator, key_norm, value_norm = _attend_tile(
            (maximum, total, accumulator, key_norm, value_norm), operand_of_q, k_fresh, v_fresh, k_stride_token, v_stride_token,
            column, at, position, oldest, softcap_log2, HAS_SOFTCAP, HEAD_DIM, DIM_BLOCK, LIMBS,
        )  # fmt: skip
    sink_error = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        # A sink so far below that its weight is 0 in any rounding costs nothing.
        charge = tl.abs(sink) * _SINK_ERROR
        is_flushed = (sink == float("-inf")) | (sink < maximum * LN_2 - _FLUSHED - charge)
        sink_error = tl.where(is_flushed, 0.0, charge)
    return maximum, total, accumulator, key_norm, value_norm, sink_error
