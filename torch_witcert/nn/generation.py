"""What `model.generate()` does about its cache once the model is converted."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from ..config import Recipe
from .cache import CertifiedCache
from .compatibility import CACHE_ARGUMENT

SUPPORTED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class CachePreparation:
    """Stands in for `model._prepare_cache_for_generation`: `generate()` calls it before any work starts.

    Without a cache of the user's it makes a :class:`CertifiedCache` for the batch and the longest sequence. The next call
    of the same shape resets and reuses it, counters included, so that compiled and captured graphs keep their addresses; a call with
    `return_dict_in_generate=True` hands its cache out and therefore gets one of its own.

    Args:
        model: the converted model.
        config: its recipe.
    """

    def __init__(self, model: PreTrainedModel, config: Recipe) -> None:
        self.model = model
        self.config = config
        self.own: CertifiedCache | None = None
        self.last: weakref.ref[CertifiedCache] | None = None

    def __getstate__(self) -> dict:
        # A copy of a model starts without caches.
        return {"model": self.model, "config": self.config, "own": None, "last": None}

    def __call__(
        self, generation_config, model_kwargs: dict, generation_mode, batch_size: int, max_cache_length: int
    ) -> None:
        """Same signature as the method it stands in for.

        Raises:
            ValueError: `cache_implementation` is given, or the cache passed is foreign or, still empty, too small.
            NotImplementedError: a generation mode that edits the cache (beam search, assisted generation).
        """
        prepare = type(self.model)._prepare_cache_for_generation
        passed = model_kwargs.get(CACHE_ARGUMENT)
        arguments = (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        foreign_allowed = self.config.foreign_cache == "dense"
        if generation_config.use_cache is False or (
            foreign_allowed and (generation_config.cache_implementation is not None or _is_foreign(passed))
        ):
            prepare(self.model, *arguments)
            return
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is not supported by a converted model, whose "
                "cache is a torch_witcert.CertifiedCache: leave it out (model.generation_config.cache_implementation = None where the "
                "checkpoint names one)"
            )
        if generation_mode not in SUPPORTED_MODES or generation_config.is_assistant:
            mode = (
                "being the assistant of assisted generation"
                if generation_config.is_assistant
                else generation_mode.value
            )
            raise NotImplementedError(
                f"{mode} is not supported with a CertifiedCache yet; supported: greedy search and sampling (num_beams=1, no "
                "assistant), or any mode with use_cache=False"
            )
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        if passed is not None:
            self._check_passed(passed, rows, max_cache_length, model_kwargs.get("attention_mask"))
            prepare(self.model, *arguments)
            self.last = weakref.ref(passed)
            return
        max_cache_length = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
        cache = self._cache_for(rows, max(1, max_cache_length), generation_config.return_dict_in_generate)
        model_kwargs[CACHE_ARGUMENT] = cache
        self.last = weakref.ref(cache)

    def _cache_for(self, rows: int, max_length: int, handed_out: bool) -> CertifiedCache:
        if handed_out:
            return CertifiedCache(self.model, max_length, rows)
        if self.own is not None and _fits(self.own, self.model, max_length, rows):
            self.own.reset()
            self.own.state.counters.reset()
            return self.own
        self.own = None  # freed before the next one is allocated
        self.own = CertifiedCache(self.model, max_length, rows)
        return self.own

    def _check_passed(self, passed: Any, rows: int, max_cache_length: int, attention_mask: torch.Tensor | None) -> None:
        if _is_foreign(passed):
            raise ValueError(
                f"{CACHE_ARGUMENT} is a {type(passed).__name__}; a converted model generates with a torch_witcert.CertifiedCache"
                ", which generate() makes by itself where none is passed"
            )
        if passed.batch_size != rows:
            raise ValueError(f"the CertifiedCache has {passed.batch_size} rows, but generate() needs {rows}")
        if not passed.state.empty:
            return  # the columns it holds may or may not be part of the prompt; a full row is refused when it happens
        padding = 0 if attention_mask is None else int((attention_mask == 0).sum(1).min())
        if max_cache_length - padding > passed.capacity_per_row:
            raise ValueError(
                f"the CertifiedCache holds {passed.capacity_per_row} tokens a row, but this call may need "
                f"{max_cache_length - padding}: make it with a larger max_length, or ask for fewer new tokens"
            )


def last_cache(model: PreTrainedModel) -> CertifiedCache:
    """The cache that the last `model.generate()` used, made by it or passed to it.

    The next `generate()` of the same shape resets and reuses the cache that it made; pass one of your own, or
    `return_dict_in_generate=True`, to keep it.

    Raises:
        ValueError: the model is not converted by `convert`, has not generated yet, or the cache is gone.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    preparation = model.__dict__.get("_prepare_cache_for_generation")
    if preparation is None:
        raise ValueError(
            f"generate() of model ({type(model).__name__}) keeps no CertifiedCache because it is not converted, or by torchao's "
            "quantize_ alone: call torch_witcert.convert(model) on the plain model, or use the cache that you passed"
        )
    cache = preparation.last() if preparation.last is not None else None
    if cache is None:
        raise ValueError("model has not generated with a CertifiedCache that still exists: pass the cache itself")
    return cache


def _is_foreign(cache: object) -> bool:
    return cache is not None and not isinstance(cache, CertifiedCache)


def _fits(cache: CertifiedCache, model: PreTrainedModel, max_length: int, rows: int) -> bool:
    """Whether the cache is what a new one would be: the same capacity, since splits and so bits depend on it."""
    pages = -(-max_length // cache.config.page_size)
    return (
        cache.batch_size == rows
        and cache.state.pages_per_row == pages
        and cache.dtype == model.dtype
        and cache.lengths.device == model.device
    )
