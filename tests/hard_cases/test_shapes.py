"""Hard cases of shapes: head groups, head dims, soft caps and sinks, windows, lengths, chunks, left padding.

The numbers H8 to H14 are the cases'; `shape_cases` holds what each one does, because the kernels run it too. Every read is
checked by the rules that all cases share (`HardCache`, and in models `ReadRecorder`).
"""

from __future__ import annotations

import pytest
import torch
from hard_cases.hard_cache import DEFAULT, FORMATS, FP8, INT4, TOKEN, WITCERT, make_cache, normal
from hard_cases.read_recorder import ModelRead, ReadRecorder, Scoring, scoring_of
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
from nn_models import (
    RECIPE,
    VOCABULARY,
    converted,
    exact_tail,
    forward,
    left_padded,
    prompt,
    recorded_attention,
    stored_codes,
    tiny_model,
)
from transformers import Qwen2Config, Qwen2ForCausalLM

import torch_witcert
from torch_witcert import CertifiedCache, WitCertConfig
from torch_witcert.ops.formats import StoreFormat
from torch_witcert.ops.storage import HEAD_DIMS, StoreShape
from torch_witcert.testing.oracle import exact_attention

#: G2 of the models here, which are float32 on the CPU: far tighter than the cases ask of kernels.
TOLERANCE = 1e-5
#: Outlier pairs that no chunk and no batch has a say in.
PINNED = WitCertConfig(page_size=16, outlier_pairs=1, outlier_indices=(((3,), (7,)),) * 2)


def name(value: object) -> str | None:
    return value.name if isinstance(value, StoreFormat) else None


def scorings_of(model) -> list[Scoring]:
    return [scoring_of(model.config, i, layer.self_attn) for i, layer in enumerate(model.model.layers)]


def record(
    model, cache: CertifiedCache, pieces: list[torch.Tensor], lengths: tuple[int, ...] | None = None
) -> list[ModelRead]:
    """Certified reads of the forwards of `pieces`, or those at some lengths, each checked."""
    with ReadRecorder(scorings_of(model), lengths) as recorder:
        for ids in pieces:
            forward(model, ids, cache)
    for read in recorder.reads:
        read.check(TOLERANCE)
    return recorder.reads


# --- H8 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 4), (12, 2), (14, 2), (24, 1), (48, 2), (40, 8), (71, 1), (6, 6)])
def test_h8_query_heads_read_their_own_kv_head(heads, kv_heads):
    query_heads("cpu", heads, kv_heads)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 4), (7, 2), (1, 2)])
def test_h8_heads_that_do_not_divide_are_refused(heads, kv_heads):
    cache = make_cache(32, kv_heads=kv_heads)
    q, k, v = (normal(1, n, 1, 64, seed=n).bfloat16() for n in (heads, kv_heads, kv_heads))
    with pytest.raises(ValueError, match=f"multiple of the {kv_heads} KV heads, got {heads}"):
        cache.read(q, k, v, cache.every(1))


# --- H9 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store_format", FORMATS, ids=name)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_h9_supported_head_dims(dim, store_format):
    if store_format.key.per_token and dim % 32:
        with pytest.raises(NotImplementedError, match=f"multiple of 32, got {dim}"):
            make_cache(33, store_format, head_dim=dim)
    else:
        head_dim("cpu", store_format, dim, torch.float16)


@pytest.mark.parametrize("dim", [72, 160, 192, 512])
def test_h9_other_head_dims_are_refused_before_anything_runs(dim):
    """By the store, by the operators and by convert(), each naming head_dim; the model stays as it was."""
    with pytest.raises(ValueError, match=f"head_dim must be one of .*got {dim}"):
        StoreShape(1, 1, 1, 16, dim, torch.float16)
    cache = make_cache(16)
    k = normal(1, 1, 1, dim, seed=0).bfloat16()
    with pytest.raises(NotImplementedError, match=f"head_dim must be one of .*got {dim}"):
        cache.write(k, k, cache.every(1))
    with pytest.raises(NotImplementedError, match=f"head_dim must be one of .*got {dim}"):
        cache.read(k, k, k, cache.every(1))
    model = tiny_model(head_dim=dim)
    before = forward(model, prompt(4))
    with pytest.raises(ValueError, match=f"head_dim must be one of .*got {dim}"):
        torch_witcert.convert(model, RECIPE)
    assert torch.equal(forward(model, prompt(4)), before)


@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (128, 64), (64, 128)])
def test_h9_values_of_another_width_are_refused(dim, value_dim):
    """192 and 128 are refused for the 192, the supported ones for being two."""
    cache = make_cache(16, head_dim=128)
    k, v = (normal(1, 1, 1, size, seed=0).bfloat16() for size in (dim, value_dim))
    match = (
        f"head_dim must be one of .*got {dim}"
        if dim == 192
        else rf"v must have shape \[1, 1, 1, {dim}\].*got \[1, 1, 1, {value_dim}\]"
    )
    for act in (lambda: cache.write(k, v, cache.every(1)), lambda: cache.read(k, k, v, cache.every(1))):
        with pytest.raises((ValueError, NotImplementedError), match=match):
            act()


# --- H10 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store_format", [DEFAULT, INT4, FP8, TOKEN, WITCERT], ids=name)
@pytest.mark.parametrize("tokens", [1, 64, 1000])
@pytest.mark.parametrize(("softcap", "sink"), [(50.0, 3.0), (0.0, 60.0), (50.0, float("-inf"))])
def test_h10_softcap_and_sinks(softcap, sink, tokens, store_format):
    """The case's cap and sink; a sink that matters beside scores of 100, without a cap; and none."""
    softcap_and_sinks("cpu", store_format, tokens, softcap, sink)


@pytest.mark.parametrize(("family", "gone"), [("gemma2", "softcap"), ("gpt_oss", "sinks")])
def test_h10_softcap_and_sinks_of_a_model_reach_every_read(family, gone):
    """What is compared takes both from the config and the weights; without them nothing would agree.

    The families that carry them are supported; other classes of attention are refused by convert(), whatever they carry.
    """
    model = converted(family)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(3)
            if gone == "sinks":
                layer.self_attn.sinks.add_(4)
    cache = CertifiedCache(model, 96)
    reads = record(model, cache, [prompt(70), prompt(5, seed=2), *(prompt(1, seed=seed) for seed in range(3, 13))])
    assert len(reads) == 2 * 11
    empty = {"softcap": 0.0} if gone == "softcap" else {"sinks": None}
    without = ReadRecorder([scoring._replace(**empty) for scoring in scorings_of(model)])
    cache.reset()
    with without:
        for ids in (prompt(70), prompt(1, seed=2)):
            forward(model, ids, cache)
    assert len(without.reads) == 2
    for read in without.reads:
        with pytest.raises(AssertionError, match="G[23]"):
            read.check(TOLERANCE)


# --- H11 ---------------------------------------------------------------------------------------------------------------

#: Layers 0 to 2 see 64 tokens, layer 3 all of them.
WINDOWS = (64, 64, 64, 0)


def windowed_model():
    """The case's toy model. In a forward of several tokens V of the first one is 1000 larger in every layer; scores are flat."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.15,
        use_sliding_window=True,
        sliding_window=64,
        layer_types=["sliding_attention" if window else "full_attention" for window in WINDOWS],
    )
    model = Qwen2ForCausalLM(config).eval()

    def mark(module, arguments, out):
        return out + 1000 * (torch.arange(out.shape[1]) == 0)[:, None] if out.shape[1] > 1 else out

    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(0.1)
        layer.self_attn.v_proj.register_forward_hook(mark)
    return torch_witcert.convert(model, RECIPE)


@pytest.mark.parametrize(("length", "totals"), [(50, (63, 64, 65, 128, 129, 300)), (200, (201, 208, 209, 240))])
def test_h11_every_layer_has_its_own_window(length, totals):
    """A prompt, then decoding: reads against their layer's own window; how many tokens each one saw is counted for all.

    The prefill, which is exact attention, has to leave the same tokens out.
    """
    model = windowed_model()
    cache, ids = CertifiedCache(model, 304), prompt(length)
    calls = recorded_attention(cache, lambda: forward(model, ids, cache))
    at = torch.arange(length)[None]
    for call, window in zip(calls, WINDOWS, strict=True):
        exact = exact_attention(call.q, call.k, call.v, at, at, 64**-0.5, window).output
        assert (call.out - exact).norm(dim=-1).sub(TOLERANCE * exact.norm(dim=-1)).max() <= 0
    cache.reset()
    torch_witcert.telemetry(cache, reset=True)
    steps = [ids, *(prompt(1, seed=seed) for seed in range(totals[-1] - length))]
    reads = record(model, cache, steps, tuple(total - 1 for total in totals))
    assert len(reads) == 4 * len(totals)
    for read in reads:
        total, window = int(read.lengths) + 1, WINDOWS[read.layer]
        # A thousand over at most 300 tokens, in every channel, as long as token 0 is seen.
        sees_first = not window or total <= window
        for output in (read.exact, read.out):
            assert torch.equal(output.mean(-1) > 1, torch.full((1, 2, 1), sees_first)), f"layer {read.layer} at {total}"
    for layer, window in zip(torch_witcert.telemetry(cache).layers, WINDOWS, strict=True):
        assert layer.tokens == 2 * sum(min(total, window or total) for total in range(length + 1, totals[-1] + 1))


# --- H12 ---------------------------------------------------------------------------------------------------------------

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 4097)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_h12_lengths_near_every_boundary(tokens):
    boundary("cpu", tokens)


@pytest.mark.parametrize("tokens", [63, 64, 65, 128, 129, 1000])
def test_h12_lengths_near_every_boundary_of_larger_pages(tokens):
    boundary("cpu", tokens, page_size=64)


@pytest.mark.parametrize("store_format", FORMATS[1:], ids=name)
@pytest.mark.parametrize("tokens", [31, 32, 33, 257])
def test_h12_lengths_near_every_boundary_in_every_format(tokens, store_format):
    boundary("cpu", tokens, store_format)


# --- H13 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store_format", [DEFAULT, INT4, WITCERT], ids=name)
def test_h13_chunks_store_the_same_pages(store_format):
    """All splits of the same K and V give the same pages and tail, bit for bit: a page is quantized once, when it is full."""
    expected = live_parts(chunked("cpu", store_format, CHUNKS["1x300"]))
    for label, chunks in CHUNKS.items():
        parts = live_parts(chunked("cpu", store_format, chunks))
        assert parts.keys() == expected.keys()
        for part, tensor in parts.items():
            assert torch.equal(tensor, expected[part]), f"{label}: {part}"


@pytest.mark.parametrize(
    ("label", "recipe"),
    [("75x4", RECIPE), ("128+128+44", RECIPE), ("128+128+44", PINNED), ("255+45", RECIPE), ("257+43", PINNED)],
)
def test_h13_chunked_prefill_of_a_model(label, recipe):
    """Every read of every chunk by G1 to G4; nothing is left unquantized but the unfinished page; layer 0 stores the same pages.

    Layers above read what other chunks made of the tokens below, so that theirs differ. Where a cache chooses outlier pairs
    itself, it does so from the first chunk.
    """
    model = converted(recipe=recipe)
    cache, whole, ids = CertifiedCache(model, 304), CertifiedCache(model, 304), prompt(300)
    reads = record(model, cache, list(ids.split(CHUNKS[label], 1)))
    assert len(reads) == 2 * (len(CHUNKS[label]) - 1)
    assert int(cache.lengths) == 300 and cache.pages_in_use() == 18
    for tail in exact_tail(cache, 0):
        assert tail.shape[1] == 300 - 17 * 16  # of which the older page is stored as codes too
    forward(model, ids, whole)
    # In float32 the projections of a chunk and of the whole differ in their last bits, and so does a code that is at a tie.
    first, other = (stored_codes(each, 0)[0].int() for each in (cache, whole))
    assert first.shape == other.shape and first.shape[0] == 18
    assert (first - other).abs().max() <= 1 and (first != other).float().mean() < 1e-3


# --- H14 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store_format", [DEFAULT, INT4, WITCERT], ids=name)
def test_h14_left_padding(store_format):
    left_padding("cpu", store_format)


@pytest.mark.parametrize("recipe", [RECIPE, WitCertConfig(page_size=16)], ids=["int8", "witcert"])
def test_h14_left_padding_in_a_model(recipe):
    """Prompts of 40, 25 and 10 in a batch; keys and values of padding 1000 times as large as others; then 20 steps.

    The same batch with padding of 0 has the same bits: logits, certificates, outlier pairs, pages. Lone runs have the same logits, but
    for the model's own matrix products, whose last bits depend on the batch, and for outlier pairs, which a cache chooses from
    all rows of its first prompt together.
    """
    model = converted(heads=8, kv_heads=2, recipe=recipe)
    rows = [prompt(length, seed=length) for length in (40, 25, 10)]
    ids, mask = left_padded(rows)
    steps = [prompt(1, 3, seed=seed) for seed in range(50, 70)]

    def run(ids: torch.Tensor, mask: torch.Tensor, index: list[int], padding: float = 0.0) -> list[torch.Tensor]:
        """Logits [B, 21, vocabulary] of the last column, bounds, pages and exact tokens."""
        padded = (mask == 0)[:, :, None]

        def overwrite(module, arguments, out):
            return torch.where(padded, padding * normal(*out.shape, seed=9), out) if out.shape[1] > 1 else out

        cache = CertifiedCache(model, 64, len(index), **({} if recipe is RECIPE else {"seeds": index}))
        projections = [p for layer in model.model.layers for p in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        hooks = [projection.register_forward_hook(overwrite) for projection in projections]
        logits, found = [], []
        for piece in (ids, *(step[index] for step in steps)):
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -piece.shape[1] :]
            logits.append(forward(model, piece, cache, attention_mask=mask, position_ids=positions)[:, -1])
            found += [part.clone() for part in torch_witcert.certificates(cache)]
            mask = torch.cat([mask, mask.new_ones(len(index), 1)], 1)
        for hook in hooks:
            hook.remove()
        for row in range(len(index)):
            found += stored_codes(cache, row) + exact_tail(cache, row)
        return [torch.stack(logits, 1), *(layer.outlier_channels for layer in cache.layers), *found]

    batch, blank = run(ids, mask, [0, 1, 2], 1000.0), run(ids, mask, [0, 1, 2])
    assert len(batch) == len(blank)
    for part, other in zip(batch, blank, strict=True):
        assert torch.equal(part, other), "padding changes a bit"
    if recipe is RECIPE:
        for row in range(3):
            lone = run(rows[row], torch.ones_like(rows[row]), [row])[0]
            assert (batch[0][row] - lone[0]).abs().max() <= 2e-3 * lone.abs().max()
