"""Checks of codes against exact keys, on the pages where both have been read: rank, boundary and scores.

Source: Runtime-Certified Bounded-Error Quantized Attention, section "adaptive precision and fallback ladder": rank consistency
check and rungs 3 and 4. A log-mass is ln of the sum of e^score over the tokens of a page that the query sees, not normalised: -inf
where it sees none, and only there, so never the logarithm of a weight that was flushed to 0. A check that cannot be made,
because something it needs is NaN or infinite, fires.
"""

from __future__ import annotations

import torch

from .checks import check_pages, check_positive

NOTHING = float("-inf")


def _meaningless(log_mass: torch.Tensor) -> torch.Tensor:
    """NaN or +inf."""
    return ~(log_mass < float("inf"))


def rank_differs(
    code_log_mass: torch.Tensor, exact_log_mass: torch.Tensor, promoted: torch.Tensor, r: int = 1
) -> torch.Tensor:
    """Rank check of a head: do codes and exact keys name different pages, or another order, as the r heaviest promoted ones?

    Fires where no list of r promoted pages is the head of an order by falling code log-mass and of one by falling exact
    log-mass. So a tie is no disagreement: pages of equal log-mass may stand in either order. With fewer than r promoted pages all
    are compared, with none nothing fires. A heuristic: a read that fires need not be wrong by much, and one that does not
    may be, in pages that are not promoted (:func:`boundary_open`) or in weights. Source: the paper, rank-consistency check.

    Args:
        code_log_mass, exact_log_mass: [..., J], log-masses of the pages by codes and by exact keys.
        promoted: bool [..., J], pages of which both were read. The others may hold any bytes.
        r: places compared, 1 or more; the check takes r steps.

    Returns:
        bool [...]; True where a promoted log-mass is NaN or +inf.

    Raises:
        ValueError: r is no positive int; shapes or dtypes that do not fit.
    """
    check_positive("r", r)
    check_pages({"promoted": promoted}, code_log_mass=code_log_mass, exact_log_mass=exact_log_mass)
    code, exact, left = torch.broadcast_tensors(code_log_mass, exact_log_mass, promoted)
    differs = (left & (_meaningless(code) | _meaningless(exact))).any(-1)
    for _ in range(min(r, code.shape[-1])):
        # Of the pages that are next by codes, the one that is next by exact keys: if it is not the heaviest left, none is.
        next_by_codes = left & (code == torch.where(left, code, NOTHING).amax(-1, keepdim=True))
        best, index = torch.where(next_by_codes, exact, NOTHING).max(-1, keepdim=True)
        differs = differs | (best < torch.where(left, exact, NOTHING).amax(-1, keepdim=True))[..., 0]
        left = left.scatter(-1, index, False)
    return differs


def boundary_open(
    code_log_mass: torch.Tensor,
    radius: torch.Tensor,
    exact_log_mass: torch.Tensor,
    is_code: torch.Tensor,
    promoted: torch.Tensor,
    r: int = 1,
) -> torch.Tensor:
    """Boundary check of a head: may a page that was not promoted be heavier than the r-th promoted one?

        fires  where  l~_j + c_j > l_(r)  for a page j that was not promoted,  l_(r) the r-th largest exact log-mass of promoted pages.

    PROVED where it does not fire: no page left as codes has an exact log-mass above l_(r), because l_j = ln sum e^s_t <= ln sum
    e^(s~_t + c_j) = l~_j + c_j. With :func:`rank_differs` silent as well, the r pages that codes and exact keys agree on are the r
    heaviest of ALL code pages by exact log-mass, up to ties, where those of promoted pages are taken as they were computed. That
    it fires proves nothing: the radius may be loose.

    A tie, l~_j + c_j = l_(r), does not fire, and the comparison is exact: the sum's rounding decides nothing. With fewer than r promoted
    pages l_(r) is -inf, and any page that was not promoted and holds a token fires. Source: the paper, rank-consistency check.

    Args:
        code_log_mass: [..., J], by codes.
        radius: [..., J], c_j >= |error| of the code log-mass plus |error| of the exact one that it is compared with: the score
            radius with its arithmetic, plus the arithmetic of the exact pass.
        exact_log_mass: [..., J], by exact keys; only those of promoted pages are used.
        is_code: bool [..., J], pages that the read sees as codes, promoted ones included. The others may hold any bytes.
        promoted: bool [..., J].
        r: places that are to be certain, 1 or more.

    Returns:
        bool [...]; True where the log-mass of a promoted page is NaN or +inf, or that of another or its radius is.

    Raises:
        ValueError: r is no positive int; shapes or dtypes that do not fit.
    """
    check_positive("r", r)
    check_pages(
        {"is_code": is_code, "promoted": promoted},
        code_log_mass=code_log_mass,
        radius=radius,
        exact_log_mass=exact_log_mass,
    )
    exact = torch.where(promoted, exact_log_mass.double(), NOTHING)
    size = exact.shape[-1]
    threshold = exact.topk(r, -1).values[..., -1:] if r <= size else exact.new_full((*exact.shape[:-1], 1), NOTHING)
    code, radius = code_log_mass.double(), radius.double()
    highest = code + radius
    # What the rounded sum lost, exactly (Knuth's TwoSum): it decides where the sum equals the threshold.
    back = highest - code
    lost = (code - (highest - back)) + (radius - back)
    below = (highest < threshold) | ((highest == threshold) & (lost <= 0))
    unseen = (code == NOTHING) & ~radius.isnan()
    left = is_code & ~promoted
    return (left & ~(below | unseen)).any(-1) | _meaningless(exact).any(-1)


def scores_differ(
    difference: torch.Tensor, radius: torch.Tensor, slack: torch.Tensor, promoted: torch.Tensor
) -> torch.Tensor:
    """Score check: is a score by codes further from the exact one than sound data allows?

        fires  where  max_t |s_t - s~_t| > c_j + slack_j  for a promoted page j.

    PROVED: sound data does not fire, because a deterministic radius bounds the error of every query. So where finite numbers fire,
    codes, scales, zeros, notes or originals are not what the write stored. Silence proves nothing: damage may change a score
    by less than the radius. A probabilistic radius would fire on sound data with the probability that it leaves.
    Source: the paper, fallback ladder, rung 4.

    Args:
        difference: [..., J], the largest |exact score - score by codes| over the tokens of a page that the query sees; NaN
            where one is NaN, as `amax` leaves it.
        radius: [..., J], DETERMINISTIC radius of the scores by codes.
        slack: [..., J], arithmetic of both passes and of the subtraction.
        promoted: bool [..., J], pages of which both were read. The others may hold any bytes.

    Returns:
        bool [...], one for each head-read; the ladder takes those of a row's layer together. True where a promoted page has a
        difference, radius or slack that is NaN or infinite.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_pages({"promoted": promoted}, difference=difference, radius=radius, slack=slack)
    allowed = radius.double() + slack.double()
    fine = (difference.double() <= allowed) & allowed.isfinite()
    return (promoted & ~fine).any(-1)
