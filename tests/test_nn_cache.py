"""CertifiedCache: sizes, refusals that change nothing, marked rows, idle rows."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from nn_models import RECIPE, converted, forward, left_padded, prompt, tiny_model
from transformers import DynamicCache, StaticCache

import torch_witcert
from torch_witcert.nn import step
from torch_witcert.nn.compatibility import CACHE_ARGUMENT
from torch_witcert.ops.storage import POOL_PARTS
from torch_witcert.policy.counters import CacheOverflowError
from torch_witcert.policy.gate import Flag

INFINITY = float("inf")


def contents(cache) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in cache.tensors()]


def assert_unchanged(cache, before: list[torch.Tensor]) -> None:
    for tensor, expected in zip(cache.tensors(), before, strict=True):
        assert torch.equal(tensor, expected)


def row_contents(cache, row: int) -> list[torch.Tensor]:
    """Every page and the tail of a row, layer by layer."""
    pools = [
        part[layer.group.page_table[row].long()]
        for layer in cache.layers
        for part in layer.store[: len(POOL_PARTS)]
        if part.numel()
    ]
    return pools + [part[row] for layer in cache.layers for part in layer.store[len(POOL_PARTS) :]]


def filled(model, tokens: int = 70, max_length: int = 96, batch: int = 1):
    cache = torch_witcert.CertifiedCache(model, max_length, batch)
    forward(model, prompt(tokens, batch), cache)
    return cache


# --- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(("max_length", "batch"), [(1, 1), (100, 3), (512, 2)])
def test_nbytes_is_what_torch_allocated(max_length, batch, partial):
    model = tiny_model(layers=3, dtype=torch.bfloat16)
    torch_witcert.convert(model, RECIPE, filter_fn=lambda _, name: not partial or "1" not in name, strict=False)
    gc.collect()
    before = {id(thing) for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)}
    cache = torch_witcert.CertifiedCache(model, max_length, batch)
    storages = {
        thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.Tensor) and id(thing) not in before
    }
    assert cache.nbytes() == sum(storages.values())
    assert cache.capacity_per_row == -(-max_length // 16) * 16 == cache.get_max_length()
    longer = torch_witcert.CertifiedCache(model, cache.capacity_per_row + 1, batch)
    assert longer.nbytes() - cache.nbytes() == batch * 16 * cache.bytes_per_token()


@pytest.mark.parametrize("batch", [1, 3])
def test_capacity_is_exact_to_the_byte(batch):
    model = converted(dtype=torch.bfloat16)
    exact = torch_witcert.CertifiedCache(model, 160, batch).nbytes()
    assert torch_witcert.CertifiedCache.capacity(model, exact, batch) == 160
    assert torch_witcert.CertifiedCache.capacity(model, exact - 1, batch) == 144
    assert torch_witcert.CertifiedCache.capacity(model, 1, batch) == 0
    plain = tiny_model(dtype=torch.bfloat16)
    assert torch_witcert.CertifiedCache.capacity(plain, exact, batch, RECIPE) == 160
    assert torch_witcert.CertifiedCache.capacity(plain, exact, batch) % 64 == 0
    with pytest.raises(ValueError, match="config must be the recipe"):
        torch_witcert.CertifiedCache.capacity(model, exact, batch, torch_witcert.CertifiedInt8Config())


def test_int8_pages_take_about_half_of_bfloat16():
    model = converted(dtype=torch.bfloat16, recipe=torch_witcert.CertifiedInt8Config(page_size=64))
    cache = torch_witcert.CertifiedCache(model, 4096)
    dense = 2 * 2 * 2 * 64 * 2  # bytes of a token: K and V, layers, KV heads, channels, bf16
    assert 0.5 < cache.bytes_per_token() / dense < 0.55
    assert cache.nbytes() < 0.6 * 4096 * dense


@pytest.mark.parametrize(
    ("name", "value"), [("max_length", 0), ("max_length", -1), ("max_length", 1.5), ("batch_size", 0)]
)
def test_wrong_size(name, value):
    sizes = {"max_length": 64, "batch_size": 1, name: value}
    with pytest.raises(ValueError, match=f"{name} must be a positive int, got {value}"):
        torch_witcert.CertifiedCache(converted(), **sizes)


def test_a_pool_that_no_layer_would_use():
    model = converted("mistral", window=40)
    with pytest.raises(ValueError, match="num_pages is the pool of layers without a sliding window, got 4"):
        torch_witcert.CertifiedCache(model, 64, num_pages=4)


def test_needs_a_converted_model():
    with pytest.raises(ValueError, match="LlamaForCausalLM.*not converted: call torch_witcert.convert"):
        torch_witcert.CertifiedCache(tiny_model(), 64)


# --- reset, idle rows, columns ---------------------------------------------------------------------------------------


def test_reset_keeps_addresses_and_results():
    model = converted()
    cache = torch_witcert.CertifiedCache(model, 128)
    addresses = [tensor.data_ptr() for tensor in cache.tensors()]
    first = [forward(model, prompt(70), cache), forward(model, prompt(1), cache)]
    bounds = torch_witcert.certificates(cache).tv.clone()
    cache.reset()
    assert int(cache.lengths) == int(cache.get_seq_length()) == 0
    assert (torch_witcert.certificates(cache).flags == Flag.IDLE).all()
    second = [forward(model, prompt(70), cache), forward(model, prompt(1), cache)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch_witcert.certificates(cache).tv, bounds)
    assert [tensor.data_ptr() for tensor in cache.tensors()] == addresses


def test_idle_rows_of_a_raw_loop():
    """A row whose column is marked False takes no part; the others get the bits that they get when it works."""
    model = converted()
    both, one = (filled(model, 70, 128, batch=2) for _ in range(2))
    active = torch.tensor([True, False])[:, None, None, None]
    for number in range(30):
        token = prompt(1, 2, seed=number)
        expected = forward(model, token, both)
        logits = forward(model, token, one, attention_mask=active, position_ids=torch.tensor([[70 + number]] * 2))
        assert torch.equal(logits[0], expected[0])
    assert one.lengths.tolist() == [100, 70]
    of_one, of_both = torch_witcert.certificates(one), torch_witcert.certificates(both)
    assert torch.equal(of_one.tv[:, 0], of_both.tv[:, 0])
    assert (of_one.flags[:, 1] == Flag.IDLE | Flag.NO_CODES).all()
    counted = torch_witcert.telemetry(one)
    assert counted.total("reads") == 30 * 2 * 4  # steps, layers, heads: the idle row is not counted


def test_right_padding_and_holes():
    """Columns that are not valid are skipped wherever they are; what follows is as if they had not been there."""
    model, ids = converted(), prompt(90)
    mask = torch.ones(1, 90, dtype=torch.long)
    mask[0, 10:20] = 0
    mask[0, 85:] = 0
    keep = mask[0].bool()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    spoiled = torch.where(mask.bool(), ids, 1)
    cache = torch_witcert.CertifiedCache(model, 128)
    logits = forward(model, spoiled, cache, attention_mask=mask, position_ids=positions)
    compact = torch_witcert.CertifiedCache(model, 128)
    expected = forward(model, ids[:, keep], compact)
    torch.testing.assert_close(logits[:, keep], expected, rtol=1e-4, atol=1e-4)
    assert int(cache.lengths) == 75
    assert int(cache.get_seq_length()) == 90
    longer = torch.cat([mask, torch.ones(1, 1, dtype=torch.long)], 1)
    options = {"attention_mask": longer, "position_ids": torch.tensor([[75]])}
    torch.testing.assert_close(
        forward(model, prompt(1), cache, **options), forward(model, prompt(1), compact), rtol=1e-3, atol=1e-3
    )


# --- marked rows ---------------------------------------------------------------------------------------------------


def poison(model, layer: int, projection: str, row: int, column: int, value: float):
    """Hook that puts `value` into one channel of one token's K or V; returns its handle."""

    def hook(_, __, out):
        out = out.clone()
        out[row, column, 3] = value
        return out

    return getattr(model.model.layers[layer].self_attn, projection).register_forward_hook(hook)


@pytest.mark.parametrize("value", [float("nan"), INFINITY, -INFINITY])
@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_a_poisoned_row_is_marked_and_others_untouched(when, projection, value):
    model = converted(layers=1)
    clean = filled(model, 70, 128, batch=2)
    cache = torch_witcert.CertifiedCache(model, 128, 2)
    if when == "prefill":
        handle = poison(model, 0, projection, row=1, column=20, value=value)
        forward(model, prompt(70, 2), cache)
        handle.remove()
        marked = torch_witcert.certificates(cache).tv
        assert marked[0, 0].tolist() == [0, 0, 0, 0]
        assert marked[0, 1].tolist() == [INFINITY, INFINITY, 0, 0], (
            "channel 3 belongs to KV head 0: query heads 0 and 1"
        )
    else:
        forward(model, prompt(70, 2), cache)
        handle = poison(model, 0, projection, row=1, column=0, value=value)
        forward(model, prompt(1, 2), cache)
        handle.remove()
        forward(model, prompt(1, 2), clean)
        assert torch_witcert.certificates(cache).tv[0, 1, :2].isinf().all()
    for seed in range(20):  # across the page that holds the value, as exact token and as code
        expected = forward(model, prompt(1, 2, seed), clean)
        logits = forward(model, prompt(1, 2, seed), cache)
        assert torch.equal(logits[0], expected[0])
        found, lone = torch_witcert.certificates(cache), torch_witcert.certificates(clean)
        for part, other in zip(found, lone, strict=True):
            assert torch.equal(part[:, 0], other[:, 0])
        assert found.tv[0, 1].isinf().tolist() == [True, True, False, False]
        assert (found.flags[0, 1, :2] & Flag.NO_GUARANTEE != 0).all()
    assert torch_witcert.telemetry(cache).layers[0].no_guarantee >= 2 * 20


def test_padding_may_hold_anything():
    model = converted(layers=1)
    ids, mask = left_padded([prompt(90, seed=1), prompt(70, seed=2)])
    expected = forward(model, ids, torch_witcert.CertifiedCache(model, 96, 2), attention_mask=mask)
    handles = [poison(model, 0, name, 1, column, float("nan")) for name in ("k_proj", "v_proj") for column in (0, 19)]
    cache = torch_witcert.CertifiedCache(model, 96, 2)
    logits = forward(model, ids, cache, attention_mask=mask)
    for handle in handles:
        handle.remove()
    assert torch.equal(logits[mask.bool()], expected[mask.bool()])
    assert (torch_witcert.certificates(cache).tv == 0).all()


# --- full cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_tokens", [1, 2, 40])
def test_full_cache_is_refused_before_anything_is_written(new_tokens):
    model = converted()
    cache = filled(model, 96 if new_tokens < 40 else 70, 96, batch=2)
    before = contents(cache)
    with pytest.raises(ValueError, match="cache is full: row 0 holds .* of 96 tokens.*larger max_length"):
        forward(model, prompt(new_tokens, 2), cache)
    assert_unchanged(cache, before)
    assert torch_witcert.telemetry(cache).total("no_guarantee") == 0


def test_room_is_counted_in_tokens_and_not_in_columns():
    model = converted()
    ids, mask = left_padded([prompt(90), prompt(60)])
    cache = torch_witcert.CertifiedCache(model, 96, 2)
    forward(model, ids, cache, attention_mask=mask)
    active = torch.tensor([False, True])[:, None, None, None]
    for _ in range(36):
        forward(model, prompt(1, 2), cache, attention_mask=active)
    assert cache.lengths.tolist() == [90, 96]
    with pytest.raises(ValueError, match="row 1 holds 96 of 96"):
        forward(model, prompt(1, 2), cache)
    forward(model, prompt(1, 2), cache, attention_mask=~active)
    assert cache.lengths.tolist() == [91, 96]


def test_after_a_capture_the_host_trusts_nothing_it_knew(monkeypatch):
    """A captured graph is replayed behind the host's back: a later chunk must ask the device whether the cache is empty."""
    model = converted()
    cache, reference = torch_witcert.CertifiedCache(model, 96), torch_witcert.CertifiedCache(model, 96)
    monkeypatch.setattr(step, "may_synchronize", lambda tensor: False)
    forward(model, prompt(1), cache)  # as if it were captured
    monkeypatch.undo()
    cache.reset()
    for seed in range(70):
        for each in (cache, reference):
            forward(model, prompt(1, seed=seed), each)
    cache.state.empty = True  # what the host would believe if these steps had been replays
    assert torch.equal(forward(model, prompt(5), cache), forward(model, prompt(5), reference))
    with pytest.raises(ValueError, match="row 0 holds 75 of 96 tokens and cannot take 30 more"):
        forward(model, prompt(30), cache)
    assert cache.state.longest is None


def test_overflow_in_a_compiled_step_marks_the_row():
    torch._dynamo.reset()
    model = converted()
    cache = torch_witcert.CertifiedCache(model, 96, 2)
    ids, mask = left_padded([prompt(96), prompt(80)])
    forward(model, ids, cache, attention_mask=mask)
    full_row = row_contents(cache, 0)
    compiled = torch.compile(lambda token: forward(model, token, cache), backend="aot_eager", fullgraph=True)
    compiled(prompt(1, 2))
    assert cache.lengths.tolist() == [96, 81]
    found = torch_witcert.certificates(cache)
    assert found.tv[:, 0].isinf().all()
    assert found.output[:, 0].isinf().all()
    assert (found.flags[:, 0] & Flag.OVERFLOW != 0).all()
    assert found.tv[:, 1].isfinite().all()
    for tensor, old in zip(row_contents(cache, 0), full_row, strict=True):
        assert torch.equal(tensor, old)
    with pytest.raises(CacheOverflowError, match="row of the cache was full"):
        torch_witcert.telemetry(cache)
    assert torch_witcert.telemetry(cache).total("reads") == 2 * 2 * 4


# --- a forward that fails --------------------------------------------------------------------------------------------


def fail_once(model, layer: int):
    def hook(*_):
        handle.remove()
        raise RuntimeError("no memory left")

    handle = model.model.layers[layer].mlp.register_forward_hook(hook)


@pytest.mark.parametrize("new_tokens", [1, 16])
def test_a_failed_forward_is_as_if_it_had_not_been(new_tokens):
    model = converted(layers=3)
    cache, undisturbed = filled(model, 70, 128), filled(model, 70, 128)
    fail_once(model, 1)
    with pytest.raises(RuntimeError, match="no memory left"):
        forward(model, prompt(new_tokens, seed=8), cache)
    assert int(cache.lengths) == int(cache.get_seq_length()) == 70
    for seed in range(3):
        expected = forward(model, prompt(new_tokens, seed=seed), undisturbed)
        warned = nullcontext() if seed else pytest.warns(match=f"Its {new_tokens} columns are not in the cache")
        with warned:
            assert torch.equal(forward(model, prompt(new_tokens, seed=seed), cache), expected)
    assert torch.equal(torch_witcert.certificates(cache).tv, torch_witcert.certificates(undisturbed).tv)


def test_a_model_that_lost_its_last_layers_is_told():
    """Such a forward ends as quietly as a complete one, but its tokens never become part of the cache."""
    model = converted(layers=3)
    cache = filled(model, 70, 128)
    model.model.layers = model.model.layers[:2]
    forward(model, prompt(1), cache)
    with pytest.warns(match="did not reach the last of the CertifiedCache's 3 layers: .* fewer layers"):
        forward(model, prompt(1), cache)
    assert int(cache.lengths) == 70


def test_a_failed_long_chunk_leaves_a_cache_that_says_so():
    model = converted(layers=3)
    cache = filled(model, 70, 128)
    fail_once(model, 1)
    with pytest.raises(RuntimeError, match="no memory left"):
        forward(model, prompt(40), cache)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed half-way.*reset"):
            forward(model, prompt(1), cache)
    cache.reset()
    assert torch.equal(forward(model, prompt(70), cache), forward(model, prompt(70), filled_empty(model)))


def filled_empty(model):
    return torch_witcert.CertifiedCache(model, 128)


def test_a_failed_prefill_can_be_repeated():
    model = converted()
    cache = torch_witcert.CertifiedCache(model, 128)
    fail_once(model, 0)
    with pytest.raises(RuntimeError, match="no memory left"):
        forward(model, prompt(70), cache)
    assert torch.equal(forward(model, prompt(70), cache), forward(model, prompt(70), filled_empty(model)))
    assert int(cache.lengths) == 70


# --- refusals that leave the cache as it was -----------------------------------------------------------------------


def test_foreign_caches():
    model, ids = converted(), prompt(20)
    for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=32)):
        with pytest.raises(ValueError, match=f"{type(cache).__name__}.*CertifiedCache.*use_cache=False"):
            forward(model, ids, cache)
    with pytest.raises(ValueError, match="DynamicCache.*use_cache=False"), torch.no_grad():
        model(ids)  # use_cache defaults to True, and then Hugging Face makes a cache of its own


def test_foreign_cache_read_dense_where_the_recipe_allows_it():
    recipe = torch_witcert.CertifiedInt8Config(page_size=16, foreign_cache="dense")
    model, dense, ids = converted(recipe=recipe), tiny_model(), prompt(40)
    for cache_of in (DynamicCache, lambda: StaticCache(model.config, max_cache_len=64)):
        ours, theirs = cache_of(), cache_of()
        for piece in (ids[:, :30], ids[:, 30:31], ids[:, 31:]):
            assert torch.equal(forward(model, piece, ours), forward(dense, piece, theirs))
    assert torch.equal(
        model.generate(ids, max_new_tokens=5, do_sample=False, **{CACHE_ARGUMENT: DynamicCache()}),
        dense.generate(ids, max_new_tokens=5, do_sample=False),
    )


def refuse(model, cache, match, ids=None, **options):
    before = contents(cache)
    with pytest.raises(ValueError, match=match), torch.set_grad_enabled(options.pop("grad", False)):
        model(**{"input_ids": prompt(1) if ids is None else ids, CACHE_ARGUMENT: cache, "use_cache": True, **options})
    assert_unchanged(cache, before)


@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("qwen2", {"window": 40}), ("mistral", {"window": 40})])
@pytest.mark.parametrize("new_tokens", [1, 5])
def test_a_mask_that_hides_cached_tokens_is_refused(family, options, new_tokens):
    model = converted(family, **options)
    cache = torch_witcert.CertifiedCache(model, 128, 2)
    held = torch.ones(2, 70, dtype=torch.long)
    held[1, :10] = 0
    forward(model, prompt(70, 2), cache, attention_mask=held)
    mask = torch.nn.functional.pad(held, (0, new_tokens), value=1)
    hiding = mask.clone()
    hiding[1, 30:33] = 0
    refuse(
        model,
        cache,
        "attention_mask marks 57 of the 70 cached columns of row 1 as real, but the CertifiedCache holds 60 tokens",
        ids=prompt(new_tokens, 2),
        attention_mask=hiding,
    )
    # More than a row holds is no lie about what is read: a released row keeps its columns.
    forward(model, prompt(new_tokens, 2), cache, attention_mask=torch.ones_like(mask))
    assert cache.lengths.tolist() == [70 + new_tokens, 60 + new_tokens]


def test_wrong_use_is_refused_and_the_cache_unchanged():
    model = converted()
    cache = filled(model)
    expected_next = filled(model)
    refuse(model, cache, "gradients.*torch.no_grad", grad=True)
    refuse(model, cache, "batch_size 1, got 2", ids=prompt(1, 2))
    refuse(model, cache, "output_attentions", output_attentions=True)
    refuse(model, cache, "is_causal=False", is_causal=False)
    refuse(
        model,
        cache,
        r"bool \[1, 1, 1, 2\], got torch.float32 \[1, 1, 2, 72\]",
        ids=prompt(2),
        attention_mask=torch.zeros(1, 1, 2, 72),
    )
    refuse(
        model,
        cache,
        "cover the 70 cached columns and the 2 new ones, got width 2",
        ids=prompt(2),
        attention_mask=torch.ones(1, 2),
    )
    refuse(model, cache, "cover the 70 cached columns and the 1 new ones, got width 1", attention_mask=torch.ones(1, 1))
    refuse(converted(), cache, "made for another model")
    refuse(tiny_model(), cache, "not converted")
    model.double()
    refuse(model, cache, "dtype torch.float32, got torch.float64")
    model.float()
    assert torch.equal(forward(model, prompt(1), cache), forward(model, prompt(1), expected_next))


def test_changed_attention_implementation_is_noticed():
    model = converted()
    cache = filled(model)
    model.set_attn_implementation("sdpa")
    refuse(model, cache, "implementation was changed to 'sdpa'.*set_attn_implementation\\('torch_witcert'\\)")
    model.set_attn_implementation("torch_witcert")
    assert forward(model, prompt(1), cache).isfinite().all()


def test_dropout_in_training():
    model = converted(attention_dropout=0.1)
    cache = filled(model)
    model.train()
    refuse(model, cache, "dropout 0.1")
    model.eval()
    assert forward(model, prompt(1), cache).isfinite().all()


def test_a_bias_on_scores_is_refused():
    model = converted()
    refuse(model, filled(model), "position_bias", position_bias=torch.ones(4))


def test_old_cache_after_reconversion():
    model = converted()
    cache = filled(model)
    torch_witcert.convert(torch_witcert.restore(model), RECIPE)
    refuse(model, cache, "made for another model, or for this one before it was converted")


@pytest.mark.parametrize(
    "act",
    [
        lambda cache: cache.layers[0].offload(),
        lambda cache: cache.layers[0].prefetch(),
    ],
)
def test_later_features_say_so(act):
    cache = filled(converted())
    before = contents(cache)
    with pytest.raises(NotImplementedError, match="CertifiedCache.*later version"):
        act(cache)
    assert_unchanged(cache, before)
    assert cache.is_croppable
    assert cache.is_compileable


def test_certificates_and_telemetry_say_what_they_take():
    model = converted()
    with pytest.raises(TypeError, match="LlamaForCausalLM.*last_cache"):
        torch_witcert.certificates(model)
    with pytest.raises(ValueError, match="has not generated"):
        torch_witcert.telemetry(model)
    with pytest.raises(ValueError, match=r"call torch_witcert.convert\(model\) on the plain model"):
        torch_witcert.telemetry(tiny_model())


def test_telemetry_accumulates_until_it_is_reset():
    model = converted()
    cache = filled(model)
    for _ in range(2):
        forward(model, prompt(1), cache)
    assert torch_witcert.telemetry(cache).total("reads") == 2 * 2 * 4
    assert torch_witcert.telemetry(cache, reset=True).total("prefill_tokens") == 140
    assert torch_witcert.telemetry(cache).total("reads") == 0
    cache.reset()
    forward(model, prompt(70), cache)
    forward(model, prompt(1), cache)
    assert torch_witcert.telemetry(cache).total("code_tokens") == 64 * 2 * 4
