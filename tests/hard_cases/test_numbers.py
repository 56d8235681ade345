"""Hard cases of numbers: outliers, sinks, static scales, degenerate blocks, NaN, unused slots, scales that share a tile.

The numbers H1 to H7 are the cases'; `number_cases` holds what each one does, because the kernels run it too. Every read is
checked by the rules that all cases share (`HardCache`); the fallback that a case may record is here the gate's refusal of a read.
"""

from __future__ import annotations

import math

import pytest
import torch
from hard_cases.hard_cache import DEFAULT, FORMATS, INT4, TOKEN, TOKEN4, WITCERT
from hard_cases.number_cases import (
    DEGENERATE,
    degenerate,
    faint_channel,
    group_scales,
    key_bias,
    poisoned,
    sink,
    unused_slots,
    warm_up,
)
from hard_cases.read_recorder import ReadRecorder, scoring_of
from nn_models import converted, exact_tail, forward, prompt, stored_codes

import torch_witcert
from torch_witcert import CertifiedCache, CertifiedInt8Config, WitCertConfig
from torch_witcert.ops.certificate import Field
from torch_witcert.ops.formats import KeyFormat, StoreFormat, ValueFormat
from torch_witcert.ops.storage import MODEL_DTYPES, PAGE_SIZES, StoreShape
from torch_witcert.policy.gate import Flag

HALVES = (torch.bfloat16, torch.float16)
SYMMETRIC = StoreFormat(KeyFormat("int8", "symmetric"))
INT4_PAIR = StoreFormat(KeyFormat("int4", "token", 1), ValueFormat("int4"))


def name(value: object) -> str | None:
    return value.name if isinstance(value, StoreFormat) else None


every_format = pytest.mark.parametrize("store_format", FORMATS, ids=name)


# --- H1 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("first", [None, 0, 1000, 100000])
@pytest.mark.parametrize("store_format", [*FORMATS, SYMMETRIC, INT4_PAIR], ids=name)
def test_h1_qwen2_key_bias_is_small_error_or_rejected(store_format, first, dtype):
    """The case's rule for any format: at most 0.15 off, or rejected by the gate.

    With the bias before RoPE the wide channels turn within a page, so that int4 without an outlier pair is useless: 1.0 off and
    more, all of it rejected.
    """
    outcome = key_bias("cpu", store_format, dtype, first)
    assert ((outcome.relative_error <= 0.15) | outcome.is_rejected).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("store_format", "first"),
    [(DEFAULT, None), (SYMMETRIC, None), (WITCERT, None), (WITCERT, 0), (WITCERT, 100000)],
    ids=name,
)
def test_h1_qwen2_key_bias_is_read_well_by_both_recipes(store_format, first, dtype):
    """A zero per page and channel takes a constant bias away; the exact outlier pair (5, 69) also what RoPE makes of it."""
    outcome = key_bias("cpu", store_format, dtype, first)
    assert not outcome.is_rejected.any() and outcome.relative_error.max() <= 0.15


@pytest.mark.parametrize("store_format", [INT4, INT4_PAIR], ids=name)
def test_h1_qwen2_key_bias_int4_is_near(store_format):
    """The case's 0.15 for int4. Rejected nevertheless: 0.1 off is more than the gate of the default recipe accepts."""
    assert key_bias("cpu", store_format, torch.float16).relative_error.max() <= 0.15


@pytest.mark.parametrize("store_format", [TOKEN, TOKEN4], ids=name)
def test_h1_qwen2_key_bias_that_ruins_the_output_is_never_accepted(store_format):
    """Scales per token, the layout of the issues: 0.7 off in int8 already, though the keys are within 5 % of theirs."""
    outcome = key_bias("cpu", store_format, torch.float16)
    assert outcome.relative_error.max() > 0.5
    assert outcome.is_rejected.all()


@pytest.mark.parametrize(
    ("recipe", "rejected"),
    [
        (CertifiedInt8Config(page_size=16), False),
        (WitCertConfig(page_size=16), False),
        (CertifiedInt8Config(page_size=16, key_scaling="token"), True),
    ],
    ids=["int8", "witcert", "token"],
)
def test_h1_qwen2_key_bias_in_a_model(recipe, rejected):
    """The bias of k_proj as Qwen2 has it, before RoPE, in KV head 0; WitCert's outlier pairs are those that the cache chooses.

    With scales per token the reads of KV head 0, and of no other head, are rejected.
    """
    model = converted("qwen2", recipe=recipe)
    layers = model.model.layers
    with torch.no_grad():
        for layer in layers:
            layer.self_attn.k_proj.bias[[5, 37]] += torch.tensor([300.0, -200.0])
    cache = CertifiedCache(model, 160)
    with ReadRecorder([scoring_of(model.config, i, layers[i].self_attn) for i in range(2)]) as recorder:
        for ids in (prompt(130), prompt(1, seed=2), prompt(1, seed=3)):
            forward(model, ids, cache)
    assert len(recorder.reads) == 4
    for read in recorder.reads:
        read.check(1e-5)
        error = (read.out.double() - read.exact).norm(dim=-1) / read.exact.norm(dim=-1)
        assert ((error <= 0.15) | (read.certificate[..., Field.TV] > recipe.tau)).all()
    flagged = torch_witcert.certificates(cache).flags & Flag.REJECTED != 0
    assert torch.equal(flagged[:, 0], torch.tensor([[rejected] * 2 + [False] * 2] * 2))


# --- H2 ----------------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("factor", [60.0, 0.02])
def test_h2_first_token_sink(store_format, factor):
    """Tokens 1 to 63 are no worse beside a sink than without it, at most 1.5 times; or the reads are bounded accordingly.

    Scales per token and floating point leave them as they were. A scale per page and channel does not keep a sink apart: beside
    one of 60 times the size they are 13 times further off (the case's 1.32 with int4). No threshold of error tells whether that
    is right here: the certificate says so, for every read and above the bound of the same read without a sink.
    """
    plain, found = (sink("cpu", store_format, value) for value in (1.0, factor))
    ratio = found.key_error / plain.key_error
    if factor < 1 or store_format.key.per_token or store_format.key.element == "fp8":
        assert ratio <= 1.5
    else:
        assert ratio > 10
        bounds = [x.outcome.read.certificate[..., Field.TV] for x in (found, plain)]
        assert (bounds[0] > bounds[1]).all()


# --- H3 ----------------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("dtype", HALVES)
def test_h3_scales_follow_data_that_no_warm_up_showed(store_format, dtype):
    """There is no static scale: each page has its own, and nothing saturates (`check_half_steps`).

    What is chosen once, on a first prompt that may say nothing, are WitCert's outlier pairs: bounds hold all the same, and the
    output is right or rejected.
    """
    outcome = warm_up("cpu", store_format, dtype)
    assert ((outcome.relative_error <= 0.15) | outcome.is_rejected).all()


# --- H4 ----------------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, dtype) for kind in DEGENERATE for dtype in HALVES if (kind, dtype) != ("70144", torch.float16)],
)
def test_h4_zero_tiny_and_huge_blocks(kind, dtype, store_format):
    """70144 in float16 is an Inf, which is H5."""
    outcome = degenerate("cpu", store_format, dtype, kind)
    if kind not in ("70144", "zero channel", "zero token"):
        assert not outcome.is_rejected.any(), "there is nothing to quantize"


@every_format
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_h4_a_faint_channel_beside_a_huge_one(dtype, store_format):
    """With a scale of its own the faint channel is read as if the other one were not there; in its group of 32 it is lost, and said to be."""
    outcome = faint_channel("cpu", store_format, dtype)
    if store_format.key.per_token:
        assert (outcome.flags & Flag.NO_GUARANTEE != 0).all()
    else:
        assert not outcome.is_rejected.any()
        assert outcome.read.certificate[..., Field.TV].max() < 0.05


# --- H5 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store_format", "where", "value"),
    [(DEFAULT, where, value) for where in "kvq" for value in (math.nan, math.inf, -math.inf)]
    + [(store_format, "k", math.nan) for store_format in FORMATS[1:]]
    + [(store_format, "v", math.inf) for store_format in FORMATS[1:]],
    ids=name,
)
def test_h5_not_finite_input_marks_its_request_and_no_other(store_format, where, value):
    poisoned("cpu", store_format, value, where)


@pytest.mark.parametrize("forget", ["reset", "release"])
def test_h5_a_poisoned_request_leaves_no_trace_in_the_cache(forget):
    """Token 13 has an Inf in its embedding: prefill and steps of row 0 are marked; forgotten, the same prompt is as in a fresh cache."""
    model = converted()
    with torch.no_grad():
        model.model.embed_tokens.weight[13] = math.inf
    ids = torch.cat([prompt(64, seed=seed).clamp_max(96) for seed in (1, 2)])
    ids[ids == 13] = 14
    bad = ids.clone()
    bad[0, 3] = 13

    def run(cache: CertifiedCache, tokens: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for piece in (tokens, ids[:, :1]):
            found += [forward(model, piece, cache), torch_witcert.certificates(cache).flags.clone()]
        return found

    fresh, cache = (CertifiedCache(model, 96, 2) for _ in range(2))
    expected, found = run(fresh, ids), run(cache, bad)
    for logits, other in zip(found[::2], expected[::2], strict=True):
        assert torch.equal(logits[1], other[1])
    for flags, other in zip(found[1::2], expected[1::2], strict=True):
        assert (flags[:, 0] & Flag.NO_GUARANTEE != 0).all() and torch.equal(flags[:, 1], other[:, 1])
    cache.reset() if forget == "reset" else cache.release([0, 1])
    for part, other in zip(run(cache, ids), expected, strict=True):
        assert torch.equal(part, other)
    for row in range(2):
        parts = [stored_codes(each, row) + exact_tail(each, row) for each in (cache, fresh)]
        for part, other in zip(*parts, strict=True):
            assert torch.equal(part, other)


# --- H6 ----------------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("window", [0, 20])
def test_h6_unused_slots_and_empty_rows(window, store_format):
    unused_slots("cpu", store_format, window)


# --- H7 ----------------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("head_dim", [96, 128])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_h7_scale_groups_in_a_tile(page_size, head_dim, store_format):
    """A tile is a page. Groups are 32 channels of a key and 16 of an int4 value in every format; a group of 64 does not exist."""
    group_scales("cpu", store_format, page_size, head_dim)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: KeyFormat("int3"), ValueError, "key element must be one of .*'int3'"),
        (lambda: KeyFormat("int8", "group"), ValueError, "key scaling must be one of .*'group'"),
        (lambda: ValueFormat("int6"), ValueError, "value element must be one of .*'int6'"),
        (lambda: KeyFormat("fp8", "token"), NotImplementedError, "'fp8' is supported with key scaling 'symmetric'"),
        (lambda: StoreShape(1, 1, 1, 24, 64, torch.float32), ValueError, "page_size must be one of .*24"),
        (lambda: StoreShape(1, 1, 1, 16, 80, torch.float32, TOKEN), NotImplementedError, "multiple of 32, got 80"),
        (lambda: CertifiedInt8Config(key_element="int2"), ValueError, "key_element must be one of .*'int2'"),
        (lambda: CertifiedInt8Config(page_size=8), ValueError, "page_size must be one of .*8"),
    ],
)
def test_h7_widths_and_groups_that_do_not_exist_are_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()
