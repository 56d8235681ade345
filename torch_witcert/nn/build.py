"""Layers of a `CertifiedCache` for a model, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..config import CertifiedInt8Config, Recipe, check_seed
from ..ops.storage import StoreShape
from .dense import DenseLayer
from .layers import CertifiedLayer, RaggedLayer
from .outliers import check_outlier_indices
from .record import RECORD
from .step import CacheState
from .supported import attention_modules, check_every_layer, window_of


def build_layers(
    modules: list[Any],
    config: Recipe,
    pages_per_row: int,
    batch_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seeds: int | Sequence[int] | None = None,
    num_pages: int | None = None,
) -> tuple[list[RaggedLayer], CacheState]:
    """Layers of a cache and what they share; on the "meta" device to learn their sizes.

    Args:
        modules: the model's attention modules in layer order. A certified one, or one that will be converted, gets a
            :class:`CertifiedLayer`, a plain one beside certified ones a :class:`DenseLayer`.
        seeds, num_pages: as in :class:`CertifiedCache`.
    """
    check_positive("batch_size", batch_size)
    if num_pages is not None:
        check_positive("num_pages", num_pages)
    certified = _certified_indices(modules)
    windows = {index: window_of(modules[index]) for index in certified}
    if num_pages is not None and 0 not in windows.values():
        raise ValueError(
            f"num_pages is the pool of layers without a sliding window, got {num_pages}, but every certified layer has one: leave it out"
        )
    shapes = [
        StoreShape(
            batch_size=batch_size,
            pages_per_row=pages_per_row,
            num_kv_heads=module.config.num_key_value_heads,
            page_size=config.page_size,
            head_dim=module.head_dim,
            dtype=dtype,
            store_format=config.store_format,
        )
        for module in modules
    ]
    geometries = {(modules[i].config.num_attention_heads, shapes[i].num_kv_heads) for i in certified}
    if len(geometries) > 1:
        raise NotImplementedError(f"certified layers must have the same numbers of heads, got {sorted(geometries)}")
    ((heads, kv_heads),) = geometries
    state = CacheState(
        batch_size=batch_size,
        pages_per_row=pages_per_row,
        page_size=config.page_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        certified_layers=certified,
        num_layers=len(modules),
        config=config,
        seeds=_row_seeds(seeds, config, batch_size),
        windows=frozenset(windows.values()),
        num_pages=num_pages or 0,
        device=device,
    )
    check_outlier_indices(config, [modules[index] for index in certified])
    layers: list[RaggedLayer] = []
    for index, (module, shape) in enumerate(zip(modules, shapes, strict=True)):
        identity = getattr(module, "identity", None)
        if index not in certified:
            layers.append(DenseLayer(index, shape, state, identity))
            continue
        indices = config.outlier_indices and config.outlier_indices[certified.index(index)]
        window = windows[index]
        shape = replace(shape, pool_pages=state.groups[window].num_pages)
        layers.append(CertifiedLayer(index, shape, state, identity, config.radii, indices, window))
    return layers, state


def _row_seeds(seeds: int | Sequence[int] | None, config: Recipe, batch_size: int) -> tuple[int, ...] | None:
    """Seed of each row, or None where nothing is dithered."""
    if not config.store_format.is_dithered:
        if seeds is not None:
            raise ValueError(f"seeds are of a recipe with dither, like WitCertConfig; {type(config).__name__} has none")
        return None
    if seeds is None:
        seeds = config.seed
    rows = (seeds,) * batch_size if isinstance(seeds, int) else tuple(seeds)
    if len(rows) != batch_size:
        raise ValueError(f"seeds must be an int or {batch_size} of them, one for each row, got {len(rows)}")
    for seed in rows:
        check_seed("seeds", seed)
    return rows


def _certified_indices(modules: list[Any]) -> tuple[int, ...]:
    """Layers that are certified; all of them where the model is not converted yet."""
    certified = tuple(index for index, module in enumerate(modules) if hasattr(module, "certified_config"))
    return certified or tuple(range(len(modules)))


def converted_modules(model: PreTrainedModel) -> tuple[list[Any], Recipe]:
    modules, config = modules_of(model, None)
    if not any(hasattr(module, "certified_config") for module in modules):
        raise ValueError(f"model ({type(model).__name__}) is not converted: call torch_witcert.convert(model) first")
    return modules, config


def modules_of(model: PreTrainedModel, config: Recipe | None) -> tuple[list[Any], Recipe]:
    """Attention modules in layer order, and the recipe they have, or else are to get."""
    if config is not None and not isinstance(config, Recipe):
        raise TypeError(f"config must be a recipe like CertifiedInt8Config(), or None, got {type(config).__name__}")
    modules = [module for _, module in attention_modules(model)]
    recipes = {module.certified_config for module in modules if hasattr(module, "certified_config")}
    if len(recipes) > 1:
        raise NotImplementedError(f"a cache needs one recipe for all certified layers, got {recipes}")
    if not modules:
        raise ValueError(f"model ({type(model).__name__}) has no attention modules of a supported class")
    check_every_layer(model)
    devices = {parameter.device for module in modules for parameter in module.parameters()}
    if len(devices) > 1:
        raise NotImplementedError(f"attention layers must be on one device, got {sorted(map(str, devices))}")
    recipe = next(iter(recipes), None)
    if recipe is not None and config not in (None, recipe):
        raise ValueError(
            f"config must be the recipe that the model was converted with, {recipe}, or None, got {config}"
        )
    if recipe is None and config is None and getattr(model.config, RECORD, None) is not None:
        raise ValueError(
            f"model ({type(model).__name__}) is not converted, but its config names a recipe: call torch_witcert.convert(model) "
            "first, or pass a recipe"
        )
    return modules, recipe or config or CertifiedInt8Config()


def named_tensors_of(layers: list[RaggedLayer], state: CacheState) -> dict[str, torch.Tensor]:
    """Every tensor of a cache, by names like "lengths", "groups.0.page_table" and "layers.3.k_codes"."""
    tensors = state.named_tensors()
    for layer in layers:
        tensors |= {f"layers.{layer.index}.{name}": tensor for name, tensor in layer.named_tensors().items()}
    return tensors


def nbytes_of(layers: list[RaggedLayer], state: CacheState) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in named_tensors_of(layers, state).values())


def check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = repr(value) if isinstance(value, int | float | str) else type(value).__name__
        raise ValueError(f"{name} must be a positive int, got {found}")
