"""Risk budget of a request for probabilistic certificates: how much of its failure probability each read may spend.

A share belongs to one (query token, layer, query head): a union bound over a request's reads then gives delta_req. Query
tokens of a request count from 1; a chunk of n tokens spends n. Every function is a tensor operation on a counter per row.
Source: DESIGN section 7.
"""

from __future__ import annotations

import torch

from ..config import RiskBudget
from .checks import check_positive

#: Not below sum_{n >= 2} 1 / (n ln^2 n) = 2.10974...
SERIES_SUM = 2.11


def _checked(delta_req: float, layers: int, heads: int) -> float:
    """delta_req shared between the heads of all layers."""
    RiskBudget(delta_req, None)
    for name, value in (("layers", layers), ("heads", heads)):
        check_positive(name, value)
    return delta_req / (layers * heads)


def planned_budget(delta_req: float, layers: int, heads: int, horizon: int, step: torch.Tensor) -> torch.Tensor:
    """Equal shares delta_req / (L H horizon) for the first `horizon` query tokens, 0 afterwards: nothing is left then.

    Args:
        delta_req: failure probability of a whole request, in (0, 1).
        layers, heads: L and H of the model.
        horizon: query tokens that the plan is for.
        step: int64 [...], number of the query token, from 1.

    Returns:
        float64 [...].

    Raises:
        ValueError: an argument out of range.
    """
    share = _checked(delta_req, layers, heads)
    check_positive("horizon", horizon)
    return (step <= horizon).double() * (share / horizon)


def never_exhausted_budget(delta_req: float, layers: int, heads: int, step: torch.Tensor) -> torch.Tensor:
    """Shares delta_req / (2.11 (t + 1) ln^2(t + 1) L H), whose sum over all t >= 1 stays below delta_req / (L H).

    Args, returns and errors as :func:`planned_budget`.
    """
    share = _checked(delta_req, layers, heads)
    after = step.double() + 1
    return share / (SERIES_SUM * after * after.log().square())


def log_risk(budget: RiskBudget, layers: int, heads: int, step: torch.Tensor) -> torch.Tensor:
    """What a probabilistic radius takes of the budget: ln(2 / delta) of each read of a query token.

    Args:
        budget: of the request.
        layers, heads: L and H of the certified layers.
        step: int64 [...], number of the query token, from 1.

    Returns:
        float32 [...], +inf where nothing of the budget is left.
    """
    if budget.horizon is None:
        delta = never_exhausted_budget(budget.delta_req, layers, heads, step)
    else:
        delta = planned_budget(budget.delta_req, layers, heads, budget.horizon, step)
    return (2 / delta).log().to(torch.float32)


def spend(spent: torch.Tensor, is_query: torch.Tensor) -> torch.Tensor:
    """Number the query tokens of a forward and advance the rows' counters.

    Args:
        spent: int64 [B], query tokens of each row's request so far; advanced in place.
        is_query: bool [B, T], columns that hold a token; padding spends nothing.

    Returns:
        int64 [B, T], the step of each query token; that of padding means nothing.
    """
    step = spent[:, None] + is_query.long().cumsum(1)
    spent += is_query.sum(1)
    return step
