"""Model families whose attention can be certified, and how to find it in a model."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.phi3.modeling_phi3 import Phi3Attention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

#: Attention classes of the supported families.
ATTENTION_CLASSES: tuple[type[nn.Module], ...] = (
    LlamaAttention,
    Qwen2Attention,
    MistralAttention,
    Qwen3Attention,
    Phi3Attention,
    Gemma2Attention,
    GptOssAttention,
)
#: `config.model_type` of the supported models.
MODEL_TYPES = ("llama", "qwen2", "mistral", "qwen3", "phi3", "gemma2", "gpt_oss")


def attention_modules(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Attention modules of a model with their names, in the order of `layer_idx`: certified, convertible or left dense.

    Raises:
        TypeError: `model` is no model of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, ATTENTION_CLASSES)]
    return sorted(found, key=lambda item: item[1].layer_idx)
