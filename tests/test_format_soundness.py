"""Every format, radius, soft cap and sink against float64: bounds with no tolerance, probabilistic ones at their rate."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings

from torch_witcert.ops.certificate import Field
from torch_witcert.ops.formats import KeyFormat, StoreFormat, ValueFormat
from torch_witcert.ops.storage import HEAD_DIMS, MODEL_DTYPES, StoreShape
from torch_witcert.testing.generators import (
    KEY_FORMATS,
    VALUE_FORMATS,
    Scenario,
    fits,
    hot_entry,
    make_outlier_channels,
    one_hot_values,
    scenarios,
)
from torch_witcert.testing.harness import REFERENCE, CacheHarness, Operators, Soundness, run

P, D = 16, 64
#: Every key format, the value formats taking turns, and the other way round.
STORE_FORMATS = [
    *map(StoreFormat, KEY_FORMATS, cycle(VALUE_FORMATS)),
    *map(StoreFormat, cycle(KEY_FORMATS), VALUE_FORMATS),
]
#: Each of the reads below may break a probabilistic bound with this probability; 10^5 of them, dependent or not, with 10^-4.
SMALL_RISK = 1e-9
#: Probability that a test of a rate here fails for a certificate that is right. Seeds are fixed.
ALPHA = 1e-6


@given(scenarios(draw_options=True, delta=SMALL_RISK))
@settings(max_examples=400)
def test_bounds_hold_with_zero_tolerance(scenario):
    counts = run(scenario, REFERENCE)
    assert counts.violations == counts.probabilistic_violations == 0, counts


def value_kind(store_format: StoreFormat) -> str:
    return "one_hot" if hot_entry(store_format.value) else "normal"


@pytest.mark.parametrize("store_format", STORE_FORMATS, ids=lambda store_format: store_format.name)
def test_decode_with_most_tokens_as_codes(store_format):
    kind = value_kind(store_format)
    scenario = Scenario(
        group=2, prefill=40 * P + 5, chunks=(1, P + 1, 1), value_kind=kind, store_format=store_format.name, sinks=True
    )
    total = Soundness()
    for seed, (query_kind, dtype) in enumerate(
        zip(("normal", "residual", "token", "worst_channel"), cycle(MODEL_DTYPES))
    ):
        case = replace(scenario, seed=seed, query_kind=query_kind, dtype=dtype, strength=0.3, softcap=30.0 * (seed % 2))
        total += run(case, REFERENCE)
    assert total.violations == 0, total
    assert total.tv_reads == (total.reads if kind == "one_hot" else 0)
    assert total.arithmetic_reads == total.reads > 0
    assert total.code_share > 0.9
    assert total.unbounded == 0


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_head_dims(head_dim, dtype):
    formats = [store_format for store_format in STORE_FORMATS if fits(store_format.key, head_dim)]
    total = Soundness()
    for seed, store_format in enumerate(formats[::4]):
        kind = value_kind(store_format)
        scenario = Scenario(seed, head_dim=head_dim, dtype=dtype, prefill=5 * P + 3, chunks=(2,), value_kind=kind)
        total += run(replace(scenario, store_format=store_format.name, key_kind="outlier_channel"), REFERENCE)
    assert total.violations == 0, total
    assert total.arithmetic_reads > 0 and total.code_share > 0.5


class TestOptions:
    """What a soft cap and sinks mean, apart from the oracle's formula for them."""

    shape = StoreShape(2, 8, 2, P, D, torch.float32)
    heads = 6

    def read(self, scale: float = 1.0, **options):
        cache = CacheHarness(self.shape, sm_scale=D**-0.5, operators=REFERENCE, **options)
        generator = torch.Generator().manual_seed(0)
        for count in (5 * P + 3, 4):
            q, k, v = (torch.randn(2, heads, count, D, generator=generator) for heads in (self.heads, 2, 2))
            read = cache.forward(q * scale, k, v, torch.ones(2, count, dtype=torch.bool))
        assert cache.check(read, one_hot=False).violations == 0
        return read

    def test_a_sink_without_weight_changes_nothing(self):
        plain = self.read()
        for logit in (float("-inf"), -1e4):
            read = self.read(sinks=torch.full((self.heads,), logit))
            assert torch.equal(read.out, plain.out) and torch.equal(read.lse, plain.lse)
        assert torch.equal(self.read(sinks=torch.full((self.heads,), float("-inf"))).certificate, plain.certificate)

    def test_a_sink_takes_its_share(self):
        """exp(sink) beside a sum of exp(score) of e^lse: with sink = lse it takes half, so that outputs are halved."""
        plain = self.read()
        sinks = torch.full((self.heads,), float("-inf"))
        sinks[2] = plain.lse[1, 2, 3]
        read = self.read(sinks=sinks)
        assert torch.allclose(read.out[1, 2, 3], plain.out[1, 2, 3] / 2, rtol=1e-4, atol=1e-6)
        assert torch.allclose(read.lse[1, 2, 3], plain.lse[1, 2, 3] + math.log(2))
        assert torch.allclose(
            read.certificate[1, 2, 3, Field.CODE_MASS], plain.certificate[1, 2, 3, Field.CODE_MASS] / 2
        )
        others = [head for head in range(self.heads) if head != 2]
        assert torch.equal(read.out[:, others], plain.out[:, others])
        assert torch.equal(read.certificate[..., Field.TOKENS], plain.certificate[..., Field.TOKENS])

    def test_a_sink_above_every_score_takes_everything(self):
        read = self.read(sinks=torch.full((self.heads,), 80.0))
        assert read.out.abs().max() < 1e-20
        assert (read.certificate[..., Field.TV] < 1e-4).all()
        assert torch.equal(read.lse, torch.full_like(read.lse, 80.0))

    def test_a_wide_soft_cap_changes_little_and_a_narrow_one_flattens(self):
        plain, wide = self.read(), self.read(softcap=1e4)
        assert torch.allclose(wide.out, plain.out, atol=1e-3)
        # Scores in [-1e-3, 1e-3]: weights are nearly equal, and so are the outputs of the heads of a group.
        narrow = self.read(scale=100.0, softcap=1e-3)
        seen = narrow.certificate[0, 0, :, Field.TOKENS]
        assert torch.allclose(narrow.lse[0, 0], seen.log(), atol=2e-3)
        assert torch.allclose(narrow.out[:, 0], narrow.out[:, 1], atol=1e-2)


class TestHarnessRejects:
    """The harness sees an operator that ignores an option or rebuilds the wrong dither."""

    every = StoreFormat(KeyFormat("int8", outlier_pairs=2, dither="stream"), ValueFormat("int8", "stream"))
    #: Places of the arguments of DESIGN section 5.
    sinks, outlier_channels, softcap, layer = 8, 9, -5, -3

    def counts(self, index: int, value: object, **options) -> Soundness:
        def attend(*args):
            changed = list(args)
            changed[index] = value(args[index]) if callable(value) else value
            return REFERENCE.certified_attention(*changed)

        scenario = Scenario(group=3, prefill=5 * P + 3, chunks=(P, 1), dtype=torch.float32, key_kind="outlier_channel")
        scenario = replace(scenario, **({"store_format": self.every.name} | options))
        assert run(scenario, REFERENCE).violations == 0
        return run(scenario, Operators(REFERENCE.kv_write, attend))

    @pytest.mark.parametrize(
        ("store_format", "query_kind"),
        [
            (StoreFormat(KeyFormat("int4", dither="stream")), "normal"),
            (StoreFormat(value=ValueFormat(dither="stream")), "token"),
        ],
        ids=["keys", "values"],
    )
    def test_dither_of_another_layer(self, store_format, query_kind):
        """Where it is large: keys in few bits, and values where one token holds most of the weight."""
        options = {"key_kind": "normal", "query_kind": query_kind, "store_format": store_format.name}
        assert self.counts(self.layer, 1, **options).arithmetic_violations > 0

    def test_no_soft_cap(self):
        counts = self.counts(self.softcap, 0.0, softcap=1.0)
        assert counts.output_violations > 0 and counts.arithmetic_violations > 0

    def test_no_sinks(self):
        counts = self.counts(self.sinks, torch.empty(0), sinks=True)
        assert counts.output_violations > 0 and counts.arithmetic_violations > 0

    def test_outlier_channels_of_another_head(self):
        counts = self.counts(self.outlier_channels, lambda channels: channels.flip(0), num_kv_heads=2)
        assert counts.output_violations > 0 and counts.arithmetic_violations > 0

    def test_a_sink_whose_weight_is_wrong_shows_in_the_distribution(self):
        def attend(*args):
            out, lse, certificate = REFERENCE.certified_attention(*args)
            return out, lse + 0.5, certificate

        scenario = Scenario(prefill=5 * P + 3, chunks=(1,) * 8, value_kind="one_hot", sinks=True, group=12)
        assert run(scenario, REFERENCE).violations == 0
        assert run(scenario, Operators(REFERENCE.kv_write, attend)).tv_violations > 0

    def test_probabilistic_reads_are_counted_apart(self):
        def attend(*args):
            out, lse, certificate = REFERENCE.certified_attention(*args)
            return out, lse, certificate * 1e-3

        scenario = Scenario(prefill=5 * P + 3, chunks=(P, 1), store_format=self.every.name, radii="probabilistic")
        counts = run(scenario, Operators(REFERENCE.kv_write, attend))
        assert counts.probabilistic_reads == counts.reads > 0
        assert counts.probabilistic_violations > 0 and counts.tv_violations == counts.output_violations == 0
        assert run(scenario, REFERENCE).probabilistic_violations == 0

    def test_queries_that_depend_on_the_dither_are_refused(self):
        with pytest.raises(ValueError, match="query_kind 'residual'"):
            Scenario(store_format=self.every.name, radii="step+probabilistic", query_kind="residual")


class TestProbabilisticRate:
    """Reads with a KV head or a seed of their own: independent, so that counts are binomial."""

    delta, rows, kv_heads, rounds = 0.05, 2, 64, 8

    def limit(self, reads: int) -> float:
        """Violations that a risk of delta a read exceeds with a probability of ALPHA at most (Hoeffding)."""
        return self.delta * reads + math.sqrt(reads * math.log(1 / ALPHA) / 2)

    def run(self, key: KeyFormat) -> tuple[torch.Tensor, torch.Tensor, Soundness]:
        """Largest score error of each read and its radius, [reads]; and the counts of its bounds."""
        store_format, generator = StoreFormat(key), torch.Generator().manual_seed(1)
        shape = StoreShape(self.rows, 2, self.kv_heads, P, D, torch.float32, store_format)
        errors, radii, counts = [], [], Soundness()
        for round_ in range(self.rounds):
            cache = CacheHarness(
                shape,
                sm_scale=D**-0.5,
                operators=REFERENCE,
                radii="probabilistic",
                delta=self.delta,
                seeds=torch.arange(self.rows) + round_ * self.rows,
                outlier_channels=make_outlier_channels(key, self.kv_heads, D, generator),
            )

            def normal(tokens: int) -> torch.Tensor:
                return torch.randn(self.rows, self.kv_heads, tokens, D, generator=generator)

            valid = torch.ones(self.rows, P, dtype=torch.bool)
            hot = one_hot_values(cache.place(valid)[0], self.kv_heads, D, torch.float32)
            cache.write(normal(P), hot, valid)
            q, fresh = normal(1), one_hot_values(cache.place(valid[:, :1])[0], self.kv_heads, D, torch.float32)
            read = cache.forward(q, normal(1), fresh, valid[:, :1])
            error = (q.double() @ cache.key_error()[:, :, :P].mT).abs() * cache.sm_scale
            errors.append(error.amax((-1, -2)).flatten())
            radii.append(read.certificate[..., 0, Field.RADIUS].double().flatten())
            counts += cache.check(read, one_hot=True)
        return torch.cat(errors), torch.cat(radii), counts

    @pytest.mark.parametrize(
        "key",
        [key for key in KEY_FORMATS if key.is_dithered],
        ids=lambda key: StoreFormat(key).name,
    )
    def test_radii_and_bounds_keep_their_risk(self, key):
        error, radius, counts = self.run(key)
        reads = self.rows * self.kv_heads * self.rounds
        assert counts.probabilistic_reads == reads == error.numel()
        assert counts.probabilistic_violations <= self.limit(reads)
        assert (error > radius).sum() <= self.limit(reads)
        # Half the radius breaks far more often: the count can fail.
        assert (error > radius / 2).sum() > self.limit(reads)

    def test_a_query_that_knows_the_dither_breaks_the_radius(self):
        """Why queries must not depend on it: aligned with an error, the score error is sm ||q|| ||e||, every time."""
        store_format = StoreFormat(KeyFormat(dither="stream"))
        cache = CacheHarness(
            StoreShape(1, 2, 1, P, 256, torch.float32, store_format),
            sm_scale=1 / 16,
            operators=REFERENCE,
            radii="probabilistic",
            delta=self.delta,
        )
        generator = torch.Generator().manual_seed(2)
        k, v = (torch.randn(1, 1, P, 256, generator=generator) for _ in range(2))
        cache.write(k, v, torch.ones(1, P, dtype=torch.bool))
        q = cache.key_error()[:, :, :1].float()
        read = cache.read(q, k[:, :, :1], v[:, :, :1], torch.ones(1, 1, dtype=torch.bool))
        error = (q.double() @ cache.key_error()[:, :, :1].mT).abs() / 16
        assert error.item() > read.certificate[..., Field.RADIUS].item()

    def test_they_are_tighter(self):
        """Over the dithered keys of the default: the smallest of all radii is below that of the deterministic ones."""
        scenario = Scenario(prefill=20 * P, chunks=(1,), store_format=StoreFormat(KeyFormat(dither="stream")).name)
        radii = {}
        for kinds in ("step+residual", "step+residual+probabilistic"):
            seen = []

            def attend(*args, seen: list = seen):
                result = REFERENCE.certified_attention(*args)
                seen.append(result[2][..., Field.RADIUS])
                return result

            run(replace(scenario, radii=kinds), Operators(REFERENCE.kv_write, attend))
            radii[kinds] = torch.cat([part.flatten() for part in seen])
        ratio = radii["step+residual+probabilistic"] / radii["step+residual"]
        assert ratio.numel() > 0 and (ratio < 0.9).all()
