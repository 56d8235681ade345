"""The quantizers of every format: the step bound, the rounding of scales, page notes, packing, outlier channels, hostile pages."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_witcert.ops.arithmetic import RADIUS_RELATIVE, SCALE_FLOOR
from torch_witcert.ops.codes import decode, encode, pack, unpack
from torch_witcert.ops.dither import dither
from torch_witcert.ops.formats import DEFAULT, KEY_GROUP, VALUE_GROUP, KeyFormat, StoreFormat, ValueFormat
from torch_witcert.ops.quantize import (
    QuantizedPage,
    dequantize_keys,
    dequantize_values,
    norm_up,
    quantize_page,
    round_up_to_bfloat16,
)
from torch_witcert.ops.storage import HEAD_DIMS, MODEL_DTYPES, PAGE_SIZES, Note, StoreShape, tensor_shapes
from torch_witcert.testing.generators import (
    KEY_FORMATS,
    KEY_KINDS,
    VALUE_FORMATS,
    fits,
    hot_entry,
    make_outlier_channels,
    one_hot_values,
)

PAGES = (4, 2)
#: What fp32 rounding of x - zero and of the division can add to an error, relative to the largest error of the grid.
STEP_EXCESS = 2.0**-14
STORE_FORMATS = [StoreFormat(key, value) for key, value in product(KEY_FORMATS, VALUE_FORMATS)]


class Case(NamedTuple):
    """Exact pages [4, 2, P, D] and what it takes to store them."""

    keys: torch.Tensor
    values: torch.Tensor
    store_format: StoreFormat
    outlier_channels: torch.Tensor
    k_dither: torch.Tensor | None
    v_dither: torch.Tensor | None

    def quantize(self) -> QuantizedPage:
        return quantize_page(*self)

    @property
    def is_outlier(self) -> torch.Tensor:
        """bool [2, 1, D]."""
        mask = torch.zeros(PAGES[1], self.keys.shape[-1], dtype=torch.bool)
        if self.store_format.key.outlier_pairs:
            mask.scatter_(1, self.outlier_channels.long(), True)
        return mask[:, None]


def case_of(keys: torch.Tensor, values: torch.Tensor, store_format: StoreFormat = DEFAULT, seed: int = 0) -> Case:
    page_size, dim = keys.shape[-2:]
    generator = torch.Generator().manual_seed(seed)
    channels = make_outlier_channels(store_format.key, PAGES[1], dim, generator)
    page_keys = torch.randint(2**63 - 1, keys.shape[:-3], generator=generator)[..., None].expand(keys.shape[:-2])
    dithers = (
        dither(page_keys, seed % 3, is_value, part.dither, page_size, dim)
        for is_value, part in enumerate((store_format.key, store_format.value))
    )
    return Case(keys, values, store_format, channels, *dithers)


@st.composite
def cases(draw) -> Case:
    """Finite pages of every kind in every format."""
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    store_format = draw(st.sampled_from(STORE_FORMATS))
    head_dim = draw(st.sampled_from([size for size in HEAD_DIMS if fits(store_format.key, size)]))
    shape = (*PAGES, draw(st.sampled_from((*PAGE_SIZES, 256))), head_dim)
    dtype = draw(st.sampled_from(MODEL_DTYPES))
    largest = torch.finfo(dtype).max

    def make() -> torch.Tensor:
        x = KEY_KINDS[draw(st.sampled_from(sorted(KEY_KINDS)))](shape, generator)
        scale = 10 ** (4 * torch.rand(shape[-1], generator=generator) - 2)
        return (x * scale).clamp(-largest, largest).to(dtype)

    return case_of(make(), make(), store_format, seed)


class Errors(NamedTuple):
    """Float64, of pages [4, 2, P, D]; broadcast where a scale is shared."""

    key: torch.Tensor  # K - K^
    value: torch.Tensor  # V - V^
    key_step: torch.Tensor
    value_step: torch.Tensor  # 0 for exact values
    key_offset: torch.Tensor  # K - zero
    value_offset: torch.Tensor  # V - zero


def errors_of(case: Case, page: QuantizedPage) -> Errors:
    keys, values, key, value = case.keys.double(), case.values.double(), case.store_format.key, case.store_format.value
    restored = dequantize_keys(
        page.k_codes, page.k_scale, page.k_zero, page.k_bypass, case.store_format, case.outlier_channels, case.k_dither
    )
    restored_values = dequantize_values(page.v_codes, page.v_scale, page.v_zero, case.store_format, case.v_dither)
    key_step, value_step = page.k_scale.double(), page.v_scale.double()
    key_step = key_step.repeat_interleave(KEY_GROUP, -1) if key.per_token else key_step[..., None, :]
    key_zero = page.k_zero.double()[..., None, :] if key.is_asymmetric else 0.0
    value_zero = 0.0
    if value.is_grouped:
        value_step, value_zero = (x.double().repeat_interleave(VALUE_GROUP, -1) for x in (value_step, page.v_zero))
    if value.is_exact:
        value_step = torch.zeros(1, dtype=torch.float64)
    offset = torch.where(case.is_outlier, 0.0, keys - key_zero)
    return Errors(keys - restored, values - restored_values, key_step, value_step, offset, values - value_zero)


@given(cases())
def test_error_is_at_most_the_largest_error_of_the_grid(case):
    errors = errors_of(case, case.quantize())
    key_limit = errors.key_step * case.store_format.key.grid.max_error * (1 + STEP_EXCESS)
    assert (errors.key.abs() <= key_limit).all()
    value_limit = errors.value_step * case.store_format.value.grid.max_error * (1 + STEP_EXCESS)
    assert (errors.value.abs() <= value_limit).all()


def test_the_radius_covers_the_excess_over_half_a_step():
    assert STEP_EXCESS <= RADIUS_RELATIVE


@given(cases())
def test_nothing_needs_clipping(case):
    """Every entry lies within the outermost codes, up to the half-range's own rounding in fp32."""
    errors = errors_of(case, case.quantize())
    key, value = case.store_format.key, case.store_format.value
    assert (errors.key_offset.abs() <= key.grid.levels * errors.key_step * (1 + 2.0**-23)).all()
    if not value.is_exact:
        assert (errors.value_offset.abs() <= value.grid.levels * errors.value_step * (1 + 2.0**-23)).all()


@given(cases())
def test_scales_are_rounded_up_and_tight(case):
    page = case.quantize()
    errors = errors_of(case, page)
    key, value = case.store_format.key, case.store_format.value
    reach = errors.key_offset.abs()
    reach = reach.unflatten(-1, (-1, KEY_GROUP)).amax(-1) if key.per_token else reach.amax(-2)
    pairs = [(page.k_scale.double(), reach, key.grid)]
    if not value.is_exact:
        largest = errors.value_offset.abs().unflatten(-1, (value.groups(case.values.shape[-1]), -1)).amax(-1)
        pairs.append((page.v_scale.double(), largest, value.grid))
    for index, (scale, reach, grid) in enumerate(pairs):
        wanted = reach / grid.levels
        least = SCALE_FLOOR
        if index == 0 and not key.per_token:
            least = torch.where(case.is_outlier[:, 0], 0.0, least).double()
        assert (scale >= wanted * (1 - 2.0**-23)).all()
        assert (scale <= (wanted * (1 + 2.0**-7 + 2.0**-22)).clamp_min(SCALE_FLOOR)).all()
        assert (scale >= least).all()


def true_notes(case: Case, page: QuantizedPage) -> dict[int, torch.Tensor]:
    """What the page notes bound, in float64 [4, 2, P]."""
    errors = errors_of(case, page)
    scaled = torch.where(errors.key == 0, 0.0, errors.key / errors.key_step)
    value_error = errors.value.norm(dim=-1)
    if not case.store_format.value.is_exact:
        value_error = value_error / page.v_scale.double().amax(-1)
    return {
        Note.VALUE_NORM: case.values.double().norm(dim=-1),
        Note.VALUE_ERROR: value_error,
        Note.KEY_NORM: case.keys.double().norm(dim=-1),
        Note.KEY_ERROR: errors.key.norm(dim=-1),
        Note.KEY_ERROR_SCALED: scaled.norm(dim=-1),
    }


@given(cases())
def test_page_notes_are_upper_bounds_in_float64(case):
    page = case.quantize()
    truth = true_notes(case, page)
    assert len(truth) == Note.COUNT
    for note, value in truth.items():
        assert (page.page_notes[..., note].double() >= value.amax(-1)).all(), note


@pytest.mark.parametrize("store_format", STORE_FORMATS[::5], ids=lambda f: f.name)
def test_page_notes_are_tight_on_ordinary_pages(store_format):
    generator = torch.Generator().manual_seed(0)
    for dtype in MODEL_DTYPES:
        keys, values = (torch.randn(*PAGES, 64, 64, generator=generator).to(dtype) for _ in range(2))
        case = case_of(keys, values, store_format)
        page = case.quantize()
        for note, value in true_notes(case, page).items():
            assert (page.page_notes[..., note].double() <= 1.001 * value.amax(-1)).all()


def hostile_pages(kind: str, dtype: torch.dtype) -> torch.Tensor:
    noise = torch.randn(*PAGES, 16, 64, generator=torch.Generator().manual_seed(7))
    largest = torch.finfo(dtype).max
    pages = {
        "zeros": noise * 0,
        "constant": torch.full_like(noise, 3.7),
        "tiny": noise * 1e-36,
        "ends": noise.sign() * min(70144.0, largest),
        "largest": noise.sign() * largest,
        "far_apart": noise * torch.where(torch.arange(64) % 2 == 0, 1.0, 1e8),
    }
    return pages[kind].clamp(-largest, largest).to(dtype)


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("kind", ["zeros", "constant", "tiny", "ends", "largest", "far_apart"])
def test_hostile_pages_come_back_within_a_step(kind, dtype):
    """Finite, and no further off than the largest error of the grid, in every format."""
    pages = hostile_pages(kind, dtype)
    for store_format in STORE_FORMATS:
        case = case_of(pages, pages, store_format)
        page = case.quantize()
        assert all(part.isfinite().all() for part in page[:-1]), store_format
        errors = errors_of(case, page)
        for error, step, grid in (
            (errors.key, errors.key_step, store_format.key.grid),
            (errors.value, errors.value_step, store_format.value.grid),
        ):
            assert (error.abs() <= step * grid.max_error * (1 + STEP_EXCESS)).all(), store_format


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_what_has_no_range_is_stored_at_the_smallest_scale(dtype):
    for store_format in STORE_FORMATS:
        zeros = torch.zeros(*PAGES, 16, 64, dtype=dtype)
        case = case_of(zeros, zeros, store_format)
        errors = errors_of(case, case.quantize())
        assert (errors.key.abs() <= SCALE_FLOOR / 2).all() and (errors.value.abs() <= SCALE_FLOOR / 2).all()
        if not store_format.key.is_asymmetric and not store_format.value.is_grouped:
            continue
        constant = torch.full_like(zeros, 3.7)
        case = case_of(constant, constant, store_format)
        page = case.quantize()
        errors = errors_of(case, page)
        if store_format.key.is_asymmetric:
            assert (errors.key.abs() <= SCALE_FLOOR / 2).all()
            assert ((errors.key_step == SCALE_FLOOR) | case.is_outlier).all()
        if store_format.value.is_grouped:
            assert torch.equal(page.v_zero, constant[..., : page.v_zero.shape[-1]])
            assert (errors.value.abs() <= SCALE_FLOOR / 2).all()


@pytest.mark.parametrize(
    "key", [key for key in KEY_FORMATS if key.outlier_pairs], ids=lambda key: StoreFormat(key).name
)
def test_outlier_channels_are_exact_and_out_of_every_range(key):
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(*PAGES, 16, 64, generator=generator).bfloat16()
    case = case_of(keys, keys, StoreFormat(key))
    apart = torch.where(case.is_outlier, keys * 1e8, keys)
    plain, page = case.quantize(), case._replace(keys=apart).quantize()
    assert torch.equal(page.k_scale, plain.k_scale) and torch.equal(page.k_codes, plain.k_codes)
    assert torch.equal(page.k_zero, plain.k_zero)
    error = errors_of(case._replace(keys=apart), page).key
    outlier = case.is_outlier.expand_as(error)
    assert (error[outlier] == 0).all() and (error[~outlier] != 0).any()
    at = case.outlier_channels.long()[:, None].expand(*page.k_bypass.shape)
    assert torch.equal(page.k_bypass, apart.gather(-1, at))


@given(st.sampled_from((4, 6, 8)), st.sampled_from(HEAD_DIMS), st.integers(0, 2**31))
def test_packing_round_trip_without_padding(bits, count, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (3, count), generator=generator, dtype=torch.int16)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, count * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)


def test_signed_codes_survive_packing():
    codes = torch.arange(-128, 128, dtype=torch.int16)
    assert torch.equal(unpack(pack(codes, 8).view(torch.int8), 8), codes)


def test_packed_layout():
    """Four bits: the first of two neighbours in the low half. Six bits: such a row of low halves, then a row of high bits."""
    codes = torch.tensor([0x21, 0x12, 0x03, 0x3F], dtype=torch.int16)
    assert pack(codes & 15, 4).tolist() == [0x21, 0xF3]
    assert pack(codes, 6).tolist() == [0x21, 0xF3, 0b11_00_01_10]


FP8 = KeyFormat("fp8", "symmetric").grid


def test_fp8_decodes_as_torch_does():
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    assert torch.equal(decode(codes, FP8), codes.view(torch.float8_e4m3fn).float())


def test_fp8_encodes_as_torch_does_bit_for_bit():
    finite = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (finite[1:] + finite[:-1]) / 2
    edges = torch.cat([finite, middle])
    edges = torch.cat([edges, edges.nextafter(torch.tensor(torch.inf)), edges.nextafter(torch.tensor(0.0))])
    noise = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    x = torch.cat([edges, noise, noise * 100, noise * 2.0**-7, noise * 2.0**-20])
    x = torch.cat([x, -x])
    x = x[x.abs() <= FP8.levels]
    value, code = encode(x, FP8)
    expected = x.to(torch.float8_e4m3fn)
    assert torch.equal(code.to(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(value, expected.float())


def test_fp8_does_not_pass_its_largest_value():
    just_above = torch.tensor([448.0]).nextafter(torch.tensor(torch.inf))
    assert encode(just_above, FP8)[0] == 448


def test_bfloat16_ties_exceed_half_a_step_and_stay_below_the_slack():
    """zero / scale a half integer and a tiny x: x - zero rounds to a tie, so that |e| passes scale / 2 (DESIGN section 7)."""
    generator = torch.Generator().manual_seed(0)
    ends = 255 * torch.rand(4096, 1, 2, 64, generator=generator) * torch.tensor([[1.0], [-1.0]])
    keys = torch.cat([ends, torch.full((4096, 1, 7, 64), 1e-9), torch.full((4096, 1, 7, 64), -1e-9)], 2).bfloat16()
    page = quantize_page(keys, keys)
    key_error = keys.double() - dequantize_keys(page.k_codes, page.k_scale, page.k_zero)
    step = page.k_scale.double()[..., None, :]
    tie = (page.k_zero.double()[..., None, :] / step).remainder(1) == 0.5
    beyond = (key_error.abs() > step / 2) & tie
    assert beyond.sum() > 100
    assert (key_error.abs() <= step / 2 * (1 + STEP_EXCESS)).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_page_that_is_not_finite_has_infinite_notes_and_finite_codes(side, poison):
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(*PAGES, 16, 64, generator=generator).bfloat16() for _ in range(2))
    others = torch.ones(PAGES, dtype=torch.bool)
    others[2, 1] = False
    for store_format in STORE_FORMATS:
        clean = case_of(keys, values, store_format)
        dirty = clean._replace(keys=keys.clone(), values=values.clone())
        getattr(dirty, side)[2, 1, 5, 7] = poison
        stored, expected = dirty.quantize(), clean.quantize()
        assert (stored.page_notes[2, 1] == float("inf")).all()
        for part, wanted in zip(stored, expected, strict=True):
            if part.numel():
                assert torch.equal(part[others], wanted[others])
        for part in stored[:-1]:
            assert part.isfinite().all()
        assert errors_of(clean, stored).key.isfinite().all() and errors_of(clean, stored).value.isfinite().all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_a_stored_page_has_the_shapes_and_dtypes_of_the_store(head_dim, dtype):
    keys = torch.randn(*PAGES, 16, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    for store_format in STORE_FORMATS:
        if not fits(store_format.key, head_dim):
            continue
        shapes = tensor_shapes(PAGES[0], 1, PAGES[1], 16, head_dim, dtype, store_format)
        page = case_of(keys, keys, store_format).quantize()._asdict()
        assert {name: (tuple(part.shape), part.dtype) for name, part in page.items()} == {
            name: shapes[name] for name in page
        }


def test_nbytes_is_what_is_allocated():
    for store_format, head_dim, page_size in product(STORE_FORMATS, HEAD_DIMS, (16, 128)):
        if not fits(store_format.key, head_dim):
            continue
        shape = StoreShape(1, 2, 2, page_size, head_dim, torch.bfloat16, store_format)
        store = shape.allocate("cpu")
        assert shape.nbytes() == sum(part.untyped_storage().nbytes() for part in store), store_format
        pool = sum(part.untyped_storage().nbytes() for part in store[:-2])
        assert shape.page_nbytes() * shape.num_pages == pool


@given(st.integers(0, 0x7F7F0000))
def test_round_up_to_bfloat16_is_the_next_one(bits):
    x = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    up = round_up_to_bfloat16(x)
    assert up.float() >= x
    below = (up.view(torch.int16) - 1).view(torch.bfloat16).float()
    assert up == 0 or below < x


@given(st.integers(0, 2**31), st.floats(-38, 18))
def test_norm_up_is_above_the_norm(seed, exponent):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)) * 10**exponent
    assert (norm_up(x).double() >= x.double().norm(dim=-1)).all()


@pytest.mark.parametrize("value", [value for value in VALUE_FORMATS if not value.is_dithered], ids=lambda v: v.element)
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_one_hot_values_survive_quantization_exactly(dtype, value):
    values = one_hot_values(torch.arange(64)[None], 2, 64, dtype, value)
    case = Case(values, values, StoreFormat(value=value), torch.empty(0), None, None)
    error = errors_of(case, case.quantize()).value
    assert (error[values > 0] == 0).all()
    # Four bits have no code for the middle of a range: a group of zeros is half of the smallest scale off.
    assert (error.abs() <= (SCALE_FLOOR / 2 if value.is_grouped else 0)).all()
    assert values.amax().item() == hot_entry(value)


@pytest.mark.parametrize("dither_mode", ["stream", "tile"])
def test_one_hot_values_refuse_dither(dither_mode):
    with pytest.raises(ValueError, match="dither"):
        one_hot_values(torch.arange(4)[None], 1, 64, torch.float32, ValueFormat(dither=dither_mode))
