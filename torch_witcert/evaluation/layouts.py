"""Layouts of keys that the coverage table compares: a page size and a key format, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..ops.certificate import CodeRadius, code_radius
from ..ops.dither import dither, page_key
from ..ops.formats import KeyFormat, StoreFormat, ValueFormat
from ..ops.quantize import dequantize_keys, quantize_page
from ..ops.storage import tensor_shapes
from ..policy.outliers import choose_outlier_channels

#: Request seed of the dither: every run draws the same.
SEED = 0


@dataclass(frozen=True)
class KeyLayout:
    """Keys of one format in pages of one size. Values are left exact: no bound on the weights depends on them.

    Args:
        page_size: P; the formulas hold for any, the kernels take `ops.storage.PAGE_SIZES`.
        key: format of the keys.
    """

    page_size: int
    key: KeyFormat

    @property
    def name(self) -> str:
        """For example "int8-token-16-m4-dither"; keys scaled per token have pages for the sake of their notes alone."""
        pairs = f"-m{self.key.outlier_pairs}" if self.key.outlier_pairs else ""
        dithered = "-dither" if self.key.is_dithered else ""
        return f"{self.key.element}-{self.key.scaling}-{self.page_size}{pairs}{dithered}"

    @property
    def store_format(self) -> StoreFormat:
        return StoreFormat(self.key, ValueFormat("exact"))

    def key_bytes(self, head_dim: int, dtype: torch.dtype) -> float:
        """Bytes of one token's key in one KV head: codes, scales, zeros and outliers, without notes and page key."""
        shapes = tensor_shapes(1, 1, 1, self.page_size, head_dim, dtype, self.store_format)
        parts = (shapes[name] for name in ("k_codes", "k_scale", "k_zero", "k_bypass"))
        return sum(math.prod(shape) * part_dtype.itemsize for shape, part_dtype in parts) / self.page_size


def _layouts() -> dict[str, KeyLayout]:
    dithered = [KeyLayout(16, KeyFormat("int8", "token", pairs, "stream")) for pairs in (0, 4, 8, 16)]
    dithered += [KeyLayout(256, KeyFormat("int8", "symmetric", pairs, "stream")) for pairs in (0, 4)]
    dithered += [
        KeyLayout(128, KeyFormat("int8", "symmetric", 0, "stream")),
        KeyLayout(128, KeyFormat("int8", "asymmetric", 0, "stream")),
        KeyLayout(16, KeyFormat("int8", "asymmetric", 0, "stream")),
        KeyLayout(16, KeyFormat("int6", "asymmetric", 8, "stream")),
    ]
    plain = [KeyLayout(page_size, KeyFormat("int8")) for page_size in (16, 64, 128)]
    plain += [KeyLayout(page_size, KeyFormat("int4")) for page_size in (16, 64)]
    plain += [KeyLayout(64, KeyFormat("fp8", "symmetric"))]
    return {layout.name: layout for layout in dithered + plain}


#: Every layout of the table by its name: those of WitCert (dithered), then plain rounding.
LAYOUTS = _layouts()


@dataclass(frozen=True)
class StoredKeys:
    """Keys of one layer as a layout stores them.

    Args:
        layout: that they are stored in.
        keys: K^, float64 [B, Hkv, S, D].
        k_scale, k_zero, page_notes: of the pages, [B, Hkv, M, ...] as `ops.certificate.code_radius` takes them.
        outlier_channels: int32 [Hkv, 2m], or None.
    """

    layout: KeyLayout
    keys: torch.Tensor
    k_scale: torch.Tensor
    k_zero: torch.Tensor
    page_notes: torch.Tensor
    outlier_channels: torch.Tensor | None

    @property
    def group_size(self) -> int:
        """Tokens that share a radius."""
        return 1 if self.layout.key.per_token else self.layout.page_size

    def radius(self, q: torch.Tensor, sm_scale: float) -> CodeRadius:
        """Radii of queries [B, Hkv, R, D] in q's dtype, [B, Hkv, R, S / group_size]."""
        parts = (q, self.k_scale, self.k_zero, self.page_notes, sm_scale, self.layout.store_format)
        return code_radius(*parts, self.outlier_channels, by_token=True)


def check_pages(tokens: int, layout: KeyLayout) -> None:
    """Raise ValueError where this many tokens do not fill whole pages."""
    if tokens % layout.page_size:
        raise ValueError(f"the number of tokens must be a multiple of page_size {layout.page_size}, got {tokens}")


def store_keys(k: torch.Tensor, layer: int, layout: KeyLayout) -> StoredKeys:
    """Quantize all keys of a layer.

    Args:
        k: [B, Hkv, S, D] in the model's dtype.
        layer: its index, which the dither depends on.
        layout: of the pages.

    Raises:
        ValueError: S is not a multiple of the page size.
    """
    batch, kv_heads, tokens, head_dim = k.shape
    check_pages(tokens, layout)
    pages = k.unflatten(2, (-1, layout.page_size)).transpose(1, 2).flatten(0, 1)  # [B * M, Hkv, P, D]
    numbers = torch.arange(pages.shape[0], device=k.device)[:, None].expand(-1, kv_heads)
    store_format = layout.store_format
    draws = dither(
        page_key(torch.full_like(numbers, SEED), numbers), layer, False, layout.key.dither, layout.page_size, head_dim
    )
    channels = choose_outlier_channels(k, None, layout.key.outlier_pairs) if layout.key.outlier_pairs else None
    page = quantize_page(pages, pages, store_format, channels, draws)
    stored = dequantize_keys(page.k_codes, page.k_scale, page.k_zero, page.k_bypass, store_format, channels, draws)

    def by_row(part: torch.Tensor) -> torch.Tensor:
        return part.unflatten(0, (batch, -1)).transpose(1, 2) if part.numel() else part

    return StoredKeys(
        layout,
        by_row(stored).flatten(2, 3),
        by_row(page.k_scale),
        by_row(page.k_zero),
        by_row(page.page_notes),
        channels,
    )
