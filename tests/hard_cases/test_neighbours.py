"""Hard case H31: answers that depend on the neighbours."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from nn_models import RECIPE, converted, stored_codes
from test_contract import RECIPES, assert_same_bits, row_bits

import torch_witcert
from torch_witcert import CertifiedCache
from torch_witcert.nn.exact import Scores


class Request:
    """Queries, keys and values of a request as its layers would make them, [L, heads, S, D] each, and what each read
    gave."""

    def __init__(self, seed: int, prefix: Request | None = None, shared: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q, self.k, self.v = (torch.randn(2, heads, 96, 64, generator=generator) for heads in (4, 2, 2))
        if prefix is not None:
            for mine, others in ((self.k, prefix.k), (self.v, prefix.v)):
                mine[:, :, :shared] = others[:, :, :shared]


def serve(cache: CertifiedCache, rows: dict[int, tuple[Request, int]]) -> dict[int, list[torch.Tensor]]:
    """A forward in which rows take the next `count` tokens of their requests, padded with NaN on the left; outputs by
    row.

    The layers are driven directly: matrix products of the model itself may depend on the batch, what is ours must not.
    """
    width = max(count for _, count in rows.values())
    tensors = [torch.full((2, cache.batch_size, heads, width, 64), math.nan) for heads in (4, 2, 2)]
    valid = torch.zeros(cache.batch_size, width, dtype=torch.bool)
    for row, (request, count) in rows.items():
        start = int(cache.lengths[row])
        valid[row, width - count :] = True
        for tensor, source in zip(tensors, (request.q, request.k, request.v), strict=True):
            tensor[:, row, :, width - count :] = source[:, :, start : start + count]
    scores = Scores(64**-0.5)
    out = [layer.attend(*(x[layer.index] for x in tensors), valid, scores) for layer in cache.layers]
    return {row: [x[row, :, width - count :] for x in out] for row, (_, count) in rows.items()}


#: Tokens of request A: prompt, then steps over a page boundary.
PROMPT, LENGTH = 70, 83


def finish(cache: CertifiedCache, row: int, request: Request, others: dict[int, Request]) -> list[torch.Tensor]:
    """Steps of one token up to LENGTH, others beside it: outputs and certificates of each, then everything stored."""
    found = []
    while int(cache.lengths[row]) < LENGTH:
        each = {row: request} | {number: r for number, r in others.items() if int(cache.lengths[number]) < LENGTH}
        found += serve(cache, {number: (r, 1) for number, r in each.items()})[row]
        found += [part[:, row].clone() for part in torch_witcert.certificates(cache)]
    return found + row_bits(cache, row)


def cache_for(model, recipe: str, seeds: list[int], **options) -> CertifiedCache:
    return CertifiedCache(model, 96, len(seeds), **({"seeds": seeds} if recipe == "witcert" else {}), **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_h31_a_request_has_the_same_bits_in_any_company(recipe, tmp_path):
    """Alone, in a batch, elsewhere in the pool, preempted in four ways, after a prefix hit: outputs, certificates,
    codes.

    Dither is keyed by (seed, page, layer, head, token, channel) and splits depend on the capacity, so bits are equal
    throughout. Two things are the recipe's to fix: outlier pairs (else chosen from the first prompts in the cache) and,
    for the probabilistic radius, a horizon that the request stays within (a prefix hit reads its first tokens
    certified, which spends).
    """
    model, a = converted(recipe=RECIPES[recipe]), Request(1)
    others = {number: Request(10 + number) for number in range(8)}
    alone = cache_for(model, recipe, [7])
    serve(alone, {0: (a, PROMPT)})
    expected = finish(alone, 0, a, {})

    # In a batch of eight, all prefilled together with other lengths.
    seeds = [1, 2, 3, 7, 4, 5, 6, 8]
    neighbours = {number: r for number, r in others.items() if number != 3}
    batch = cache_for(model, recipe, seeds)
    serve(batch, {3: (a, PROMPT)} | {number: (r, 30 + 5 * number) for number, r in neighbours.items()})
    assert_same_bits(finish(batch, 3, a, neighbours), expected)

    # In another slot and other pages: rows have come and gone before it arrives.
    pool = cache_for(model, recipe, seeds[::-1], num_pages=30)
    serve(pool, {0: (others[0], 50), 1: (others[1], 80), 6: (others[6], 33)})
    pool.release([1])
    serve(pool, {2: (others[2], 20), 4: (a, 16)})
    pool.release([0])
    serve(pool, {4: (a, PROMPT - 16), 0: (others[3], 40)})
    assert pool.state.groups[0].page_table[4, :4].tolist() != [0, 1, 2, 3]
    assert_same_bits(finish(pool, 4, a, {6: others[6], 0: others[3]}), expected)

    # Preempted: it waits while others go on; it moves to another row; it is written to a file; its tokens are computed
    # again.
    waited = cache_for(model, recipe, [7, 5, 5])
    serve(waited, {0: (a, PROMPT), 1: (others[1], 60)})
    for _ in range(20):
        serve(waited, {1: (others[1], 1)})
    assert_same_bits(finish(copy.deepcopy(waited), 0, a, {1: others[1]}), expected)
    moved = copy.deepcopy(waited)
    moved.fork(0, [2])
    moved.release([0])
    assert_same_bits(finish(moved, 2, a, {}), expected)
    waited.save(tmp_path / "waited.safetensors")
    resumed = CertifiedCache.load(tmp_path / "waited.safetensors", model)
    assert_same_bits(finish(resumed, 0, a, {1: others[1]}), expected)
    waited.release([0])
    serve(waited, {0: (a, PROMPT), 1: (others[1], 1)})
    assert_same_bits(finish(waited, 0, a, {1: others[1]}), expected)

    # After a prefix hit: 50 tokens are there already, of a request with the same seed.
    hit = cache_for(model, recipe, [7, 3])
    serve(hit, {0: (Request(99, prefix=a, shared=50), 50)})
    hit.fork(0, [1])
    serve(hit, {1: (a, PROMPT - 50)})
    assert_same_bits(finish(hit, 1, a, {}), expected)

    if recipe == "witcert":
        other_seed = cache_for(model, recipe, [8])
        serve(other_seed, {0: (a, PROMPT)})
        codes = [stored_codes(cache, 0)[0][: PROMPT // RECIPE.page_size] for cache in (alone, other_seed)]
        assert (codes[0] != codes[1]).float().mean() > 0.2, "another seed, other codes"
