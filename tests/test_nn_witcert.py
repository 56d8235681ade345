"""Models converted with `WitCertConfig` and with the other formats: soundness, seeds, outlier pairs, the risk budget."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from nn_models import (
    converted,
    forward,
    greedy,
    left_padded,
    prompt,
    recorded_attention,
    stored_codes,
    tiny_model,
)
from test_nn_compile import CountingBackend, assert_same_state, compiled_step
from test_nn_soundness import ExactHistory, distances, make_hard

import torch_witcert
from torch_witcert import CertifiedInt8Config, WitCertConfig
from torch_witcert.evaluation.memory import token_bytes
from torch_witcert.ops.dither import SEEDS, page_key
from torch_witcert.ops.formats import KeyFormat, StoreFormat, ValueFormat
from torch_witcert.ops.storage import POOL_PARTS, Note
from torch_witcert.policy.gate import Flag
from torch_witcert.policy.outliers import choose_outlier_channels

#: Indices of pairs for two layers with two KV heads.
INDICES = (((0, 7, 9, 30), (1, 2, 3, 4)), ((5, 6, 7, 8), (9, 10, 11, 31)))
PAPER = WitCertConfig(page_size=16)
FIXED = replace(PAPER, outlier_indices=INDICES)
RECIPES = {
    "serving layout": PAPER,
    "body of the paper": replace(PAPER, key_scaling="symmetric", radii="probabilistic"),
    "asymmetric, one tile": replace(PAPER, key_scaling="asymmetric", dither="tile", horizon=None),
    "keys alone": replace(PAPER, dither_values=False, value_element="int4", outlier_pairs=0),
    "six bits": replace(PAPER, key_element="int6", outlier_pairs=8, key_scaling="asymmetric"),
    "fp8": CertifiedInt8Config(page_size=16, key_element="fp8", key_scaling="symmetric", value_element="fp8"),
    "four bits": CertifiedInt8Config(page_size=16, key_element="int4", value_element="int4", outlier_pairs=2),
    "exact values": CertifiedInt8Config(page_size=16, key_scaling="token", value_element="exact", radii="step"),
}


def filled(model, tokens: int = 70, max_length: int = 128, rows: int = 1, **options):
    cache = torch_witcert.CertifiedCache(model, max_length, rows, **options)
    forward(model, prompt(tokens, rows), cache)
    return cache


# --- every recipe ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_every_bound_holds(name):
    """All reads of all layers against float64, with dither rebuilt from the page keys; no tolerance."""
    model = converted(recipe=RECIPES[name])
    make_hard(model)
    ids, mask = left_padded([prompt(90, seed=1), prompt(70, seed=2)])
    cache = torch_witcert.CertifiedCache(model, 160, 2)
    history, so_far = ExactHistory(), mask
    checked = tv_total = 0
    steps = [ids, prompt(20, 2, seed=3), *(prompt(1, 2, seed=seed) for seed in range(10, 20))]
    for number, tokens in enumerate(steps):
        so_far = mask if number == 0 else torch.cat([so_far, torch.ones_like(tokens)], 1)
        calls = recorded_attention(cache, partial(forward, model, tokens, cache, attention_mask=so_far))
        found = torch_witcert.certificates(cache)
        for index, call in enumerate(calls):
            for row in range(2):
                history.append(call, row)
                if number == 0:
                    continue
                tv, output = distances(call, history, row)
                assert (tv <= found.tv[index, row].double()).all(), (number, index, row)
                assert (output <= found.output[index, row].double()).all(), (number, index, row)
                checked += len(tv)
                tv_total += float(tv.sum())
    assert checked == (len(steps) - 1) * 2 * 2 * 4
    assert tv_total / checked > 1e-3, "the case is too easy to test anything"
    assert found.tv.isfinite().all()


@pytest.mark.parametrize("name", RECIPES)
def test_generate(name):
    model = converted(recipe=RECIPES[name])
    ids, mask = left_padded([prompt(60, seed=3), prompt(45, seed=4)])
    tokens = greedy(model, ids, 20, attention_mask=mask)
    assert tokens.shape == (2, 20)
    counted = torch_witcert.telemetry(model)
    assert counted.code_share > 0.5
    assert counted.total("no_guarantee") == 0
    assert torch.equal(greedy(model, ids, 20, attention_mask=mask), tokens), "the second call reuses the cache"
    assert torch_witcert.report(model).layers[0].config == RECIPES[name]


@pytest.mark.parametrize("name", RECIPES)
def test_token_by_token_from_an_empty_cache(name):
    """Without a prefill every forward is a certified read, at first of the fresh token alone."""
    model = converted(recipe=RECIPES[name], layers=1)
    cache = torch_witcert.CertifiedCache(model, 48)
    for length in range(40):
        forward(model, prompt(1, seed=length), cache)
        assert torch_witcert.certificates(cache).tv.isfinite().all(), length
    assert torch_witcert.telemetry(cache).total("code_tokens") == 4 * (16 * 16 + 32 * 8)
    assert cache.state.spent.tolist() == ([40] if RECIPES[name].budget else [])


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("page_size", [16, 64])
def test_bytes_are_those_that_torch_allocated(name, page_size):
    model = converted(dtype=torch.bfloat16, recipe=replace(RECIPES[name], page_size=page_size))
    small, large = (torch_witcert.CertifiedCache(model, pages * page_size, 3) for pages in (2, 5))
    assert large.nbytes() - small.nbytes() == 3 * 3 * page_size * small.bytes_per_token()
    pages = sum(getattr(layer.store, part).untyped_storage().nbytes() for layer in small.layers for part in POOL_PARTS)
    table = small.layers[0].group.page_table.untyped_storage().nbytes()
    assert pages + table == 2 * 3 * page_size * small.bytes_per_token()
    assert torch_witcert.CertifiedCache.capacity(model, large.nbytes(), 3) == large.capacity_per_row
    assert torch_witcert.CertifiedCache.capacity(model, large.nbytes() - 1, 3) == large.capacity_per_row - page_size


@pytest.mark.parametrize("name", ["serving layout", "asymmetric, one tile", "four bits"])
def test_compiled_decode_is_one_graph(name):
    model = converted(recipe=RECIPES[name], heads=2, kv_heads=1)
    backend = CountingBackend("aot_eager")
    step = compiled_step(model, backend)
    ours, eager = (filled(model, 40) for _ in range(2))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in range(40, 80):
            token, position = prompt(1, seed=length), torch.tensor([[length]])
            assert torch.equal(step(token, position, ours), forward(model, token, eager, position_ids=position))
    assert backend.graphs == 1
    assert_same_state(ours, eager)
    assert ours.state.spent.tolist() == ([40] if RECIPES[name].budget else [])


def test_what_a_token_costs_is_what_the_papers_say():
    """Bytes a token and side at D = 128: 136 with groups of 32; 128 + 1 + 16 with a scale for 256 tokens and 4 exact pairs."""
    grouped = token_bytes(StoreFormat(KeyFormat(scaling="token", dither="stream")), 16, 128, torch.bfloat16)
    assert grouped.key == 128 + 4 * 2
    per_page = token_bytes(StoreFormat(KeyFormat(scaling="symmetric", outlier_pairs=4)), 256, 128, torch.bfloat16)
    assert per_page.key == 128 + 2 * 128 / 256 + 8 * 2 == 145
    assert per_page.value == 128 + 2
    assert per_page.shared == 4 * Note.COUNT / 256, "five notes, no key of a dither"
    assert grouped.shared == (4 * Note.COUNT + 8) / 16
    asymmetric = token_bytes(StoreFormat(), 64, 128, torch.bfloat16)
    assert (asymmetric.key, asymmetric.value) == (128 + 8, 130)
    packed = token_bytes(StoreFormat(KeyFormat("int6"), ValueFormat("int4")), 128, 128, torch.bfloat16)
    assert (packed.key, packed.value) == (96 + 4, 64 + 2 * 2 * 8)


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_token_costs_is_what_a_cache_takes(name):
    model = converted(dtype=torch.bfloat16, recipe=RECIPES[name])
    cache = torch_witcert.CertifiedCache(model, 32)
    layers_and_heads = 2 * 2
    each = token_bytes(RECIPES[name].store_format, 16, 64, torch.bfloat16)
    assert cache.bytes_per_token() == layers_and_heads * sum(each) + 4 / 16


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_codes_depend_on_seed_and_tokens_alone():
    """Another place in the batch, another batch, after reset, in a new cache: the same bits; another seed: others."""
    model, ids = converted(recipe=FIXED), prompt(70, seed=5)
    others = prompt(70, 2, seed=6)

    def codes(batch: torch.Tensor, row: int, cache=None, **options) -> list[torch.Tensor]:
        cache = cache or torch_witcert.CertifiedCache(model, 96, batch.shape[0], **options)
        forward(model, batch, cache)
        return stored_codes(cache, row)

    def equal(one, other) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    # Projections outside the operators need not have the same bits in another batch: the rows are the same three throughout.
    first = codes(torch.cat([ids, others]), 0, seeds=[7, 1, 2])
    assert equal(first, codes(torch.cat([others, ids]), 2, seeds=[3, 4, 7]))
    cache = torch_witcert.CertifiedCache(model, 96, 3, seeds=7)
    codes(torch.cat([others, ids]), 0, cache)
    cache.reset()
    assert equal(first, codes(torch.cat([ids, others]), 0, cache))
    other_seed = codes(torch.cat([ids, others]), 0, seeds=[8, 1, 2])
    assert not equal(first, other_seed)
    moved = [float((a != b).float().mean()) for a, b in zip(first, other_seed, strict=True) if a.dtype == torch.int8]
    assert len(moved) == 4, "codes of keys and values of two layers"
    assert all(0.2 < share < 0.8 for share in moved), "a fresh draw moves about half of the codes"


def test_seeds_of_rows():
    model = converted(recipe=replace(PAPER, seed=11))
    assert torch_witcert.CertifiedCache(model, 32, 3).state.seeds.tolist() == [11] * 3
    assert torch_witcert.CertifiedCache(model, 32, 3, seeds=SEEDS - 1).state.seeds.tolist() == [SEEDS - 1] * 3
    cache = filled(model, 40, rows=2, seeds=[5, 2**31])
    keys = cache.layers[0].store.page_keys[cache.layers[0].group.page_table.long()][:, :2, 0]
    assert keys.tolist() == [[int(page_key(torch.tensor(seed), page)) for page in (0, 1)] for seed in (5, 2**31)]


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (-1, r"seeds must be an int in \[0, 2\^32\), got -1"),
        (2**32, r"got 4294967296"),
        ([0, True], "got True"),
        ([0, 1.0], "got 1.0"),
        ([0], "seeds must be an int or 2 of them, one for each row, got 1"),
    ],
)
def test_wrong_seeds(seeds, message):
    with pytest.raises(ValueError, match=message):
        torch_witcert.CertifiedCache(converted(recipe=PAPER), 32, 2, seeds=seeds)


def test_seeds_need_dither():
    with pytest.raises(ValueError, match="seeds are of a recipe with dither.*CertifiedInt8Config has none"):
        torch_witcert.CertifiedCache(converted(), 32, 2, seeds=3)


# --- outlier pairs ---------------------------------------------------------------------------------------------------


def test_pairs_are_chosen_from_the_first_prompt_and_then_fixed():
    model = converted(recipe=PAPER)
    ids, mask = left_padded([prompt(60, seed=1), prompt(50, seed=2)])
    cache = torch_witcert.CertifiedCache(model, 96, 2)
    assert cache.outlier_indices() == (((0, 1, 2, 3),) * 2,) * 2, "stand-ins"
    addresses = [layer.outlier_channels.data_ptr() for layer in cache.layers]
    calls = recorded_attention(cache, partial(forward, model, ids, cache, attention_mask=mask))
    chosen = [layer.outlier_channels.clone() for layer in cache.layers]
    for call, channels in zip(calls, chosen, strict=True):
        assert torch.equal(channels, choose_outlier_channels(call.k, mask.bool(), 4))
    assert not torch.equal(chosen[0], chosen[1])
    cache.reset()
    forward(model, prompt(60, 2, seed=9), cache)
    assert all(torch.equal(layer.outlier_channels, old) for layer, old in zip(cache.layers, chosen, strict=True))
    assert [layer.outlier_channels.data_ptr() for layer in cache.layers] == addresses
    again = replace(PAPER, outlier_indices=cache.outlier_indices())
    torch_witcert.convert(torch_witcert.restore(model), again)
    fresh = torch_witcert.CertifiedCache(model, 96, 2)
    assert fresh.outlier_indices() == cache.outlier_indices() == again.outlier_indices
    forward(model, prompt(60, 2, seed=9), fresh)
    for row in range(2):
        for mine, other in zip(stored_codes(fresh, row), stored_codes(cache, row), strict=True):
            assert torch.equal(mine, other)


def test_a_failed_first_forward_does_not_decide():
    model = converted(recipe=PAPER)
    cache, undisturbed = (torch_witcert.CertifiedCache(model, 96) for _ in range(2))

    def fail(*_):
        handle.remove()
        raise RuntimeError("no memory left")

    handle = model.model.layers[0].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no memory left"):
        forward(model, prompt(60, seed=1), cache)
    for each in (cache, undisturbed):
        forward(model, prompt(60, seed=2), each)
    assert cache.outlier_indices() == undisturbed.outlier_indices()


def test_a_compiled_first_forward_keeps_the_stand_ins():
    model = converted(recipe=PAPER, heads=2, kv_heads=1)
    step = compiled_step(model, "aot_eager")
    cache = torch_witcert.CertifiedCache(model, 96)
    step(prompt(1), torch.tensor([[0]]), cache)
    cache.reset()
    forward(model, prompt(60), cache)
    assert cache.outlier_indices() == (((0, 1, 2, 3),),) * 2


def test_outlier_channels_are_exact_and_help():
    """A channel a hundred times the others: with its pair kept exact, the errors of the keys are those without it."""
    errors = []
    for recipe in (PAPER, replace(PAPER, outlier_pairs=0)):
        model = converted(recipe=recipe, layers=1)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight[5].mul_(100)
        cache = filled(model)
        if recipe.outlier_pairs:
            assert 5 in cache.outlier_indices()[0][0]
        errors.append(float(cache.layers[0].store.page_notes[:4, 0, Note.KEY_ERROR].max()))
    assert errors[0] < errors[1] / 10


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (INDICES[:1], "outlier_indices has 1 layers, but 2 attention layers are certified"),
        ((INDICES[0], INDICES[1][:1]), r"outlier_indices\[1\] has 1 KV heads, the model has 2"),
        ((INDICES[0], (INDICES[1][0], (0, 1, 2, 32))), r"outlier pairs of KV head 1 must be .* \[0, 32\)"),
    ],
)
def test_indices_that_do_not_fit_the_model(indices, message):
    model = tiny_model()
    with pytest.raises(ValueError, match=message):
        torch_witcert.convert(model, replace(PAPER, outlier_indices=indices))
    with pytest.raises(ValueError, match=message):
        torch_witcert.CertifiedCache.capacity(model, 10**6, 1, replace(PAPER, outlier_indices=indices))
    torch_witcert.convert(model, PAPER)


# --- the risk budget -------------------------------------------------------------------------------------------------


def bounds_by_step(recipe, steps: int, chunk: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """TV bounds and flags [steps, L, H] of forwards of `chunk` tokens, after a prompt that spends nothing."""
    model = converted(recipe=recipe)
    cache = filled(model)
    assert cache.state.spent.tolist() == [0]
    found = []
    for seed in range(steps):
        forward(model, prompt(chunk, seed=seed), cache)
        found.append([part[:, 0].clone() for part in (torch_witcert.certificates(cache)[i] for i in (0, 4))])
    assert cache.state.spent.tolist() == [steps * chunk]
    tv, flags = (torch.stack(parts) for parts in zip(*found, strict=True))
    return tv, flags


def test_after_the_horizon_the_probabilistic_recipe_has_no_guarantee():
    tv, flags = bounds_by_step(replace(PAPER, radii="probabilistic", horizon=5), 8)
    assert tv[:5].isfinite().all()
    assert not (flags[:5] & Flag.NO_GUARANTEE).any()
    assert tv[5:].isinf().all()
    assert (flags[5:] & Flag.NO_GUARANTEE != 0).all()


def test_after_the_horizon_the_deterministic_radii_are_left():
    """Bounds are those of the deterministic radii, bit for bit, and before they were smaller."""
    wide = {"head_dim": 128}  # where the probabilistic radius is the smaller one
    found = {}
    for radii in ("step+probabilistic", "step"):
        model = converted(recipe=replace(FIXED, radii=radii, horizon=5), **wide)
        cache = filled(model)
        found[radii] = []
        for seed in range(8):
            forward(model, prompt(1, seed=seed), cache)
            found[radii].append(torch_witcert.certificates(cache).tv.clone())
    both, deterministic = (torch.stack(found[radii]) for radii in found)
    assert (both[:5] < 0.7 * deterministic[:5]).all()
    assert torch.equal(both[5:], deterministic[5:])


def test_a_chunk_spends_its_tokens():
    tv, _ = bounds_by_step(replace(PAPER, radii="probabilistic", horizon=8), 3, chunk=4)
    assert tv[:2].isfinite().all()
    assert tv[2].isinf().all()


def test_a_budget_that_never_ends_grows_slowly():
    tv, _ = bounds_by_step(replace(PAPER, radii="probabilistic", horizon=None), 40)
    assert tv.isfinite().all()


def test_padding_idle_rows_and_failures_spend_nothing():
    model = converted(recipe=PAPER)
    cache = filled(model, rows=2)
    active = torch.tensor([True, False])[:, None, None, None]
    forward(model, prompt(1, 2), cache, attention_mask=active, position_ids=torch.tensor([[70]] * 2))
    assert cache.state.spent.tolist() == [1, 0]
    valid = torch.ones(2, 74, dtype=torch.long)
    valid[0, 71:73] = 0
    forward(model, prompt(3, 2), cache, attention_mask=valid)
    assert cache.state.spent.tolist() == [2, 3]

    def fail(*_):
        handle.remove()
        raise RuntimeError("no memory left")

    handle = model.model.layers[0].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no memory left"):
        forward(model, prompt(1, 2), cache)
    assert cache.state.spent.tolist() == [2, 3]
    cache.reset()
    assert cache.state.spent.tolist() == [0, 0]


def test_the_budget_is_shared_by_layers_and_heads():
    """ln(2 / delta) of the first query token: delta_req / (L H horizon)."""
    model = converted(recipe=replace(PAPER, delta_req=0.02, horizon=100), layers=3)
    cache = filled(model)
    risks = []
    original = torch.ops.torch_witcert.certified_attention.default

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            if function is original:
                risks.append(arguments[7])
            return function(*arguments, **(options or {}))

    with Watch():
        forward(model, prompt(2), cache)
    assert len(risks) == 3
    expected = torch.full((1, 2), 2 * 3 * 4 * 100 / 0.02, dtype=torch.float64).log()
    for risk in risks:
        torch.testing.assert_close(risk.double(), expected, rtol=1e-6, atol=0)


# --- recipes as objects ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_models_and_recipes_can_be_copied(make_copy):
    assert make_copy(FIXED) == FIXED
    assert hash(make_copy(FIXED)) == hash(FIXED)
    model = converted(recipe=FIXED)
    ids = prompt(60)
    expected = greedy(model, ids, 10)
    twin = make_copy(model)
    assert torch_witcert.report(twin).layers[0].config == FIXED
    assert torch.equal(greedy(twin, ids, 10), expected)


def test_quantize_():
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_model()
    quantization.quantize_(model, FIXED, filter_fn=lambda module, name: name.endswith("self_attn"))
    assert [layer.config for layer in torch_witcert.report(model).layers] == [FIXED] * 2
    twin = converted(recipe=FIXED)
    caches = [filled(each) for each in (model, twin)]
    for each, cache in zip((model, twin), caches, strict=True):
        forward(each, prompt(1), cache)
    assert torch.equal(*(torch_witcert.certificates(cache).tv for cache in caches))


def test_key_scaling_that_the_head_dim_does_not_allow():
    model = tiny_model(head_dim=80)
    with pytest.raises(ValueError, match="WitCertConfig: key scaling 'token' needs .* multiple of 32, got 80"):
        torch_witcert.convert(model, PAPER)
    torch_witcert.convert(model, replace(PAPER, key_scaling="symmetric"))


def test_values_of_another_width_are_refused():
    model = converted()
    cache = torch_witcert.CertifiedCache(model, 32)
    keys = torch.zeros(1, 2, 1, 64)
    with pytest.raises(ValueError, match="head dim 64, got 128"):
        cache.layers[0].update(keys, torch.zeros(1, 2, 1, 128))
