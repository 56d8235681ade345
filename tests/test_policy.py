from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from torch_witcert.ops.certificate import Field
from torch_witcert.policy.counters import (
    CacheOverflowError,
    Counters,
    Summary,
    summarize,
    summarize_prefill,
)
from torch_witcert.policy.gate import Flag, gate, make_limits

LAYERS, BATCH, HEADS, KV_HEADS, TOKENS = 3, 2, 6, 2, 5


def certificate(**fields: float) -> torch.Tensor:
    row = torch.zeros(Field.COUNT)
    for name, value in fields.items():
        row[getattr(Field, name)] = value
    return row


CASES = {
    "accepted": (certificate(TV=0.1, OUTPUT=1.0, CODE_TOKENS=16, TOKENS=20), 0),
    "no codes": (certificate(TV=0.01, OUTPUT=0.1, TOKENS=4), Flag.NO_CODES),
    "over tau": (certificate(TV=0.3, OUTPUT=1.0, CODE_TOKENS=16, TOKENS=20), Flag.OVER_TOTAL_VARIATION),
    "over output": (certificate(TV=0.1, OUTPUT=9.0, CODE_TOKENS=16, TOKENS=20), Flag.OVER_OUTPUT),
    "both": (
        certificate(TV=0.3, OUTPUT=9.0, CODE_TOKENS=16, TOKENS=20),
        Flag.OVER_TOTAL_VARIATION | Flag.OVER_OUTPUT,
    ),
    "no guarantee": (
        certificate(TV=math.inf, OUTPUT=math.inf, CODE_TOKENS=16, TOKENS=20),
        Flag.NO_GUARANTEE | Flag.OVER_TOTAL_VARIATION | Flag.OVER_OUTPUT,
    ),
    "not a number": (certificate(TV=math.nan, OUTPUT=math.nan, CODE_TOKENS=16, TOKENS=20), Flag.NO_GUARANTEE),
    "row overflow": (
        certificate(TV=math.inf, OUTPUT=math.inf),
        Flag.OVERFLOW | Flag.NO_GUARANTEE | Flag.NO_CODES | Flag.OVER_TOTAL_VARIATION | Flag.OVER_OUTPUT,
    ),
    "idle": (certificate(), Flag.IDLE | Flag.NO_CODES),
}


@pytest.mark.parametrize("case", CASES)
def test_flags(case):
    fields, expected = CASES[case]
    flags = gate(fields[None, None], make_limits(0.2, 5.0, "cpu"))
    assert flags.dtype == torch.int32
    assert flags.tolist() == [[expected]]


def test_limits_are_inclusive_and_the_output_limit_is_optional():
    fields = certificate(TV=0.25, OUTPUT=1e30, CODE_TOKENS=1, TOKENS=1)
    assert gate(fields, make_limits(0.25, None, "cpu")) == 0
    assert gate(fields, make_limits(0.25, 1e30, "cpu")) == 0
    assert gate(fields, make_limits(0.2499, None, "cpu")) == Flag.OVER_TOTAL_VARIATION


def random_certificates(seed: int = 0) -> torch.Tensor:
    """[L, B, H, T, F] drawn from every kind of read."""
    generator = torch.Generator().manual_seed(seed)
    kinds = [fields for fields, _ in CASES.values() if not fields.isnan().any()]
    chosen = torch.randint(len(kinds), (LAYERS, BATCH, HEADS, TOKENS), generator=generator)
    out = torch.stack(kinds)[chosen]
    out[..., Field.KEY_ERROR] = torch.rand(chosen.shape, generator=generator)
    out[..., Field.VALUE_ERROR] = torch.rand(chosen.shape, generator=generator)
    out[..., Field.TV] *= 0.5 + torch.rand(chosen.shape, generator=generator)
    return out


def counted_by_hand(certificates: torch.Tensor, tau: float, output_limit: float) -> list[dict]:
    """The counters of every layer, one read at a time."""
    rows = []
    group = HEADS // KV_HEADS
    for layer in certificates:
        count = dict.fromkeys(("reads", "code_reads", "accepted", "no_guarantee", "finite_reads"), 0)
        count |= {"code_tokens": 0, "tokens": 0, "groups": [0] * KV_HEADS, "finite": []}
        for b in range(BATCH):
            for t in range(TOKENS):
                flagged = [False] * KV_HEADS
                for h in range(HEADS):
                    read = layer[b, h, t].tolist()
                    tv, output, tokens = read[Field.TV], read[Field.OUTPUT], read[Field.TOKENS]
                    finite = math.isfinite(tv) and math.isfinite(output)
                    if tokens == 0 and finite:
                        continue
                    count["reads"] += 1
                    count["no_guarantee"] += not finite
                    count["tokens"] += int(tokens)
                    count["code_tokens"] += int(read[Field.CODE_TOKENS])
                    if read[Field.CODE_TOKENS] == 0:
                        continue
                    count["code_reads"] += 1
                    accepted = finite and tv <= tau and output <= output_limit
                    count["accepted"] += accepted
                    flagged[h // group] |= not accepted
                    if finite:
                        count["finite"].append(read)
                for g in range(KV_HEADS):
                    count["groups"][g] += flagged[g]
        rows.append(count)
    return rows


def test_counters_equal_a_count_by_hand():
    counters = Counters((0, 2, 5), KV_HEADS, torch.device("cpu"))
    limits = make_limits(0.2, 5.0, "cpu")
    steps = [random_certificates(seed) for seed in range(3)]
    for step in steps:
        counters.add(summarize(step, limits, KV_HEADS)._replace(flags=torch.zeros(1, dtype=torch.int32)))
    drained = counters.drain()
    by_step = [counted_by_hand(step, 0.2, 5.0) for step in steps]
    assert [layer.layer for layer in drained.layers] == [0, 2, 5]
    for index, layer in enumerate(drained.layers):
        rows = [step[index] for step in by_step]
        for name in ("reads", "code_reads", "accepted", "no_guarantee", "code_tokens", "tokens"):
            assert getattr(layer, name) == sum(row[name] for row in rows), name
        assert layer.flagged_groups == tuple(map(sum, zip(*(row["groups"] for row in rows), strict=True)))
        finite = torch.tensor([read for row in rows for read in row["finite"]], dtype=torch.float64)
        assert layer.finite_reads == len(finite) > 0
        for statistic, field in (
            (layer.total_variation, Field.TV),
            (layer.output, Field.OUTPUT),
            (layer.key_error, Field.KEY_ERROR),
            (layer.value_error, Field.VALUE_ERROR),
        ):
            assert statistic.mean == pytest.approx(float(finite[:, field].mean()), rel=1e-12)
            assert statistic.maximum == float(finite[:, field].max())
        assert layer.coverage == layer.accepted / layer.code_reads
    code_reads = sum(row["code_reads"] for step in by_step for row in step)
    assert drained.coverage == sum(row["accepted"] for step in by_step for row in step) / code_reads


def test_worst_of_several_tokens():
    certificates = random_certificates()
    summary = summarize(certificates, make_limits(0.2, 5.0, "cpu"), KV_HEADS)
    assert torch.equal(summary.worst, certificates.amax(3))
    assert torch.equal(summary.flags & Flag.NO_GUARANTEE != 0, certificates[..., Field.TV].isinf().any(3))


def test_parts_add_up_to_the_whole():
    certificates, limits = random_certificates(), make_limits(0.2, None, "cpu")
    whole = summarize(certificates, limits, KV_HEADS)
    parts = Summary.concatenate([summarize(layer[None], limits, KV_HEADS) for layer in certificates])
    for name, tensor in whole._asdict().items():
        assert torch.equal(tensor, getattr(parts, name)), name


def test_prefill_is_exact_and_no_part_of_coverage():
    counters = Counters((0,), KV_HEADS, torch.device("cpu"))
    marked = torch.tensor([[False] * 3 + [True] * 3, [False] * 6, [False] * 6])
    counts = torch.tensor([7, 5, 0], dtype=torch.int32)
    summary = summarize_prefill(marked, counts, KV_HEADS, make_limits(0.2, None, "cpu"))
    counters.add(summary)
    layer = counters.drain().layers[0]
    assert (layer.prefill_tokens, layer.reads, layer.code_reads, layer.no_guarantee) == (12, 0, 0, 3)
    assert math.isnan(layer.coverage)
    tv = summary.worst[0, :, :, Field.TV]
    assert tv.isinf().tolist() == [[False] * 3 + [True] * 3, [False] * 6, [False] * 6]
    assert (tv[1:] == 0).all()
    assert ((summary.flags[0, :2] & Flag.PREFILL) != 0).all()
    assert (summary.flags[0, 2] == Flag.IDLE | Flag.NO_CODES).all()


def test_overflow_is_raised_once_and_keeps_the_counters():
    counters = Counters((0,), 1, torch.device("cpu"))
    fields = torch.stack([CASES["accepted"][0], CASES["row overflow"][0]])
    counters.add(summarize(fields[None, :, None, None], make_limits(0.2, None, "cpu"), 1))
    with pytest.raises(CacheOverflowError, match="max_length"):
        counters.drain()
    layer = counters.drain().layers[0]
    assert (layer.reads, layer.code_reads, layer.accepted, layer.no_guarantee) == (2, 1, 1, 1)
    counters.reset()
    assert counters.drain().total("reads") == 0


def test_nothing_looks_at_data():
    """Under fake tensors, which have no data, a host branch or an .item() would raise."""
    with FakeTensorMode():
        counters = Counters((0, 1, 2), KV_HEADS, torch.device("cpu"))
        certificates = torch.empty(LAYERS, BATCH, HEADS, TOKENS, Field.COUNT)
        limits = make_limits(0.2, 1.0, "cpu")
        counters.add(summarize(certificates, limits, KV_HEADS))
        marked, counts = torch.empty(BATCH, HEADS, dtype=torch.bool), torch.empty(BATCH, dtype=torch.int32)
        one = summarize_prefill(marked, counts, KV_HEADS, limits)
        counters.add(Summary.concatenate([one] * LAYERS))
        assert counters.counts.shape == (LAYERS, 8)
