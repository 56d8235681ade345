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


def check_pretrained(model: object) -> None:
    """Raise TypeError where `model` is no model of transformers."""
    if isinstance(model, PreTrainedModel):
        return
    wrapped = ": pass the model that it wraps, model.get_base_model()" if hasattr(model, "get_base_model") else ""
    raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}{wrapped}")


def attention_modules(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Attention modules of a model with their names, in the order of `layer_idx`: certified, convertible or left dense.

    Raises:
        TypeError: `model` is no model of transformers.
    """
    check_pretrained(model)
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, ATTENTION_CLASSES)]
    return sorted(found, key=lambda item: item[1].layer_idx)


def check_every_layer(model: PreTrainedModel) -> None:
    """Refuse a model with a decoder layer that has no attention of a supported class: no layer of a cache would be its own.

    Raises:
        NotImplementedError: naming the layers and what is supported.
    """
    found = [module.layer_idx for _, module in attention_modules(model)]
    layers = getattr(model.get_decoder(), "layers", None)
    expected = list(range(len(found) if layers is None else len(layers)))
    if found != expected:
        supported = ", ".join(cls.__name__ for cls in ATTENTION_CLASSES)
        raise NotImplementedError(
            f"every layer of model ({type(model).__name__}) must have one attention module of a supported class ({supported}); of "
            f"layers {expected} those with one are {found}"
        )


def window_of(module: Any) -> int:
    """Sliding window that an attention module passes on, 0 for none."""
    source = module if hasattr(module, "sliding_window") else module.config
    return getattr(source, "sliding_window", None) or 0
