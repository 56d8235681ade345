"""Certificates of the last forward, and counters of all of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ..policy.counters import Telemetry
from .cache import CertifiedCache
from .generation import last_cache


class Certificates(NamedTuple):
    """Certificates of the last forward, [L, B, H] on the device: layers of `cache.certified_layers`, rows, query heads.

    Of several new tokens the worst. The tensors are the cache's own: the next forward overwrites them. Where a read has
    Flag.PREFILL it is exact attention by SDPA: its 0 says that nothing was quantized, and its rounding is not bounded.
    """

    tv: torch.Tensor  # float32, bound on the total variation to exact attention
    output: torch.Tensor  # float32, bound on the Euclidean error of the head's output
    tv_candidate: torch.Tensor  # the same before repair; in observe mode nothing is repaired and it is `tv` itself
    output_candidate: torch.Tensor
    flags: torch.Tensor  # int32, bits of torch_witcert.policy.gate.Flag


def certificates(cache: CertifiedCache) -> Certificates:
    """Certificates of the cache's last forward, without synchronization.

    Raises:
        TypeError: `cache` is not a CertifiedCache.
    """
    if not isinstance(cache, CertifiedCache):
        raise TypeError(
            f"cache must be a CertifiedCache, got {type(cache).__name__}; after generate() use last_cache(model)"
        )
    state = cache.state
    return Certificates(state.total_variation, state.output, state.total_variation, state.output, state.flags)


def telemetry(model_or_cache: PreTrainedModel | CertifiedCache, reset: bool = False) -> Telemetry:
    """Counters since the cache was made, or since they were last reset; copies them to the host, which synchronizes.

    Each `generate()` that makes its own cache starts counting anew; a cache of your own counts until `reset=True`.

    Args:
        model_or_cache: a cache; or a converted model, and then the cache that its last `generate()` used.
        reset: start counting anew.

    Raises:
        CacheOverflowError: a captured or compiled step found a row full. Raised once; the counters stay.
        ValueError: the model has not generated yet.
    """
    cache = model_or_cache if isinstance(model_or_cache, CertifiedCache) else last_cache(model_or_cache)
    counters = cache.state.counters
    result = counters.drain()
    if reset:
        counters.reset()
    return result
