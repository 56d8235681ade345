"""Bytes that a cache really takes, from what torch allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
