"""Cases for the bounds of the certificate: distributions, radii and values that make them work hard."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_witcert.ops.arithmetic import Arithmetic
from torch_witcert.ops.certificate import Groups
from torch_witcert.ops.formats import DEFAULT
from torch_witcert.testing.corners import corner_rounding, worst_output_distance, worst_total_variation

WEIGHT_KINDS = ("uniform", "dirichlet", "vanishing", "dominated", "almost_one", "ties")
RADIUS_KINDS = ("constant", "uniform", "spread", "tiny", "large", "massless_page")
ARITHMETIC = Arithmetic.of(128, 64, 2048, 32, 1, torch.bfloat16, DEFAULT, softcap=0.0)


class Case(NamedTuple):
    """A batch of reads in float64: n tokens in J groups that share a radius."""

    weights: torch.Tensor  # [B, n], p~
    radius: torch.Tensor  # [B, n], shared in a group
    group: torch.Tensor  # int64 [n], group of each token
    count: int  # J

    def groups(self, dtype: torch.dtype = torch.float64) -> Groups:
        index = self.group.expand_as(self.weights)
        zeros = self.weights.new_zeros(self.weights.shape[0], self.count).to(dtype)
        weights = self.weights.to(dtype)
        return Groups(
            mass=zeros.scatter_add(1, index, weights),
            radius=zeros.scatter_reduce(1, index, self.radius.to(dtype), "amax"),
            top=zeros.scatter_reduce(1, index, weights, "amax"),
        )

    def largest_in_groups(self, per_token: torch.Tensor) -> torch.Tensor:
        index = self.group.expand_as(per_token)
        return per_token.new_zeros(per_token.shape[0], self.count).scatter_reduce(1, index, per_token, "amax")


def _uniform(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def make_weights(kind: str, batch: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    noise = _uniform(generator, batch, tokens)
    if kind == "uniform":
        weights = torch.ones_like(noise)
    elif kind == "dirichlet":
        weights = -(noise.log() ** 3)
    elif kind == "vanishing":
        weights = 10 ** (-300 * noise)
    elif kind == "dominated":
        weights = noise
        weights[:, 0] = tokens * 10 ** (3 * _uniform(generator, batch))
    elif kind == "almost_one":
        weights = noise * 10 ** (-16 * _uniform(generator, batch, 1))
        weights[:, 0] = 1
    elif kind == "ties":
        weights = (noise * 3).floor() + 1
    else:
        raise ValueError(kind)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights.gather(1, _uniform(generator, batch, tokens).argsort(1))


def make_radius(kind: str, batch: int, groups: int, generator: torch.Generator) -> torch.Tensor:
    noise = _uniform(generator, batch, groups)
    level = 10 ** (3 * _uniform(generator, batch, 1) - 2)
    if kind == "constant":
        return level.expand(-1, groups)
    if kind == "uniform":
        return noise * level
    if kind == "spread":
        return 40 * 10 ** (-6 * noise)
    if kind == "tiny":
        return 1e-12 * noise
    if kind == "large":
        return 30 + 10 * noise
    if kind == "massless_page":
        return torch.where(torch.arange(groups) == 0, 20.0, 0.3 * noise)
    raise ValueError(kind)


def make_case(weight_kind: str, radius_kind: str, batch: int, tokens: int, groups: int, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    group = torch.cat([torch.arange(groups), torch.randint(groups, (tokens - groups,), generator=generator)])
    weights = make_weights(weight_kind, batch, tokens, generator)
    radius = make_radius(radius_kind, batch, groups, generator)[:, group]
    if radius_kind == "massless_page":
        weights = torch.where(group == 0, weights * 1e-12, weights)
        weights = weights / weights.sum(-1, keepdim=True)
    return Case(weights, radius, group, groups)


def violations(bound: torch.Tensor, truth: torch.Tensor, tokens: int, absolute: torch.Tensor | float = 0.0) -> int:
    """Reads whose worst corner exceeds the bound by more than float64 can have added to both; no tolerance for float32 bounds.

    This is the judge of every claim, the true ones and the false ones.
    """
    rounding = corner_rounding(tokens) if bound.dtype == torch.float64 else 0.0
    return int((truth > bound.double() * (1 + rounding) + absolute).sum())


def worst(case: Case) -> torch.Tensor:
    """The worst corner; a total variation is at most 1, whatever rounding says."""
    return worst_total_variation(case.weights, case.radius).clamp_max(1)


def worst_output(case: Case, values: torch.Tensor) -> torch.Tensor:
    return worst_output_distance(case.weights, case.radius, values)
