"""Validity of new columns: the only mask that certified attention needs.

Hugging Face builds a mask of queries x cached columns for every forward. A `CertifiedCache` keeps each row's own length, so
all it must know is which of the NEW columns are real. Its layers report a mask size of 0, and the mask function registered
here answers that with bool [B, 1, 1, T], gathered at the cache's column count, or None where every column is real.
Columns that are already cached cannot be hidden: a mask that tries to is refused where the host may look.
"""

from __future__ import annotations

from typing import Self

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask


def may_synchronize(tensor: torch.Tensor) -> bool:
    """Whether the host may look at data here: not while a graph is traced or captured."""
    if torch.compiler.is_compiling():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class HeldTokens(int):
    """The mask offset 0 of a cache's layer, with the cache's row lengths (int32 [B]) for :func:`new_column_validity`."""

    lengths: torch.Tensor

    def __new__(cls, lengths: torch.Tensor) -> Self:
        offset = super().__new__(cls, 0)
        offset.lengths = lengths
        return offset


def new_column_validity(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: torch.Tensor | int = 0,
    kv_offset: HeldTokens | int = 0,
    mask_function=causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs,
) -> torch.Tensor | None:
    """Mask function of the attention implementation "torch_witcert", with the arguments of `sdpa_mask`.

    Returns:
        For a CertifiedCache (`kv_length` 0): bool [B, 1, 1, T], True where a new column is a real token, or None where all
        are and T > 1. For everything else what `sdpa_mask` returns.

    Raises:
        ValueError: the attention mask does not cover the new columns, or hides cached ones.
        NotImplementedError: a custom mask function.
    """
    if kv_length:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            device=device,
            **kwargs,
        )
    if use_vmap:
        raise NotImplementedError(
            "or_mask_function and and_mask_function are not supported with a CertifiedCache, which reads causally, with an "
            "optional sliding window; use the model without a cache (use_cache=False)"
        )
    if attention_mask is None:
        # One token: always a tensor, so that padded and plain batches share one compiled graph.
        return torch.ones(batch_size, 1, 1, 1, dtype=torch.bool, device=device) if q_length == 1 else None
    width = attention_mask.shape[-1]
    columns = torch.arange(q_length, device=device) + q_offset
    look = may_synchronize(columns) and (q_length > 1 or columns.device.type == "cpu")
    if look and width < int(q_offset) + q_length:
        raise ValueError(
            f"attention_mask must cover the {int(q_offset)} cached columns and the {q_length} new ones, got width {width}"
        )
    if look and isinstance(kv_offset, HeldTokens):
        _refuse_hidden(attention_mask[:, : int(q_offset)], kv_offset.lengths)
    covered = columns < width
    valid = attention_mask.to(torch.bool)[:, columns.clamp_max(width - 1)] & covered
    if look and q_length > 1 and bool(valid.all()):
        return None
    return valid[:, None, None, :]


def _refuse_hidden(cached: torch.Tensor, lengths: torch.Tensor) -> None:
    """Refuse a mask [B, columns] of the cached columns that marks fewer of them than a row holds tokens, int32 [B]."""
    marked = (cached != 0).sum(1)
    hidden = marked < lengths
    if bool(hidden.any()):
        row = int(hidden.int().argmax())
        raise ValueError(
            f"attention_mask marks {int(marked[row])} of the {cached.shape[1]} cached columns of row {row} as real, but the CertifiedCache "
            f"holds {int(lengths[row])} tokens of it, and reads cannot leave cached tokens out. Pass the mask that the columns had when "
            "they were fed (after fork() or reorder_cache(), of the row that was copied), or reset() the cache"
        )


def validity_of(attention_mask: torch.Tensor | None, batch_size: int, new_tokens: int) -> torch.Tensor | None:
    """Validity bool [B, T] from the mask that reached an attention module; None where every column is real.

    Raises:
        ValueError: the mask is not the validity of the new columns.
    """
    if attention_mask is None:
        return None
    if attention_mask.dtype != torch.bool or tuple(attention_mask.shape) != (batch_size, 1, 1, new_tokens):
        raise ValueError(
            "attention_mask with a CertifiedCache must be 2D over cached and new columns, or the validity of the new columns "
            f"as bool [{batch_size}, 1, 1, {new_tokens}], got {attention_mask.dtype} {list(attention_mask.shape)}"
        )
    return attention_mask[:, 0, 0]
