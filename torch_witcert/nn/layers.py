"""Layers of a `CertifiedCache`, as Hugging Face sees them. `update` stores nothing: it hands fresh keys and values on to
the attention function, which reads first and writes then."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import CacheLayerMixin

from ..ops.splits import pages_per_split
from ..ops.storage import StoreShape
from ..policy.counters import summarize_prefill
from .exact import prefill_attention
from .step import CacheState

LATER = "belongs to a later version of torch_witcert"


@dataclass
class FreshTokens:
    """Keys and values [B, Hkv, T, D] of the new columns on their way to the attention function, and the layer to read."""

    layer: RaggedLayer
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """What any other attention implementation looks at first, and the place to tell it."""
        raise ValueError(
            "a CertifiedCache was passed to a model that is not converted (any more), or whose attention implementation was "
            "changed: call torch_witcert.convert(model) and make the cache for it"
        )


class RaggedLayer(CacheLayerMixin):
    """One layer of ragged rows. Subclasses hold the tokens and read them in :meth:`attend`.

    Args:
        index: position among the cache's layers.
        shape: geometry of the layer.
        state: shared by all layers of the cache.
        identity: of the certified attention module that this layer was made for; None for a dense layer.
        device: of every tensor.
    """

    is_compileable = True
    is_croppable = False

    def __init__(
        self, index: int, shape: StoreShape, state: CacheState, identity: object | None, device: torch.device
    ) -> None:
        super().__init__()
        self.index = index
        self.shape = shape
        self.state = state
        self.identity = identity
        self.device = device
        self.is_initialized = True

    @property
    def batch_size(self) -> int:
        return self.shape.batch_size

    def tensors(self) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        valid: torch.Tensor | None,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        """Read, then write: output [B, H, T, D] of q [B, H, T, D] over the stored tokens and the fresh k, v [B, Hkv, T, D]."""
        raise NotImplementedError

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[FreshTokens, None]:
        """Hand the fresh tokens on.

        Raises:
            ValueError: their shape, dtype or device is not the one the cache was made for.
        """
        shape = self.shape
        made_for = (shape.batch_size, shape.num_kv_heads, shape.head_dim, shape.dtype, self.device)
        for states in (key_states, value_states):
            batch, heads, _, dim = states.shape
            found = (batch, heads, dim, states.dtype, states.device)
            if found != made_for:
                names = ("batch size", "KV heads", "head dim", "dtype", "device")
                wrong = [f"{n} {m}, got {f}" for n, m, f in zip(names, made_for, found, strict=True) if m != f]
                raise ValueError(
                    f"the CertifiedCache was made for {'; '.join(wrong)}: make one for this model and batch, and run the model "
                    "in its own dtype (no autocast to another one)"
                )
        return FreshTokens(self, key_states, value_states), None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: every tensor is allocated by the constructor."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No key takes part in the mask: see :mod:`.masks`."""
        return 0, 0

    def get_seq_length(self) -> torch.Tensor:
        """Columns that the cache has seen, padding included: a 0-d tensor that advances in place."""
        return self.state.column_count

    def get_max_length(self) -> int:
        return self.state.capacity

    def reset(self) -> None:
        """Nothing to do: the cache resets the lengths, and unused slots may hold any bytes."""

    def offload(self) -> None:
        raise NotImplementedError(f"offloading a CertifiedCache {LATER}")

    def prefetch(self) -> None:
        raise NotImplementedError(f"offloading a CertifiedCache {LATER}")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError(f"reordering the rows of a CertifiedCache (beam search) {LATER}")

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(f"cropping a CertifiedCache {LATER}")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError(f"repeating the rows of a CertifiedCache {LATER}")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise NotImplementedError(f"selecting rows of a CertifiedCache {LATER}")


class CertifiedLayer(RaggedLayer):
    """A layer whose keys and values live in int8 pages; every read leaves a certificate with the cache."""

    def __init__(
        self, index: int, shape: StoreShape, state: CacheState, identity: object | None, device: torch.device
    ) -> None:
        super().__init__(index, shape, state, identity, device)
        self.store = shape.allocate(device)
        self.pages_per_split = pages_per_split(shape.page_size, shape.pages_per_row)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.store)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        valid: torch.Tensor | None,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        state = self.state
        plan = state.enter(self.index, valid, q.shape[2])
        if plan.prefill:
            out, poisoned = prefill_attention(q, k, v, plan.positions, plan.ragged, window, scale)
            marked = poisoned if plan.overflow is None else poisoned | plan.overflow[:, None]
            plan.summaries.append(summarize_prefill(marked, plan.counts, k.shape[1], state.limits))
        else:
            out, _, certificate = torch.ops.torch_witcert.certified_attention(
                q,
                k,
                v,
                plan.positions,
                state.lengths,
                state.page_table,
                plan.source_map,
                *self.store,
                scale,
                window,
                self.pages_per_split,
            )
            state.add_certificate(certificate)
        torch.ops.torch_witcert.kv_write(k, v, plan.columns, state.lengths, plan.counts, state.page_table, *self.store)
        state.leave(self.index)
        return out
