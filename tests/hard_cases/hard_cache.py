"""A cache of one layer whose reads are checked by the rules that all hard cases share, on the CPU or a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_witcert.ops.arithmetic import RADIUS_RELATIVE, WEIGHT_ROUNDING
from torch_witcert.ops.certificate import Field
from torch_witcert.ops.formats import DEFAULT, KEY_GROUP, KeyFormat, StoreFormat, ValueFormat
from torch_witcert.ops.library import INTERPRETED
from torch_witcert.ops.storage import PagedStore, StoreShape
from torch_witcert.policy.gate import Flag, gate, make_limits
from torch_witcert.policy.outliers import choose_outlier_channels
from torch_witcert.testing.harness import CacheHarness, Operators, Read, registered
from torch_witcert.testing.oracle import Attention, StoredTokens, exact_attention

#: Bytes on either side of every buffer of a store, and what they hold.
GUARD, GUARD_BYTE = 4096, 0xA5

INT4 = StoreFormat(KeyFormat("int4"), ValueFormat("int4"))
INT6 = StoreFormat(KeyFormat("int6", "symmetric"), ValueFormat("int8"))
FP8 = StoreFormat(KeyFormat("fp8", "symmetric"), ValueFormat("fp8"))
#: Scales per token and group of 32 channels.
TOKEN = StoreFormat(KeyFormat("int8", "token"), ValueFormat("int8"))
TOKEN4 = StoreFormat(KeyFormat("int4", "token"), ValueFormat("int4"))
#: The format of `WitCertConfig`, with one outlier pair.
WITCERT = StoreFormat(KeyFormat("int8", "token", 1, "stream"), ValueFormat("int8", "stream"))
FORMATS = (DEFAULT, INT4, INT6, FP8, TOKEN, TOKEN4, WITCERT)


def normal(*shape: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def kernel_tolerance(dtype: torch.dtype, store_format: StoreFormat, device: torch.device) -> float:
    """G2, relative to the largest value of a channel.

    The reference keeps float32. The kernels round weights to bf16 before they multiply int8 and fp8 values, which costs up to 2^-8:
    more than the case's 2e-3 for float16, and part of every certificate.
    """
    eps = torch.finfo(dtype).eps
    if device.type == "cpu" and not INTERPRETED:
        return 1e-4 + eps
    value = store_format.value
    rounded = 0.0 if value.is_grouped or value.is_exact else WEIGHT_ROUNDING
    return max(1.6e-2 if dtype == torch.bfloat16 else 2e-3, rounded + eps)


class Outcome(NamedTuple):
    """A read that the shared rules have passed."""

    read: Read
    exact: torch.Tensor  # float64 [B, H, T, D], REF
    stored: Attention  # float64, REFDQ
    flags: torch.Tensor  # int32 [B, H, T]

    @property
    def relative_error(self) -> torch.Tensor:
        """||OUT - REF|| / ||REF|| [B, H, T]."""
        return (self.read.out.double() - self.exact).norm(dim=-1) / self.exact.norm(dim=-1)

    @property
    def is_rejected(self) -> torch.Tensor:
        """bool [B, H, T]: the gate of the default recipe does not accept the read, which is the record of a fallback here."""
        return self.flags & Flag.REJECTED != 0


class HardCache(CacheHarness):
    """A harness over the registered operators, whose reads are checked by G1 to G5.

    Every buffer of the store lies between guard bytes and begins full of NaN; whatever an operator allocates begins as NaN too.

    Args:
        shape: geometry.
        splits: pages of a split; None for what the library chooses.
        options: of :class:`CacheHarness`.
    """

    def __init__(self, shape: StoreShape, *, splits: int | None = None, **options) -> None:
        self.splits = splits
        operators = Operators(registered().kv_write, self._attend)
        defaults = {"sm_scale": shape.head_dim**-0.5, "operators": operators, "unused_byte": 0xFF}
        super().__init__(shape, **(defaults | options))
        self.guarded = []
        self.store = PagedStore(*map(self._guard, self.store))

    def _guard(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor between guard bytes."""
        if not tensor.numel():
            return tensor
        size = tensor.numel() * tensor.element_size()
        whole = torch.full((size + 2 * GUARD,), GUARD_BYTE, dtype=torch.uint8, device=tensor.device)
        self.guarded.append(whole)
        inside = whole[GUARD : GUARD + size].view(tensor.dtype).view(tensor.shape)
        # As bytes: a copy of floats may change the bits of a NaN.
        inside.view(torch.uint8).copy_(tensor.view(torch.uint8))
        return inside

    def _attend(self, *args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        args = list(args)
        if self.splits is not None:
            args[-4] = self.splits
        before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        # Fills what torch.empty returns.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return registered().certified_attention(*args)
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    def checked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor | None = None) -> Outcome:
        """A forward of q [B, H, T, D] and fresh k, v [B, Hkv, T, D], rounded to the cache's dtype: read, check, write."""
        q, k, v = (x.to(self.device, self.shape.dtype) for x in (q, k, v))
        valid = self.every(q.shape[2]) if valid is None else valid
        read = self.read(q, k, v, valid)
        stored = self._check_kernel(read, self.tokens(k, v, read.positions), k, v)
        self.write(k, v, valid)
        self._check_written(read)
        assert (counts := self.check(read, one_hot=False)).violations == 0, f"G3: {counts}"
        self.check_guards()
        at = torch.arange(self.capacity, device=self.device)
        positions = (read.positions, torch.where(at < self.lengths[:, None], at, -1))
        exact = exact_attention(q, self.keys, self.values, *positions, *self._scoring()).output
        return Outcome(read, exact, stored, gate(read.certificate, make_limits(0.2, None, self.device)))

    def _scoring(self) -> tuple:
        return self.sm_scale, self.window, self.softcap, self.sinks

    def fill(self, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor | None = None) -> None:
        """Write k, v [B, Hkv, T, D], rounded to the cache's dtype."""
        k, v = (x.to(self.device, self.shape.dtype) for x in (k, v))
        self.write(k, v, self.every(k.shape[2]) if valid is None else valid)
        self.check_guards()

    def every(self, tokens: int) -> torch.Tensor:
        return torch.ones(self.shape.batch_size, tokens, dtype=torch.bool, device=self.device)

    def check_guards(self) -> None:
        for whole in self.guarded:
            edges = torch.cat([whole[:GUARD], whole[-GUARD:]])
            assert (edges == GUARD_BYTE).all(), "G5: a byte outside the store was written"

    @staticmethod
    def _check_written(read: Read) -> None:
        """G1 and G4. What is not finite is read as 0 and marked, but a query: its output may be anything."""
        certificate = read.certificate
        bounds = certificate[..., : Field.OUTPUT + 1]
        assert not bounds.isnan().any(), "G4: a bound was not written"
        assert read.out[read.q.isfinite().all(-1)].isfinite().all(), (
            "G1, G4: an output is not finite, or was not written"
        )
        claimed = bounds.isfinite().all(-1)
        assert certificate[claimed].isfinite().all(), "G4: a field was not written"
        assert not read.lse[claimed].isnan().any(), "G4: an lse was not written"

    def _check_kernel(self, read: Read, tokens: StoredTokens, k: torch.Tensor, v: torch.Tensor) -> Attention:
        """G2 against the store's own K^ and V^, and within what the certificate says that arithmetic costs, which is tighter."""
        if self.splits is None:  # else the certificate speaks of other sums than the harness does
            assert (counts := self.check_arithmetic(read, k, v)).arithmetic_violations == 0, f"G2: {counts}"
        positions = (read.positions, tokens.key_positions)
        stored = exact_attention(read.q, tokens.k, tokens.v, *positions, *self._scoring())
        claimed = read.certificate[..., Field.OUTPUT].isfinite()
        values = torch.where(tokens.key_positions[:, None, :, None] >= 0, tokens.v, 0.0).nan_to_num(0.0)
        largest = values.abs().amax(2).repeat_interleave(read.q.shape[1] // values.shape[1], 1)[:, :, None]
        tolerance = kernel_tolerance(read.out.dtype, self.format, self.device) * largest
        tolerance = tolerance + torch.finfo(read.out.dtype).tiny
        error = torch.where(claimed[..., None], (read.out.double() - stored.output).abs(), 0.0)
        assert (error <= tolerance).all(), f"G2: off by {(error / tolerance).max():.3g} of what is allowed"
        return stored

    def stored(self) -> StoredTokens:
        """K^ and V^ [B, Hkv, capacity, D] of what is cached."""
        nothing = self.keys[:, :, :0]
        none = torch.empty(self.shape.batch_size, 0, dtype=torch.int32, device=self.device)
        return self.tokens(nothing, nothing, none)

    def steps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales of the elements of K and V of the pages, float64 [B, Hkv, capacity, D]."""
        pages, size, dim = self.page_table.long(), self.shape.page_size, self.shape.head_dim
        k_scale, v_scale = (x[pages].transpose(1, 2).double() for x in (self.store.k_scale, self.store.v_scale))
        if self.format.key.per_token:
            key = k_scale.repeat_interleave(KEY_GROUP, -1)
        else:
            key = k_scale[..., None, :].expand(-1, -1, -1, size, -1)
        return key.flatten(2, 3), v_scale.repeat_interleave(dim // v_scale.shape[-1], -1).flatten(2, 3)

    def check_half_steps(self) -> None:
        """Every stored element is as near as its grid allows, so that none was clipped."""
        stored, steps = self.stored(), self.steps()
        grids = (self.format.key.grid, self.format.value.grid)
        for found, given, step, grid in zip(stored[:2], (self.keys, self.values), steps, grids, strict=True):
            # An outlier channel has no error, and may have a scale of 0.
            excess = (found - given.double()).abs() - grid.max_error * step * (1 + RADIUS_RELATIVE)
            assert (excess[stored.is_code] <= 0).all(), "an element is further off than half a step"


def make_cache(
    tokens: int,
    store_format: StoreFormat = DEFAULT,
    *,
    batch: int = 1,
    kv_heads: int = 1,
    page_size: int = 16,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    **options,
) -> HardCache:
    """A cache for that many tokens a row."""
    shape = StoreShape(batch, -(-tokens // page_size), kv_heads, page_size, head_dim, dtype, store_format)
    return HardCache(shape, device=device, **options)


def same_bits(first: Read, second: Read, rows: slice = slice(None), other: slice = slice(None)) -> bool:
    """Whether rows of a read have the bits of other rows of another one."""
    return all(torch.equal(getattr(first, x)[rows], getattr(second, x)[other]) for x in ("out", "lse", "certificate"))


def outliers_of(keys: torch.Tensor, store_format: StoreFormat, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Outlier channels as a cache chooses them from its first keys [B, Hkv, T, D], of the columns valid [B, T]."""
    return choose_outlier_channels(keys, valid, store_format.key.outlier_pairs)
