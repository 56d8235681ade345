"""Page tables: who gets which free page, that windows never run out, and that nothing synchronizes."""

from __future__ import annotations

import gc
import itertools
import random
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_models import converted

from torch_witcert import CertifiedCache
from torch_witcert.nn.exact import Scores
from torch_witcert.nn.pages import WINDOW_MARGIN, PageGroup, assign_pages
from torch_witcert.ops.storage import SOURCE_CODES

CPU = torch.device("cpu")
P, SLOTS = 16, 8


@st.composite
def tables(draw) -> tuple[list[list[int]], list[list[bool]], list[list[bool]], int]:
    """A table, which slots are held and which need a page, and the size of the pool."""
    rows, slots, num_pages = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 12))
    uses = draw(
        st.lists(st.lists(st.sampled_from("hnf"), min_size=slots, max_size=slots), min_size=rows, max_size=rows)
    )
    # Rows that share a page name it in the same slot; a free slot may name any page, or none.
    table = [[draw(st.integers(0 if use == "h" else -1, num_pages - 1)) for use in row] for row in uses]
    held, needed = ([[use == kind for use in row] for row in uses] for kind in "hn")
    return table, held, needed, num_pages


@given(tables())
def test_free_pages_go_to_early_slots_first_and_rows_in_turn(case):
    table, held, needed, num_pages = case
    rows, slots = len(table), len(table[0])
    used = {table[b][m] for b in range(rows) for m in range(slots) if held[b][m]}
    free = [page for page in range(num_pages) if page not in used]
    expected, missing = [list(row) for row in table], [False] * rows
    for slot in range(slots):
        for row in range(rows):
            if needed[row][slot]:
                expected[row][slot] = free.pop(0) if free else -1
                missing[row] |= expected[row][slot] < 0
    arguments = torch.tensor(table, dtype=torch.int32), torch.tensor(held), torch.tensor(needed)
    copies = [tensor.clone() for tensor in arguments]
    found, without = assign_pages(*arguments, num_pages)
    assert found.dtype == torch.int32
    assert found.tolist() == expected
    assert without.tolist() == missing
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(arguments, copies, strict=True))


class Rows:
    """Lengths of rows whose pages a group keeps, and which pages they hold: slot -> page, equal where shared."""

    def __init__(self, group: PageGroup) -> None:
        self.group = group
        self.lengths = [0] * group.page_table.shape[0]
        self.held: list[dict[int, int]] = [{} for _ in self.lengths]

    def tensor(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32)

    def append(self, counts: list[int]) -> None:
        counts = [min(count, SLOTS * P - length) for count, length in zip(counts, self.lengths, strict=True)]
        table, missing = self.group.reserved(self.tensor(), torch.tensor(counts, dtype=torch.int32))
        assert not missing.any()
        self.group.page_table.copy_(table)
        for row, count in enumerate(counts):
            before, self.lengths[row] = self.lengths[row], self.lengths[row] + count
            complete = self.lengths[row] // P
            kept = range(max(0, complete - self.group.kept), complete)
            old = {slot: page for slot, page in self.held[row].items() if slot in kept}
            assert all(int(table[row, slot]) == page for slot, page in old.items()), "a held page never moves"
            new = {slot: int(table[row, slot]) for slot in kept if slot >= before // P}
            self.held[row] = old | new

    def take(self, index: list[int]) -> None:
        self.lengths = [self.lengths[row] for row in index]
        self.held = [dict(self.held[row]) for row in index]
        self.group.take_rows(torch.tensor(index), self.tensor())

    def shorten(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.group.release(self.tensor())
        self.held = [
            {slot: page for slot, page in held.items() if slot < length // P}
            for held, length in zip(self.held, lengths, strict=True)
        ]

    def check(self) -> None:
        named = Counter(page for held in self.held for page in held.values())
        counts = self.group.reference_counts(self.tensor())
        assert counts.tolist() == [named[page] for page in range(self.group.num_pages)]
        table = self.group.page_table.tolist()
        assert all(table[row][slot] == page for row, held in enumerate(self.held) for slot, page in held.items())
        sources = self.group.source_map(self.tensor(), 2)
        for row, length in enumerate(self.lengths):
            read = (sources[row] == SOURCE_CODES).nonzero()[:, 1].unique().tolist()
            assert read == list(range(max(0, length // P - self.group.reached), length // P))
            assert set(read) <= self.held[row].keys(), "what is read is held"


STEPS = st.one_of(
    st.tuples(st.just("append"), st.lists(st.integers(0, 3 * P), min_size=3, max_size=3)),
    st.tuples(st.just("take"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
    st.tuples(st.just("release"), st.integers(0, 2)),
    st.tuples(st.just("crop"), st.integers(1, P)),
)


@pytest.mark.parametrize("window", [0, 1, P, P + 1, 2 * P, 3 * P + 5, 6 * P, 20 * P])
@given(steps=st.lists(STEPS, min_size=5, max_size=25))
@settings(max_examples=40)
def test_a_pool_of_full_size_never_runs_out(window, steps):
    """Windows give pages back in time; and no two rows name a page that they do not share."""
    group = PageGroup(3, SLOTS, P, window, 0, CPU)
    assert group.num_pages == 3 * group.kept
    assert group.kept == (min(SLOTS, -(-window // P) + WINDOW_MARGIN) if window else SLOTS)
    rows = Rows(group)
    for name, argument in steps:
        if name == "append":
            # Without pages on demand every slot has a page from the beginning.
            if group.on_demand:
                rows.append(argument)
            else:
                append_in_place(rows, argument)
        elif name == "take":
            rows.take(argument)
        elif name == "release":
            rows.shorten([0 if row == argument else length for row, length in enumerate(rows.lengths)])
        else:
            rows.shorten([length - argument if length > argument else length for length in rows.lengths])
        rows.check()


def append_in_place(rows: Rows, counts: list[int]) -> None:
    """As a forward does where every slot has a page of its own."""
    table = rows.group.page_table.tolist()
    for row, count in enumerate(counts):
        before = rows.lengths[row]
        rows.lengths[row] = min(before + count, SLOTS * P)
        rows.held[row] |= {slot: table[row][slot] for slot in range(before // P, rows.lengths[row] // P)}
    free = [page for b, row in enumerate(table) for slot, page in enumerate(row) if slot >= rows.lengths[b] // P]
    used = {page for held in rows.held for page in held.values()}
    assert len(set(free)) == len(free)
    assert not used & set(free)


def test_a_small_pool_runs_out_for_the_rows_that_come_last():
    group = PageGroup(3, SLOTS, P, 0, 5, CPU)
    assert (group.num_pages, group.on_demand) == (5, True)
    lengths = torch.zeros(3, dtype=torch.int32)
    table, missing = group.reserved(lengths, torch.tensor([2 * P, 2 * P - 1, 2 * P], dtype=torch.int32))
    assert missing.tolist() == [False, False, False]
    assert table[:, :2].tolist() == [[0, 3], [1, -1], [2, 4]]
    table, missing = group.reserved(lengths, torch.tensor([2 * P, 2 * P, 2 * P], dtype=torch.int32))
    assert missing.tolist() == [False, False, True]
    assert table[:, :2].tolist() == [[0, 3], [1, 4], [2, -1]]
    assert (group.page_table == -1).all(), "nothing is taken before the caller keeps the table"


@pytest.mark.parametrize("num_pages", [0, 7])
@pytest.mark.parametrize("window", [0, 2 * P])
def test_copies_of_rows_bring_their_pages_along(window, num_pages):
    """A row that is named twice shares its pages with its copy, and every page comes from where it was."""
    group = PageGroup(3, SLOTS, P, window, num_pages, CPU)
    counts = torch.tensor([2 * P, 0, 3 * P + 1], dtype=torch.int32)
    if group.on_demand:
        group.page_table.copy_(group.reserved(torch.zeros_like(counts), counts)[0])
    index = torch.tensor([2, 2, 0, 1])
    copies, sources = group.resized(index, counts)
    assert len(sources) == 5
    old, new = group.page_table[index], copies.page_table
    held = copies.held(counts[index])
    assert held.sum(1).tolist() == [3, 3, 2, 0]
    assert torch.equal(sources[new[held].long()], old[held].long())
    users = [2 if page in old[0, :3] else 1 for page in sources]
    assert copies.reference_counts(counts[index]).tolist() == users + [0] * (copies.num_pages - 5)


def program(group: PageGroup, lengths: torch.Tensor, counts: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Everything that a compiled or captured step may do."""
    table, missing = group.reserved(lengths, counts)
    group.page_table.copy_(table)
    after = torch.where(missing, lengths, lengths + counts)[index]
    group.take_rows(index, after)
    group.release(after - P // 2)
    return group.source_map(after - P // 2, 2)


def arguments(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([3 * P, 0, 5], dtype=torch.int32, device=device)
    counts = torch.tensor([P, 3 * P, 2 * P], dtype=torch.int32, device=device)
    return lengths, counts, torch.tensor([1, 1, 0], device=device)


@pytest.mark.parametrize(("window", "num_pages"), [(0, 0), (0, 7), (P + 4, 0)])
def test_nothing_looks_at_data(window, num_pages):
    """Meta tensors have none, and a graph without breaks asks for none; it gives the same tables."""
    program(PageGroup(3, SLOTS, P, window, num_pages, torch.device("meta")), *arguments(torch.device("meta")))
    torch._dynamo.reset()
    eager, compiled = (PageGroup(3, SLOTS, P, window, num_pages, CPU) for _ in range(2))
    expected = program(eager, *arguments(CPU))
    graph = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert torch.equal(graph(compiled, *arguments(CPU)), expected)
    assert torch.equal(compiled.page_table, eager.page_table)


# --- long service --------------------------------------------------------------------------------------------------------


REQUESTS = 160


class Service:
    """Requests of random length in the rows of a cache, through its layers alone, without a model's matrix products."""

    def __init__(self, cache: CertifiedCache, heads: int) -> None:
        self.cache = cache
        self.heads = heads
        self.served = 0
        self.chance = random.Random(0)
        self.generator = torch.Generator().manual_seed(0)

    def attend(self, counts: list[int]) -> None:
        """Row b takes counts[b] new tokens."""
        columns = max(counts)
        valid = torch.arange(columns) < torch.tensor(counts)[:, None]
        for layer in self.cache.layers:
            shape = layer.shape
            q, k, v = (
                torch.randn(shape.batch_size, heads, columns, shape.head_dim, generator=self.generator)
                for heads in (self.heads, shape.num_kv_heads, shape.num_kv_heads)
            )
            layer.attend(q, k, v, valid, Scores(shape.head_dim**-0.5, layer.window))

    def serve(self, requests: int) -> None:
        """Rows that are free take a prompt, others a few tokens, while the pool lasts; then some rows end."""
        cache, state = self.cache, self.cache.state
        pool = state.groups[0]
        until = self.served + requests
        while self.served < until:
            lengths = cache.lengths.tolist()
            room = pool.num_pages - sum(length // P for length in lengths)
            counts = []
            for length in lengths:
                count = self.chance.randint(1, 5) if length else self.chance.randint(1, 6 * P)
                pages = (length + count) // P - length // P
                fits = length + count <= cache.capacity_per_row and pages <= room
                counts.append(count if fits else 0)
                room -= pages if fits else 0
            if any(counts):
                self.attend(counts)
            ended = [row for row in range(cache.batch_size) if self.chance.random() < (0.7 if any(counts) else 1.0)]
            if ended:
                self.served += int((cache.lengths[ended] > 0).sum())
                cache.release(ended)
            self.check()

    def check(self) -> None:
        """A row holds its complete pages, or as many as its window keeps, and nothing else is in use."""
        lengths = self.cache.lengths
        for group in self.cache.state.groups.values():
            in_use = int((group.reference_counts(lengths) > 0).sum())
            assert in_use == sum(min(length // P, group.kept) for length in lengths.tolist()) <= group.num_pages


def allocated() -> tuple[int, int]:
    """Objects that Python's collector knows, and blocks of memory of all objects."""
    gc.collect()
    return len(gc.get_objects()), sys.getallocatedblocks()


def test_requests_leave_no_memory_behind():
    """Neither pages of either group nor objects; a thousand requests, with a model around, are in test_nn_cache_rows."""
    model = converted("qwen2", heads=2, kv_heads=1, window=40)
    cache = CertifiedCache(model, SLOTS * P, 24, num_pages=12 * SLOTS)
    assert [group.on_demand for group in cache.state.groups.values()] == [True, True]
    service, nbytes = Service(cache, heads=2), cache.nbytes()
    service.serve(80)
    counts = [allocated()]
    for _ in range(8):
        service.serve(REQUESTS // 4)
        counts.append(allocated())
    # Torch and Python keep some memory for reuse: that grows now and then. What requests leave behind grows every time.
    objects, blocks = (min(b - a for a, b in itertools.pairwise(found)) for found in zip(*counts, strict=True))
    assert objects < REQUESTS / 40
    assert blocks < REQUESTS / 8
    assert cache.nbytes() == nbytes
