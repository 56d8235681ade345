"""The float32 reference of the operators against float64: its bounds hold, with no tolerance, whatever it is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from torch_witcert.ops.certificate import Field
from torch_witcert.ops.formats import DEFAULT, KeyFormat, StoreFormat, ValueFormat
from torch_witcert.ops.library import INTERPRETED
from torch_witcert.ops.storage import MODEL_DTYPES, POOL_PARTS, POSITION_OVERFLOW, SOURCE_NONE, StoreShape
from torch_witcert.testing.generators import HOT, KEY_KINDS, QUERY_KINDS, Scenario, one_hot_values, scenarios
from torch_witcert.testing.harness import (
    REFERENCE,
    CacheHarness,
    Operators,
    Soundness,
    ragged_mask,
    registered,
    run,
    run_constant_pages,
    run_rounding_ties,
    shuffled_page_table,
)
from torch_witcert.testing.oracle import exact_attention, total_variation, visible

P, D, HKV, GROUP = 16, 64, 2, 3
PREFILL = 5 * P + 3  # five completed pages and a part of one
#: Formats that together have every part of a store, every scaling and both dithers.
STORE_FORMATS = (
    DEFAULT,
    StoreFormat(KeyFormat("int6", "token", outlier_pairs=2, dither="stream"), ValueFormat("int8", "stream")),
    StoreFormat(KeyFormat("int4", "asymmetric", dither="tile"), ValueFormat("int4")),
    StoreFormat(KeyFormat("fp8", "symmetric", outlier_pairs=1), ValueFormat("exact")),
)
every_format = pytest.mark.parametrize("store_format", STORE_FORMATS, ids=lambda store_format: store_format.name)


@given(scenarios())
@settings(max_examples=400)
def test_bounds_hold_with_zero_tolerance(scenario):
    counts = run(scenario, REFERENCE)
    assert counts.violations == 0, counts


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 24])
def test_decode_with_most_tokens_as_codes(dtype, group):
    scenario = Scenario(
        group=group, dtype=dtype, prefill=40 * P + 5, chunks=(1,) * 6, value_kind="one_hot", page_size=P
    )
    total = Soundness()
    for seed, query_kind in enumerate(("normal", "residual", "token", "worst_channel")):
        total += run(replace(scenario, seed=seed, query_kind=query_kind, strength=0.3), REFERENCE)
    assert total.violations == 0
    assert total.tv_reads == total.reads > 0
    assert total.code_share > 0.9
    assert total.unbounded == 0


@pytest.mark.parametrize("query_kind", QUERY_KINDS)
@pytest.mark.parametrize("key_kind", sorted(KEY_KINDS))
def test_every_pair_of_kinds(key_kind, query_kind):
    scenario = Scenario(prefill=PREFILL, chunks=(P + 1, 1), key_kind=key_kind, query_kind=query_kind, group=2)
    for dtype in MODEL_DTYPES:
        for value_kind in ("one_hot", key_kind):
            counts = run(replace(scenario, dtype=dtype, value_kind=value_kind, seed=len(value_kind)), REFERENCE)
            assert counts.violations == 0, (dtype, value_kind, counts)


def harness_of(
    batch: int = 2,
    pages: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    store_format: StoreFormat = DEFAULT,
    **options,
) -> CacheHarness:
    shape = StoreShape(batch, pages, HKV, P, D, dtype, store_format)
    return CacheHarness(shape, sm_scale=D**-0.5, **({"operators": REFERENCE} | options))


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens_of(batch: int, new_tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16):
    q = normal(batch, HKV * GROUP, new_tokens, D, seed=3 * seed, dtype=dtype)
    k, v = (normal(batch, HKV, new_tokens, D, seed=3 * seed + i, dtype=dtype) for i in (1, 2))
    return q, k, v, torch.ones(batch, new_tokens, dtype=torch.bool)


def same(a, b) -> bool:
    """Bit-equal results of two reads."""
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("out", "lse", "certificate"))


def rows_of(read, rows: slice):
    return read._replace(**{name: getattr(read, name)[rows] for name in ("out", "lse", "certificate", "positions")})


@pytest.mark.parametrize(
    ("operators", "device"),
    [(REFERENCE, "cpu"), (None, "cpu"), pytest.param(None, "cuda", marks=pytest.mark.gpu)],
    ids=["reference", "registered", "gpu"],
)
def test_weights_at_a_rounding_tie(operators, device):
    counts = run_rounding_ties(operators, device)
    assert counts.reads == counts.tv_reads == 1 and counts.unbounded == 0
    assert counts.code_share > 0.99
    assert counts.violations == 0, counts


class TestHarnessRejects:
    """The harness sees a wrong operator; else the counts above mean nothing."""

    scenario = Scenario(prefill=PREFILL, chunks=(P, 1, 1), value_kind="one_hot", dtype=torch.float32, group=GROUP)

    def violations(self, attend=None, write=None) -> Soundness:
        return run(
            self.scenario,
            Operators(write or REFERENCE.kv_write, attend or REFERENCE.certified_attention),
        )

    def test_bounds_that_are_too_small(self):
        def attend(*args):
            out, lse, certificate = REFERENCE.certified_attention(*args)
            return out, lse, certificate * 1e-3

        counts = self.violations(attend)
        assert counts.tv_violations > 0 and counts.output_violations > 0

    def test_a_code_that_is_not_the_key(self):
        def write(*args):
            REFERENCE.kv_write(*args)
            args[8][:, :, 3] = 0

        counts = self.violations(write=write)
        assert counts.tv_violations > 0 and counts.output_violations > 0
        assert counts.arithmetic_violations == 0  # it reads its own store rightly

    def test_an_output_that_is_not_its_own_distribution(self):
        def attend(*args):
            out, lse, certificate = REFERENCE.certified_attention(*args)
            return out.roll(1, -1), lse, certificate

        assert self.violations(attend).arithmetic_violations > 0

    def test_a_page_that_is_not_read(self):
        def attend(q, k, v, positions, lengths, page_table, source_map, *args):
            source_map[:, :, 2] = SOURCE_NONE
            return REFERENCE.certified_attention(q, k, v, positions, lengths, page_table, source_map, *args)

        counts = self.violations(attend)
        assert counts.tv_violations > 0 and counts.arithmetic_violations > 0


@every_format
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("window", [0, 2 * P + 5])
def test_fields_are_what_their_names_say(dtype, window, store_format):
    cache = harness_of(dtype=dtype, window=window, store_format=store_format)
    cache.forward(*tokens_of(2, PREFILL, 0, dtype))
    q, k, v, valid = tokens_of(2, P, 1, dtype)
    valid[1, :5] = False
    read = cache.read(q, k, v, valid)
    tokens = cache.tokens(k, v, read.positions)
    stored = exact_attention(q, tokens.k, tokens.v, read.positions, tokens.key_positions, cache.sm_scale, window)
    seen = visible(read.positions, tokens.key_positions, window)[:, None].expand_as(stored.probabilities)
    is_code = tokens.is_code.repeat_interleave(GROUP, 1)[:, :, None]
    field = read.certificate.double().unbind(-1)
    assert torch.equal(field[Field.TOKENS], seen.sum(-1).double())
    assert torch.equal(field[Field.CODE_TOKENS], (seen & is_code).sum(-1).double())
    code_mass = (stored.probabilities * is_code).sum(-1)
    assert torch.allclose(field[Field.CODE_MASS], code_mass, atol=1e-5)
    assert torch.allclose(read.lse.double(), stored.lse, atol=1e-4)

    # Errors that the radius and E_val speak of, from the originals.
    key_error = torch.cat([cache.key_error(), torch.zeros_like(k).double()], 2)
    error = (q.double() @ key_error.repeat_interleave(GROUP, 1).mT).abs() * cache.sm_scale
    assert (torch.where(seen, error, 0.0).amax(-1) <= field[Field.RADIUS]).all()
    exact_values = torch.cat([cache.values, v], 2).double()
    value_error = torch.where(tokens.is_code[..., None], tokens.v - exact_values, 0.0)
    moved = (stored.probabilities @ value_error.repeat_interleave(GROUP, 1)).norm(dim=-1)
    assert (moved <= field[Field.VALUE_ERROR]).all()
    assert (field[Field.VALUE_ERROR] + field[Field.KEY_ERROR] <= field[Field.OUTPUT] * (1 + 1e-6)).all()


def test_padding_reads_nothing():
    cache = harness_of()
    cache.forward(*tokens_of(2, PREFILL, 0))
    q, k, v, valid = tokens_of(2, P, 1)
    valid[0, :7] = False
    k[0, :, :7], v[0, :, :7], q[0, :, :7] = float("nan"), float("inf"), float("nan")
    read = cache.forward(q, k, v, valid)
    assert (read.out[0, :, :7] == 0).all()
    assert read.lse[0, :, :7].isneginf().all()
    assert (read.certificate[0, :, :7] == 0).all()
    assert read.certificate[0, :, 7:].isfinite().all()
    assert cache.lengths.tolist() == [PREFILL + P - 7, PREFILL + P]
    assert cache.check(read, one_hot=False).violations == 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("place", ["page", "tail", "fresh"])
@every_format
def test_a_value_that_is_not_finite_marks_the_reads_that_see_it_and_no_other(store_format, place, side, poison):
    clean, dirty = harness_of(3, store_format=store_format), harness_of(3, store_format=store_format)
    at = {"page": 2 * P + 1, "tail": 5 * P + 1, "fresh": PREFILL + 4}[place]
    reads = []
    for cache, value in ((clean, None), (dirty, poison)):
        start = 0
        for seed, count in enumerate((PREFILL, P)):
            q, k, v, valid = tokens_of(3, count, seed)
            if value is not None and start <= at < start + count:
                {"k": k, "v": v}[side][1, 1, at - start, 5] = value
            reads.append(cache.forward(q, k, v, valid))
            start += count
    for read, reference in zip(reads[2:], reads[:2], strict=True):
        for rows in (slice(0, 1), slice(2, 3)):
            assert same(rows_of(read, rows), rows_of(reference, rows))
        row = rows_of(read, slice(1, 2))
        others = slice(0, GROUP)  # the other KV head
        assert torch.equal(row.certificate[:, others], rows_of(reference, slice(1, 2)).certificate[:, others])
        sees = row.positions[0] >= at
        marked = row.certificate[0, GROUP:, :, : Field.OUTPUT + 1].isinf()
        assert marked[:, sees].all()
        assert row.out.isfinite().all()
        if place == "page" and sees.all():
            continue
        before = ~sees if place != "page" else row.positions[0] < at
        assert not marked[:, before].any()
    last = clean.lengths.tolist()
    assert last == dirty.lengths.tolist() == [PREFILL + P] * 3


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_query_that_is_not_finite_is_marked(poison):
    cache = harness_of()
    cache.forward(*tokens_of(2, PREFILL, 0))
    q, k, v, valid = tokens_of(2, 2, 1)
    expected = cache.read(q, k, v, valid)
    q[0, 1, 1, 3] = poison
    read = cache.read(q, k, v, valid)
    assert read.certificate[0, 1, 1, : Field.OUTPUT + 1].isinf().all()
    untouched = torch.ones(2, HKV * GROUP, 2, dtype=torch.bool)
    untouched[0, 1, 1] = False
    assert torch.equal(read.certificate[untouched], expected.certificate[untouched])
    assert torch.equal(read.out[untouched], expected.out[untouched])


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_autocast_changes_no_bit(dtype, autocast):
    """The registered operators keep their own arithmetic: products in 16 bits would break what the certificate claims."""
    results = []
    for enabled in (False, True):
        cache = CacheHarness(StoreShape(1, 8, HKV, P, D, dtype), sm_scale=D**-0.5, operators=registered())
        with torch.autocast("cpu", dtype=autocast, enabled=enabled):
            cache.forward(*tokens_of(1, PREFILL, 0, dtype))
            read = cache.forward(*tokens_of(1, 2, 1, dtype))
        results.append((read.out, read.lse, read.certificate, *cache.store))
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


def test_keys_far_from_zero_that_nearly_cancel_between_pages():
    total = sum((run_constant_pages(seed, REFERENCE) for seed in range(20)), Soundness())
    assert total.reads == total.tv_reads == 160
    assert total.violations == 0


def test_tokens_beyond_the_capacity_are_marked_and_not_written():
    cache = harness_of(2, pages=6)
    cache.forward(*tokens_of(2, PREFILL, 0))
    q, k, v, valid = tokens_of(2, P, 1)
    valid[1, :] = False
    read = cache.forward(q, k, v, valid)
    fits = 6 * P - PREFILL
    assert (read.positions[0, fits:] == POSITION_OVERFLOW).all()
    assert (read.out[0, :, fits:] == 0).all()
    assert read.certificate[0, :, fits:, : Field.OUTPUT + 1].isinf().all()
    assert read.certificate[0, :, :fits].isfinite().all()
    assert cache.lengths.tolist() == [6 * P, PREFILL]
    assert cache.check(read, one_hot=False).violations == 0
    full = cache.forward(*tokens_of(2, 1, 2))
    assert full.certificate[0, :, 0, Field.TV].isinf().all()
    assert full.certificate[1].isfinite().all()


@pytest.mark.parametrize("value", [65472.0, 65504.0])
def test_an_output_that_overflows_float16_has_no_finite_bound(value):
    """V^ may be half a step above V; at the end of float16's range the returned output is then Inf."""
    cache = harness_of(1, dtype=torch.float16)
    for index, count in enumerate((PREFILL, 1)):
        q, k, v, valid = tokens_of(1, count, index, torch.float16)
        read = cache.forward(q, k, v.fill_(value), valid)
    assert cache.check(read, one_hot=False).violations == 0


@pytest.mark.parametrize("value", ["int8", "int4", "exact"])
@pytest.mark.parametrize(("page_size", "pages"), [(16, 1024), (128, 128)])
def test_a_long_sum_of_equal_values_is_within_its_arithmetic(page_size, pages, value):
    """Every partial sum is rounded the same way, so that the error grows with the number of terms in a row."""
    shape = StoreShape(1, pages, 1, page_size, D, torch.float32, StoreFormat(KeyFormat(), ValueFormat(value)))
    cache = CacheHarness(shape, sm_scale=D**-0.5, operators=REFERENCE)
    for entry in (1.1111111, 1.2345678):
        cache.lengths.zero_()
        k = torch.zeros(1, 1, (pages - 1) * page_size, D)
        cache.write(k, torch.full_like(k, entry), torch.ones(1, k.shape[2], dtype=torch.bool))
        k = k[:, :, :1]
        read = cache.read(k, k, torch.full_like(k, entry), torch.ones(1, 1, dtype=torch.bool))
        exact = torch.full((D,), entry).double()
        assert (read.out.double() - exact).norm(dim=-1).max() <= read.certificate[..., Field.OUTPUT].min() < 0.1


def decode_all(cache: CacheHarness, rows: torch.Tensor, batch: int, seed: int = 0) -> list:
    """Extend, decode and ragged extend of the same request in the rows of a mask; the other rows get other tokens."""
    reads = []
    for index, count in enumerate((PREFILL, 1, P + 3, 1, 2)):
        request = tokens_of(1, count, 10 + index)
        others = tokens_of(batch, count, 100 + 10 * seed + index)
        q, k, v = (torch.where(rows[:, None, None, None], mine, other) for mine, other in zip(request[:3], others[:3]))
        valid = ragged_mask(batch, count, torch.Generator().manual_seed(seed + index))
        if index == 2:
            request[3][:, :4] = False
        valid = torch.where(rows[:, None], request[3], valid)
        reads.append(cache.forward(q, k, v, valid))
    return reads


@every_format
@pytest.mark.parametrize("window", [0, 3 * P])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_other_slots_and_pages(window, store_format):
    alone = harness_of(1, window=window, store_format=store_format, seeds=torch.tensor([9]))
    expected = decode_all(alone, torch.tensor([True]), 1)
    assert int(alone.lengths[0]) // P >= 6
    for batch, slot, seed in ((3, 0, 1), (3, 2, 2), (5, 1, 3)):
        table = shuffled_page_table(batch, 8, torch.Generator().manual_seed(seed))
        seeds = torch.where(torch.arange(batch) == slot, 9, torch.arange(batch))
        options = {"window": window, "store_format": store_format, "seeds": seeds}
        cache = harness_of(batch, page_table=table, unused_byte=0xFF, **options)
        reads = decode_all(cache, torch.arange(batch) == slot, batch, seed)
        for read, lone in zip(reads, expected, strict=True):
            assert same(rows_of(read, slice(slot, slot + 1)), lone)
        complete = int(alone.lengths[0]) // P
        for name in POOL_PARTS:
            mine, other = getattr(cache.store, name), getattr(alone.store, name)
            if mine.numel():
                assert torch.equal(mine[table[slot, :complete].long()], other[:complete]), name


@every_format
def test_equal_rows_of_a_batch_have_equal_bits(store_format):
    """Equal seeds as well: a request's dither does not depend on its row."""
    cache = harness_of(3, store_format=store_format, seeds=torch.full((3,), 5))
    for read in decode_all(cache, torch.ones(3, dtype=torch.bool), 3):
        for row in (1, 2):
            assert same(rows_of(read, slice(row, row + 1)), rows_of(read, slice(0, 1)))


@every_format
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_unused_slots_may_hold_any_bytes(byte, store_format):
    rows = torch.tensor([True, False])
    dirty, clean = (harness_of(2, store_format=store_format, unused_byte=value) for value in (byte, None))
    for read, expected in zip(decode_all(dirty, rows, 2), decode_all(clean, rows, 2), strict=True):
        assert same(read, expected)


@every_format
def test_pages_do_not_depend_on_the_chunks_that_filled_them(store_format):
    total = 6 * P + 5
    _, k, v, valid = tokens_of(1, total, 0)
    live = torch.arange(5 * P, total) % (2 * P)  # the unfinished page and the one before
    stores = []
    for chunk in (total, 1, P - 1, P + 1, 2 * P + 5):
        cache = harness_of(1, store_format=store_format)
        for start in range(0, total, chunk):
            part = slice(start, start + chunk)
            cache.write(k[:, :, part], v[:, :, part], valid[:, part])
        store = cache.store
        stores.append(store._replace(k_tail=store.k_tail[:, :, live], v_tail=store.v_tail[:, :, live]))
    for store in stores[1:]:
        for part, expected in zip(store, stores[0], strict=True):
            assert torch.equal(part, expected)


@every_format
def test_left_padding_changes_nothing(store_format):
    """A padded chunk gives the bits of the same chunk without padding columns in between, page for page."""
    plain, padded = (harness_of(1, store_format=store_format) for _ in range(2))
    for index, count in enumerate((PREFILL, P, 1)):
        q, k, v, valid = tokens_of(1, count, index)
        plain.write(k, v, valid)
        pad = 5

        def widen(x: torch.Tensor, pad: int = pad) -> torch.Tensor:
            return torch.cat([x.new_full((*x.shape[:2], pad, D), float("nan")), x], 2)

        padded.write(widen(k), widen(v), torch.cat([torch.zeros(1, pad, dtype=torch.bool), valid], 1))
    for part, expected in zip(padded.store, plain.store, strict=True):
        assert torch.equal(part, expected)
    q, k, v, valid = tokens_of(1, 1, 9)
    assert same(padded.forward(q, k, v, valid), plain.forward(q, k, v, valid))


@pytest.mark.skipif(INTERPRETED, reason="the registered CPU operators are the Triton kernels here")
def test_registered_operators_on_the_cpu_are_the_reference():
    rows = torch.tensor([True, False])
    for read, expected in zip(
        decode_all(harness_of(2, operators=registered()), rows, 2), decode_all(harness_of(2), rows, 2), strict=True
    ):
        assert same(read, expected)


def observed_read(pages: int, cached: int):
    """A float32 read over one-hot values: its certificate, its distances, and the total variation of p^ from p, ungrouped."""
    cache = harness_of(1, pages=pages, dtype=torch.float32)
    _, k, _, valid = tokens_of(1, cached, 0, torch.float32)
    cache.write(k, one_hot_values(cache.place(valid)[0], HKV, D, torch.float32), valid)
    q, k, _, valid = tokens_of(1, 8, 1, torch.float32)
    v = one_hot_values(cache.place(valid)[0], HKV, D, torch.float32)
    read = cache.read(q, k, v, valid)
    tokens = cache.tokens(k, v, read.positions)
    key_error = torch.cat([cache.key_error(), torch.zeros_like(k).double()], 2)
    p, stored = (
        exact_attention(q, keys, tokens.v, read.positions, tokens.key_positions, cache.sm_scale).probabilities
        for keys in (tokens.k + key_error, tokens.k)
    )
    cache.write(k, v, valid)
    return read.certificate.double(), cache.distances(read, one_hot=True), total_variation(p, stored)


def test_one_hot_values_show_the_distribution():
    """Grouping by channel hides part of a distance, never adds to it."""
    _, distances, whole = observed_read(8, PREFILL)
    assert (distances.total_variation <= whole + 1e-6).all()
    assert (distances.total_variation >= 0.5 * whole).all()
    assert (whole > 1e-4).all()


def test_bounds_are_worth_something():
    """Median of bound over true distance: independent normal keys are the diffuse case, the loosest (DESIGN section 7)."""
    certificate, _, whole = observed_read(40, 39 * P)
    assert (certificate[..., Field.CODE_TOKENS] / certificate[..., Field.TOKENS]).min() > 0.95
    assert certificate[..., Field.TV].max() < 0.1
    assert (certificate[..., Field.TV] / whole).median() < 20
    # No looser than 2 R TV, though nothing is known of how values cancel.
    weight_rounding = 2.0**-8 * HOT
    assert (certificate[..., Field.OUTPUT] <= 2 * HOT * certificate[..., Field.TV] + weight_rounding).all()
