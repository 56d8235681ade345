"""How long a split of the code pages is: a pure function, so that results never depend on batch or length."""

from __future__ import annotations

#: Splits that the rows of a full cache are cut into, as long as a split has not fewer or more tokens than these. Shorter ones
#: cost more to start than to read, and longer ones leave processors idle.
WANTED_SPLITS = 32
LEAST_TOKENS = 512
MOST_TOKENS = 1024


def pages_per_split(page_size: int, pages_per_row: int) -> int:
    """Pages that one program reads.

    Args:
        page_size: P.
        pages_per_row: M, the capacity of a row in pages.

    Returns:
        A number that depends on nothing else, so that a read has the same bits in any batch.
    """
    wanted = -(-pages_per_row // WANTED_SPLITS)
    return max(1, LEAST_TOKENS // page_size, min(wanted, MOST_TOKENS // page_size))
