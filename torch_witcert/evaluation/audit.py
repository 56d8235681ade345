"""Bounds of real reads against exact attention in float64, while a model runs.

The audit watches the two operators: it keeps every key and value as the model gave it to `kv_write`, and for a read
that it checks computes exact attention over them. It needs eager execution (a compiled graph hides the operators) and
changes no result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..ops import PagedStore
from ..ops.certificate import Field
from ..ops.formats import StoreFormat
from ..testing.oracle import dequantized_attention, exact_attention, total_variation
from .statistics import BoundFigures, bound_figures

WRITE = torch.ops.torch_witcert.kv_write.default
READ = torch.ops.torch_witcert.certified_attention.default
STORED = len(PagedStore._fields)


class History(NamedTuple):
    """Exact keys and values of one layer by position, model dtype [B, Hkv, M * P, D]."""

    k: torch.Tensor
    v: torch.Tensor


class CheckedReads(NamedTuple):
    """Checked reads of one layer and one forward, float64 [rows, H]; one row for each query token."""

    tv_bound: torch.Tensor
    tv_true: torch.Tensor  # softmax over the stored codes against softmax over exact keys
    output_bound: torch.Tensor
    output_true: torch.Tensor  # what the operator returned against exact attention


def _with_sink(probabilities: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Probabilities [B, H, T, S] and, where there are sinks, what they take: S + 1."""
    if not sinks.numel():
        return probabilities
    return torch.cat([probabilities, 1 - probabilities.sum(-1, keepdim=True)], -1)


@dataclass
class Audit(TorchDispatchMode):
    """Context manager that checks the reads of the forwards inside it.

    Attributes:
        enabled: check the reads from here on. Keys and values are recorded in any case, so that a prefill can run
            unchecked; it has to run inside the context too.
        reads: layer -> its checked reads. Layers are numbered in the order in which they first wrote or read.
    """

    enabled: bool = True
    reads: dict[int, list[CheckedReads]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._layers: dict[int, int] = {}
        self._history: dict[int, History] = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if function is WRITE:
            k, v, columns, lengths, counts, page_table, _, _, *rest = arguments
            self._record(k, v, columns, lengths, counts, page_table, PagedStore(*rest[:STORED]))
        elif function is READ and self.enabled:
            self._check(arguments, result[0], result[2])
        return result

    def _layer(self, store: PagedStore) -> int:
        return self._layers.setdefault(store.k_codes.data_ptr(), len(self._layers))

    def _history_of(self, store: PagedStore, k: torch.Tensor, page_table: torch.Tensor) -> History:
        layer = self._layer(store)
        if layer not in self._history:
            batch, heads, _, dim = k.shape
            shape = (batch, heads, page_table.shape[1] * store.page_size, dim)
            self._history[layer] = History(k.new_zeros(shape), k.new_zeros(shape))
        return self._history[layer]

    def _record(self, k, v, columns, lengths, counts, page_table, store) -> None:
        history = self._history_of(store, k, page_table)
        for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
            chosen = columns[row, :count].long()
            history.k[row, :, length : length + count] = k[row][:, chosen]
            history.v[row, :, length : length + count] = v[row][:, chosen]

    def _check(self, arguments: tuple, out: torch.Tensor, certificate: torch.Tensor) -> None:
        q, k, v, positions, lengths, page_table, source_map, _, sinks, outlier_channels, *rest = arguments
        store, (sm_scale, window, softcap, _, layer, _, store_format) = PagedStore(*rest[:STORED]), rest[STORED:]
        scores = (sm_scale, window, softcap, sinks)
        history = self._history_of(store, k, page_table)
        slots = torch.arange(history.k.shape[2], device=k.device)
        cached = torch.where(slots < lengths[:, None], slots, -1)
        exact = exact_attention(
            q,
            torch.cat([history.k, k], 2),
            torch.cat([history.v, v], 2),
            positions,
            torch.cat([cached, positions.long()], 1),
            *scores,
        )
        state = (positions, lengths, page_table, source_map, store)
        parsed = StoreFormat.parse(store_format)
        used = dequantized_attention(q, k, v, *state, *scores, parsed, outlier_channels, layer)
        valid = positions >= 0

        def rows(x: torch.Tensor) -> torch.Tensor:
            return x.double().transpose(1, 2)[valid]

        checked = CheckedReads(
            tv_bound=rows(certificate[..., Field.TV]),
            tv_true=rows(total_variation(*(_with_sink(each.probabilities, sinks) for each in (exact, used)))),
            output_bound=rows(certificate[..., Field.OUTPUT]),
            output_true=rows((out.double() - exact.output).norm(dim=-1)),
        )
        self.reads.setdefault(self._layer(store), []).append(checked)

    def joined(self) -> CheckedReads:
        """All checked reads as float64 [layers, rows, H].

        Raises:
            ValueError: nothing was checked.
        """
        if not self.reads:
            raise ValueError("no read was checked: run forwards of a converted model, eagerly, inside the Audit")
        by_layer = [self.reads[layer] for layer in sorted(self.reads)]
        joined = [[torch.cat(parts) for parts in zip(*forwards, strict=True)] for forwards in by_layer]
        return CheckedReads(*(torch.stack(parts) for parts in zip(*joined, strict=True)))

    def total_variation_figures(self) -> BoundFigures:
        checked = self.joined()
        return bound_figures(checked.tv_bound, checked.tv_true)

    def output_figures(self) -> BoundFigures:
        checked = self.joined()
        return bound_figures(checked.output_bound, checked.output_true)
