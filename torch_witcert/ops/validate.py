"""Checks of the operators' arguments. They read shapes and dtypes only, never data, so they cost no synchronization."""

from __future__ import annotations

import math

import torch

from .formats import StoreFormat
from .radii import parse_radii
from .storage import HEAD_DIMS, MODEL_DTYPES, PAGE_SIZES, PagedStore, tensor_shapes

#: Smaller factors would be rounded to few bits, or to 0, in float32.
LEAST_FACTOR = 2.0**-100


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name} must have shape {list(shape)} and dtype {dtype}, got {list(tensor.shape)} and {tensor.dtype}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, like k, got {tensor.device}")


def validate_store(
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    outlier_channels: torch.Tensor,
    store: PagedStore,
    layer: int,
    store_format: str,
) -> None:
    """Check fresh keys and values against the store; raises ValueError or NotImplementedError naming the argument."""
    if k.ndim != 4:
        raise ValueError(f"k must have shape [B, Hkv, T, D], got {list(k.shape)}")
    batch, heads, new_tokens, dim = k.shape
    if k.dtype not in MODEL_DTYPES:
        raise NotImplementedError(f"dtype of k must be one of {MODEL_DTYPES}, got {k.dtype}")
    if dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim must be one of {HEAD_DIMS}, got {dim}")
    if page_table.ndim != 2:
        raise ValueError(f"page_table must have shape [B, M], got {list(page_table.shape)}")
    if store.k_codes.ndim != 4 or store.k_codes.shape[0] == 0:
        raise ValueError(f"k_codes must hold pages, [N, Hkv, P, bytes] with N > 0, got {list(store.k_codes.shape)}")
    if store.k_tail.ndim != 4 or store.page_size not in PAGE_SIZES:
        raise NotImplementedError(
            f"page size (half of dimension 2 of k_tail) must be one of {PAGE_SIZES}, got k_tail {list(store.k_tail.shape)}"
        )
    parsed = StoreFormat.parse(store_format)
    parsed.key.check_head_dim(dim)
    _expect_int("layer", layer, 0)
    pages, size = store.k_codes.shape[0], store.page_size
    _expect("v", v, (batch, heads, new_tokens, dim), k.dtype, k.device)
    _expect("page_table", page_table, (batch, page_table.shape[-1]), torch.int32, k.device)
    pairs = parsed.key.outlier_pairs
    _expect("outlier_channels", outlier_channels, (heads, 2 * pairs) if pairs else (0,), torch.int32, k.device)
    for name, (shape, dtype) in tensor_shapes(pages, batch, heads, size, dim, k.dtype, parsed).items():
        tensor = getattr(store, name)
        _expect(name, tensor, shape, dtype, k.device)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def validate_write(
    k: torch.Tensor,
    v: torch.Tensor,
    columns: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    page_table: torch.Tensor,
    seeds: torch.Tensor,
    outlier_channels: torch.Tensor,
    store: PagedStore,
    layer: int,
    store_format: str,
) -> None:
    """Check the arguments of `kv_write`."""
    validate_store(k, v, page_table, outlier_channels, store, layer, store_format)
    batch, _, new_tokens, _ = k.shape
    _expect("columns", columns, (batch, new_tokens), torch.int32, k.device)
    _expect("lengths", lengths, (batch,), torch.int32, k.device)
    _expect("counts", counts, (batch,), torch.int32, k.device)
    dithered = StoreFormat.parse(store_format).is_dithered
    _expect("seeds", seeds, (batch,) if dithered else (0,), torch.int64, k.device)


def validate_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    source_map: torch.Tensor,
    log_risk: torch.Tensor,
    sinks: torch.Tensor,
    outlier_channels: torch.Tensor,
    store: PagedStore,
    sm_scale: float,
    window: int,
    softcap: float,
    pages_per_split: int,
    layer: int,
    radii: str,
    store_format: str,
) -> None:
    """Check the arguments of `certified_attention`."""
    validate_store(k, v, page_table, outlier_channels, store, layer, store_format)
    batch, kv_heads, new_tokens, dim = k.shape
    if q.ndim != 4 or (q.shape[0], q.shape[2], q.shape[3]) != (batch, new_tokens, dim) or q.dtype != k.dtype:
        raise ValueError(
            f"q must have shape [{batch}, H, {new_tokens}, {dim}] and dtype {k.dtype}, like k, "
            f"got {list(q.shape)} and {q.dtype}"
        )
    if q.device != k.device:
        raise ValueError(f"q must be on {k.device}, like k, got {q.device}")
    if q.shape[1] == 0 or q.shape[1] % kv_heads:
        raise ValueError(f"the query heads must be a multiple of the {kv_heads} KV heads, got {q.shape[1]}")
    _expect("positions", positions, (batch, new_tokens), torch.int32, k.device)
    _expect("lengths", lengths, (batch,), torch.int32, k.device)
    _expect("source_map", source_map, (batch, kv_heads, page_table.shape[1]), torch.int8, k.device)
    kinds = parse_radii(radii, StoreFormat.parse(store_format))
    _expect("log_risk", log_risk, (batch, new_tokens) if kinds.probabilistic else (0,), torch.float32, k.device)
    _expect("sinks", sinks, (q.shape[1],) if sinks.numel() else (0,), torch.float32, k.device)
    if softcap != 0 and not LEAST_FACTOR <= softcap < math.inf:
        raise ValueError(
            f"softcap must be 0 for none, or a finite number of at least {LEAST_FACTOR:g}, got {softcap!r}"
        )
    if not LEAST_FACTOR <= sm_scale < math.inf:
        raise ValueError(f"sm_scale must be a finite number of at least {LEAST_FACTOR:g}, got {sm_scale!r}")
    _expect_int("window", window, 0)
    _expect_int("pages_per_split", pages_per_split, 1)


def _expect_int(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise ValueError(f"{name} must be an int in [{least}, 2^31), got {value!r}")
