"""Subtractive dither: the generator, what it draws from, and that errors are uniform and independent of the keys."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from torch_witcert.ops import certificate as cert
from torch_witcert.ops.codes import encode
from torch_witcert.ops.dither import GRID_ERROR, PAGE_KEYS, SEEDS, dither, page_key, philox
from torch_witcert.ops.formats import KeyFormat, StoreFormat, ValueFormat
from torch_witcert.ops.quantize import QuantizedPage, dequantize_keys, dequantize_values, quantize_page
from torch_witcert.ops.radii import Radii
from torch_witcert.testing.generators import KEY_FORMATS
from torch_witcert.testing.oracle import total_variation

P, D, HKV = 16, 64, 2
#: All that a dither can be.
GRID = (2 * torch.arange(256) - 255) / 512
#: Risk that a statistical test here fails for a perfect generator. Seeds are fixed, so that a result does not change.
ALPHA = 1e-6
DITHERED_KEYS = [key for key in KEY_FORMATS if key.is_dithered and not key.outlier_pairs]
#: Requests at the ends of the range of seeds and of the halves of their key, and pages 2^24 positions apart.
EDGE_SEEDS = (0, 1, 2**31, SEEDS - 1)
EDGE_PAGES = (0, 1, 2**24 // P, 2**24 // P + 1, PAGE_KEYS - 1)


class TestPhilox:
    @pytest.mark.parametrize(
        ("counter", "key", "expected"),
        [
            ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
            ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
            (
                (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
                (0xA4093822, 0x299F31D0),
                (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
            ),
        ],
    )
    def test_published_vectors(self, counter, key, expected):
        """Known answers of Random123, philox4x32-10."""
        words = philox(*(tuple(torch.tensor([part]) for part in group) for group in (counter, key)))
        assert tuple(word.item() for word in words) == expected

    def test_counters_broadcast(self):
        a, b = torch.arange(3)[:, None], torch.arange(5)
        zero = torch.zeros((), dtype=torch.int64)
        words = philox((a, b, zero, zero), (zero, zero))
        for i, j in product(range(3), range(5)):
            alone = philox((a[i], b[j], zero, zero), (zero, zero))
            assert [word[i, j].item() for word in words] == [word.item() for word in alone]


def keys_of(seeds, pages, heads: int = HKV) -> torch.Tensor:
    """int64 [seeds * pages, heads]."""
    pairs = torch.tensor(list(product(seeds, pages)))
    return page_key(pairs[:, 0], pairs[:, 1])[:, None].expand(-1, heads)


def draws(mode: str, seeds=EDGE_SEEDS, pages=EDGE_PAGES, layers=(0, 1, 2), page_size: int = P) -> torch.Tensor:
    """All dithers of these coordinates, [len(layers), K or V, seed, page, head, P, D]."""
    keys = keys_of(seeds, pages)
    return torch.stack(
        [
            torch.stack([dither(keys, layer, is_value, mode, page_size, D) for is_value in (False, True)])
            for layer in layers
        ]
    ).unflatten(2, (len(seeds), len(pages)))


def distinct(blocks: torch.Tensor) -> int:
    """Different ones among blocks of 16 channels, each of which is 128 bits of the generator."""
    return blocks.reshape(-1, 16).unique(dim=0).shape[0]


class TestCoordinates:
    def test_values(self):
        drawn = draws("stream")
        assert drawn.dtype == torch.float32
        assert torch.equal(drawn.unique(), GRID)
        assert (drawn.abs() < 0.5).all()
        assert torch.equal(drawn.bfloat16().float(), drawn)

    def test_none(self):
        assert dither(keys_of((0,), (0,)), 0, False, "none", P, D) is None

    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
    def test_layout(self, head_dim):
        """Channel c of a token is byte c mod 16 of the block c div 16; a longer page or head only adds draws."""
        keys = keys_of((SEEDS - 1,), (5,))
        drawn = dither(keys, 3, True, "stream", 128, head_dim)
        assert drawn.shape == (1, HKV, 128, head_dim)
        key = int(keys[0, 0])
        for head, token, channel in ((0, 0, 0), (1, 127, head_dim - 1), (1, 17, 37)):
            counter = (channel // 16, token, 2 * 3 + 1, head)
            words = philox(
                tuple(torch.tensor(part) for part in counter),
                tuple(torch.tensor(part) for part in (key % 2**32, key >> 32)),
            )
            byte = words[channel % 16 // 4].item() >> 8 * (channel % 4) & 0xFF
            assert drawn[0, head, token, channel].item() == (2 * byte - 255) / 512
        assert torch.equal(dither(keys, 3, True, "stream", 16, 64), drawn[:, :, :16, :64])

    def test_page_keys_are_distinct_and_fit_int64(self):
        keys = keys_of(EDGE_SEEDS, EDGE_PAGES, heads=1)
        assert keys.unique().numel() == len(EDGE_SEEDS) * len(EDGE_PAGES)
        assert keys.min() == 0 and keys.max() == 2**63 - 1

    def test_stream_repeats_nothing(self):
        """Neither between seeds, pages, layers, heads, K and V, nor within a page."""
        drawn = draws("stream")
        assert distinct(drawn) == drawn.numel() // 16

    def test_stream_does_not_come_back_after_many_pages(self):
        pages = (*range(16), *range(2**24 // P, 2**24 // P + 16))
        drawn = draws("stream", seeds=(7,), pages=pages, layers=(0,))
        assert distinct(drawn) == drawn.numel() // 16

    def test_tile_is_the_same_for_all_pages_and_for_nothing_else(self):
        drawn = draws("tile")
        assert (drawn == drawn[:, :, :, :1]).all()
        one_page = drawn[:, :, :, 0]
        assert distinct(one_page) == one_page.numel() // 16

    def test_tile_is_the_stream_of_the_first_page(self):
        assert torch.equal(draws("tile")[:, :, :, 0], draws("stream")[:, :, :, 0])


def key_step(page: QuantizedPage, key: KeyFormat) -> torch.Tensor:
    """Scale of every element, float64."""
    scale = page.k_scale.double()
    return scale.repeat_interleave(32, -1) if key.per_token else scale[..., None, :]


def key_residual(keys: torch.Tensor, key: KeyFormat, drawn: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(K^ - K) / scale and the scale, float64."""
    page = quantize_page(keys, keys, StoreFormat(key), k_dither=drawn)
    step = key_step(page, key)
    return (dequantize_keys(*page[:4], StoreFormat(key), None, drawn) - keys.double()) / step, step


class TestExpectation:
    """Over all 256 dithers, enumerated: no statistics."""

    #: fp32 moves x / scale + dither by up to 2^-17, which decides ties.
    LIMIT = (1 + 2.0**-7) / 512

    @staticmethod
    def every_dither(page: torch.Tensor) -> torch.Tensor:
        """One page [1, P, D] 256 times, and the dithers."""
        return page.expand(256, *page.shape), GRID[:, None, None, None].expand(256, *page.shape)

    @staticmethod
    def hard_page(seed: int) -> torch.Tensor:
        """Ordinary entries, entries at both ends of every range, and entries on code points and between them."""
        generator = torch.Generator().manual_seed(seed)
        page = torch.randn(1, P, D, generator=generator)
        page[:, 0], page[:, 1] = 4.0, -4.0
        page[:, 2] = torch.arange(D) / 64
        return page

    @pytest.mark.parametrize("key", DITHERED_KEYS, ids=lambda key: f"{key.element}-{key.scaling}-{key.dither}")
    def test_of_keys_is_the_key(self, key):
        for seed in range(4):
            keys, drawn = self.every_dither(self.hard_page(seed))
            residual, _ = key_residual(keys, key, drawn)
            assert (residual.mean(0).abs() <= self.LIMIT).all()
            # And every single one is within half a step: nothing is clipped.
            assert (residual.abs() <= 0.5 * (1 + 2.0**-14)).all()
            assert (residual.std(0) > 0.28).all()

    @pytest.mark.parametrize("mode", ["stream", "tile"])
    def test_of_values_is_the_value(self, mode):
        store_format = StoreFormat(value=ValueFormat("int8", mode))
        for seed in range(4):
            values, drawn = self.every_dither(self.hard_page(seed))
            page = quantize_page(values, values, store_format, v_dither=drawn)
            restored = dequantize_values(page.v_codes, page.v_scale, page.v_zero, store_format, drawn)
            residual = (restored - values.double()) / page.v_scale.double()
            assert (residual.mean(0).abs() <= self.LIMIT).all()
            assert (residual.abs() <= 0.5 * (1 + 2.0**-14)).all()

    def test_plain_rounding_is_not_unbiased(self):
        """The enumeration sees a bias where there is one."""
        residual, _ = key_residual(self.hard_page(0)[None], KeyFormat(), None)
        assert (residual.abs() > self.LIMIT).any()

    @pytest.mark.parametrize("element", ["int8", "int6", "int4"])
    def test_the_ends_of_the_grid_never_clip(self, element):
        """round(x + dither) stays among the codes at both ends, for every dither."""
        grid = KeyFormat(element, dither="stream").grid
        for x in (grid.levels, -grid.levels):
            value, code = encode(torch.full((256,), x), grid, GRID)
            assert torch.equal(value, (x + GRID).round())
            stored = (-127, 127) if grid.offset == 0 else (0, 2**grid.bits - 1)
            assert stored[0] <= code.min() and code.max() <= stored[1]


def distance_from_uniform(residual: torch.Tensor) -> float:
    """Kolmogorov's distance between a sample and the uniform distribution on (-1/2, 1/2)."""
    ordered = residual.flatten().double().sort().values + 0.5
    rank = torch.arange(ordered.numel() + 1, dtype=torch.float64) / ordered.numel()
    return max((rank[1:] - ordered).max().item(), (ordered - rank[:-1]).max().item())


def uniform_limit(count: int) -> float:
    """Dvoretzky-Kiefer-Wolfowitz at ALPHA, and the distance of the uniform grid from the uniform distribution."""
    return math.sqrt(math.log(2 / ALPHA) / (2 * count)) + 2 * GRID_ERROR


def correlation_excess(residual: torch.Tensor, other: torch.Tensor, bias: float = GRID_ERROR) -> float:
    """|sum residual * other| over what Hoeffding allows at ALPHA: at most 1 for residuals in (-1/2, 1/2) that have a mean of
    at most `bias` whatever the others are. For uniform residuals that is generous: their variance is a third of it."""
    other = other.double()
    limit = (other.square().sum() * math.log(2 / ALPHA) / 2).sqrt() + bias * other.abs().sum()
    return ((residual * other).sum().abs() / limit).item()


PAGES = 64


def statistical_keys(kind: str) -> torch.Tensor:
    """Keys [pages, Hkv, P, D]; plain residuals of `constant` and `coarse` are far from uniform and depend on the key."""
    generator = torch.Generator().manual_seed(11)
    noise = torch.randn(PAGES, HKV, P, D, generator=generator)
    if kind == "normal":
        return noise
    if kind == "constant":
        return torch.ones_like(noise)
    # Few values, so that a plain residual takes few values and repeats with the key.
    return (2 * noise).round() / 2


class TestStatistics:
    """Of stored keys, over the coordinates of the operators. The same checks reject plain rounding."""

    @staticmethod
    def residual(keys: torch.Tensor, key: KeyFormat, seed: int = 5) -> torch.Tensor:
        drawn = dither(keys_of((seed,), range(PAGES)), 2, False, key.dither, P, D)
        return key_residual(keys, key, drawn)[0]

    @pytest.mark.parametrize("kind", ["normal", "constant", "coarse"])
    @pytest.mark.parametrize("element", ["int8", "int6", "int4"])
    def test_residuals_are_uniform_and_independent_of_the_keys(self, element, kind):
        key = KeyFormat(element, "symmetric", dither="stream")
        keys = statistical_keys(kind)
        residual = self.residual(keys, key)
        assert distance_from_uniform(residual) <= uniform_limit(residual.numel())
        plain = self.residual(keys, KeyFormat(element, "symmetric"))
        for other in (keys, keys.sign(), keys.abs(), plain, plain.sign()):
            assert correlation_excess(residual, other) <= 1

    @pytest.mark.parametrize("kind", ["normal", "constant", "coarse"])
    @pytest.mark.parametrize("axis", [0, 1, 2, 3], ids=["pages", "heads", "tokens", "channels"])
    def test_neighbours_are_uncorrelated(self, axis, kind):
        residual = self.residual(statistical_keys(kind), KeyFormat("int8", "symmetric", dither="stream"))
        size = residual.shape[axis]
        assert correlation_excess(residual.narrow(axis, 1, size - 1), residual.narrow(axis, 0, size - 1)) <= 1

    def test_seeds_layers_and_sides_are_uncorrelated(self):
        first, *others = (
            dither(keys_of((seed,), range(PAGES)), layer, is_value, "stream", P, D).double()
            for seed, layer, is_value in ((5, 2, False), (6, 2, False), (5, 3, False), (5, 2, True))
        )
        for other in others:
            assert correlation_excess(other, first, bias=0) <= 1

    def test_plain_rounding_fails_these_tests(self):
        keys, plain = statistical_keys("coarse"), KeyFormat("int8", "symmetric")
        residual = self.residual(keys, plain)
        assert distance_from_uniform(residual) > uniform_limit(residual.numel())
        assert correlation_excess(residual, residual.sign()) > 1
        constant = self.residual(statistical_keys("constant"), plain)
        assert correlation_excess(constant[..., 1:], constant[..., :-1]) > 1

    def test_tile_repeats_between_pages(self):
        """Which is why it needs keys that do not depend on the tile: residuals of equal pages are equal."""
        residual = self.residual(statistical_keys("constant"), KeyFormat("int8", "symmetric", dither="tile"))
        assert correlation_excess(residual[1:], residual[:-1]) > 1
        assert distance_from_uniform(residual[0]) <= uniform_limit(residual[0].numel())


def stochastic_rounding(x: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Up with a probability of the fraction that is cut off; `uniform` in [0, 1)."""
    return (x + uniform).floor()


class TestStochasticRounding:
    """What dither is not: unbiased too, with the same codes, but with errors of up to a step."""

    UNIFORM = (torch.arange(256, dtype=torch.float64) + 0.5) / 256

    def errors(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of stochastic rounding and of dither, [..., 256], in steps, over all draws."""
        grid = KeyFormat(dither="stream").grid
        value, _ = encode(x[..., None].float(), grid, GRID)
        rounded = stochastic_rounding(x[..., None], self.UNIFORM)
        return rounded - x[..., None], value.double() - GRID.double() - x[..., None]

    def test_both_are_unbiased_and_only_dither_stays_within_half_a_step(self):
        x = 100 * torch.rand(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        stochastic, dithered = self.errors(x)
        assert stochastic.mean(-1).abs().max() <= 1 / 256 and dithered.mean(-1).abs().max() <= 1 / 256
        assert stochastic.abs().max() > 0.99
        assert dithered.abs().max() <= 0.5 * (1 + 2.0**-14)

    def test_variance_proxies(self):
        """At half a step the error is a coin of +-1/2: its variance, and so its sub-Gaussian proxy, is three times a uniform's."""
        x = torch.arange(64, dtype=torch.float64) + 0.5
        stochastic, dithered = self.errors(x)
        assert torch.allclose(stochastic.square().mean(-1), torch.full((64,), 0.25).double())
        assert torch.allclose(dithered.square().mean(-1), torch.full((64,), 1 / 12).double(), rtol=1e-4)
        for factor in (0.1, 1.0, 5.0):
            uniform_limit = math.exp(factor * factor / 24 + factor * GRID_ERROR)
            assert (torch.exp(factor * dithered).mean(-1) <= uniform_limit).all()
        # The moments of the coin outgrow it, as they would for any proxy below 1 / 4.
        assert (torch.exp(stochastic).mean(-1) > math.exp(1 / 24 + GRID_ERROR)).all()

    def test_scores_break_the_radius_of_dither_under_stochastic_rounding(self):
        """Scores of keys half a step between codes: dither keeps its risk of a tenth, stochastic rounding does not."""
        reads, delta = 20000, 0.1
        generator = torch.Generator().manual_seed(3)
        q = torch.randn(reads, D, generator=generator, dtype=torch.float64)
        keys = torch.randint(-100, 100, (reads, D), generator=generator).double() + 0.5
        radius = (q.square().sum(-1) * math.log(2 / delta) / 6).sqrt()
        uniform = torch.rand(reads, D, generator=generator, dtype=torch.float64)
        stochastic = stochastic_rounding(keys, uniform) - keys
        drawn = dither(keys_of((9,), range(reads // P)), 0, False, "stream", P, D)[:, 0].reshape(reads, D)
        value, _ = encode(keys.float(), KeyFormat(dither="stream").grid, drawn)
        dithered = value.double() - drawn.double() - keys
        broken, kept = (((q * error).sum(-1).abs() > radius).double().mean().item() for error in (stochastic, dithered))
        margin = math.sqrt(math.log(1 / ALPHA) / (2 * reads))  # Hoeffding, one-sided
        assert kept <= delta + margin
        assert broken > delta + margin

    def test_coverage_collapses(self):
        """Share of reads whose bound, in the paper's form (A^2 - 1) / 2, is at most 0.2.

        Normal keys in 8 bits, scores with a standard deviation of 4: the radius of stochastic rounding is sqrt(3) larger.
        """
        pages, page_size, dim, reads, tau = 32, 64, 128, 64, 0.2
        store_format = StoreFormat(KeyFormat("int8", dither="stream"))
        generator = torch.Generator().manual_seed(4)
        keys = torch.randn(pages, 1, page_size, dim, generator=generator)
        drawn = dither(keys_of((1,), range(pages), heads=1), 0, False, "stream", page_size, dim)
        page = quantize_page(keys, keys, store_format, k_dither=drawn)
        restored = dequantize_keys(*page[:4], store_format, None, drawn)
        q = 4 * torch.randn(1, reads, dim, generator=generator, dtype=torch.float64)
        parts = (part.transpose(0, 1) for part in (page.k_scale, page.k_zero, page.page_notes))
        tokens = torch.tensor(float(pages * page_size), dtype=torch.float64)
        log_risk = torch.tensor(math.log(2 / 1e-4), dtype=torch.float64)
        code = cert.code_radius(q, *parts, dim**-0.5, store_format)
        radius = code.total(None, Radii(False, False, True), log_risk, tokens)[0]

        def distribution(k: torch.Tensor) -> torch.Tensor:
            return torch.softmax(q[0] @ k.double().reshape(-1, dim).T * dim**-0.5, -1)

        used = distribution(restored)
        mass = used.unflatten(-1, (pages, page_size)).sum(-1)

        def bound(c: torch.Tensor) -> torch.Tensor:
            return ((mass * c.exp()).sum(-1).square() - 1) / 2

        true_distance = total_variation(distribution(keys), used)
        assert (true_distance <= bound(radius)).all()
        assert (bound(radius) <= tau).double().mean() > 0.95
        assert (bound(math.sqrt(3) * radius) <= tau).double().mean() < 0.05
