"""generate() on converted models: the same tokens as the dense model, for every way of feeding a prompt."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from nn_models import (
    RECIPE,
    converted,
    decisive_prompt,
    forward,
    greedy,
    left_padded,
    prompt,
    recorded_attention,
    stored_codes,
    tiny_model,
)
from transformers import CompileConfig, DynamicCache

import torch_witcert
from torch_witcert.nn.compatibility import CACHE_ARGUMENT
from torch_witcert.policy.gate import Flag

NEW_TOKENS = 24
#: Least difference of the two best logits in tests that compare tokens of the dense and of the certified model.
GAP = 0.04
FAMILIES = [
    ("llama", {}),
    ("llama", {"heads": 3, "kv_heads": 1, "head_dim": 128}),
    ("qwen2", {}),
    ("qwen2", {"window": 40}),
    ("mistral", {"window": 40}),
    ("mistral", {}),
    ("qwen3", {}),
    ("phi3", {"head_dim": 96}),
    ("phi3", {"head_dim": 80, "window": 40}),
    ("gemma2", {"head_dim": 256, "window": 40}),
    ("gpt_oss", {}),
    ("gpt_oss", {"window": 40}),
]


def logit_error(dense, model, ids, tokens) -> float:
    """Largest error of a logit while the certified model is fed the dense model's tokens one by one."""
    exact = forward(dense, torch.cat([ids, tokens], 1))[:, ids.shape[1] - 1 : -1]
    cache = torch_witcert.CertifiedCache(model, ids.shape[1] + tokens.shape[1], ids.shape[0])
    steps = [forward(model, ids, cache)[:, -1:]]
    steps += [forward(model, tokens[:, i : i + 1], cache) for i in range(tokens.shape[1] - 1)]
    return float((torch.cat(steps, 1) - exact).abs().max())


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_greedy_tokens_equal_the_dense_model(family, options):
    dense = tiny_model(family, **options)
    ids = decisive_prompt(dense, 90, NEW_TOKENS, batch=2, gap=GAP)
    expected = greedy(dense, ids, NEW_TOKENS)
    model = converted(family, **options)
    assert 1e-4 < logit_error(dense, model, ids, expected) < GAP / 2
    assert torch.equal(greedy(model, ids, NEW_TOKENS), expected)
    counted = torch_witcert.telemetry(model)
    assert counted.coverage == 1
    assert counted.code_share > (0.5 if options.get("window") else 0.75)
    assert counted.total("prefill_tokens") == ids.numel() * len(model.model.layers)


@pytest.mark.parametrize("window", [None, 40])
def test_left_padded_batch_equals_lone_runs(window):
    model = converted("mistral", window=window)
    dense = tiny_model("mistral", window=window)
    rows = [decisive_prompt(dense, length, NEW_TOKENS, batch=1, gap=GAP) for length in (90, 66, 77)]
    ids, mask = left_padded(rows)
    together = greedy(model, ids, NEW_TOKENS, attention_mask=mask)
    cache = torch_witcert.last_cache(model)
    assert (cache.lengths // RECIPE.page_size).min() >= 4
    batch = [tensor.clone() for tensor in torch_witcert.certificates(cache)]
    codes = [stored_codes(cache, row) for row in range(3)]
    for row, lone_ids in enumerate(rows):
        alone = torch_witcert.CertifiedCache(model, cache.capacity_per_row, 1)
        tokens = greedy(model, lone_ids, NEW_TOKENS, **{CACHE_ARGUMENT: alone})
        assert torch.equal(tokens[0], together[row])
        assert int(alone.lengths) == int(cache.lengths[row]) == lone_ids.shape[1] + NEW_TOKENS - 1
        # The batch changes the bits of the model's own matrix products, so bits are compared at the level of the op in
        # test_padding_changes_no_bit; here bounds agree closely.
        for name, of_batch, lone in zip(
            torch_witcert.certificates(alone)._fields, batch, torch_witcert.certificates(alone), strict=True
        ):
            torch.testing.assert_close(of_batch[:, row], lone[:, 0], rtol=1e-3, atol=1e-5, msg=name)
        differing = sum(int((a != b).sum()) for a, b in zip(codes[row][::6], stored_codes(alone, 0)[::6], strict=True))
        assert differing <= 2, "codes of the keys"


def test_padding_changes_no_bit():
    """The same hidden states in a padded batch and alone: codes, outputs and certificates have the same bits."""
    model = converted()
    rows = [prompt(90, seed=1), prompt(66, seed=2)]
    ids, mask = left_padded(rows)
    holes = torch.ones_like(mask)
    holes[0, 5::7] = 0
    for case in (mask, mask.flip(1), holes):
        keep = case.bool()
        cache = torch_witcert.CertifiedCache(model, 128, 2)
        longer = torch.nn.functional.pad(case, (0, 1), value=1)
        fresh = recorded_attention(cache, partial(forward, model, ids, cache, attention_mask=case))
        fresh += recorded_attention(cache, partial(forward, model, prompt(1, 2), cache, attention_mask=longer))
        bounds = [tensor.clone() for tensor in torch_witcert.certificates(cache)]
        for row in range(2):
            alone = torch_witcert.CertifiedCache(model, 128, 1)
            for index, call in enumerate(fresh):
                columns = keep[row] if index < 2 else torch.ones(1, dtype=torch.bool)
                q, k, v, out = (x[row : row + 1][:, :, columns] for x in (call.q, call.k, call.v, call.out))
                lone = alone.layers[call.layer].attend(q, k, v, None, call.scores)
                if index >= 2:
                    assert torch.equal(lone, out)
            for part, lone in zip(stored_codes(cache, row), stored_codes(alone, 0), strict=True):
                assert torch.equal(part, lone)
            for of_batch, lone in zip(bounds, torch_witcert.certificates(alone), strict=True):
                assert torch.equal(of_batch[:, row], lone[:, 0])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunk", [16, 33, 70])
def test_chunked_prefill_stores_the_same_codes(padded, chunk):
    model = converted()
    ids, mask = left_padded([prompt(100, seed=1), prompt(80 if padded else 100, seed=2)])
    whole = greedy(model, ids, NEW_TOKENS, attention_mask=mask, return_dict_in_generate=False)
    reference = torch_witcert.CertifiedCache(model, 256, 2)
    forward(model, ids, reference, attention_mask=mask)
    cache = torch_witcert.CertifiedCache(model, 256, 2)
    for start in range(0, 100, chunk):
        forward(model, ids[:, start : start + chunk], cache, attention_mask=mask[:, : start + chunk])
    assert cache.lengths.tolist() == reference.lengths.tolist() == mask.sum(1).tolist()
    # Layer 0 stores projections of the same embeddings; deeper layers see the quantized past of the chunks before.
    for row in range(2):
        for part, expected in zip(stored_codes(cache, row)[:6], stored_codes(reference, row)[:6], strict=True):
            torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-6)
    chunked = greedy(model, ids, NEW_TOKENS, attention_mask=mask, prefill_chunk_size=chunk)
    assert torch.equal(chunked, whole)


def test_several_turns_on_one_cache():
    model = converted()
    first, second = prompt(70, seed=1), prompt(30, seed=2)
    cache = torch_witcert.CertifiedCache(model, 256)
    one = greedy(model, first, NEW_TOKENS, **{CACHE_ARGUMENT: cache})
    conversation = torch.cat([first, one, second], 1)
    two = greedy(model, conversation, NEW_TOKENS, **{CACHE_ARGUMENT: cache})
    assert int(cache.lengths) == int(cache.get_seq_length()) == conversation.shape[1] + NEW_TOKENS - 1
    assert torch_witcert.last_cache(model) is cache
    assert torch.equal(two, greedy(tiny_model(), conversation, NEW_TOKENS))
    # The raw forward goes on where generate() stopped.
    logits = forward(model, two[:, -1:], cache)
    expected = forward(tiny_model(), torch.cat([conversation, two], 1))[:, -1:]
    torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02)


def compiled_on_cpu() -> CompileConfig:
    config = CompileConfig(fullgraph=True, mode="default", backend="aot_eager")
    config._compile_all_devices = True
    return config


def test_plain_padded_chunked_and_compiled_agree():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = converted()
    rows = [prompt(90, seed=1), prompt(70, seed=2)]
    padded, mask = left_padded(rows)
    plain = torch.cat(rows[:1] * 2)
    for ids, options in ((plain, {}), (padded, {"attention_mask": mask})):
        eager = greedy(model, ids, NEW_TOKENS, **options)
        bounds = torch_witcert.certificates(torch_witcert.last_cache(model)).tv.clone()
        compiled = greedy(model, ids, NEW_TOKENS, compile_config=compiled_on_cpu(), **options)
        assert torch.equal(compiled, eager)
        assert torch.equal(torch_witcert.certificates(torch_witcert.last_cache(model)).tv, bounds)
    assert torch.equal(greedy(model, plain, NEW_TOKENS, prefill_chunk_size=32), greedy(model, plain, NEW_TOKENS))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch_witcert.restore(model)
    assert not hasattr(model, "_compiled_call")
    torch_witcert.convert(model, RECIPE)


def test_own_cache_is_reused_for_the_same_shape_only():
    model, ids = converted(), prompt(70)
    greedy(model, ids, 8)
    cache = torch_witcert.last_cache(model)
    addresses = [tensor.data_ptr() for tensor in cache.tensors()]
    expected = greedy(model, ids, 8)
    assert torch_witcert.last_cache(model) is cache
    assert [tensor.data_ptr() for tensor in cache.tensors()] == addresses
    assert int(cache.lengths) == 77
    greedy(model, ids, 64)
    larger = torch_witcert.last_cache(model)
    assert larger is not cache
    assert torch.equal(greedy(model, ids, 8), expected)
    assert torch_witcert.last_cache(model) is not larger, "splits, and so bits, depend on the capacity"
    output = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    handed_out = getattr(output, CACHE_ARGUMENT)
    assert isinstance(handed_out, torch_witcert.CertifiedCache)
    assert torch.equal(output.sequences[:, 70:], expected)
    kept = handed_out.lengths.clone()
    greedy(model, ids, 8)
    assert torch_witcert.last_cache(model) is not handed_out
    assert torch.equal(handed_out.lengths, kept)


def test_several_samples_of_one_prompt():
    model, ids = converted(), prompt(70)
    torch.manual_seed(0)
    out = model.generate(ids, max_new_tokens=8, do_sample=True, num_return_sequences=3, pad_token_id=0)
    assert out.shape == (3, 78)
    assert torch_witcert.last_cache(model).batch_size == 3


def test_generate_under_inference_mode_and_then_without():
    model, ids = converted(), prompt(70)
    with torch.inference_mode():
        inside = greedy(model, ids, 8)
    assert torch.equal(greedy(model, ids, 8), inside)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"prompt_lookup_num_tokens": 17},
            ValueError,
            "prompt_lookup_num_tokens must be at most the page size 16, got 17",
        ),
        ({"num_beams": 2, CACHE_ARGUMENT: 256}, ValueError, "has 1 rows, but generate\\(\\) needs 2"),
        ({"cache_implementation": "static"}, ValueError, "cache_implementation='static'"),
        ({CACHE_ARGUMENT: "dynamic"}, ValueError, "DynamicCache"),
        ({CACHE_ARGUMENT: 96}, ValueError, "holds 96 tokens a row, but this call may need 97"),
        ({CACHE_ARGUMENT: (256, 2)}, ValueError, "has 2 rows, but generate\\(\\) needs 1"),
    ],
)
def test_refused_before_any_work(options, error, match):
    model, ids = converted(), prompt(90)
    value = options.get(CACHE_ARGUMENT)
    if value == "dynamic":
        options = {**options, CACHE_ARGUMENT: DynamicCache()}
    elif value is not None:
        sizes = value if isinstance(value, tuple) else (value,)
        options = {**options, CACHE_ARGUMENT: torch_witcert.CertifiedCache(model, *sizes)}
    forwards = []
    model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(error, match=match):
        model.generate(ids, max_new_tokens=8, pad_token_id=0, **options)
    assert not forwards


def _ones(rows: int, width: int, zeros: tuple[tuple[int, slice], ...] = ()) -> torch.Tensor:
    mask = torch.ones(rows, width, dtype=torch.long)
    for row, columns in zeros:
        mask[row, columns] = 0
    return mask


@pytest.mark.parametrize(
    ("prepare", "columns", "mask", "match"),
    [
        (lambda c: None, 60, None, "must have more than the 90 columns .* got 60"),
        (lambda c: None, 90, None, "must have more than the 90 columns .* got 90"),
        (lambda c: None, 90, _ones(2, 90), "must have more than the 90 columns .* got 90"),
        (lambda c: c.release([1]), 100, None, "marks 90 of the 90 cached columns of row 1 as real, .* holds 0 tokens"),
        (lambda c: c.crop(-5), 100, _ones(2, 100, ((0, slice(0, 3)),)), "marks 82 of the 85 .* row 0 .* holds 85"),
        (lambda c: None, 100, _ones(2, 100, ((1, slice(10, 20)),)), "marks 80 of the 90 .* row 1 .* holds 90"),
    ],
)
def test_a_prompt_that_does_not_go_on_from_the_cache_is_refused(prepare, columns, mask, match):
    """Silently feeding a row the end of its prompt, or reading what its mask leaves out, would be wrong without a sign."""
    model, ids = converted(), prompt(120, batch=2)
    cache = torch_witcert.CertifiedCache(model, 256, 2)
    forward(model, ids[:, :90], cache)
    prepare(cache)
    before = [tensor.clone() for tensor in cache.tensors()]
    options = {} if mask is None else {"attention_mask": mask}
    with pytest.raises(ValueError, match=match):
        greedy(model, ids[:, :columns], 4, **options, **{CACHE_ARGUMENT: cache})
    assert all(map(torch.equal, before, cache.tensors()))


@pytest.mark.parametrize(
    ("family", "window", "zeros", "refused"),
    [
        ("mistral", 100, slice(60, 70), False),  # 100 columns at the end: the window never leaves a token
        ("mistral", 99, slice(60, 70), True),
        ("mistral", 80, slice(0, 20), False),  # padded on the left: 80 columns of the row's own
        ("mistral", 40, slice(0, 20), False),
        ("mistral", 40, slice(80, 90), True),  # padded on the right: what is generated comes after it
        ("qwen2", 40, slice(60, 70), True),  # one layer of two has a window
        ("llama", None, slice(60, 70), False),
    ],
)
@pytest.mark.parametrize("passed", [False, True])
def test_padding_between_tokens_that_a_window_would_count_is_refused(family, window, zeros, refused, passed):
    """transformers counts it, the certified cache does not: the tokens agree, or the call is refused before any work."""
    options = {"window": window} if window else {}
    model, dense = converted(family, **options), tiny_model(family, **options)
    mask, ids = _ones(2, 90, ((1, zeros),)), prompt(90, batch=2)
    given = {CACHE_ARGUMENT: torch_witcert.CertifiedCache(model, 128, 2)} if passed else {}
    generate = partial(greedy, ids=ids, new_tokens=11, attention_mask=mask)
    if refused:
        forwards = []
        model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
        with pytest.raises(NotImplementedError, match="attention_mask has padding between real tokens in row 1"):
            generate(model, **given)
        assert not forwards
    else:
        assert torch.equal(generate(model, **given), generate(dense))


def test_the_new_turn_alone_with_the_mask_of_all_columns():
    """transformers takes the new tokens alone as well, if the mask covers the cached columns too."""
    model, ids = converted(), prompt(120, batch=2)
    mask = _ones(2, 120, ((1, slice(0, 30)),))
    tokens = []
    for first in (0, 90):
        cache = torch_witcert.CertifiedCache(model, 256, 2)
        greedy(model, ids[:, :90], 1, attention_mask=mask[:, :90], **{CACHE_ARGUMENT: cache})
        tokens.append(greedy(model, ids[:, first:], 8, attention_mask=mask, **{CACHE_ARGUMENT: cache}))
    assert torch.equal(*tokens)


def test_refused_as_an_assistant():
    with pytest.raises(NotImplementedError, match="being the assistant"):
        tiny_model().generate(prompt(40), max_new_tokens=8, pad_token_id=0, assistant_model=converted())


def test_drafts_by_early_exit_are_refused_before_the_model_is_shortened():
    model, ids = converted(), prompt(40)
    expected = greedy(model, ids, 8)
    with pytest.raises(NotImplementedError, match="assistant_early_exit=1"):
        greedy(model, ids, 8, assistant_early_exit=1)
    assert model.config.num_hidden_layers == len(model.model.layers)
    assert torch.equal(greedy(model, ids, 8), expected)


def test_beams_without_a_cache_work():
    model, ids = converted(), prompt(20)
    options = {"max_new_tokens": 4, "num_beams": 2, "use_cache": False, "pad_token_id": 0, "do_sample": False}
    expected = tiny_model().generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), expected)


def test_padded_rows_may_exceed_the_cache_in_columns():
    """What counts is tokens: a padded batch with more columns than the cache's capacity fits if its rows do."""
    model = converted()
    mask = torch.cat([torch.zeros(1, 40), torch.ones(1, 80)], 1).long()
    ids = prompt(120) * mask
    cache = torch_witcert.CertifiedCache(model, 96)
    tokens = greedy(model, ids, 16, attention_mask=mask, **{CACHE_ARGUMENT: cache})
    assert torch.equal(tokens, greedy(model, ids[:, 40:], 16))
    assert int(cache.lengths) == 95
    assert int(cache.get_seq_length()) == 135


def test_flags_of_prefill_and_of_decode():
    model, ids = converted(), prompt(70)
    cache = torch_witcert.CertifiedCache(model, 96)
    forward(model, ids, cache)
    assert (torch_witcert.certificates(cache).flags == Flag.PREFILL | Flag.NO_CODES).all()
    forward(model, ids[:, :1], cache)
    assert (torch_witcert.certificates(cache).flags == 0).all()
