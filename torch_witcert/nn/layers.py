"""Layers of a `CertifiedCache`, as Hugging Face sees them. `update` stores nothing: it hands fresh keys and values on to
the attention function, which reads first and writes then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
from transformers.cache_utils import CacheLayerMixin

from ..ops.splits import pages_per_split
from ..ops.storage import POOL_PARTS, StoreShape
from ..policy.counters import summarize_prefill, tensor_attributes
from ..policy.outliers import choose_outlier_channels, outlier_channels_of
from .exact import Scores, prefill_attention
from .masks import HeldTokens, may_synchronize
from .pages import PageGroup
from .step import CacheState, StepPlan

LATER = "belongs to a later version of torch_witcert"


class Identity:
    """Tells a cache which certified module each of its layers was made for, by its value.

    A copy of a module, by deepcopy or pickle, is another module and takes a value of its own. A copy of a cache keeps the values, and
    so its model; where both are copied in one call the copies belong together, because the module gives its new value to
    the copied identity that its layer holds as well.
    """

    _of_modules: ClassVar[WeakValueDictionary[str, Identity]] = WeakValueDictionary()

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Become the identity of a new module."""
        self.value = uuid4().hex
        self.is_copy = False
        self._of_modules[self.value] = self

    @classmethod
    def copied(cls, value: str) -> Identity:
        copy = cls.__new__(cls)
        copy.value, copy.is_copy = value, True
        return copy

    def __reduce__(self) -> tuple:
        of_module = self._of_modules.get(self.value, self)
        if of_module is not self:
            # Of a cache that was copied alone before: its layer and the module must hold one object for the copier.
            return _itself, (of_module,)
        return self.copied, (self.value,)


def _itself(identity: Identity) -> Identity:
    return identity


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
    """

    is_compileable = True
    is_croppable = True

    def __init__(self, index: int, shape: StoreShape, state: CacheState, identity: Identity | None) -> None:
        super().__init__()
        self.index = index
        self.shape = shape
        self.state = state
        self.identity = identity
        self.is_initialized = True

    @property
    def batch_size(self) -> int:
        return self.shape.batch_size

    @property
    def device(self) -> torch.device:
        return self.state.lengths.device

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the layer, by its name in the layer."""
        return tensor_attributes(self)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        valid: torch.Tensor | None,
        scores: Scores,
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
                names = ("batch_size", "KV heads", "head dim", "dtype", "device")
                wrong = [f"{n} {m}, got {f}" for n, m, f in zip(names, made_for, found, strict=True) if m != f]
                advice = "make one for this model and batch"
                if found[:3] == made_for[:3] and states.dtype != shape.dtype:
                    advice = (
                        "run the model in its own dtype (no autocast to another one), or make one after model.to(dtype)"
                    )
                raise ValueError(f"the CertifiedCache was made for {'; '.join(wrong)}: {advice}")
        return FreshTokens(self, key_states, value_states), None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: every tensor is allocated by the constructor."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No key takes part in the mask: see :mod:`.masks`."""
        return 0, 0 if torch.compiler.is_compiling() else HeldTokens(self.state.lengths)

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

    def take_rows(self, index: torch.Tensor) -> None:
        """Row b of what the layer keeps for each row becomes a copy of row index[b] (int64 [B]), in place."""
        raise NotImplementedError

    def forget_beyond(self, lengths: torch.Tensor) -> None:
        """Rows have become shorter, int32 [B]; a layer that may hold any bytes in unused slots has nothing to do."""

    def resize(self, index: torch.Tensor, sources: dict[int, torch.Tensor]) -> None:
        """Allocate anew for len(index) rows, copies of the rows index [B']; `sources` are each window's pages in the old pool."""
        raise NotImplementedError

    def crop(self, tokens_to_remove: int) -> None:
        """The cache crops all layers at once."""
        raise NotImplementedError("crop the CertifiedCache, not a layer of it")

    reorder_cache = batch_repeat_interleave = batch_select_indices = crop


class CertifiedLayer(RaggedLayer):
    """A layer whose keys and values live in pages of codes; every read leaves a certificate with the cache.

    Attributes:
        store: pages and exact tail.
        outlier_channels: int32 [Hkv, 2m], the channels of the keys that are kept exact; empty for m = 0. Where the recipe names
            no pairs they are chosen from the keys of the first forward that completes in this cache, if that runs eagerly
            (else pairs 0 to m - 1 stay), and never again: `reset()` keeps them, so that captured graphs stay valid. The codes
            then depend on that first prompt; a recipe with `outlier_indices` makes them independent of it.
    """

    def __init__(
        self,
        index: int,
        shape: StoreShape,
        state: CacheState,
        identity: Identity | None,
        radii: str,
        outlier_indices: tuple[tuple[int, ...], ...] | None,
        window: int,
    ) -> None:
        super().__init__(index, shape, state, identity)
        self.window = window
        self.store = shape.allocate(self.device)
        self.pages_per_split = pages_per_split(shape.page_size, shape.pages_per_row)
        self.radii = radii
        self.format_name = shape.store_format.name
        self.pairs = shape.store_format.key.outlier_pairs
        self.chooses_outliers = self.pairs > 0 and outlier_indices is None
        self.outlier_channels = torch.empty(0, dtype=torch.int32, device=self.device)
        if self.pairs:
            indices = outlier_indices or (tuple(range(self.pairs)),) * shape.num_kv_heads
            self.outlier_channels = outlier_channels_of(indices, shape.head_dim, device=self.device)

    @property
    def group(self) -> PageGroup:
        return self.state.groups[self.window]

    def named_tensors(self) -> dict[str, torch.Tensor]:
        return self.store._asdict() | super().named_tensors()

    def take_rows(self, index: torch.Tensor) -> None:
        for tail in (self.store.k_tail, self.store.v_tail):
            tail.copy_(tail[index])

    def resize(self, index: torch.Tensor, sources: dict[int, torch.Tensor]) -> None:
        old, pages = self.store, sources[self.window]
        self.shape = replace(self.shape, batch_size=len(index), pool_pages=self.group.num_pages)
        self.store = self.shape.allocate(self.device)
        for name in POOL_PARTS:
            if (part := getattr(self.store, name)).numel():
                part[: len(pages)] = getattr(old, name)[pages]
        self.store.k_tail.copy_(old.k_tail[index])
        self.store.v_tail.copy_(old.v_tail[index])

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        valid: torch.Tensor | None,
        scores: Scores,
    ) -> torch.Tensor:
        if scores.window != self.window:
            raise ValueError(
                f"layer {self.index} of the CertifiedCache keeps the tokens of a sliding window of {self.window} (0: all), but the "
                f"model reads with {scores.window}: make the cache after the model's config has its final sliding_window"
            )
        state = self.state
        plan = state.enter(self.index, valid, q.shape[2])
        if plan.prefill:
            out, poisoned = prefill_attention(q, k, v, plan.positions, plan.ragged, scores)
            marked = poisoned if plan.overflow is None else poisoned | plan.overflow[:, None]
            plan.summaries.append(summarize_prefill(marked, plan.counts, k.shape[1], state.limits))
        else:
            out, _, certificate = torch.ops.torch_witcert.certified_attention(
                q,
                k,
                v,
                plan.positions,
                state.lengths,
                plan.page_tables[self.window],
                plan.source_maps[self.window],
                plan.log_risk,
                state.no_floats if scores.sinks is None else scores.sinks,
                self.outlier_channels,
                *self.store,
                scores.scale,
                scores.window,
                scores.softcap,
                self.pages_per_split,
                self.index,
                self.radii,
                self.format_name,
            )
            state.add_certificate(certificate)
        self._choose_outliers(k, plan)
        torch.ops.torch_witcert.kv_write(
            k,
            v,
            plan.columns,
            state.lengths,
            plan.counts,
            self.group.page_table,
            state.seeds,
            self.outlier_channels,
            *self.store,
            self.index,
            self.format_name,
        )
        state.leave(self.index)
        return out

    def _choose_outliers(self, k: torch.Tensor, plan: StepPlan) -> None:
        """Before the first write, and eagerly only: a captured graph must find the same channels ever after."""
        if self.chooses_outliers and may_synchronize(k) and self.state.untouched:
            self.outlier_channels.copy_(choose_outlier_channels(k, plan.positions >= 0, self.pairs))
