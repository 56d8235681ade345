"""Shapes of a decode step that are measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Every shape is measured in this dtype.
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """One decode step: one new token in each row of a batch.

    Args:
        name: what tables call it.
        heads, kv_heads: query heads H and KV heads Hkv; H is a multiple of Hkv.
        head_dim: D.
        batch: rows B.
        tokens: S, cached tokens of every row.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    tokens: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of one row's K and V of one token, all KV heads."""
        return 2 * self.kv_heads * self.head_dim * DTYPE.itemsize

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries of all rows; an output takes the same."""
        return self.batch * self.heads * self.head_dim * DTYPE.itemsize

    @property
    def dense_bytes(self) -> int:
        """Bytes of the cached K and V of all rows."""
        return self.batch * self.tokens * self.token_bytes

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        return f"{self.name}: {heads}, batch {self.batch}, {self.tokens:,} cached tokens"


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("S1", 32, 8, 128, 1, 131072),
        Shape("S2", 32, 8, 128, 16, 8192),
        Shape("S3", 28, 4, 128, 8, 32768),
        Shape("S4", 9, 3, 64, 32, 8192),
        Shape("S5", 32, 8, 128, 64, 2048),
    )
}
