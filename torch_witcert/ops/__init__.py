"""Tensors: storage, reference mathematics, Triton kernels and their registration in torch.library."""

from .library import certified_attention, kv_write
from .storage import PagedStore, StoreShape

__all__ = ["PagedStore", "StoreShape", "certified_attention", "kv_write"]
