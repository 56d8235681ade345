"""Which values to read exact, and the bound on what the others change."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiered_reads import DIM, PAGE, random_read

from torch_witcert.ops.arithmetic import Arithmetic
from torch_witcert.ops.formats import StoreFormat
from torch_witcert.ops.quantize import dequantize_values, quantize_page
from torch_witcert.ops.storage import Note
from torch_witcert.policy.values import choose_values, page_value_error, value_error_bound


def chosen(mass: list[float], eta: list[float], is_code: list[bool] | None = None, v_tol: float = 0.05) -> list[int]:
    mask = torch.tensor([True] * len(mass) if is_code is None else is_code, dtype=torch.bool)
    mass, eta = (torch.tensor(part, dtype=torch.float64) for part in (mass, eta))
    return choose_values(mass, eta, mask, v_tol).nonzero()[:, 0].tolist()


# --- eta -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_eta_bounds_the_error_in_the_units_of_v(element, dtype, size):
    """Float64 over the values that are really read, zero tolerance; and it grows with V, as an absolute error does."""
    form = StoreFormat.parse(f"int8/asymmetric/0/none+{element}/none")
    values = torch.randn(40, 1, PAGE, DIM, generator=torch.Generator().manual_seed(0))
    values = (values * size * torch.linspace(0.01, 1, PAGE)[:, None]).to(dtype)
    page = quantize_page(values, values, form)
    read = dequantize_values(page.v_codes, page.v_scale, page.v_zero, form)
    true = (values.double() - read).norm(dim=-1).amax(-1)
    eta = page_value_error(page.page_notes, page.v_scale)
    assert eta.shape == true.shape and (true <= eta).all() and (true > 0).all()
    assert (eta <= 60 * size).all()


def test_eta_of_exact_values():
    form = StoreFormat.parse("int8/asymmetric/0/none+exact/none")
    values = torch.randn(3, 1, PAGE, DIM, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    values[1, 0, 3, 3] = math.nan
    page = quantize_page(values, values, form)
    assert page_value_error(page.page_notes, page.v_scale)[:, 0].tolist() == [0, math.inf, 0]


# --- the choice ----------------------------------------------------------------------------------------------------------


def test_mass_times_eta_decides():
    """Neither a heavy page with good values nor a bad page that nobody reads."""
    assert chosen([0.9, 0.05, 0.05], [0.01, 0.5, 2.0]) == [2]
    assert chosen([0.9, 0.05, 0.05], [0.01, 0.5, 2.0], v_tol=0.008) == [0, 1, 2]


def test_the_limit_is_inclusive():
    assert chosen([0.5, 0.5], [0.125, 0.1251], v_tol=0.0625) == [1]
    assert chosen([0.5, 0.5], [0.0, 1e-30], v_tol=0) == [1]


def test_edges():
    assert chosen([], []) == []
    assert chosen([1.0], [0.05]) == [] and chosen([1.0], [0.0501]) == [0]
    assert chosen([0.25] * 4, [1.0] * 4) == [0, 1, 2, 3]
    assert chosen([1.0, 0.0], [1.0, 1e30]) == [0]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_no_number_is_promoted(broken):
    assert chosen([0.0, 0.0], [broken, 0.0]) == [0]
    assert chosen([broken, 0.0], [1.0, 0.0]) == [0]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_other_groups_may_hold_any_bytes(garbage):
    is_code = [False, True, False]
    assert chosen([garbage, 0.5, 0.2], [0.0, 0.01, garbage], is_code) == []
    mask = torch.tensor(is_code)
    assert value_error_bound(torch.tensor([garbage, 0.5, 0.2]), torch.tensor([0.0, 0.0, garbage]), mask) < 1e-200


# --- the bound -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**31), st.integers(1, 8), st.sampled_from((0.0, 1e-6, 1.0, 1e6)), st.booleans())
@settings(max_examples=150)
def test_left_over_value_errors(seed, pages, size, aligned):
    """|| sum w (V^ - V) || over the pages read as codes, float64, zero tolerance; aligned errors attain the bound."""
    generator = torch.Generator().manual_seed(seed)
    weight = (
        torch.randn(16, pages * 4, generator=generator, dtype=torch.float64).mul(3).softmax(-1).unflatten(-1, (-1, 4))
    )
    error = torch.randn(16, pages, 4, 6, generator=generator, dtype=torch.float64)
    if aligned:
        error = torch.rand(16, pages, 1, 1, generator=generator, dtype=torch.float64) * torch.ones(4, 6)
    error = error * size
    eta = error.norm(dim=-1).amax(-1)
    as_codes = torch.rand(16, pages, generator=generator) < 0.7
    true = torch.einsum("rjp,rjpd->rd", weight, torch.where(as_codes[..., None, None], error, 0.0)).norm(dim=-1)
    bound = value_error_bound(weight.sum(-1), eta, as_codes)
    assert (true <= bound).all()
    assert (bound[~as_codes.any(-1)] == 0).all()
    if aligned:
        assert (bound <= true * (1 + 1e-9) + 1e-200).all()


@pytest.mark.parametrize("seed", range(4))
def test_pages_that_are_really_quantized(seed):
    """The bound holds for the weights that the masses are of, by codes or exact, and not for any others."""
    read = random_read(seed, 20)
    eta = page_value_error(read.stored.page_notes, read.stored.v_scale)[:, 0]
    error = read.code_values - read.values.double()
    for scores in (read.code_scores, read.exact_scores):
        mass = read.masses(scores)[:-1]
        left = ~choose_values(mass, eta, torch.ones(20, dtype=torch.bool), 0.02)
        assert left.any()
        weight = torch.exp(scores - scores.flatten().logsumexp(0)) * mass.sum()
        true = torch.einsum("jp,jpd->d", torch.where(left[:, None], weight, 0.0), error).norm()
        assert true <= value_error_bound(mass, eta, left) <= 0.02 * 20


def test_masses_of_other_weights_give_no_bound():
    """The judge rejects what is false: masses of a scoring pass say nothing of a pass whose weights differ."""
    eta, as_codes = torch.tensor([1.0, 1.0]), torch.tensor([True, False])
    scoring, output = torch.tensor([0.01, 0.99]), torch.tensor([0.2, 0.8])
    true = 0.2
    assert value_error_bound(scoring, eta, as_codes) < true <= value_error_bound(output, eta, as_codes) + 1e-8
    upper = torch.tensor([0.25, 0.9])  # upper bounds of masses, for all weights below them
    assert true <= value_error_bound(upper, eta, as_codes)


def test_the_product_of_a_read_is_never_larger():
    """Sum of p~ times value scale, with the note as it is: the same unit, each token's own scale."""
    read = random_read(9, 12)
    weight = read.code_scores.flatten().softmax(0).view(12, PAGE)
    scale = read.stored.v_scale[:, 0].double().amax(-1)
    note = read.stored.page_notes[:, 0, Note.VALUE_ERROR]
    pages = torch.ones(12, dtype=torch.bool)
    tighter = value_error_bound((weight * scale).sum(-1), note, pages)
    wider = value_error_bound(
        weight.sum(-1), page_value_error(read.stored.page_notes, read.stored.v_scale)[:, 0], pages
    )
    error = torch.einsum("jp,jpd->d", weight, read.code_values - read.values.double()).norm()
    assert error <= tighter < wider


def test_masses_of_a_float32_pass_are_rounded_up():
    arithmetic = Arithmetic.of(
        64, 16, 64, 8, 1, torch.bfloat16, StoreFormat.parse("int8/asymmetric/0/none+int4/none"), 0
    )
    mass, eta, as_codes = torch.tensor([0.3, 0.7]), torch.tensor([0.1, 0.2]), torch.tensor([True, True])
    exact = 0.3 * 0.1 + 0.7 * 0.2
    assert exact * (1 + 2.0**-13) < value_error_bound(mass, eta, as_codes, arithmetic) < exact * 1.001


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_no_guarantee_is_infinite(broken):
    pages = torch.tensor([True, True])
    assert value_error_bound(torch.tensor([0.0, 1.0]), torch.tensor([broken, 0.1]), pages).isposinf()
    assert value_error_bound(torch.tensor([broken, 1.0]), torch.tensor([0.1, 0.1]), pages).isposinf()
    assert value_error_bound(torch.ones(0), torch.ones(0), torch.ones(0, dtype=torch.bool)) == 0


# --- arguments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("v_tol", [-0.1, math.nan, math.inf, "0.05", True])
def test_v_tol_out_of_range(v_tol):
    with pytest.raises(ValueError, match=r"v_tol must be a number in \[0, .*\], got " + repr(v_tol)):
        choose_values(torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.bool), v_tol)


def test_wrong_tensors():
    with pytest.raises(ValueError, match="is_code must be a bool tensor, got torch.float32"):
        choose_values(torch.ones(2), torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match=r"mass, eta, as_codes must have the same last dimension.*\(3,\)"):
        value_error_bound(torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=rf"page_notes must end in a dimension of {Note.COUNT}, got shape \(2, 3\)"):
        page_value_error(torch.ones(2, 3), torch.ones(2, PAGE, 1))
