"""How long a split of the code pages is: a pure function, so that results never depend on batch or length."""

from __future__ import annotations

#: Splits that a full cache is cut into, at most; more only adds work to the merge.
MOST_SPLITS = 64
#: A split shorter than this many tokens costs more to start than to read.
LEAST_TOKENS = 256
#: Rescalings of a running maximum add to the arithmetic slack; a longer split would show in the bound.
MOST_PAGES = 128


def pages_per_split(page_size: int, pages_per_row: int) -> int:
    """Pages that one program reads.

    Args:
        page_size: P.
        pages_per_row: M, the capacity of a row in pages.

    Returns:
        A number in [1, MOST_PAGES] that depends on nothing else, so that a read has the same bits in any batch.
    """
    least = max(1, LEAST_TOKENS // page_size)
    wanted = max(least, -(-pages_per_row // MOST_SPLITS))
    return min(wanted, MOST_PAGES)
