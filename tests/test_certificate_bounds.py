"""Every bound of the certificate against the worst score errors that its radii allow."""

from __future__ import annotations

import pytest
import torch
from certificate_cases import (
    ARITHMETIC,
    RADIUS_KINDS,
    WEIGHT_KINDS,
    Case,
    make_case,
    violations,
    worst,
    worst_output,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_witcert.ops import arithmetic as ar
from torch_witcert.ops import certificate as cert
from torch_witcert.testing.corners import (
    corner_rounding,
    shifted_total_variation,
    sign_corners,
    worst_total_variation,
)
from torch_witcert.testing.oracle import total_variation

BATCH = 16


@st.composite
def cases(draw, most_tokens: int = 10) -> Case:
    tokens = draw(st.integers(1, most_tokens))
    groups = draw(st.sampled_from((tokens, draw(st.integers(1, tokens)))))
    kinds = draw(st.sampled_from(WEIGHT_KINDS)), draw(st.sampled_from(RADIUS_KINDS))
    return make_case(*kinds, BATCH, tokens, groups, draw(st.integers(0, 2**31)))


@given(cases())
@settings(max_examples=400)
def test_total_variation_bounds_hold_at_every_sign_corner(case):
    truth, tokens = worst(case), case.weights.shape[1]
    bounds = cert.total_variation_bounds(case.groups())
    for name, bound in zip(bounds._fields, bounds, strict=True):
        assert violations(bound, truth, tokens) == 0, name
    assert violations(bounds.minimum(), truth, tokens) == 0


@given(cases())
@settings(max_examples=400)
def test_float32_bounds_with_arithmetic_exceed_the_truth_without_tolerance(case):
    truth = worst(case)
    bounds = cert.total_variation_bounds(case.groups(torch.float32), ARITHMETIC)
    for name, bound in zip(bounds._fields, bounds, strict=True):
        assert bound.dtype == torch.float32
        assert violations(finished(bound), truth, 0) == 0, name


def finished(bound: torch.Tensor) -> torch.Tensor:
    """How `certify` finishes a bound: the rounding of its last few operations, in float32."""
    return bound * (1 + 2.0**-20) + 2.0**-22


def make_values(kind: str, case: Case, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*case.weights.shape, 3, generator=generator, dtype=torch.float64)
    if kind == "opposed":
        values = values.sign() * values[:, :1].abs()
    elif kind == "huge_massless":
        values[torch.arange(BATCH), case.weights.argmin(-1)] *= 1e4
    elif kind == "common":
        values = values[:, :1] + 1e-3 * values
    elif kind == "heavy":
        values[torch.arange(BATCH), case.weights.argmax(-1)] *= 1e3
    return values


VALUE_KINDS = ("normal", "opposed", "huge_massless", "common", "heavy")


def output_bounds(case: Case, values: torch.Tensor, dtype: torch.dtype, arithmetic=None):
    groups = case.groups(dtype)
    output = (case.weights[..., None] * values).sum(1)
    norms = case.largest_in_groups(values.norm(dim=-1)) * (1 + 2.0**-20)
    variation = cert.total_variation_bounds(groups, arithmetic).minimum()
    none = torch.zeros(BATCH, dtype=dtype)
    return cert.output_bounds(groups, variation, norms.to(dtype), output.norm(dim=-1).to(dtype), none, arithmetic)


@given(cases(9), st.sampled_from(VALUE_KINDS), st.integers(0, 2**31))
@settings(max_examples=300)
def test_output_bounds_hold_at_every_sign_corner(case, kind, seed):
    values = make_values(kind, case, seed)
    truth = worst_output(case, values)
    o1, o2, o3 = output_bounds(case, values, torch.float64)
    assert violations(o1, truth, case.weights.shape[1]) == 0
    assert violations(o2, truth, case.weights.shape[1]) == 0
    assert violations(o3, truth, case.weights.shape[1]) == 0


@given(cases(9), st.sampled_from(VALUE_KINDS), st.integers(0, 2**31))
@settings(max_examples=300)
def test_float32_output_bounds_exceed_the_truth_without_tolerance(case, kind, seed):
    values = make_values(kind, case, seed)
    truth = worst_output(case, values)
    for name, bound in zip(("O1", "O2", "O3"), output_bounds(case, values, torch.float32, ARITHMETIC), strict=True):
        assert violations(bound * (1 + 2.0**-20), truth, 0) == 0, name


@pytest.mark.parametrize("radius_kind", RADIUS_KINDS)
@pytest.mark.parametrize("weight_kind", WEIGHT_KINDS)
def test_bounds_hold_against_a_search_over_many_tokens(weight_kind, radius_kind):
    case = make_case(weight_kind, radius_kind, BATCH, 64, 4, seed=1)
    truth = worst(case)
    values = make_values("normal", case, 2)
    bounds = cert.total_variation_bounds(case.groups())
    for name, bound in zip(bounds._fields, bounds, strict=True):
        assert violations(bound, truth, 64) == 0, name
    output_truth = worst_output(case, values)
    for bound in output_bounds(case, values, torch.float64):
        assert violations(bound, output_truth, 64) == 0
    with_arithmetic = cert.total_variation_bounds(case.groups(torch.float32), ARITHMETIC)
    assert violations(finished(with_arithmetic.minimum()), truth, 0) == 0
    for bound in output_bounds(case, values, torch.float32, ARITHMETIC):
        assert violations(bound * (1 + 2.0**-20), output_truth, 0) == 0


def test_split_form_without_arithmetic_has_no_cancellation():
    weights = torch.tensor([1.0, 1e-17], dtype=torch.float64)
    groups = cert.Groups(weights.sum(-1, keepdim=True), torch.ones(1, dtype=torch.float64), weights[:1])
    truth = worst_total_variation(weights, torch.ones_like(weights))
    assert violations(cert.total_variation_bounds(groups).split, truth, 2) == 0


def test_search_finds_what_enumeration_finds(monkeypatch):
    for seed, (weight_kind, radius_kind) in enumerate(zip(WEIGHT_KINDS, RADIUS_KINDS, strict=True)):
        case = make_case(weight_kind, radius_kind, BATCH, 9, 9, seed)
        exact = worst(case)
        monkeypatch.setattr("torch_witcert.testing.corners.ENUMERATED", 0)
        found = worst(case)
        monkeypatch.undo()
        assert (found <= exact).all()
        assert (found >= 0.95 * exact).all()
        assert (found >= 0.999 * exact).double().mean() >= 0.9


def test_corners_are_the_worst_of_the_box():
    case = make_case("dirichlet", "uniform", BATCH, 6, 6, seed=5)
    exact = worst(case)
    generator = torch.Generator().manual_seed(0)
    inside = 2 * torch.rand(BATCH, 4096, 6, generator=generator, dtype=torch.float64) - 1
    distance = shifted_total_variation(case.weights[:, None], inside * case.radius[:, None])
    assert (distance <= exact[:, None] * (1 + corner_rounding(6))).all()
    assert (distance.amax(1) > 0.5 * exact).all()


def test_distance_without_cancellation_agrees_with_the_definition():
    case = make_case("dirichlet", "uniform", BATCH, 7, 7, seed=3)
    shift = sign_corners(7)[77] * case.radius
    p = torch.softmax(case.weights.log() + shift, -1)
    assert torch.allclose(
        shifted_total_variation(case.weights, shift), total_variation(p, case.weights), rtol=1e-10, atol=1e-15
    )


def test_bounds_are_not_vacuous():
    """Against the worst corner of single tokens the minimum is within a few percent on ordinary reads."""
    diffuse = make_case("uniform", "constant", BATCH, 12, 12, seed=0)
    ratio = cert.total_variation_bounds(diffuse.groups()).minimum() / worst(diffuse)
    # tanh(c / 2) is attained where the share that gains is 1 / (1 + e^c); twelve equal tokens come close to it.
    assert ratio.median() < 1.01
    assert ratio.max() < 1.1
    for weight_kind, limit in (("dirichlet", 1.25), ("dominated", 1.25), ("ties", 1.25)):
        case = make_case(weight_kind, "uniform", 256, 10, 10, seed=4)
        ratio = cert.total_variation_bounds(case.groups()).minimum() / worst(case)
        assert ratio.median() < limit, weight_kind


def test_split_is_what_helps_dominated_reads():
    case = make_case("dominated", "uniform", 256, 10, 10, seed=6)
    bounds = cert.total_variation_bounds(case.groups())
    papers = torch.minimum(bounds.ratio, bounds.tanh)
    assert (bounds.split < papers).double().mean() > 0.9
    assert (bounds.split / papers).median() < 0.6


def test_pinsker_is_what_helps_a_massless_page_with_a_large_radius():
    generator = torch.Generator().manual_seed(0)
    weights = torch.full((1, 40), 1 / 39, dtype=torch.float64)
    weights[:, 0] = 1e-9
    weights /= weights.sum()
    radius = 0.2 * torch.rand(1, 40, generator=generator, dtype=torch.float64)
    radius[:, 0] = 5
    bounds = cert.total_variation_bounds(cert.Groups(weights, radius, weights))
    assert bounds.pinsker < torch.minimum(bounds.ratio, bounds.tanh)
    assert violations(bounds.pinsker, worst_total_variation(weights, radius), 40) == 0


def test_slack_of_the_arithmetic_is_small():
    case = make_case("dirichlet", "constant", 256, 10, 10, seed=7)
    plain = cert.total_variation_bounds(case.groups()).minimum()
    rounded = cert.total_variation_bounds(case.groups(torch.float32), ARITHMETIC).minimum()
    assert (rounded - plain).max() < 2e-3


#: Every float32 in [1, 2).
ALL_MANTISSAS = torch.arange(2**23, dtype=torch.int32).add_(0x3F800000).view(torch.float32)


def test_two_bfloat16_limbs_leave_less_than_the_limb_error():
    high = ALL_MANTISSAS.bfloat16().float()
    low = (ALL_MANTISSAS - high).bfloat16().float()
    left = (ALL_MANTISSAS.double() - high.double() - low.double()).abs()
    assert (left <= ar.LIMB_ERROR * ALL_MANTISSAS.double()).all()


def test_rounding_to_bfloat16_is_at_most_the_weight_rounding():
    rounding = (ALL_MANTISSAS.double() - ALL_MANTISSAS.bfloat16().double()).abs()
    assert (rounding <= ar.WEIGHT_ROUNDING * ALL_MANTISSAS.double()).all()


@pytest.mark.parametrize("dtype", ar.OUTPUT_ROUNDING)
def test_rounding_of_the_output_is_covered(dtype):
    relative, absolute = ar.OUTPUT_ROUNDING[dtype]
    generator = torch.Generator().manual_seed(0)
    for exponent in (-12, -6, 0, 3):
        x = torch.randn(4096, 128, generator=generator) * 10.0**exponent
        moved = (x.double() - x.to(dtype).double()).norm(dim=-1)
        assert (moved <= relative * x.double().norm(dim=-1) + absolute).all()


@pytest.mark.parametrize("radius", [40.1, float("inf"), float("nan")])
def test_no_guarantee_above_the_limit(radius):
    mass = torch.tensor([0.5, 0.5, 0.0])
    groups = cert.Groups(mass, torch.tensor([0.1, 0.1, radius]), mass)
    for arithmetic in (None, ARITHMETIC):
        for bound in cert.total_variation_bounds(groups, arithmetic):
            assert bound == float("inf")


def test_zero_radius_gives_a_zero_bound():
    mass = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    bounds = cert.total_variation_bounds(cert.Groups(mass, torch.zeros_like(mass), mass))
    assert all(bound == 0 for bound in bounds)
