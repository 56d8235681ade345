"""Caches and reads for the kernel tests: small under the interpreter, the same code on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_witcert.ops.formats import DEFAULT, StoreFormat
from torch_witcert.ops.radii import DETERMINISTIC
from torch_witcert.ops.reference import kv_write_reference
from torch_witcert.ops.splits import pages_per_split
from torch_witcert.ops.storage import PagedStore, StoreShape, derive_source_map, identity_page_table

LAYER = 3


class Case(NamedTuple):
    """Arguments of one read and of the write that follows it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor
    seeds: torch.Tensor
    outlier_channels: torch.Tensor
    log_risk: torch.Tensor
    sinks: torch.Tensor
    store: PagedStore
    window: int
    softcap: float
    radii: str
    store_format: str

    def attention_arguments(self) -> tuple:
        pages_per_row, page_size = self.page_table.shape[1], self.store.page_size
        source_map = derive_source_map(self.lengths, self.k.shape[1], pages_per_row, page_size)
        sm_scale = self.q.shape[-1] ** -0.5
        splits = pages_per_split(page_size, pages_per_row)
        state = (self.positions, self.lengths, self.page_table, source_map)
        extras = (self.log_risk, self.sinks, self.outlier_channels)
        numbers = (sm_scale, self.window, self.softcap, splits, LAYER, self.radii, self.store_format)
        return (self.q, self.k, self.v, *state, *extras, *self.store, *numbers)

    def write_arguments(self) -> tuple:
        valid = self.positions >= 0
        columns = (~valid).int().argsort(dim=1, stable=True).int()
        state = (columns, self.lengths, valid.sum(1).int(), self.page_table, self.seeds, self.outlier_channels)
        return (self.k, self.v, *state, *self.store, LAYER, self.store_format)

    def to(self, device: torch.device | str) -> Case:
        """A copy of everything on a device."""
        store = PagedStore(*(tensor.to(device, copy=True) for tensor in self.store))
        tensors = {
            name: part.to(device, copy=True) for name, part in self._asdict().items() if isinstance(part, torch.Tensor)
        }
        return self._replace(store=store, **tensors)


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
    store_format: StoreFormat = DEFAULT,
    radii: str = DETERMINISTIC.name,
    softcap: float = 0.0,
    sinks: bool = False,
) -> Case:
    """Rows with `lengths` cached tokens, written by the reference, and `new_tokens` fresh ones. Row b draws from seed + b."""
    batch = len(lengths)
    pages_per_row = pages_per_row or -(-(max(lengths) + new_tokens) // page_size) + 1
    shape = StoreShape(batch, pages_per_row, kv_heads, page_size, head_dim, dtype, store_format)
    store = shape.allocate("cpu")
    for tensor in store:
        if tensor.numel():
            tensor.view(torch.uint8).fill_(unused_byte)
    outliers = 2 * store_format.key.outlier_pairs
    generator = torch.Generator().manual_seed(1)
    channels = [torch.randperm(head_dim, generator=generator)[:outliers] for _ in range(kv_heads)]
    outlier_channels = torch.stack(channels).int() if outliers else torch.empty(0, dtype=torch.int32)
    seeds = torch.arange(batch) * 7 + seed if store_format.is_dithered else torch.empty(0, dtype=torch.int64)
    log_risk = torch.full((batch, new_tokens), 12.0) if "probabilistic" in radii else torch.empty(0)
    logits = torch.linspace(-2, 3, kv_heads * group) if sinks else torch.empty(0)
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
    state = (columns, torch.zeros_like(count), count, table, seeds, outlier_channels)
    kv_write_reference(history[0], history[1], *state, *store, LAYER, store_format.name)
    positions = count[:, None] + torch.arange(new_tokens, dtype=torch.int32)
    extras = (seeds, outlier_channels, log_risk, logits)
    return Case(q, k, v, positions, count, table, *extras, store, window, softcap, radii, store_format.name)
