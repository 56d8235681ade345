"""The contract of subtractive dither, on what the write kernel stored: error, clipping, distribution, replay."""

from __future__ import annotations

import math

import pytest
import torch

from torch_witcert.ops.dither import PAGE_KEYS, dither
from torch_witcert.ops.formats import KeyFormat, StoreFormat, ValueFormat
from torch_witcert.ops.quantize import dequantize_keys, dequantize_values
from torch_witcert.ops.storage import PagedStore, StoreShape, identity_page_table
from torch_witcert.ops.triton.launch import INTERPRETED
from torch_witcert.ops.triton.write import kv_write_triton

LAYER, SIZE, DIM, HEADS = 5, 64, 128, 4
#: Elements of K and of V, each, for each format; 10^8 and more in all where kernels are compiled.
PAGES = 1 if INTERPRETED else 192
ROUNDS = 1 if INTERPRETED else 4
#: Each statistical test fails with this probability where its hypothesis is true.
ALPHA = 1e-6
NORMAL_QUANTILE = 4.9  # of 1 - ALPHA / 2
BINS = 16
#: Half a step, and what fp32 rounding of x - zero, of the division and of adding the dither can add (DESIGN section 7).
STEP_EXCESS = 2.0**-14
FORMATS = [
    StoreFormat(KeyFormat("int8", scaling, 0, mode), ValueFormat("int8", mode))
    for scaling in ("token", "symmetric", "asymmetric")
    for mode in ("stream", "tile")
]
NO_CHANNELS = torch.empty(0, dtype=torch.int32)


def chi_square_limit(freedom: int) -> float:
    """Above the 1 - ALPHA quantile of chi-square (Wilson and Hilferty, and one standard deviation more)."""
    return freedom * (1 - 2 / (9 * freedom) + (NORMAL_QUANTILE + 1) * math.sqrt(2 / (9 * freedom))) ** 3


def write(keys: torch.Tensor, values: torch.Tensor, store_format: StoreFormat, seeds: torch.Tensor) -> PagedStore:
    batch, heads, tokens, dim = keys.shape
    shape = StoreShape(batch, tokens // SIZE, heads, SIZE, dim, keys.dtype, store_format)
    store = shape.allocate(keys.device)
    columns = torch.arange(tokens, dtype=torch.int32, device=keys.device).expand(batch, -1)
    lengths = torch.zeros(batch, dtype=torch.int32, device=keys.device)
    table = identity_page_table(batch, shape.pages_per_row, keys.device)
    state = (columns, lengths, torch.full_like(lengths, tokens), table, seeds, NO_CHANNELS.to(keys.device))
    kv_write_triton(keys, values, *state, *store, LAYER, store_format.name)
    return store


def residuals(x: torch.Tensor, x_hat: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x_hat - x.double()) / scale.double()


@pytest.mark.parametrize("store_format", FORMATS, ids=lambda value: value.name)
def test_residuals_are_within_half_a_step_uniform_and_independent(device, store_format):
    """Over 6 formats x (K and V) x 4 rounds x 192 pages x 4 heads x 64 tokens x 128 channels > 3 x 10^8 elements, compiled."""
    generator = torch.Generator(device).manual_seed(3)
    histogram = torch.zeros(2, BINS, BINS, dtype=torch.float64, device=device)
    moments = torch.zeros(2, 3, dtype=torch.float64, device=device)
    elements = beyond = 0
    for seed in range(ROUNDS):
        keys, values = torch.randn(2, 1, HEADS, PAGES * SIZE, DIM, generator=generator, device=device).unbind()
        store = write(keys, values, store_format, torch.tensor([seed], device=device))
        pages = [x[0].unflatten(1, (-1, SIZE)).transpose(0, 1) for x in (keys, values)]
        modes = (store_format.key.dither, store_format.value.dither)
        xi = [dither(store.page_keys, LAYER, is_value, modes[is_value], SIZE, DIM) for is_value in (False, True)]
        k_hat = dequantize_keys(*store[:3], store_format=store_format, k_dither=xi[0])
        v_hat = dequantize_values(store.v_codes, store.v_scale, store_format=store_format, v_dither=xi[1])
        k_scale = store.k_scale
        k_scale = k_scale.repeat_interleave(32, -1) if store_format.key.per_token else k_scale[..., None, :]
        for side, (x, x_hat, scale) in enumerate(zip(pages, (k_hat, v_hat), (k_scale, store.v_scale), strict=True)):
            ratio = residuals(x, x_hat, scale)
            elements += ratio.numel()
            beyond += int((ratio.abs() > 0.5 * (1 + STEP_EXCESS)).sum())
            rank = (torch.special.ndtr(x.double()) * BINS).long().clamp(0, BINS - 1)
            bin_of = ((ratio + 0.5) * BINS).long().clamp(0, BINS - 1)
            histogram[side] += torch.bincount((rank * BINS + bin_of).flatten(), minlength=BINS**2).view(BINS, BINS)
            parts = (ratio.sum(), (ratio * x).sum(), (ratio[..., 1:] * ratio[..., :-1]).sum())
            moments[side] += torch.stack(parts)
        assert int(store.k_codes.long().abs().max()) <= 127 and int(store.v_codes.long().abs().max()) <= 127
    assert beyond == 0
    count = elements / 2
    assert elements == 2 * ROUNDS * PAGES * HEADS * SIZE * DIM
    for side in range(2):
        table = histogram[side]
        uniform = ((table.sum(0) - count / BINS).square() / (count / BINS)).sum()
        assert uniform <= chi_square_limit(BINS - 1)
        expected = table.sum(1, keepdim=True) * table.sum(0) / count
        assert ((table - expected).square() / expected).sum() <= chi_square_limit((BINS - 1) ** 2)
        # Mean, covariance with x, covariance with the next channel: standard deviations 12^-1/2, 12^-1/2 and 1/12 a term.
        limits = torch.tensor([12**-0.5, 12**-0.5, 1 / 12], dtype=torch.float64, device=device)
        assert (moments[side].abs() <= NORMAL_QUANTILE * limits * count**0.5).all()


@pytest.mark.parametrize("mode", ["stream", "tile"])
def test_every_value_of_the_largest_element_is_unbiased(device, mode):
    """A page whose entries are all +-(its maximum): no clipping there; over many pages the mean is x within its own error."""
    heads, pages = (1, 2) if INTERPRETED else (8, 2048)
    store_format = StoreFormat(KeyFormat("int8", "symmetric", 0, mode), ValueFormat("int8", mode))
    sign = torch.ones(1, heads, pages * SIZE, DIM, device=device)
    sign[..., ::3] = -1
    store = write(3.3 * sign, 3.3 * sign, store_format, torch.tensor([11], device=device))
    xi = dither(store.page_keys, LAYER, False, mode, SIZE, DIM)
    k_hat = dequantize_keys(*store[:3], store_format=store_format, k_dither=xi)
    x = (3.3 * sign)[0].unflatten(1, (-1, SIZE)).transpose(0, 1)
    ratio = residuals(x, k_hat, store.k_scale[..., None, :])
    assert (ratio.abs() <= 0.5 * (1 + STEP_EXCESS)).all()
    # `tile` draws once for all pages, so only its own tile averages. The grid moves a mean by 2^-9 of a step at most.
    draws = ratio.numel() // (1 if mode == "stream" else pages)
    outward = (ratio * sign[0].unflatten(1, (-1, SIZE)).transpose(0, 1)).mean()
    assert abs(float(outward)) <= 2.0**-9 + NORMAL_QUANTILE * (12 * draws) ** -0.5


def test_page_keys_name_the_request_and_the_page(device):
    store_format = StoreFormat(KeyFormat("int8", "token", 0, "stream"), ValueFormat("int8", "stream"))
    keys = torch.randn(2, 1, 2 * SIZE, DIM, device=device)
    store = write(keys, keys, store_format, torch.tensor([2**32 - 1, 0], device=device))
    expected = [(2**32 - 1) * PAGE_KEYS, (2**32 - 1) * PAGE_KEYS + 1, 0, 1]
    assert store.page_keys[:, 0].tolist() == expected


@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs need a GPU")
def test_replay_of_a_graph_is_bit_equal_to_eager():
    """Five replays, interleaved with writes of another request and other seeds, all equal to the eager write."""
    store_format = StoreFormat(KeyFormat("int8", "token", 4, "stream"), ValueFormat("int8", "stream"))
    shape = StoreShape(2, 8, HEADS, SIZE, DIM, torch.bfloat16, store_format)
    eager, graphed, other = (shape.allocate("cuda") for _ in range(3))
    k, v = (torch.randn(2, HEADS, 8 * SIZE, DIM, device="cuda").bfloat16() for _ in range(2))
    columns = torch.arange(8 * SIZE, dtype=torch.int32, device="cuda").expand(2, -1).contiguous()
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")
    counts = torch.full_like(lengths, 8 * SIZE)
    channels = torch.arange(8, dtype=torch.int32, device="cuda").expand(HEADS, -1).contiguous()
    table = identity_page_table(2, 8, "cuda")

    def run(store: PagedStore, seeds: torch.Tensor) -> None:
        state = (k, v, columns, lengths, counts, table, seeds, channels)
        kv_write_triton(*state, *store, LAYER, store_format.name)

    seeds = torch.tensor([1, 2**31], device="cuda")
    run(eager, seeds)
    run(graphed, seeds)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(graphed, seeds)
    for replay in range(5):
        for tensor in graphed:
            tensor.view(torch.uint8).fill_(replay)
        run(other, torch.tensor([replay, 7], device="cuda"))
        graph.replay()
        run(other, torch.tensor([9, replay], device="cuda"))
        for mine, theirs in zip(graphed[:-2], eager[:-2], strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    assert not torch.equal(other.k_codes, eager.k_codes)
