"""Every certified read of a model against float64, taken down where the model calls the operators."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Self

import torch
from transformers import PreTrainedConfig

from torch_witcert.ops.certificate import Field
from torch_witcert.ops.formats import StoreFormat
from torch_witcert.ops.storage import PagedStore
from torch_witcert.testing.oracle import dequantized_attention, exact_attention


class Scoring(NamedTuple):
    """How a layer should make weights of scores, read off the model's config and weights and not off what the model passes."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


def scoring_of(config: PreTrainedConfig, layer: int, module: torch.nn.Module) -> Scoring:
    """Of a layer of Llama, Qwen2, Gemma2 or GptOss."""
    sliding = getattr(config, "layer_types", ["full_attention"] * (layer + 1))[layer] == "sliding_attention"
    return Scoring(
        scale=(getattr(config, "query_pre_attn_scalar", None) or config.head_dim) ** -0.5,
        window=config.sliding_window if sliding else 0,
        softcap=getattr(config, "attn_logit_softcapping", None) or 0.0,
        sinks=getattr(module, "sinks", None),
    )


class ModelRead(NamedTuple):
    """One call of `certified_attention`."""

    layer: int
    lengths: torch.Tensor  # [B], before the forward
    positions: torch.Tensor  # int32 [B, T]
    out: torch.Tensor  # [B, H, T, D]
    certificate: torch.Tensor  # [B, H, T, Field.COUNT]
    exact: torch.Tensor  # float64 [B, H, T, D], REF
    stored: torch.Tensor  # float64 [B, H, T, D], REFDQ
    values: torch.Tensor  # float64 [B, H, 1, D], largest magnitude of each channel of V

    def check(self, tolerance: float) -> None:
        """G1 to G4 of every token's read, G2 relative to the largest value of a channel."""
        token = (self.positions >= 0)[:, None].expand(self.out.shape[:3])
        assert self.out[token].isfinite().all() and self.certificate[token].isfinite().all(), f"layer {self.layer}: G1"
        error = (self.out.double() - self.exact).norm(dim=-1)
        bound = self.certificate[..., Field.OUTPUT].double()
        assert (error <= bound)[token].all(), f"layer {self.layer} at {self.lengths.tolist()}: G3"
        error = (self.out.double() - self.stored).abs() - tolerance * self.values
        assert (error <= 0)[token].all(), f"layer {self.layer} at {self.lengths.tolist()}: G2"


class ReadRecorder(AbstractContextManager):
    """Keeps the exact K and V of every layer and row as they are written, and what float64 makes of them for every read.

    It stands in for the two operators where models look them up; a dispatch mode would do, but slow down every other operator.

    Args:
        scorings: of each layer.
        lengths: tokens that the longest row has before a read, of the reads that are kept; all reads where left out.
    """

    def __init__(self, scorings: list[Scoring], lengths: tuple[int, ...] | None = None) -> None:
        self.scorings = scorings
        self.lengths = lengths
        self.reads: list[ModelRead] = []
        self.exact: dict[tuple[int, int], torch.Tensor] = {}  # [2, Hkv, S, D], keys and values

    def __enter__(self) -> Self:
        operators = torch.ops.torch_witcert
        self.operators = (operators.kv_write, operators.certified_attention)
        operators.kv_write, operators.certified_attention = self._kv_write, self._certified_attention
        return self

    def __exit__(self, *exception) -> None:
        operators = torch.ops.torch_witcert
        operators.kv_write, operators.certified_attention = self.operators

    def _kv_write(self, *args) -> None:
        k, v, columns, _, counts = args[:5]
        for row, count in enumerate(counts.tolist()):
            self._append(args[-2], row, torch.stack([k[row], v[row]])[:, :, columns[row, :count].long()])
        self.operators[0](*args)

    def _certified_attention(self, *args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        result = self.operators[1](*args)
        if self.lengths is None or int(args[4].max()) in self.lengths:
            self._read(args, result)
        return result

    def _append(self, layer: int, row: int, fresh: torch.Tensor) -> None:
        self.exact[layer, row] = self._with(layer, row, fresh)

    def _with(self, layer: int, row: int, fresh: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.exact.get((layer, row), fresh[:, :, :0]), fresh], 2)

    def _read(self, args: tuple, result: tuple[torch.Tensor, ...]) -> None:
        q, k, v, positions, lengths, page_table, source_map = args[:7]
        outliers, store, layer = args[9], PagedStore(*args[10:21]), args[-3]
        scoring = self.scorings[layer]
        state = (positions, lengths, page_table, source_map)
        options = (StoreFormat.parse(args[-1]), outliers, layer)
        stored = dequantized_attention(q, k, v, *state, store, *scoring, *options).output
        exact, largest = [], []
        for row in range(q.shape[0]):
            valid = positions[row] >= 0
            keys, values = self._with(layer, row, torch.stack([k[row][:, valid], v[row][:, valid]]))
            at = torch.arange(keys.shape[1])[None]
            here = slice(row, row + 1)
            exact.append(exact_attention(q[here], keys[None], values[None], positions[here], at, *scoring).output)
            largest.append(values.double().abs().amax(1).repeat_interleave(q.shape[1] // k.shape[1], 0)[:, None])
        found = (result[0].clone(), result[2].clone())
        read = (layer, lengths.clone(), positions.clone(), *found, torch.cat(exact), stored, torch.stack(largest))
        self.reads.append(ModelRead(*read))
