"""Rows of a CertifiedCache: cropped, copied, released, shared, under a sliding window. What stays has the bits of a lone run."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from nn_models import Histories, converted, exact_tail, forward, prompt, stored_codes, tiny_model

import torch_witcert
from torch_witcert import CertifiedInt8Config, WitCertConfig

SIZE = 16
#: One recipe for each kind of codes, scales and dither.
FORMATS = {
    "int8": CertifiedInt8Config(page_size=SIZE),
    "int6 keys, int4 values": CertifiedInt8Config(page_size=SIZE, key_element="int6", value_element="int4"),
    "fp8": CertifiedInt8Config(page_size=SIZE, key_element="fp8", key_scaling="symmetric", value_element="fp8"),
    "int4 keys by token, exact values": CertifiedInt8Config(
        page_size=SIZE, key_element="int4", key_scaling="token", value_element="exact", outlier_pairs=2
    ),
    "dither stream": WitCertConfig(page_size=SIZE),
    "dither tile": WitCertConfig(page_size=SIZE, dither="tile", key_scaling="asymmetric", radii="step+probabilistic"),
}


def contents(cache) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in cache.tensors()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for part, other in zip(found, expected, strict=True):
        assert torch.equal(part.nan_to_num(7.0), other.nan_to_num(7.0))


def tokens(cache, count: int, seed: int) -> torch.Tensor:
    return prompt(count, cache.batch_size, seed)


def step_rows(model, cache, start: int, stop: int) -> None:
    """One-token steps to a length; the token at a position is always the same."""
    for position in range(start, stop):
        forward(model, tokens(cache, 1, position), cache)


# --- crop --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_crop_is_as_if_nothing_had_come_after(name):
    """From every length within the tail: the state, and the bits and certificates of what follows."""
    model = converted(recipe=FORMATS[name])
    for long, short in ((74, 73), (74, 64), (74, 63), (74, 48), (80, 79), (80, 64), (95, 64), (96, 80), (81, 81)):
        cropped, straight = (torch_witcert.CertifiedCache(model, 160, 2) for _ in range(2))
        for cache in (cropped, straight):
            forward(model, tokens(cache, 40, 1), cache)
        step_rows(model, cropped, 40, long)
        step_rows(model, straight, 40, short)
        cropped.crop(short - long)
        assert cropped.lengths.tolist() == straight.lengths.tolist() == [short, short]
        assert int(cropped.get_seq_length()) == short
        if cropped.state.budget:
            assert (cropped.state.spent == straight.state.spent + long - short).all(), "the budget stays spent"
            cropped.state.spent.copy_(straight.state.spent)
        for count in (1, 5, 1, 40):
            for row in range(2):
                assert_same(stored_codes(cropped, row), stored_codes(straight, row))
                ours = exact_tail(cropped, row)
                theirs = [part[:, part.shape[1] - ours[0].shape[1] :] for part in exact_tail(straight, row)]
                assert_same(ours, theirs)
            chunks = [forward(model, tokens(cache, count, 7), cache) for cache in (cropped, straight)]
            assert torch.equal(*chunks)
            assert_same([*torch_witcert.certificates(cropped)], [*torch_witcert.certificates(straight)])


def test_a_crop_reaches_as_far_back_as_the_tail():
    """Every length: what is allowed, what the refusal says, and that a refusal changes nothing."""
    model = converted(layers=1)
    full = torch_witcert.CertifiedCache(model, 160, 1)
    forward(model, prompt(40), full)
    for length in range(41, 90):
        step_rows(model, full, length - 1, length)
        oldest = (length // SIZE - 1) * SIZE
        for kept in {oldest - 1, oldest, length - 1, 1, 0} - {length}:
            cache = copy.deepcopy(full)
            before = contents(cache)
            if kept == 0 or kept >= oldest:
                cache.crop(kept - length)
                assert int(cache.lengths) == int(cache.get_seq_length()) == kept
                assert cache.pages_in_use() == kept // SIZE
            else:
                match = rf"is not possible for row 0, which holds {length} tokens: it can be cropped to 0, or to a length from {oldest} on"
                with pytest.raises(ValueError, match=match):
                    cache.crop(kept - length)
                assert_same(contents(cache), before)


def test_crops_add_up():
    """A second crop cannot reach further back than the first could: the ring holds what was there at the longest."""
    model = converted()
    cache = torch_witcert.CertifiedCache(model, 160)
    histories = Histories(model, cache)
    histories.forward(prompt(40))
    for position in range(40, 84):
        histories.forward(prompt(1, seed=position))
    for length in (80, 70, 64):
        cache.crop(length - int(cache.lengths))
        histories.crop(0, length)
        histories.check(0, read=False)
    with pytest.raises(ValueError, match="to a length from 64 on"):
        cache.crop(-1)
    for position in range(20):
        histories.forward(prompt(1, seed=100 + position))
        histories.check(0)
    cache.crop(-20)
    histories.crop(0, 64)
    histories.check(0, read=False)


def test_a_forward_that_failed_shortens_what_a_crop_can_reach():
    """It has written into the ring; a crop to tokens that it overwrote would take other tokens for them."""
    model = converted(layers=2)
    cache = torch_witcert.CertifiedCache(model, 160)
    histories = Histories(model, cache)
    histories.forward(prompt(40))
    for position in range(40, 95):
        histories.forward(prompt(1, seed=position))

    def fail(*_):
        raise RuntimeError("no memory left")

    handle = model.model.layers[0].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no memory left"):
        forward(model, prompt(16, seed=3), cache)
    handle.remove()
    for prepare in (lambda: None, lambda: histories.forward(prompt(1, seed=95))):
        prepare()
        for kept in (66, 79):
            with pytest.raises(ValueError, match="to a length from 80 on"):
                cache.crop(kept - int(cache.lengths))
        histories.check(0, read=False)
    cache.crop(80 - 96)
    histories.crop(0, 80)
    histories.check(0, read=False)


def test_crop_arguments():
    model = converted(layers=1)
    cache = torch_witcert.CertifiedCache(model, 96)
    forward(model, prompt(40), cache)
    before = contents(cache)
    for wrong in (1.0, None, "1", torch.tensor(1.5)):
        with pytest.raises(TypeError, match="tokens_to_remove must be an int"):
            cache.crop(wrong)
    with pytest.raises(ValueError, match="0 or negative.*got 3"):
        cache.crop(3)
    cache.crop(0)
    cache.crop(-torch.tensor(0))
    assert_same(contents(cache), before)
    cache.crop(torch.tensor(-3))
    assert int(cache.lengths) == 37


def test_crop_of_ragged_rows_is_all_or_nothing():
    model = converted(layers=1)
    cache = torch_witcert.CertifiedCache(model, 96, 3)
    histories = Histories(model, cache)
    histories.forward(prompt(60, 3), [60, 20, 41])
    before = contents(cache)
    with pytest.raises(ValueError, match="is not possible for row 1, which holds 20 tokens"):
        cache.crop(-21)
    with pytest.raises(ValueError, match="is not possible for row 2, which holds 41 tokens.*from 16 on"):
        cache.release([1])
        before = contents(cache)
        cache.crop(-26)
    assert_same(contents(cache), before)


# --- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["int8", "dither stream"])
@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda c: c.reorder_cache(torch.tensor([0, 1])), "beam_idx must have 3 entries"),
        (lambda c: c.reorder_cache(torch.tensor([0, 1, 3])), "beam_idx must be rows from 0 to 2"),
        (lambda c: c.reorder_cache(torch.tensor([0.0, 1.0, 2.0])), "beam_idx must be row indices"),
        (lambda c: c.batch_select_indices(torch.tensor([-1])), "indices must be rows from 0 to 2"),
        (lambda c: c.batch_select_indices(torch.tensor([], dtype=torch.int64)), "indices must be row indices"),
        (lambda c: c.batch_repeat_interleave(0), "repeats must be a positive int, got 0"),
        (lambda c: c.fork(0, [0]), "distinct rows, got 0 and"),
        (lambda c: c.fork(0, [1, 1]), "distinct rows"),
        (lambda c: c.fork(3, [1]), "source must be a row from 0 to 2"),
        (lambda c: c.fork(0, [5]), "targets must be rows from 0 to 2"),
        (lambda c: c.release([3]), "rows must be rows from 0 to 2"),
        (lambda c: c.release([]), "rows must be row indices"),
        (
            lambda c: c.crop(-60),
            r"is not possible for row \d, which holds \d+ tokens: it can be cropped to 0, or to a length from \d+ on",
        ),
        (lambda c: c.early_initialization(2, 2, 64, torch.float32, "cpu"), "made for, 3 and torch.float32, got 2 and"),
    ],
)
def test_a_refusal_changes_nothing(act, match, recipe):
    model = converted("qwen2", window=40, recipe=FORMATS[recipe])
    cache = torch_witcert.CertifiedCache(model, 96, 3, num_pages=16)
    histories = Histories(model, cache)
    histories.forward(prompt(60, 3), [60, 50, 41])
    addresses, before = [tensor.data_ptr() for tensor in cache.tensors()], contents(cache)
    with pytest.raises(ValueError, match=match):
        act(cache)
    assert_same(contents(cache), before)
    assert [tensor.data_ptr() for tensor in cache.tensors()] == addresses
    histories.forward(prompt(1, 3, seed=5))
    for row in range(3):
        histories.check(row)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("count", [1, 33])
def test_an_exhausted_pool_is_refused_before_anything_changes(count, window):
    model = converted("qwen2", window=window)
    cache = torch_witcert.CertifiedCache(model, 160, 3, num_pages=13)
    histories = Histories(model, cache)
    histories.forward(prompt(79, 3), [79, 79, 64 if count == 1 else 47])
    in_use, before = cache.pages_in_use(), contents(cache)
    with pytest.raises(ValueError, match=r"pool of 13 pages is exhausted: row \d needs one more.*release\(\) rows"):
        forward(model, prompt(count, 3), cache)
    assert_same(contents(cache), before)
    assert cache.pages_in_use() == in_use
    cache.release([1])
    histories.rows[1] = []
    histories.forward(prompt(count, 3, seed=9), [count, 0, count])
    for row in (0, 2):
        histories.check(row)


# --- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("name", FORMATS)
def test_any_sequence_of_edits_leaves_the_bits_of_lone_rows(name, window):
    model = converted("qwen2", window=window, recipe=FORMATS[name])
    seeds = {"seeds": [3, 4, 5, 6]} if FORMATS[name].store_format.is_dithered else {}
    cache = torch_witcert.CertifiedCache(model, 192, 4, **seeds)
    histories = Histories(model, cache)
    histories.forward(prompt(70, 4), [70, 49, 64, 63])
    histories.forward(prompt(20, 4, seed=2), [20, 17, 1, 0])
    cache.reorder_cache(torch.tensor([1, 0, 0, 3]))
    histories.take([1, 0, 0, 3])
    cache.reorder_cache(torch.tensor([2, 2, 0, 3]))
    histories.take([2, 2, 0, 3])
    histories.forward(prompt(9, 4, seed=3))
    for row in range(4):
        histories.check(row)
    cache.fork(3, [0])
    histories.take([3, 1, 2, 3])
    histories.forward(prompt(2, 4, seed=4), [1, 2, 2, 0])
    cache.crop(-1)
    for row in range(4):
        histories.crop(row, int(cache.lengths[row]))
    cache.release([2])
    histories.rows[2] = []
    histories.forward(prompt(50, 4, seed=5), [50, 40, 50, 3])
    for row in range(4):
        # Padding beside a row, or a first chunk of its own, changes the shapes that its read runs in.
        histories.check(row, read=row == 0)
    cache.batch_select_indices(torch.tensor([3, 1, 1]))
    histories.take([3, 1, 1])
    cache.batch_repeat_interleave(2)
    histories.take([0, 0, 1, 1, 2, 2])
    histories.forward(prompt(3, 6, seed=6), [3, 2, 1, 0, 3, 3])
    for row in (0, 1, 2, 4, 5):
        histories.check(row, read=row in (0, 4, 5))
    cache.batch_select_indices(torch.tensor([False, True, True, False, False, True]))
    histories.take([1, 2, 5])
    histories.forward(prompt(1, 3, seed=7))
    for row in range(3):
        histories.check(row)


def test_reset_after_copies_is_a_fresh_cache():
    """Seeds that moved with the rows come back with reset() and release()."""
    model = converted(recipe=FORMATS["dither stream"])
    cache, fresh = (torch_witcert.CertifiedCache(model, 96, 3, seeds=[7, 8, 9]) for _ in range(2))
    forward(model, prompt(40, 3, seed=4), cache)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    cache.release([0])
    assert cache.state.seeds.tolist() == [7, 9, 7]
    cache.reset()
    for layer, other in zip(cache.layers, fresh.layers, strict=True):
        other.outlier_channels.copy_(layer.outlier_channels)
    fresh.state.untouched = False
    for count in (50, 1, 1):
        assert torch.equal(*(forward(model, prompt(count, 3, seed=count), c) for c in (cache, fresh)))
        assert_same([*torch_witcert.certificates(cache)], [*torch_witcert.certificates(fresh)])
    for row in range(3):
        assert_same(stored_codes(cache, row), stored_codes(fresh, row))


@pytest.mark.parametrize("empty", [lambda c: c.reset(), lambda c: c.release([0, 1]), lambda c: c.crop(-50)])
def test_an_emptied_cache_takes_a_prompt_as_a_fresh_one_does(empty):
    model = converted()
    cache, fresh = (torch_witcert.CertifiedCache(model, 96, 2) for _ in range(2))
    forward(model, prompt(50, 2), cache)
    empty(cache)
    assert cache.pages_in_use() == 0
    assert torch.equal(*(forward(model, prompt(60, 2, seed=3), c) for c in (cache, fresh)))
    assert (torch_witcert.certificates(cache).tv == 0).all()
    assert torch.equal(*(forward(model, prompt(1, 2), c) for c in (cache, fresh)))


@pytest.mark.parametrize("forget", [lambda c: c.release([0]), lambda c: c.crop(-5), lambda c: c.reset()])
def test_a_forgotten_nan_leaves_no_trace_in_a_dense_layer(forget):
    """A dense layer reads every slot under a mask, and 0 times NaN is NaN."""
    model = tiny_model(layers=2)
    torch_witcert.convert(model, FORMATS["int8"], filter_fn=lambda _, name: "1" not in name, strict=False)
    cache, clean = (torch_witcert.CertifiedCache(model, 96) for _ in range(2))
    for each in (cache, clean):
        forward(model, prompt(40), each)

    def poison(_, __, out):
        return torch.full_like(out, float("nan"))

    handle = model.model.layers[1].self_attn.v_proj.register_forward_hook(poison)
    forward(model, prompt(5, seed=3), cache)
    handle.remove()
    forward(model, prompt(5, seed=3), clean)
    forget(cache)
    forget(clean)
    found, expected = (forward(model, prompt(1, seed=4), each) for each in (cache, clean))
    assert torch.equal(found, expected)
    assert found.isfinite().all()


def test_a_nan_of_a_failed_forward_leaves_no_trace_in_a_dense_layer():
    model = tiny_model(layers=2)
    torch_witcert.convert(model, FORMATS["int8"], filter_fn=lambda _, name: "1" in name, strict=False)
    cache, clean = (torch_witcert.CertifiedCache(model, 96) for _ in range(2))
    for each in (cache, clean):
        forward(model, prompt(40), each)

    def poison(_, __, out):
        return torch.full_like(out, float("nan"))

    def stop(*_):
        raise InterruptedError

    handles = (
        model.model.layers[0].self_attn.v_proj.register_forward_hook(poison),
        model.model.layers[1].register_forward_pre_hook(stop),
    )
    with pytest.raises(InterruptedError):
        forward(model, prompt(6, seed=3), cache)
    for handle in handles:
        handle.remove()
    found, expected = (forward(model, prompt(1, seed=4), each) for each in (cache, clean))
    assert found.isfinite().all()
    assert torch.equal(found, expected)


# --- sliding windows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gpt_oss"])
@pytest.mark.parametrize("window", [16, 33, 40])
def test_logits_around_the_window_and_far_beyond(family, window):
    """Prompt of 10, then every length to 3 windows and more, token by token, against the dense model."""
    dense, model = tiny_model(family, window=window), converted(family, window=window)
    length = 200
    ids = prompt(length)
    expected = forward(dense, ids)
    cache = torch_witcert.CertifiedCache(model, 208)
    logits = [forward(model, ids[:, :10], cache)]
    most = 0
    for position in range(10, length):
        logits.append(forward(model, ids[:, position : position + 1], cache))
        most = max(most, cache.pages_in_use() - (position + 1) // SIZE * (0 in cache.state.groups))
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=0, atol=0.02)
    kept = -(-window // SIZE) + 2
    assert most == cache.state.groups[window].num_pages == kept
    for layer in cache.layers:
        pages = kept if layer.window else 13
        assert layer.store.k_codes.shape[0] == pages


def test_a_window_keeps_its_size_whatever_the_capacity():
    model = converted("mistral", window=40)
    sizes = [torch_witcert.CertifiedCache(model, capacity, 2).nbytes() for capacity in (1024, 2048, 4096)]
    cache = torch_witcert.CertifiedCache(model, 1024, 2)
    assert [sizes[1] - sizes[0], sizes[2] - sizes[1]] == [
        2 * 1024 * cache.bytes_per_token(),
        2 * 2048 * cache.bytes_per_token(),
    ]
    assert cache.bytes_per_token() == 4 / SIZE, "the page table alone"
    mixed = converted("qwen2", window=40)
    plain = torch_witcert.CertifiedCache(converted("qwen2"), 1024).bytes_per_token()
    assert torch_witcert.CertifiedCache(mixed, 1024).bytes_per_token() == (plain - 4 / SIZE) / 2 + 8 / SIZE


@pytest.mark.parametrize("chunks", [(100, 57, 1, 33), (7, 150, 1), (200, 1, 1), (40, 41, 39, 64, 1)])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_chunks_longer_than_the_window(family, chunks):
    dense, model = tiny_model(family, window=40), converted(family, window=40)
    ids = prompt(sum(chunks), 2)
    expected = forward(dense, ids)
    cache = torch_witcert.CertifiedCache(model, 256, 2)
    histories = Histories(model, cache)
    start = 0
    for count in chunks:
        found = histories.forward(ids[:, start : start + count])
        torch.testing.assert_close(found, expected[:, start : start + count], rtol=0, atol=0.02)
        start += count
        histories.check(0, read=start > count)
    kept = cache.state.groups[40].kept
    assert cache.pages_in_use() == 2 * min(kept, start // SIZE) + 2 * (start // SIZE) * (family == "qwen2")


@pytest.mark.parametrize("prefill", [39, 112, 180])
@pytest.mark.parametrize("window", [16, 40, 48])
def test_crop_near_a_page_boundary_in_a_window_model(prefill, window):
    """Also right after a long prompt, whose early pages were never stored; then on beyond the window."""
    model = converted("qwen2", window=window)
    for steps in (0, 1, 7, 8, 9, 16):
        cache = torch_witcert.CertifiedCache(model, 256)
        histories = Histories(model, cache)
        histories.forward(prompt(prefill))
        for position in range(steps):
            histories.forward(prompt(1, seed=position))
        for kept in sorted(
            {prefill + steps - 1, (prefill + steps) // SIZE * SIZE, ((prefill + steps) // SIZE - 1) * SIZE}
        ):
            fork, rows = copy.deepcopy(cache), Histories(model, cache)
            rows.cache, rows.rows = fork, [list(histories.rows[0])]
            fork.crop(kept - prefill - steps)
            rows.crop(0, kept)
            rows.check(0, read=False)
            assert fork.pages_in_use() <= kept // SIZE + fork.state.groups[window].num_pages
            for count in (1, 17, 1, 40, 1):
                rows.forward(prompt(count, seed=50 + count))
                rows.check(0)


# --- long service --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 40])
def test_a_thousand_requests_through_one_cache(window):
    """Random lengths, random ends, a pool of half the pages that the rows could hold: nothing grows, no page gets lost."""
    model = converted("qwen2", layers=2 if window else 1, heads=2, kv_heads=1, window=window)
    rows, pages, chance = 20, 80, random.Random(0)
    cache = torch_witcert.CertifiedCache(model, 128, rows, num_pages=pages)
    addresses, nbytes = [tensor.data_ptr() for tensor in cache.tensors()], cache.nbytes()
    group, served, peak = cache.state.groups[0], 0, 0
    while served < 1000:
        free = (cache.lengths == 0).nonzero()[:, 0].tolist()
        room = pages - int((group.reference_counts(cache.lengths) > 0).sum())
        counts = [0] * rows
        for row in free:
            count = chance.randint(1, 112)
            if count // SIZE + 1 > room:
                break
            counts[row], room = count, room - count // SIZE - 1
        columns = max(counts)
        if columns:
            valid = torch.arange(columns)[None, None, None] < torch.tensor(counts).view(-1, 1, 1, 1)
            forward(model, prompt(columns, rows, seed=served), cache, attention_mask=valid)
        lengths = cache.lengths.tolist()
        in_use = int((group.reference_counts(cache.lengths) > 0).sum())
        assert in_use == sum(length // SIZE for length in lengths) <= pages
        peak = max(peak, in_use)
        ended = [row for row, length in enumerate(lengths) if length and chance.random() < 0.8]
        if ended:
            cache.release(ended)
            served += len(ended)
        if chance.random() < 0.05:
            served += int((cache.lengths > 0).sum())
            cache.reset()
            assert cache.pages_in_use() == 0
    cache.release(list(range(rows)))
    assert cache.pages_in_use() == 0
    assert cache.nbytes() == nbytes
    assert [tensor.data_ptr() for tensor in cache.tensors()] == addresses
    assert peak > 0.8 * pages, "the pool is used"
    # No fragmentation: after all of it the pool can be filled to the last page.
    forward(model, prompt(64, rows), cache)
    assert int((group.reference_counts(cache.lengths) > 0).sum()) == pages
