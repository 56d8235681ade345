"""Checks of arguments that the policy's functions share. They look at types and shapes, never at the data of a tensor."""

from __future__ import annotations

import torch


def check_positive(name: str, value: int) -> None:
    """Raise ValueError unless `value` is an int above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")


def check_limit(name: str, value: float, highest: float) -> None:
    """Raise ValueError unless `value` is a number in [0, highest]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= highest:
        raise ValueError(f"{name} must be a number in [0, {highest}], got {value!r}")


def check_pages(masks: dict[str, torch.Tensor], **values: torch.Tensor) -> None:
    """Raise ValueError unless masks are bool, values are floating point, and all have the same last dimension."""
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise ValueError(f"{name} must be a bool tensor, got {mask.dtype}")
    for name, value in values.items():
        if not value.is_floating_point():
            raise ValueError(f"{name} must be a floating point tensor, got {value.dtype}")
    tensors = {**values, **masks}
    if any(not tensor.ndim for tensor in tensors.values()) or len({t.shape[-1] for t in tensors.values()}) > 1:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        raise ValueError(f"{', '.join(tensors)} must have the same last dimension, the pages, got shapes {shapes}")
