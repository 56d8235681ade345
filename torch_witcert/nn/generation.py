"""What `model.generate()` does about its cache once the model is converted."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from ..config import Recipe
from .cache import CertifiedCache
from .compatibility import CACHE_ARGUMENT
from .supported import attention_modules, check_pretrained, window_of

SUPPORTED_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)


class CachePreparation:
    """Stands in for `model._prepare_cache_for_generation`: `generate()` calls it before any work starts.

    Without a cache of the user's it makes a :class:`CertifiedCache` for the batch and the longest sequence. The next call
    of the same shape resets and reuses it, counters included, so that compiled and captured graphs keep their addresses; a call with
    `return_dict_in_generate=True` hands its cache out and therefore gets one of its own, and so does a call that starts while
    another one (of another thread, or a streamer's) runs.

    Args:
        model: the converted model.
        config: its recipe.
    """

    def __init__(self, model: PreTrainedModel, config: Recipe) -> None:
        self.model = model
        self.config = config
        self.own: CertifiedCache | None = None
        self.last: weakref.ref[CertifiedCache] | None = None
        # Of the call that has `own`. Each generate() makes a generation config for itself and keeps it until it ends.
        self.running: weakref.ref[GenerationConfig] | None = None
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple:
        # A copy of a model starts without caches.
        return type(self), (self.model, self.config)

    def __call__(
        self, generation_config, model_kwargs: dict, generation_mode, batch_size: int, max_cache_length: int
    ) -> None:
        """Same signature as the method it stands in for.

        Raises:
            ValueError: `cache_implementation` is given, drafts are longer than a page, or the cache passed is foreign, too small, or
                holds other tokens than the prompt and its mask say.
            NotImplementedError: another generation mode than those of SUPPORTED_MODES, drafts on a cache that holds tokens or by early
                exit, the model is an assistant, or padding between a row's tokens where a sliding window would count it.
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
        if generation_mode not in SUPPORTED_MODES:
            raise NotImplementedError(
                f"{generation_mode.value} is not supported with a CertifiedCache; supported: "
                f"{', '.join(mode.value for mode in SUPPORTED_MODES)}, or any mode with use_cache=False"
            )
        if generation_config.is_assistant:
            raise NotImplementedError(
                "being the assistant of assisted generation is not supported with a CertifiedCache: drafts are made by one generate() "
                "after the other on a cache whose final length none of them knows; use an assistant that is not converted"
            )
        # transformers shortens the model's config for such a draft, and leaves it so when the draft is refused.
        if generation_config.assistant_early_exit is not None:
            raise NotImplementedError(
                f"assistant_early_exit={generation_config.assistant_early_exit!r} is not supported with a CertifiedCache, which is "
                "filled by all layers: leave it out, or draft by prompt lookup or an assistant that is not converted"
            )
        lookup = generation_config.prompt_lookup_num_tokens
        if lookup is not None and lookup > self.config.page_size:
            raise ValueError(
                f"prompt_lookup_num_tokens must be at most the page size {self.config.page_size}, got {lookup}: the exact tail of a "
                "CertifiedCache takes back that many drafted tokens for certain; convert with a larger page_size, or draft fewer"
            )
        mask = model_kwargs.get("attention_mask")
        _check_windows(self.model, mask, max_cache_length)
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        if passed is not None:
            self._check_passed(passed, rows, max_cache_length, mask, generation_mode)
            # transformers drops a mask of ones, and notes its width.
            width = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
            if width is not None and not passed.state.empty:
                _check_prompt(passed, mask, width)
            prepare(self.model, *arguments)
            self.last = weakref.ref(passed)
            return
        max_cache_length = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
        with self.lock:
            cache = self._cache_for(rows, max(1, max_cache_length), generation_config)
            self.last = weakref.ref(cache)
        model_kwargs[CACHE_ARGUMENT] = cache

    def _cache_for(self, rows: int, max_length: int, generation_config: GenerationConfig) -> CertifiedCache:
        if generation_config.return_dict_in_generate:
            return CertifiedCache(self.model, max_length, rows)
        busy = self.running is not None and self.running() is not None
        if busy or self.own is None or not _fits(self.own, self.model, max_length, rows):
            self.own = None  # freed before the next one is allocated, unless a running call still has it
            self.own = CertifiedCache(self.model, max_length, rows)
        else:
            self.own.reset()
            self.own.state.counters.reset()
        self.running = weakref.ref(generation_config)
        return self.own

    def _check_passed(
        self, passed: Any, rows: int, max_cache_length: int, attention_mask: torch.Tensor | None, mode: GenerationMode
    ) -> None:
        if _is_foreign(passed):
            raise ValueError(
                f"{CACHE_ARGUMENT} is a {type(passed).__name__}; a converted model generates with a torch_witcert.CertifiedCache"
                ", which generate() makes by itself where none is passed"
            )
        if passed.batch_size != rows:
            raise ValueError(f"the CertifiedCache has {passed.batch_size} rows, but generate() needs {rows}")
        if not passed.state.empty:
            if mode == GenerationMode.ASSISTED_GENERATION:
                raise NotImplementedError(
                    "assisted generation (drafts, prompt lookup) with a CertifiedCache that holds tokens is not supported: transformers "
                    "would feed, and the cache store, the whole prompt once more. Generate without drafts, or reset() the cache"
                )
            return  # how much of the prompt it holds is not known here; a full row is refused when it happens
        padding = 0 if attention_mask is None else int((attention_mask == 0).sum(1).min())
        if max_cache_length - padding > passed.capacity_per_row:
            raise ValueError(
                f"the CertifiedCache holds {passed.capacity_per_row} tokens a row, but this call may need "
                f"{max_cache_length - padding}: make it with a larger max_length, or ask for fewer new tokens"
            )


def last_cache(model: PreTrainedModel) -> CertifiedCache:
    """The cache that the last `model.generate()` used, made by it or passed to it.

    The next `generate()` of the same shape resets and reuses the cache that it made; pass one of your own, or
    `return_dict_in_generate=True`, to keep it. Of calls that run at the same time it is the one that started last.

    Raises:
        ValueError: the model is not converted by `convert`, has not generated yet, or the cache is gone.
    """
    check_pretrained(model)
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


def _check_prompt(cache: CertifiedCache, mask: torch.Tensor | None, width: int) -> None:
    """Refuse a prompt that does not go on from the tokens that the cache holds.

    Args:
        mask: [B, width] over cached and new columns; None where all are real.
        width: columns of the prompt, or of the mask where only the new tokens are passed.
    """
    columns = int(cache.state.column_count)
    if width <= columns:
        raise ValueError(
            f"input_ids (or attention_mask) must have more than the {columns} columns that the CertifiedCache has seen, the whole "
            f"conversation and new tokens, got {width}: append the new turn, or reset() the cache for another conversation"
        )
    held = cache.lengths
    marked = torch.full_like(held, columns) if mask is None else (mask[:, :columns] != 0).sum(1).to(held)
    wrong = marked != held
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise ValueError(
            f"attention_mask marks {int(marked[row])} of the {columns} cached columns of row {row} as real, but the CertifiedCache "
            f"holds {int(held[row])} tokens of it. A column keeps what it was fed with: generate() feeds finished rows padding that "
            "counts as real, and a row that was released or has run full holds less. Pass the mask that the columns had, or reset() the "
            "cache and pass the whole prompt"
        )


def _check_windows(model: PreTrainedModel, mask: torch.Tensor | None, columns: int) -> None:
    """Refuse padding between a row's real tokens where transformers' sliding window, which counts columns, would hold it.

    Args:
        mask: [B, width] over cached and new columns; None where all are real.
        columns: at the end of generation.
    """
    windows = [window for _, module in attention_modules(model) if (window := window_of(module))]
    if mask is None or mask.ndim != 2 or not windows:
        return
    real = mask != 0
    started = real.cumsum(1) > 0
    first = (~started).sum(1)
    # What is generated comes after the last column, so padding there lies between tokens as well.
    holes = (started & ~real).any(1) & (columns - first > min(windows))
    if bool(holes.any()):
        raise NotImplementedError(
            f"attention_mask has padding between real tokens in row {int(holes.int().argmax())}, which is not supported with sliding "
            f"windows (the smallest is {min(windows)} tokens; this call may reach {columns} columns): transformers' windows count such "
            "padding, those of a CertifiedCache count the row's own tokens. Pad on the left of the whole conversation and pass it in "
            "one call, or give each conversation its own cache"
        )


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
