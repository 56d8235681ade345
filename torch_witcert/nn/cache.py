"""`CertifiedCache`: a Hugging Face cache whose layers keep keys and values in pages of codes."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..config import Recipe
from ..policy.outliers import outlier_indices_of
from .build import build_layers, check_positive, converted_modules, modules_of, named_tensors_of, nbytes_of
from .compatibility import CROP_KEEPS
from .export import load_cache, model_fingerprint, save_cache
from .layers import CertifiedLayer, RaggedLayer


class CertifiedCache(Cache):
    """Static cache of a converted model; `generate()` takes it, and compiles with it on the GPU.

    Every tensor is allocated here, once, so addresses stay the same for compiled and captured graphs: keep one cache and
    `reset()` it. Rows are ragged: padding is never stored.

    Args:
        model: converted by :func:`torch_witcert.convert`.
        max_length: tokens that a row can hold, rounded up to whole pages.
        batch_size: rows B.
        seeds: of each row's dither, an int for all rows or a sequence of B, in [0, 2^32); the recipe's where left out. The codes
            of a row depend on its tokens, its seed and the outlier channels, never on its place in a batch.
        num_pages: pages of the pool of layers without a sliding window, all rows together; as many as the rows can ever hold where
            left out. Fewer are enough for rows that share a prefix (see :meth:`fork`), or that do not all get long; a row
            that finds none left is refused as a full one is.

    Raises:
        ValueError: the model is not converted, a size is not a positive int, or seeds are given to a recipe without dither.
        NotImplementedError: layers of different shapes, or on several devices.
    """

    layers: list[RaggedLayer]  # type: ignore[assignment]

    def __init__(
        self,
        model: PreTrainedModel,
        max_length: int,
        batch_size: int = 1,
        *,
        seeds: int | Sequence[int] | None = None,
        num_pages: int | None = None,
    ) -> None:
        check_positive("max_length", max_length)
        modules, config = converted_modules(model)
        pages = -(-max_length // config.page_size)
        # Under inference_mode the tensors could not be updated outside it later.
        with torch.inference_mode(False):
            layers, state = build_layers(
                modules, config, pages, batch_size, model.dtype, model.device, seeds, num_pages
            )
        super().__init__(layers=layers)
        self.state = state
        self.config = config
        self.fingerprint = model_fingerprint(model)
        self._mark_static()

    def _mark_static(self) -> None:
        """Tell graphs that these addresses stay."""
        if not torch.compiler.is_compiling():
            for tensor in self.tensors():
                torch._dynamo.mark_static_address(tensor)

    def __repr__(self) -> str:
        return (
            f"CertifiedCache(batch_size={self.batch_size}, capacity_per_row={self.capacity_per_row}, certified layers="
            f"{len(self.certified_layers)} of {len(self.layers)}, nbytes={self.nbytes()})"
        )

    @property
    def capacity_per_row(self) -> int:
        """Tokens that a row can hold: `max_length` rounded up to whole pages."""
        return self.state.capacity

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype, which the exact tail and the zeros are stored in."""
        return self.layers[0].shape.dtype

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens stored of each row, int32 [B] on the device; advances in place."""
        return self.state.lengths

    @property
    def certified_layers(self) -> tuple[int, ...]:
        """Model indices of the certified layers: dimension L of the certificates."""
        return self.state.counters.layers

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the cache, by names like "lengths", "groups.0.page_table" and "layers.3.k_codes"."""
        return named_tensors_of(self.layers, self.state)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor of the cache."""
        return tuple(self.named_tensors().values())

    def nbytes(self) -> int:
        """Bytes that torch allocated for the cache: pages, tails, tables, counters and certificates."""
        return nbytes_of(self.layers, self.state)

    def bytes_per_token(self) -> float:
        """Bytes that one more token of one row costs, all layers: a page and its table entries over the page size.

        The exact tail, the pages of sliding windows, counters and certificates do not grow with `max_length` and are not part
        of it.
        """
        page = sum(group.page_table.element_size() for group in self.state.groups.values())
        for layer in self.layers:
            if isinstance(layer, CertifiedLayer):
                page += 0 if layer.group.kept < self.state.pages_per_row else layer.shape.page_nbytes()
            else:
                heads, size, dim = layer.shape.num_kv_heads, layer.shape.page_size, layer.shape.head_dim
                page += 2 * heads * size * dim * layer.shape.dtype.itemsize
        return page / self.state.page_size

    @classmethod
    def capacity(cls, model: PreTrainedModel, nbytes: int, batch_size: int = 1, config: Recipe | None = None) -> int:
        """Largest `max_length` whose cache fits in `nbytes`, to the byte; 0 where not even one page a row does.

        Args:
            model: converted; or not yet, and then `config` says how it will be.
            nbytes: bytes available.
            batch_size: rows B.
            config: recipe for a model that is not converted; the default recipe where left out.

        Raises:
            ValueError: a size is not a positive int, or `config` is not the recipe of the converted model.
        """
        check_positive("nbytes", nbytes)
        modules, config = modules_of(model, config)

        def size(pages: int) -> int:
            layout = build_layers(modules, config, pages, batch_size, model.dtype, torch.device("meta"))
            return nbytes_of(*layout)

        # Sliding windows stop growing, so the size is no line.
        if size(1) > nbytes:
            return 0
        low, high = 1, 2
        while size(high) <= nbytes:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if size(middle) <= nbytes else (low, middle)
        return low * config.page_size

    def check_made_for(self, module: Any) -> None:
        """Refuse an attention module that this cache has no layer for.

        Raises:
            ValueError: the cache was made for another model, or before this one was converted as it is now.
        """
        index = module.layer_idx
        made_for = self.layers[index].identity if index < len(self.layers) else None
        if made_for is not None and made_for.value == module.identity.value:
            return
        raise ValueError(
            "the CertifiedCache was made for another model, or for this one before it was converted: make one with "
            "torch_witcert.CertifiedCache(model, max_length, batch_size)"
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write everything that the cache holds to a safetensors file, for :meth:`load`; an older file is replaced as a whole.

        A forward that is under way or has failed is not part of it. The model's weights are not in the file.

        Raises:
            RuntimeError: a forward that failed half-way may have overwritten tokens that are still needed.
        """
        save_cache(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike, model: PreTrainedModel) -> CertifiedCache:
        """The cache that was saved, bit for bit, made for `model` and on its device; it goes on as the saved one would.

        Args:
            path: file of :meth:`save`.
            model: converted with the same recipe. Whether its config is the same is checked, not its weights: a file that other
                weights have filled gives certified answers about the wrong keys and values, and only you can know.

        Raises:
            ValueError: the file is damaged, is of another format version, recipe, model or dtype, or holds numbers that would lead
                reads astray; naming what differs.
        """
        return load_cache(cls, path, model)

    def outlier_indices(self) -> tuple[tuple[tuple[int, ...], ...], ...] | None:
        """Outlier pairs in use, [certified layer][KV head][m], to put into a recipe's `outlier_indices`; None for m = 0.

        Before the first forward they are those of the recipe or stand-ins. Copies to the host, which synchronizes.
        """
        certified = [layer for layer in self.layers if isinstance(layer, CertifiedLayer)]
        if not certified[0].pairs:
            return None
        return tuple(outlier_indices_of(layer.outlier_channels) for layer in certified)

    def reset(self) -> None:
        """Forget every token, in place and without moving a tensor; a new request with a new risk budget begins.

        The counters and the outlier channels stay; each row has its own seed again, whatever rows were copied.
        """
        self.state.reset()
        super().reset()

    def pages_in_use(self) -> int:
        """Pages that rows hold, shared ones once, all groups of layers. Synchronizes."""
        state = self.state
        return sum(int((group.reference_counts(state.lengths) > 0).sum()) for group in state.groups.values())

    @torch.no_grad()
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row b becomes a copy of row beam_idx[b], in place: complete pages are shared, exact tails copied, codes not touched.

        Args:
            beam_idx: int [B].

        Raises:
            ValueError: another number of rows, or a row that does not exist.
        """
        index = self._rows("beam_idx", beam_idx)
        if len(index) != self.batch_size:
            raise ValueError(f"beam_idx must have {self.batch_size} entries, one for each row, got {len(index)}")
        self.state.settle()
        self.state.take_rows(index)
        for layer in self.layers:
            layer.take_rows(index)

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Rows `targets` forget what they hold and go on from where row `source` stands, in place.

        Complete pages are shared until the last row that holds them goes; the exact tail is copied. The forks are requests of
        their own with a fresh risk budget; they keep the source's seed, so that their codes are those of a run without a fork.

        Args:
            source: row, not among the targets.
            targets: distinct rows.

        Raises:
            ValueError: a row that does not exist, or is named twice.
        """
        rows = self._rows("targets", targets).tolist()
        if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < self.batch_size:
            raise ValueError(f"source must be a row from 0 to {self.batch_size - 1}, got {source!r}")
        if len({source, *rows}) != len(rows) + 1:
            raise ValueError(f"source and targets must be distinct rows, got {source} and {rows}")
        index = torch.arange(self.batch_size, device=self.lengths.device)
        index[rows] = source
        self.reorder_cache(index)
        if self.state.budget:
            self.state.spent[rows] = 0

    @torch.no_grad()
    def release(self, rows: Sequence[int]) -> None:
        """Forget the tokens of some rows, in place, and their requests' budgets; pages that no other row shares are free.

        The rows get their own seeds back. Columns are those of the whole batch and stay counted until no row holds a token.
        Synchronizes.

        Raises:
            ValueError: a row that does not exist.
        """
        index = self._rows("rows", rows)
        state = self.state
        state.settle()
        state.set_lengths(state.lengths.index_fill(0, index, 0))
        self._forget_beyond()
        if state.budget:
            state.spent[index] = 0
        if state.seeds.numel():
            state.seeds[index] = state.own_seeds[index]
        if state.empty:
            state.column_count.zero_()

    @torch.no_grad()
    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Take the last tokens of every row back, in place, as if they had never been there. Synchronizes.

        What is left is bit-equal to never having gone on, dither included, as long as the exact tail reaches back so far: at least
        one page, at most two. The request's budget stays spent.

        Args:
            tokens_to_remove: 0, or minus the number of tokens to remove; an int, or an int tensor of one element. Before
                transformers 5.24 a positive number is the length to keep, as it is there.

        Raises:
            ValueError: more tokens than a row has or than its exact tail can give back, naming the lengths allowed; or a
                positive number. Nothing is changed then.
            TypeError: not an int.
        """
        try:
            if isinstance(tokens_to_remove, bool):
                raise TypeError
            # transformers computes it from `get_seq_length()`, a tensor.
            tokens_to_remove = operator.index(tokens_to_remove)
        except TypeError:
            raise TypeError(f"tokens_to_remove must be an int, got {tokens_to_remove!r}") from None
        state = self.state
        if tokens_to_remove > 0:
            if not CROP_KEEPS:
                raise ValueError(
                    f"tokens_to_remove must be 0 or negative (minus the number of tokens to remove), got {tokens_to_remove}"
                )
            tokens_to_remove = min(0, tokens_to_remove - int(state.column_count))
        if tokens_to_remove == 0:
            return
        state.settle()
        # A row without tokens has none to give back.
        lengths = torch.where(state.lengths > 0, state.lengths + tokens_to_remove, 0)
        oldest = state.exact_from()
        possible = (lengths == 0) | ((lengths > 0) & (lengths >= oldest))
        if not bool(possible.all()):
            row = int(possible.int().argmin())
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove} is not possible for row {row}, which holds {int(state.lengths[row])} tokens: it can "
                f"be cropped to 0, or to a length from {int(oldest[row])} on, where its exact tail begins (drafts, such as an assistant's "
                f"num_assistant_tokens, may be at most the page size {state.page_size}). Nothing was changed"
            )
        if tokens_to_remove < -int(state.column_count):
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove} is more than the {int(state.column_count)} columns that the cache has seen. "
                "Nothing was changed"
            )
        state.set_lengths(lengths)
        self._forget_beyond()
        state.column_count.add_(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, in place of the cache but in new tensors: graphs that were captured with it end here."""
        check_positive("repeats", repeats)
        index = torch.arange(self.batch_size, device=self.lengths.device)
        self.batch_select_indices(index.repeat_interleave(repeats))

    @torch.no_grad()
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """The cache of the rows `indices`, which may repeat, in new tensors: graphs that were captured with it end here.

        Args:
            indices: int [B'], or bool [B].

        Raises:
            ValueError: no row, or a row that does not exist.
        """
        index = self._rows("indices", indices)
        self.state.settle()
        with torch.inference_mode(False):
            sources = self.state.resize(index)
            for layer in self.layers:
                layer.resize(index, sources)
        self._mark_static()

    def early_initialization(self, batch_size: int, num_heads, head_dim, dtype: torch.dtype, device) -> None:
        """Every tensor is allocated by the constructor; only the sizes are compared.

        Raises:
            ValueError: they are not those that the cache was made for.
        """
        if (batch_size, dtype) != (self.batch_size, self.dtype):
            raise ValueError(
                f"batch_size and dtype must be those that the CertifiedCache was made for, {self.batch_size} and {self.dtype}, got "
                f"{batch_size} and {dtype}"
            )

    def _forget_beyond(self) -> None:
        for layer in self.layers:
            layer.forget_beyond(self.lengths)

    def _rows(self, name: str, rows: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Row indices, int64 on the cache's device."""
        index = torch.as_tensor(rows, device=self.lengths.device)
        if index.dtype == torch.bool and tuple(index.shape) == (self.batch_size,):
            index = index.nonzero()[:, 0]
        if index.ndim != 1 or index.numel() == 0 or index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(
                f"{name} must be row indices, a one-dimensional list of one int or more, or {self.batch_size} bools, got {rows!r}"
            )
        if int(index.min()) < 0 or int(index.max()) >= self.batch_size:
            raise ValueError(f"{name} must be rows from 0 to {self.batch_size - 1}, got {index.tolist()}")
        return index.to(torch.int64)

    def __deepcopy__(self, memo: dict) -> CertifiedCache:
        """A cache of its own for the same model; a forward that is under way in this one is not part of it."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        with torch.inference_mode(False), torch.no_grad():
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied._mark_static()
        return copied

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        if any(tensor.is_inference() for tensor in self.tensors()):
            # Unpickled under inference_mode; outside it the tensors could not be updated.
            memo = {id(layer.identity): layer.identity for layer in self.layers}
            with torch.inference_mode(False), torch.no_grad():
                self.__dict__.update(copy.deepcopy(state, memo))
        self._mark_static()
