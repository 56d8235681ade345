"""Certified attention classes, one for each supported family. Importable by name, so pickle and deepcopy just work."""

from __future__ import annotations

from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from .attention import CertifiedAttention


class CertifiedLlamaAttention(CertifiedAttention, LlamaAttention):
    """Llama, and every model that uses its attention class."""


class CertifiedQwen2Attention(CertifiedAttention, Qwen2Attention):
    """Qwen2, with a sliding window in the layers that have one."""


class CertifiedMistralAttention(CertifiedAttention, MistralAttention):
    """Mistral, with a sliding window where the config sets one."""


#: Attention class of a family -> its certified class.
CERTIFIED_CLASSES: dict[type[nn.Module], type[CertifiedAttention]] = {
    LlamaAttention: CertifiedLlamaAttention,
    Qwen2Attention: CertifiedQwen2Attention,
    MistralAttention: CertifiedMistralAttention,
}
