"""Certified attention classes, one for each supported family. Importable by name, so pickle and deepcopy just work."""

from __future__ import annotations

from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.phi3.modeling_phi3 import Phi3Attention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from .attention import CertifiedAttention


class CertifiedLlamaAttention(CertifiedAttention, LlamaAttention):
    """Llama, and every model that uses its attention class."""


class CertifiedQwen2Attention(CertifiedAttention, Qwen2Attention):
    """Qwen2, with a sliding window in the layers that have one."""


class CertifiedMistralAttention(CertifiedAttention, MistralAttention):
    """Mistral, with a sliding window where the config sets one."""


class CertifiedQwen3Attention(CertifiedAttention, Qwen3Attention):
    """Qwen3: queries and keys are normalised before the rotary embedding."""


class CertifiedPhi3Attention(CertifiedAttention, Phi3Attention):
    """Phi3, with head dim 96 and a sliding window where the config sets one."""


class CertifiedGemma2Attention(CertifiedAttention, Gemma2Attention):
    """Gemma2: soft capping, head dim 256, a sliding window in every second layer."""


class CertifiedGptOssAttention(CertifiedAttention, GptOssAttention):
    """GptOss: attention sinks, a sliding window in every second layer."""


#: Attention class of a family -> its certified class.
CERTIFIED_CLASSES: dict[type[nn.Module], type[CertifiedAttention]] = {
    LlamaAttention: CertifiedLlamaAttention,
    Qwen2Attention: CertifiedQwen2Attention,
    MistralAttention: CertifiedMistralAttention,
    Qwen3Attention: CertifiedQwen3Attention,
    Phi3Attention: CertifiedPhi3Attention,
    Gemma2Attention: CertifiedGemma2Attention,
    GptOssAttention: CertifiedGptOssAttention,
}
