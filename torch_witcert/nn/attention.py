"""The certified attention module, and the attention function that its forward ends in.

A certified module keeps the family's own forward (projections, norms, rotary embedding). Only what that forward calls
through transformers' attention interface is ours: the function below, registered as "torch_witcert".
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ..config import Recipe
from .cache import CertifiedCache
from .compatibility import CACHE_ARGUMENT
from .exact import Scores, eager_attention
from .layers import FreshTokens, Identity
from .masks import new_column_validity, validity_of

#: Name of the attention implementation, in `config._attn_implementation`.
IMPLEMENTATION = "torch_witcert"


class CertifiedAttention(nn.Module):
    """An attention module whose reads of a :class:`CertifiedCache` carry certificates.

    Made by :func:`torch_witcert.convert`, never called directly: the new module shares parameters, submodules, buffers
    and hooks with the one it replaces, so names, `state_dict` and later changes (`.to`, adapters, quantized weights) are
    those of the original. Concrete classes combine this one with a family's attention class.

    Attributes:
        certified_config: the recipe.
        original: the module that this one replaces.
        original_implementation: attention implementation that the model's config named before, None where an earlier
            module of the same model knows it.
        identity: tells a cache which module each of its layers was made for.
        cacheless_forwards: eager forwards without a cache, which ran as ordinary differentiable SDPA.
    """

    certified_config: Recipe
    original: nn.Module
    original_implementation: str | None
    identity: Identity
    cacheless_forwards: int
    config: PreTrainedConfig
    layer_idx: int
    head_dim: int

    def __init__(self, *args, **kwargs) -> None:
        raise TypeError(f"{type(self).__name__} is made from an attention module by torch_witcert.convert(model)")

    @classmethod
    def replacing(cls, original: nn.Module, config: Recipe) -> CertifiedAttention:
        """A certified module that shares everything with `original`."""
        module = cls.__new__(cls)
        module.__dict__.update(original.__dict__)
        implementation = original.config._attn_implementation
        module.__dict__.update(
            certified_config=config,
            original=original,
            original_implementation=None if implementation == IMPLEMENTATION else implementation,
            identity=Identity(),
            cacheless_forwards=0,
        )
        return module

    def release(self) -> nn.Module:
        """The original module, with every attribute as it is now (training flag and the like)."""
        ours = ("certified_config", "original", "original_implementation", "identity", "cacheless_forwards")
        self.original.__dict__.update({name: value for name, value in self.__dict__.items() if name not in ours})
        return self.original

    def __setstate__(self, state: dict) -> None:
        """A module that was copied or unpickled is another one."""
        super().__setstate__(state)
        if self.identity.is_copy:
            self.identity.renew()

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: object | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        """The family's forward, after a look at the cache.

        Args:
            hidden_states: [B, T, hidden].
            cache: None, or a `CertifiedCache` made for this model; `past_key_values` in transformers below 5.24.

        Raises:
            ValueError: a foreign cache, or one made for another model.
        """
        if "past_key_values" in kwargs:
            cache = kwargs.pop("past_key_values")
        if self.config._attn_implementation != IMPLEMENTATION:
            raise ValueError(
                f"the model's attention implementation was changed to {self.config._attn_implementation!r} after conversion; "
                f"call model.set_attn_implementation({IMPLEMENTATION!r}), or torch_witcert.restore(model)"
            )
        if cache is None:
            if not torch.compiler.is_compiling():
                self.cacheless_forwards += 1
        elif isinstance(cache, CertifiedCache):
            cache.check_made_for(self)
        elif self.certified_config.foreign_cache == "refuse":
            raise ValueError(
                f"{CACHE_ARGUMENT} is a {type(cache).__name__}, which a converted model does not read: pass a "
                "torch_witcert.CertifiedCache(model, max_length, batch_size); or use_cache=False for a forward without a cache "
                "(where none was passed, transformers made this one because use_cache is on); or convert with "
                f'{type(self.certified_config).__name__}(foreign_cache="dense")'
            )
        return super().forward(hidden_states, position_embeddings, attention_mask, cache, **kwargs)


def certified_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | FreshTokens,
    value: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention function of the implementation "torch_witcert".

    Args:
        query: [B, H, T, D], rotary embedding applied.
        key: the fresh tokens that a layer of a `CertifiedCache` handed on; or plain keys, for exact differentiable attention.
        attention_mask: validity of the new columns, see :mod:`.masks`; or the mask of SDPA.
        scaling: softmax scale.
        dropout: of plain keys only.
        kwargs: `sliding_window`, `softcap` and `s_aux` (attention sinks [H]) of the layer, each None for none.

    Returns:
        Output [B, T, H, D], and None for the attention weights.

    Raises:
        ValueError: gradients or dropout through the cache, or a feature that certified attention lacks.
    """
    batch, _, new_tokens, dim = query.shape
    sinks = kwargs.get("s_aux")
    scores = Scores(
        scale=dim**-0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window") or 0,
        softcap=kwargs.get("softcap") or 0.0,
        sinks=None if sinks is None else sinks.to(torch.float32),
    )
    if not isinstance(key, FreshTokens):
        if scores.is_plain:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        mask = attention_mask
        if mask is None:
            longer = key.shape[2] - new_tokens
            mask = torch.ones(1, 1, new_tokens, key.shape[2], dtype=torch.bool, device=query.device).tril(longer)
        out = eager_attention(query, key, value, mask, scores, dropout)
    else:
        _refuse_unsupported(module, query, key.keys, key.values, dropout, kwargs)
        valid = validity_of(attention_mask, batch, new_tokens)
        with torch.no_grad():
            out = key.layer.attend(query, key.keys, key.values, valid, scores)
    return out.transpose(1, 2).contiguous(), None


def _refuse_unsupported(
    module: nn.Module, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, dropout: float, kwargs: dict
) -> None:
    if torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad):
        raise ValueError(
            "gradients do not flow through a CertifiedCache: run the forward under torch.no_grad(), or without a cache "
            "(use_cache=False), which stays differentiable"
        )
    if dropout:
        raise ValueError(f"attention dropout {dropout} is not supported with a CertifiedCache: call model.eval()")
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal=False is not supported with a CertifiedCache, which reads causally")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions is not supported with a CertifiedCache: attention weights are never formed")
    if kwargs.get("position_bias") is not None:
        raise ValueError(
            f"position_bias (a bias on scores) is not supported with a CertifiedCache in {type(module).__name__}"
        )


# At import, under our own name: an unpickled certified module needs them without another call to convert().
AttentionInterface.register(IMPLEMENTATION, certified_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, new_column_validity)
