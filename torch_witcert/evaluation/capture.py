"""Queries, keys and values of a dense model's own attention, as the model produced them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NAME = "torch_witcert_capture"


class AttentionInputs(NamedTuple):
    """Inputs of one layer's attention, after RoPE and norms, in the model's dtype."""

    q: torch.Tensor  # [B, H, last, D]: the last query positions only
    k: torch.Tensor  # [B, Hkv, S, D]
    v: torch.Tensor  # [B, Hkv, S, D]
    sm_scale: float


@contextmanager
def captured_attention(model: PreTrainedModel, last: int) -> Iterator[dict[int, AttentionInputs]]:
    """Record the inputs of every attention layer of a dense Hugging Face model; its results do not change.

    Args:
        model: a causal LM that runs through the attention interface with the implementation "sdpa".
        last: query positions kept, counted from the end.

    Yields:
        layer index -> inputs of that layer's last call; filled while the model runs.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    layers: dict[int, AttentionInputs] = {}

    def record(module, query, key, value, attention_mask, scaling=None, **options):
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        layers[module.layer_idx] = AttentionInputs(query[:, :, -last:].detach(), key.detach(), value.detach(), scale)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, record)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    try:
        yield layers
    finally:
        model.set_attn_implementation(before)
