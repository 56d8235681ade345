"""Rank check, boundary check and score check: hand-made cases on both sides, ties, and what each may claim."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiered_reads import PAGE, HeadRead, first_channels, keys_of_scores, random_read

from torch_witcert.policy.consistency import boundary_open, rank_differs, scores_differ
from torch_witcert.policy.coverage import choose_pages

INF, NAN = math.inf, math.nan


def mask(pages: list[int], number: int) -> torch.Tensor:
    return torch.tensor([j in pages for j in range(number)], dtype=torch.bool)


def ranks(code: list[float], exact: list[float], promoted: list[int] | None = None, r: int = 1) -> bool:
    pages = mask(range(len(code)) if promoted is None else promoted, len(code))
    fired = rank_differs(torch.tensor(code).double(), torch.tensor(exact).double(), pages, r)
    assert fired.shape == () and fired.dtype == torch.bool
    return bool(fired)


def boundary(code, radius, exact, promoted: list[int], r: int = 1, is_code: list[int] | None = None) -> bool:
    code, radius, exact = (torch.tensor(part, dtype=torch.float64) for part in (code, radius, exact))
    pages = mask(range(len(code)) if is_code is None else is_code, len(code))
    fired = boundary_open(code, radius, exact, pages, mask(promoted, len(code)), r)
    assert fired.shape == () and fired.dtype == torch.bool
    return bool(fired)


# --- rank ----------------------------------------------------------------------------------------------------------------


def test_the_first_page_changes():
    assert ranks([3.0, 2.9, 1.0], [2.95, 2.96, 1.0])
    assert not ranks([3.0, 2.9, 1.0], [2.96, 2.95, 1.0])


def test_only_the_first_r_places_count():
    code, exact = [4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 1.0, 2.0]
    assert [ranks(code, exact, r=r) for r in (1, 2, 3, 4)] == [False, False, True, True]
    code, exact = [4.0, 3.0, 2.0, 1.0], [3.0, 4.0, 2.0, 1.0]
    assert all(ranks(code, exact, r=r) for r in (1, 2, 3, 4))
    assert ranks([4.0, 3.0, 2.0], [4.0, 2.0, 3.0], r=2), "the second place is another page"


def test_only_promoted_pages_count():
    code, exact = [3.0, 2.0, 1.0], [1.0, 2.0, 5.0]
    assert ranks(code, exact) and not ranks(code, exact, [1]) and not ranks(code, exact, [])
    for garbage in (NAN, INF, 99.0):
        assert not ranks([3.0, garbage, 1.0], [3.0, garbage, 1.0], [0, 2], r=3)


def test_a_rank_flip_that_only_exact_scores_show():
    """A wide range costs page 0 its lead: 6.125 is read as 5.88, while page 1 loses less."""
    keys = keys_of_scores([[40.0, 6.125, -40.0], [6.0, -30.0], [2.0, -30.0]])
    keys[0, 0, 1] = -80.0  # the token that has 40 in channel 0 scores -40
    read = HeadRead.of(first_channels(), keys, torch.ones_like(keys), rest=0.0)
    code, exact = (scores.logsumexp(-1) for scores in (read.code_scores, read.exact_scores))
    assert exact.tolist()[:2] == pytest.approx([6.125, 6.0]) and code.argmax() == 1
    assert ((exact - code).abs() <= read.radius).all(), "sound data, inside its radii"
    everything = torch.ones(3, dtype=torch.bool)
    assert rank_differs(code, exact, everything)
    assert not rank_differs(exact, exact, everything, r=3) and not rank_differs(code, code, everything, r=3)
    assert not rank_differs(code, exact, mask([1, 2], 3), r=2)


def test_ties_are_no_disagreement():
    assert not ranks([2.0, 2.0, 1.0], [2.0, 3.0, 1.0]) and not ranks([2.0, 2.0, 1.0], [3.0, 2.0, 1.0])
    assert not ranks([3.0, 2.0, 1.0], [2.0, 2.0, 1.0]) and not ranks([2.0, 3.0, 1.0], [2.0, 2.0, 1.0])
    assert not ranks([1.0] * 5, [5.0, 1.0, 2.0, 4.0, 3.0], r=5) and not ranks([5.0, 1.0, 2.0], [1.0] * 3, r=3)
    assert ranks([2.0, 2.0, 1.0], [1.0, 1.0, 2.0]), "the third page leads, whatever the other two do"
    assert ranks([2.0, 2.0, 3.0], [1.0, 5.0, 4.0])


@given(st.data())
@settings(max_examples=400)
def test_it_is_the_definition(data):
    """No order by codes begins with the same r pages as an order by exact keys; few values, so that ties abound."""
    number = data.draw(st.integers(0, 5))
    level = st.sampled_from((-INF, 0.0, 1.0, 2.0))
    code, exact = ([data.draw(level) for _ in range(number)] for _ in range(2))
    promoted = [j for j in range(number) if data.draw(st.booleans())]
    r = data.draw(st.integers(1, 6))

    def heads(log_mass: list[float]) -> set[tuple[int, ...]]:
        orders = itertools.permutations(promoted)
        falling = (o for o in orders if all(log_mass[a] >= log_mass[b] for a, b in itertools.pairwise(o)))
        return {order[:r] for order in falling}

    assert ranks(code, exact, promoted, r) == (not heads(code) & heads(exact))
    order = data.draw(st.permutations(range(number)))
    moved = [order.index(j) for j in promoted]
    assert ranks([code[j] for j in order], [exact[j] for j in order], moved, r) == ranks(code, exact, promoted, r)


def test_rank_edges():
    assert not ranks([], [], r=3)
    assert not ranks([1.0], [9.0], r=7)
    assert not ranks([3.0, 2.0, 1.0], [9.0, 8.0, 7.0], [0, 2], r=3)
    assert ranks([3.0, 2.0, 1.0], [7.0, 8.0, 9.0], [0, 2], r=3)
    assert not ranks([-INF, -INF], [-INF, -INF], r=2)


@pytest.mark.parametrize("broken", [NAN, INF])
@pytest.mark.parametrize("page", [0, 2])
def test_what_is_no_number_fires_the_rank_check(broken, page):
    fine, spoiled = [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]
    spoiled[page] = broken
    assert ranks(fine, spoiled) and ranks(spoiled, fine) and ranks(spoiled, spoiled)


# --- boundary ------------------------------------------------------------------------------------------------------------


def test_a_page_that_the_radius_cannot_exclude_and_one_that_it_does():
    code, exact = [5.0, 4.8, 3.0], [5.0, NAN, NAN]
    assert boundary(code, [0.1, 0.3, 0.3], exact, [0])
    assert not boundary(code, [0.1, 0.1, 0.3], exact, [0])
    assert boundary(code, [0.1, 0.1, 2.5], exact, [0]), "far below, with a radius that reaches"


def test_the_radius_decides_on_quantized_pages():
    """Page 1 scores 5.5 at most, below page 0 with 6; only where its range is wide does its radius reach that."""
    q, fired = first_channels(), []
    for low in (-20.0, -300.0):
        others = [low * (0.97 - 0.071 * i) for i in range(PAGE - 3)]
        keys = keys_of_scores([[6.0, -20.0], [5.5, *others, low]])
        read = HeadRead.of(q, keys, torch.ones_like(keys), rest=0.0)
        code, exact = (scores.logsumexp(-1) for scores in (read.code_scores, read.exact_scores))
        promoted = mask([0], 2)
        fired.append(bool(boundary_open(code, read.radius, exact, mask([0, 1], 2), promoted)))
        assert exact[1] < exact[0]
    assert fired == [False, True]


def test_the_r_th_promoted_page_is_the_boundary():
    code, radius, exact = [5.0, 4.0, 3.0, 2.0], [0.1, 0.1, 0.1, 1.5], [5.0, 4.0, 3.0, NAN]
    assert [boundary(code, radius, exact, [0, 1, 2], r) for r in (1, 2, 3)] == [False, False, True]
    assert not boundary(code, radius, exact, [0, 1, 2], 3, is_code=[0, 1, 2]), "a page that is not read is no rival"


def test_a_tie_does_not_fire_and_rounding_decides_nothing():
    assert not boundary([1.0, 0.75], [0.0, 0.25], [1.0, 0.0], [0])
    assert boundary([1.0, 0.75], [0.0, 0.25 + 2.0**-54], [1.0, 0.0], [0]), "the sum rounds to 1 and is above it"
    assert not boundary([1.0, 0.75], [0.0, 0.25 - 2.0**-55], [1.0, 0.0], [0])
    assert boundary([2.0**60, -1.0], [0.0, 2.0**60], [2.0**60 - 256, 0.0], [0])
    assert not boundary([2.0**60, -1.0], [0.0, 2.0**60], [2.0**60, 0.0], [0]), "2^60 - 1 rounds to 2^60"


number = st.floats(-1e4, 1e4) | st.sampled_from((0.0, 1.0, 1.0 + 2.0**-52, 2.0**-60, 1.25))


@given(st.lists(st.tuples(number, number.map(abs), number, st.sampled_from("pcn")), max_size=5), st.integers(1, 4))
@settings(max_examples=400)
def test_the_comparison_is_that_of_real_numbers(pages, r):
    """In rationals: fires exactly where code + radius exceeds the r-th exact log-mass."""
    kinds = [kind for *_, kind in pages]
    promoted = [j for j, kind in enumerate(kinds) if kind == "p"]
    exact = sorted((Fraction(pages[j][2]) for j in promoted), reverse=True)
    rivals = [Fraction(code) + Fraction(radius) for code, radius, _, kind in pages if kind == "c"]
    expected = any(len(exact) < r or rival > exact[r - 1] for rival in rivals)
    columns = [list(part) for part in zip(*pages, strict=True)][:3] if pages else [[], [], []]
    is_code = [j for j, kind in enumerate(kinds) if kind != "n"]
    assert boundary(*columns, promoted, r, is_code) == expected


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("r", [1, 2])
def test_silence_proves_the_heaviest_pages(seed, r):
    """Really quantized pages, float64, zero tolerance: no page left as codes is above the r-th promoted one."""
    read = random_read(seed, 16, level=0.3 + 0.1 * seed)
    code, exact = (scores.logsumexp(-1) for scores in (read.code_scores, read.exact_scores))
    everything = torch.ones(16, dtype=torch.bool)
    silent = 0
    for count in range(r, 17):
        promotion = choose_pages(read.masses(read.code_scores)[:-1], everything, k_min=count, k_max=count)
        rank = rank_differs(code, exact, promotion.pages, r)
        if not boundary_open(code, read.radius, exact, everything, promotion.pages, r):
            threshold = torch.where(promotion.pages, exact, -INF).sort(descending=True).values[r - 1]
            assert (torch.where(promotion.tail, exact, -INF) <= threshold).all()
            if not rank:
                silent += 1
                assert set(code.topk(r).indices.tolist()) == set(exact.topk(r).indices.tolist())
    assert silent


def test_boundary_edges():
    assert not boundary([], [], [], [])
    assert not boundary([1.0], [0.1], [1.0], [0], r=5), "nothing is left"
    assert boundary([1.0], [0.1], [NAN], []), "nothing is promoted"
    assert boundary([3.0, 2.0, -50.0], [0.0] * 3, [3.0, 2.0, NAN], [0, 1], r=3), "the third place is not known"
    assert not boundary([3.0, -INF], [0.0, 5.0], [3.0, NAN], [0]), "a page without a token that the query sees"
    assert not boundary([3.0, -INF], [0.0, INF], [-INF, NAN], [0])
    assert not boundary([1.0] * 4, [0.0] * 4, [1.0] * 4, [0, 1]) and boundary([1.0] * 4, [1e-9] * 4, [1.0] * 4, [0, 1])


@pytest.mark.parametrize("broken", [NAN, INF])
def test_what_is_no_number_fires_the_boundary_check(broken):
    assert boundary([3.0, broken], [0.1, 0.1], [3.0, NAN], [0])
    assert boundary([3.0, 1.0], [0.1, broken], [3.0, NAN], [0])
    assert boundary([3.0, -INF], [0.1, NAN], [3.0, NAN], [0])
    assert boundary([3.0, 1.0], [0.1, 0.1], [broken, NAN], [0])
    assert boundary([3.0], [0.1], [broken], [0]), "also where nothing is left"
    assert not boundary([3.0, 1.0, broken], [0.1, 0.1, broken], [3.0, broken, broken], [0], is_code=[0, 1])
    assert not boundary([broken, 1.0], [broken, 0.1], [3.0, broken], [0]), "a promoted page has its exact log-mass"


# --- scores --------------------------------------------------------------------------------------------------------------


def scores(difference, radius, promoted: list[int], slack: float = 0.0) -> bool:
    difference, radius = (torch.tensor(part, dtype=torch.float64) for part in (difference, radius))
    fired = scores_differ(difference, radius, torch.full_like(radius, slack), mask(promoted, len(difference)))
    assert fired.shape == () and fired.dtype == torch.bool
    return bool(fired)


def test_a_difference_beyond_radius_and_slack():
    assert scores([0.1, 0.3], [0.25, 0.25], [0, 1])
    assert not scores([0.1, 0.3], [0.25, 0.25], [0, 1], slack=0.0625)
    assert not scores([0.1, 0.3], [0.25, 0.25], [0])
    assert not scores([0.25, 0.25], [0.25, 0.25], [0, 1]), "a tie is sound data"
    assert scores([0.25, 0.2500001], [0.25, 0.25], [0, 1])


def test_score_edges():
    assert not scores([], [], [])
    assert scores([1.0], [0.5], [0]) and not scores([1.0], [0.5], [])
    assert not scores([0.5] * 4, [0.5] * 4, [0, 1, 2, 3])


@pytest.mark.parametrize("broken", [NAN, INF])
def test_what_is_no_number_fires_the_score_check(broken):
    assert scores([broken, 0.0], [0.1, 0.1], [0])
    assert scores([0.0, 0.0], [broken, 0.1], [0])
    assert scores([0.0, 0.0], [0.1, 0.1], [0], slack=broken)
    assert not scores([0.0, broken], [0.1, broken], [0])


def difference_of(read: HeadRead) -> torch.Tensor:
    return (read.exact_scores - read.code_scores).abs().amax(-1)


@pytest.mark.parametrize("seed", range(12))
def test_sound_data_never_fires(seed):
    """Float64, no slack at all: the deterministic radius alone."""
    read = random_read(seed, 40, level=10.0 ** (seed - 6))
    everything = torch.ones(40, dtype=torch.bool)
    assert not scores_differ(difference_of(read), read.radius, torch.zeros_like(read.radius), everything)


def test_a_corrupted_code_is_caught_on_its_page_alone():
    """A flipped high bit moves the score by 64 scales, a flipped low bit by one: that may hide in the radius."""
    keys = keys_of_scores([[6.0, 1.0, -20.0], [4.0, 0.0, -20.0], [3.0, -20.0]])
    read = HeadRead.of(first_channels(), keys, torch.ones_like(keys), rest=0.0)
    none = torch.zeros_like(read.radius)
    everything = torch.ones(3, dtype=torch.bool)
    assert not scores_differ(difference_of(read), read.radius, none, everything)
    read.stored.k_codes[1, 0, 1, 0] ^= 64
    assert scores_differ(difference_of(read), read.radius, none, everything)
    assert scores_differ(difference_of(read), read.radius, none, mask([1], 3))
    assert not scores_differ(difference_of(read), read.radius, none, mask([0, 2], 3))
    read.stored.k_codes[1, 0, 1, 0] ^= 64
    read.stored.k_codes[1, 0, PAGE - 1, 5] ^= 1  # a channel that this query does not read
    assert not scores_differ(difference_of(read), read.radius, none, everything), "silence proves nothing"


def test_a_corrupted_scale_is_caught():
    """A scale that has shrunk: the radius shrinks with it, the scores move."""
    keys = keys_of_scores([[6.0, 1.0, -20.0], [4.0, 0.0, -20.0]])
    read = HeadRead.of(first_channels(), keys, torch.ones_like(keys), rest=0.0)
    read.stored.k_scale[0, 0, 0] /= 2
    none = torch.zeros_like(read.radius)
    assert scores_differ(difference_of(read), read.radius, none, mask([0], 2))
    assert not scores_differ(difference_of(read), read.radius, none, mask([1], 2))


# --- arguments -----------------------------------------------------------------------------------------------------------

PAGES, VALUES = torch.tensor([True, True]), torch.tensor([1.0, 2.0])


@pytest.mark.parametrize("r", [0, -1, 1.0, True, None])
def test_r_out_of_range(r):
    with pytest.raises(ValueError, match=f"r must be a positive int, got {r!r}"):
        rank_differs(VALUES, VALUES, PAGES, r)
    with pytest.raises(ValueError, match=f"r must be a positive int, got {r!r}"):
        boundary_open(VALUES, VALUES, VALUES, PAGES, PAGES, r)


def test_wrong_tensors():
    with pytest.raises(ValueError, match="promoted must be a bool tensor, got torch.int64"):
        rank_differs(VALUES, VALUES, PAGES.long())
    with pytest.raises(ValueError, match="is_code must be a bool tensor, got torch.int64"):
        boundary_open(VALUES, VALUES, VALUES, PAGES.long(), PAGES)
    with pytest.raises(ValueError, match="radius must be a floating point tensor, got torch.bool"):
        scores_differ(VALUES, PAGES, VALUES, PAGES)
    with pytest.raises(ValueError, match=r"exact_log_mass.* must have the same last dimension.*\(1,\)"):
        boundary_open(VALUES, VALUES, VALUES[:1], PAGES, PAGES)
    with pytest.raises(ValueError, match=r"slack.* must have the same last dimension.*\(\)"):
        scores_differ(VALUES, VALUES, torch.tensor(0.1), PAGES)
