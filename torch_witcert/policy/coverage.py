"""Which pages of a read deserve exact keys, by their attention mass, and what the others can hold.

Source: Runtime-Certified Bounded-Error Quantized Attention, section "adaptive precision and fallback ladder": the adaptive
choice of top-K* pages and rung 1, widen coverage. Groups of tokens are in the last dimension J, as in
`ops.certificate.Groups`: code pages, and the exact tokens as one or more groups that `is_code` leaves out. Their masses sum
to 1. Which pages to read is a HEURISTIC: it goes by estimated masses. :func:`tail_bound` is a bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops import arithmetic as ar
from ..ops.arithmetic import Arithmetic
from .checks import check_limit, check_pages, check_positive

#: Factor by which rung 1 widens K*.
WIDENING = 2
#: Relative error of float64 sums of up to 2^14 terms with their factors: in the masses that are given, and here.
FLOAT64_RELATIVE = 2.0**-36
#: What masses below the smallest float64 (2^-1074) can hide: 2^24 tokens, each e^(2 RADIUS_LIMIT) = 2^115.5 too small.
FLOAT64_ABSOLUTE = 2.0**-900


class Promotion(NamedTuple):
    """Pages of each read to take exact keys of: the first `count` by `rank`."""

    rank: torch.Tensor  # int64 [..., J], place by mass, 0 the heaviest; code pages come before all other groups
    count: torch.Tensor  # int64 [...], K*
    available: torch.Tensor  # int64 [...], code pages of the read

    @property
    def pages(self) -> torch.Tensor:
        """Promoted pages, bool [..., J]."""
        return self.rank < self.count[..., None]

    @property
    def tail(self) -> torch.Tensor:
        """Code pages that stay codes, bool [..., J]."""
        return ~self.pages & (self.rank < self.available[..., None])


def choose_pages(
    mass: torch.Tensor, is_code: torch.Tensor, tau_cov: float = 0.995, k_min: int = 2, k_max: int = 128
) -> Promotion:
    """Adaptive top-K*: the heaviest pages, as few as leave the tail no more than 1 - tau_cov.

        K* = min { k : sum of M_(j) over j > k <= 1 - tau_cov },  M_(1) >= M_(2) >= .. over code pages,

    clamped to [k_min, k_max] and then to the code pages that there are. What is exact already counts as covered. Pages of
    equal mass rank by index. A mass that is NaN ranks first, and its read takes k_max pages. A heuristic: estimated masses
    choose, and nothing here bounds an error. Source: the paper, adaptive top-K* selection (tau_cov = 0.995).

    Args:
        mass: [..., J], estimated mass of each group; they sum to 1.
        is_code: bool [..., J], groups that are pages read as codes and can be read exact. The others may hold any bytes.
        tau_cov: in [0, 1], share of the mass to cover.
        k_min, k_max: fewest and most pages, 1 <= k_min <= k_max.

    Returns:
        The promotion; leading dimensions are those of mass and is_code, broadcast.

    Raises:
        ValueError: an argument out of range.
    """
    check_limit("tau_cov", tau_cov, 1)
    check_positive("k_min", k_min)
    check_positive("k_max", k_max)
    if k_min > k_max:
        raise ValueError(f"k_min must be at most k_max, got {k_min} and {k_max}")
    check_pages({"is_code": is_code}, mass=mass)
    mass, is_code = torch.broadcast_tensors(mass, is_code)
    ordered = torch.where(is_code, torch.where(mass.isnan(), float("inf"), mass), float("-inf"))
    ordered, order = ordered.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(mass.shape[-1], device=mass.device).expand_as(order)
    rank = torch.empty_like(order).scatter(-1, order, place)

    from_here_on = ordered.double().clamp_min(0).flip(-1).cumsum(-1).flip(-1)
    needed = (from_here_on > 1 - tau_cov).sum(-1)
    needed = torch.where(ordered.isposinf().any(-1), k_max, needed).clamp(k_min, k_max)
    available = is_code.sum(-1)
    return Promotion(rank, torch.minimum(needed, available), available)


def widen_pages(promotion: Promotion, tail_mass: torch.Tensor, limit: float = 0.02) -> tuple[Promotion, torch.Tensor]:
    """Rung 1: twice the pages where the tail holds more than `limit`.

        K* -> min(2 K*, code pages)  where  not (tail mass <= limit),

    so that a tail mass of NaN or +inf widens. The result may pass k_max: with tau_cov >= 1 - limit an ESTIMATED tail is above the
    limit only where k_max cut K* short, so a widening that stopped there would never act. The choice is a heuristic; with
    :func:`tail_bound` it errs on the side of reading more. Source: the paper, fallback ladder, rung 1.

    Args:
        promotion: of :func:`choose_pages`.
        tail_mass: [...], of :func:`estimated_tail` or of :func:`tail_bound`.
        limit: in [0, 1].

    Returns:
        The promotion with the wider counts, and bool [...], where it has more pages than before: rung 1 fired.

    Raises:
        ValueError: limit out of range.
    """
    check_limit("limit", limit, 1)
    wider = torch.minimum(WIDENING * promotion.count, promotion.available)
    count = torch.where(tail_mass <= limit, promotion.count, wider)
    return promotion._replace(count=count), count > promotion.count


def estimated_tail(mass: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Estimated mass of the pages that stay codes, sum of M_j over the tail: no bound on anything.

    Args:
        mass: [..., J], as in :func:`choose_pages`.
        tail: bool [..., J], `Promotion.tail`.

    Returns:
        float64 [...]; +inf where a mass of the tail is not finite.
    """
    check_pages({"tail": tail}, mass=mass)
    total = torch.where(tail, mass.double(), 0.0).sum(-1)
    return torch.where(total.isfinite(), total, float("inf"))


def tail_bound(
    mass: torch.Tensor, radius: torch.Tensor, tail: torch.Tensor, arithmetic: Arithmetic | None = None
) -> torch.Tensor:
    """A BOUND on the mass that exact attention gives to the tail T.

        p(T) <= U / (U + L),   U = sum_{j in T} M_j e^{c_j},   L = sum_{j not in T} M_j e^{-c_j}.

    Proof: p_t = p~_t r_t / Z with r_t in [e^-c, e^c], so p(T) = x / (x + y) for the sums x, y of p~ r over T and over the rest, with
    x <= U and y >= L; x / (x + y) grows with x and falls with y. It is attained, and at most p~(T) e^{2 c_max}.

    It holds for the exact masses of the same groups, whatever was promoted since; with the assumptions and the probability
    of the radii, so with none for deterministic ones.

    Args:
        mass: [..., J], masses M_j under the weights p~ of one pass, over everything that it read; they sum to 1. Groups that it
            did not read have mass and radius 0.
        radius: [..., J], c_j >= |error| of every score of the group IN THAT PASS, its arithmetic included.
        tail: bool [..., J], the groups whose exact mass is asked for.
        arithmetic: of the pass, for masses from a kernel; None for real arithmetic, computed in float64.

    Returns:
        float64 [...] in [0, 1], 0 where the tail is empty; +inf where a radius is above RADIUS_LIMIT or anything is not finite.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_pages({"tail": tail}, mass=mass, radius=radius)
    relative, absolute = FLOAT64_RELATIVE, FLOAT64_ABSOLUTE
    if arithmetic is not None:
        relative, absolute = relative + arithmetic.sum_relative, ar.SUM_ABSOLUTE
    mass, radius = mass.double(), radius.double()
    upper = torch.where(tail, mass * radius.exp(), 0.0).sum(-1) * (1 + relative)
    upper = upper + absolute * (1 + upper)
    lower = torch.where(tail, 0.0, mass * (-radius).exp()).sum(-1) * (1 - relative) - absolute
    # Near 1 the slack of both sums is lost in the quotient's own rounding.
    bound = (upper / (upper + lower.clamp_min(0)) * (1 + 2.0**-50)).clamp_max(1)
    guaranteed = ((radius.abs() <= ar.RADIUS_LIMIT) & mass.isfinite()).all(-1)
    return torch.where(guaranteed, torch.where(tail.any(-1), bound, 0.0), float("inf"))
