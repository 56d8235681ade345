"""Bytes that a cache really takes, from what torch allocated, and what a format costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..ops.formats import StoreFormat
from ..ops.storage import tensor_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Parts of a page that belong to the keys, to the values, and to both.
SIDES = {
    "key": ("k_codes", "k_scale", "k_zero", "k_bypass"),
    "value": ("v_codes", "v_scale", "v_zero"),
    "shared": ("page_notes", "page_keys"),
}


class TokenBytes(NamedTuple):
    """Bytes of one token and KV head in a page of codes."""

    key: float  # codes, scales, zeros and outlier channels
    value: float  # codes, scales and zeros
    shared: float  # notes and the key of the dither


def token_bytes(store_format: StoreFormat, page_size: int, head_dim: int, dtype: torch.dtype) -> TokenBytes:
    """What a format costs.

    Args:
        store_format: of keys and values.
        page_size: tokens that share what a page stores once; any positive int, also one that the operators do not take.
        head_dim: D.
        dtype: the model's, of zeros, outlier channels and exact values.
    """
    shapes = tensor_shapes(1, 1, 1, page_size, head_dim, dtype, store_format)

    def total(names: tuple[str, ...]) -> float:
        return sum(math.prod(shapes[name][0]) * shapes[name][1].itemsize for name in names) / page_size

    return TokenBytes(**{side: total(names) for side, names in SIDES.items()})


def storage_bytes(thing: object) -> int:
    """Bytes of all tensor storages reachable from an object's attributes and containers, each storage once.

    Modules are not entered: a cache may know its model.
    """
    storages: dict[tuple, int] = {}
    visited: set[int] = set()
    waiting = [thing]
    while waiting:
        item = waiting.pop()
        if id(item) in visited or isinstance(item, torch.nn.Module):
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            storages[item.device, storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple | set):
            waiting += item
        else:
            waiting += getattr(item, "__dict__", {}).values()
    return sum(storages.values())


def allocated_bytes(make: Callable[[], object], device: torch.device | str) -> int:
    """Bytes of the cache that `make` allocates on `device`; it is freed again.

    On a GPU what the caching allocator handed out, elsewhere the sum of the storages.
    """
    if torch.device(device).type != "cuda":
        return storage_bytes(make())
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    cache = make()
    used = torch.cuda.memory_allocated(device) - before
    del cache
    return used


def dense_cache(model: PreTrainedModel, tokens: int, batch_size: int = 1, dtype: torch.dtype = torch.bfloat16):
    """A Hugging Face DynamicCache that holds `tokens` tokens a row, zeros, on the model's device."""
    from transformers import DynamicCache

    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (batch_size, config.num_key_value_heads, tokens, head_dim)
    cache = DynamicCache()
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.zeros(shape, dtype=dtype, device=model.device) for _ in "kv"), layer)
    return cache
