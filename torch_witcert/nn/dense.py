"""Exact layer of a `CertifiedCache`, for attention modules that were left unconverted (`convert(..., strict=False)`)."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..ops.storage import StoreShape
from .exact import Scores, masked_attention, prefill_attention, query_blocks
from .layers import Identity, RaggedLayer
from .step import CacheState


class DenseLayer(RaggedLayer):
    """Keys and values in the model's dtype, [B, Hkv, capacity, D], at the same ragged positions as in certified layers."""

    def __init__(self, index: int, shape: StoreShape, state: CacheState, identity: Identity | None) -> None:
        super().__init__(index, shape, state, identity)
        # One slot more than the capacity: columns that are not stored are written there, and it is never read.
        size = (shape.batch_size, shape.num_kv_heads, state.capacity + 1, shape.head_dim)
        self.dense_keys = torch.zeros(size, dtype=shape.dtype, device=self.device)
        self.dense_values = torch.zeros(size, dtype=shape.dtype, device=self.device)

    def reset(self) -> None:
        """Clear the tokens: a masked slot that still held a NaN would spoil the sum of values."""
        self.dense_keys.zero_()
        self.dense_values.zero_()

    def forget_beyond(self, lengths: torch.Tensor) -> None:
        slot = torch.arange(self.dense_keys.shape[2], device=lengths.device)
        unused = (slot >= lengths[:, None])[:, None, :, None]
        for tensor in (self.dense_keys, self.dense_values):
            tensor.masked_fill_(unused, 0)

    def take_rows(self, index: torch.Tensor) -> None:
        for tensor in (self.dense_keys, self.dense_values):
            tensor.copy_(tensor[index])

    def resize(self, index: torch.Tensor, sources: dict[int, torch.Tensor]) -> None:
        self.shape = replace(self.shape, batch_size=len(index))
        self.dense_keys, self.dense_values = self.dense_keys[index], self.dense_values[index]

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        valid: torch.Tensor | None,
        scores: Scores,
    ) -> torch.Tensor:
        state = self.state
        plan = state.enter(self.index, valid, q.shape[2])
        slot = torch.where(plan.positions >= 0, plan.positions, state.capacity).to(torch.int64)
        index = slot[:, None, :, None].expand(k.shape)
        self.dense_keys.scatter_(2, index, k)
        self.dense_values.scatter_(2, index, v)
        # What a forward that failed half-way wrote behind them, a NaN perhaps, was never stored.
        self.forget_beyond(state.lengths + plan.counts)
        if plan.prefill:
            out, _ = prefill_attention(q, k, v, plan.positions, plan.ragged, scores)
        else:
            keys, values = self.dense_keys[:, :, : state.capacity], self.dense_values[:, :, : state.capacity]
            slots = torch.arange(state.capacity, dtype=torch.int32, device=q.device).expand(state.batch_size, -1)
            parts = [
                masked_attention(q[:, :, rows], keys, values, plan.positions[:, rows], slots, scores)
                for rows in query_blocks(q.shape[2], scores.mask_rows(q, k))
            ]
            out = torch.cat(parts, 2)
        state.leave(self.index)
        return out
