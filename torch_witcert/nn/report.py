"""`report`: what became of every attention module of a model."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from ..config import CertifiedInt8Config
from .attention import CertifiedAttention
from .convert import CONVERSION
from .families import attention_modules


@dataclass(frozen=True)
class LayerReport:
    """One attention module."""

    name: str
    layer: int
    certified: bool
    reason: str  # why it is dense; empty where it is certified
    attention_class: str
    heads: int
    kv_heads: int
    head_dim: int
    cacheless_forwards: int  # eager forwards without a cache: plain SDPA, no certificate


@dataclass(frozen=True)
class Report:
    """All attention modules of a model in layer order."""

    layers: tuple[LayerReport, ...]
    config: CertifiedInt8Config

    @property
    def certified(self) -> int:
        return sum(layer.certified for layer in self.layers)

    def __str__(self) -> str:
        rows = [f"{self.certified} of {len(self.layers)} attention layers certified, {self.config}"]
        for layer in self.layers:
            state = "certified" if layer.certified else f"dense ({layer.reason})"
            shape = f"{layer.heads} heads, {layer.kv_heads} KV heads, head_dim {layer.head_dim}"
            rows.append(f"{layer.name}: {state}; {shape}; {layer.cacheless_forwards} forwards without a cache")
        return "\n".join(rows)


def report(model: PreTrainedModel) -> Report:
    """What became of every attention module of a converted model.

    Raises:
        ValueError: the model is not converted.
    """
    found = attention_modules(model)
    recipes = [module.certified_config for _, module in found if isinstance(module, CertifiedAttention)]
    if not recipes:
        raise ValueError(f"model ({type(model).__name__}) is not converted: call torch_witcert.convert(model) first")
    conversion = getattr(model, CONVERSION, None)
    reasons = conversion.left_dense if conversion is not None else {}
    layers = []
    for name, module in found:
        certified = isinstance(module, CertifiedAttention)
        layers.append(
            LayerReport(
                name=name,
                layer=module.layer_idx,
                certified=certified,
                reason="" if certified else reasons.get(name, "not chosen by quantize_"),
                attention_class=type(module).__name__,
                heads=module.config.num_attention_heads,
                kv_heads=module.config.num_key_value_heads,
                head_dim=module.head_dim,
                cacheless_forwards=module.cacheless_forwards if certified else 0,
            )
        )
    return Report(tuple(layers), recipes[0])
