"""The gate in observe mode: accept or flag a read by its certificate. Tensor operations only, so it can be captured."""

from __future__ import annotations

import math

import torch

from ..ops.certificate import Field


class Flag:
    """Bits of a read's flags, int32."""

    NO_CODES = 1  # nothing was read as codes: exact tail and fresh tokens only
    OVER_TOTAL_VARIATION = 2  # the bound on total variation exceeds tau
    OVER_OUTPUT = 4  # the bound on the output error exceeds output_limit
    NO_GUARANTEE = 8  # a bound is infinite: NaN or Inf in the query, in K or in V, or a radius beyond all use
    OVERFLOW = 16  # the row was full: nothing was read, nothing was written
    IDLE = 32  # padding, or a row that took no part
    PREFILL = 64  # the first chunk, read exact by SDPA; its arithmetic is not ours to certify

    #: A read with any of these would be repaired; without repair it is flagged.
    REJECTED = OVER_TOTAL_VARIATION | OVER_OUTPUT | NO_GUARANTEE | OVERFLOW
    ALL = NO_CODES | REJECTED | IDLE | PREFILL


def make_limits(tau: float, output_limit: float | None, device: torch.device | str) -> torch.Tensor:
    """Limits as the gate takes them: float32 [2] on `device`, tau and the output limit (+inf for none)."""
    limits = (tau, math.inf if output_limit is None else output_limit)
    return torch.tensor(limits, dtype=torch.float32, device=device)


def gate(certificate: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Flags of reads.

    Args:
        certificate: float32 [..., Field.COUNT] of `certified_attention`.
        limits: float32 [2] of :func:`make_limits`, on the same device.

    Returns:
        int32 [...], bits of :class:`Flag`.
    """
    tv, output = certificate[..., Field.TV], certificate[..., Field.OUTPUT]
    nothing_read = certificate[..., Field.TOKENS] == 0
    unbounded = ~(tv.isfinite() & output.isfinite())
    bits = (
        (Flag.NO_CODES, certificate[..., Field.CODE_TOKENS] == 0),
        (Flag.OVER_TOTAL_VARIATION, tv > limits[0]),
        (Flag.OVER_OUTPUT, output > limits[1]),
        (Flag.NO_GUARANTEE, unbounded),
        (Flag.OVERFLOW, nothing_read & unbounded),
        (Flag.IDLE, nothing_read & ~unbounded),
    )
    flags = torch.zeros_like(tv, dtype=torch.int32)
    for bit, condition in bits:
        flags = flags | (condition.to(torch.int32) * bit)
    return flags
