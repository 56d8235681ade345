"""Stage 2: merge the splits of a read and make its certificate from their sums.

A program owns one query row. Splits merge in fixed blocks: bits depend on the row and the cache's capacity alone. The
formulas are those of `torch_witcert.ops.certificate`, in its order and with its names.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import arithmetic as ar
from ..certificate import Field
from ..storage import POSITION_OVERFLOW
from . import records as rec
from .primitives import LN_2, NORM_ABSOLUTE, exponential_minus_one, is_finite, norm_of_query, round_to_dtype
from .records import group_terms, rest_terms, statistics_address

#: Most splits whose sums, and whose accumulators, a program loads at a time.
SPLIT_BLOCK = 256
ACCUMULATOR_BLOCK = 16

_MAXIMUM = tl.constexpr(rec.MAXIMUM)
_SUM = tl.constexpr(rec.SUM)
_RADIUS = tl.constexpr(rec.RADIUS)
_NORM = tl.constexpr(rec.NORM)
_EXACT_KEY_NORM = tl.constexpr(rec.KEY_NORM)
_SINK_ERROR = tl.constexpr(rec.SINK_ERROR)
_CODE_TOKENS = tl.constexpr(rec.CODE_TOKENS)
_SCALED_ERROR = tl.constexpr(rec.SCALED_ERROR)
_CODE_MASS = tl.constexpr(rec.CODE_MASS)
_CODE_NORM = tl.constexpr(rec.CODE_NORM)
_SQUARED_NORM = tl.constexpr(rec.SQUARED_NORM)
_MASS_SUM = tl.constexpr(rec.MASS_SUM)
_EXCESS = tl.constexpr(rec.EXCESS)
_LOWER = tl.constexpr(rec.LOWER)
_SHRINK = tl.constexpr(rec.SHRINK)
_PINSKER = tl.constexpr(rec.PINSKER)
_SPREAD = tl.constexpr(rec.SPREAD)
_WEIGHTED = tl.constexpr(rec.WEIGHTED)
_HEAVIEST_RADIUS = tl.constexpr(rec.HEAVIEST_RADIUS)
_REST = tl.constexpr(rec.REST)
_ACCUMULATOR_BLOCK = tl.constexpr(ACCUMULATOR_BLOCK)
_OVERFLOW = tl.constexpr(POSITION_OVERFLOW)
_FIELDS = tl.constexpr(Field.COUNT)
_TV = tl.constexpr(Field.TV)
_OUTPUT = tl.constexpr(Field.OUTPUT)
_KEY_ERROR = tl.constexpr(Field.KEY_ERROR)
_E_VAL = tl.constexpr(Field.VALUE_ERROR)
_LARGEST_RADIUS = tl.constexpr(Field.RADIUS)
_CERTIFICATE_MASS = tl.constexpr(Field.CODE_MASS)
_CERTIFICATE_TOKENS = tl.constexpr(Field.CODE_TOKENS)
_TOKENS = tl.constexpr(Field.TOKENS)
_RADIUS_LIMIT = tl.constexpr(ar.RADIUS_LIMIT)
_ABSOLUTE = tl.constexpr(ar.SUM_ABSOLUTE)
_GAP = tl.constexpr(ar.GAP_ABSOLUTE)


@triton.jit
def _ratio(excess, lower):
    """1 / (1 + A_ / E+)."""
    return excess / (excess + lower)


@triton.jit
def _smaller(a, b):
    """Minimum that passes over a NaN: a bound that cannot be computed bounds nothing."""
    return tl.where(b < a, b, a)


@triton.jit
def _weighted(statistic, plane, share, is_split, PLANE: tl.constexpr):
    """A plane of the splits times their share; nothing where the share is nothing, whatever the plane holds."""
    value = tl.load(statistic + PLANE * plane, mask=is_split, other=0.0)
    return tl.where(share > 0.0, share * value, 0.0)


@triton.jit(
    do_not_specialize=[
        "window",
        "new_tokens",
        "first_token",
        "chunk_tokens",
        "scratch_blocks",
        "q_stride_row",
        "q_stride_head",
        "q_stride_token",
        "pages_per_split",
        "code_splits",
    ],
    do_not_specialize_on_alignment=["q", "positions", "lengths"],
)
def merge_kernel(
    q,
    positions,
    lengths,
    accumulators,
    statistics,
    out,
    lse,
    certificate,
    scale_log2,
    window,
    new_tokens,
    first_token,
    chunk_tokens,
    scratch_blocks,
    q_stride_row,
    q_stride_head,
    q_stride_token,
    exact_dot,
    score_steps,
    lost_mass,
    sum_relative,
    code_values,
    exact_values,
    normaliser,
    to_dtype_relative,
    to_dtype_absolute,
    to_dtype_largest,
    half_weight_rounding,
    pages_per_split,
    code_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    pid = tl.program_id(0)
    query = pid % (chunk_tokens * GROUP)
    row_head = (pid // (chunk_tokens * GROUP)).to(tl.int64)
    head = row_head % KV_HEADS
    row = row_head // KV_HEADS
    token = first_token + query // GROUP
    target = (row * KV_HEADS * GROUP + head * GROUP + query % GROUP) * new_tokens + token
    channel = tl.arange(0, DIM_BLOCK)
    is_channel = channel < HEAD_DIM
    fields = certificate + target * _FIELDS

    position = tl.load(positions + row * new_tokens + token)
    if position < 0:
        tl.store(out + target * HEAD_DIM + channel, tl.zeros([DIM_BLOCK], out.dtype.element_ty), mask=is_channel)
        tl.store(lse + target, float("-inf"))
        tl.store(fields + tl.arange(0, _FIELDS), tl.zeros([_FIELDS], tl.float32))
        # The same lanes rewrite what they zeroed, in program order.
        bound = tl.where(position == _OVERFLOW, float("inf"), 0.0)
        tl.store(fields + tl.arange(0, _FIELDS), tl.where(tl.arange(0, _FIELDS) <= _OUTPUT, bound, 0.0))
        return

    length = tl.load(lengths + row)
    pages = length // PAGE_SIZE
    oldest = tl.where(window > 0, position - window, -1)
    first_page = tl.maximum(oldest + 1, 0) // PAGE_SIZE
    first_split = first_page // pages_per_split
    end_split = tl.where(first_page < pages, tl.cdiv(pages, pages_per_split), first_split)
    # Splits of code pages, and the exact tokens behind them.
    splits = code_splits + 1
    row_block = row_head * scratch_blocks + query // ROWS
    statistic_of_row = statistics_address(statistics, row_block, splits, query % ROWS, 0, ROWS)
    plane = ROWS * splits
    partial = accumulators + (row_block * splits * ROWS + query % ROWS) * HEAD_DIM
    exact_statistic = statistic_of_row + code_splits
    exact_maximum = tl.load(exact_statistic + _MAXIMUM * plane)

    # The split of the heaviest token: the first one whose maximum is the largest, the exact tokens before all others.
    lane = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    highest_split = tl.full([BLOCK], 2147483647, tl.int32)
    for start in range(first_split // BLOCK * BLOCK, end_split, BLOCK):
        split = start + lane
        is_split = (split >= first_split) & (split < end_split)
        here = tl.load(statistic_of_row + split + _MAXIMUM * plane, mask=is_split, other=float("-inf"))
        highest_split = tl.where(here > highest, split, highest_split)
        highest = tl.maximum(highest, here)
    code_maximum = tl.max(highest, 0)
    exact_is_heaviest = exact_maximum >= code_maximum
    heaviest_split = tl.min(tl.where(highest == code_maximum, highest_split, 2147483647), 0)
    heaviest_split = tl.where(exact_is_heaviest, code_splits, heaviest_split)
    maximum = tl.maximum(exact_maximum, code_maximum)

    exact_share = tl.exp2(exact_maximum - maximum)
    total = exact_share * tl.load(exact_statistic + _SUM * plane)
    output = exact_share * tl.load(partial + code_splits * (ROWS * HEAD_DIM) + channel, mask=is_channel, other=0.0)
    for start in range(first_split, end_split, _ACCUMULATOR_BLOCK):
        split = start + tl.arange(0, _ACCUMULATOR_BLOCK)
        is_split = split < end_split
        share = tl.load(statistic_of_row + split + _MAXIMUM * plane, mask=is_split, other=float("-inf"))
        share = tl.exp2(share - maximum)
        total += tl.sum(share * tl.load(statistic_of_row + split + _SUM * plane, mask=is_split, other=0.0), 0)
        parts = partial + split[:, None] * (ROWS * HEAD_DIM) + channel[None, :]
        parts = tl.load(parts, mask=is_split[:, None] & is_channel[None, :], other=0.0)
        output += tl.sum(share[:, None] * parts, 0)
    output = output / total
    output_norm = tl.sqrt(tl.sum(output * output, 0))
    tl.store(out + target * HEAD_DIM + channel, round_to_dtype(output, out.dtype.element_ty), mask=is_channel)
    tl.store(lse + target, (maximum + tl.log2(total)) * LN_2)

    # The exact tokens start every sum; lane 0 carries them.
    scaled_q = (
        q + row * q_stride_row + (head * GROUP + query % GROUP).to(tl.int64) * q_stride_head + token * q_stride_token
    )
    scaled_q = tl.load(scaled_q + channel, mask=is_channel, other=0.0).to(tl.float32) * scale_log2
    # Asked of every channel, because a maximum drops a NaN.
    q_is_finite = tl.min(is_finite(scaled_q).to(tl.int32), 0) > 0
    q_norm = tl.sum(norm_of_query(scaled_q[:, None]), 0)
    exact_radius = q_norm * tl.load(exact_statistic + _EXACT_KEY_NORM * plane) * exact_dot + score_steps
    exact_radius += tl.load(exact_statistic + _SINK_ERROR * plane)
    exact_radius = tl.where(is_finite(exact_radius), exact_radius, float("inf"))
    exact_radius = tl.where(q_is_finite, exact_radius, float("inf"))
    exact_norm = tl.load(exact_statistic + _NORM * plane)
    exact_mass = exact_share * tl.load(exact_statistic + _SUM * plane) / total
    whole = group_terms(exact_mass, exact_mass, exact_radius)
    exact_top = tl.where(exact_is_heaviest, exact_share / total, 0.0)
    less = rest_terms(exact_mass, exact_top, exact_radius, tl.where(exact_is_heaviest, lost_mass, 0.0))
    grow = exponential_minus_one(exact_radius)
    is_first = lane == 0
    nothing = tl.zeros([BLOCK], tl.float32)
    largest_radius = nothing + exact_radius
    largest_norm = nothing + exact_norm
    heaviest_radius = tl.where(is_first, tl.where(exact_is_heaviest, exact_radius, 0.0), 0.0)
    excess = tl.where(is_first, whole[1], 0.0)
    lower = tl.where(is_first, whole[2], 0.0)
    pinsker = tl.where(is_first, whole[4], 0.0)
    spread = tl.where(is_first, exact_mass * grow * grow, 0.0)
    weighted = tl.where(is_first, exact_mass * grow * exact_norm, 0.0)
    square = tl.where(is_first, exact_mass * exact_norm * exact_norm, 0.0)
    rest = tl.where(is_first, less[0], 0.0)
    rest_excess = tl.where(is_first, less[1], 0.0)
    rest_lower = tl.where(is_first, less[2], 0.0)
    rest_shrink = tl.where(is_first, less[3], 0.0)
    rest_pinsker = tl.where(is_first, less[4], 0.0)
    code_tokens, code_mass, code_norm, value_error = nothing, nothing, nothing, nothing
    for start in range(first_split // BLOCK * BLOCK, end_split, BLOCK):
        split = start + lane
        is_split = (split >= first_split) & (split < end_split)
        is_heaviest = split == heaviest_split
        statistic = statistic_of_row + split
        share = tl.load(statistic + _MAXIMUM * plane, mask=is_split, other=float("-inf"))
        share = tl.exp2(share - maximum) / total
        largest_radius = tl.maximum(largest_radius, tl.load(statistic + _RADIUS * plane, mask=is_split, other=0.0))
        largest_norm = tl.maximum(largest_norm, tl.load(statistic + _NORM * plane, mask=is_split, other=0.0))
        code_tokens += tl.load(statistic + _CODE_TOKENS * plane, mask=is_split, other=0.0)
        value_error += _weighted(statistic, plane, share, is_split, _SCALED_ERROR)
        code_mass += _weighted(statistic, plane, share, is_split, _CODE_MASS)
        code_norm += _weighted(statistic, plane, share, is_split, _CODE_NORM)
        square += _weighted(statistic, plane, share, is_split, _SQUARED_NORM)
        excess += _weighted(statistic, plane, share, is_split, _EXCESS)
        lower += _weighted(statistic, plane, share, is_split, _LOWER)
        pinsker += _weighted(statistic, plane, share, is_split, _PINSKER)
        spread += _weighted(statistic, plane, share, is_split, _SPREAD)
        weighted += _weighted(statistic, plane, share, is_split, _WEIGHTED)
        heaviest_radius += tl.load(statistic + _HEAVIEST_RADIUS * plane, mask=is_split & is_heaviest, other=0.0)
        # The splits that do not hold the heaviest token have nothing to leave out.
        without = statistic + is_heaviest.to(tl.int32) * ((_REST - _MASS_SUM) * plane)
        rest += _weighted(without, plane, share, is_split, _MASS_SUM)
        rest_excess += _weighted(without, plane, share, is_split, _EXCESS)
        rest_lower += _weighted(without, plane, share, is_split, _LOWER)
        rest_shrink += _weighted(without, plane, share, is_split, _SHRINK)
        rest_pinsker += _weighted(without, plane, share, is_split, _PINSKER)

    up = 1.0 + sum_relative
    down = 1.0 - sum_relative
    c_max = tl.max(largest_radius, 0)
    # A NaN among the weights would pass by the bounds that do not use it.
    guaranteed = (c_max <= _RADIUS_LIMIT) & is_finite(total)
    e_plus = tl.sum(excess, 0) * up + _GAP
    e_plus = e_plus + _ABSOLUTE * (1.0 + e_plus)
    a_minus = tl.maximum(tl.sum(lower, 0) * down - _ABSOLUTE, 0.0)
    grow_max = exponential_minus_one(c_max * up)
    tanh = grow_max / (grow_max + 2.0)
    tv = _smaller(tanh, _ratio(e_plus, a_minus))
    tv = _smaller(tv, tl.sqrt((tl.sum(pinsker, 0) * up + _GAP) * 0.5))

    # The heaviest token has weight 1.
    x = tl.minimum(up / total, 1.0)
    c_heaviest = tl.max(heaviest_radius, 0)
    y = tl.minimum(tl.sum(rest, 0) * up + _GAP, 1.0)
    rest_plus = tl.sum(rest_excess, 0) * up + _GAP
    grow_heaviest = exponential_minus_one(c_heaviest)
    w = y * grow_heaviest + (1.0 + grow_heaviest) * rest_plus
    shrunk = (tl.sum(rest_shrink, 0) * up + _GAP) / (1.0 + grow_heaviest)
    u = y * grow_heaviest / (1.0 + grow_heaviest) + shrunk
    moved = tl.maximum(x * w / (1.0 + w), tl.where(u < 1.0, x * u / (1.0 - u), 1.0))
    rest_minus = tl.maximum(tl.sum(rest_lower, 0) * down - _ABSOLUTE, 0.0)
    rest_tv = y * _smaller(tanh, _ratio(rest_plus, rest_minus))
    rest_tv = _smaller(rest_tv, tl.sqrt(y * (tl.sum(rest_pinsker, 0) * up + _GAP) * 0.5))
    tv = _smaller(tv, moved + rest_tv)
    mass_as_codes = tl.sum(code_mass, 0)
    tv = tv * (1.0 + 2.0**-20) + 2.0**-22
    guaranteed = guaranteed & is_finite(tv)
    rounded_tv = tl.minimum(tv + mass_as_codes * half_weight_rounding, 1.0)

    e_val = tl.sum(value_error, 0) * up
    rounding = code_values * (tl.sum(code_norm, 0) * up + e_val)
    rounding += exact_values * exact_mass * exact_norm * up + normaliser * output_norm + NORM_ABSOLUTE
    apart_from_keys = e_val + rounding
    r_max = tl.max(largest_norm, 0)
    weighted_sum = tl.sum(weighted, 0) * up + _ABSOLUTE * r_max
    square_sum = tl.sum(square, 0) * up + _ABSOLUTE * r_max * r_max
    bound = 2.0 * r_max * tv + apart_from_keys
    bound = _smaller(bound, (weighted_sum + e_plus * (output_norm + apart_from_keys)) / a_minus + apart_from_keys)
    centre = tl.maximum(output_norm - apart_from_keys, 0.0)
    deviation = tl.sqrt(tl.maximum(square_sum - centre * centre * down, 0.0))
    sinh = (grow_max + grow_max / (1.0 + grow_max)) * 0.5
    factor = _smaller(sinh, tl.sqrt(tl.sum(spread, 0) * up + _GAP) / a_minus)
    bound = _smaller(bound, factor * deviation + apart_from_keys)
    bound = bound * (1.0 + 2.0**-20) + to_dtype_relative * output_norm + to_dtype_absolute

    infinity = float("inf")
    representable = is_finite(bound) & (output_norm < to_dtype_largest)
    bound = tl.where(guaranteed & representable, bound, infinity)
    codes_read = tl.sum(code_tokens, 0)
    exact_from = tl.maximum(pages * PAGE_SIZE, oldest + 1)
    tl.store(fields + _TV, tl.where(guaranteed, rounded_tv, infinity))
    tl.store(fields + _OUTPUT, bound)
    tl.store(fields + _KEY_ERROR, tl.where(guaranteed, tl.maximum(bound - e_val, 0.0), infinity))
    tl.store(fields + _E_VAL, e_val)
    tl.store(fields + _LARGEST_RADIUS, c_max)
    tl.store(fields + _CERTIFICATE_MASS, mass_as_codes)
    tl.store(fields + _CERTIFICATE_TOKENS, codes_read)
    tl.store(fields + _TOKENS, codes_read + (position + 1 - exact_from).to(tl.float32))
