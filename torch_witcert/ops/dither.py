"""Subtractive dither: a counter-based generator, so that a read can rebuild what the write has added.

Philox4x32-10 (Salmon et al., SC 2011). The key is the page key; the counter is (16 channels, token in the page, layer and
K or V, KV head); each of its 128 bits gives 16 channels one byte j, and the dither is (2 j - 255) / 512: the middles of 256
equal parts of (-1/2, 1/2), exact in bfloat16. WitCert, "write kernel", draws from the same five coordinates.
"""

from __future__ import annotations

import torch

#: Logical pages of a row that a page key can name.
PAGE_KEYS = 2**31
#: Request seeds lie in [0, SEEDS): the page key seed * 2^31 + page is a different one for every (seed, page).
SEEDS = 2**32
#: Distance of a dither from the real number that it stands for, at most: half a part of the grid.
GRID_ERROR = 2.0**-9
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a * b; int64 holds no product of two 32-bit numbers, so b is multiplied in halves."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = (low >> 16) + high
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10.

    Args:
        counter: four int64 tensors that hold 32-bit numbers; they broadcast.
        key: two of them.

    Returns:
        Four int64 tensors that hold 32-bit numbers.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return c0, c1, c2, c3


def page_key(seeds: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Key of a logical page of a request, int64: seed * 2^31 + page."""
    return seeds * PAGE_KEYS + pages


def dither(
    page_keys: torch.Tensor, layer: int, is_value: bool, mode: str, page_size: int, head_dim: int
) -> torch.Tensor | None:
    """Dither of pages.

    Args:
        page_keys: int64 [..., Hkv].
        layer: index of the attention layer in the model.
        is_value: draws for V; K's are others.
        mode: "stream", "tile" (the same for all pages of a request) or "none".
        page_size, head_dim: P and D.

    Returns:
        float32 [..., Hkv, P, D] in (-1/2, 1/2); None for "none".
    """
    if mode == "none":
        return None
    if mode == "tile":
        page_keys = page_keys // PAGE_KEYS * PAGE_KEYS
    device = page_keys.device
    keys = page_keys[..., None, None]
    heads = torch.arange(page_keys.shape[-1], device=device)[:, None, None]
    token = torch.arange(page_size, device=device)[:, None]
    block = torch.arange(-(-head_dim // 16), device=device)
    use = torch.full_like(block, 2 * layer + is_value)
    words = torch.stack(philox((block, token, use, heads), (keys & _MASK, keys >> 32)), -1)
    shifts = torch.arange(0, 32, 8, device=device)
    byte = (words[..., None] >> shifts) & 0xFF
    return ((2 * byte - 255) / 512).to(torch.float32).flatten(-3)[..., :head_dim]
