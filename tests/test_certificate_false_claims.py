"""Claims that look right and are not: the judge of the true bounds must find a counterexample to every one of them.

A harness that passes the certificate proves nothing until it has been seen to fail.
"""

from __future__ import annotations

import pytest
import torch
from certificate_cases import RADIUS_KINDS, WEIGHT_KINDS, Case, make_case, violations, worst

from torch_witcert.ops import certificate as cert
from torch_witcert.testing.corners import shifted_total_variation, worst_total_variation

TOKENS = 8


def all_cases():
    for seed, weight_kind in enumerate(WEIGHT_KINDS):
        for radius_kind in RADIUS_KINDS:
            yield make_case(weight_kind, radius_kind, 64, TOKENS, TOKENS, seed)


def violated(claim) -> int:
    """Violations of `claim(case) -> bound` over all cases."""
    return sum(violations(claim(case), worst(case), TOKENS) for case in all_cases())


def test_the_judge_accepts_the_true_bound():
    assert violated(lambda case: cert.total_variation_bounds(case.groups()).minimum()) == 0


def test_one_minus_one_over_a_is_rejected():
    cases = [make_case(kind, "uniform", 64, 3, 3, seed) for kind in WEIGHT_KINDS for seed in range(20)]
    violated = 0
    worst_ratio = 0.0
    for case in cases:
        excess = (case.weights * torch.expm1(case.radius)).sum(-1)
        claim = excess / (1 + excess)  # 1 - 1 / A without cancellation
        violated += violations(claim, worst(case), 3)
        worst_ratio = max(worst_ratio, (worst(case) / claim).max().item())
        assert violations(cert.total_variation_bounds(case.groups()).minimum(), worst(case), 3) == 0
    assert violated > 10
    assert worst_ratio > 1.03  # no rounding error


def test_ratio_dominating_tanh_is_rejected():
    radius = torch.ones(4, dtype=torch.float64)
    mass = torch.full((4,), 0.25, dtype=torch.float64)
    bounds = cert.total_variation_bounds(cert.Groups(mass, radius, mass))
    assert violations(torch.tanh(radius.amax()), bounds.ratio, 4) == 1  # 0.824 > 0.762
    assert bounds.ratio == pytest.approx(0.824, abs=1e-3)
    assert violations(torch.tanh(radius.amax()), bounds.minimum(), 4) == 0


def split_form(weights: torch.Tensor, radius: torch.Tensor, rest_excess: torch.Tensor) -> torch.Tensor:
    """Ts for single tokens, in the dtype of its arguments, with the E+ of the rest that it is given. Token 0 is apart."""
    x, c1 = weights[:, 0], radius[:, 0]
    rest, rest_radius = weights[:, 1:], radius[:, 1:]
    y = rest.sum(-1)
    w = y * torch.expm1(c1) + torch.exp(c1) * rest_excess
    v = y * -torch.expm1(-c1) + torch.exp(-c1) * (rest * -torch.expm1(-rest_radius)).sum(-1)
    moved = torch.maximum(x * w / (1 + w), x * v / (1 - v))
    return moved + y / (1 + (rest * torch.exp(-rest_radius)).sum(-1) / rest_excess.clamp_min(1e-300))


@pytest.mark.parametrize(("dtype", "left"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_subtracting_the_heaviest_token_from_the_excess_is_rejected(dtype, left):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(512, TOKENS, generator=generator, dtype=torch.float64)
    weights[:, 1:] *= left / weights[:, 1:].sum(-1, keepdim=True)
    weights[:, 0] = 1
    weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)
    radius = torch.rand(512, TOKENS, generator=generator, dtype=torch.float64)
    radius[:, 0] += 3
    radius[:, 1:] *= 0.01
    radius = radius.to(dtype)
    truth = worst_total_variation(weights.double() / weights.double().sum(-1, keepdim=True), radius.double())

    grow = weights * torch.expm1(radius)
    subtracted = (grow.sum(-1) - grow[:, 0]).clamp_min(0)
    summed = grow[:, 1:].sum(-1)
    # float32 may be wrong by its own rounding here; the claim is wrong by far more.
    allowance = 2.0**-18 * truth if dtype == torch.float32 else 0.0
    assert violations(split_form(weights, radius, summed), truth, TOKENS, allowance) == 0
    assert violations(split_form(weights, radius, subtracted), truth, TOKENS, allowance) > 50


def test_thresholding_tokens_by_radius_as_the_optimum_is_rejected():
    def thresholded(case: Case, descending: bool) -> torch.Tensor:
        order = case.radius.argsort(-1, descending=descending)
        weights, radius = case.weights.gather(1, order), case.radius.gather(1, order)
        signs = torch.tril(torch.ones(TOKENS, TOKENS, dtype=torch.float64)) * 2 - 1
        corners = torch.cat([signs, -signs]) * radius[:, None]
        return shifted_total_variation(weights[:, None], corners).amax(1)

    claim = lambda case: torch.maximum(thresholded(case, True), thresholded(case, False))
    assert violated(claim) > 50
    ratios = torch.cat([worst(case) / claim(case) for case in all_cases()])
    assert ratios[ratios.isfinite()].max() > 1.5


def repair_cases(seed: int):
    """p~ over pages, true score errors inside the radii, and the exact excess after repairing each page alone."""
    generator = torch.Generator().manual_seed(seed)
    mass = -(torch.rand(4096, 4, generator=generator, dtype=torch.float64).log() ** 2)
    mass = mass / mass.sum(-1, keepdim=True)
    radius = 2 * torch.rand(4096, 4, generator=generator, dtype=torch.float64)
    error = radius * torch.where(torch.rand(4096, 4, generator=generator) < 0.5, -1.0, 1.0)
    return mass, radius, error


def excess_after_repair(
    mass: torch.Tensor, radius: torch.Tensor, error: torch.Tensor, repaired: torch.Tensor
) -> torch.Tensor:
    """E+ of the renormalised p~ once the pages of the mask are read exact."""
    weights = torch.where(repaired, mass * torch.exp(-error), mass)
    weights = weights / weights.sum(-1, keepdim=True)
    return (weights * torch.expm1(torch.where(repaired, 0.0, radius))).sum(-1)


def test_repair_lowering_a_by_the_share_of_the_page_is_rejected():
    mass, radius, error = repair_cases(0)
    repaired = torch.zeros(4096, 4, dtype=torch.bool)
    repaired[:, 1] = True
    share = mass * torch.expm1(radius)
    claimed = share.sum(-1) - share[:, 1]
    assert violations(claimed, excess_after_repair(mass, radius, error, repaired), 4) > 500

    mass = torch.tensor([[0.9, 0.1]], dtype=torch.float64)
    ones = torch.ones_like(mass)
    a = 1 + excess_after_repair(mass, ones, ones, torch.tensor([[True, False]]))
    assert a == pytest.approx(1.399, abs=1e-3)
    assert 1 + 0.1 * torch.expm1(torch.tensor(1.0)) == pytest.approx(1.172, abs=1e-3)


def test_stopping_when_the_remaining_shares_reach_the_limit_is_rejected():
    mass, radius, error = repair_cases(1)
    limit = 0.2
    share = mass * torch.expm1(radius)
    order = share.argsort(-1, descending=True)
    before = share.gather(-1, order).cumsum(-1) - share.gather(-1, order)
    needed = (share.sum(-1, keepdim=True) - limit).clamp_min(0)
    repaired = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before < needed)
    reached = excess_after_repair(mass, radius, error, repaired)
    assert violations(torch.full_like(reached, limit), reached, 4) > 100
