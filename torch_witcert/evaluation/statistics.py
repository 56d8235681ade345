"""Figures that the commands print, from tensors of bounds and true distances."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: The papers' limit on the total variation of a read; coverage is the share of reads whose bound is at most this.
TAU = 0.2


@dataclass(frozen=True)
class BoundFigures:
    """Bounds on total variation against the truth, over all reads.

    Args:
        reads: (layer, head, query) reads.
        violations: reads whose true total variation exceeds the bound; must be 0.
        coverage: share of reads with a bound of at most tau.
        median_bound, max_bound: over all reads.
        max_true: largest true total variation.
        tightness: median over reads of bound / true total variation (reads without any error left out).
        spearman: rank correlation of bound and true total variation.
    """

    reads: int
    violations: int
    coverage: float
    median_bound: float
    max_bound: float
    max_true: float
    tightness: float
    spearman: float


def bound_figures(bound: torch.Tensor, true: torch.Tensor, tau: float = TAU) -> BoundFigures:
    """Compare bounds with true total variations of the same reads (any shape, the same for both)."""
    within = bound <= tau  # in the bound's own dtype, as the gate compares
    bound, true = bound.flatten().double(), true.flatten().double()
    ratio = bound[true > 0] / true[true > 0]
    return BoundFigures(
        reads=bound.numel(),
        violations=int((true > bound).sum()),
        coverage=float(within.double().mean()),
        median_bound=float(bound.median()),
        max_bound=float(bound.max()),
        max_true=float(true.max()),
        tightness=float(ratio.median()) if ratio.numel() else float("nan"),
        spearman=spearman(bound, true),
    )


def average_ranks(x: torch.Tensor) -> torch.Tensor:
    """Ranks from 0 of a vector; equal values share the mean of their ranks."""
    _, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0) - 1
    return (last.double() - (counts.double() - 1) / 2)[inverse]


def spearman(x: torch.Tensor, y: torch.Tensor) -> float:
    """Spearman's rank correlation of two vectors."""
    return float(torch.corrcoef(torch.stack([average_ranks(x), average_ranks(y)]))[0, 1])
