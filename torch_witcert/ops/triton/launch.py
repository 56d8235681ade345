"""What every launch shares: device, strides, and whether Triton compiles or interprets."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

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
