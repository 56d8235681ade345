"""Registration of the operators in torch.library: schema, CPU reference, fake, CUDA kernel.

With TRITON_INTERPRET=1 the CPU implementation is the Triton kernel under the interpreter, so that the kernels can be
tested where there is no GPU; otherwise it is the reference.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

from .certificate import Field
from .reference import certified_attention_reference, kv_write_reference
from .storage import PagedStore
from .validate import validate_attention, validate_write

MUTATED = PagedStore._fields


def kv_write_triton(*args) -> None:
    from .triton.write import kv_write_triton as launch

    launch(*args)


def certified_attention_triton(*args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from .triton.attention import certified_attention_triton as launch

    return launch(*args)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_write_on_cpu = kv_write_triton if INTERPRETED else kv_write_reference
_attend_on_cpu = certified_attention_triton if INTERPRETED else certified_attention_reference


class _FullPrecision(contextlib.AbstractContextManager):
    """Float32 is float32 on the CPU, whatever precision of matrix products the user has set for the process.

    A lower one would run the reference's products in fewer bits than any certificate claims. The setting belongs to the
    process: the first operator to enter changes it, the last one to leave restores it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.before = ""

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before = torch.backends.mkldnn.matmul.fp32_precision
                torch.backends.mkldnn.matmul.fp32_precision = "ieee"
            self.inside += 1

    def __exit__(self, *exception) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                torch.backends.mkldnn.matmul.fp32_precision = self.before


_CPU_PRECISION = _FullPrecision()


@contextlib.contextmanager
def _full_precision(tensor: torch.Tensor) -> Iterator[None]:
    """No autocast, which would run products in 16 bits; and on the CPU :class:`_FullPrecision`. Kernels look at neither."""
    precision = contextlib.nullcontext() if tensor.is_cuda else _CPU_PRECISION
    with torch.autocast(tensor.device.type, enabled=False), precision:
        yield


def _checked_write(launch):
    def kv_write(
        k: torch.Tensor,
        v: torch.Tensor,
        columns: torch.Tensor,
        lengths: torch.Tensor,
        counts: torch.Tensor,
        page_table: torch.Tensor,
        seeds: torch.Tensor,
        outlier_channels: torch.Tensor,
        k_codes: torch.Tensor,
        k_scale: torch.Tensor,
        k_zero: torch.Tensor,
        k_bypass: torch.Tensor,
        v_codes: torch.Tensor,
        v_scale: torch.Tensor,
        v_zero: torch.Tensor,
        page_notes: torch.Tensor,
        page_keys: torch.Tensor,
        k_tail: torch.Tensor,
        v_tail: torch.Tensor,
        layer: int,
        store_format: str,
    ) -> None:
        store = PagedStore(
            k_codes, k_scale, k_zero, k_bypass, v_codes, v_scale, v_zero, page_notes, page_keys, k_tail, v_tail
        )
        arguments = (k, v, columns, lengths, counts, page_table, seeds, outlier_channels)
        validate_write(*arguments, store, layer, store_format)
        with _full_precision(k):
            launch(*arguments, *store, layer, store_format)

    return kv_write


def _checked_attention(launch):
    def certified_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        page_table: torch.Tensor,
        source_map: torch.Tensor,
        log_risk: torch.Tensor,
        sinks: torch.Tensor,
        outlier_channels: torch.Tensor,
        k_codes: torch.Tensor,
        k_scale: torch.Tensor,
        k_zero: torch.Tensor,
        k_bypass: torch.Tensor,
        v_codes: torch.Tensor,
        v_scale: torch.Tensor,
        v_zero: torch.Tensor,
        page_notes: torch.Tensor,
        page_keys: torch.Tensor,
        k_tail: torch.Tensor,
        v_tail: torch.Tensor,
        sm_scale: float,
        window: int,
        softcap: float,
        pages_per_split: int,
        layer: int,
        radii: str,
        store_format: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        store = PagedStore(
            k_codes, k_scale, k_zero, k_bypass, v_codes, v_scale, v_zero, page_notes, page_keys, k_tail, v_tail
        )
        state = (q, k, v, positions, lengths, page_table, source_map, log_risk, sinks, outlier_channels)
        numbers = (sm_scale, window, softcap, pages_per_split, layer, radii, store_format)
        validate_attention(*state, store, *numbers)
        with _full_precision(q):
            return launch(*state, *store, *numbers)

    return certified_attention


def _nothing(*args) -> None:
    return None


def _empty_outputs(q, k, v, positions, lengths, page_table, source_map, *rest):
    batch, heads, new_tokens, _ = q.shape
    return (
        q.new_empty(q.shape),
        q.new_empty((batch, heads, new_tokens), dtype=torch.float32),
        q.new_empty((batch, heads, new_tokens, Field.COUNT), dtype=torch.float32),
    )


kv_write = torch.library.custom_op(
    "torch_witcert::kv_write", _checked_write(_write_on_cpu), mutates_args=MUTATED, device_types="cpu"
)
kv_write.register_kernel("cuda")(_checked_write(kv_write_triton))
kv_write.register_fake(_checked_write(_nothing))

certified_attention = torch.library.custom_op(
    "torch_witcert::certified_attention", _checked_attention(_attend_on_cpu), mutates_args=(), device_types="cpu"
)
certified_attention.register_kernel("cuda")(_checked_attention(certified_attention_triton))
certified_attention.register_fake(_checked_attention(_empty_outputs))
