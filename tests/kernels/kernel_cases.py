"""Caches and reads for the kernel tests: small under the interpreter, the same code on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_witcert.ops.reference import kv_write_reference
from torch_witcert.ops.splits import pages_per_split
from torch_witcert.ops.storage import PagedStore, StoreShape, derive_source_map, identity_page_table


class Case(NamedTuple):
    """Arguments of one read and of the write that follows it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor
    store: PagedStore
    window: int

    def attention_arguments(self) -> tuple:
        pages_per_row, page_size = self.page_table.shape[1], self.store.page_size
        source_map = derive_source_map(self.lengths, self.k.shape[1], pages_per_row, page_size)
        sm_scale = self.q.shape[-1] ** -0.5
        splits = pages_per_split(page_size, pages_per_row)
        state = (self.positions, self.lengths, self.page_table, source_map)
        return (self.q, self.k, self.v, *state, *self.store, sm_scale, self.window, splits)

    def write_arguments(self) -> tuple:
        valid = self.positions >= 0
        columns = (~valid).int().argsort(dim=1, stable=True).int()
        return (self.k, self.v, columns, self.lengths, valid.sum(1).int(), self.page_table, *self.store)

    def to(self, device: torch.device | str) -> Case:
        """A copy of everything on a device."""
        store = PagedStore(*(tensor.to(device, copy=True) for tensor in self.store))
        parts = (part.to(device, copy=True) for part in self[:6])
        return Case(*parts, store, self.window)


def make_case(
    lengths: list[int],
    new_tokens: int,
    *,
    kv_heads: int = 1,
    group: int = 1,
    page_size: int = 16,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    page_table: torch.Tensor | None = None,
    pages_per_row: int | None = None,
    seed: int = 0,
    unused_byte: int = 0xFF,
) -> Case:
    """Rows with `lengths` cached tokens, written by the reference, and `new_tokens` fresh ones. Row b draws from seed + b."""
    batch = len(lengths)
    pages_per_row = pages_per_row or -(-(max(lengths) + new_tokens) // page_size) + 1
    shape = StoreShape(batch, pages_per_row, kv_heads, page_size, head_dim, dtype)
    store = shape.allocate("cpu")
    for tensor in store:
        tensor.view(torch.uint8).fill_(unused_byte)
    table = identity_page_table(batch, pages_per_row, "cpu") if page_table is None else page_table
    capacity = pages_per_row * page_size
    fresh = []
    cached = []
    for row in range(batch):
        generator = torch.Generator().manual_seed(seed + row)
        cached.append(torch.randn(2, kv_heads, capacity, head_dim, generator=generator))
        fresh.append(torch.randn(2 * kv_heads + kv_heads * group, new_tokens, head_dim, generator=generator))
    history = torch.stack(cached, 1).to(dtype)
    k, v, q = torch.stack(fresh).to(dtype).split([kv_heads, kv_heads, kv_heads * group], 1)
    count = torch.tensor(lengths, dtype=torch.int32)
    columns = torch.arange(capacity, dtype=torch.int32).expand(batch, -1)
    kv_write_reference(history[0], history[1], columns, torch.zeros_like(count), count, table, *store)
    positions = count[:, None] + torch.arange(new_tokens, dtype=torch.int32)
    return Case(q, k, v, positions, count, table, store, window)
