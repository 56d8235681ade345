"""Tiny random models and helpers for the tests of `torch_witcert.nn`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import torch_witcert
from torch_witcert.config import Recipe
from torch_witcert.nn.compatibility import CACHE_ARGUMENT
from torch_witcert.nn.exact import Scores
from torch_witcert.ops.dither import dither
from torch_witcert.ops.quantize import dequantize_keys
from torch_witcert.ops.storage import POOL_PARTS

VOCABULARY = 97
#: Small pages: a hundred tokens fill several.
RECIPE = torch_witcert.CertifiedInt8Config(page_size=16)

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
}
#: Small scores are not capped, large ones are; two small experts.
FAMILY_OPTIONS = {
    "gemma2": {
        "attn_logit_softcapping": 4.0,
        "query_pre_attn_scalar": 64,
        "final_logit_softcapping": None,
        "attn_implementation": "eager",
    },
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "attn_implementation": "eager"},
}


def tiny_model(
    family: str = "llama",
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attention_gain: float = 1.0,
    **options,
) -> PreTrainedModel:
    """A random model in eval mode. `window` is for all families but Llama: every layer of Mistral and Phi3, else every second.

    Attention adds to the residual stream about as much as the embeddings are, and its scores stay moderate, so that greedy
    tokens depend on attention without hanging on its last digits. `attention_gain` multiplies the output projections of
    attention, and with them what quantization does to the logits; the gaps between logits stay as wide as they are.
    """
    torch.manual_seed(seed)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.15,
        **FAMILY_OPTIONS.get(family, {}),
        **options,
    }
    if family in ("mistral", "phi3"):
        common["sliding_window"] = window
    elif family != "llama":
        # Gemma2 and GptOss want a window even where no layer uses it.
        unused = 4096 if family in FAMILY_OPTIONS else None
        common |= {"use_sliding_window": window is not None, "sliding_window": window or unused}
        common["layer_types"] = [
            "sliding_attention" if window and layer % 2 else "full_attention" for layer in range(layers)
        ]
    config_class, model_class = CLASSES[family]
    config = config_class(**common)
    if family == "phi3":
        config.head_dim = head_dim
    model = model_class(config)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            if family == "phi3":
                attention.qkv_proj.weight[: heads * head_dim].mul_(0.3)
            else:
                (attention.q_norm if family == "qwen3" else attention.q_proj).weight.mul_(0.3)
            attention.o_proj.weight.mul_(0.03 * attention_gain)
            down = layer.mlp.experts.down_proj if family == "gpt_oss" else layer.mlp.down_proj.weight
            down.mul_(0.03)
            if family == "gemma2":  # what it adds to the stream is normalised, then multiplied by 1 + weight
                layer.post_attention_layernorm.weight.fill_(-0.7)
                layer.post_feedforward_layernorm.weight.fill_(-0.7)
            if family == "gpt_oss":
                attention.sinks.copy_(torch.linspace(-1, 2, heads))
    return model.eval().to(dtype)


def converted(*arguments, recipe: Recipe = RECIPE, **options) -> PreTrainedModel:
    return torch_witcert.convert(tiny_model(*arguments, **options), recipe)


def prompt(tokens: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """Random token ids [batch, tokens], never the padding id 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, tokens), generator=generator)


@torch.no_grad()
def forward(model: PreTrainedModel, ids: torch.Tensor, cache: object | None = None, **options) -> torch.Tensor:
    """Logits [B, T, vocabulary] of one forward, with the cache under the name that this version uses."""
    if cache is not None:
        options = {CACHE_ARGUMENT: cache, "use_cache": True, **options}
    else:
        options = {"use_cache": False, **options}
    return model(input_ids=ids, **options).logits


def left_padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask [B, longest] of rows [1, n], padded with 0 on the left."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    return ids, (ids != 0).long()


def greedy(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, **options) -> torch.Tensor:
    """New tokens [B, new_tokens] of greedy generation."""
    out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None, **options)
    return out[:, ids.shape[1] :]


def decisive_prompt(model: PreTrainedModel, tokens: int, new_tokens: int, batch: int, gap: float) -> torch.Tensor:
    """Ids [batch, tokens] after which every greedy step of `model` leaves at least `gap` between its two best logits."""
    rows = []
    for seed in range(100):
        ids = prompt(tokens, seed=seed)
        sequence = torch.cat([ids, greedy(model, ids, new_tokens)], 1)
        best = forward(model, sequence)[:, tokens - 1 : -1].topk(2, -1).values
        if float((best[..., 0] - best[..., 1]).min()) > gap:
            rows.append(ids)
        if len(rows) == batch:
            return torch.cat(rows)
    raise AssertionError(f"no {batch} prompts with a gap of {gap}")


def stored_codes(cache: torch_witcert.CertifiedCache, row: int) -> list[torch.Tensor]:
    """Everything that is stored of a row's complete pages that reads can reach, certified layer by certified layer."""
    complete = int(cache.lengths[row]) // cache.config.page_size
    parts = []
    for index in cache.certified_layers:
        layer = cache.layers[index]
        pages = layer.group.page_table[row, max(0, complete - layer.group.reached) : complete].long()
        assert (pages >= 0).all(), "a page within reach is not stored"
        parts += [part[pages] for part in layer.store[: len(POOL_PARTS)] if part.numel()]
    return parts


def exact_tail(cache: torch_witcert.CertifiedCache, row: int) -> list[torch.Tensor]:
    """Keys and values [Hkv, n, D] of a row's exact tokens from the page before the unfinished one on, layer by layer."""
    size, length = cache.config.page_size, int(cache.lengths[row])
    first = min(length, int(cache.state.exact_from()[row]))
    slots = torch.arange(first, length) % (2 * size)
    return [tail[row][:, slots] for layer in cache.layers for tail in (layer.store.k_tail, layer.store.v_tail)]


@dataclass
class AttentionCall:
    """What a layer of a cache was given, and what it gave."""

    layer: int
    q: torch.Tensor  # [B, H, T, D]
    k: torch.Tensor  # [B, Hkv, T, D]
    v: torch.Tensor
    valid: torch.Tensor | None  # bool [B, T]
    scores: Scores
    lengths: torch.Tensor  # [B], before the forward
    stored_keys: list[torch.Tensor]  # of each row: float64 [Hkv, S, D] as dequantized from its complete pages
    out: torch.Tensor  # [B, H, T, D]


def recorded_attention(cache: torch_witcert.CertifiedCache, run: Callable[[], object]) -> list[AttentionCall]:
    """Every call of a layer's `attend` while `run` goes through the cache, in order."""
    calls = []

    def recording(layer):
        def attend(q, k, v, valid, scores):
            keys = [dequantized_keys(cache, layer, row) for row in range(q.shape[0])]
            lengths = cache.lengths.clone()
            out = type(layer).attend(layer, q, k, v, valid, scores)
            calls.append(AttentionCall(layer.index, q, k, v, valid, scores, lengths, keys, out))
            return out

        return attend

    for layer in cache.layers:
        layer.attend = recording(layer)
    try:
        run()
    finally:
        for layer in cache.layers:
            del layer.attend
    return calls


def dequantized_keys(cache: torch_witcert.CertifiedCache, layer, row: int) -> torch.Tensor:
    """float64 [Hkv, S, D]: what the complete pages of a row say the keys are; NaN where a window has left them."""
    complete = int(cache.lengths[row]) // cache.config.page_size
    pages = layer.group.page_table[row, :complete].long()
    stored = pages >= 0
    stored[: max(0, complete - layer.group.reached)] = False
    pages = pages.clamp_min(0)
    store, store_format = layer.store, layer.shape.store_format
    parts = (part[pages] if part.numel() else part for part in store[:4])
    noise = None
    if store_format.key.is_dithered:
        size, dim = layer.shape.page_size, layer.shape.head_dim
        noise = dither(store.page_keys[pages], layer.index, False, store_format.key.dither, size, dim)
    keys = dequantize_keys(*parts, store_format, layer.outlier_channels, noise)
    keys = torch.where(stored[:, None, None, None], keys, float("nan"))
    return keys.transpose(0, 1).flatten(1, 2)


class Histories:
    """What each row of a cache was given, kept apart from it, so that a lone cache can be given the same.

    A row that was copied, cropped or shared must then hold the same bits as the lone one, and its next read must return them.
    The model's own matrix products are left out: their bits depend on the batch.
    """

    def __init__(self, model: PreTrainedModel, cache: torch_witcert.CertifiedCache) -> None:
        self.model = model
        self.cache = cache
        #: Of each row its chunks, each a list over layers of (q, k, v, scores, out), [1, heads, T, D].
        self.rows: list[list[list[tuple]]] = [[] for _ in range(cache.batch_size)]
        self.spent = cache.state.spent.clone()

    def forward(self, ids: torch.Tensor, counts: list[int] | None = None) -> torch.Tensor:
        """A forward of which row b takes the first counts[b] columns; logits."""
        self.spent = self.cache.state.spent.clone()
        options = {}
        counts = [ids.shape[1]] * ids.shape[0] if counts is None else counts
        if min(counts) < ids.shape[1]:
            options["attention_mask"] = torch.arange(ids.shape[1])[None, None, None] < torch.tensor(counts).view(
                -1, 1, 1, 1
            )
        offsets = self.cache.lengths[:, None] + torch.arange(ids.shape[1])
        logits = []

        def run() -> None:
            logits.append(forward(self.model, ids, self.cache, position_ids=offsets, **options))

        calls = recorded_attention(self.cache, run)
        for row, count in enumerate(counts):
            if count:
                tensors = [[x[row : row + 1, :, :count] for x in (c.q, c.k, c.v, c.out)] for c in calls]
                self.rows[row].append([(*t[:3], c.scores, t[3]) for t, c in zip(tensors, calls, strict=True)])
        return logits[0]

    def take(self, index: list[int]) -> None:
        """Row b becomes row index[b]."""
        self.rows = [list(self.rows[row]) for row in index]

    def crop(self, row: int, length: int) -> None:
        kept, total = [], 0
        for chunk in self.rows[row]:
            size = min(chunk[0][0].shape[2], length - total)
            if size > 0:
                kept.append([(*(x[:, :, :size] for x in part[:3]), part[3], part[4][:, :, :size]) for part in chunk])
                total += size
        self.rows[row] = kept

    def check(self, row: int, read: bool = True) -> None:
        """The row has the bits of a lone cache: pages, exact tail, and, if its last forward was a read, output and certificates."""
        cache, chunks = self.cache, self.rows[row]
        seeds = int(cache.state.seeds[row]) if cache.state.seeds.numel() else None
        alone = torch_witcert.CertifiedCache(self.model, cache.capacity_per_row, 1, seeds=seeds)
        alone.state.untouched = False
        for layer, other in zip(alone.layers, cache.layers, strict=True):
            layer.outlier_channels.copy_(other.outlier_channels)
        for number, chunk in enumerate(chunks):
            if number == len(chunks) - 1 and alone.state.spent.numel():
                alone.state.spent.copy_(self.spent[row : row + 1])
            for layer, (q, k, v, scores, out) in zip(alone.layers, chunk, strict=True):
                found = layer.attend(q, k, v, None, scores)
                if read and number == len(chunks) - 1:
                    assert torch.equal(found, out)
        assert int(cache.lengths[row]) == int(alone.lengths)
        of_row, lone = (stored_codes(c, r) for c, r in ((cache, row), (alone, 0)))
        for part, expected in zip(of_row, lone, strict=True):
            assert torch.equal(part, expected)
        for part, expected in zip(exact_tail(cache, row), exact_tail(alone, 0), strict=True):
            assert torch.equal(part, expected[:, expected.shape[1] - part.shape[1] :])
        if read:
            for part, expected in zip(
                torch_witcert.certificates(cache), torch_witcert.certificates(alone), strict=True
            ):
                assert torch.equal(part[:, row], expected[:, 0])
