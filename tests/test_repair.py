"""The repair rule guarantees its limit for every score error inside the radii."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_witcert.policy.repair import plan_repair
from torch_witcert.testing.corners import shifted_total_variation, sign_corners

ROWS, PAGES = 64, 7


def make_read(seed: int, level: float):
    """Masses and radii [ROWS, PAGES]; the last group cannot be repaired (the exact tail) and has a radius of 1e-4."""
    generator = torch.Generator().manual_seed(seed)
    mass = -(torch.rand(ROWS, PAGES, generator=generator, dtype=torch.float64).log() ** 3)
    mass = mass / mass.sum(-1, keepdim=True)
    radius = level * torch.rand(ROWS, PAGES, generator=generator, dtype=torch.float64)
    radius[:, -1] = 1e-4
    repairable = torch.ones(PAGES, dtype=torch.bool)
    repairable[-1] = False
    return mass, radius, repairable


def after_repair(mass: torch.Tensor, radius: torch.Tensor, pages: torch.Tensor):
    """Weights, true shifts and E+ of the repaired read at all sign corners of the errors, [ROWS, 2^PAGES, ...]."""
    error = sign_corners(PAGES) * radius[:, None]
    weights = mass[:, None] * torch.exp(torch.where(pages[:, None], -error, 0.0))
    weights = weights / weights.sum(-1, keepdim=True)
    shift = torch.where(pages[:, None], 0.0, -error)
    excess = (weights * torch.expm1(shift.abs())).sum(-1)
    return weights, shift, excess


@given(st.integers(0, 2**31), st.floats(0.01, 4), st.sampled_from((0.01, 0.1, 0.2, 0.5, 1.0)))
@settings(max_examples=150)
def test_repair_guarantees_the_limit_at_every_corner(seed, level, limit):
    mass, radius, repairable = make_read(seed, level)
    plan = plan_repair(mass, radius, repairable, limit)
    assert plan.reached.all()
    assert not plan.pages[:, -1].any()
    weights, shift, excess = after_repair(mass, radius, plan.pages)
    assert (excess <= limit * (1 + 2.0**-40)).all()
    assert (shifted_total_variation(weights, shift) <= limit).all()


@given(st.integers(0, 2**31))
@settings(max_examples=50)
def test_more_pages_than_planned_keep_the_guarantee(seed):
    mass, radius, repairable = make_read(seed, 2.0)
    more = torch.rand(ROWS, PAGES, generator=torch.Generator().manual_seed(seed)) < 0.3
    pages = plan_repair(mass, radius, repairable, 0.2).pages | (more & repairable)
    _, _, excess = after_repair(mass, radius, pages)
    assert (excess <= 0.2 * (1 + 2.0**-40)).all()


def test_the_prefix_is_the_shortest():
    """One page less, the one with the least gain, and the rule's inequality fails."""
    mass, radius, repairable = make_read(0, 2.0)
    limit = 0.2
    plan = plan_repair(mass, radius, repairable, limit)
    gain = mass * (torch.expm1(radius) - limit * -torch.expm1(-radius))
    needed = (mass * torch.expm1(radius)).sum(-1) - limit
    chosen = torch.where(plan.pages, gain, 0.0).sum(-1)
    least = torch.where(plan.pages, gain, float("inf")).amin(-1)
    repaired = plan.pages.any(-1)
    assert repaired.any() and (~repaired).any()
    assert (chosen[repaired] >= needed[repaired]).all()
    assert (chosen[repaired] - least[repaired] < needed[repaired]).all()
    assert (needed[~repaired] <= 0).all()


def test_rule_is_not_everything():
    mass, radius, repairable = make_read(1, 1.0)
    pages = plan_repair(mass, radius, repairable, 0.2).pages
    assert pages.sum() < 0.5 * ROWS * (PAGES - 1)


@pytest.mark.parametrize("radius_of_lost", [41.0, float("inf"), float("nan")])
def test_pages_without_a_guarantee_are_always_repaired(radius_of_lost):
    mass, radius, repairable = make_read(2, 0.5)
    radius[:, 1] = radius_of_lost
    plan = plan_repair(mass, radius, repairable, 0.1)
    assert plan.pages[:, 1].all() and plan.reached.all()
    finite = torch.where(radius <= 40, radius, 30.0)
    _, _, excess = after_repair(mass, finite, plan.pages)
    assert (excess <= 0.1 * (1 + 2.0**-40)).all()


def test_a_limit_that_cannot_be_reached_is_reported():
    mass = torch.tensor([[0.25, 0.75], [0.25, 0.75]], dtype=torch.float64)
    radius = torch.tensor([[1.0, 0.5], [1.0, float("inf")]], dtype=torch.float64)
    plan = plan_repair(mass, radius, torch.tensor([True, False]), 0.1)
    assert not plan.reached.any()
    assert plan.pages.tolist() == [[True, False], [True, False]]


def test_float32_batches_and_full_graph():
    mass, radius, repairable = make_read(3, 2.0)
    expected = plan_repair(mass, radius, repairable, 0.2)
    mass, radius = (x.float().view(4, 16, 1, PAGES) for x in (mass, radius))
    compiled = torch.compile(plan_repair, backend="eager", fullgraph=True)
    plan = compiled(mass, radius, repairable, 0.2)
    assert plan.pages.shape == (4, 16, 1, PAGES) and plan.reached.shape == (4, 16, 1)
    assert (plan.pages.view(ROWS, PAGES) == expected.pages).double().mean() > 0.99


@pytest.mark.parametrize("limit", [0.0, -0.1, 1.5, float("nan"), float("inf")])
def test_limit_out_of_range_is_refused(limit):
    mass, radius, repairable = make_read(0, 1.0)
    with pytest.raises(ValueError, match="limit"):
        plan_repair(mass, radius, repairable, limit)
