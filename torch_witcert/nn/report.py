"""`report`: what became of every attention module of a model."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from ..config import Recipe
from .attention import CertifiedAttention
from .convert import LEFT_DENSE
from .supported import attention_modules


@dataclass(frozen=True)
class LayerReport:
    """One attention module."""

    name: str
    layer: int
    config: Recipe | None  # the recipe; None where the module was left dense
    reason: str  # why it is dense; empty where it is certified
    attention_class: str
    heads: int
    kv_heads: int
    head_dim: int
    cacheless_forwards: int  # eager forwards without a cache: plain SDPA, no certificate

    @property
    def certified(self) -> bool:
        return self.config is not None


@dataclass(frozen=True)
class Report:
    """All attention modules of a model in layer order."""

    layers: tuple[LayerReport, ...]

    @property
    def certified(self) -> int:
        return sum(layer.certified for layer in self.layers)

    def __str__(self) -> str:
        rows = [f"{self.certified} of {len(self.layers)} attention layers certified"]
        for layer in self.layers:
            state = str(layer.config) if layer.certified else f"dense ({layer.reason})"
            shape = f"{layer.heads} heads, {layer.kv_heads} KV heads, head_dim {layer.head_dim}"
            rows.append(f"{layer.name}: {state}; {shape}; {layer.cacheless_forwards} forwards without a cache")
        return "\n".join(rows)


def report(model: PreTrainedModel) -> Report:
    """What became of every attention module of a converted model.

    Raises:
        ValueError: the model is not converted.
    """
    found = attention_modules(model)
    if not any(isinstance(module, CertifiedAttention) for _, module in found):
        raise ValueError(f"model ({type(model).__name__}) is not converted: call torch_witcert.convert(model) first")
    reasons = getattr(model, LEFT_DENSE, {})
    layers = []
    for name, module in found:
        certified = isinstance(module, CertifiedAttention)
        layers.append(
            LayerReport(
                name=name,
                layer=module.layer_idx,
                config=module.certified_config if certified else None,
                reason="" if certified else reasons.get(name, "not chosen by quantize_"),
                attention_class=type(module).__name__,
                heads=module.config.num_attention_heads,
                kv_heads=module.config.num_key_value_heads,
                head_dim=module.head_dim,
                cacheless_forwards=module.cacheless_forwards if certified else 0,
            )
        )
    return Report(tuple(layers))
