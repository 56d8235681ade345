"""The worst that score errors inside given radii can do, in float64: what a bound is tested against.

Exact attention p is proportional to p~ e^shift with |shift_t| <= c_t. Both distances are largest at a corner of the box:
p(S) - p~(S) is monotone in every shift for any set S, and ||sum p~ r (V - o~)|| / sum p~ r is a convex function divided by
a positive linear one. So all 2^n sign patterns give the exact worst case, and a search over signs gives a lower bound of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Most tokens whose sign patterns are enumerated.
ENUMERATED = 12
#: Relative rounding of the distances below, per token, in units of 2^-53: no term is lost to cancellation.
ULPS_PER_TOKEN = 8


def corner_rounding(tokens: int) -> float:
    """Relative error that the float64 distances of this file can have."""
    return (ULPS_PER_TOKEN * tokens + 64) * 2.0**-53


def shifted_difference(weights: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """p - p~ [..., n] for p proportional to p~ e^shift, without cancellation.

    Args:
        weights: float64 [..., n], p~, sums to 1.
        shift: float64 [..., n].
    """
    change = (weights * torch.expm1(shift)).sum(-1, keepdim=True)
    whole = (weights * torch.exp(shift)).sum(-1, keepdim=True)
    log_sum = torch.where(change.abs() < 0.5, torch.log1p(change.clamp_min(-0.5)), whole.log())
    return weights * torch.expm1(shift - log_sum)


def shifted_total_variation(weights: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Total variation [...] between p~ and p.

    What the heaviest token gains or loses is what the others lose or gain, and only the latter is free of cancellation.
    """
    others = _others(weights) * shifted_difference(weights, shift)
    return torch.maximum(others.clamp_min(0).sum(-1), (-others).clamp_min(0).sum(-1))


def shifted_output_distance(weights: torch.Tensor, shift: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """||sum (p - p~) V|| [...] for values [..., n, d]."""
    heaviest = weights.argmax(-1)[..., None, None].expand(*weights.shape[:-1], 1, values.shape[-1])
    centred = values - values.expand(*weights.shape, values.shape[-1]).gather(-2, heaviest)
    return (shifted_difference(weights, shift)[..., None, :] @ centred)[..., 0, :].norm(dim=-1)


def sign_corners(tokens: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """All sign patterns, float64 [2^n, n]."""
    bits = torch.arange(2**tokens, device=device)[:, None] >> torch.arange(tokens, device=device)
    return (bits & 1).double() * 2 - 1


def worst_total_variation(weights: torch.Tensor, radius: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Largest total variation between p~ and p, float64 [...].

    Args:
        weights: float64 [..., n], p~, sums to 1.
        radius: float64 [..., n], c >= 0.
        seed: of the search, where n > ENUMERATED.

    Returns:
        The exact maximum for n <= ENUMERATED, otherwise a lower bound of it.
    """
    return _worst(lambda shift: shifted_total_variation(weights[..., None, :], shift), weights, radius, seed)


def worst_output_distance(
    weights: torch.Tensor, radius: torch.Tensor, values: torch.Tensor, seed: int = 0
) -> torch.Tensor:
    """Largest ||sum (p - p~) V||, float64 [...], for values float64 [..., n, d]; else as `worst_total_variation`."""
    distance = lambda shift: shifted_output_distance(weights[..., None, :], shift, values[..., None, :, :])
    return _worst(distance, weights, radius, seed)


def _others(weights: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(weights).scatter(-1, weights.argmax(-1, keepdim=True), 0.0)


def _worst(
    distance: Callable[[torch.Tensor], torch.Tensor], weights: torch.Tensor, radius: torch.Tensor, seed: int
) -> torch.Tensor:
    if weights.shape[-1] <= ENUMERATED:
        return distance(sign_corners(weights.shape[-1], weights.device) * radius[..., None, :]).amax(-1)
    return _search(distance, weights, radius, seed)


def _search(
    distance: Callable[[torch.Tensor], torch.Tensor],
    weights: torch.Tensor,
    radius: torch.Tensor,
    seed: int,
    random_starts: int = 12,
    sweeps: int = 3,
) -> torch.Tensor:
    """Coordinate search: flip one sign at a time while that helps, from thresholds by radius and by weight and from random signs."""
    generator = torch.Generator().manual_seed(seed)
    tokens = weights.shape[-1]
    starts = []
    for order in (radius, weights):
        rank = order.argsort(-1).argsort(-1)
        for share in (0.25, 0.5, 0.75, 1 - 1 / tokens):
            above = torch.where(rank >= share * tokens, 1.0, -1.0).double()
            starts += [above, -above]
    noise = torch.rand(random_starts, *weights.shape, generator=generator, dtype=torch.float64).to(weights.device)
    starts += list(torch.where(noise < 0.5, -1.0, 1.0).double())
    signs = torch.stack(starts, -2)
    best = distance(signs * radius[..., None, :])
    for _ in range(sweeps):
        for token in range(tokens):
            flipped = signs.clone()
            flipped[..., token].neg_()
            tried = distance(flipped * radius[..., None, :])
            better = tried > best
            signs = torch.where(better[..., None], flipped, signs)
            best = torch.where(better, tried, best)
    return best.amax(-1)
