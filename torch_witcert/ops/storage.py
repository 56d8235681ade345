"""Storage of one layer's certified KV cache: a pool of quantized pages and an exact tail (DESIGN section 4)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

PAGE_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (64, 128)
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
    VALUE_ERROR = 1  # max ||V_t - V^_t|| / v_scale_t
    KEY_NORM = 2  # max ||K_t||
    KEY_ERROR = 3  # max ||K_t - K^_t||
    KEY_ERROR_SCALED = 4  # max ||(K_t - K^_t) / k_scale||
    COUNT = 5


class PagedStore(NamedTuple):
    """The tensors of one layer, in the order in which the operators take them. Shapes: DESIGN section 4."""

    k_codes: torch.Tensor
    k_scale: torch.Tensor
    k_zero: torch.Tensor
    v_codes: torch.Tensor
    v_scale: torch.Tensor
    page_notes: torch.Tensor
    k_tail: torch.Tensor
    v_tail: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.k_codes.shape[2]


def tensor_shapes(
    num_pages: int, batch_size: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of a :class:`PagedStore`: a pool of any number of pages, a tail for each row."""
    pool = (num_pages, num_kv_heads)
    tail = (batch_size, num_kv_heads, 2 * page_size, head_dim)
    return {
        "k_codes": ((*pool, page_size, head_dim), torch.int8),
        "k_scale": ((*pool, head_dim), torch.bfloat16),
        "k_zero": ((*pool, head_dim), dtype),
        "v_codes": ((*pool, head_dim, page_size), torch.int8),
        "v_scale": ((*pool, page_size, 1), torch.bfloat16),
        "page_notes": ((*pool, Note.COUNT), torch.float32),
        "k_tail": (tail, dtype),
        "v_tail": (tail, dtype),
    }


@dataclass(frozen=True)
class StoreShape:
    """Geometry of one layer's store; checked when it is made.

    Args:
        batch_size: rows B.
        pages_per_row: page slots M of a row; the pool has N = B * M pages.
        num_kv_heads: Hkv.
        page_size: P, one of 16, 32, 64, 128.
        head_dim: D, 64 or 128.
        dtype: the model's dtype, bfloat16, float16 or float32.
    """

    batch_size: int
    pages_per_row: int
    num_kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for field in fields(self)[:3]:
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} must be a positive int, got {value!r}")
        for name, supported in (("page_size", PAGE_SIZES), ("head_dim", HEAD_DIMS), ("dtype", MODEL_DTYPES)):
            value = getattr(self, name)
            if value not in supported:
                raise ValueError(f"{name} must be one of {supported}, got {value!r}")

    @property
    def num_pages(self) -> int:
        return self.batch_size * self.pages_per_row

    def tensor_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor of a :class:`PagedStore`."""
        return tensor_shapes(
            self.num_pages, self.batch_size, self.num_kv_heads, self.page_size, self.head_dim, self.dtype
        )

    def nbytes(self) -> int:
        """Bytes of one layer's store, exactly what :meth:`allocate` allocates."""
        total = 0
        for shape, dtype in self.tensor_shapes().values():
            count = 1
            for size in shape:
                count *= size
            total += count * dtype.itemsize
        return total

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


def derive_source_map(lengths: torch.Tensor, num_kv_heads: int, pages_per_row: int, page_size: int) -> torch.Tensor:
    """Source map of a row's page slots from the lengths before a forward: complete pages are read as codes.

    Args:
        lengths: int32 [B], tokens stored before the forward.

    Returns:
        int8 [B, Hkv, M].
    """
    slots = torch.arange(pages_per_row, device=lengths.device)
    complete = slots[None, :] < (lengths // page_size)[:, None]
    sources = torch.where(complete, SOURCE_CODES, SOURCE_NONE).to(torch.int8)
    return sources[:, None, :].expand(-1, num_kv_heads, -1).contiguous()
