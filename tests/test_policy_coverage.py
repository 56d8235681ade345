"""Adaptive top-K*, its widening, and the bound on what the tail can hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiered_reads import random_read

from torch_witcert.ops.arithmetic import Arithmetic
from torch_witcert.ops.formats import DEFAULT
from torch_witcert.policy.coverage import Promotion, choose_pages, estimated_tail, tail_bound, widen_pages
from torch_witcert.testing.corners import sign_corners

ARITHMETIC = Arithmetic.of(64, 16, 64, 8, 1, torch.bfloat16, DEFAULT, 0.0)


def pages(mass: list[float], is_code: list[bool] | None = None, **limits) -> Promotion:
    mask = torch.tensor([True] * len(mass) if is_code is None else is_code, dtype=torch.bool)
    return choose_pages(torch.tensor(mass, dtype=torch.float64), mask, **limits)


def chosen(promotion: Promotion) -> list[int]:
    return promotion.pages.nonzero()[:, 0].tolist()


# --- K* ------------------------------------------------------------------------------------------------------------------


def test_the_fewest_pages_that_cover():
    """0.5 + 0.3 + 0.195 = 0.995 with page 0 the exact rest: two pages of the three."""
    promotion = pages([0.5, 0.004, 0.195, 0.001, 0.3], [False, True, True, True, True])
    assert chosen(promotion) == [2, 4]
    assert (promotion.count, promotion.available) == (2, 4)
    assert promotion.rank.tolist()[1:] == [2, 1, 3, 0] and promotion.rank[0] == 4
    assert promotion.tail.nonzero()[:, 0].tolist() == [1, 3]


def test_what_is_exact_already_counts_as_covered():
    assert pages([0.96, 0.02, 0.015, 0.004, 0.001], [False] + [True] * 4).count == 2
    assert pages([0.02, 0.015, 0.004, 0.961]).count == 3


@pytest.mark.parametrize(
    ("limits", "count"),
    [({}, 4), ({"tau_cov": 0.7}, 2), ({"tau_cov": 0.0}, 2), ({"tau_cov": 1.0}, 5), ({"tau_cov": 0.7, "k_min": 3}, 3)]
    + [({"k_max": 3}, 3), ({"k_max": 1, "k_min": 1}, 1), ({"k_min": 9, "k_max": 9}, 6), ({"k_max": 10**9}, 4)],
)
def test_limits(limits, count):
    assert pages([0.5, 0.25, 0.125, 0.121, 0.004, 0.0], **limits).count == count


def test_one_page_with_everything():
    promotion = pages([0.0, 1.0, 0.0, 0.0])
    assert chosen(promotion) == [0, 1]
    assert chosen(pages([0.0, 1.0, 0.0, 0.0], k_min=1)) == [1]


def test_equal_masses_rank_by_index():
    promotion = pages([1 / 256] * 256)
    assert chosen(promotion) == list(range(128))
    assert chosen(pages([0.25] * 4, tau_cov=0.5)) == [0, 1]


@pytest.mark.parametrize("number", [0, 1])
def test_fewer_pages_than_k_min(number):
    promotion = pages([1.0] * number)
    assert (promotion.count, promotion.available) == (number, number)
    assert promotion.pages.tolist() == [True] * number and not promotion.tail.any()
    assert estimated_tail(torch.ones(number), promotion.tail) == 0
    assert not widen_pages(promotion, torch.tensor(1.0))[1]


def test_no_code_page():
    promotion = pages([0.4, 0.6], [False, False])
    assert promotion.count == 0 and not promotion.pages.any() and not promotion.tail.any()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 7.0])
def test_other_groups_may_hold_any_bytes(garbage):
    clean = pages([0.0, 0.3, 0.004, 0.6, 0.0, 0.096], [False, True, True, True, False, True])
    spoiled = pages([garbage, 0.3, 0.004, 0.6, garbage, 0.096], [False, True, True, True, False, True])
    assert torch.equal(clean.pages, spoiled.pages) and torch.equal(clean.tail, spoiled.tail)
    mass = torch.tensor([garbage, 0.3, 0.004, 0.6, garbage, 0.096], dtype=torch.float64)
    assert estimated_tail(mass, spoiled.tail) == 0.004


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_mass_that_is_no_number_takes_all_it_may(broken):
    promotion = pages([0.999, 0.001, broken, 0.0, 0.0], k_max=3)
    assert chosen(promotion) == [0, 1, 2], "the others alone would need two"
    assert promotion.rank[2] == 0
    assert estimated_tail(torch.tensor([0.1, broken]), torch.tensor([True, True])).isposinf()


@given(st.integers(0, 2**31), st.integers(1, 40), st.floats(0, 1), st.integers(1, 6), st.integers(0, 40))
@settings(max_examples=150)
def test_it_is_the_rule_one_page_at_a_time(seed, number, tau_cov, k_min, more):
    generator = torch.Generator().manual_seed(seed)
    mass = (torch.rand(5, number, generator=generator, dtype=torch.float64).log() ** 3).abs().softmax(-1)
    is_code = torch.rand(5, number, generator=generator) < 0.8
    promotion = choose_pages(mass, is_code, tau_cov, k_min, k_min + more)
    for row in range(5):
        order = sorted((j for j in range(number) if is_code[row, j]), key=lambda j: -mass[row, j].item())
        count = 0
        while math.fsum(mass[row, j].item() for j in order[count:]) > 1 - tau_cov:
            count += 1
        count = min(max(k_min, min(k_min + more, count)), len(order))
        assert chosen(Promotion(*(part[row] for part in promotion))) == sorted(order[:count])
        tail = estimated_tail(mass[row], promotion.tail[row])
        assert tail.item() == pytest.approx(math.fsum(mass[row, j].item() for j in order[count:]), rel=1e-12)


# --- widening ------------------------------------------------------------------------------------------------------------


def widened(mass: list[float], tail: float | None = None, **limits) -> tuple[int, bool]:
    promotion = pages(mass, **limits)
    estimate = estimated_tail(torch.tensor(mass, dtype=torch.float64), promotion.tail)
    wider, fired = widen_pages(promotion, estimate if tail is None else torch.tensor(tail))
    assert torch.equal(wider.rank, promotion.rank)
    return int(wider.count), bool(fired)


FLAT = [0.91] + [0.01] * 9


def test_a_heavy_tail_doubles_the_pages():
    assert widened(FLAT, k_max=3) == (6, True)
    assert widened(FLAT, k_max=7) == (10, True)


def test_a_light_tail_does_not():
    assert widened(FLAT, k_max=8) == (8, False)
    assert widened(FLAT) == (10, False)
    assert widened([0.99, 0.007, 0.003]) == (2, False)


def test_the_limit_is_inclusive_and_a_bound_may_widen_below_k_max():
    assert widened([0.99, 0.007, 0.003], tail=0.0199) == (2, False)
    assert widened([0.99, 0.007, 0.003], tail=0.02) == (2, False)
    assert widened([0.99, 0.007, 0.003], tail=0.0201) == (3, True)


@pytest.mark.parametrize("tail", [math.nan, math.inf])
def test_a_tail_that_is_not_known_widens(tail):
    assert widened([0.99, 0.007, 0.003], tail=tail) == (3, True)


def test_nothing_is_left_to_widen():
    assert widened([0.5, 0.5], tail=1.0) == (2, False)


# --- the bound on the tail -----------------------------------------------------------------------------------------------


def read_of(seed: int, groups: int, tokens: int, level: float, spread: float):
    """Scores of a pass [R, J, P], radii [R, J] and a tail [R, J]; the last group is never in it."""
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(32, groups, tokens, generator=generator, dtype=torch.float64)
    radius = level * torch.rand(32, groups, generator=generator, dtype=torch.float64)
    tail = torch.rand(32, groups, generator=generator) < 0.5
    tail[:, -1] = False
    return scores, radius, tail, generator


def share(scores: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Mass of the tail under the softmax of scores [.., J, P]."""
    weight = torch.exp(scores - scores.amax((-2, -1), keepdim=True)).sum(-1)
    return torch.where(tail, weight, 0.0).sum(-1) / weight.sum(-1)


def masses(scores: torch.Tensor) -> torch.Tensor:
    return scores.flatten(-2).softmax(-1).view_as(scores).sum(-1)


@given(
    st.integers(0, 2**31),
    st.integers(1, 9),
    st.sampled_from((1, 4, 16)),
    st.sampled_from((0.0, 1e-9, 0.01, 0.3, 3.0, 40.0)),
    st.sampled_from((0.0, 1.0, 10.0, 200.0)),
)
@settings(max_examples=300)
def test_no_error_inside_the_radii_makes_the_tail_heavier(seed, groups, tokens, level, spread):
    """Float64, zero tolerance; errors of tokens at random, all at their radius, and the worst corner."""
    scores, radius, tail, generator = read_of(seed, groups, tokens, level, spread)
    bound = tail_bound(masses(scores), radius, tail)
    assert (bound <= 1).all() and (bound[~tail.any(-1)] == 0).all()
    draw = torch.rand(scores.shape, generator=generator, dtype=torch.float64) * 2 - 1
    worst = torch.where(tail, 1.0, -1.0).double()[..., None].expand_as(scores)
    for direction in (draw, draw.sign(), worst, torch.zeros_like(draw)):
        assert (share(scores + direction * radius[..., None], tail) <= bound).all()


def test_every_corner_and_the_worst_is_attained():
    scores, radius, tail, _ = read_of(0, 8, 1, 1.5, 2.0)
    bound = tail_bound(masses(scores), radius, tail)
    corners = share(scores[:, None] + (sign_corners(8) * radius[:, None])[..., None], tail[:, None])
    assert (corners <= bound[:, None]).all()
    assert (corners.amax(-1) * (1 + 1e-9) >= bound).all()


def test_it_is_between_the_estimate_and_the_estimate_times_e_2c():
    scores, _, tail, _ = read_of(1, 12, 4, 1.0, 2.0)
    mass = masses(scores)
    for c in (0.0, 0.05, 1.0):
        bound = tail_bound(mass, torch.full_like(mass, c), tail)
        estimate = estimated_tail(mass, tail)
        assert (bound >= estimate).all()
        assert (bound <= (estimate * math.exp(2 * c)).clamp_max(1) * (1 + 1e-9) + 1e-270).all()


def test_the_estimate_itself_is_no_bound():
    """The judge rejects what is false."""
    scores, radius, tail, _ = read_of(2, 6, 4, 0.5, 1.0)
    worst = share(scores + torch.where(tail, 1.0, -1.0)[..., None] * radius[..., None], tail)
    assert (worst > estimated_tail(masses(scores), tail))[tail.any(-1)].all()
    assert (worst > estimated_tail(masses(scores) * radius.exp(), tail)).any(), "e^c forgets that the others shrink"


@pytest.mark.parametrize("seed", range(6))
def test_pages_that_are_really_quantized(seed):
    """Masses by int8 codes, deterministic radii of the pages, exact masses from the original keys: zero tolerance."""
    read = random_read(seed, 24, level=0.5 + seed / 4)
    mass = read.masses(read.code_scores)
    promotion = choose_pages(mass, torch.arange(25) < 24, tau_cov=0.9)
    radius = torch.cat([read.radius, torch.zeros(1, dtype=torch.float64)])
    true = read.masses(read.exact_scores)
    for tail in (promotion.tail, torch.arange(25) < 24, torch.arange(25) == seed):
        bound = tail_bound(mass, radius, tail)
        assert torch.where(tail, true, 0.0).sum() / true.sum() <= bound <= 1
    assert promotion.tail.any()


def test_masses_of_a_float32_pass():
    """Rounded to float32 in every step; the radii hold its weights' errors, the arithmetic the sums."""
    scores, radius, tail, _ = read_of(3, 64, 16, 0.2, 3.0)
    rounded = scores.float()
    weight = torch.exp(rounded - rounded.amax((-2, -1), keepdim=True))
    mass = weight.sum(-1) / weight.sum((-2, -1))[..., None]
    worst = torch.where(tail, 1.0, -1.0)[..., None] * radius[..., None]
    radius = radius + ARITHMETIC.score_steps + 2.0**-19
    bound = tail_bound(mass, radius, tail, ARITHMETIC)
    assert (share(scores + worst, tail) <= bound).all()
    assert (bound <= tail_bound(mass, radius, tail) * 1.01 + 1e-5).all()


def test_a_mass_that_underflowed_is_not_nothing():
    """In float64 below e^-745, in a float32 pass below e^-103: radii of 40 and 30 bring it back, to e^-670 and e^-50."""
    tail, radius = torch.tensor([False, True]), torch.ones(2, dtype=torch.float64)
    for gap, c, dtype, arithmetic in ((750.0, 40.0, torch.float64, None), (110.0, 30.0, torch.float32, ARITHMETIC)):
        mass = torch.tensor([0.0, -gap], dtype=dtype).softmax(-1)
        true = math.exp(2 * c - gap)
        assert mass[1] == 0 and 0 < true <= tail_bound(mass, c * radius, tail, arithmetic)


def test_sums_of_a_kernel_are_rounded_up():
    mass, tail, none = torch.tensor([0.7, 0.3]), torch.tensor([False, True]), torch.zeros(2)
    assert 0.3 * (1 + 2.0**-13) < tail_bound(mass, none, tail, ARITHMETIC) < 0.3 * (1 + 2.0**-9)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 40.5])
def test_no_guarantee_is_infinite(broken):
    mass = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    radius = torch.tensor([0.1, broken, 0.1], dtype=torch.float64)
    for tail in ([True, False, False], [False, True, False], [False, False, False]):
        assert tail_bound(mass, radius, torch.tensor(tail)).isposinf()
    mass = torch.tensor([0.5, math.nan, 0.2], dtype=torch.float64)
    assert tail_bound(mass, torch.full((3,), 0.1), torch.tensor([True, False, False])).isposinf()


def test_small_cases():
    assert tail_bound(torch.ones(0), torch.ones(0), torch.ones(0, dtype=torch.bool)) == 0
    assert tail_bound(torch.ones(1), torch.ones(1), torch.tensor([True])) == 1
    assert tail_bound(torch.ones(1), torch.ones(1), torch.tensor([False])) == 0
    # Groups that the pass did not read change nothing.
    mass, radius, tail = torch.tensor([0.9, 0.1]), torch.tensor([0.2, 0.3]), torch.tensor([False, True])
    wider = [torch.cat([part, torch.zeros(2, dtype=part.dtype)]) for part in (mass, radius, tail)]
    assert torch.equal(tail_bound(mass, radius, tail), tail_bound(*wider))


# --- arguments -----------------------------------------------------------------------------------------------------------

MASS, CODE = torch.tensor([0.5, 0.5]), torch.tensor([True, True])


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"tau_cov": 1.1}, r"tau_cov must be a number in \[0, 1\], got 1.1"),
        ({"tau_cov": math.nan}, "tau_cov .* got nan"),
        ({"tau_cov": "0.9"}, "tau_cov .* got '0.9'"),
        ({"k_min": 0}, "k_min must be a positive int, got 0"),
        ({"k_max": 2.0}, "k_max must be a positive int, got 2.0"),
        ({"k_min": 3, "k_max": 2}, "k_min must be at most k_max, got 3 and 2"),
    ],
)
def test_wrong_limits(limits, message):
    with pytest.raises(ValueError, match=message):
        choose_pages(MASS, CODE, **limits)


def test_wrong_tensors():
    with pytest.raises(ValueError, match="is_code must be a bool tensor, got torch.int64"):
        choose_pages(MASS, CODE.long())
    with pytest.raises(ValueError, match="mass must be a floating point tensor, got torch.int64"):
        choose_pages(MASS.long(), CODE)
    with pytest.raises(ValueError, match=r"mass, is_code must have the same last dimension.*\(2,\).*\(1,\)"):
        choose_pages(MASS, CODE[:1])
    with pytest.raises(ValueError, match="mass, radius, tail must have the same last dimension"):
        tail_bound(MASS, torch.tensor(0.1), CODE)
    with pytest.raises(ValueError, match="tail must be a bool tensor"):
        estimated_tail(MASS, MASS)
    with pytest.raises(ValueError, match=r"limit must be a number in \[0, 1\], got -0.1"):
        widen_pages(pages([1.0]), torch.tensor(0.1), -0.1)
