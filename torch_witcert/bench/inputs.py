"""Inputs of a decode step: keys and values, a store filled with them by `kv_write`, and how many to rotate over."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..ops.certificate import Field
from ..ops.formats import StoreFormat
from ..ops.radii import Radii
from ..ops.splits import pages_per_split
from ..ops.storage import StoreShape
from ..testing.harness import CacheHarness, Operators
from .shapes import DTYPE, Shape

#: Entries of K that one write takes at most; it bounds the memory of the copies that the harness keeps.
WRITE_ENTRIES = 2**26
#: Risk of each read where the radii are probabilistic.
DELTA = 1e-4
#: Standard deviation of a channel's offset, in that of its entries: keys have channels far from zero.
OFFSET = 2.0


class Tokens(NamedTuple):
    """Keys, values and queries of one decode step, bf16."""

    q: torch.Tensor  # [B, H, 1, D]
    k: torch.Tensor  # [B, Hkv, S, D], cached, contiguous
    v: torch.Tensor  # [B, Hkv, S, D]
    new_k: torch.Tensor  # [B, Hkv, 1, D]
    new_v: torch.Tensor  # [B, Hkv, 1, D]


def random_tokens(shape: Shape, seed: int, device: torch.device | str) -> Tokens:
    """Normal queries, keys and values; each channel of a KV head's keys has an offset of its own."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=DTYPE, generator=generator, device=device)

    batch, kv_heads, dim = shape.batch, shape.kv_heads, shape.head_dim
    offset = OFFSET * normal(kv_heads, 1, dim)
    return Tokens(
        q=normal(batch, shape.heads, 1, dim),
        k=normal(batch, kv_heads, shape.tokens, dim).add_(offset),
        v=normal(batch, kv_heads, shape.tokens, dim),
        new_k=normal(batch, kv_heads, 1, dim).add_(offset),
        new_v=normal(batch, kv_heads, 1, dim),
    )


def store_shape(shape: Shape, store_format: StoreFormat, page_size: int) -> StoreShape:
    """The store of a cache that has room for the cached tokens and the new one."""
    pages = shape.tokens // page_size + 1
    return StoreShape(shape.batch, pages, shape.kv_heads, page_size, shape.head_dim, DTYPE, store_format)


def timed_radii(store_format: StoreFormat) -> Radii:
    """Radii that are timed: all that the format has."""
    return Radii(step=True, residual=True, probabilistic=store_format.key.is_dithered)


def filled_cache(
    shape: Shape, tokens: Tokens, store_format: StoreFormat, page_size: int, operators: Operators
) -> CacheHarness:
    """A cache that holds the tokens, written by `kv_write` in large chunks; its page table is the identity."""
    cache = CacheHarness(
        store_shape(shape, store_format, page_size),
        sm_scale=shape.head_dim**-0.5,
        radii=timed_radii(store_format).name,
        delta=DELTA,
        operators=operators,
        device=tokens.k.device,
    )
    chunk = max(page_size, WRITE_ENTRIES // (shape.batch * shape.kv_heads * shape.head_dim))
    for start in range(0, shape.tokens, chunk):
        part = slice(start, start + chunk)
        k, v = tokens.k[:, :, part], tokens.v[:, :, part]
        cache.write(k, v, torch.ones(shape.batch, k.shape[2], dtype=torch.bool, device=k.device))
    return cache


def read_arguments(cache: CacheHarness, tokens: Tokens) -> tuple:
    """Arguments of `certified_attention` for the next token of every row.

    They are made before anything is timed, as a model makes them once for all of its layers. They share the cache's
    store and nothing else with it.
    """
    positions = cache.lengths[:, None].clone()
    risk = positions.shape if cache.is_probabilistic else (0,)
    return (
        tokens.q,
        tokens.new_k,
        tokens.new_v,
        positions,
        cache.lengths.clone(),
        cache.page_table,
        cache.source_map(),
        torch.full(risk, math.log(2 / cache.delta), device=cache.device),
        cache.sinks,
        cache.outlier_channels,
        *cache.store,
        cache.sm_scale,
        cache.window,
        cache.softcap,
        pages_per_split(cache.shape.page_size, cache.shape.pages_per_row),
        cache.layer,
        cache.radii,
        cache.format.name,
    )


def bytes_moved(shape: Shape, store_format: StoreFormat, page_size: int) -> int:
    """Bytes that a certified read must move: each once, whatever the kernels read twice or keep for themselves.

    The complete pages with everything that a page stores, the exact tokens of the unfinished page, the new token, queries,
    outputs, and in float32 the log-sum-exp and the certificate of each read.
    """
    complete, unfinished = divmod(shape.tokens, page_size)
    page = store_shape(shape, store_format, page_size).page_nbytes()
    exact = (unfinished + 1) * shape.token_bytes
    results = shape.heads * (1 + Field.COUNT) * torch.float32.itemsize
    return shape.batch * (complete * page + exact + results) + 2 * shape.query_bytes


def rotations(input_bytes: int, l2_bytes: int) -> int:
    """Independent inputs of `input_bytes` each that together hold more than twice the L2 cache; 2 at least."""
    return max(2, 2 * l2_bytes // input_bytes + 1)


def l2_bytes(device: torch.device | str) -> int:
    """Size of a GPU's L2 cache; 0 for a CPU, whose inputs nothing times."""
    device = torch.device(device)
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
