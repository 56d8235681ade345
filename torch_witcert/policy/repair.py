"""The repair rule: which pages of a read to fetch exact, so that its total variation is below a limit."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_witcert.ops.arithmetic import RADIUS_LIMIT


class Repair(NamedTuple):
    """Pages to read exact."""

    pages: torch.Tensor  # bool [..., J]
    reached: torch.Tensor  # bool [...], whether reading them guarantees the limit


def plan_repair(mass: torch.Tensor, radius: torch.Tensor, repairable: torch.Tensor, limit: float) -> Repair:
    """The fewest pages, by gain, whose exact reading guarantees TV <= limit before they are read.

    With g_j = M_j (e^{c_j} - 1) and h_j = M_j (1 - e^{-c_j}), reading the pages of a set J exact leaves

        E+ after = (E+ - sum_J g_j) / Z_J,    Z_J >= 1 - sum_J h_j,    TV <= E+,

    because the weights are renormalised. So J suffices when sum_J (g_j - limit h_j) >= E+ - limit: pages are sorted by that
    gain and the shortest prefix that reaches it is taken. A page whose radius is no guarantee (above RADIUS_LIMIT or not
    finite) is always repaired; its share in E+ is left out, and h_j = M_j. Gains are not negative for limit <= 1, so
    repairing more pages than planned (those of another head of the group) keeps the guarantee. It is one on the bound: the
    true error need not fall. Source: DESIGN section 7.

    Args:
        mass: [..., J], share of the attention mass of each group of tokens; they sum to 1.
        radius: [..., J], c >= |score error| in natural-log units.
        repairable: bool [..., J], groups that can be read exact (code pages with an original).
        limit: in (0, 1]. The exact read's own arithmetic, about e^c - 1 for its radius c, and the rounding of the masses are not
            in the formula: the caller takes them off the limit.

    Returns:
        A plan, made without a branch on data. Where the limit cannot be reached, all pages that help.

    Raises:
        ValueError: limit out of range.
    """
    if not 0 < limit <= 1:
        raise ValueError(f"limit must be in (0, 1], got {limit!r}: a total variation is never above 1")
    mass, radius = mass.double(), radius.double()
    lost = ~(radius <= RADIUS_LIMIT)
    forced = lost & repairable
    known = torch.where(lost, 0.0, radius)
    grow = mass * torch.expm1(known)
    shrink = torch.where(lost, mass, mass * -torch.expm1(-known))
    needed = grow.sum(-1, keepdim=True) - limit
    needed = needed + limit * torch.where(forced, shrink, 0.0).sum(-1, keepdim=True)

    gain = torch.where(repairable & ~lost, grow - limit * shrink, 0.0).clamp_min(0)
    gain, order = gain.sort(dim=-1, descending=True, stable=True)
    total = gain.cumsum(-1)
    before = torch.cat([torch.zeros_like(total[..., :1]), total[..., :-1]], -1)
    chosen = (before < needed) & (gain > 0)
    pages = torch.zeros_like(forced).scatter(-1, order, chosen) | forced
    reached = (total[..., -1:] >= needed)[..., 0] & ~(lost & ~repairable).any(-1)
    return Repair(pages, reached)
