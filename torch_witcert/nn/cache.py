"""`CertifiedCache`: a Hugging Face cache whose layers keep keys and values in pages of codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..config import CertifiedInt8Config, Recipe, check_seed
from ..ops.storage import StoreShape
from ..policy.outliers import outlier_indices_of
from .dense import DenseLayer
from .layers import LATER, CertifiedLayer, RaggedLayer
from .outliers import check_outlier_indices
from .step import CacheState
from .supported import attention_modules


class CertifiedCache(Cache):
    """Static cache of a converted model; `generate()` takes it, and compiles with it on the GPU.

    Every tensor is allocated here, once, so addresses stay the same for compiled and captured graphs: keep one cache and
    `reset()` it. Rows are ragged: padding is never stored.

    Args:
        model: converted by :func:`torch_witcert.convert`.
        max_length: tokens that a row can hold, rounded up to whole pages.
        batch_size: rows B.
        seeds: of each row's dither, an int for all rows or a sequence of B, in [0, 2^32); the recipe's where left out. The codes
            of a row depend on its tokens, its seed and the outlier channels, never on its place in a batch.

    Raises:
        ValueError: the model is not converted, a size is not a positive int, or seeds are given to a recipe without dither.
        NotImplementedError: layers of different shapes, or on several devices.
    """

    layers: list[RaggedLayer]  # type: ignore[assignment]

    def __init__(
        self,
        model: PreTrainedModel,
        max_length: int,
        batch_size: int = 1,
        *,
        seeds: int | Sequence[int] | None = None,
    ) -> None:
        _check_positive("max_length", max_length)
        modules, config = _converted_modules(model)
        pages = -(-max_length // config.page_size)
        # Under inference_mode the tensors could not be updated outside it later.
        with torch.inference_mode(False):
            layers, state = build_layers(modules, config, pages, batch_size, model.dtype, model.device, seeds)
        super().__init__(layers=layers)
        self.state = state
        self.config = config
        if not torch.compiler.is_compiling():
            for tensor in self.tensors():
                torch._dynamo.mark_static_address(tensor)

    def __repr__(self) -> str:
        return (
            f"CertifiedCache(batch_size={self.batch_size}, capacity_per_row={self.capacity_per_row}, certified layers="
            f"{len(self.certified_layers)} of {len(self.layers)}, nbytes={self.nbytes()})"
        )

    @property
    def capacity_per_row(self) -> int:
        """Tokens that a row can hold: `max_length` rounded up to whole pages."""
        return self.state.capacity

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype, which the exact tail and the zeros are stored in."""
        return self.layers[0].shape.dtype

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens stored of each row, int32 [B] on the device; advances in place."""
        return self.state.lengths

    @property
    def certified_layers(self) -> tuple[int, ...]:
        """Model indices of the certified layers: dimension L of the certificates."""
        return self.state.counters.layers

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor of the cache."""
        return _tensors(self.layers, self.state)

    def nbytes(self) -> int:
        """Bytes that torch allocated for the cache: pages, tails, tables, counters and certificates."""
        return _nbytes(self.tensors())

    def bytes_per_token(self) -> float:
        """Bytes that one more token of one row costs, all layers: a page and its table entry over the page size.

        The exact tail, counters and certificates do not grow with `max_length` and are not part of it.
        """
        page = self.state.page_table.element_size()
        for layer in self.layers:
            if isinstance(layer, CertifiedLayer):
                page += layer.shape.page_nbytes()
            else:
                heads, size, dim = layer.shape.num_kv_heads, layer.shape.page_size, layer.shape.head_dim
                page += 2 * heads * size * dim * layer.shape.dtype.itemsize
        return page / self.state.page_size

    @classmethod
    def capacity(cls, model: PreTrainedModel, nbytes: int, batch_size: int = 1, config: Recipe | None = None) -> int:
        """Largest `max_length` whose cache fits in `nbytes`, to the byte; 0 where not even one page a row does.

        Args:
            model: converted; or not yet, and then `config` says how it will be.
            nbytes: bytes available.
            batch_size: rows B.
            config: recipe for a model that is not converted; the default recipe where left out.

        Raises:
            ValueError: a size is not a positive int, or `config` is not the recipe of the converted model.
        """
        _check_positive("nbytes", nbytes)
        modules, config = _modules(model, config)

        def size(pages: int) -> int:
            layout = build_layers(modules, config, pages, batch_size, model.dtype, torch.device("meta"))
            return _nbytes(_tensors(*layout))

        one, page = size(1), size(2) - size(1)
        return max(0, (nbytes - one) // page + 1) * config.page_size

    def check_made_for(self, module: Any) -> None:
        """Refuse an attention module that this cache has no layer for.

        Raises:
            ValueError: the cache was made for another model, or before this one was converted as it is now.
        """
        index = module.layer_idx
        if index < len(self.layers) and self.layers[index].identity is module.identity:
            return
        raise ValueError(
            "the CertifiedCache was made for another model, or for this one before it was converted: make one with "
            "torch_witcert.CertifiedCache(model, max_length, batch_size)"
        )

    def outlier_indices(self) -> tuple[tuple[tuple[int, ...], ...], ...] | None:
        """Outlier pairs in use, [certified layer][KV head][m], to put into a recipe's `outlier_indices`; None for m = 0.

        Before the first forward they are those of the recipe or stand-ins. Copies to the host, which synchronizes.
        """
        certified = [layer for layer in self.layers if isinstance(layer, CertifiedLayer)]
        if not certified[0].pairs:
            return None
        return tuple(outlier_indices_of(layer.outlier_channels) for layer in certified)

    def reset(self) -> None:
        """Forget every token, in place and without moving a tensor; a new request with a new risk budget begins.

        The counters go on; seeds and outlier channels stay.
        """
        self.state.reset()
        super().reset()

    def __deepcopy__(self, memo: dict) -> CertifiedCache:
        raise NotImplementedError(f"copying a CertifiedCache {LATER}")


def build_layers(
    modules: list[Any],
    config: Recipe,
    pages_per_row: int,
    batch_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seeds: int | Sequence[int] | None = None,
) -> tuple[list[RaggedLayer], CacheState]:
    """Layers of a cache and what they share; on the "meta" device to learn their sizes.

    Args:
        modules: the model's attention modules in layer order. A certified one, or one that will be converted, gets a
            :class:`CertifiedLayer`, a plain one beside certified ones a :class:`DenseLayer`.
        seeds: as in :class:`CertifiedCache`.
    """
    _check_positive("batch_size", batch_size)
    certified = _certified_indices(modules)
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
        device=device,
    )
    check_outlier_indices(config, [modules[index] for index in certified])
    layers: list[RaggedLayer] = []
    for index, (module, shape) in enumerate(zip(modules, shapes, strict=True)):
        arguments = (index, shape, state, getattr(module, "identity", None), device)
        if index not in certified:
            layers.append(DenseLayer(*arguments))
            continue
        indices = config.outlier_indices and config.outlier_indices[certified.index(index)]
        layers.append(CertifiedLayer(*arguments, config.radii, indices))
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


def _converted_modules(model: PreTrainedModel) -> tuple[list[Any], Recipe]:
    modules, config = _modules(model, None)
    if not any(hasattr(module, "certified_config") for module in modules):
        raise ValueError(f"model ({type(model).__name__}) is not converted: call torch_witcert.convert(model) first")
    return modules, config


def _modules(model: PreTrainedModel, config: Recipe | None) -> tuple[list[Any], Recipe]:
    """Attention modules in layer order, and the recipe they have, or else are to get."""
    if config is not None and not isinstance(config, Recipe):
        raise TypeError(f"config must be a recipe like CertifiedInt8Config(), or None, got {type(config).__name__}")
    modules = [module for _, module in attention_modules(model)]
    recipes = {module.certified_config for module in modules if hasattr(module, "certified_config")}
    if len(recipes) > 1:
        raise NotImplementedError(f"a cache needs one recipe for all certified layers, got {recipes}")
    if not modules or [module.layer_idx for module in modules] != list(range(len(modules))):
        raise ValueError(f"model ({type(model).__name__}) has no supported attention layers numbered from 0")
    devices = {parameter.device for module in modules for parameter in module.parameters()}
    if len(devices) > 1:
        raise NotImplementedError(f"attention layers must be on one device, got {sorted(map(str, devices))}")
    recipe = next(iter(recipes), None)
    if recipe is not None and config not in (None, recipe):
        raise ValueError(
            f"config must be the recipe that the model was converted with, {recipe}, or None, got {config}"
        )
    return modules, recipe or config or CertifiedInt8Config()


def _tensors(layers: list[RaggedLayer], state: CacheState) -> tuple[torch.Tensor, ...]:
    return (*state.tensors(), *(tensor for layer in layers for tensor in layer.tensors()))


def _nbytes(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = repr(value) if isinstance(value, int | float | str) else type(value).__name__
        raise ValueError(f"{name} must be a positive int, got {found}")
