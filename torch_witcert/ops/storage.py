"""Storage of one layer's certified KV cache: a pool of quantized pages and an exact tail (DESIGN section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from .formats import DEFAULT, KEY_GROUP, StoreFormat

PAGE_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (64, 80, 96, 128, 256)
MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Values of the source map, int8 [B, Hkv, M]: where a page slot is read from.
SOURCE_NONE = 0
SOURCE_CODES = 1

#: Values of `positions` that are not positions.
POSITION_PADDING = -1
POSITION_OVERFLOW = -2


class Note:
    """Index of a page note in `page_notes` [N, Hkv, Note.COUNT]; every note is an upper bound over the page's tokens."""

    VALUE_NORM = 0  # max ||V_t||
    VALUE_ERROR = 1  # max ||V_t - V^_t|| / (largest scale of V_t)
    KEY_NORM = 2  # max ||K_t||
    KEY_ERROR = 3  # max ||K_t - K^_t||
    KEY_ERROR_SCALED = 4  # max ||(K_t - K^_t) / k_scale||
    COUNT = 5


class PagedStore(NamedTuple):
    """The tensors of one layer, in the order in which the operators take them. Shapes: DESIGN section 4.

    Parts that a format does not have are empty tensors.
    """

    k_codes: torch.Tensor
    k_scale: torch.Tensor
    k_zero: torch.Tensor
    k_bypass: torch.Tensor
    v_codes: torch.Tensor
    v_scale: torch.Tensor
    v_zero: torch.Tensor
    page_notes: torch.Tensor
    page_keys: torch.Tensor
    k_tail: torch.Tensor
    v_tail: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.k_tail.shape[2] // 2


#: Parts of a store that belong to pages of the pool; the others are the exact tail of the rows.
POOL_PARTS = PagedStore._fields[:-2]


def tensor_shapes(
    num_pages: int,
    batch_size: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    store_format: StoreFormat = DEFAULT,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of a :class:`PagedStore`: a pool of any number of pages, a tail for each row."""
    key, value = store_format.key, store_format.value
    pool = (num_pages, num_kv_heads)
    tail = (batch_size, num_kv_heads, 2 * page_size, head_dim)
    scales = (*pool, page_size, head_dim // KEY_GROUP) if key.per_token else (*pool, head_dim)
    value_scales = (*pool, page_size, value.groups(head_dim))

    def present(condition: bool, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if condition else (0,)

    value_row = page_size if value.is_exact else value.grid.row_bytes(page_size)
    return {
        "k_codes": ((*pool, page_size, key.grid.row_bytes(head_dim)), code_dtype(key.element)),
        "k_scale": (scales, torch.bfloat16),
        "k_zero": (present(key.is_asymmetric, (*pool, head_dim)), dtype),
        "k_bypass": (present(key.outlier_pairs > 0, (*pool, page_size, 2 * key.outlier_pairs)), dtype),
        "v_codes": ((*pool, head_dim, value_row), dtype if value.is_exact else code_dtype(value.element)),
        "v_scale": (present(not value.is_exact, value_scales), torch.bfloat16),
        "v_zero": (present(value.is_grouped, value_scales), dtype),
        "page_notes": ((*pool, Note.COUNT), torch.float32),
        "page_keys": (present(store_format.is_dithered, pool), torch.int64),
        "k_tail": (tail, dtype),
        "v_tail": (tail, dtype),
    }


def code_dtype(element: str) -> torch.dtype:
    """int8 codes are signed; packed codes and the bits of fp8 are bytes."""
    return torch.int8 if element == "int8" else torch.uint8


@dataclass(frozen=True)
class StoreShape:
    """Geometry of one layer's store; checked when it is made.

    Args:
        batch_size: rows B.
        pages_per_row: page slots M of a row.
        num_kv_heads: Hkv.
        page_size: P, one of 16, 32, 64, 128.
        head_dim: D, 64, 80, 96, 128 or 256, of keys and of values.
        dtype: the model's dtype, bfloat16, float16 or float32.
        store_format: how keys and values are stored.
        pool_pages: N, pages of the pool; None for B * M.
    """

    batch_size: int
    pages_per_row: int
    num_kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype
    store_format: StoreFormat = DEFAULT
    pool_pages: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self)[:3]:
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} must be a positive int, got {value!r}")
        for name, supported in (("page_size", PAGE_SIZES), ("head_dim", HEAD_DIMS), ("dtype", MODEL_DTYPES)):
            value = getattr(self, name)
            if value not in supported:
                raise ValueError(f"{name} must be one of {supported}, got {value!r}")
        self.store_format.key.check_head_dim(self.head_dim)

    @property
    def num_pages(self) -> int:
        return self.batch_size * self.pages_per_row if self.pool_pages is None else self.pool_pages

    def tensor_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor of a :class:`PagedStore`."""
        return tensor_shapes(
            self.num_pages,
            self.batch_size,
            self.num_kv_heads,
            self.page_size,
            self.head_dim,
            self.dtype,
            self.store_format,
        )

    def nbytes(self, parts: tuple[str, ...] = PagedStore._fields) -> int:
        """Bytes of one layer's store, or of some of its parts, exactly what :meth:`allocate` allocates."""
        shapes = self.tensor_shapes()
        return sum(math.prod(shapes[name][0]) * shapes[name][1].itemsize for name in parts)

    def page_nbytes(self) -> int:
        """Bytes of one page of the pool, all KV heads."""
        return self.nbytes(POOL_PARTS) // self.num_pages

    def allocate(self, device: torch.device | str) -> PagedStore:
        """Allocate the tensors on `device`, zero-filled."""
        return PagedStore(
            **{
                name: torch.zeros(shape, dtype=dtype, device=device)
                for name, (shape, dtype) in self.tensor_shapes().items()
            }
        )


def identity_page_table(batch_size: int, pages_per_row: int, device: torch.device | str) -> torch.Tensor:
    """Page table of a dense static cache, int32 [B, M]: row b owns pages b * M .. (b + 1) * M - 1."""
    return torch.arange(batch_size * pages_per_row, dtype=torch.int32, device=device).view(batch_size, pages_per_row)


def derive_source_map(
    lengths: torch.Tensor, num_kv_heads: int, pages_per_row: int, page_size: int, kept: int | None = None
) -> torch.Tensor:
    """Source map of a row's page slots from the lengths before a forward: complete pages are read as codes.

    Args:
        lengths: int32 [B], tokens stored before the forward.
        kept: complete pages that are still stored, the newest ones; all where left out.

    Returns:
        int8 [B, Hkv, M].
    """
    slots = torch.arange(pages_per_row, device=lengths.device)
    complete = (lengths // page_size)[:, None]
    stored = slots[None, :] < complete
    if kept is not None and kept < pages_per_row:
        stored = stored & (slots[None, :] >= complete - kept)
    sources = torch.where(stored, SOURCE_CODES, SOURCE_NONE).to(torch.int8)
    return sources[:, None, :].expand(-1, num_kv_heads, -1).contiguous()
