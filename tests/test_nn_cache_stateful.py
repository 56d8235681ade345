"""Random sequences of calls on a `CertifiedCache`, against a model of it in plain Python that knows every token and every page.

The layers are driven directly, as the attention modules drive them. After each call everything that is stored is compared
with what the tokens say it must be, bit for bit, and the pages with who must hold and share them.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache as remember
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from nn_models import tiny_model
from nn_rows import KEPT, READ, SLOTS, WINDOW, D, P, Page, Row, held_pages, remembered_dither, same_bits, stored_page
from transformers import PreTrainedModel

import torch_witcert
from torch_witcert.config import Recipe
from torch_witcert.nn.compatibility import CROP_KEEPS
from torch_witcert.nn.exact import Scores
from torch_witcert.nn.layers import CertifiedLayer
from torch_witcert.ops import reference
from torch_witcert.ops.storage import POOL_PARTS, SOURCE_CODES, SOURCE_NONE
from torch_witcert.testing import oracle
from torch_witcert.testing.oracle import dequantized_attention, exact_attention, total_variation

HEADS, ROWS, MOST_ROWS = 2, 3, 4
CAPACITY = SLOTS * P
SEEDS = (5, 2**32 - 1, 0)
SCALE = D**-0.5


class Variant(NamedTuple):
    recipe: Recipe
    dtype: torch.dtype = torch.float32
    num_pages: int | None = None
    dense: bool = False  # a third layer that is not converted
    sequences: int = 150


PLAIN = torch_witcert.CertifiedInt8Config(page_size=P)
DITHERED = torch_witcert.WitCertConfig(page_size=P, outlier_pairs=2)
VARIANTS = {
    "plain": Variant(PLAIN),
    "plain, few pages and a dense layer": Variant(PLAIN, num_pages=9, dense=True),
    "dither, outliers, token scales": Variant(DITHERED, sequences=105),
    "dither, outliers, token scales, bf16, few pages": Variant(DITHERED, torch.bfloat16, num_pages=12, sequences=105),
}


@remember
def model_of(variant: Variant):
    """Layer 0 reads everything, layer 1 a sliding window."""
    model = tiny_model(
        "qwen2", layers=3 if variant.dense else 2, heads=HEADS, kv_heads=1, window=WINDOW, dtype=variant.dtype
    )
    return torch_witcert.convert(model, variant.recipe, filter_fn=lambda _, name: ".2." not in name, strict=False)


class Fresh(NamedTuple):
    """New columns; those that are no tokens hold NaN."""

    q: torch.Tensor  # [L, B, H, T, D]
    kv: torch.Tensor  # [K or V, L, B, 1, T, D]
    valid: torch.Tensor  # bool [B, T]


VALIDITY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda random: torch.ones_like(random, dtype=torch.bool),
    "left padding": lambda random: torch.arange(random.shape[1]) >= (random[:, :1] * random.shape[1]).int(),
    "right padding": lambda random: torch.arange(random.shape[1]) < (random[:, :1] * random.shape[1]).int() + 1,
    "holes": lambda random: random < 0.7,
    "idle rows": lambda random: (random[:, :1] < 0.5).expand_as(random),
}


def through_file(cache: torch_witcert.CertifiedCache, model: PreTrainedModel) -> torch_witcert.CertifiedCache:
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder) / "cache.safetensors")
        return torch_witcert.CertifiedCache.load(Path(folder) / "cache.safetensors", model)


COPIES = {
    "deepcopy": lambda cache, _: copy.deepcopy(cache),
    "file": through_file,
    "pickle": lambda cache, _: pickle.loads(pickle.dumps(cache)),
}

#: Calls of the machine, and how often they are drawn.
WEIGHTS = {
    "append": 14,
    "crop": 3,
    "reorder": 2,
    "fork": 2,
    "release": 2,
    "batch_select": 1,
    "batch_repeat": 1,
    "copy": 1,
    "fail": 2,
    "reset": 1,
    "wrong_calls": 1,
}


class CacheMachine(RuleBasedStateMachine):
    """One cache, and rows of the model."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.model = model_of(variant)
        dithered = variant.recipe.store_format.is_dithered
        seeds = SEEDS if dithered else None
        self.cache = torch_witcert.CertifiedCache(
            self.model, CAPACITY - 3, ROWS, seeds=seeds, num_pages=variant.num_pages
        )
        self.spends = variant.recipe.budget is not None
        self.dithered = dithered
        self.layers = len(self.cache.layers)
        self.rows = [Row(seed, torch.empty(2, self.layers, 0, D, dtype=variant.dtype)) for seed in SEEDS]
        self.seeds = list(SEEDS)  # of each place in the batch: what a row gets when it begins anew
        self.columns = 0
        self.empty = True  # no forward since the beginning or the last reset: the next one is a prefill
        self.channels: list[torch.Tensor] | None = None  # outlier channels, once chosen
        self.originals: list[tuple[torch_witcert.CertifiedCache, list[torch.Tensor]]] = []

    @rule(name=st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(weight)]), data=st.data())
    def call(self, name: str, data: st.DataObject) -> None:
        """One rule for all calls: rules of their own would be drawn equally often, and rows would never get long."""
        getattr(self, name)(data)

    @property
    def certified(self) -> list[CertifiedLayer]:
        return [layer for layer in self.cache.layers if isinstance(layer, CertifiedLayer)]

    # --- forwards --------------------------------------------------------------------------------------------------

    def fresh(self, new_tokens: int, validity: str, seed: int) -> Fresh:
        batch, dtype = len(self.rows), self.cache.dtype
        generator = torch.Generator().manual_seed(seed)
        valid = VALIDITY[validity](torch.rand(batch, new_tokens, generator=generator))
        q = torch.randn(self.layers, batch, HEADS, new_tokens, D, generator=generator)
        kv = torch.randn(2, self.layers, batch, 1, new_tokens, D, generator=generator)
        kv[0, ..., 3] *= 4
        kv.masked_fill_(~valid[:, None, :, None], float("nan"))
        return Fresh(q.to(dtype), kv.to(dtype), valid)

    def attend(self, fresh: Fresh, layers: int | None = None) -> list[torch.Tensor]:
        """Outputs of the first layers of a forward, all where left out."""
        valid = None if bool(fresh.valid.all()) and fresh.valid.shape[1] > 1 else fresh.valid
        out = []
        for layer in self.cache.layers[:layers]:
            window = layer.window if isinstance(layer, CertifiedLayer) else 0
            tokens, _ = layer.update(*fresh.kv[:, layer.index])
            scores = Scores(SCALE, window)
            out.append(tokens.layer.attend(fresh.q[layer.index], tokens.keys, tokens.values, valid, scores))
        return out

    def checked_forward(self, fresh: Fresh) -> None:
        """A forward whose bounds hold against float64 attention over the exact keys and values; a prefill has none."""
        if self.is_prefill(fresh):
            self.attend(fresh)
            return
        lengths = self.cache.lengths.clone()
        slots = max(1, -(-max(map(len, self.rows)) // P))
        ranks = fresh.valid.int().cumsum(1)
        positions = torch.where(fresh.valid, lengths[:, None] + ranks - 1, -1)
        at = torch.arange(slots * P)
        key_positions = torch.cat([torch.where(at < lengths[:, None], at, -1), positions], 1)
        history = fresh.kv.new_zeros(2, self.layers, len(self.rows), 1, slots * P, D)
        for number, row in enumerate(self.rows):
            history[:, :, number, 0, : len(row)] = row.tokens
        expected = []
        for layer in self.certified:
            q, kv, window = fresh.q[layer.index], fresh.kv[:, layer.index], layer.window
            exact = exact_attention(
                q, *torch.cat([history[:, layer.index], kv], 3), positions, key_positions, SCALE, window
            )
            used = dequantized_attention(
                q,
                *kv,
                positions,
                lengths,
                layer.group.page_table[:, :slots].clamp_min(0),
                self.source_map(window)[..., :slots],
                layer.store,
                SCALE,
                window,
                store_format=layer.shape.store_format,
                outlier_channels=layer.outlier_channels,
                layer=layer.index,
            )
            expected.append((exact.output, total_variation(exact.probabilities, used.probabilities).amax(-1)))
        out = self.attend(fresh)
        found = torch_witcert.certificates(self.cache)
        for place, (layer, (output, variation)) in enumerate(zip(self.certified, expected, strict=True)):
            error = (out[layer.index].double() - output).norm(dim=-1).amax(-1)
            assert (error <= found.output[place]).all()
            assert (variation <= found.tv[place]).all()
            assert found.output[place].isfinite().all()

    def is_prefill(self, fresh: Fresh) -> bool:
        return self.empty and fresh.valid.shape[1] > 1

    def refusal(self, counts: list[int]) -> str | None:
        """Why these many new tokens of each row must be refused."""
        if any(len(row) + count > CAPACITY for row, count in zip(self.rows, counts, strict=True)):
            return "the cache is full: row .* Nothing was written"
        in_use = len({page for _, _, page in held_pages(self.rows, 0)})
        fills = sum(len(row.filled_by(count)) for row, count in zip(self.rows, counts, strict=True))
        if in_use + fills > self.cache.state.groups[0].num_pages:
            return "the pool of .* pages is exhausted: row .* Nothing was written"
        return None

    def take(self, fresh: Fresh) -> None:
        """The rows after a forward."""
        for number, row in enumerate(self.rows):
            new = fresh.kv[:, :, number, 0][:, :, fresh.valid[number]]
            filled = row.filled_by(new.shape[2])
            row.tokens = torch.cat([row.tokens, new], 2)
            row.peak = max(row.peak, len(row))
            row.spent += 0 if self.is_prefill(fresh) else new.shape[2]
            for window, pages in row.pages.items():
                oldest = filled.stop - KEPT[window]
                pages |= {slot: self.filled_page(row, slot, window) for slot in filled if slot >= oldest}
            row.leave_behind(len(row))
        self.columns += fresh.valid.shape[1]
        self.empty = False
        if self.channels is None and any(map(len, self.rows)):
            self.channels = [layer.outlier_channels.clone() for layer in self.certified]

    def filled_page(self, row: Row, slot: int, window: int) -> Page:
        k, v = row.tokens[:, :, slot * P : (slot + 1) * P]
        layers = [layer for layer in self.certified if layer.window == window]
        return Page({each.index: stored_page(each, k[each.index], v[each.index], row.seed, slot) for each in layers})

    @contextmanager
    def refused(self, error: type[Exception], match: str) -> Iterator[None]:
        """The block raises, and nothing has changed but how far back a crop may go after a forward that failed."""

        def state() -> list[torch.Tensor]:
            return [tensor for tensor in self.cache.tensors() if tensor is not self.cache.state.peak]

        before = [tensor.clone() for tensor in state()]
        with pytest.raises(error, match=match):
            yield
        assert all(same_bits(tensor, old) for tensor, old in zip(state(), before, strict=True))

    def append(self, data: st.DataObject) -> None:
        fresh = self.draw_fresh(data, st.one_of(st.integers(1, 3), st.integers(1, 3 * P), st.integers(2 * P, 3 * P)))
        refusal = self.refusal(fresh.valid.sum(1).tolist())
        if refusal:
            with self.refused(ValueError, refusal):
                self.attend(fresh)
        else:
            self.checked_forward(fresh)
            self.take(fresh)

    def fail(self, data: st.DataObject) -> None:
        """Only the first layer of a forward runs: as if it had not been. If it was so long that it has overwritten exact
        tokens, only a reset helps."""
        fresh = self.draw_fresh(data, st.integers(1, P + 2))
        new_tokens = fresh.valid.shape[1]
        counts = fresh.valid.sum(1).tolist()
        if self.refusal(counts):
            return
        self.attend(fresh, layers=1)
        if new_tokens <= P or self.empty:
            for row, count in zip(self.rows, counts, strict=True):
                row.peak = max(row.peak, len(row) + count) if len(row) else 0
                # What its window would have left behind may be overwritten.
                row.leave_behind(len(row) + count)
            return
        index = torch.arange(len(self.rows))
        for call in (
            lambda: self.attend(fresh),
            *(partial(way, self.cache, self.model) for way in COPIES.values()),
            lambda: self.cache.crop(-1),
            lambda: self.cache.reorder_cache(index),
            lambda: self.cache.release([0]),
            lambda: self.cache.batch_select_indices(index),
        ):
            with self.refused(RuntimeError, "failed half-way.*reset"):
                call()
        self.reset()

    def draw_fresh(self, data: st.DataObject, new_tokens: st.SearchStrategy[int]) -> Fresh:
        number = data.draw(new_tokens, label="new tokens")
        validity = data.draw(st.sampled_from(sorted(VALIDITY)), label="validity")
        return self.fresh(number, validity, data.draw(st.integers(0, 2**16), label="seed"))

    # --- rows ------------------------------------------------------------------------------------------------------

    def crop(self, data: st.DataObject) -> None:
        possible = min(len(row) - row.exact_from for row in self.rows)
        tokens = data.draw(st.one_of(st.integers(1, max(1, possible)), st.integers(1, 2 * P + 2)), label="tokens")
        # A row without tokens has none to give back.
        lengths = [len(row) - tokens if len(row) else 0 for row in self.rows]
        refusal = None
        if not all(n == 0 or n > 0 and n >= row.exact_from for n, row in zip(lengths, self.rows, strict=True)):
            refusal = f"tokens_to_remove=-{tokens} is not possible for row .* Nothing was changed"
        elif tokens > self.columns:
            refusal = f"tokens_to_remove=-{tokens} is more than the {self.columns} columns .* Nothing was changed"
        if refusal is None:
            self.cache.crop(-tokens)
            for row, length in zip(self.rows, lengths, strict=True):
                row.shorten(length)
            self.columns -= tokens
            self.empty = not any(lengths)
        else:
            with self.refused(ValueError, refusal):
                self.cache.crop(-tokens)

    def forget(self, rows: Iterable[int]) -> None:
        for number in rows:
            self.rows[number].shorten(0)
            self.rows[number].spent, self.rows[number].seed = 0, self.seeds[number]

    def reorder(self, data: st.DataObject) -> None:
        rows = len(self.rows)
        index = data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows))
        self.cache.reorder_cache(torch.tensor(index))
        self.rows = [self.rows[number].copy() for number in index]

    def fork(self, data: st.DataObject) -> None:
        if len(self.rows) == 1:
            return
        source, *targets = data.draw(st.permutations(range(len(self.rows))))
        targets = targets[: data.draw(st.integers(1, len(targets)))]
        self.cache.fork(source, targets)
        for target in targets:
            self.rows[target] = replace(self.rows[source].copy(), spent=0)

    def release(self, data: st.DataObject) -> None:
        released = data.draw(st.sets(st.integers(0, len(self.rows) - 1), min_size=1))
        self.cache.release(sorted(released))
        self.forget(released)
        self.empty = not any(map(len, self.rows))
        if self.empty:
            self.columns = 0

    def batch_select(self, data: st.DataObject) -> None:
        index = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=MOST_ROWS))
        self.cache.batch_select_indices(torch.tensor(index))
        self.select(index)

    def batch_repeat(self, _: st.DataObject) -> None:
        if 2 * len(self.rows) > MOST_ROWS:
            return
        self.cache.batch_repeat_interleave(2)
        self.select([number for number in range(len(self.rows)) for _ in range(2)])

    def select(self, index: list[int]) -> None:
        self.rows = [self.rows[number].copy() for number in index]
        self.seeds = [self.seeds[number] for number in index]

    def reset(self, _: st.DataObject | None = None) -> None:
        self.cache.reset()
        self.forget(range(len(self.rows)))
        self.columns, self.empty = 0, True

    def copy(self, data: st.DataObject) -> None:
        """Go on with a copy, or with what comes back from a file or a pickle; the original stays as it is."""
        original = self.cache
        self.originals.append((original, [tensor.clone() for tensor in original.tensors()]))
        self.cache = COPIES[data.draw(st.sampled_from(list(COPIES)), label="way")](original, self.model)
        for name in ("empty", "untouched"):
            assert getattr(self.cache.state, name) is getattr(original.state, name)

    def wrong_calls(self, data: st.DataObject) -> None:
        cache, rows = self.cache, len(self.rows)
        call, match = data.draw(
            st.sampled_from(
                [
                    (lambda: cache.reorder_cache(torch.zeros(rows + 1, dtype=torch.int64)), "beam_idx must have"),
                    (lambda: cache.reorder_cache(torch.full((rows,), rows)), "beam_idx must be rows from 0"),
                    (lambda: cache.fork(0, [0]), "source and targets must be distinct"),
                    (lambda: cache.fork(rows, [0]), "source must be a row from 0"),
                    (lambda: cache.release([-1]), "rows must be rows from 0"),
                    (
                        lambda: cache.batch_select_indices(torch.empty(0, dtype=torch.int64)),
                        "indices must be row indices",
                    ),
                    (
                        lambda: cache.batch_select_indices(torch.zeros(rows, dtype=torch.bool)),
                        "indices must be row indices",
                    ),
                    (lambda: cache.batch_repeat_interleave(0), "repeats must be a positive int"),
                ]
                + ([] if CROP_KEEPS else [(lambda: cache.crop(1), "tokens_to_remove must be 0 or negative")])
            )
        )
        with self.refused(ValueError, match):
            call()

    # --- comparison ------------------------------------------------------------------------------------------------

    @invariant()
    def rows_agree(self) -> None:
        cache, state = self.cache, self.cache.state
        assert cache.batch_size == len(self.rows)
        assert cache.lengths.tolist() == [len(row) for row in self.rows]
        assert int(cache.get_seq_length()) == self.columns
        assert state.seeds.tolist() == ([row.seed for row in self.rows] if self.dithered else [])
        assert state.spent.tolist() == ([row.spent for row in self.rows] if self.spends else [])
        if self.channels is not None:
            assert all(
                torch.equal(layer.outlier_channels, old)
                for layer, old in zip(self.certified, self.channels, strict=True)
            )
        for layer in cache.layers:
            for number, row in enumerate(self.rows):
                tokens = row.tokens[:, layer.index]
                if isinstance(layer, CertifiedLayer):
                    at = torch.arange(row.exact_from, len(row))
                    exact, stored, at = tokens[:, at], (layer.store.k_tail, layer.store.v_tail), at % (2 * P)
                else:
                    exact, stored, at = tokens, (layer.dense_keys, layer.dense_values), torch.arange(len(row))
                assert all(torch.equal(part[number, 0, at], old) for part, old in zip(stored, exact, strict=True))

    @invariant()
    def pages_agree(self) -> None:
        state = self.cache.state
        in_use = 0
        for window, group in state.groups.items():
            held = held_pages(self.rows, window)
            physical = group.page_table.tolist()
            named = {(page, physical[row][slot]) for row, slot, page in held}
            pages = [page for page, _ in named]
            at = [number for _, number in named]
            assert len(set(pages)) == len(set(at)) == len(named), (
                "a page is named by those who share it, and by no other"
            )
            assert all(0 <= number < group.num_pages for number in at)
            in_use += len(named)
            counts = torch.zeros(group.num_pages, dtype=torch.int64)
            counts.index_add_(
                0,
                torch.tensor([physical[r][s] for r, s, _ in held], dtype=torch.int64),
                torch.ones(len(held), dtype=torch.int64),
            )
            assert torch.equal(group.reference_counts(state.lengths), counts)
            assert torch.equal(group.source_map(state.lengths, 1), self.source_map(window))
            for layer in self.certified:
                if layer.window != window or not named:
                    continue
                assert layer.store.page_notes.shape[0] == group.num_pages
                for name in POOL_PARTS:
                    part = getattr(layer.store, name)
                    if part.numel():
                        assert torch.equal(part[at], torch.stack([page.parts[layer.index][name] for page in pages])), (
                            name
                        )
        assert self.cache.pages_in_use() == in_use

    def source_map(self, window: int) -> torch.Tensor:
        """int8 [B, 1, M]: complete pages that a read needs, all of which must be held."""
        sources = torch.full((len(self.rows), 1, SLOTS), SOURCE_NONE, dtype=torch.int8)
        for number, row in enumerate(self.rows):
            needed = range(max(0, len(row) // P - READ[window]), len(row) // P)
            assert row.pages[window].keys() >= set(needed)
            sources[number, 0, list(needed)] = SOURCE_CODES
        return sources

    def teardown(self) -> None:
        fresh = self.fresh(1, "all", seed=1)
        fits = torch.tensor([[len(row) < CAPACITY and not row.filled_by(1)] for row in self.rows])
        self.checked_forward(fresh._replace(valid=fits))
        for original, contents in self.originals:
            assert all(same_bits(tensor, old) for tensor, old in zip(original.tensors(), contents, strict=True))
        self.cache.release(list(range(len(self.rows))))
        assert self.cache.pages_in_use() == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_sequence_of_calls(variant, monkeypatch):
    for module in (reference, oracle):
        monkeypatch.setattr(module, "dither", remembered_dither)
    options = settings(max_examples=VARIANTS[variant].sequences, stateful_step_count=32, report_multiple_bugs=False)
    run_state_machine_as_test(lambda: CacheMachine(VARIANTS[variant]), settings=options)
