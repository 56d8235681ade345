"""SmolLM2-135M continues passages of the licence in every way of generating, 128 tokens each: the dense model's tokens,
all of them.

Float32 on the CPU, pages of 16: a row ends with 12 complete pages or more, and its text hangs on them. The passages are
those whose greedy continuation the dense model is sure of: its two best logits are further apart at every token than
what the codes do to them. Beams and a padded conversation are decoded with every third layer certified, which is what
the reference operators can do in the time of a test; drafts with all 30.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from nn_models import left_padded
from test_evaluation import needs_weights

import torch_witcert
from torch_witcert.evaluation import smollm2
from torch_witcert.nn.compatibility import CACHE_ARGUMENT

pytestmark = needs_weights
LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
NEW_TOKENS, BEAMS, PAGES = 128, 4, 12
OPTIONS = {
    "max_new_tokens": NEW_TOKENS,
    "min_new_tokens": NEW_TOKENS,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
}


@pytest.fixture(scope="module")
def loaded() -> smollm2.Loaded:
    return smollm2.load()


@pytest.fixture(scope="module")
def dense(loaded):
    return loaded.model


@pytest.fixture(scope="module")
def licence(loaded) -> torch.Tensor:
    """Token ids [1, S]."""
    return loaded.tokenizer(LICENSE.read_text(encoding="utf-8"), return_tensors="pt").input_ids


def certified(dense, every: int):
    """A copy with every `every`-th layer certified."""
    recipe = torch_witcert.CertifiedInt8Config(page_size=16)
    model = copy.deepcopy(dense)
    torch_witcert.convert(model, recipe, filter_fn=lambda module, _: module.layer_idx % every == 0, strict=every == 1)
    assert torch_witcert.report(model).certified == 30 // every
    return model


@pytest.fixture(scope="module")
def third(dense):
    return certified(dense, 3)


@torch.no_grad()
def generate(model, ids: torch.Tensor, cache=None, **options):
    cache = {} if cache is None else {CACHE_ARGUMENT: cache}
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **OPTIONS, **cache, **options})


@torch.no_grad()
def assert_dense_tokens(dense, sequence: torch.Tensor, *parts: tuple[int, torch.Tensor]) -> None:
    """NEW_TOKENS tokens of a sequence [S] are the dense model's, each after the ones before it, and so all of them.

    Args:
        parts: place of a first token, and the logits [n, vocabulary] that it and those after it were chosen from.
    """
    exact = dense(sequence[None], use_cache=False).logits[0]
    chosen = []
    for start, logits in parts:
        tokens, expected = sequence[start : start + len(logits)], exact[start - 1 : start - 1 + len(logits)]
        errors = (logits - expected).abs().amax(-1)
        expected[:, smollm2.END_OF_TURN] = float("-inf")  # which min_new_tokens forbids
        best = expected.topk(2)
        gaps = best.values[:, 0] - best.values[:, 1]
        for place in (best.indices[:, 0] != tokens).nonzero()[:, 0].tolist():
            raise AssertionError(
                f"token {place} of {len(logits)} differs: the dense model's two best logits are {gaps[place]:.4f} "
                f"apart there, and the certified model's logits differ from them by up to {errors[place]:.4f}"
            )
        assert 1e-2 < errors.max() < 0.6, "what codes do to logits"
        chosen += tokens.tolist()
    assert len(chosen) == NEW_TOKENS
    assert len(set(chosen)) > 15, "more than a loop of a few words"


def test_beams(dense, third, licence):
    """Four beams, all of them returned: the four sequences of the dense model's search in their order.

    Its other beams are often nearly tied, so that the two searches part for a while; that changes nothing of what is
    left.
    """
    ids, moved = licence[:, :96], []
    options = {"num_beams": BEAMS, "num_return_sequences": BEAMS, "output_logits": False, "output_scores": True}
    expected = generate(dense, ids, **options)
    cache = torch_witcert.CertifiedCache(third, 96 + NEW_TOKENS, BEAMS)
    cache.reorder_cache = lambda index: (moved.append(index.tolist()), type(cache).reorder_cache(cache, index))
    found = generate(third, ids, cache, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=0, atol=5e-3)
    assert len({tuple(row) for row in found.sequences.tolist()}) == BEAMS
    assert sum(len(set(index)) < BEAMS for index in moved) > 40, "beams are dropped and copied"
    assert (cache.lengths // 16).min() >= PAGES
    assert torch_witcert.telemetry(cache).coverage > 0.99


def test_two_turns_of_a_left_padded_batch(dense, third, licence):
    """64 tokens, more text, and 64 tokens more, in two rows of different length on one cache."""
    cache = torch_witcert.CertifiedCache(third, 96 + 30 + NEW_TOKENS, 2)
    turns = [[licence[:, 1350:1446], licence[:, 1770:1840]], [licence[:, 550:580], licence[:, 1450:1480]]]
    rows, parts = [licence[:, :0]] * 2, [[], []]
    half = {"max_new_tokens": NEW_TOKENS // 2, "min_new_tokens": NEW_TOKENS // 2}
    for asked in turns:
        rows = [torch.cat(pair, 1) for pair in zip(rows, asked, strict=True)]
        ids, mask = left_padded(rows)
        out = generate(third, ids, cache, attention_mask=mask, **half)
        for number, logits in enumerate(torch.stack(out.logits, 1)):
            parts[number].append((rows[number].shape[1], logits))
        rows = [
            sequence[None, ids.shape[1] - row.shape[1] :] for row, sequence in zip(rows, out.sequences, strict=True)
        ]
        assert cache.lengths.tolist() == [row.shape[1] - 1 for row in rows]
    for row, row_parts in zip(rows, parts, strict=True):
        assert_dense_tokens(dense, row[0], *row_parts)
    assert (cache.lengths // 16).min() >= PAGES


def test_prompt_lookup(dense, licence):
    """Drafts of ten tokens from the text so far: most are taken, some are given back."""
    ids, model, forwards, cropped = licence[:, :96], certified(dense, 1), [], []
    model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    cache = torch_witcert.CertifiedCache(model, 96 + NEW_TOKENS)
    cache.crop = lambda count: (cropped.append(int(count)), type(cache).crop(cache, count))
    out = generate(model, ids, cache, prompt_lookup_num_tokens=10)
    assert_dense_tokens(dense, out.sequences[0], (96, torch.cat(out.logits)))
    assert int(cache.lengths) == int(cache.get_seq_length()) == 96 + NEW_TOKENS - 1
    assert len(forwards) < NEW_TOKENS // 3, "drafts were taken"
    assert min(cropped) < 0, "drafts were given back"
    assert torch_witcert.telemetry(cache).coverage > 0.99
