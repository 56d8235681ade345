"""H1 to H7, faults of numbers, as functions of a device: on the CPU the reference or the interpreter, else the compiled kernels.

Each follows its case's recipe and asserts what is right whatever the format; callers choose sizes and formats and say what is
right for one of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from hard_cases.hard_cache import HardCache, Outcome, make_cache, normal, outliers_of, same_bits

from torch_witcert.ops.arithmetic import SCALE_FLOOR
from torch_witcert.ops.certificate import Field
from torch_witcert.ops.formats import KEY_GROUP, VALUE_GROUP, KeyFormat, StoreFormat, ValueFormat
from torch_witcert.policy.gate import Flag
from torch_witcert.testing.harness import Read


def rotated(x: torch.Tensor, first: int, base: float = 10000.0) -> torch.Tensor:
    """Rotary embedding, in pairs (i, i + D / 2), of [..., T, D] at positions from `first` on."""
    half = x.shape[-1] // 2
    angle = (first + torch.arange(x.shape[-2]))[:, None] * base ** -(torch.arange(half) / half).double()
    cos, sin = angle.cos().float().to(x.device), angle.sin().float().to(x.device)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def key_bias(
    device: torch.device | str,
    store_format: StoreFormat,
    dtype: torch.dtype,
    first: int | None = None,
    tokens: int = 512,
    page_size: int = 64,
) -> Outcome:
    """H1: +300 in channel 5 and -200 in channel 69 of every key, before a rotary embedding from position `first` on, or without one.

    Outlier pairs, where the format has them, are chosen as a cache chooses them.
    """
    dim, heads = 128, 8
    k, v = (normal(1, 1, tokens, dim, seed=seed, device=device) for seed in (0, 1))
    q = normal(1, heads, 1, dim, seed=2, device=device)
    k[..., 5] += 300
    k[..., 69] -= 200
    if first is not None:
        k, q = rotated(k, first), rotated(q, first + tokens - 1)
    outliers = outliers_of(k, store_format)
    size = {"page_size": page_size, "head_dim": dim, "dtype": dtype, "device": device}
    cache = make_cache(tokens, store_format, outlier_channels=outliers, **size)
    cache.fill(k[:, :, :-1], v[:, :, :-1])
    return cache.checked(q, k[:, :, -1:], v[:, :, -1:])


class Sink(NamedTuple):
    """A read of a cache whose first token is a sink."""

    cache: HardCache
    outcome: Outcome
    #: ||K - K^|| / ||K|| of tokens 1 to 63.
    key_error: float


def sink(
    device: torch.device | str, store_format: StoreFormat, factor: float, dtype: torch.dtype = torch.bfloat16
) -> Sink:
    """H2: K[0] times `factor`, V[0] times 0.02, queries shifted along K[0] until it has 0.9 of the weight; pages of 64."""
    tokens, dim, heads = 256, 128, 4
    k, v = (normal(1, 1, tokens, dim, seed=seed, device=device).to(dtype) for seed in (0, 1))
    q = normal(1, heads, 1, dim, seed=2, device=device)
    k[:, :, 0] *= factor
    v[:, :, 0] *= 0.02
    direction = k[:, :, :1].double() / k[0, 0, 0].double().square().sum()
    low, high = (torch.full((1, heads, 1, 1), value, dtype=torch.float64, device=device) for value in (-1e4, 1e4))
    for _ in range(60):
        middle = (low + high) / 2
        scores = (q.double() + middle * direction) @ k.double().mT * dim**-0.5
        is_less = scores.softmax(-1)[..., :1] < 0.9
        low, high = torch.where(is_less, middle, low), torch.where(is_less, high, middle)
    q = q + (high * direction).float()
    outliers = outliers_of(k, store_format)
    size = {"page_size": 64, "head_dim": dim, "dtype": dtype, "device": device}
    cache = make_cache(tokens, store_format, outlier_channels=outliers, **size)
    cache.fill(k[:, :, :-1], v[:, :, :-1])
    error, keys = cache.key_error()[:, :, 1:64], cache.keys[:, :, 1:64].double()
    return Sink(cache, cache.checked(q, k[:, :, -1:], v[:, :, -1:]), float(error.norm() / keys.norm()))


def warm_up(device: torch.device | str, store_format: StoreFormat, dtype: torch.dtype = torch.bfloat16) -> Outcome:
    """H3: a page of 0.01 N(0, 1), then 256 tokens of N(0, 1) with four entries of 40; outlier pairs chosen on the first page."""
    cold = [0.01 * normal(1, 2, 16, 64, seed=seed, device=device) for seed in (0, 1)]
    outliers = outliers_of(cold[0], store_format)
    cache = make_cache(16 + 256, store_format, kv_heads=2, dtype=dtype, device=device, outlier_channels=outliers)
    warm = [normal(1, 2, 256, 64, seed=seed, device=device) for seed in (2, 3)]
    for x in warm:
        x[0, :, (20, 90, 91, 200), (3, 60, 8, 3)] = 40
    cache.fill(*cold)
    cache.fill(*(x[:, :, :-1] for x in warm))
    cache.check_half_steps()
    return cache.checked(normal(1, 4, 1, 64, seed=4), *(x[:, :, -1:] for x in warm))


def has_zero(part: KeyFormat | ValueFormat) -> bool:
    """Whether a code of the grid means 0; a dither moves every code, and int4 and int6 with a zero point lie on half integers."""
    return not part.is_dithered and part.grid.offset % 1 == 0


#: What H4 fills keys and values with; 70144 is no number of float16.
DEGENERATE = ("zeros", "zero channel", "zero token", "5e-36", "1e-39", "70144")


def degenerate(device: torch.device | str, store_format: StoreFormat, dtype: torch.dtype, kind: str) -> Outcome:
    """H4 a to e: four pages of zeros, with a zero channel or token, of tiny numbers, or of +-70144.

    Where the case asks for exact zeros and for 1e-35, a grid that has no zero gives half of the smallest scale, 2^-101 = 4e-31:
    its own format allows no better, and every certificate covers it (2^-55).
    """
    tokens, dim = 67, 64
    k, v = (normal(1, 1, tokens + 1, dim, seed=seed, device=device) for seed in (0, 1))
    for x in (k, v):
        if kind == "zeros":
            x.zero_()
        elif kind == "zero channel":
            x[..., 9] = 0
        elif kind == "zero token":
            x[:, :, 37] = 0
        elif kind == "70144":
            x.sign_().mul_(70144)
        else:
            x.fill_(float(kind))
    cache = make_cache(tokens + 1, store_format, dtype=dtype, device=device)
    cache.fill(k[:, :, :tokens], v[:, :, :tokens])
    cache.check_half_steps()
    stored, parts = cache.stored(), (store_format.key, store_format.value)
    for found, given, part in zip(stored[:2], (cache.keys, cache.values), parts, strict=True):
        assert found[stored.is_code].isfinite().all()
        if kind in ("zeros", "5e-36", "1e-39"):
            error = (found - given.double())[stored.is_code].abs().max()
            assert error <= (given.abs().max().double() if has_zero(part) else SCALE_FLOOR / 2), float(error)
    outcome = cache.checked(normal(1, 4, 1, dim, seed=2), k[:, :, -1:], v[:, :, -1:])
    if kind == "zeros":
        assert outcome.read.out.abs().max() <= (0 if has_zero(store_format.value) else SCALE_FLOOR / 2)
    return outcome


def faint_channel(device: torch.device | str, store_format: StoreFormat, dtype: torch.dtype) -> Outcome:
    """H4 f: channel 7 of the keys up to 1e8 and channel 8 up to 1 (in float16 6e4 and 6e-4); queries look at channel 8 alone.

    Channel 7 is 0 from the unfinished page on: the rounding of exact tokens is bounded by their norm, so that with it nothing
    would be guaranteed whatever the codes are.
    """
    tokens, dim = 67, 64
    large, small = (6e4, 6e-4) if dtype == torch.float16 else (1e8, 1.0)
    k, v = torch.zeros(1, 1, tokens + 1, dim), normal(1, 1, tokens + 1, dim, seed=1)
    k[:, :, :64, 7] = large * torch.linspace(-1, 1, 64)
    k[..., 8] = small * normal(tokens + 1, seed=2).clamp(-1, 1)
    q = torch.zeros(1, 4, 1, dim)
    q[..., 8] = 8 / small
    cache = make_cache(tokens + 1, store_format, dtype=dtype, device=device)
    cache.fill(k[:, :, :tokens], v[:, :, :tokens])
    cache.check_half_steps()
    return cache.checked(q, k[:, :, -1:], v[:, :, -1:])


def poisoned(device: torch.device | str, store_format: StoreFormat, value: float, where: str) -> None:
    """H5: two requests of 64 tokens; one entry of the first one's K (token 3), V (token 3) or newest q is not finite.

    Its reads are marked with infinite bounds, and but for q their outputs stay finite: the entry is read as 0. The second request
    has the bits of a run without the poison. The rows are then forgotten and their pages used again: the bits of a fresh cache.
    """
    tokens, dim = 64, 64

    def run(cache: HardCache, poison: bool) -> Outcome:
        k, v = (normal(2, 1, tokens, dim, seed=seed, device=device) for seed in (0, 1))
        step = [normal(2, heads, 1, dim, seed=2 + i, device=device) for i, heads in enumerate((2, 1, 1))]
        if poison:
            {"k": k[0, 0, 3], "v": v[0, 0, 3], "q": step[0][0, 0, 0]}[where][5] = value
        cache.fill(k, v)
        return cache.checked(*step)

    clean, cache = (make_cache(tokens + 1, store_format, batch=2, device=device) for _ in range(2))
    expected, found = run(clean, False), run(cache, True)
    assert same_bits(found.read, expected.read, slice(1, 2), slice(1, 2)), "the neighbour changed"
    heads = slice(0, 1) if where == "q" else slice(None)
    bounds = found.read.certificate[0, heads, 0, : Field.OUTPUT + 1]
    assert bounds.isinf().all(), "a read that saw the poison is not marked"
    assert (found.flags[0, heads] & Flag.NO_GUARANTEE != 0).all()
    assert not (expected.flags & Flag.NO_GUARANTEE).any()
    cache.lengths.zero_()
    assert same_bits(run(cache, False).read, expected.read), "a trace of the poison is left"


def unused_slots(
    device: torch.device | str,
    store_format: StoreFormat,
    window: int = 0,
    lengths: tuple[int, ...] = (1, 15, 16, 17, 32, 64, 96, 48),
) -> None:
    """H6: ragged rows; unused bytes and padding are 0xFF, which is NaN, and then 0.

    Two more rows hold nothing, one of them gets a token. With a window and one page a split all but the last splits of the long
    rows are masked wholly; left padding cannot do that here, because padding is never stored.
    """
    count, longest, dim = len(lengths), max(lengths), 64

    def run(rows: int, unused: int) -> Read:
        seeds = {"seeds": torch.arange(rows)} if store_format.is_dithered else {}
        options = {"batch": rows, "unused_byte": unused, "window": window, "splits": 1 if window else None}
        cache = make_cache(longest + 2, store_format, device=device, **options, **seeds)
        held = torch.tensor((*lengths, 0, 0)[:rows], device=device)
        new = torch.tensor([[False, True]] * count + [[False, False], [True, False]], device=device)[:rows]

        def tokens(valid: torch.Tensor, seed: int) -> list[torch.Tensor]:
            drawn = (normal(count + 2, n, valid.shape[1], dim, seed=seed + i) for i, n in enumerate((2, 1, 1)))
            padding = torch.nan if unused else 0.0
            return [torch.where(valid[:, None, :, None], x[:rows].to(device), padding) for x in drawn]

        prompt = torch.arange(longest, device=device) >= longest - held[:, None]
        cache.fill(*tokens(prompt, 0)[1:], prompt)
        return cache.checked(*tokens(new, 10), new).read

    dirty, clean, fewer = run(count + 2, 0xFF), run(count + 2, 0x00), run(count, 0xFF)
    assert same_bits(dirty, clean), "unused bytes reached a result"
    assert same_bits(dirty, fewer, slice(0, count)), "an empty row changed another one"
    out, lse, certificate = dirty[2:]
    assert (out[count] == 0).all() and lse[count].isneginf().all() and (certificate[count] == 0).all()
    assert certificate.isfinite().all()
    expected = torch.tensor([min(length + 1, window or length + 1) for length in (*lengths, 0)])
    seen = torch.cat([certificate[:count, 0, 1, Field.TOKENS], certificate[count + 1 :, 0, 0, Field.TOKENS]])
    assert torch.equal(seen.cpu(), expected.float())


def group_scales(device: torch.device | str, store_format: StoreFormat, page_size: int, head_dim: int) -> Outcome:
    """H7: 200 tokens whose group g of channels that share a scale is 2^g times as large as the first, in K and in V.

    The output is compared channel by channel (`HardCache`), so that the scale of a neighbour shows at once, in small groups too.
    """
    tokens = 200
    q, k, v = (
        normal(1, heads, tokens + 1, head_dim, seed=heads + seed, device=device) for seed, heads in enumerate((2, 1, 1))
    )
    channel = torch.arange(head_dim, device=device)
    k, v = k * 2.0 ** (channel // KEY_GROUP), v * 2.0 ** (channel // VALUE_GROUP)
    options = {"page_size": page_size, "head_dim": head_dim, "dtype": torch.float16, "device": device}
    cache = make_cache(tokens + 1, store_format, **options)
    cache.fill(k[:, :, :tokens], v[:, :, :tokens])
    cache.check_half_steps()
    # Queries this small leave scores of a few units, which one wrong scale moves by as much.
    return cache.checked(q[:, :, -1:] * 0.25, k[:, :, -1:], v[:, :, -1:])
