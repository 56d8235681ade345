"""What differs between the versions of torch and transformers that are supported."""

from __future__ import annotations

import inspect
import warnings

import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaAttention

LEAST_TORCH = (2, 11)
LEAST_TRANSFORMERS = (5, 17)
TRANSFORMERS_MAJOR = 5
#: Pairs (torch, transformers) that the test suite runs with.
TESTED_PAIRS = (((2, 11), (5, 17)), ((2, 13), (5, 24)))

#: Name of the cache argument of models and attention modules: "cache" from 5.24 on, before that "past_key_values".
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaAttention.forward).parameters else "past_key_values"
#: Before 5.24 a positive argument of `Cache.crop` is the length to keep; from then on it is refused.
CROP_KEEPS = CACHE_ARGUMENT != "cache"

_warned = False


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a version text."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def check_versions(
    torch_version: str = torch.__version__, transformers_version: str = transformers.__version__
) -> None:
    """Refuse versions that cannot work; warn once for a pair that was not tested.

    Raises:
        ValueError: torch below 2.11, transformers below 5.17, or an unknown major version of transformers.
    """
    global _warned
    pair = release(torch_version), release(transformers_version)
    if pair[0] < LEAST_TORCH:
        raise ValueError(f"torch must be at least 2.11, got {torch_version}: install a newer torch")
    if pair[1] < LEAST_TRANSFORMERS or pair[1][0] != TRANSFORMERS_MAJOR:
        raise ValueError(f"transformers must be at least 5.17 and below 6, got {transformers_version}")
    if pair not in TESTED_PAIRS and not _warned:
        _warned = True
        tested = ", ".join(f"torch {t[0]}.{t[1]} with transformers {h[0]}.{h[1]}" for t, h in TESTED_PAIRS)
        warnings.warn(
            f"torch_witcert was not tested with torch {torch_version} and transformers {transformers_version}; tested: {tested}",
            stacklevel=3,
        )
