"""The ladder: which rungs each head-read has to climb, as bits.

Source: Runtime-Certified Bounded-Error Quantized Attention, section "adaptive precision and fallback ladder", four rungs.
"""

from __future__ import annotations

import torch


class Rung:
    """Bits of a head-read's rungs, int32. Each says that its own check fired; a higher one does not clear a lower one."""

    WIDEN = 1  # twice the pages with exact keys (coverage.widen_pages)
    VALUES = 2  # exact values for some pages (values.choose_values)
    HEAD = 4  # every page of the head exact (consistency.rank_differs or boundary_open)
    LAYER = 8  # every page of the row's layer exact, all heads (consistency.scores_differ)

    #: The head-read ends exact, whatever the others say.
    EXACT = HEAD | LAYER
    ALL = WIDEN | VALUES | EXACT


def climb(
    widened: torch.Tensor, value_pages: torch.Tensor, rank: torch.Tensor, boundary: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """Rungs of head-reads.

        WIDEN  = widened        VALUES = any page of value_pages
        HEAD   = rank or boundary
        LAYER  = any of scores over the heads and query tokens of the row

    A layer means one row's layer: damage in one sequence of a batch changes no other. No branch on data.

    Args:
        widened: bool [..., H, T], of :func:`~torch_witcert.policy.coverage.widen_pages`.
        value_pages: bool [..., H, T, J], of :func:`~torch_witcert.policy.values.choose_values`.
        rank: bool [..., H, T], of :func:`~torch_witcert.policy.consistency.rank_differs`.
        boundary: bool [..., H, T], of :func:`~torch_witcert.policy.consistency.boundary_open`.
        scores: bool [..., H, T], of :func:`~torch_witcert.policy.consistency.scores_differ`.

    Returns:
        int32 [..., H, T], bits of :class:`Rung`.

    Raises:
        ValueError: an argument that is not bool, or whose shape is not that of the others.
    """
    arguments = {
        "widened": widened,
        "value_pages": value_pages,
        "rank": rank,
        "boundary": boundary,
        "scores": scores,
    }
    for name, fired in arguments.items():
        shape = fired.shape[:-1] if name == "value_pages" else fired.shape
        if fired.dtype != torch.bool or shape != widened.shape or len(shape) < 2:
            raise ValueError(
                f"{name} must be bool [..., H, T{', J' if name == 'value_pages' else ''}] with the leading dimensions of "
                f"widened, {tuple(widened.shape)}, got {fired.dtype} {tuple(fired.shape)}"
            )
    layer = scores.any(-1, keepdim=True).any(-2, keepdim=True).expand_as(scores)
    return (
        widened.to(torch.int32) * Rung.WIDEN
        | value_pages.any(-1).to(torch.int32) * Rung.VALUES
        | (rank | boundary).to(torch.int32) * Rung.HEAD
        | layer.to(torch.int32) * Rung.LAYER
    )
