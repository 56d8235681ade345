"""Whether a recipe's outlier pairs fit a model."""

from __future__ import annotations

from typing import Any

from ..config import Recipe
from ..policy.outliers import outlier_channels_of


def check_outlier_indices(config: Recipe, certified: list[Any]) -> None:
    """Check `config.outlier_indices` against the attention modules that are certified, in layer order.

    Raises:
        ValueError: another number of layers or KV heads, or a pair that the head dim does not have.
    """
    if config.outlier_indices is None:
        return
    if len(config.outlier_indices) != len(certified):
        raise ValueError(
            f"outlier_indices has {len(config.outlier_indices)} layers, but {len(certified)} attention layers are certified"
        )
    for layer, (indices, module) in enumerate(zip(config.outlier_indices, certified, strict=True)):
        if len(indices) != (heads := module.config.num_key_value_heads):
            raise ValueError(f"outlier_indices[{layer}] has {len(indices)} KV heads, the model has {heads}")
        outlier_channels_of(indices, module.head_dim)
