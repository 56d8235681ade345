"""The risk budget never spends more than a request has."""

from __future__ import annotations

import pytest
import torch

from torch_witcert.config import RiskBudget
from torch_witcert.policy.budget import log_risk, never_exhausted_budget, planned_budget, spend

LAYERS, HEADS, DELTA = 30, 9, 1e-2


def test_never_exhausted_budget_stays_below_the_request():
    step = torch.arange(1, 10**6 + 1)
    share = never_exhausted_budget(DELTA, LAYERS, HEADS, step)
    assert share.dtype == torch.float64
    assert (share > 0).all()
    assert (share.diff() < 0).all()
    spent = share.sum() * LAYERS * HEADS
    assert 0.9 * DELTA < spent < DELTA
    # What is left after t steps is at most 1 / ln(t + 1) of the series: the integral of 1 / (n ln^2 n).
    assert spent + DELTA / 2.11 / torch.log(torch.tensor(10**6 + 1.0)) < DELTA


def test_never_exhausted_budget_is_the_formula():
    t = torch.tensor([1, 100], dtype=torch.int64)
    expected = DELTA / (2.11 * (t + 1) * torch.log(t.double() + 1) ** 2 * LAYERS * HEADS)
    assert torch.allclose(never_exhausted_budget(DELTA, LAYERS, HEADS, t), expected, rtol=1e-14)


def test_planned_budget_spends_all_and_no_more():
    share = planned_budget(DELTA, LAYERS, HEADS, 256, torch.arange(1, 2000))
    assert share.dtype == torch.float64
    assert (share[256:] == 0).all()
    assert share.sum().item() * LAYERS * HEADS == pytest.approx(DELTA, rel=1e-12)


def test_a_chunk_spends_its_tokens_and_padding_none():
    spent = torch.tensor([0, 5, 7])
    is_query = torch.tensor([[True, True, True], [False, True, True], [False, False, False]])
    step = spend(spent, is_query)
    assert step[is_query].tolist() == [1, 2, 3, 6, 7]
    assert spent.tolist() == [3, 7, 7]
    assert spend(spent, torch.ones(3, 1, dtype=torch.bool))[:, 0].tolist() == [4, 8, 8]


def test_one_chunk_costs_what_single_tokens_cost():
    together, apart = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    chunk = spend(together, torch.ones(1, 6, dtype=torch.bool))
    single = torch.cat([spend(apart, torch.ones(1, 1, dtype=torch.bool)) for _ in range(6)], 1)
    assert torch.equal(chunk, single) and torch.equal(together, apart)


@pytest.mark.parametrize("delta", [0, 1, -0.1, 2.0, float("nan"), float("inf"), "0.1"])
def test_delta_out_of_range_is_refused(delta):
    step = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="delta_req"):
        never_exhausted_budget(delta, LAYERS, HEADS, step)
    with pytest.raises(ValueError, match="delta_req"):
        planned_budget(delta, LAYERS, HEADS, 16, step)


@pytest.mark.parametrize("name", ["layers", "heads", "horizon"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, None])
def test_counts_that_are_no_positive_ints_are_refused(name, value):
    arguments = {"layers": LAYERS, "heads": HEADS, "horizon": 16} | {name: value}
    with pytest.raises(ValueError, match=name):
        planned_budget(DELTA, step=torch.ones(1, dtype=torch.int64), **arguments)


@pytest.mark.parametrize("horizon", [None, 256])
def test_log_risk_is_that_of_the_schedule(horizon):
    step = torch.tensor([[1, 2, 256], [257, 10**6, 3]])
    risk = log_risk(RiskBudget(DELTA, horizon), LAYERS, HEADS, step)
    assert risk.dtype == torch.float32
    share = (
        never_exhausted_budget(DELTA, LAYERS, HEADS, step)
        if horizon is None
        else planned_budget(DELTA, LAYERS, HEADS, horizon, step)
    )
    assert torch.equal(risk.isinf(), share == 0)
    assert share.count_nonzero() == (6 if horizon is None else 4)
    spent = share > 0
    torch.testing.assert_close(2 * torch.exp(-risk[spent].double()), share[spent], rtol=1e-5, atol=0)


def test_a_budget_too_small_for_float64_is_spent():
    """A share that underflows must become "nothing is left", never a small risk."""
    risk = log_risk(RiskBudget(5e-324, 256), LAYERS, HEADS, torch.ones(1, dtype=torch.int64))
    assert risk.tolist() == [float("inf")]
