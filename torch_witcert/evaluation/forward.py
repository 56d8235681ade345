"""One forward with a cache, by whatever name this version of transformers gives the argument."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def next_logits(
    model: PreTrainedModel, ids: torch.Tensor, cache: object, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits of the next token, [B, vocabulary], in the model's dtype.

    Args:
        model: a Hugging Face causal LM, converted or not.
        ids: int64 [B, T], the new tokens.
        cache: holds the tokens before them, and then these too.
        positions: int64 [B, T]; None: the model counts on from the cache.
    """
    # Imported here: the model has loaded transformers already.
    from ..nn.compatibility import CACHE_ARGUMENT

    options = {CACHE_ARGUMENT: cache, "use_cache": True, "logits_to_keep": 1}
    return model(ids, position_ids=positions, **options).logits[:, -1]
