"""Each rung fires on its case and on no other; and every tiered rule is one graph that looks at no data."""

from __future__ import annotations

import re

import pytest
import torch
from tiered_reads import PAGE, HeadRead, first_channels, keys_of_scores
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torch_witcert.ops.arithmetic import Arithmetic
from torch_witcert.ops.formats import DEFAULT
from torch_witcert.policy.consistency import boundary_open, rank_differs, scores_differ
from torch_witcert.policy.coverage import choose_pages, estimated_tail, tail_bound, widen_pages
from torch_witcert.policy.ladder import Rung, climb
from torch_witcert.policy.values import choose_values, page_value_error, value_error_bound


def decide(read: HeadRead, k_max: int = 4) -> int:
    """Rungs of a read of one head: masses by codes, then every check on what they promote."""
    pages = len(read.keys)
    groups = torch.arange(pages + 1) < pages
    mass = read.masses(read.code_scores)
    promotion = choose_pages(mass, groups, k_max=k_max)
    promotion, widened = widen_pages(promotion, estimated_tail(mass, promotion.tail))
    promoted, is_code = promotion.pages[:pages], groups[:pages]
    code, exact = (scores.logsumexp(-1) for scores in (read.code_scores, read.exact_scores))
    difference = (read.exact_scores - read.code_scores).abs().amax(-1)
    eta = page_value_error(read.stored.page_notes, read.stored.v_scale)[:, 0]
    fired = [
        widened,
        choose_values(mass[:pages], eta, is_code),
        rank_differs(code, exact, promoted),
        boundary_open(code, read.radius, exact, is_code, promoted),
        scores_differ(difference, read.radius, torch.full_like(read.radius, 1e-9), promoted),
    ]
    return int(climb(*(part[None, None] for part in fired)))


def read_of(scores: list[list[float]], rest: float = 0.0) -> HeadRead:
    keys = keys_of_scores(scores)
    return HeadRead.of(first_channels(), keys, torch.ones_like(keys), rest)


def quiet() -> HeadRead:
    return read_of([[8.0, 1.0, -20.0], [4.0, -20.0], [1.0, -20.0]])


def flat_tail() -> HeadRead:
    return read_of([[6.0, -20.0]] + [[3.0, -20.0]] * 11)


def coarse_values() -> HeadRead:
    read = quiet()
    noise = torch.randn(read.values.shape, generator=torch.Generator().manual_seed(0))
    return HeadRead.of(read.q, read.keys, noise, read.rest)


def coarse_values_that_nobody_reads() -> HeadRead:
    read = coarse_values()
    read.values[:2] = 1.0
    return HeadRead.of(read.q, read.keys, read.values, read.rest)


def rank_flip() -> HeadRead:
    keys = keys_of_scores([[40.0, 6.125, -40.0], [6.0, -30.0], [2.0, -30.0]])
    keys[0, 0, 1] = -80.0
    return HeadRead.of(first_channels(), keys, torch.ones_like(keys), rest=0.0)


def wide_page(low: float) -> HeadRead:
    """Page 2 is light by codes; its radius grows with its range."""
    return read_of([[8.0, -20.0], [2.0, -20.0], [-1.0] + [low * (0.97 - 0.071 * i) for i in range(PAGE - 3)] + [low]])


def damaged(page: int) -> HeadRead:
    """A high bit of a token that hardly counts: only its score shows it."""
    read = quiet()
    read.stored.k_codes[page, 0, 5, 0] ^= 32
    return read


CASES = {
    "nothing": (quiet, 0),
    "a tail that holds much": (flat_tail, Rung.WIDEN),
    "values that matter": (coarse_values, Rung.VALUES),
    "values that do not": (coarse_values_that_nobody_reads, 0),
    "a rank flip": (rank_flip, Rung.HEAD),
    "a page that the radius excludes": (lambda: wide_page(-400.0), 0),
    "a page that it does not": (lambda: wide_page(-8000.0), Rung.HEAD),
    "a damaged code": (lambda: damaged(0), Rung.LAYER),
    "a damaged code on a page that was not promoted": (lambda: damaged(2), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_each_rung_fires_on_its_case_and_on_no_other(case):
    make, expected = CASES[case]
    assert decide(make()) == expected


def test_a_wider_limit_leaves_nothing_to_widen():
    assert decide(flat_tail(), k_max=12) == 0


# --- bits ----------------------------------------------------------------------------------------------------------------


def bits(**fired: torch.Tensor) -> torch.Tensor:
    """Rungs of [B, H, T] = [2, 3, 2] head-reads with 4 pages; what is not given is silent."""
    shape = (2, 3, 2)
    names = ("widened", "value_pages", "rank", "boundary", "scores")
    silent = {name: torch.zeros(*shape, *((4,) if name == "value_pages" else ()), dtype=torch.bool) for name in names}
    return climb(**{**silent, **fired})


def one(*index: int) -> torch.Tensor:
    fired = torch.zeros((2, 3, 2) + ((4,) if len(index) == 4 else ()), dtype=torch.bool)
    fired[index] = True
    return fired


@pytest.mark.parametrize(
    ("name", "bit"),
    [("widened", Rung.WIDEN), ("rank", Rung.HEAD), ("boundary", Rung.HEAD), ("value_pages", Rung.VALUES)],
)
def test_a_rung_is_the_head_reads_own(name, bit):
    flags = bits(**{name: one(1, 2, 0, 3) if name == "value_pages" else one(1, 2, 0)})
    assert flags.dtype == torch.int32 and flags.shape == (2, 3, 2)
    assert flags[1, 2, 0] == bit and flags.sum() == bit


def test_a_layer_is_the_rows_own():
    """Damage in one sequence sends all its heads and query tokens to the exact layer, and no other sequence."""
    flags = bits(scores=one(1, 0, 1))
    assert (flags[1] == Rung.LAYER).all() and (flags[0] == 0).all()


def test_rungs_add_up():
    everything = one(0, 1, 1)
    pages = one(0, 1, 1, 0)
    flags = bits(widened=everything, value_pages=pages, rank=everything, boundary=everything, scores=everything)
    assert flags[0, 1, 1] == Rung.ALL == Rung.WIDEN | Rung.VALUES | Rung.HEAD | Rung.LAYER
    assert flags[0, 0, 0] == Rung.LAYER and Rung.EXACT == Rung.HEAD | Rung.LAYER
    assert (bits() == 0).all()


def test_no_page_and_no_head():
    assert (bits(value_pages=torch.zeros(2, 3, 2, 0, dtype=torch.bool)) == 0).all()
    empty = torch.zeros(2, 0, 2, dtype=torch.bool)
    assert climb(empty, torch.zeros(2, 0, 2, 4, dtype=torch.bool), empty, empty, empty).shape == (2, 0, 2)


@pytest.mark.parametrize(
    ("fired", "message"),
    [
        ({"rank": torch.zeros(2, 3, 2)}, r"rank must be bool \[\.\.\., H, T\] .* got torch.float32"),
        ({"boundary": torch.zeros(2, 3, 1).bool()}, r"boundary must be .* \(2, 3, 2\), got torch.bool \(2, 3, 1\)"),
        ({"value_pages": torch.zeros(2, 3, 2).bool()}, r"value_pages must be bool \[\.\.\., H, T, J\]"),
        ({"widened": torch.tensor(True)}, r"widened must be .* got torch.bool \(\)"),
    ],
)
def test_wrong_arguments(fired, message):
    with pytest.raises(ValueError, match=message):
        bits(**fired)


# --- one graph, no look at the data ----------------------------------------------------------------------------------------


def inputs(pages: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Tensors [B, H, T, J] = [2, 3, 2, pages] that make every check fire in some reads and not in others."""
    generator = torch.Generator().manual_seed(pages)
    shape = (2, 3, 2, pages)
    code = torch.randn(shape, generator=generator) * 1.5
    radius = 0.4 * torch.rand(shape, generator=generator)
    difference = radius * torch.rand(shape, generator=generator)
    difference[1, 0] += 1
    return {
        "mass": code.softmax(-1).to(dtype),
        "radius": radius.to(dtype),
        "eta": (0.2 * torch.rand(shape, generator=generator)).to(dtype),
        "code": code.to(dtype),
        "exact": (code + 0.6 * torch.randn(shape, generator=generator)).to(dtype),
        "difference": difference.to(dtype),
        "slack": torch.full(shape, 0.05, dtype=dtype),
        "is_code": torch.rand(shape, generator=generator) < 0.8,
        "promoted": torch.rand(shape, generator=generator) < 0.3,
    }


ARITHMETIC = Arithmetic.of(64, 16, 64, 8, 1, torch.bfloat16, DEFAULT, 0.0)


def whole(x: dict[str, torch.Tensor]) -> torch.Tensor:
    """All rules one after another."""
    promotion = choose_pages(x["mass"], x["is_code"], 0.9, 1, 3)
    promotion, widened = widen_pages(promotion, tail_bound(x["mass"], x["radius"], promotion.tail, ARITHMETIC), 0.3)
    promoted = promotion.pages
    return climb(
        widened,
        choose_values(x["mass"], x["eta"], x["is_code"]),
        rank_differs(x["code"], x["exact"], promoted),
        boundary_open(x["code"], x["radius"], x["exact"], x["is_code"], promoted),
        scores_differ(x["difference"], x["radius"], x["slack"], promoted),
    )


FUNCTIONS = {
    "choose_pages": lambda x: choose_pages(x["mass"], x["is_code"], 0.9, 1, 3),
    "widen_pages": lambda x: widen_pages(choose_pages(x["mass"], x["is_code"], 0.9, 1, 2), x["mass"].sum(-1) - 0.95),
    "estimated_tail": lambda x: estimated_tail(x["mass"], x["promoted"]),
    "tail_bound": lambda x: tail_bound(x["mass"], x["radius"], x["promoted"]),
    "tail_bound of a kernel": lambda x: tail_bound(x["mass"], x["radius"], x["promoted"], ARITHMETIC),
    "page_value_error": lambda x: page_value_error(
        x["mass"].sum(-1, keepdim=True).expand(-1, -1, -1, 5), x["eta"][..., None]
    ),
    "choose_values": lambda x: choose_values(x["mass"], x["eta"], x["is_code"]),
    "value_error_bound": lambda x: value_error_bound(x["mass"], x["eta"], x["is_code"], ARITHMETIC),
    "rank_differs": lambda x: rank_differs(x["code"], x["exact"], x["promoted"]),
    "rank_differs, r = 3": lambda x: rank_differs(x["code"], x["exact"], x["promoted"], 3),
    "boundary_open": lambda x: boundary_open(x["code"], x["radius"], x["exact"], x["is_code"], x["promoted"], 2),
    "scores_differ": lambda x: scores_differ(x["difference"], x["radius"], x["slack"], x["promoted"]),
    "the ladder": whole,
}


def same(found, expected) -> bool:
    found, expected = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_equals_eager(name):
    function, read = FUNCTIONS[name], inputs(9)
    expected = function(read)
    torch._dynamo.reset()
    assert same(torch.compile(function, backend="aot_eager", fullgraph=True)(read), expected)
    traced = make_fx(function, tracing_mode="fake")(read)
    assert same(traced(inputs(9)), expected)
    looks = {
        str(node.target) for node in traced.graph.nodes if re.search(r"local_scalar|\.item|nonzero", str(node.target))
    }
    assert not looks


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("pages", [0, 1, 9])
def test_nothing_looks_at_data(name, pages):
    """Under fake tensors, which have no data, a host branch or an .item() would raise; shapes and dtypes are the real ones."""
    expected = pytree.tree_leaves(FUNCTIONS[name](inputs(pages)))
    with FakeTensorMode():
        read = {key: torch.empty(value.shape, dtype=value.dtype) for key, value in inputs(pages).items()}
        found = pytree.tree_leaves(FUNCTIONS[name](read))
    assert [(part.shape, part.dtype) for part in found] == [(part.shape, part.dtype) for part in expected]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_alone_is_bit_equal_to_the_row_in_a_batch(name):
    """But for the layer rung, which is the row's own by its definition, every head-read is alone as well."""
    read = inputs(37)
    batch = pytree.tree_leaves(FUNCTIONS[name](read))
    for row in range(2):
        alone = pytree.tree_leaves(FUNCTIONS[name]({key: value[row : row + 1] for key, value in read.items()}))
        assert all(torch.equal(part[row : row + 1], own) for part, own in zip(batch, alone, strict=True))


def test_the_inputs_fire_and_do_not():
    """Otherwise the graphs above would agree on nothing."""
    flags = whole(inputs(9))
    for bit in (Rung.WIDEN, Rung.VALUES, Rung.HEAD, Rung.LAYER):
        assert ((flags & bit) != 0).any() and ((flags & bit) == 0).any(), bit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype):
    flags = whole(inputs(9, dtype))
    assert flags.shape == (2, 3, 2) and flags.dtype == torch.int32
