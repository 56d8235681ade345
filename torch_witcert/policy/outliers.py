"""Which RoPE pairs of the keys are kept exact: those with the most energy, chosen once and then fixed.

Rotary embedding turns the two channels of a pair into each other, so an outlier of one of them is an outlier of both
(WitCert, outlier bypass). Tensor operations only, without a look at the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ops.formats import MOST_OUTLIER_PAIRS

#: Where the channels of pair i are: "half" i and i + D / 2 (Llama and its relatives), "interleaved" 2 i and 2 i + 1. Where
#: only some channels are rotated these are pairs of channels all the same, which are kept exact, but not those of RoPE.
ROPE_LAYOUTS = ("half", "interleaved")


def _pair_channels(pairs: torch.Tensor, head_dim: int, rope: str) -> torch.Tensor:
    """int32 [..., 2m], the two channels of each pair [..., m] beside each other."""
    if rope not in ROPE_LAYOUTS:
        raise ValueError(f"rope must be one of {ROPE_LAYOUTS}, got {rope!r}")
    first, step = (pairs, head_dim // 2) if rope == "half" else (2 * pairs, 1)
    return torch.stack([first, first + step], -1).flatten(-2).to(torch.int32)


def choose_outlier_channels(
    keys: torch.Tensor, valid: torch.Tensor | None, pairs: int, rope: str = "half"
) -> torch.Tensor:
    """Channels of the pairs with the most energy, the sum of squares over all valid tokens of both channels.

    Args:
        keys: [B, Hkv, T, D] with rotary embedding applied; a NaN or an Inf counts as 0.
        valid: bool [B, T], which columns are tokens; None for all. The others may hold any bytes.
        pairs: m of each KV head, 0 to 16 and at most D / 2.
        rope: "half" or "interleaved".

    Returns:
        int32 [Hkv, 2m]: exactly m pairs by ascending index, also where energies are equal (the lowest indices then).

    Raises:
        ValueError: an argument out of range.
    """
    head_dim = keys.shape[-1]
    if (
        not isinstance(pairs, int)
        or isinstance(pairs, bool)
        or not 0 <= pairs <= min(MOST_OUTLIER_PAIRS, head_dim // 2)
    ):
        raise ValueError(f"pairs must be an int in [0, {min(MOST_OUTLIER_PAIRS, head_dim // 2)}], got {pairs!r}")
    used = keys.isfinite() if valid is None else keys.isfinite() & valid[:, None, :, None]
    # float64: neither the squares overflow, nor does the order of the rows decide.
    energy = torch.where(used, keys, 0.0).to(torch.float64).square().sum((0, 2))
    channels = _pair_channels(torch.arange(head_dim // 2, device=keys.device), head_dim, rope).long()
    energy = energy[:, channels].unflatten(-1, (-1, 2)).sum(-1)
    strongest = energy.argsort(dim=-1, descending=True, stable=True)[:, :pairs]
    return _pair_channels(strongest.sort(-1).values, head_dim, rope)


def outlier_channels_of(
    indices: Sequence[Sequence[int]],
    head_dim: int,
    rope: str = "half",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Channels of given pairs.

    Args:
        indices: [KV head][m], distinct indices of pairs in [0, D / 2), as many for each head.
        head_dim: D.
        rope: "half" or "interleaved".
        device: of the result.

    Returns:
        int32 [Hkv, 2m], by ascending index of the pair.

    Raises:
        ValueError: naming the head and what is wrong with it.
    """
    for head, pairs in enumerate(indices):
        if len(pairs) != len(indices[0]):
            raise ValueError(f"KV head {head} has {len(pairs)} outlier pairs, KV head 0 has {len(indices[0])}")
        if len(set(pairs)) != len(pairs) or not all(0 <= index < head_dim // 2 for index in pairs):
            raise ValueError(
                f"outlier pairs of KV head {head} must be distinct indices in [0, {head_dim // 2}), got {tuple(pairs)}"
            )
    rows = torch.tensor([sorted(pairs) for pairs in indices], dtype=torch.int64, device=device)
    return _pair_channels(rows, head_dim, rope)


def outlier_indices_of(channels: torch.Tensor, rope: str = "half") -> tuple[tuple[int, ...], ...]:
    """Inverse of :func:`outlier_channels_of`: [KV head][m] from int32 [Hkv, 2m]; copies to the host."""
    first = channels[:, ::2] if rope == "half" else channels[:, ::2] // 2
    return tuple(tuple(row) for row in first.tolist())
