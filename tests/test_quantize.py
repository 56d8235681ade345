"""The quantizers of the default recipe: the step bound, the rounding of scales, page notes, hostile pages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_witcert.ops.arithmetic import RADIUS_RELATIVE, SCALE_FLOOR
from torch_witcert.ops.quantize import (
    LEVELS,
    dequantize_keys,
    dequantize_values,
    norm_up,
    quantize_page,
    round_up_to_bfloat16,
)
from torch_witcert.ops.storage import MODEL_DTYPES, Note
from torch_witcert.testing.generators import HOT, KEY_KINDS, one_hot_values

PAGES = (4, 2)
#: What fp32 rounding of x - zero and of the division can add to half a step.
STEP_EXCESS = 2.0**-14


@st.composite
def pages(draw):
    """Finite keys and values [4, 2, P, D]."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (*PAGES, draw(st.sampled_from((16, 32, 64))), draw(st.sampled_from((64, 128))))
    dtype = draw(st.sampled_from(MODEL_DTYPES))
    largest = torch.finfo(dtype).max

    def make() -> torch.Tensor:
        x = KEY_KINDS[draw(st.sampled_from(sorted(KEY_KINDS)))](shape, generator)
        scale = 10 ** (4 * torch.rand(shape[-1], generator=generator) - 2)
        return (x * scale).clamp(-largest, largest).to(dtype)

    return make(), make()


def errors(keys: torch.Tensor, values: torch.Tensor):
    page = quantize_page(keys, values)
    key_error = keys.double() - dequantize_keys(page.k_codes, page.k_scale, page.k_zero)
    value_error = values.double() - dequantize_values(page.v_codes, page.v_scale)
    return page, key_error, value_error


@given(pages())
def test_error_is_at_most_half_a_step(page):
    keys, values = page
    stored, key_error, value_error = errors(keys, values)
    half_key_step = stored.k_scale.double()[..., None, :] / 2
    assert (key_error.abs() <= half_key_step * (1 + STEP_EXCESS)).all()
    assert (value_error.abs() <= stored.v_scale.double() / 2 * (1 + STEP_EXCESS)).all()


def test_the_radius_covers_the_excess_over_half_a_step():
    assert STEP_EXCESS <= RADIUS_RELATIVE


@given(pages())
def test_nothing_needs_clipping(page):
    """Every entry lies within the outermost codes, up to the half-range's own rounding in fp32."""
    keys, values = page
    stored = quantize_page(keys, values)
    offset = (keys.double() - stored.k_zero.double()[..., None, :]).abs()
    assert (offset <= LEVELS * stored.k_scale.double()[..., None, :] * (1 + 2.0**-23)).all()
    assert (values.double().abs() <= LEVELS * stored.v_scale.double() * (1 + 2.0**-23)).all()


@given(pages())
def test_scales_are_rounded_up_and_tight(page):
    keys, values = page
    stored = quantize_page(keys, values)
    half_range = (keys.double() - stored.k_zero.double()[..., None, :]).abs().amax(-2)
    largest = values.double().abs().amax(-1, keepdim=True)
    for scale, reach in ((stored.k_scale.double(), half_range), (stored.v_scale.double(), largest)):
        wanted = reach / LEVELS
        assert (scale >= wanted * (1 - 2.0**-23)).all()
        assert (scale <= (wanted * (1 + 2.0**-7 + 2.0**-22)).clamp_min(SCALE_FLOOR)).all()
        assert (scale >= SCALE_FLOOR).all()


@given(pages())
def test_page_notes_are_upper_bounds_in_float64(page):
    keys, values = page
    stored, key_error, value_error = errors(keys, values)
    truth = {
        Note.VALUE_NORM: values.double().norm(dim=-1),
        Note.VALUE_ERROR: value_error.norm(dim=-1) / stored.v_scale.double()[..., 0],
        Note.KEY_NORM: keys.double().norm(dim=-1),
        Note.KEY_ERROR: key_error.norm(dim=-1),
        Note.KEY_ERROR_SCALED: (key_error / stored.k_scale.double()[..., None, :]).norm(dim=-1),
    }
    assert len(truth) == Note.COUNT
    for note, value in truth.items():
        assert (stored.page_notes[..., note].double() >= value.amax(-1)).all(), note


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_page_notes_are_tight_on_ordinary_pages(dtype):
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(*PAGES, 64, 64, generator=generator).to(dtype) for _ in range(2))
    stored, key_error, value_error = errors(keys, values)
    step = stored.k_scale.double()[..., None, :]
    truth = [
        values.double().norm(dim=-1),
        value_error.norm(dim=-1) / stored.v_scale.double()[..., 0],
        keys.double().norm(dim=-1),
        key_error.norm(dim=-1),
        (key_error / step).norm(dim=-1),
    ]
    for note, value in enumerate(truth):
        assert (stored.page_notes[..., note].double() <= 1.001 * value.amax(-1)).all()


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_constant_channels_and_zero_pages(dtype):
    keys = torch.zeros(*PAGES, 16, 64, dtype=dtype)
    stored, key_error, value_error = errors(keys, keys)
    assert (key_error == 0).all() and (value_error == 0).all()
    assert (stored.k_codes == 0).all() and (stored.v_codes == 0).all() and (stored.k_zero == 0).all()

    constant = torch.full_like(keys, 3.7)
    stored, key_error, _ = errors(constant, constant)
    assert (key_error == 0).all()
    assert (stored.k_scale.double() == SCALE_FLOOR).all()


def test_bfloat16_ties_exceed_half_a_step_and_stay_below_the_slack():
    """zero / scale a half integer and a tiny x: x - zero rounds to a tie, so that |e| passes scale / 2 (DESIGN section 7)."""
    generator = torch.Generator().manual_seed(0)
    ends = 255 * torch.rand(4096, 1, 2, 64, generator=generator) * torch.tensor([[1.0], [-1.0]])
    keys = torch.cat([ends, torch.full((4096, 1, 7, 64), 1e-9), torch.full((4096, 1, 7, 64), -1e-9)], 2).bfloat16()
    stored, key_error, _ = errors(keys, keys)
    step = stored.k_scale.double()[..., None, :]
    tie = (stored.k_zero.double()[..., None, :] / step).remainder(1) == 0.5
    beyond = (key_error.abs() > step / 2) & tie
    assert beyond.sum() > 100
    assert (key_error.abs() <= step / 2 * (1 + STEP_EXCESS)).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_page_that_is_not_finite_has_infinite_notes_and_finite_codes(side, poison):
    generator = torch.Generator().manual_seed(0)
    pages = {name: torch.randn(*PAGES, 16, 64, generator=generator).bfloat16() for name in ("keys", "values")}
    clean = quantize_page(**pages)
    pages[side][2, 1, 5, 7] = poison
    stored = quantize_page(**pages)
    assert (stored.page_notes[2, 1] == float("inf")).all()
    for part in stored[:5]:
        assert part.isfinite().all()
    others = torch.ones(PAGES, dtype=torch.bool)
    others[2, 1] = False
    for part, expected in zip(stored, clean, strict=True):
        assert torch.equal(part[others], expected[others])


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


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_one_hot_values_survive_quantization_exactly(dtype):
    values = one_hot_values(torch.arange(64)[None], 2, 64, dtype)
    stored = quantize_page(values, values)
    assert torch.equal(dequantize_values(stored.v_codes, stored.v_scale), values.double())
    assert values.amax().item() == HOT
