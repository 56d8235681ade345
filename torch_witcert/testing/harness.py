"""Runs the operators over a cache whose exact K and V it keeps, and checks what they return against float64.

The same harness serves the CPU reference, the interpreter and the compiled kernels: the caller chooses the device and the
operators. It holds the order of DESIGN section 4: a forward reads first and writes afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from torch_witcert.ops.arithmetic import SCALE_FLOOR
from torch_witcert.ops.certificate import Field
from torch_witcert.ops.dither import SEEDS
from torch_witcert.ops.radii import DETERMINISTIC, parse_radii
from torch_witcert.ops.reference import certified_attention_reference, kv_write_reference
from torch_witcert.ops.splits import pages_per_split
from torch_witcert.ops.storage import (
    POSITION_OVERFLOW,
    POSITION_PADDING,
    StoreShape,
    derive_source_map,
    identity_page_table,
)

from .generators import (
    HOT,
    KEY_KINDS,
    VALUE_KINDS,
    Scenario,
    hot_entry,
    make_outlier_channels,
    make_queries,
    make_sinks,
    one_hot_values,
)
from .oracle import StoredTokens, exact_attention, stored_tokens
from .slack import arithmetic_limit

#: Float64 probabilities that a check holds at a time, to bound its memory.
MOST_PROBABILITIES = 2**27


class Operators(NamedTuple):
    """An implementation of the two operators, with the arguments of DESIGN section 5."""

    kv_write: Callable[..., None]
    certified_attention: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


#: The float32 reference, whatever is registered for the device.
REFERENCE = Operators(kv_write_reference, certified_attention_reference)


def registered() -> Operators:
    """What torch.library dispatches to."""
    return Operators(torch.ops.torch_witcert.kv_write.default, torch.ops.torch_witcert.certified_attention.default)


class Read(NamedTuple):
    """One forward's read: what went in and what came out."""

    q: torch.Tensor  # [B, H, T, D]
    positions: torch.Tensor  # int32 [B, T]
    out: torch.Tensor  # [B, H, T, D]
    lse: torch.Tensor  # float32 [B, H, T]
    certificate: torch.Tensor  # float32 [B, H, T, Field.COUNT]


@dataclass
class Soundness:
    """Counts of a check; add them up with `+`. A read is one (row, head, query token); padding is none."""

    reads: int = 0
    unbounded: int = 0  # reads with an infinite bound
    tv_reads: int = 0  # reads whose own distribution was observed
    tv_violations: int = 0
    output_violations: int = 0
    tokens: int = 0  # tokens read, all reads together
    code_tokens: int = 0  # of them as codes
    arithmetic_reads: int = 0  # reads compared with float64 over the operator's own store
    arithmetic_violations: int = 0
    probabilistic_reads: int = 0  # reads with probabilistic radii: each may break its bound with probability delta
    probabilistic_violations: int = 0  # of them in total variation or in output; no part of `violations`

    @property
    def violations(self) -> int:
        return self.tv_violations + self.output_violations + self.arithmetic_violations

    @property
    def code_share(self) -> float:
        return self.code_tokens / max(1, self.tokens)

    def __add__(self, other: Soundness) -> Soundness:
        return Soundness(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


class Distances(NamedTuple):
    """Float64 distances of a read from exact attention [B, H, T]; +inf where exact attention is undefined."""

    output: torch.Tensor
    #: Lower bound of the total variation that one-hot values show: grouped by channel, less the rounding of the output.
    total_variation: torch.Tensor


class CacheHarness:
    """A cache of one layer with its exact K and V.

    Args:
        shape: geometry.
        sm_scale: softmax scale.
        window: 0, or the sliding window.
        softcap: 0, or the soft cap of the scores.
        sinks: float32 [H], logits of the sinks; default none.
        radii: name of the radii allowed.
        delta: risk of each read, for probabilistic radii.
        layer: index of the attention layer, for the dither.
        seeds: int64 [B], of the rows' dither; default 0, 1, ..
        outlier_channels: int32 [Hkv, 2m]; default the first m RoPE pairs.
        page_table: int32 [B, M]; default the identity.
        operators: implementation; default what is registered.
        device: of everything.
        unused_byte: what every byte of the store holds before it is written; None for zeros.
    """

    def __init__(
        self,
        shape: StoreShape,
        *,
        sm_scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        radii: str = DETERMINISTIC.name,
        delta: float = 1e-4,
        layer: int = 0,
        seeds: torch.Tensor | None = None,
        outlier_channels: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        operators: Operators | None = None,
        device: torch.device | str = "cpu",
        unused_byte: int | None = None,
    ) -> None:
        self.shape, self.sm_scale, self.window = shape, sm_scale, window
        self.softcap, self.radii, self.delta, self.layer = softcap, radii, delta, layer
        self.format = shape.store_format
        self.is_probabilistic = parse_radii(radii, self.format).probabilistic
        self.operators = operators or registered()
        self.device = torch.device(device)
        self.sinks = torch.empty(0, device=device) if sinks is None else sinks.to(device)
        self.seeds = torch.empty(0, dtype=torch.int64, device=device)
        if self.format.is_dithered:
            self.seeds = torch.arange(shape.batch_size, device=device) if seeds is None else seeds.to(device)
        self.outlier_channels = torch.empty(0, dtype=torch.int32, device=device)
        pairs = self.format.key.outlier_pairs
        if pairs and outlier_channels is not None:
            self.outlier_channels = outlier_channels.to(device)
        elif pairs:
            first = torch.arange(pairs, dtype=torch.int32, device=device)
            both = torch.cat([first, first + shape.head_dim // 2])
            self.outlier_channels = both.expand(shape.num_kv_heads, -1).contiguous()
        self.capacity = shape.pages_per_row * shape.page_size
        self.store = shape.allocate(device)
        if unused_byte is not None:
            for tensor in self.store:
                tensor.view(torch.uint8).fill_(unused_byte)
        identity = identity_page_table(shape.batch_size, shape.pages_per_row, device)
        self.page_table = identity if page_table is None else page_table.to(device)
        self.lengths = torch.zeros(shape.batch_size, dtype=torch.int32, device=device)
        exact = (shape.batch_size, shape.num_kv_heads, self.capacity, shape.head_dim)
        self.keys = torch.zeros(exact, dtype=shape.dtype, device=device)
        self.values = torch.zeros(exact, dtype=shape.dtype, device=device)

    def place(self, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions, columns and counts of a forward.

        Args:
            valid: bool [B, T], which columns hold a token.

        Returns:
            positions int32 [B, T], columns int32 [B, T], counts int32 [B] (tokens that fit).
        """
        rank = valid.cumsum(1) - 1 + self.lengths[:, None]
        positions = torch.where(rank < self.capacity, rank, POSITION_OVERFLOW)
        positions = torch.where(valid, positions, POSITION_PADDING)
        columns = (~valid).int().argsort(dim=1, stable=True)
        counts = (positions >= 0).sum(1)
        return positions.int(), columns.int(), counts.int()

    def source_map(self) -> torch.Tensor:
        return derive_source_map(self.lengths, self.shape.num_kv_heads, self.shape.pages_per_row, self.shape.page_size)

    def read(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor) -> Read:
        """Attention over the cache and the fresh tokens; changes nothing."""
        positions, _, _ = self.place(valid)
        risk = math.log(2 / self.delta)
        result = self.operators.certified_attention(
            q,
            k,
            v,
            positions,
            self.lengths,
            self.page_table,
            self.source_map(),
            torch.full(positions.shape if self.is_probabilistic else (0,), risk, device=self.device),
            self.sinks,
            self.outlier_channels,
            *self.store,
            self.sm_scale,
            self.window,
            self.softcap,
            pages_per_split(self.shape.page_size, self.shape.pages_per_row),
            self.layer,
            self.radii,
            self.format.name,
        )
        return Read(q, positions, *result)

    def write(self, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor) -> None:
        """Append the valid columns of k, v [B, Hkv, T, D], keep them as the truth, advance the lengths."""
        positions, columns, counts = self.place(valid)
        self.operators.kv_write(
            k,
            v,
            columns,
            self.lengths,
            counts,
            self.page_table,
            self.seeds,
            self.outlier_channels,
            *self.store,
            self.layer,
            self.format.name,
        )
        row, column = (positions >= 0).nonzero(as_tuple=True)
        at = positions[row, column].long()
        self.keys[row, :, at] = k[row, :, column]
        self.values[row, :, at] = v[row, :, column]
        self.lengths += counts

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor) -> Read:
        """Read, then write."""
        result = self.read(q, k, v, valid)
        self.write(k, v, valid)
        return result

    def tokens(self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> StoredTokens:
        """What a read of the fresh k, v [B, Hkv, T, D] at positions [B, T] has before it, as the store gives it."""
        state = (positions, self.lengths, self.page_table, self.source_map())
        return stored_tokens(self.store, k, v, *state, self.format, self.outlier_channels, self.layer)

    def check_arithmetic(self, read: Read, k: torch.Tensor, v: torch.Tensor) -> Soundness:
        """The operator against float64 over its own K^ and V^: the error is within the slack for its arithmetic.

        Call it between :meth:`read` and :meth:`write`, when the store is what the read saw.

        Args:
            read: result of :meth:`read`.
            k, v: the fresh tokens of that read.
        """
        tokens = self.tokens(k, v, read.positions)
        scoring = (self.softcap, self.sinks)
        batch, heads, new_tokens, _ = read.q.shape
        columns = max(1, MOST_PROBABILITIES // (batch * heads * tokens.k.shape[2]))
        total = Soundness()
        for start in range(0, new_tokens, columns):
            here = slice(start, start + columns)
            q, positions = read.q[:, :, here], read.positions[:, here]
            at = (positions, tokens.key_positions)
            exact = exact_attention(q, tokens.k, tokens.v, *at, self.sm_scale, self.window, *scoring)
            store = (self.store, self.page_table, self.sm_scale, *scoring, self.format, self.outlier_channels)
            limit = arithmetic_limit(q, exact, tokens, *store)
            error = (read.out[:, :, here].double() - exact.output).norm(dim=-1)
            claimed = (positions >= 0)[:, None] & read.certificate[:, :, here, Field.OUTPUT].isfinite()
            total += Soundness(
                arithmetic_reads=int(claimed.sum()), arithmetic_violations=int((claimed & ~(error <= limit)).sum())
            )
        return total

    def key_error(self) -> torch.Tensor:
        """K - K^ of what is cached, float64 [B, Hkv, capacity, D]; 0 for tokens that are read exact."""
        none = self.keys[:, :, :0]
        positions = torch.empty(self.shape.batch_size, 0, dtype=torch.int32, device=self.device)
        tokens = self.tokens(none, none, positions)
        return torch.where(tokens.is_code[..., None], self.keys.double() - tokens.k, 0.0)

    def distances(self, read: Read, one_hot: bool) -> Distances:
        """Distances of a read, after its forward, from exact attention over the original K and V."""
        output = read.lse.new_zeros(read.lse.shape, dtype=torch.float64)
        variation = torch.zeros_like(output)
        longest = max(1, int(self.lengths.max()))
        at = torch.arange(longest, device=self.device)
        entry = hot_entry(self.format.value) if one_hot else None
        heads, new_tokens = read.q.shape[1:3]
        columns = max(1, MOST_PROBABILITIES // (heads * longest))
        rows = max(1, MOST_PROBABILITIES // (heads * longest * min(columns, new_tokens)))
        for first in range(0, read.q.shape[0], rows):
            row = slice(first, first + rows)
            key_positions = torch.where(at < self.lengths[row, None], at, -1)
            for start in range(0, new_tokens, columns):
                column = slice(start, start + columns)
                exact = exact_attention(
                    read.q[row, :, column],
                    self.keys[row, :, :longest],
                    self.values[row, :, :longest],
                    read.positions[row, column],
                    key_positions,
                    self.sm_scale,
                    self.window,
                    self.softcap,
                    self.sinks,
                )
                returned = read.out[row, :, column].double()
                output[row, :, column] = (returned - exact.output).norm(dim=-1)
                if one_hot:
                    rounding = torch.finfo(read.out.dtype)
                    # A group of zeros in int4 comes back as half of the smallest scale.
                    hidden = returned.abs() * (rounding.eps / 2) + rounding.tiny * rounding.eps + SCALE_FLOOR
                    apart = ((returned - exact.output).abs() - hidden).clamp_min(0).sum(-1)
                    apart = apart / entry + self._sink_distance(read.lse[row, :, column].double(), exact.lse)
                    variation[row, :, column] = apart / 2
        return Distances(*(torch.where(x.isnan(), float("inf"), x) for x in (output, variation)))

    def _sink_distance(self, lse: torch.Tensor, exact_lse: torch.Tensor) -> torch.Tensor:
        """Lower bound of |weight that a sink was given - its exact weight|, [B, H, T]: no value shows it, but the lse does."""
        if not self.sinks.numel():
            return torch.zeros_like(lse)
        logit = self.sinks.double()[:, None]
        given, exact = (torch.where(x.isneginf(), 0.0, torch.exp(logit - x)) for x in (lse, exact_lse))
        # The lse is rounded to float32 a few times.
        hidden = (lse.abs().nan_to_num(0.0, 0.0, 0.0) + 4) * 2.0**-21
        return ((given - exact).abs() - hidden * torch.maximum(given, exact)).clamp_min(0)

    def check(self, read: Read, one_hot: bool) -> Soundness:
        """|exact - returned| <= bound, zero tolerance, over every read of a forward (call it after the forward).

        Reads with probabilistic radii are counted apart.

        Args:
            read: result of :meth:`forward`.
            one_hot: the cache's values are `one_hot_values`, so that total variation is checked too.
        """
        distances = self.distances(read, one_hot)
        certificate = read.certificate.double()
        tv, output = certificate[..., Field.TV], certificate[..., Field.OUTPUT]
        is_read = (read.positions != POSITION_PADDING)[:, None].expand_as(tv)
        counted = certificate[is_read]
        tv_wrong = is_read & ~(distances.total_variation <= tv) if one_hot else torch.zeros_like(is_read)
        output_wrong = is_read & ~(distances.output <= output)
        probable = self.is_probabilistic
        return Soundness(
            reads=int(is_read.sum()),
            unbounded=int((is_read & (tv.isinf() | output.isinf())).sum()),
            tv_reads=int(is_read.sum()) if one_hot else 0,
            tv_violations=0 if probable else int(tv_wrong.sum()),
            output_violations=0 if probable else int(output_wrong.sum()),
            probabilistic_reads=int(is_read.sum()) if probable else 0,
            probabilistic_violations=int((tv_wrong | output_wrong).sum()) if probable else 0,
            tokens=int(counted[:, Field.TOKENS].sum()),
            code_tokens=int(counted[:, Field.CODE_TOKENS].sum()),
        )


def shuffled_page_table(batch_size: int, pages_per_row: int, generator: torch.Generator) -> torch.Tensor:
    """Page table int32 [B, M] with every page of the pool somewhere else."""
    order = torch.randperm(batch_size * pages_per_row, generator=generator, device=generator.device)
    return order.int().view(batch_size, pages_per_row)


def ragged_mask(batch_size: int, new_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """bool [B, T]: random left padding, now and then a hole, now and then an idle row."""
    device = generator.device
    padding = torch.randint(0, new_tokens + 1, (batch_size, 1), generator=generator, device=device)
    padded = torch.rand(batch_size, 1, generator=generator, device=device) < 0.5
    valid = torch.arange(new_tokens, device=device) >= padding * padded
    return valid & (torch.rand(batch_size, new_tokens, generator=generator, device=device) < 0.95)


def run(
    scenario: Scenario,
    operators: Operators | None = None,
    device: torch.device | str = "cpu",
    arithmetic: bool = True,
) -> Soundness:
    """Run a scenario's forwards, each checked, over a shuffled page table and a store full of 0xFF bytes.

    Args:
        scenario: what to run.
        operators, device: as in :class:`CacheHarness`.
        arithmetic: also compare with float64 over the operator's own store.
    """
    generator = torch.Generator(device).manual_seed(scenario.seed)
    batch, kv_heads, dim = scenario.batch_size, scenario.num_kv_heads, scenario.head_dim
    formats, heads = scenario.formats, kv_heads * scenario.group
    shape = StoreShape(batch, scenario.pages_per_row, kv_heads, scenario.page_size, dim, scenario.dtype, formats)
    first_seed = torch.randint(SEEDS, (1,), generator=generator, device=generator.device)
    harness = CacheHarness(
        shape,
        sm_scale=scenario.sm_scale,
        window=scenario.window,
        softcap=scenario.softcap,
        sinks=make_sinks(heads, generator) if scenario.sinks else None,
        radii=scenario.radii,
        delta=scenario.delta,
        layer=scenario.layer,
        seeds=(first_seed + torch.arange(batch, device=generator.device)) % SEEDS,
        outlier_channels=make_outlier_channels(formats.key, kv_heads, dim, generator),
        page_table=shuffled_page_table(batch, scenario.pages_per_row, generator),
        operators=operators,
        device=device,
        unused_byte=0xFF,
    )
    one_hot = scenario.value_kind == "one_hot"

    def make_tokens(valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fresh = (batch, kv_heads, valid.shape[1], dim)
        k = KEY_KINDS[scenario.key_kind](fresh, generator).to(scenario.dtype)
        if one_hot:
            return k, one_hot_values(harness.place(valid)[0], kv_heads, dim, scenario.dtype, formats.value)
        return k, VALUE_KINDS[scenario.value_kind](fresh, generator).to(scenario.dtype)

    if scenario.prefill:
        valid = torch.ones(batch, scenario.prefill, dtype=torch.bool, device=device)
        harness.write(*make_tokens(valid), valid)
    total = Soundness()
    for new_tokens in scenario.chunks:
        longest = int(harness.lengths.max())
        valid = ragged_mask(batch, new_tokens, generator) | (longest == 0)
        k, v = make_tokens(valid)
        q = make_queries(
            scenario.query_kind,
            (batch, heads, new_tokens, dim),
            scenario.dtype,
            generator,
            harness.keys[:, :, :longest] if longest else k,
            harness.key_error()[:, :, :longest] if longest else k,
            scenario.strength,
            scenario.sm_scale,
        )
        read = harness.read(q, k, v, valid)
        if arithmetic:
            total += harness.check_arithmetic(read, k, v)
        harness.write(k, v, valid)
        total += harness.check(read, one_hot)
    return total


def run_rounding_ties(operators: Operators | None = None, device: torch.device | str = "cpu") -> Soundness:
    """One read whose radii are nearly 0 and whose weights lie just below a bf16 tie, so that rounding them is all that is wrong.

    Most weights are 0.5 (1 + 2^-8) less a little and lose 2^-8 of their size, all in the same direction, where a kernel
    rounds weights to bf16 for its second matrix product. Keys are constant in a page: they have no error.
    """
    page_size, dim, pages = 16, 64, 16
    shape = StoreShape(1, pages, 1, page_size, dim, torch.float32)
    harness = CacheHarness(shape, sm_scale=1.0, operators=operators, device=device)

    def tokens(count: int, key: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        k, v = (torch.zeros(1, 1, count, dim, device=device) for _ in range(2))
        k[..., 0], v[..., 0] = key, HOT
        return k, v, torch.ones(1, count, dtype=torch.bool, device=device)

    harness.write(*tokens(page_size, 0.0))
    harness.write(*tokens((pages - 2) * page_size, 1.0))
    q = torch.zeros(1, 1, 1, dim, device=device)
    q[..., 0] = math.log(0.5 * (1 + 2.0**-8 - 2.0**-16))
    # The fresh token is far below the others, so that code pages hold all of the mass.
    return harness.check(harness.forward(q, *tokens(1, 50.0)), one_hot=True)


def run_constant_pages(seed: int, operators: Operators | None = None, device: torch.device | str = "cpu") -> Soundness:
    """Eight reads of keys that are constant in a page and hundreds away from zero, with scores that nearly cancel.

    Nothing is quantized: all of the error is that of q . zero, which a certificate without a term for it would miss.
    """
    generator = torch.Generator(device).manual_seed(seed)
    page_size, dim, pages = 16, 64, 18
    shape = StoreShape(1, pages + 1, 1, page_size, dim, torch.float32)
    harness = CacheHarness(shape, sm_scale=1.0, operators=operators, device=device)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=generator.device)

    centre = normal(1, 1, 1, dim) * 300
    k = centre + normal(1, 1, pages, dim).repeat_interleave(page_size, 2) * 0.02
    valid = torch.ones(1, pages * page_size, dtype=torch.bool, device=generator.device)
    harness.write(k, one_hot_values(harness.place(valid)[0], 1, dim, torch.float32), valid)
    v = one_hot_values(harness.place(valid[:, :1])[0], 1, dim, torch.float32)
    return harness.check(harness.forward(normal(1, 8, 1, dim) * 10, centre, v, valid[:, :1]), one_hot=True)
