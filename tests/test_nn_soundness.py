"""Bounds of a whole model against exact attention in float64: every read of every layer, no tolerance."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from nn_models import RECIPE, AttentionCall, converted, forward, left_padded, prompt, recorded_attention

import torch_witcert
from torch_witcert.nn.exact import Scores

CASES = {
    "llama": {"family": "llama"},
    "llama, bf16": {"family": "llama", "dtype": torch.bfloat16},
    "llama, fp16": {"family": "llama", "dtype": torch.float16},
    "three heads of 128": {"family": "llama", "heads": 3, "kv_heads": 1, "head_dim": 128, "dtype": torch.bfloat16},
    "qwen2, window in one layer": {"family": "qwen2", "window": 40},
    "gemma2, soft capping and windows": {
        "family": "gemma2",
        "head_dim": 256,
        "window": 40,
        "attn_logit_softcapping": 20.0,
    },
    "gpt_oss, sinks and windows": {"family": "gpt_oss", "window": 40, "dtype": torch.bfloat16},
    "phi3, 96 channels": {"family": "phi3", "head_dim": 96},
    "mistral, window": {"family": "mistral", "window": 40, "dtype": torch.bfloat16},
}


def make_hard(model) -> None:
    """Sharp scores, an outlier channel in the keys and a huge token now and then: bounds far from 0."""
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            if hasattr(attention, "qkv_proj"):
                queries, keys, _ = attention.qkv_proj.weight.split([heads * attention.head_dim for heads in (4, 2, 2)])
            else:
                queries, keys = attention.q_proj.weight, attention.k_proj.weight
            queries.mul_(6)
            keys[5].mul_(12)
            if hasattr(attention, "sinks"):
                attention.sinks.add_(6)  # sharp scores would leave nothing to smaller sinks
        model.model.embed_tokens.weight[7].mul_(30)


class ExactHistory:
    """Exact keys and values of each layer and row by position, float64 [Hkv, S, D]."""

    def __init__(self) -> None:
        self.keys: dict[tuple[int, int], torch.Tensor] = {}
        self.values: dict[tuple[int, int], torch.Tensor] = {}

    def append(self, call: AttentionCall, row: int) -> None:
        columns = slice(None) if call.valid is None else call.valid[row]
        for store, fresh in ((self.keys, call.k), (self.values, call.v)):
            new = fresh[row][:, columns].double()
            old = store.get((call.layer, row), new[:, :0])
            store[call.layer, row] = torch.cat([old, new], 1)


def weights(scores: torch.Tensor, options: Scores, head: int) -> torch.Tensor:
    """Softmax of float64 scores [S], capped, with the weight of the head's sink at the end where there is one."""
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.sinks is not None:
        scores = torch.cat([scores, options.sinks[head : head + 1].double()])
    return torch.softmax(scores, 0)


def distances(call: AttentionCall, history: ExactHistory, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Total variation and output error [H] of a row's read, the largest over its valid columns."""
    keys, values = history.keys[call.layer, row], history.values[call.layer, row]
    stored = call.stored_keys[row]
    used = torch.cat([stored, keys[:, stored.shape[1] :]], 1)
    group = call.q.shape[1] // keys.shape[0]
    columns = range(call.q.shape[2]) if call.valid is None else call.valid[row].nonzero()[:, 0].tolist()
    worst = torch.zeros(2, call.q.shape[1], dtype=torch.float64)
    for rank, column in enumerate(columns):
        at = int(call.lengths[row]) + rank
        seen = slice(max(0, at - call.scores.window + 1) if call.scores.window else 0, at + 1)
        for head in range(call.q.shape[1]):
            q = call.q[row, head, column].double() * call.scores.scale
            kv = head // group
            p, p_used = (weights(k[kv, seen] @ q, call.scores, head) for k in (keys, used))
            error = (call.out[row, head, column].double() - p[: len(values[kv, seen])] @ values[kv, seen]).norm()
            worst[:, head] = torch.maximum(worst[:, head], torch.stack([(p - p_used).abs().sum() / 2, error]))
    return worst[0], worst[1]


@pytest.mark.parametrize("case", CASES)
def test_every_bound_holds(case):
    options = dict(CASES[case])
    model = converted(options.pop("family"), **options)
    make_hard(model)
    ids, mask = left_padded([prompt(90, seed=1), prompt(70, seed=2)])
    holes = torch.ones(2, 20)
    holes[1, ::3] = 0
    cache = torch_witcert.CertifiedCache(model, 192, 2)
    history = ExactHistory()
    checked = tv_total = loose = 0
    steps = [(ids, mask), (prompt(20, 2, seed=3), holes)]
    steps += [(prompt(1, 2, seed=seed), torch.ones(2, 1)) for seed in range(10, 22)]
    steps += [(prompt(20, 2, seed=4), torch.ones(2, 20)), (torch.full((2, 1), 7), torch.ones(2, 1))]
    so_far = torch.zeros(2, 0)
    for number, (tokens, valid) in enumerate(steps):
        so_far = torch.cat([so_far, valid], 1)
        calls = recorded_attention(cache, partial(forward, model, tokens, cache, attention_mask=so_far))
        found = torch_witcert.certificates(cache)
        for index, call in enumerate(calls):
            for row in range(2):
                history.append(call, row)
                if number == 0:
                    continue  # the prefill is exact and has no certificate
                tv, output = distances(call, history, row)
                assert (tv <= found.tv[index, row].double()).all(), (number, index, row)
                assert (output <= found.output[index, row].double()).all(), (number, index, row)
                checked += len(tv)
                tv_total += float(tv.sum())
                loose += float(found.tv[index, row].sum())
    assert checked == (len(steps) - 1) * 2 * 2 * model.config.num_attention_heads
    assert tv_total / checked > 1e-3, "the case is too easy to test anything"
    assert loose / tv_total < 60, "the bounds say nothing"
    assert cache.lengths.tolist() == so_far.sum(1).tolist()


def test_the_check_itself_can_fail():
    """With the certificates of a model that quantizes nothing the same comparison finds violations."""
    model = converted(recipe=RECIPE)
    make_hard(model)
    cache = torch_witcert.CertifiedCache(model, 192, 1)
    history = ExactHistory()
    violations = 0
    for tokens in (prompt(90), prompt(1, seed=2), prompt(1, seed=3)):
        for call in recorded_attention(cache, partial(forward, model, tokens, cache)):
            history.append(call, 0)
            if tokens.shape[1] == 1:
                tv, _ = distances(call, history, 0)
                violations += int((tv > 1e-4).sum())
    assert violations > 0
