"""Stage 2: merge the splits of a read and make its certificate from the page records.

A program owns one query row. Splits merge in index order; certificate sums run over pages in fixed blocks: bits depend on
the row alone. The formulas are those of `torch_witcert.ops.certificate`, in its order and with its names.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import arithmetic as ar
from ..certificate import Field
from ..storage import POSITION_OVERFLOW, SOURCE_CODES, Note
from .primitives import LN_2, NORM_ABSOLUTE, exponential_gap, exponential_minus_one, is_finite, round_to_dtype
from .records import MASS, RADIUS, RECORDS, REFERENCE, SCALED_MASS, STATISTICS, TOP

#: Most pages that a program sums at a time.
PAGE_BLOCK = 1024

_RECORD_REFERENCE = tl.constexpr(REFERENCE)
_RECORD_MASS = tl.constexpr(MASS)
_RECORD_SCALED_MASS = tl.constexpr(SCALED_MASS)
_RECORD_TOP = tl.constexpr(TOP)
_RECORD_RADIUS = tl.constexpr(RADIUS)
_RECORDS = tl.constexpr(RECORDS)
_STATISTICS = tl.constexpr(STATISTICS)
_CODES = tl.constexpr(SOURCE_CODES)
_OVERFLOW = tl.constexpr(POSITION_OVERFLOW)
_NOTES = tl.constexpr(Note.COUNT)
_VALUE_NORM = tl.constexpr(Note.VALUE_NORM)
_VALUE_ERROR = tl.constexpr(Note.VALUE_ERROR)
_FIELDS = tl.constexpr(Field.COUNT)
_TV = tl.constexpr(Field.TV)
_OUTPUT = tl.constexpr(Field.OUTPUT)
_KEY_ERROR = tl.constexpr(Field.KEY_ERROR)
_E_VAL = tl.constexpr(Field.VALUE_ERROR)
_LARGEST_RADIUS = tl.constexpr(Field.RADIUS)
_CODE_MASS = tl.constexpr(Field.CODE_MASS)
_CODE_TOKENS = tl.constexpr(Field.CODE_TOKENS)
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


@triton.jit(
    do_not_specialize=[
        "window",
        "new_tokens",
        "first_token",
        "chunk_tokens",
        "scratch_blocks",
        "pages_per_row",
        "pages_per_split",
        "code_splits",
    ],
    do_not_specialize_on_alignment=["positions", "lengths"],
)
def merge_kernel(
    positions,
    lengths,
    page_table,
    source_map,
    page_notes,
    accumulators,
    statistics,
    records,
    exact_norms,
    out,
    lse,
    certificate,
    window,
    new_tokens,
    first_token,
    chunk_tokens,
    scratch_blocks,
    sum_relative,
    code_values,
    exact_values,
    normaliser,
    to_dtype_relative,
    to_dtype_absolute,
    to_dtype_largest,
    lost_mass,
    half_weight_rounding,
    pages_per_row,
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
    row_block = row_head * scratch_blocks + query // ROWS
    lane_of_row = query % ROWS
    statistic = statistics + row_block * (code_splits + 1) * _STATISTICS * ROWS + lane_of_row
    partial = accumulators + row_block * (code_splits + 1) * HEAD_DIM * ROWS + channel * ROWS + lane_of_row

    exact_maximum = tl.load(statistic + code_splits * _STATISTICS * ROWS)
    maximum = exact_maximum
    for split in range(first_split, end_split):
        maximum = tl.maximum(maximum, tl.load(statistic + split * _STATISTICS * ROWS))
    exact_share = tl.exp2(exact_maximum - maximum)
    total = exact_share * tl.load(statistic + (code_splits * _STATISTICS + 1) * ROWS)
    output = exact_share * tl.load(partial + code_splits * HEAD_DIM * ROWS, mask=is_channel, other=0.0)
    for split in range(first_split, end_split):
        share = tl.exp2(tl.load(statistic + split * _STATISTICS * ROWS) - maximum)
        total += share * tl.load(statistic + (split * _STATISTICS + 1) * ROWS)
        output += share * tl.load(partial + split * HEAD_DIM * ROWS, mask=is_channel, other=0.0)
    output = output / total
    output_norm = tl.sqrt(tl.sum(output * output, 0))
    tl.store(out + target * HEAD_DIM + channel, round_to_dtype(output, out.dtype.element_ty), mask=is_channel)
    tl.store(lse + target, (maximum + tl.log2(total)) * LN_2)

    # The exact group starts every sum; lane 0 carries it.
    lane = tl.arange(0, BLOCK)
    is_first = lane == 0
    record = records + row_block * (pages_per_row + 1) * _RECORDS * ROWS + lane_of_row
    exact_record = record + pages_per_row * _RECORDS * ROWS
    exact_mass = exact_share * tl.load(exact_record + _RECORD_MASS * ROWS) / total
    exact_radius = tl.load(exact_record + _RECORD_RADIUS * ROWS)
    exact_top = exact_share / total
    exact_norm = tl.load(exact_norms + row_block * ROWS + lane_of_row)

    # The page that holds the heaviest token: the first one whose top is the largest.
    heaviest_top = tl.full([BLOCK], float("-inf"), tl.float32)
    heaviest_page = tl.full([BLOCK], pages_per_row, tl.int32)
    for start in range(first_page // BLOCK * BLOCK, pages, BLOCK):
        page = start + lane
        source = tl.load(source_map + row_head * pages_per_row + page, mask=page < pages, other=0)
        is_read = (page >= first_page) & (page < pages) & (source == _CODES)
        top = tl.load(record + (page * _RECORDS + _RECORD_TOP) * ROWS, mask=is_read, other=float("-inf"))
        heaviest_page = tl.where(top > heaviest_top, page, heaviest_page)
        heaviest_top = tl.maximum(heaviest_top, top)
    code_top = tl.max(heaviest_top, 0)
    exact_is_heaviest = exact_maximum >= code_top
    x_top = tl.exp2(tl.maximum(code_top, exact_maximum) - maximum) / total
    heaviest_page = tl.min(tl.where(heaviest_top == code_top, heaviest_page, pages_per_row), 0)
    heaviest = tl.where(exact_is_heaviest, pages_per_row, heaviest_page)

    lost = tl.where(exact_is_heaviest, lost_mass * exact_mass, 0.0)
    apart = tl.where(exact_is_heaviest, exact_top, 0.0)
    exact_rest_high = tl.maximum(exact_mass - apart, 0.0) + lost
    exact_rest_low = tl.maximum(exact_mass - apart - lost, 0.0)
    grow = exponential_minus_one(exact_radius)
    shrink = grow / (1.0 + grow)
    gap = exponential_gap(exact_radius)
    largest_radius = tl.where(is_first, exact_radius, 0.0)
    heaviest_radius = tl.where(is_first, tl.where(exact_is_heaviest, exact_radius, 0.0), 0.0)
    excess = tl.where(is_first, exact_mass * grow, 0.0)
    lower = tl.where(is_first, exact_mass * (1.0 - shrink), 0.0)
    pinsker = tl.where(is_first, exact_mass * gap, 0.0)
    spread = tl.where(is_first, exact_mass * grow * grow, 0.0)
    weighted = tl.where(is_first, exact_mass * grow * exact_norm, 0.0)
    square = tl.where(is_first, exact_mass * exact_norm * exact_norm, 0.0)
    largest_norm = tl.where(is_first, exact_norm, 0.0)
    rest = tl.where(is_first, exact_rest_high, 0.0)
    rest_excess = tl.where(is_first, exact_rest_high * grow, 0.0)
    rest_shrink = tl.where(is_first, exact_rest_high * shrink, 0.0)
    rest_pinsker = tl.where(is_first, exact_rest_high * gap, 0.0)
    rest_lower = tl.where(is_first, exact_rest_low * (1.0 - shrink), 0.0)
    code_mass = tl.zeros([BLOCK], tl.float32)
    code_norm = tl.zeros([BLOCK], tl.float32)
    value_error = tl.zeros([BLOCK], tl.float32)
    code_tokens = tl.zeros([BLOCK], tl.int32)
    for start in range(first_page // BLOCK * BLOCK, pages, BLOCK):
        page = start + lane
        source = tl.load(source_map + row_head * pages_per_row + page, mask=page < pages, other=0)
        is_read = (page >= first_page) & (page < pages) & (source == _CODES)
        reference = tl.load(record + (page * _RECORDS + _RECORD_REFERENCE) * ROWS, mask=is_read, other=float("-inf"))
        share = tl.exp2(reference - maximum) / total
        mass = share * tl.load(record + (page * _RECORDS + _RECORD_MASS) * ROWS, mask=is_read, other=0.0)
        scaled_mass = share * tl.load(record + (page * _RECORDS + _RECORD_SCALED_MASS) * ROWS, mask=is_read, other=0.0)
        radius = tl.load(record + (page * _RECORDS + _RECORD_RADIUS) * ROWS, mask=is_read, other=0.0)
        physical = tl.load(page_table + row * pages_per_row + page, mask=is_read, other=0).to(tl.int64)
        notes = page_notes + (physical * KV_HEADS + head) * _NOTES
        norm = tl.load(notes + _VALUE_NORM, mask=is_read, other=0.0)
        note = tl.load(notes + _VALUE_ERROR, mask=is_read, other=0.0)

        is_heaviest = page == heaviest
        lost_here = tl.where(is_heaviest, lost_mass * mass, 0.0)
        apart_here = tl.where(is_heaviest, x_top, 0.0)
        rest_high = tl.maximum(mass - apart_here, 0.0) + lost_here
        rest_low = tl.maximum(mass - apart_here - lost_here, 0.0)
        grow_here = exponential_minus_one(radius)
        shrink_here = grow_here / (1.0 + grow_here)
        gap_here = exponential_gap(radius)

        largest_radius = tl.where(radius <= largest_radius, largest_radius, radius)
        heaviest_radius = tl.where(is_heaviest, radius, heaviest_radius)
        excess += mass * grow_here
        lower += mass * (1.0 - shrink_here)
        pinsker += mass * gap_here
        spread += mass * grow_here * grow_here
        weighted += mass * grow_here * norm
        square += mass * norm * norm
        largest_norm = tl.maximum(largest_norm, norm)
        rest += rest_high
        rest_excess += rest_high * grow_here
        rest_shrink += rest_high * shrink_here
        rest_pinsker += rest_high * gap_here
        rest_lower += rest_low * (1.0 - shrink_here)
        code_mass += mass
        code_norm += mass * norm
        value_error += scaled_mass * note
        in_page = (page + 1) * PAGE_SIZE - tl.maximum(oldest + 1, page * PAGE_SIZE)
        code_tokens += tl.where(is_read, in_page, 0)

    up = 1.0 + sum_relative
    down = 1.0 - sum_relative
    # NaN must survive as "no guarantee"; a maximum over lanes would drop it.
    guaranteed = tl.min((largest_radius <= _RADIUS_LIMIT).to(tl.int32), 0) > 0
    # So must a NaN among the weights, which the minimum of the bounds passes over.
    guaranteed = guaranteed & is_finite(total)
    c_max = tl.max(largest_radius, 0)
    e_plus = tl.sum(excess, 0) * up + _GAP
    e_plus = e_plus + _ABSOLUTE * (1.0 + e_plus)
    a_minus = tl.maximum(tl.sum(lower, 0) * down - _ABSOLUTE, 0.0)
    grow_max = exponential_minus_one(c_max * up)
    tanh = grow_max / (grow_max + 2.0)
    tv = _smaller(tanh, _ratio(e_plus, a_minus))
    tv = _smaller(tv, tl.sqrt((tl.sum(pinsker, 0) * up + _GAP) * 0.5))

    x = tl.minimum(x_top * up, 1.0)
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
    tl.store(fields + _CODE_MASS, mass_as_codes)
    tl.store(fields + _CODE_TOKENS, codes_read.to(tl.float32))
    tl.store(fields + _TOKENS, (codes_read + position + 1 - exact_from).to(tl.float32))
