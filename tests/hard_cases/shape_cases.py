"""H8 to H10 and H12 to H14, faults of shapes, as functions of a device: on the CPU the reference or the interpreter, else the
compiled kernels. As in `number_cases`: each asserts what is right whatever the format; callers choose sizes and formats.
"""

from __future__ import annotations

import torch
from hard_cases.hard_cache import HardCache, Outcome, make_cache, normal, outliers_of, same_bits

from torch_witcert.ops.arithmetic import SCALE_FLOOR
from torch_witcert.ops.certificate import Field
from torch_witcert.ops.formats import DEFAULT, StoreFormat
from torch_witcert.ops.storage import POOL_PARTS, PagedStore
from torch_witcert.testing.harness import Read


def query_heads(
    device: torch.device | str, heads: int, kv_heads: int, tokens: int = 257, dtype: torch.dtype = torch.bfloat16
) -> Outcome:
    """H8: V = h in KV head h, so that query head i must return floor(i / (H / Hkv)); then random values, by G2 and G3."""
    dim = 128
    q, k, v = (normal(1, n, tokens, dim, seed=seed) for seed, n in enumerate((heads, kv_heads, kv_heads)))
    expected = torch.arange(heads, device=device) // (heads // kv_heads)
    for constant in (True, False):
        if constant:
            values = torch.arange(kv_heads).float()[None, :, None, None].expand_as(v)
        else:
            values = v
        cache = make_cache(tokens, kv_heads=kv_heads, head_dim=dim, dtype=dtype, device=device)
        cache.fill(k[:, :, :-1], values[:, :, :-1])
        outcome = cache.checked(q[:, :, -1:], k[:, :, -1:], values[:, :, -1:])
        if constant:
            # A step of V and the rounding of the output, which is as large.
            step = expected[:, None] * (1 / 127 + torch.finfo(dtype).eps)
            assert ((outcome.read.out[0, :, 0] - expected[:, None]).abs() <= step).all(), "a head reads another KV head"
    return outcome


def head_dim(device: torch.device | str, store_format: StoreFormat, dim: int, dtype: torch.dtype) -> None:
    """H9: lengths of 33 and 129; no output is left as it was allocated, and G2 holds."""
    for tokens in (33, 129):
        q, k, v = (normal(1, n, tokens, dim, seed=seed) for seed, n in enumerate((4, 2, 2)))
        cache = make_cache(tokens, store_format, kv_heads=2, head_dim=dim, dtype=dtype, device=device)
        cache.fill(k[:, :, :-1], v[:, :, :-1])
        cache.checked(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:])


def softcap_and_sinks(
    device: torch.device | str,
    store_format: StoreFormat,
    tokens: int,
    softcap: float = 50.0,
    sink: float = 3.0,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """H10: raw logits up to 100, a soft cap, a sink in every head; one split and eight.

    What G2 compares with has the same cap and sink; that the sink is counted once shows in the lse too. Both reads see the same
    store, so that outputs that are both within G2 of it are the same by G2.
    """
    heads, kv_heads, dim, page_size = 4, 2, 64, 16
    q, k, v = (normal(1, n, tokens, dim, seed=seed) for seed, n in enumerate((heads, kv_heads, kv_heads)))
    q = q[:, :, -1:]
    logits = q.double() @ k.double().repeat_interleave(heads // kv_heads, 1).mT * dim**-0.5
    q = q * (100 / logits.abs().amax()).float()
    sinks = torch.full((heads,), sink)
    pages = -(-tokens // page_size)
    lse = []
    for splits in (pages, max(1, pages // 8)):
        options = {"softcap": softcap, "sinks": sinks, "splits": splits, "device": device}
        cache = make_cache(tokens, store_format, kv_heads=kv_heads, dtype=dtype, **options)
        if tokens > 1:
            cache.fill(k[:, :, :-1], v[:, :, :-1])
        outcome = cache.checked(q, k[:, :, -1:], v[:, :, -1:])
        read, stored = outcome.read, outcome.stored
        # An error of the lse is one of every weight. A sink that is counted twice adds up to ln 2.
        assert (read.lse.double() - stored.lse).abs().max() <= 2e-3, "the sink or the cap is not in the lse"
        assert read.certificate[..., Field.RADIUS].isfinite().all()
        lse.append(read.lse)
    assert torch.allclose(*lse, rtol=0, atol=1e-4)


def boundary(device: torch.device | str, tokens: int, store_format: StoreFormat = DEFAULT, page_size: int = 16) -> None:
    """H12: `tokens` cached in one call, V[t] = t, then one more; every stored row is its own, the last ones included.

    A read sees all of them, those of complete pages as codes: a length that is a multiple of the page is not special.
    """
    dim = 64
    q, k, v = (normal(1, n, tokens + 1, dim, seed=seed) for seed, n in enumerate((2, 1, 1)))
    v[:] = torch.arange(tokens + 1.0)[:, None]
    cache = make_cache(tokens + 1, store_format, page_size=page_size, device=device)
    cache.fill(k[:, :, :-1], v[:, :, :-1])
    cache.check_half_steps()
    stored, complete = cache.stored(), tokens // page_size * page_size
    codes = stored.is_code[0, 0]
    assert torch.equal(codes.nonzero()[:, 0].cpu(), torch.arange(complete))
    for found, given in ((stored.k, cache.keys), (stored.v, cache.values)):
        # An unfinished page is exact, and no row of another one is empty.
        assert torch.equal(found[:, :, complete:tokens], given[:, :, complete:tokens].double())
        norms = given[0, 0, :tokens].double().norm(dim=-1)
        assert ((found - given.double())[0, 0, :tokens].norm(dim=-1) <= 0.2 * norms + dim**0.5 * SCALE_FLOOR).all(), (
            "a row is lost"
        )
    read = cache.checked(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:]).read
    assert (read.certificate[..., Field.CODE_TOKENS] == complete).all()
    assert (read.certificate[..., Field.TOKENS] == tokens + 1).all()


#: H13: how 300 tokens may come in.
CHUNKS = {
    "1x300": (300,),
    "75x4": (4,) * 75,
    "128+128+44": (128, 128, 44),
    "300x1": (1,) * 300,
    "255+45": (255, 45),
    "257+43": (257, 43),
}


def chunked(device: torch.device | str, store_format: StoreFormat, chunks: tuple[int, ...]) -> HardCache:
    """H13: tokens in chunks, a read of as many queries with each, checked by G1 to G5; the cache.

    Of many chunks about twelve are read, at other places in a page each; the others are written only.
    """
    total, dim = sum(chunks), 64
    q, k, v = (normal(1, n, total, dim, seed=seed) for seed, n in enumerate((2, 1, 1)))
    cache, start = make_cache(total, store_format, device=device), 0
    for number, count in enumerate(chunks):
        here = slice(start, start + count)
        # Counted from the end, because the last one must be read.
        if (len(chunks) - 1 - number) % max(1, len(chunks) // 12) == 0:
            cache.checked(q[:, :, here], k[:, :, here], v[:, :, here])
        else:
            cache.fill(k[:, :, here], v[:, :, here])
        start += count
    stored, complete = cache.stored(), total // cache.shape.page_size * cache.shape.page_size
    assert int(stored.is_code.sum()) == complete, "only the unfinished page is not quantized"
    return cache


def live_parts(cache: HardCache) -> dict[str, torch.Tensor]:
    """Everything stored of the complete pages of a cache of one row, and its exact tail of the last one to two pages."""
    size, length = cache.shape.page_size, int(cache.lengths[0])
    pages = cache.page_table[0, : length // size].long()
    tail = torch.arange((length // size - 1) * size, length, device=cache.device) % (2 * size)
    parts = {
        name: part[pages] for name, part in zip(PagedStore._fields, cache.store) if name in POOL_PARTS and part.numel()
    }
    return parts | {name: getattr(cache.store, name)[:, :, tail] for name in ("k_tail", "v_tail")}


def left_padding(device: torch.device | str, store_format: StoreFormat, steps: int = 20) -> None:
    """H14: prompts of 40, 25 and 10, padded on the left with 1000 N(0, 1); 8 query heads over 2; then steps of one token.

    The rows have the bits of their lone runs, and the outlier channels those of a batch whose padding is 0. Channels are chosen
    from all rows of a first prompt together, so the lone runs are given the batch's. The prompt is written only: a cache attends
    to its first chunk exactly.
    """
    lengths, dim = (40, 25, 10), 64
    whole = 40 + steps
    q, k, v = (normal(3, n, whole, dim, seed=seed, device=device) for seed, n in enumerate((8, 2, 2)))
    valid = (torch.arange(40) >= 40 - torch.tensor(lengths)[:, None]).to(device)
    prompt, padding = (k[:, :, :40], v[:, :, :40]), 1000 * normal(3, 2, 40, dim, seed=9, device=device)
    prompt, blank = ([torch.where(valid[:, None, :, None], x, other) for x in prompt] for other in (padding, 0.0))
    outliers = outliers_of(prompt[0], store_format, valid)
    assert torch.equal(outliers, outliers_of(blank[0], store_format, valid)), "padding chose a channel"

    def run(rows: slice, width: int) -> list[Read]:
        """Reads of some rows whose prompt is the last `width` columns."""
        count = len(range(3)[rows])
        seeds = {"seeds": torch.arange(3)[rows]} if store_format.is_dithered else {}
        options = {"batch": count, "kv_heads": 2, "outlier_channels": outliers, "device": device}
        cache = make_cache(whole, store_format, **options, **seeds)
        cache.fill(*(x[rows, :, 40 - width :] for x in prompt), valid[rows, 40 - width :])
        return [cache.checked(*(x[rows, :, t : t + 1] for x in (q, k, v))).read for t in range(40, whole)]

    batch = run(slice(0, 3), 40)
    for row, length in enumerate(lengths):
        here = slice(row, row + 1)
        for step, (mine, lone) in enumerate(zip(batch, run(here, length), strict=True)):
            assert same_bits(mine, lone, here), f"row {row} of the batch is not its lone run at step {step}"
