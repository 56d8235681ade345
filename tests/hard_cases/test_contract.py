"""Hard cases of the cache contract: beams, crops, reset, memory, copies, shared prefixes.

Each test follows its case's own recipe; the numbers H15 to H20 are the cases'. Where a case speaks of a residual or a
block of another size, ours are the exact tail (up to two pages) and the page.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from nn_models import (
    RECIPE,
    Histories,
    converted,
    exact_tail,
    forward,
    greedy,
    prompt,
    recorded_attention,
    stored_codes,
    tiny_model,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.generation.configuration_utils import GenerationMode

import torch_witcert
from torch_witcert import CertifiedCache, CertifiedInt8Config, WitCertConfig
from torch_witcert.evaluation.forward import next_logits
from torch_witcert.nn.compatibility import CACHE_ARGUMENT
from torch_witcert.testing.oracle import stored_tokens

SIZE = RECIPE.page_size
#: Outlier pairs of the recipe's own, so that no prompt has a say in how another one is stored.
WITCERT = WitCertConfig(page_size=SIZE, outlier_pairs=1, outlier_indices=(((3,), (7,)),) * 2)
RECIPES = {"int8": RECIPE, "witcert": WITCERT}


def clones(tensors) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def assert_same_bits(found, expected) -> None:
    assert len(found) == len(expected) > 0
    for part, other in zip(found, expected, strict=True):
        assert torch.equal(part, other)


def row_bits(cache: CertifiedCache, row: int) -> list[torch.Tensor]:
    """Codes, scales, zeros, notes, keys of the dither and exact tokens of a row."""
    return clones(stored_codes(cache, row) + exact_tail(cache, row))


def dequantized(cache: CertifiedCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 K and V [B, Hkv, S, D] that a layer has of rows of the same length S: codes dequantized, the tail as it
    is."""
    layer, lengths = cache.layers[layer], cache.lengths
    nothing = torch.empty(cache.batch_size, layer.shape.num_kv_heads, 0, layer.shape.head_dim)
    sources = layer.group.source_map(lengths, layer.shape.num_kv_heads)
    state = (torch.empty(cache.batch_size, 0), lengths, layer.group.page_table, sources)
    options = (layer.shape.store_format, layer.outlier_channels, layer.index)
    tokens = stored_tokens(layer.store, nothing, nothing, *state, *options)
    length = int(lengths[0])
    assert (lengths == length).all()
    return tokens.k[:, :, :length], tokens.v[:, :, :length]


# --- H15 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_h15_rows_move_as_in_a_plain_cache(recipe):
    """Two reorders without an update between, an update, a repeat and a selection, beside a DynamicCache of the same
    values.

    That codes are moved and not quantized again is the last check: each row has the bits of a lone cache, and so has
    its next read. There is no host backup whose rows would have to move.
    """
    model = converted(recipe=RECIPES[recipe])
    cache, plain = CertifiedCache(model, 96, 6), DynamicCache()
    histories = Histories(model, cache)
    histories.forward(prompt(70, 6))
    for layer in range(2):
        plain.update(*dequantized(cache, layer), layer)

    def moved(name: str, argument, index: list[int]) -> None:
        before = [row_bits(cache, row) for row in range(cache.batch_size)]
        for each in (cache, plain):
            getattr(each, name)(argument)
        histories.take(index)
        for row, source in enumerate(index):
            assert_same_bits(row_bits(cache, row), before[source])
        same_as_plain()

    def same_as_plain() -> None:
        for layer in range(2):
            assert_same_bits(dequantized(cache, layer), (plain.layers[layer].keys, plain.layers[layer].values))

    beams = [1, 0, 2, 5, 5, 3]
    for _ in range(2):
        moved("reorder_cache", torch.tensor(beams), beams)
    histories.forward(prompt(1, 6, seed=2))
    for layer in range(2):
        newest = [torch.cat([row[-1][layer][part] for row in histories.rows]).double() for part in (1, 2)]
        plain.update(*newest, layer)
    same_as_plain()
    moved("batch_repeat_interleave", 3, [row for row in range(6) for _ in range(3)])
    moved("batch_select_indices", torch.tensor([0, 4, 7]), [0, 4, 7])
    histories.forward(prompt(1, 3, seed=3))
    for row in range(3):
        histories.check(row)


def test_h15_beams_have_the_scores_of_their_own_histories():
    """num_beams=4, num_return_sequences=4: each beam's score is what its tokens get one after the other in a lone
    cache.

    That the beams are the dense model's is shown in test_nn_generate_modes, with prompts whose gaps are wide enough.
    """
    model, ids = converted(), prompt(70)
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    cache, orders = CertifiedCache(model, 96, 4), []
    cache.reorder_cache = lambda index: (orders.append(index.tolist()), type(cache).reorder_cache(cache, index))
    out = model.generate(ids, output_scores=True, return_dict_in_generate=True, **options, **{CACHE_ARGUMENT: cache})
    assert sum(sorted(set(order)) != list(range(4)) for order in orders) > 4, "beams are dropped and copied"
    for tokens, score in zip(out.sequences[:, 70:], out.sequences_scores, strict=True):
        alone = CertifiedCache(model, 96)
        pieces = [ids, *tokens[None].split(1, 1)[:-1]]
        logits = torch.cat([forward(model, piece, alone)[:, -1] for piece in pieces])
        expected = logits.log_softmax(-1).gather(1, tokens[:, None]).sum() / len(tokens)
        # The model's own matrix products differ in their last bits between a batch and a lone row, and so may a code.
        torch.testing.assert_close(score, expected, rtol=0, atol=1e-4)


def test_h15_contrastive_search_is_refused():
    """It copies the cache for every candidate. transformers 5.24 keeps the mode outside the package, for
    `trust_remote_code` to load; what is asked before it starts is the same for all modes, and names those that there
    are."""
    model = converted()
    with pytest.raises(
        NotImplementedError, match="contrastive_search is not supported with a CertifiedCache; supported"
    ):
        model._prepare_cache_for_generation(model.generation_config, {}, GenerationMode.CONTRASTIVE_SEARCH, 1, 96)


# --- H16 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("removed", "allowed"), [(1, True), (5, True), (64, True), (100, False), (199, False), (200, True), (250, False)]
)
def test_h16_crop_and_append_again(removed, allowed, recipe):
    """T = 200 in pages of 64: 192 tokens as codes, exact tail from token 128 on. A crop into a code page works as far
    as the tail reaches back, or to nothing; deeper ones are refused by the lengths that are allowed. After the same
    tokens have come again in the same chunks everything is bit-equal to never having cropped, but the budget: what was
    spent stays spent.
    """
    config = WitCertConfig(outlier_pairs=0) if recipe == "witcert" else CertifiedInt8Config()
    model, ids = converted(recipe=config), prompt(200)
    cache, kept = CertifiedCache(model, 256), max(0, 200 - removed)
    pieces = [piece for piece in (ids[:, :kept], ids[:, kept:]) if piece.numel()]
    logits = [forward(model, piece, cache) for piece in pieces]
    before = clones(cache.tensors())
    if not allowed:
        match = f"=-{removed} is not possible for row 0, which holds 200 tokens.*cropped to 0.*from 128"
        with pytest.raises(ValueError, match=match):
            cache.crop(-removed)
        assert_same_bits(cache.tensors(), before)
        assert int(cache.get_seq_length()) == 200
        return
    bits, bounds = row_bits(cache, 0), clones(torch_witcert.certificates(cache))
    cache.crop(-removed)
    assert int(cache.get_seq_length()) == int(cache.lengths) == kept
    assert cache.pages_in_use() == kept // 64
    cache.state.spent.zero_()
    assert torch.equal(forward(model, pieces[-1], cache), logits[-1])
    assert int(cache.get_seq_length()) == 200
    assert_same_bits(torch_witcert.certificates(cache), bounds)
    tail = len(bits) - 4  # K and V of two layers: the tail reaches back less far after a crop
    assert_same_bits(row_bits(cache, 0)[:tail], bits[:tail])
    for part, other in zip(row_bits(cache, 0)[tail:], bits[tail:], strict=True):
        assert torch.equal(part, other[:, other.shape[1] - part.shape[1] :])


def test_h16_a_crop_by_nothing_changes_nothing():
    model = converted(recipe=CertifiedInt8Config())
    cache = CertifiedCache(model, 256)
    forward(model, prompt(200), cache)
    before = clones(cache.tensors())
    cache.crop(0)
    assert_same_bits(cache.tensors(), before)
    assert cache.is_croppable


# --- H17 --------------------------------------------------------------------------------------------------------------


def conversation(model, cache: CertifiedCache) -> list[torch.Tensor]:
    """Prompt B, 10 steps and a second turn: logits, bounds and everything stored."""
    found = []
    for number, count in enumerate((33, *[1] * 10, 17)):
        found.append(forward(model, prompt(count, seed=number), cache))
        found += clones(torch_witcert.certificates(cache))
        assert int(cache.get_seq_length()) == int(cache.lengths) == (33 + number if number < 11 else 60)
    return found + row_bits(cache, 0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_h17_reset_leaves_nothing_of_prompt_a(recipe):
    """Not even a share of the risk budget: with shares that fall from token to token every bound would tell."""
    config = dataclasses.replace(WITCERT, horizon=None) if recipe == "witcert" else RECIPE
    model = converted(recipe=config)
    fresh, used = CertifiedCache(model, 128), CertifiedCache(model, 128)
    forward(model, prompt(90, seed=5), used)
    for seed in range(10):
        forward(model, prompt(1, seed=seed), used)
    used.reset()
    assert int(used.get_seq_length()) == int(used.lengths) == used.pages_in_use() == 0
    assert_same_bits(conversation(model, used), conversation(model, fresh))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_h17_values_come_back_in_the_dtype_of_the_query(dtype):
    model = converted(dtype=dtype)
    cache = CertifiedCache(model, 96)
    for count in (33, 1, 17):
        for call in recorded_attention(cache, lambda count=count: forward(model, prompt(count), cache)):
            assert call.out.dtype == call.q.dtype == dtype


def test_h17_generate_twice_with_other_lengths():
    """The second call's tokens are those of a model that has never generated, whichever call was longer."""
    ids = prompt(33)
    for first, second in ((8, 20), (20, 8)):
        model = converted()
        greedy(model, prompt(90, seed=7), first)
        found = [greedy(model, ids, count) for count in (first, second)]
        assert torch.equal(found[0], greedy(converted(), ids, first))
        assert torch.equal(found[1], greedy(converted(), ids, second))
        assert int(torch_witcert.last_cache(model).lengths) == 33 + second - 1


def test_h17_drafts_on_a_filled_cache_are_refused():
    """transformers 5.24 feeds the whole prompt in the first forward of assisted generation, cached or not: everything
    would be stored twice, and the reported length be wrong."""
    model, ids = converted(), prompt(70)
    cache = CertifiedCache(model, 256)
    tokens = greedy(model, ids, 8, **{CACHE_ARGUMENT: cache})
    longer, before = torch.cat([ids, tokens, prompt(20, seed=3)], 1), clones(cache.tensors())
    with pytest.raises(NotImplementedError, match="prompt lookup.*holds tokens.*once more"):
        greedy(model, longer, 8, prompt_lookup_num_tokens=4, **{CACHE_ARGUMENT: cache})
    assert_same_bits(cache.tensors(), before)
    expected = greedy(converted(), longer, 8)
    assert torch.equal(greedy(model, longer, 8, **{CACHE_ARGUMENT: cache}), expected)
    assert int(cache.get_seq_length()) == int(cache.lengths) == longer.shape[1] + 8 - 1


# --- H18 --------------------------------------------------------------------------------------------------------------


def test_h18_decoded_tokens_become_codes():
    """Prefill of 256, then 160 steps: 10 pages fill after the prompt; the case's 2,000 would show nothing more.

    At every step only the unfinished page is read exact, so the tokens read as codes are known to the last one.
    """
    model, steps = converted(layers=1), 160
    cache = CertifiedCache(model, 256 + steps)
    forward(model, prompt(256), cache)
    for _ in range(steps):
        forward(model, prompt(1), cache)
    counted = torch_witcert.telemetry(cache)
    heads, lengths = model.config.num_attention_heads, range(256, 256 + steps)
    assert counted.total("code_tokens") == heads * sum(length // SIZE * SIZE for length in lengths)
    assert counted.total("tokens") == heads * sum(length + 1 for length in lengths)
    assert cache.pages_in_use() == (256 + steps) // SIZE
    assert exact_tail(cache, 0)[0].shape[1] <= 2 * SIZE == cache.layers[0].store.k_tail.shape[2]


#: Bytes of key, value and page notes of a token and head in pages of 64, D = 64, bf16: codes, scales, zeros, notes,
#: page table.
BYTES = {
    "int8": 64 + (2 + 2) * 64 / 64 + 64 + 2 + 5 * 4 / 64,
    "int6": 48 + (2 + 2) * 64 / 64 + 64 + 2 + 5 * 4 / 64,
    "int4": 32 + (2 + 2) * 64 / 64 + 32 + 4 * (2 + 2) + 5 * 4 / 64,
}


@pytest.mark.parametrize("element", BYTES)
def test_h18_bytes_of_a_token(element):
    """The case allows 5 % beside bits / 8 and metadata; ours are exact, and what torch has allocated."""
    value = "int4" if element == "int4" else "int8"
    recipe = CertifiedInt8Config(key_element=element, value_element=value)
    model = converted(dtype=torch.bfloat16, recipe=recipe)
    layers = heads = 2
    table = 4 / 64
    sizes = [CertifiedCache(model, capacity).nbytes() for capacity in (1024, 2048)]
    assert (sizes[1] - sizes[0]) / 1024 == layers * heads * BYTES[element] + table
    assert CertifiedCache(model, 1024).bytes_per_token() == layers * heads * BYTES[element] + table
    # What does not grow is the exact tail, up to two pages in bf16, and per layer and head at most a few hundred bytes.
    tail = layers * heads * 2 * 64 * 64 * 2 * 2
    assert 2 * sizes[0] - sizes[1] < tail + 2048


class LargestTensor(TorchDispatchMode):
    """Entries of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("padded", [False, True])
def test_h18_a_prefill_makes_no_score_matrix(padded):
    """2,048 tokens on the CPU: no tensor is as large as the scores of one head would be. The 16k prefill is for the
    GPU."""
    model, ids = converted(layers=1), prompt(2048)
    mask = torch.ones_like(ids)
    mask[0, :100] = 0 if padded else 1
    cache = CertifiedCache(model, 2048)
    with LargestTensor() as seen:
        forward(model, ids, cache, attention_mask=mask)
    assert 2048 * 4 * 64 <= seen.largest < 2048**2


@pytest.mark.gpu
def test_h18_peak_memory_of_a_long_prefill():
    """16,384 tokens, 16 layers: the certified run's peak, its cache included, is below that of a cache in bf16."""
    peaks, ids = [], prompt(16384).cuda()
    for certified in (False, True):
        model = tiny_model(layers=16, heads=8, kv_heads=8, dtype=torch.bfloat16, max_position_embeddings=32768).cuda()
        if certified:
            torch_witcert.convert(model, CertifiedInt8Config())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            next_logits(model, ids, CertifiedCache(model, 16384) if certified else DynamicCache())
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < peaks[0]


# --- H19 --------------------------------------------------------------------------------------------------------------


def test_h19_a_swapped_model_copies_pickles_saves_and_unswaps(tmp_path):
    """All in one; the ways one by one, used models and fresh processes are in test_nn_convert and test_nn_ecosystem."""
    plain, model, ids = tiny_model(), converted(), prompt(70)
    expected = greedy(model, ids, 8)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path)
    loaded = torch_witcert.convert(type(model).from_pretrained(tmp_path))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(greedy(twin, ids, 8), expected)
        torch_witcert.restore(twin)
        assert torch.equal(forward(twin, ids), forward(plain, ids))
    assert torch.equal(greedy(model, ids, 8), expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_h19_a_filled_cache_and_its_copies_go_their_own_ways(mode, recipe, tmp_path):
    """By deepcopy, pickle and a file; filled under each mode of autograd, with grad enabled by a model whose weights
    are frozen (gradients through the cache are refused)."""
    model = converted(recipe=RECIPES[recipe]).requires_grad_(False)

    def step(cache: CertifiedCache, ids: torch.Tensor) -> list[torch.Tensor]:
        logits = model(input_ids=ids, **{CACHE_ARGUMENT: cache, "use_cache": True}).logits
        return clones([logits, *torch_witcert.certificates(cache)])

    def go_on(cache: CertifiedCache) -> list[torch.Tensor]:
        return [part for seed in range(12) for part in step(cache, prompt(1, seed=seed))]

    def addresses(cache: CertifiedCache) -> set[int]:
        return {tensor.data_ptr() for tensor in cache.tensors() if tensor.numel()}

    with mode():
        cache = CertifiedCache(model, 128)
        for ids in (prompt(70), prompt(1)):
            step(cache, ids)
        cache.save(tmp_path / "cache.safetensors")
        twins = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        twins.append(CertifiedCache.load(tmp_path / "cache.safetensors", model))
    before = clones(cache.tensors())
    after = []
    for twin in twins:
        assert not addresses(cache) & addresses(twin)
        assert_same_bits(twin.tensors(), before)
        after.append(go_on(twin))
    assert_same_bits(cache.tensors(), before)
    expected = go_on(cache)
    step(cache, prompt(20, seed=50))
    for twin, found in zip(twins, after, strict=True):
        assert_same_bits(found, expected)
        assert int(twin.lengths) == 83


# --- H20 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_h20_forks_of_a_half_full_page(recipe):
    """Prefill of 50 (three pages and two tokens), forks A and B; 1, 5 and 3 tokens more; A goes, and another request
    takes its place and the pages that are free; then all go on over the page.

    `Histories.check` compares with an unforked run: the same tokens in a cache of their own.
    """
    model = converted(recipe=RECIPES[recipe])
    cache = CertifiedCache(model, 96, 3)
    histories = Histories(model, cache)
    group = cache.state.groups[0]
    histories.forward(prompt(50, 3), [50, 0, 0])
    parent = row_bits(cache, 0)
    cache.fork(0, [1, 2])
    histories.take([0, 0, 0])
    assert group.reference_counts(cache.lengths).tolist().count(3) == cache.pages_in_use() == 3
    histories.forward(prompt(5, 3, seed=2), [0, 5, 3])
    assert_same_bits(row_bits(cache, 0), parent)
    histories.forward(prompt(1, 3, seed=3), [1, 0, 0])
    for row in range(3):
        histories.check(row, read=False)
    cache.release([1])
    histories.rows[1] = []
    assert group.reference_counts(cache.lengths).tolist().count(2) == cache.pages_in_use() == 3
    histories.forward(prompt(36, 3, seed=4), [0, 36, 0])
    for seed in range(16):
        histories.forward(prompt(1, 3, seed=10 + seed))
    for row in range(3):
        histories.check(row, read=False)
    assert cache.lengths.tolist() == [67, 52, 69]
    assert cache.pages_in_use() == 3 + 2 + 3, "the page that each filled after the fork is its own"
    cache.release([0, 1])
    assert cache.pages_in_use() == 4
    histories.check(2, read=False)
    cache.release([2])
    assert cache.pages_in_use() == 0


def test_h20_the_same_prompt_again_and_again():
    """A second and a third request with the very same tokens are served, each as the first one was."""
    model, ids = converted(), prompt(50)
    cache = CertifiedCache(model, 96, 2)
    forward(model, ids.expand(2, -1), cache, attention_mask=torch.tensor([[1] * 50, [0] * 50]))
    logits = []
    for _ in range(3):
        cache.fork(0, [1])
        active = torch.tensor([False, True])[:, None, None, None]
        for token in range(20):
            positions = cache.lengths[:, None].clone()
            step = forward(model, prompt(1, 2, seed=token), cache, attention_mask=active, position_ids=positions)
        logits.append(step[1])
        assert cache.lengths.tolist() == [50, 70]
        cache.release([1])
    assert all(torch.equal(each, logits[0]) for each in logits[1:])
