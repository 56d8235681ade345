"""Every way of generating gives the dense model's tokens: beams, samples, drafts, several turns, streams, pipelines.

Tokens can be compared because the gaps between scores are wider than what quantization does to them. `tiny_model` makes
them so: the attention's output projection is scaled by `attention_gain` (1 or 2 for greedy tokens; less for beams, whose
errors add up), and the error of the logits with it, while the other weights keep the logits apart. Prompts are chosen for
wide gaps, and for tokens that change without attention; every test measures its gaps and its errors.
"""

from __future__ import annotations

import threading
from functools import lru_cache

import pytest
import torch
from nn_models import VOCABULARY, converted, forward, left_padded, prompt, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer, pipeline
from transformers.generation import BaseStreamer

import torch_witcert
from torch_witcert import CertifiedInt8Config, WitCertConfig
from torch_witcert.nn.compatibility import CACHE_ARGUMENT

PROMPT, NEW_TOKENS = 70, 24
BEAMS, BEAM_TOKENS = 4, 16
#: Full pages of 16 that every row must have had in the end.
PAGES = 4
RECIPES = {
    "int8": CertifiedInt8Config(page_size=16),
    "witcert": WitCertConfig(page_size=16),
    "int4 values": CertifiedInt8Config(page_size=16, value_element="int4"),
}
#: Recipes on a Llama, and the default one on a model whose second layer has a sliding window.
CASES = [*(("llama", name) for name in RECIPES), ("qwen3", "int8")]
#: Gain of attention for greedy tokens and for beams.
GAINS = {"llama": (1.0, 0.15), "qwen3": (2.0, 0.4)}


def options_of(family: str, beams: bool) -> dict:
    return {"window": 40 if family == "qwen3" else None, "attention_gain": GAINS[family][beams]}


@lru_cache
def dense_model(family: str, beams: bool = False):
    return tiny_model(family, **options_of(family, beams))


def certified_model(family: str, recipe: str, beams: bool = False):
    return converted(family, recipe=RECIPES[recipe], **options_of(family, beams))


@lru_cache
def model_without_attention(family: str):
    return tiny_model(family, **{**options_of(family, False), "attention_gain": 0.0})


def log_probabilities(model, sequences: torch.Tensor, start: int, step_by_step: bool = False) -> torch.Tensor:
    """[B, new, vocabulary - 1] of the tokens from column `start` on, without padding's; token by token or in one forward."""
    if step_by_step:
        cache = torch_witcert.CertifiedCache(model, sequences.shape[1], sequences.shape[0])
        steps = [forward(model, sequences[:, :start], cache)[:, -1:]]
        steps += [forward(model, sequences[:, i : i + 1], cache) for i in range(start, sequences.shape[1] - 1)]
        logits = torch.cat(steps, 1)
    else:
        logits = forward(model, sequences)[:, start - 1 : -1]
    return logits.log_softmax(-1)[..., 1:]


def gaps_of(model, sequences: torch.Tensor, start: int) -> torch.Tensor:
    """Least difference of the two best tokens of each sequence [B]."""
    best = log_probabilities(model, sequences, start).topk(2, -1).values
    return (best[..., 0] - best[..., 1]).amin(1)


def assert_gap_exceeds_error(dense, model, sequences: torch.Tensor, start: int, gap: float) -> None:
    exact = log_probabilities(dense, sequences, start)
    error = float((log_probabilities(model, sequences, start, step_by_step=True) - exact).abs().max())
    assert 1e-4 < error < gap / 2


def generate(model, ids: torch.Tensor, **options) -> torch.Tensor:
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
    return model.generate(ids, **{**defaults, **options})


def assert_pages(model) -> None:
    assert (torch_witcert.last_cache(model).lengths // 16).min() >= PAGES


def widest(family: str, prompts: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Of prompts [n, PROMPT]: prompt and tokens [1, columns] with the widest gaps; a fifth of the tokens is attention's work."""
    dense, start = dense_model(family), prompts.shape[1]
    sequences = generate(dense, prompts)
    tokens = log_probabilities(dense, sequences, start).argmax(-1)
    changed = (
        (tokens != log_probabilities(model_without_attention(family), sequences, start).argmax(-1)).float().mean(1)
    )
    several = torch.tensor([len(set(row.tolist())) >= 6 for row in tokens])
    chosen = torch.where((changed > 0.2) & several, gaps_of(dense, sequences, start), 0.0).topk(count)
    return sequences[chosen.indices].split(1)


@lru_cache
def wide_prompts(family: str) -> tuple[torch.Tensor, ...]:
    return widest(family, torch.cat([prompt(PROMPT, seed=seed) for seed in range(200)]), 3)


# --- beams -----------------------------------------------------------------------------------------------------------


BEAM_SEARCH = {"num_beams": BEAMS, "num_return_sequences": BEAMS, "max_new_tokens": BEAM_TOKENS}


@lru_cache
def wide_beams(family: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Of many prompts the one whose beam search hangs on the least tight choice: prompt, beams [BEAMS, columns], margin.

    A search of its own, without a cache; prompts drop out as soon as a choice is tighter than the best margins are.
    """
    dense, least = dense_model(family, True), 0.02
    prompts = torch.cat([prompt(tokens, seed=seed) for seed in range(200)])
    sequences, scores = prompts[:, None], torch.zeros(len(prompts), 1)
    margins = torch.full((len(prompts),), float("inf"))
    for step in range(BEAM_TOKENS):
        new = forward(dense, sequences.flatten(0, 1))[:, -1].log_softmax(-1).unflatten(0, scores.shape)
        new[..., 0] = float("-inf")
        best = (scores[..., None] + new).flatten(1).topk(BEAMS + 1)
        gaps = best.values.diff().neg()
        margins = torch.minimum(margins, gaps.amin(1) if step == BEAM_TOKENS - 1 else gaps[:, -1])
        scores, chosen = best.values[:, :BEAMS], best.indices[:, :BEAMS]
        parents = sequences.gather(1, (chosen // VOCABULARY)[..., None].expand(-1, -1, sequences.shape[2]))
        sequences = torch.cat([parents, (chosen % VOCABULARY)[..., None]], 2)
        sequences, scores, margins = (x[margins > least] for x in (sequences, scores, margins))
    # Without attention the beams must be others, or a broken cache would find them too.
    for best in margins.argsort(descending=True).tolist():
        ids, expected = sequences[best][:1, :tokens], sequences[best]
        if not torch.equal(generate(model_without_attention(family), ids, **BEAM_SEARCH), expected):
            return ids, expected, float(margins[best])
    raise AssertionError("no beams that depend on attention")


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_beams(family, recipe):
    ids, expected, margin = wide_beams(family, PROMPT)
    dense, model = dense_model(family, True), certified_model(family, recipe, True)
    assert torch.equal(generate(dense, ids, **BEAM_SEARCH), expected)
    chosen = (expected[:, PROMPT:] - 1)[..., None]
    exact, found = (log_probabilities(m, expected, PROMPT, m is model).gather(-1, chosen) for m in (dense, model))
    assert 1e-6 < float((found - exact).cumsum(1).abs().max()) < margin / 2
    cache, moved = torch_witcert.CertifiedCache(model, 96, BEAMS), []
    cache.reorder_cache = lambda index: (moved.append(index.tolist()), type(cache).reorder_cache(cache, index))
    assert torch.equal(generate(model, ids, **BEAM_SEARCH, **{CACHE_ARGUMENT: cache}), expected)
    assert sum(len(set(index)) < BEAMS for index in moved) > 4, "beams are dropped and copied"
    assert_pages(model)
    counts = cache.state.groups[0].reference_counts(cache.lengths)
    assert int(counts.max()) > 1, "beams share pages"
    assert int(counts.sum()) == BEAMS * (int(cache.lengths[0]) // 16)


@pytest.mark.parametrize("family", GAINS)
def test_beams_of_a_padded_batch(family):
    """Two prompts of different length at once: beams do not cross from one to the other."""
    model, lengths = certified_model(family, "int8", True), (PROMPT, 50)
    wide = [wide_beams(family, tokens) for tokens in lengths]
    ids, mask = left_padded([ids for ids, _, _ in wide])
    out = generate(model, ids, attention_mask=mask, **BEAM_SEARCH)
    for part, (_, expected, margin), tokens in zip(out.split(BEAMS), wide, lengths, strict=True):
        assert margin > 0.02
        assert torch.equal(part[:, PROMPT - tokens :], expected)
    assert_pages(model)


# --- samples ---------------------------------------------------------------------------------------------------------


class GumbelSampling:
    """Stands in for `torch.multinomial`: the largest of log-probability plus Gumbel noise, which leaves a gap to look at."""

    def __init__(self) -> None:
        self.gap = float("inf")

    def __call__(self, probabilities: torch.Tensor, num_samples: int, **options) -> torch.Tensor:
        noise = -torch.empty_like(probabilities).exponential_().log()
        best = (probabilities.log() + noise).topk(num_samples + 1, -1)
        self.gap = min(self.gap, float(best.values.diff(dim=-1).neg().min()))
        return best.indices[:, :num_samples]


@lru_cache
def wide_samples(family: str) -> tuple[int, torch.Tensor, float]:
    """Seed whose samples of the dense model hang on the least tight choice, the samples, and the gap."""
    best = (0, None, 0.0)
    for seed in range(100):
        sampling = GumbelSampling()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "multinomial", sampling)
            torch.manual_seed(seed)
            samples = generate(dense_model(family, True), prompt(PROMPT, seed=seed), **SAMPLING)
        if sampling.gap > best[2]:
            best = (seed, samples, sampling.gap)
    return best


SAMPLING = {"do_sample": True, "num_return_sequences": 4, "top_k": 0, "max_new_tokens": 10}


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_samples(family, recipe, monkeypatch):
    dense, model = dense_model(family, True), certified_model(family, recipe, True)
    seed, expected, gap = wide_samples(family)
    exact, found = (log_probabilities(m, expected, PROMPT, m is model) for m in (dense, model))
    assert 1e-4 < float((found - exact).abs().max()) < gap / 2
    monkeypatch.setattr(torch, "multinomial", GumbelSampling())
    torch.manual_seed(seed)
    assert torch.equal(generate(model, prompt(PROMPT, seed=seed), **SAMPLING), expected)
    assert len({tuple(row) for row in expected.tolist()}) == 4
    assert_pages(model)


# --- drafts ------------------------------------------------------------------------------------------------------------


def draft_options(family: str, kind: str) -> dict:
    if kind == "prompt lookup":
        return {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1}
    # The same model drafts nothing but right tokens, another one nothing but wrong ones.
    assistant = tiny_model(family, **options_of(family, False), seed=0 if kind == "right drafts" else 1)
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return {"assistant_model": assistant}


@pytest.mark.parametrize("kind", ["prompt lookup", "right drafts", "wrong drafts"])
@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_drafts(family, recipe, kind):
    dense, model, sequence = dense_model(family), certified_model(family, recipe), wide_prompts(family)[0]
    assert_gap_exceeds_error(dense, model, sequence, PROMPT, float(gaps_of(dense, sequence, PROMPT)))
    forwards, cropped = [], []
    model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    cache = torch_witcert.CertifiedCache(model, 128)
    cache.crop = lambda count: (cropped.append(int(count)), type(cache).crop(cache, count))
    out = generate(model, sequence[:, :PROMPT], **draft_options(family, kind), **{CACHE_ARGUMENT: cache})
    assert torch.equal(out, sequence)
    assert int(cache.lengths) == int(cache.get_seq_length()) == PROMPT + NEW_TOKENS - 1
    if kind == "right drafts":
        assert len(forwards) == NEW_TOKENS // 6
    else:
        assert min(cropped) <= -3, "drafts were taken back"
    assert_pages(model)


# --- turns and padding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_left_padding(family, recipe):
    dense, model = dense_model(family), certified_model(family, recipe)
    longer = torch.cat([prompt(79, seed=seed) for seed in range(100)])
    sequences = [*wide_prompts(family)[:2], *widest(family, longer, 1)]
    starts = [sequence.shape[1] - NEW_TOKENS for sequence in sequences]
    for sequence, start in zip(sequences, starts, strict=True):
        assert_gap_exceeds_error(dense, model, sequence, start, float(gaps_of(dense, sequence, start)))
    ids, mask = left_padded([sequence[:, :start] for sequence, start in zip(sequences, starts, strict=True)])
    out = generate(model, ids, attention_mask=mask)
    for row, sequence in zip(out, sequences, strict=True):
        assert torch.equal(row[-sequence.shape[1] :], sequence[0])
    assert_pages(model)


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_turns(family, recipe):
    """Three turns on one cache; each asks about the whole conversation, and the cache has all but the new part."""
    dense, model = dense_model(family), certified_model(family, recipe)
    cache = torch_witcert.CertifiedCache(model, 256)
    conversation = wide_prompts(family)[0][:, :0]
    for turn in range(3):
        new = torch.cat([prompt(20, seed=seed) for seed in range(150)])
        asked = torch.cat([conversation.expand(150, -1), new], 1)
        expected = widest(family, asked, 1)[0] if turn else wide_prompts(family)[0]
        start = expected.shape[1] - NEW_TOKENS
        assert_gap_exceeds_error(dense, model, expected, start, float(gaps_of(dense, expected, start)))
        conversation = generate(model, expected[:, :start], **{CACHE_ARGUMENT: cache})
        assert torch.equal(conversation, expected)
        assert int(cache.lengths) == int(cache.get_seq_length()) == start + NEW_TOKENS - 1
    assert int(cache.lengths) // 16 > 2 * PAGES


# --- streams and pipelines ---------------------------------------------------------------------------------------------


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


def word_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", unk_token="w0", padding_side="left")


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}])
def test_a_streamer_gets_every_token_once(options):
    model, collector = certified_model("llama", "int8"), Collector()
    sequence = wide_prompts("llama")[0]
    generate(model, sequence[:, :PROMPT], streamer=collector, **options)
    assert collector.tokens == sequence[0].tolist()
    assert collector.ended == 1


def test_a_text_streamer_in_a_thread():
    model, tokenizer = certified_model("llama", "int8"), word_tokenizer()
    sequence = wide_prompts("llama")[0]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=generate, args=(model, sequence[:, :PROMPT]), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text.split() == tokenizer.decode(sequence[0, PROMPT:]).split()


def test_text_generation_pipeline():
    model, tokenizer = certified_model("llama", "int8"), word_tokenizer()
    sequences = wide_prompts("llama")
    texts = [tokenizer.decode(sequence[0, :PROMPT]) for sequence in sequences]
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    for batch_size in (1, 3):
        outputs = generator(
            texts, batch_size=batch_size, max_new_tokens=NEW_TOKENS, do_sample=False, return_full_text=False
        )
        for (output,), sequence in zip(outputs, sequences, strict=True):
            assert output["generated_text"].split() == tokenizer.decode(sequence[0, PROMPT:]).split()
    assert torch_witcert.telemetry(model).coverage == 1
    assert_pages(model)
