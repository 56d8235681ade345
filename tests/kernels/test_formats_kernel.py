"""Every format through the kernels: stored bytes, reads and bounds against the reference and against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import LAYER, make_case

from torch_witcert.ops.certificate import Field
from torch_witcert.ops.formats import (
    DITHERS,
    KEY_ELEMENTS,
    KEY_SCALINGS,
    VALUE_ELEMENTS,
    KeyFormat,
    StoreFormat,
    ValueFormat,
)
from torch_witcert.ops.reference import certified_attention_reference, kv_write_reference
from torch_witcert.ops.storage import HEAD_DIMS, PAGE_SIZES, PagedStore, StoreShape
from torch_witcert.ops.triton import attention
from torch_witcert.ops.triton.attention import certified_attention_triton
from torch_witcert.ops.triton.launch import INTERPRETED
from torch_witcert.ops.triton.write import kv_write_triton
from torch_witcert.testing.generators import KEY_KINDS, scenarios
from torch_witcert.testing.harness import run, shuffled_page_table

#: Each example of this file may be another build of the kernels; the soundness command is for numbers.
EXAMPLES = 20 if INTERPRETED else 60
ALL_RADII = "step+residual+probabilistic"


def supported(kind, *choices):
    for arguments in itertools.product(*choices):
        try:
            yield kind(*arguments)
        except NotImplementedError:
            continue


KEYS = list(supported(KeyFormat, KEY_ELEMENTS, KEY_SCALINGS, (0, 3), DITHERS))
VALUES = list(supported(ValueFormat, VALUE_ELEMENTS, DITHERS))
#: Every key format and every value format, each at least once.
FORMATS = [StoreFormat(key, VALUES[index % len(VALUES)]) for index, key in enumerate(KEYS)]
#: (format, page size, head dim, KV heads, group): head dims and page sizes cycle with other periods than the formats do.
GRID = [
    (store_format, size, dim, 1 + index % 2, (1, 3, 4, 7)[index % 4])
    for index, store_format in enumerate(FORMATS)
    for size, dim in [(PAGE_SIZES[index % (2 if INTERPRETED else 4)], HEAD_DIMS[index % 5])]
    if not store_format.key.per_token or dim % 32 == 0
]
KINDS = ("outlier_channel", "heavy_tail", "zeros", "astronomic")
#: One kind of keys for each format under the interpreter, all of them compiled.
WRITES = [
    (kind, *case[:4])
    for index, case in enumerate(GRID)
    for kind in (KINDS if not INTERPRETED else KINDS[index % 4 :][:1])
]


def name_of(value: object) -> str | None:
    return value.name if isinstance(value, StoreFormat) else None


def test_the_grid_holds_every_format():
    keys, values = ({getattr(case[0], side) for case in GRID} for side in ("key", "value"))
    assert values == set(VALUES)
    assert {(key.element, key.scaling, key.dither) for key in keys} == {
        (key.element, key.scaling, key.dither) for key in KEYS
    }
    assert {case[2] for case in GRID} == set(HEAD_DIMS)


@pytest.mark.parametrize("kind,store_format,page_size,head_dim,kv_heads", WRITES, ids=name_of)
def test_stored_bytes_equal_the_reference(device, kind, store_format, page_size, head_dim, kv_heads):
    """Unused slots hold 0xFF; padding channels and tokens never enter a scale; every stored byte is equal, notes nearly."""
    generator = torch.Generator().manual_seed(7)
    shape = StoreShape(2, 4, kv_heads, page_size, head_dim, torch.float32, store_format)
    ours, reference = shape.allocate(device), shape.allocate("cpu")
    for tensor in (*ours, *reference):
        if tensor.numel():
            tensor.view(torch.uint8).fill_(0xFF)
    case = make_case([0, 0], 1, kv_heads=kv_heads, page_size=page_size, head_dim=head_dim, store_format=store_format)
    table = shuffled_page_table(2, 4, generator)
    lengths = torch.zeros(2, dtype=torch.int32)
    for new_tokens in (2 * page_size + 5, 1, page_size):
        k = KEY_KINDS[kind]((2, kv_heads, new_tokens, head_dim), generator)
        v = KEY_KINDS["normal"]((2, new_tokens, kv_heads, head_dim), generator).transpose(1, 2)
        valid = torch.rand(2, new_tokens, generator=generator) < 0.9
        valid[0] = True
        columns = (~valid).int().argsort(dim=1, stable=True).int()
        counts = valid.sum(1).int()
        state = (k, v, columns, lengths, counts, table, case.seeds, case.outlier_channels)
        kv_write_reference(*state, *reference, LAYER, store_format.name)
        kv_write_triton(*(x.to(device) for x in state), *ours, LAYER, store_format.name)
        lengths = lengths + counts
    for name, mine, theirs in zip(PagedStore._fields, ours, reference, strict=True):
        if name == "page_notes":
            # One addition in another order; relative, and a note of an exact page is 0 on both sides.
            assert torch.isclose(mine.cpu(), theirs, rtol=1e-4, atol=1e-30, equal_nan=True).all()
        elif mine.numel():
            assert torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8)), name


@pytest.mark.parametrize("store_format,page_size,head_dim,kv_heads,group", GRID, ids=name_of)
def test_read_equals_the_reference(device, monkeypatch, store_format, page_size, head_dim, kv_heads, group):
    """Scratch is NaN before, unused slots are 0xFF; the certificate is the same, with every radius that the format allows."""
    monkeypatch.setattr(
        attention, "allocate_scratch", lambda *shape, device: torch.full(shape, torch.nan, device=device)
    )
    case = make_case(
        [4 * page_size + 3, 2 * page_size],
        1,
        kv_heads=kv_heads,
        group=group,
        page_size=page_size,
        head_dim=head_dim,
        dtype=torch.float32,
        store_format=store_format,
        radii=ALL_RADII if store_format.key.is_dithered else "step+residual",
        sinks=group == 4,
        softcap=5.0 if group == 3 else 0.0,
        window=3 * page_size + 1 if group == 7 else 0,
    )
    out, lse, certificate = certified_attention_triton(*case.to(device).attention_arguments())
    expected_out, expected_lse, expected = certified_attention_reference(*case.attention_arguments())
    # The certificate of a coarse format says how far a score may be off; what is compared here is arithmetic alone.
    assert (out.cpu() - expected_out).abs().max() <= 4e-3 * expected_out.abs().max()
    assert (lse.cpu() - expected_lse).abs().max() <= 1e-4
    assert torch.allclose(certificate.cpu(), expected, rtol=4e-3, atol=1e-6)
    assert certificate[..., Field.CODE_TOKENS].min() > 0 and certificate.isfinite().all()


@settings(max_examples=EXAMPLES)
@given(scenarios(draw_options=True, page_size=16, num_kv_heads=1, batch_size=1))
def test_bounds_hold_against_float64_in_every_format(scenario):
    """|exact - returned| <= bound, zero tolerance where radii are deterministic."""
    if INTERPRETED:
        chunks = tuple(min(chunk, 3) for chunk in scenario.chunks[-2:])
        scenario = type(scenario)(**{**scenario.__dict__, "prefill": scenario.prefill or 65, "chunks": chunks})
    result = run(scenario, device="cpu" if INTERPRETED else "cuda")
    assert result.violations == 0, result


@pytest.mark.parametrize(
    "store_format",
    [
        StoreFormat(KeyFormat("int8", "token", 4, "stream"), ValueFormat("int8", "stream")),
        StoreFormat(value=ValueFormat("int4")),
    ],
    ids=name_of,
)
def test_opcheck(device, store_format):
    radii = ALL_RADII if store_format.key.is_dithered else "step+residual"
    case = make_case([35, 20], 2, kv_heads=2, group=2, store_format=store_format, radii=radii, sinks=True).to(device)
    torch.library.opcheck(torch.ops.torch_witcert.certified_attention.default, case.attention_arguments())
    torch.library.opcheck(torch.ops.torch_witcert.kv_write.default, case.write_arguments())
