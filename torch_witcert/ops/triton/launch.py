"""What every launch shares: device, strides, and whether Triton compiles or interprets."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from ..arithmetic import triton_block
from ..formats import StoreFormat
from .codes import DITHER_MODES

#: True where kernels run under the interpreter (TRITON_INTERPRET=1), on CPU tensors.
INTERPRETED = triton.knobs.runtime.interpret

#: Operand type of the matrix products with codes. int8 codes and the limbs of q * scale are exact in both; the
#: interpreter multiplies bf16 wrongly.
CODE_OPERAND = tl.float32 if INTERPRETED else tl.bfloat16


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Make the tensor's GPU current: Triton launches on the current device's current stream."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with channels contiguous; a copy only where they are not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def format_parameters(store_format: StoreFormat, head_dim: int) -> dict[str, object]:
    """Compile-time parameters of a store's format, for every kernel that reads or writes pages."""
    key, value = store_format.key, store_format.value
    outliers = 2 * key.outlier_pairs
    return {
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": triton_block(head_dim),
        "K_BITS": key.grid.bits,
        "K_OFFSET": float(key.grid.offset),
        "K_MAX_ERROR": key.grid.max_error,
        "K_ASYMMETRIC": key.is_asymmetric,
        "K_PER_TOKEN": key.per_token,
        "K_DITHER": DITHER_MODES[key.dither],
        "OUTLIERS": outliers,
        # A matrix product has 16 columns or more.
        "OUTLIER_BLOCK": max(16, triton_block(outliers)) if outliers else 0,
        "V_BITS": value.grid.bits,
        "V_OFFSET": float(value.grid.offset),
        "V_FLOAT": value.grid.is_float,
        "V_EXACT": value.is_exact,
        "V_GROUPS": value.groups(head_dim),
        "V_DITHER": DITHER_MODES[value.dither],
    }
