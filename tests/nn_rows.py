"""Rows of a cache in plain Python, that know every token and every page, and what a layer must store of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache as remember

import torch

from torch_witcert.nn.layers import CertifiedLayer
from torch_witcert.ops.dither import dither, page_key
from torch_witcert.ops.quantize import quantize_page

P, D, SLOTS = 16, 64, 8
WINDOW = 20
#: Newest complete pages that a read needs, by the layer's window: a token at a page's beginning sees 19 tokens before it.
READ = {0: SLOTS, WINDOW: 2}
#: Newest complete pages that are stored: a window keeps two more, so that a crop of a page still finds what it needs.
KEPT = {0: SLOTS, WINDOW: 4}


@dataclass(eq=False)
class Page:
    """A page that a row has filled; rows that share it hold the same object."""

    parts: dict[int, dict[str, torch.Tensor]]  # what must be stored, by layer and name


@dataclass
class Row:
    """A row's tokens, request and pages."""

    seed: int
    tokens: torch.Tensor  # [K or V, layer, S, D]
    spent: int = 0  # query tokens of certified reads
    peak: int = 0  # longest that it has been since it was last empty: what the exact ring was written up to
    pages: dict[int, dict[int, Page]] = field(default_factory=lambda: {window: {} for window in KEPT})

    def __len__(self) -> int:
        return self.tokens.shape[2]

    def copy(self) -> Row:
        return replace(self, pages={window: dict(pages) for window, pages in self.pages.items()})

    def shorten(self, length: int) -> None:
        self.peak = max(self.peak, len(self)) if length else 0
        self.tokens = self.tokens[:, :, :length]
        for window, pages in self.pages.items():
            self.pages[window] = {slot: page for slot, page in pages.items() if slot < length // P}

    def leave_behind(self, length: int) -> None:
        """Drop the pages that windows leave when the row gets that long."""
        for window, pages in self.pages.items():
            oldest = length // P - KEPT[window]
            self.pages[window] = {slot: page for slot, page in pages.items() if slot >= oldest}

    @property
    def exact_from(self) -> int:
        """Position of the oldest token that the exact ring still holds."""
        return max(0, max(self.peak, len(self)) // P - 1) * P

    def filled_by(self, count: int) -> range:
        """Slots that `count` more tokens fill."""
        return range(len(self) // P, (len(self) + count) // P)


def held_pages(rows: Sequence[Row], window: int) -> list[tuple[int, int, Page]]:
    """Row, slot and page of every slot in use."""
    return [(number, slot, page) for number, row in enumerate(rows) for slot, page in row.pages[window].items()]


def stored_page(
    layer: CertifiedLayer, k: torch.Tensor, v: torch.Tensor, seed: int, slot: int
) -> dict[str, torch.Tensor]:
    """What a layer must store of the keys and values [P, D] in a slot of a row."""
    store_format = layer.shape.store_format
    keys = page_key(torch.tensor([seed]), torch.tensor(slot))
    draws = [
        remembered_dither(keys, layer.index, is_value, part.dither, P, D)
        for is_value, part in ((False, store_format.key), (True, store_format.value))
    ]
    page = quantize_page(k[None], v[None], store_format, layer.outlier_channels, *draws)
    return page._asdict() | ({"page_keys": keys} if store_format.is_dithered else {})


@remember
def page_dither(key: int, layer: int, is_value: bool, mode: str) -> torch.Tensor:
    return dither(torch.tensor([key]), layer, is_value, mode, P, D)[0]


def remembered_dither(
    page_keys: torch.Tensor, layer: int, is_value: bool, mode: str, page_size: int, head_dim: int
) -> torch.Tensor | None:
    """`dither` of pages with one KV head. Every read draws it anew, here for the same few keys: a third of all the time."""
    if mode == "none" or not page_keys.numel():
        return dither(page_keys, layer, is_value, mode, page_size, head_dim)
    assert page_keys.shape[-1] == 1 and (page_size, head_dim) == (P, D)
    pages = [page_dither(key, layer, is_value, mode) for key in page_keys.flatten().tolist()]
    return torch.stack(pages).unflatten(0, page_keys.shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, NaN included."""
    return a.shape == b.shape and torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (a, b)))
