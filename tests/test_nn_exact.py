"""Exact attention of prefills and of layers that stay dense, against float64."""

from __future__ import annotations

import pytest
import torch
from nn_models import RECIPE, forward, prompt, tiny_model

import torch_witcert
from torch_witcert.nn import exact
from torch_witcert.nn.exact import Scores, masked_attention, prefill_attention

HEADS, KV_HEADS, DIM, SCALE = 6, 2, 64, 0.125


def tensors(batch: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, h, tokens, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS))


def oracle(q, k, v, query_positions, key_positions, window, softcap=0.0, sinks=None) -> torch.Tensor:
    """float64, one head and one query at a time; a sink is a key whose value is 0."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(q.shape[0]):
        for t, at in enumerate(query_positions[b].tolist()):
            seen = (key_positions[b] >= 0) & (key_positions[b] <= at)
            if window:
                seen &= key_positions[b] > at - window
            if at < 0:
                continue
            for h in range(HEADS):
                kv = h // (HEADS // KV_HEADS)
                keys, values = k[b, kv, seen].double(), v[b, kv, seen].double()
                logits = keys @ q[b, h, t].double() * SCALE
                if softcap:
                    logits = softcap * torch.tanh(logits / softcap)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[h : h + 1].double()])
                out[b, h, t] = torch.softmax(logits, 0)[: len(values)] @ values
    return out


def positions_of(valid: torch.Tensor) -> torch.Tensor:
    return torch.where(valid, valid.cumsum(1) - 1, -1).to(torch.int32)


VALID = torch.ones(3, 40, dtype=torch.bool)
VALID[0, :7] = False
VALID[1, 3::5] = False
VALID[2] = False


@pytest.mark.parametrize("window", [0, 1, 9, 100])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("rows", [1024, 12])
def test_prefill(monkeypatch, window, ragged, rows):
    monkeypatch.setattr(exact, "ROWS", rows)
    q, k, v = tensors(3, 40)
    valid = VALID if ragged else torch.ones_like(VALID)
    positions = positions_of(valid)
    expected = oracle(q, k, v, positions, positions, window)
    spoiled_k, spoiled_v = (torch.where(valid[:, None, :, None], x, float("nan")) for x in (k, v))
    out, poisoned = prefill_attention(q, spoiled_k, spoiled_v, positions, ragged, Scores(SCALE, window))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert not poisoned.any()
    assert (out.transpose(1, 2)[~valid] == 0).all(), "padding and idle rows give 0"


def test_prefill_masks_stay_small():
    """A padded prompt of T tokens never has a mask of T x T: 1,024 rows at a time, shared by the heads of a group."""
    shapes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), options=None):
            options = options or {}
            if function is torch.nn.functional.scaled_dot_product_attention:
                shapes.append(tuple(options["attn_mask"].shape))
            return function(*arguments, **options)

    q, k, v = tensors(1, 2500)
    valid = torch.ones(1, 2500, dtype=torch.bool)
    valid[0, 0] = False
    with Watch():
        prefill_attention(q, k, v, positions_of(valid), True, Scores(SCALE))
    assert max(rows for _, _, rows, _ in shapes) <= exact.ROWS
    assert sum(rows for _, _, rows, _ in shapes) == 2500 * HEADS // KV_HEADS
    shapes.clear()
    with Watch():
        prefill_attention(q, k, v, positions_of(torch.ones_like(valid)), False, Scores(SCALE, 100))
    assert max(columns for _, _, _, columns in shapes) <= 341 + 100, "a window bounds the columns too"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_prefill_marks_the_heads_that_meet_a_value_that_is_not_finite(value):
    q, k, v = tensors(2, 20)
    expected, _ = prefill_attention(q, k, v, positions_of(torch.ones(2, 20, dtype=torch.bool)), False, Scores(SCALE))
    query = q.clone()
    query[0, 1, 7, 2] = value
    _, marked = prefill_attention(query, k, v, positions_of(torch.ones(2, 20, dtype=torch.bool)), False, Scores(SCALE))
    assert marked.nonzero().tolist() == [[0, 1]]
    k[1, 0, 5, 3] = value
    out, poisoned = prefill_attention(q, k, v, positions_of(torch.ones(2, 20, dtype=torch.bool)), False, Scores(SCALE))
    assert poisoned.tolist() == [[False] * HEADS, [True] * (HEADS // KV_HEADS) + [False] * (HEADS - HEADS // KV_HEADS)]
    assert torch.equal(out[0], expected[0])
    assert out.isfinite().all()


@pytest.mark.parametrize("window", [0, 13])
def test_masked_attention_over_a_longer_store(window):
    q, _, _ = tensors(2, 3, seed=1)
    _, k, v = tensors(2, 50, seed=2)
    slots = torch.arange(50, dtype=torch.int32).expand(2, -1)
    at = torch.tensor([[20, 21, -1], [48, -1, 49]], dtype=torch.int32)
    out = masked_attention(q, k, v, at, slots, Scores(SCALE, window))
    torch.testing.assert_close(out.double(), oracle(q, k, v, at, slots, window), rtol=1e-5, atol=1e-5)
    assert (out[0, :, 2] == 0).all()


@pytest.mark.parametrize("chunks", [1, 4])
def test_dense_layer_stores_no_padding(chunks):
    """Left padding, right padding, holes, NaN in all of them: the dense layer holds what a compact run holds."""
    model = tiny_model(layers=2)
    torch_witcert.convert(model, RECIPE, filter_fn=lambda _, name: "1" in name, strict=False)
    valid = torch.ones(2, 80, dtype=torch.bool)
    valid[0, :9] = False
    valid[0, 70:] = False
    valid[1, ::3] = False
    ids = prompt(80, 2)
    positions = (valid.long().cumsum(1) - 1).clamp_min(0)

    def spoil(_, __, out):
        start = int(cache.get_seq_length())
        return torch.where(valid[:, start : start + out.shape[1], None], out, float("nan"))

    handles = [
        getattr(model.model.layers[0].self_attn, name).register_forward_hook(spoil) for name in ("k_proj", "v_proj")
    ]
    cache = torch_witcert.CertifiedCache(model, 96, 2)
    logits = []
    for columns in torch.arange(80).chunk(chunks):
        mask = valid[:, : int(columns[-1]) + 1].long()
        logits.append(forward(model, ids[:, columns], cache, attention_mask=mask, position_ids=positions[:, columns]))
    for handle in handles:
        handle.remove()
    logits = torch.cat(logits, 1)
    for row in range(2):
        lone = torch_witcert.CertifiedCache(model, 96)
        kept = valid[row].chunk(chunks)
        expected = [
            forward(model, part[row : row + 1, keep], lone)
            for part, keep in zip(ids.chunk(chunks, 1), kept, strict=True)
        ]
        torch.testing.assert_close(logits[row, valid[row]], torch.cat(expected, 1)[0], rtol=1e-3, atol=1e-3)
        length = int(lone.lengths)
        assert int(cache.lengths[row]) == length
        for name in ("dense_keys", "dense_values"):
            stored, compact = (getattr(each.layers[0], name)[:, :, :length] for each in (cache, lone))
            torch.testing.assert_close(stored[row], compact[0], rtol=1e-4, atol=1e-5)


# --- soft capping and sinks ------------------------------------------------------------------------------------------

SINKS = torch.linspace(-2, 3, HEADS)
OPTIONS = {"softcap": (1.5, None), "sinks": (0.0, SINKS), "both": (1.5, SINKS)}


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("rows", [1024, 12])
@pytest.mark.parametrize("name", OPTIONS)
def test_prefill_with_soft_capping_and_sinks(monkeypatch, window, ragged, rows, name):
    monkeypatch.setattr(exact, "ROWS", rows)
    softcap, sinks = OPTIONS[name]
    q, k, v = tensors(3, 40)
    valid = VALID if ragged else torch.ones_like(VALID)
    positions = positions_of(valid)
    expected = oracle(q, k, v, positions, positions, window, softcap, sinks)
    plain = oracle(q, k, v, positions, positions, window)
    assert float((expected - plain).abs().max()) > 0.1, "the options make a difference"
    spoiled_k, spoiled_v = (torch.where(valid[:, None, :, None], x, float("nan")) for x in (k, v))
    scores = Scores(SCALE, window, softcap, sinks)
    out, poisoned = prefill_attention(q, spoiled_k, spoiled_v, positions, ragged, scores)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert not poisoned.any()
    assert (out.transpose(1, 2)[~valid] == 0).all(), "padding and idle rows give 0"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_as_exact_as_sdpa(dtype):
    """In 16 bits the error is that of SDPA without options: one rounding of the output."""
    q, k, v = (x.to(dtype) for x in tensors(1, 200, seed=4))
    positions = positions_of(torch.ones(1, 200, dtype=torch.bool))
    errors = []
    for scores in (Scores(SCALE), Scores(SCALE, 0, 1.5, SINKS)):
        out, _ = prefill_attention(q, k, v, positions, False, scores)
        assert out.dtype == dtype
        expected = oracle(q, k, v, positions, positions, 0, scores.softcap, scores.sinks)
        errors.append(float((out.double() - expected).norm()))
    assert errors[1] < 1.1 * errors[0]


def test_scores_of_a_block_stay_small(monkeypatch):
    """A matrix of scores has at most ROWS rows, all heads together."""
    sizes = []
    original = exact.eager_attention

    def watch(q, k, v, mask, scores, dropout=0.0):
        sizes.append((q.shape[1] * q.shape[2], k.shape[2]))
        return original(q, k, v, mask, scores, dropout)

    monkeypatch.setattr(exact, "eager_attention", watch)
    q, k, v = tensors(1, 700)
    prefill_attention(q, k, v, positions_of(torch.ones(1, 700, dtype=torch.bool)), False, Scores(SCALE, 100, 2.0))
    assert max(rows for rows, _ in sizes) <= exact.ROWS
    assert sum(rows for rows, _ in sizes) == 700 * HEADS
    assert max(columns for _, columns in sizes) <= exact.ROWS // HEADS + 100


@pytest.mark.parametrize(("family", "head_dim"), [("gemma2", 256), ("gpt_oss", 64)])
@pytest.mark.parametrize("left_dense", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_first_chunk_equals_eager_attention_of_transformers(family, head_dim, left_dense, padded):
    """Certified and dense layers alike; and later tokens of the dense layers too."""
    options = {"head_dim": head_dim, "window": 30, "layers": 2}
    dense, model = (tiny_model(family, **options) for _ in range(2))
    recipe = torch_witcert.CertifiedInt8Config(page_size=128)  # nothing becomes codes
    keep = (lambda _, name: "layers.0" in name) if left_dense else None
    torch_witcert.convert(model, recipe, filter_fn=keep, strict=not left_dense)
    ids, mask = prompt(80, 2), torch.ones(2, 81, dtype=torch.long)
    if padded:
        mask[1, :13] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    whole = torch.cat([ids, prompt(1, 2, seed=3)], 1)
    expected = forward(dense, whole, attention_mask=mask, position_ids=positions)
    cache = torch_witcert.CertifiedCache(model, 128, 2)
    logits = [
        forward(model, whole[:, :80], cache, attention_mask=mask[:, :80], position_ids=positions[:, :80]),
        forward(model, whole[:, 80:], cache, attention_mask=mask, position_ids=positions[:, 80:]),
    ]
    keep_tokens = mask.bool()
    torch.testing.assert_close(torch.cat(logits, 1)[keep_tokens], expected[keep_tokens], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "head_dim"), [("gemma2", 256), ("gpt_oss", 64)])
def test_without_a_cache_gradients_are_those_of_transformers(family, head_dim):
    dense, model = (tiny_model(family, head_dim=head_dim, window=30) for _ in range(2))
    torch_witcert.convert(model, RECIPE)
    ids = prompt(50, 2)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1, :9] = 0
    labels[1, :10] = -100  # what a padded query predicts is nobody's business
    gradients = []
    for each in (dense, model):
        each(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in each.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
