"""Which physical pages a cache's rows own: one table for each group of layers that keep the same tokens.

A page is in use while the table of some row names it among the slots that the row holds. Reference counts and the free list
are read off the tables, by tensor operations without a synchronization, so that no page can leak or be freed twice. A held
page is never written again: rows that share a prefix share its pages, and a row that must change one (a crop opened it) is
given another when the page fills again.
"""

from __future__ import annotations

import torch

from ..ops.storage import derive_source_map, identity_page_table

#: Pages that a sliding window keeps beyond its own tokens: the one it begins in, and one that a crop may open again.
WINDOW_MARGIN = 2


def assign_pages(
    page_table: torch.Tensor, held: torch.Tensor, needed: torch.Tensor, num_pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give free pages to slots.

    Args:
        page_table: int32 [B, M].
        held: bool [B, M], slots whose pages are in use.
        needed: bool [B, M], slots that need a page of their own; none of them held.
        num_pages: N, pages of the pool.

    Returns:
        The table with free pages, in ascending order, in the needed slots, early slots first and rows in turn, -1 where none
        was left; and bool [B], rows that a page is missing for.
    """
    slots, rows = page_table.shape[1], page_table.shape[0]
    named = torch.where(held, page_table, num_pages).flatten().to(torch.int64)
    used = torch.zeros(num_pages + 1, dtype=torch.bool, device=page_table.device).scatter(0, named, True)[:num_pages]
    free = torch.argsort(used.to(torch.int8), stable=True)
    rank = needed.T.flatten().cumsum(0).view(slots, rows).T - 1
    found = needed & (rank < num_pages - used.sum())
    pages = free[rank.clamp(0, num_pages - 1)].to(torch.int32)
    table = torch.where(needed, torch.where(found, pages, -1), page_table)
    return table, (needed & ~found).any(1)


class PageGroup:
    """Pages of the layers that keep the same tokens: all of them, or those of one sliding window.

    Args:
        batch_size: rows B.
        pages_per_row: page slots M.
        page_size: P.
        window: 0, or the layers' sliding window.
        num_pages: N, pages of the pool; 0 for as many as the rows can ever hold.
        device: of the table.
    """

    def __init__(
        self, batch_size: int, pages_per_row: int, page_size: int, window: int, num_pages: int, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.window = window
        #: Complete pages of a row that a read can reach, the newest ones.
        self.reached = min(pages_per_row, -(-window // page_size)) if window else pages_per_row
        #: Pages that a row keeps, the newest ones.
        self.kept = min(pages_per_row, self.reached + WINDOW_MARGIN)
        self.num_pages = min(num_pages or batch_size * self.kept, batch_size * self.kept)
        #: Whether slots get their pages when they fill, because the pool has fewer pages than the tables have slots.
        self.on_demand = self.num_pages < batch_size * pages_per_row
        self.page_table = torch.empty(batch_size, pages_per_row, dtype=torch.int32, device=device)
        self.reset()

    def reset(self) -> None:
        """Every slot is free; the table stays where it is."""
        if self.on_demand:
            self.page_table.fill_(-1)
        else:
            rows, slots = self.page_table.shape
            self.page_table.copy_(identity_page_table(rows, slots, self.page_table.device))

    def held(self, lengths: torch.Tensor, lengths_after: torch.Tensor | None = None) -> torch.Tensor:
        """Slots in use, bool [B, M]: complete pages that the window still reaches.

        Args:
            lengths: int32 [B], tokens stored.
            lengths_after: what they will be; pages that the window leaves behind until then are free.
        """
        slot = torch.arange(self.page_table.shape[1], device=lengths.device)
        after = lengths if lengths_after is None else lengths_after
        first = after // self.page_size - self.kept
        complete = (slot < (lengths // self.page_size)[:, None]) & (slot >= first[:, None])
        # After a crop a window asks for pages that it had left behind.
        return complete & (self.page_table >= 0)

    def reserved(self, lengths: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The page table with pages for the slots that a forward fills.

        They may be pages that its window leaves behind: every layer reads them before it writes.

        Args:
            lengths, counts: int32 [B], tokens stored and new.

        Returns:
            int32 [B, M], and bool [B], rows for which the pool has no page left.
        """
        slot = torch.arange(self.page_table.shape[1], device=lengths.device)
        after = lengths + counts
        fills = (slot >= (lengths // self.page_size)[:, None]) & (slot < (after // self.page_size)[:, None])
        kept = slot >= (after // self.page_size - self.kept)[:, None]
        # Slots that the window leaves behind do not come back, even if the forward fails: their pages may be written then. A page
        # that it has left before it is full is not stored at all.
        table = torch.where(fills | ~kept, -1, self.page_table)
        return assign_pages(table, self.held(lengths, after), fills & kept, self.num_pages)

    def take_rows(self, index: torch.Tensor, lengths: torch.Tensor) -> None:
        """Row b becomes a copy of row index[b], in place: it shares the pages held, other slots get pages of their own.

        Args:
            index: int64 [B].
            lengths: int32 [B], of the rows as they are afterwards.
        """
        self.page_table.copy_(self.page_table[index])
        self.release(lengths)

    def release(self, lengths: torch.Tensor) -> None:
        """Slots beyond the complete pages of rows of these lengths (int32 [B]) give up their pages, in place."""
        held = self.held(lengths)
        if self.on_demand:
            self.page_table.copy_(torch.where(held, self.page_table, -1))
        else:
            self.page_table.copy_(assign_pages(self.page_table, held, ~held, self.num_pages)[0])

    def resized(self, index: torch.Tensor, lengths: torch.Tensor) -> tuple[PageGroup, torch.Tensor]:
        """A group for copies of the rows index (int64 [B']), and its pages in the old pool. Synchronizes.

        Args:
            lengths: int32 [B], of the rows as they are now.

        Returns:
            The group, and int64 [U]: page i of its pool is to hold what page sources[i] of the old one does.
        """
        old_rows, slots = self.page_table.shape
        full = self.num_pages == old_rows * self.kept
        device = self.page_table.device
        group = PageGroup(len(index), slots, self.page_size, self.window, 0 if full else self.num_pages, device)
        held, table = self.held(lengths)[index], self.page_table[index].to(torch.int64)
        sources = table[held].unique()
        place = torch.zeros(self.num_pages, dtype=torch.int32, device=device)
        place[sources] = torch.arange(len(sources), dtype=torch.int32, device=device)
        group.page_table.copy_(torch.where(held, place[table.clamp_min(0)], -1))
        group.release(lengths[index])
        return group, sources

    def source_map(self, lengths: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """Source map int8 [B, Hkv, M] of rows of these lengths."""
        return derive_source_map(lengths, num_kv_heads, self.page_table.shape[1], self.page_size, self.reached)

    def reference_counts(self, lengths: torch.Tensor) -> torch.Tensor:
        """How many rows hold each page, int64 [N]; 0 for a free one."""
        named = torch.where(self.held(lengths), self.page_table, self.num_pages).flatten()
        return torch.bincount(named, minlength=self.num_pages + 1)[: self.num_pages]
