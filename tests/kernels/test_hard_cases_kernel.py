"""The hard cases of one layer through the kernels: what test_numbers and test_shapes ask of the reference.

Under the interpreter the cases whose arithmetic the kernels do otherwise, at sizes that it can walk; compiled, more of them at the
cases' own sizes.
"""

from __future__ import annotations

import math

import pytest
import torch
from hard_cases.hard_cache import DEFAULT, FORMATS, FP8, INT4, TOKEN, WITCERT
from hard_cases.number_cases import (
    degenerate,
    faint_channel,
    group_scales,
    key_bias,
    poisoned,
    sink,
    unused_slots,
    warm_up,
)
from hard_cases.shape_cases import (
    CHUNKS,
    boundary,
    chunked,
    head_dim,
    left_padding,
    live_parts,
    query_heads,
    softcap_and_sinks,
)

from torch_witcert.ops.storage import HEAD_DIMS
from torch_witcert.ops.triton.launch import INTERPRETED

compiled_only = pytest.mark.skipif(INTERPRETED, reason="too slow under the interpreter")
few_formats = pytest.mark.parametrize(
    "store_format", [DEFAULT, WITCERT] if INTERPRETED else FORMATS, ids=lambda store_format: store_format.name
)


@few_formats
def test_h1_qwen2_key_bias(device, store_format):
    """Before RoPE where an outlier pair can take it."""
    first = 1000 if store_format.key.outlier_pairs else None
    outcome = key_bias(device, store_format, torch.float16, first, tokens=130 if INTERPRETED else 512)
    assert ((outcome.relative_error <= 0.15) | outcome.is_rejected).all()


@compiled_only
@few_formats
def test_h2_first_token_sink(device, store_format):
    sink(device, store_format, 60.0)


@compiled_only
@few_formats
def test_h3_scales_follow_data_that_no_warm_up_showed(device, store_format):
    outcome = warm_up(device, store_format)
    assert ((outcome.relative_error <= 0.15) | outcome.is_rejected).all()


@pytest.mark.parametrize("store_format", [DEFAULT, INT4, FP8], ids=lambda store_format: store_format.name)
@pytest.mark.parametrize("kind", ["zeros", "5e-36", "70144"])
def test_h4_zero_tiny_and_huge_blocks(device, kind, store_format):
    degenerate(device, store_format, torch.bfloat16, kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("store_format", "rejected"), [(DEFAULT, False), (TOKEN, True)], ids=["channel", "token"])
def test_h4_a_faint_channel_beside_a_huge_one(device, store_format, rejected, dtype):
    outcome = faint_channel(device, store_format, dtype)
    assert outcome.is_rejected.all() if rejected else not outcome.is_rejected.any()


@pytest.mark.parametrize(("where", "value"), [("k", math.nan), ("q", math.inf)])
def test_h5_not_finite_input_marks_its_request_and_no_other(device, where, value):
    poisoned(device, DEFAULT, value, where)


@pytest.mark.parametrize("window", [20] if INTERPRETED else [0, 20])
def test_h6_unused_slots_and_empty_rows(device, window):
    lengths = {"lengths": (1, 16, 17, 48)} if INTERPRETED else {}
    unused_slots(device, INT4 if window else DEFAULT, window, **lengths)


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("store_format", [TOKEN, INT4], ids=lambda store_format: store_format.name)
def test_h7_scale_groups_in_a_tile(device, store_format, page_size):
    group_scales(device, store_format, page_size, 96)


@pytest.mark.parametrize(("heads", "kv_heads"), [(14, 2)] if INTERPRETED else [(28, 4), (48, 2), (71, 1), (6, 6)])
def test_h8_query_heads_read_their_own_kv_head(device, heads, kv_heads):
    query_heads(device, heads, kv_heads, tokens=18 if INTERPRETED else 257)


@compiled_only
@few_formats
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_h9_supported_head_dims(device, dim, store_format):
    if not store_format.key.per_token or dim % 32 == 0:
        head_dim(device, store_format, dim, torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 40] if INTERPRETED else [1, 64, 1000])
@pytest.mark.parametrize(("softcap", "sink"), [(50.0, 3.0), (0.0, 60.0)])
def test_h10_softcap_and_sinks(device, softcap, sink, tokens):
    softcap_and_sinks(device, DEFAULT, tokens, softcap, sink)


@pytest.mark.parametrize("tokens", [15, 16, 17, 33] if INTERPRETED else [1, 15, 16, 17, 127, 128, 129, 1000, 4097])
def test_h12_lengths_near_every_boundary(device, tokens):
    boundary(device, tokens)


@pytest.mark.parametrize(
    "store_format", [WITCERT] if INTERPRETED else FORMATS, ids=lambda store_format: store_format.name
)
def test_h13_chunks_store_the_same_pages(device, store_format):
    splits = [(18,), (15, 3)] if INTERPRETED else list(CHUNKS.values())
    expected, *others = (live_parts(chunked(device, store_format, chunks)) for chunks in splits)
    for parts in others:
        assert all(torch.equal(parts[name], part) for name, part in expected.items())


def test_h14_left_padding(device):
    left_padding(device, DEFAULT, steps=1 if INTERPRETED else 20)
