"""Choice of the outlier pairs: the most energy, exactly m, the lowest index on ties, both layouts of the pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_witcert.policy.outliers import (
    ROPE_LAYOUTS,
    choose_outlier_channels,
    outlier_channels_of,
    outlier_indices_of,
)

DIM = 64


def channels_of_pair(pair: int, rope: str) -> list[int]:
    return [pair, pair + DIM // 2] if rope == "half" else [2 * pair, 2 * pair + 1]


def expected(keys: torch.Tensor, valid: torch.Tensor, pairs: int, rope: str) -> list[list[int]]:
    """The definition in plain Python."""
    result = []
    for head in range(keys.shape[1]):
        tokens = keys[:, head][valid].double()
        energy = [float(tokens[:, channels_of_pair(pair, rope)].square().sum()) for pair in range(DIM // 2)]
        best = sorted(range(DIM // 2), key=lambda pair: (-energy[pair], pair))[:pairs]
        result.append([channel for pair in sorted(best) for channel in channels_of_pair(pair, rope)])
    return result


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(0, 16), st.sampled_from(ROPE_LAYOUTS), st.booleans())
def test_most_energy_first(seed, pairs, rope, few_values):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 3, 7, DIM, generator=generator)
    if few_values:
        keys = keys.round()  # whole numbers: many ties, and sums without rounding
    valid = torch.rand(2, 7, generator=generator) < 0.7
    chosen = choose_outlier_channels(keys, valid, pairs, rope)
    assert chosen.dtype == torch.int32
    assert chosen.tolist() == expected(keys, valid, pairs, rope)


@pytest.mark.parametrize("rope", ROPE_LAYOUTS)
@pytest.mark.parametrize("pairs", range(17))
@pytest.mark.parametrize("fill", [0.0, 1.0, -3.0])
def test_all_equal_gives_exactly_m_with_the_lowest_index(pairs, rope, fill):
    chosen = choose_outlier_channels(torch.full((1, 2, 5, DIM), fill), None, pairs, rope)
    row = [channel for pair in range(pairs) for channel in channels_of_pair(pair, rope)]
    assert chosen.tolist() == [row, row]
    assert chosen.shape == (2, 2 * pairs)


def test_a_tie_at_the_edge_goes_to_the_lower_index():
    keys = torch.zeros(1, 1, 1, DIM)
    keys[..., [20, 9, 30]] = torch.tensor([2.0, 1.0, 1.0])
    keys[..., 9 + 32], keys[..., 30 + 32] = 1.0, -1.0
    assert outlier_indices_of(choose_outlier_channels(keys, None, 2)) == ((9, 20),)


def test_what_is_no_token_or_not_finite_does_not_count():
    keys = torch.randn(2, 2, 6, DIM, generator=torch.Generator().manual_seed(3))
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[0, :2] = valid[1, 5] = False
    clean = choose_outlier_channels(keys, valid, 4)
    spoiled = keys.clone()
    spoiled[0, :, :2, 17], spoiled[1, :, 5, 18] = 1e30, float("nan")
    assert torch.equal(choose_outlier_channels(spoiled, valid, 4), clean)
    spoiled = keys.clone()
    spoiled[0, 0, 3, 5], spoiled[1, 1, 4, 6] = float("inf"), float("nan")
    zeroed = torch.where(spoiled.isfinite(), spoiled, 0.0)
    assert torch.equal(choose_outlier_channels(spoiled, valid, 4), choose_outlier_channels(zeroed, valid, 4))


def test_huge_keys_do_not_overflow():
    keys = torch.full((1, 1, 4, DIM), 1e30)
    keys[..., 40] = 3e38
    assert outlier_indices_of(choose_outlier_channels(keys, None, 1)) == ((8,),)


def test_rows_of_the_batch_may_be_permuted():
    keys = torch.randn(5, 3, 9, DIM, generator=torch.Generator().manual_seed(0))
    valid = torch.rand(5, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    order = torch.tensor([3, 0, 4, 2, 1])
    assert torch.equal(choose_outlier_channels(keys, valid, 6), choose_outlier_channels(keys[order], valid[order], 6))


def test_it_is_one_graph_without_a_look_at_the_data():
    compiled = torch.compile(choose_outlier_channels, fullgraph=True, backend="eager")
    keys = torch.randn(2, 2, 8, DIM, generator=torch.Generator().manual_seed(5))
    valid = torch.ones(2, 8, dtype=torch.bool)
    assert torch.equal(compiled(keys, valid, 4), choose_outlier_channels(keys, valid, 4))


@pytest.mark.parametrize("rope", ROPE_LAYOUTS)
def test_indices_and_channels_are_inverse(rope):
    indices = ((3, 0, 31), (7, 8, 1))
    channels = outlier_channels_of(indices, DIM, rope)
    assert channels.dtype == torch.int32
    assert channels.tolist() == [[c for pair in sorted(row) for c in channels_of_pair(pair, rope)] for row in indices]
    assert outlier_indices_of(channels, rope) == tuple(tuple(sorted(row)) for row in indices)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (((0, 32),), r"KV head 0 must be distinct indices in \[0, 32\), got \(0, 32\)"),
        (((0, 1), (-1, 2)), r"KV head 1 must be .* got \(-1, 2\)"),
        (((0, 1), (2, 2)), r"KV head 1 must be distinct .* got \(2, 2\)"),
        (((0, 1), (2,)), "KV head 1 has 1 outlier pairs, KV head 0 has 2"),
    ],
)
def test_wrong_indices(indices, message):
    with pytest.raises(ValueError, match=message):
        outlier_channels_of(indices, DIM)


@pytest.mark.parametrize("pairs", [-1, 17, True, 2.0, None])
def test_wrong_number_of_pairs(pairs):
    with pytest.raises(ValueError, match=r"pairs must be an int in \[0, 16\], got"):
        choose_outlier_channels(torch.zeros(1, 1, 1, DIM), None, pairs)


def test_wrong_layout():
    with pytest.raises(ValueError, match="rope must be one of .*'half', 'interleaved'.*, got 'quarter'"):
        choose_outlier_channels(torch.zeros(1, 1, 1, DIM), None, 2, "quarter")
