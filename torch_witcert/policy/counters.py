"""Device counters of certificates by layer. Everything is tensor operations on static buffers, so it can be captured;
:meth:`Counters.drain` is the only place that synchronizes with the host."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..ops.certificate import Field
from .gate import Flag, gate

#: Fields TV, OUTPUT, KEY_ERROR and VALUE_ERROR: their sums and maxima are kept, over reads that used codes and have finite
#: bounds. A slice, because indexing by a list would copy the list to the device, which a capture forbids.
MEASURED = slice(Field.TV, Field.VALUE_ERROR + 1)
MEASURED_COUNT = MEASURED.stop - MEASURED.start
TOKEN_FIELDS = slice(Field.CODE_TOKENS, Field.TOKENS + 1)


class Count:
    """Index of an integer count in `Counters.counts` [L, Count.COUNT]."""

    READS = 0  # head reads that saw a token, or found the row full
    CODE_READS = 1  # of these, reads that used codes; coverage counts only them
    ACCEPTED = 2  # of these, reads within the limits
    FINITE = 3  # reads that used codes and have finite bounds
    NO_GUARANTEE = 4  # reads with an infinite bound, whether or not they used codes
    CODE_TOKENS = 5  # tokens read as codes, over all reads
    TOKENS = 6  # tokens read, over all reads
    PREFILL_TOKENS = 7  # prompt tokens whose attention ran exact by SDPA: no certificate, no part of coverage
    COUNT = 8


class CacheOverflowError(RuntimeError):
    """A captured step found a row full: it wrote nothing there and marked the reads with infinite bounds."""


class Summary(NamedTuple):
    """What one forward adds, leading dimension L (layers)."""

    counts: torch.Tensor  # int64 [L, Count.COUNT]
    flagged_groups: torch.Tensor  # int64 [L, Hkv] reads with codes in which a head of the KV group was flagged
    sums: torch.Tensor  # float64 [L, 4], the fields of MEASURED
    maxima: torch.Tensor  # float32 [L, 4], the fields of MEASURED
    worst: torch.Tensor  # float32 [L, B, H, Field.COUNT], the largest of each field over the query rows
    flags: torch.Tensor  # int32 [L, B, H] of `worst`

    @classmethod
    def concatenate(cls, parts: list[Summary]) -> Summary:
        return cls(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def summarize(certificates: torch.Tensor, limits: torch.Tensor, num_kv_heads: int) -> Summary:
    """Summary of certified reads.

    Args:
        certificates: float32 [L, B, H, T, Field.COUNT].
        limits: float32 [2] of :func:`~torch_witcert.policy.gate.make_limits`.
        num_kv_heads: Hkv; head h belongs to KV group h // (H / Hkv).
    """
    flags = gate(certificates, limits)
    read = (flags & Flag.IDLE) == 0
    with_codes = read & ((flags & Flag.NO_CODES) == 0)
    rejected = (flags & Flag.REJECTED) != 0
    unbounded = (flags & Flag.NO_GUARANTEE) != 0
    finite = with_codes & ~unbounded
    over_reads = (1, 2, 3)
    decided = torch.stack([read, with_codes, with_codes & ~rejected, finite, unbounded], -1)
    tokens = certificates[..., TOKEN_FIELDS].sum(over_reads, dtype=torch.float64)
    counts = torch.cat(
        [decided.sum(over_reads), tokens.to(torch.int64), torch.zeros_like(tokens[:, :1], dtype=torch.int64)], -1
    )
    measured = torch.where(finite[..., None], certificates[..., MEASURED], 0.0)
    group_flagged = (with_codes & rejected).unflatten(2, (num_kv_heads, -1)).any(3)
    worst = certificates.amax(3)
    return Summary(
        counts,
        group_flagged.sum((1, 3)),
        measured.sum(over_reads, dtype=torch.float64),
        measured.amax(over_reads),
        worst,
        gate(worst, limits),
    )


def summarize_prefill(marked: torch.Tensor, counts: torch.Tensor, kv_heads: int, limits: torch.Tensor) -> Summary:
    """Summary of one layer's exact prefill: no certificate, but heads that met a NaN or an Inf are marked.

    Args:
        marked: bool [B, H], no guarantee: the head's query, key, value or output was not finite.
        counts: int32 [B], tokens of the prompt.
        kv_heads: Hkv.
        limits: as in :func:`summarize`.
    """
    batch, heads = marked.shape
    bound = torch.where(marked, math.inf, 0.0)
    worst = bound.new_zeros(1, batch, heads, Field.COUNT)
    worst[0, :, :, Field.TV] = bound
    worst[0, :, :, Field.OUTPUT] = bound
    worst[0, :, :, Field.TOKENS] = counts[:, None].to(bound.dtype)
    flags = gate(worst, limits)
    flags = torch.where((flags & Flag.IDLE) == 0, flags | Flag.PREFILL, flags)
    totals = torch.zeros(1, Count.COUNT, dtype=torch.int64, device=marked.device)
    totals[0, Count.NO_GUARANTEE] = bound.isinf().sum()
    totals[0, Count.PREFILL_TOKENS] = counts.sum()
    return Summary(
        totals,
        torch.zeros(1, kv_heads, dtype=torch.int64, device=marked.device),
        torch.zeros(1, MEASURED_COUNT, dtype=torch.float64, device=marked.device),
        torch.zeros(1, MEASURED_COUNT, dtype=torch.float32, device=marked.device),
        worst,
        flags,
    )


@dataclass(frozen=True)
class Statistic:
    """Mean and maximum over the reads that used codes and have finite bounds; 0 where there is none."""

    mean: float
    maximum: float


@dataclass(frozen=True)
class LayerTelemetry:
    """Counters of one layer, on the host. Reads are (row, query head, query token) triples."""

    layer: int
    reads: int
    code_reads: int
    accepted: int
    no_guarantee: int
    flagged_groups: tuple[int, ...]  # by KV group: (row, token) pairs in which a head of the group was flagged
    code_tokens: int
    tokens: int
    prefill_tokens: int
    finite_reads: int
    total_variation: Statistic  # the bound as returned
    output: Statistic
    total_variation_candidate: Statistic  # the bound before repair; in observe mode nothing is repaired
    output_candidate: Statistic
    key_error: Statistic  # the part of the output bound that keys and arithmetic cause
    value_error: Statistic  # the part that quantized values cause

    @property
    def coverage(self) -> float:
        """Accepted share of the reads that used codes; NaN where there was none."""
        return self.accepted / self.code_reads if self.code_reads else math.nan

    @property
    def code_share(self) -> float:
        """Share of the tokens read that were read as codes; NaN where nothing was read."""
        return self.code_tokens / self.tokens if self.tokens else math.nan


@dataclass(frozen=True)
class Telemetry:
    """Counters of all certified layers."""

    layers: tuple[LayerTelemetry, ...]

    def total(self, name: str) -> int:
        """Sum of an integer field of :class:`LayerTelemetry` over the layers."""
        return sum(getattr(layer, name) for layer in self.layers)

    @property
    def coverage(self) -> float:
        """Accepted share of the reads that used codes, all layers; NaN where there was none."""
        code_reads = self.total("code_reads")
        return self.total("accepted") / code_reads if code_reads else math.nan

    @property
    def code_share(self) -> float:
        """Share of the tokens read that were read as codes, all layers; NaN where nothing was read."""
        tokens = self.total("tokens")
        return self.total("code_tokens") / tokens if tokens else math.nan

    def __str__(self) -> str:
        rows = [f"coverage {self.coverage:.4f}  tokens read as codes {self.code_share:.4f}"]
        rows.append("layer   coverage  TV bound mean      max   no guarantee")
        for layer in self.layers:
            bound = layer.total_variation
            rows.append(
                f"{layer.layer:5d} {layer.coverage:10.4f} {bound.mean:14.5f} {bound.maximum:8.5f} {layer.no_guarantee:14d}"
            )
        return "\n".join(rows)


def tensor_attributes(owner: object) -> dict[str, torch.Tensor]:
    """Every attribute that is a tensor, by its name: what holds the state of a cache need not list it, and can forget none."""
    return {name: value for name, value in vars(owner).items() if isinstance(value, torch.Tensor)}


class Counters:
    """Counters of a cache, on one device.

    Args:
        layers: model indices of the certified layers, in order.
        num_kv_heads: Hkv.
        device: where the certificates are.
    """

    def __init__(self, layers: tuple[int, ...], num_kv_heads: int, device: torch.device) -> None:
        number = len(layers)
        self.layers = layers
        self.counts = torch.zeros(number, Count.COUNT, dtype=torch.int64, device=device)
        self.flagged_groups = torch.zeros(number, num_kv_heads, dtype=torch.int64, device=device)
        self.sums = torch.zeros(number, MEASURED_COUNT, dtype=torch.float64, device=device)
        self.maxima = torch.zeros(number, MEASURED_COUNT, dtype=torch.float32, device=device)
        self.overflow = torch.zeros((), dtype=torch.int32, device=device)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor_attributes(self).values())

    def add(self, summary: Summary) -> None:
        """Add one forward, in place and without synchronization."""
        self.counts.add_(summary.counts)
        self.flagged_groups.add_(summary.flagged_groups)
        self.sums.add_(summary.sums)
        self.maxima.copy_(torch.maximum(self.maxima, summary.maxima))
        self.overflow.copy_(torch.maximum(self.overflow, (summary.flags & Flag.OVERFLOW).amax()))

    def reset(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()

    def drain(self) -> Telemetry:
        """Copy the counters to the host; this synchronizes.

        Raises:
            CacheOverflowError: a row was full in some step since the last drain. The mark is cleared; the counters stay.
        """
        if self.overflow.item():
            self.overflow.zero_()
            raise CacheOverflowError(
                "a row of the cache was full in a captured or compiled step: nothing was written for it and its reads were "
                "marked with infinite bounds. Make the cache with a larger max_length, or stop the row earlier"
            )
        columns = (self.counts.tolist(), self.flagged_groups.tolist(), self.sums.tolist(), self.maxima.tolist())
        return Telemetry(tuple(map(_layer_telemetry, self.layers, *columns)))


def _layer_telemetry(
    layer: int, counts: list[int], groups: list[int], sums: list[float], maxima: list[float]
) -> LayerTelemetry:
    finite = counts[Count.FINITE]
    means = [total / finite if finite else 0.0 for total in sums]
    tv, output, key_error, value_error = (Statistic(mean, top) for mean, top in zip(means, maxima, strict=True))
    return LayerTelemetry(
        layer=layer,
        reads=counts[Count.READS],
        code_reads=counts[Count.CODE_READS],
        accepted=counts[Count.ACCEPTED],
        no_guarantee=counts[Count.NO_GUARANTEE],
        flagged_groups=tuple(groups),
        code_tokens=counts[Count.CODE_TOKENS],
        tokens=counts[Count.TOKENS],
        prefill_tokens=counts[Count.PREFILL_TOKENS],
        finite_reads=finite,
        total_variation=tv,
        output=output,
        total_variation_candidate=tv,
        output_candidate=output,
        key_error=key_error,
        value_error=value_error,
    )
