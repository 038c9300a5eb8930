"""Which pages each request reads, in order: one persistent array, rows updated in place."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ramify.errors import CacheError, ConfigError


class SlotAllocator:
    """Hands out rows 0 .. capacity - 1, the smallest free one first, so that rows stay dense."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity={capacity} but at least 1 row is needed")
        self.capacity = capacity
        self._free = list(range(capacity))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    def allocate(self) -> int:
        """The smallest free row.

        Raises:
            CacheError: every row is taken.
        """
        if not self._free:
            raise CacheError(
                f"all {self.capacity} rows of the block table are in use; release a sequence, "
                "or build the table with more rows"
            )
        row = heapq.heappop(self._free)
        self._used.add(row)
        return row

    def release(self, row: int) -> None:
        """Give a row back.

        Raises:
            CacheError: nobody holds it.
        """
        if row not in self._used:
            raise CacheError(f"row {row} is not in use; it was released before")
        self._used.discard(row)
        heapq.heappush(self._free, row)


class PagedBlockTable:
    """Request → pages. Entries of `array` beyond a row's pages are -1.

    Args:
        num_rows: requests that can hold a row at once.
        max_pages: pages per row, at most.
        page_size: tokens per page.
    """

    def __init__(self, num_rows: int, max_pages: int, page_size: int) -> None:
        if max_pages < 1 or page_size < 1:
            raise ConfigError(f"max_pages={max_pages} and page_size={page_size} must be at least 1")
        self.page_size = page_size
        self.array: NDArray[np.int32] = np.full((num_rows, max_pages), -1, dtype=np.int32)
        self._num_pages = [0] * num_rows
        self._rows = SlotAllocator(num_rows)

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], page_size: int) -> PagedBlockTable:
        """A table that holds exactly these rows."""
        table = cls(max(1, len(rows)), max((len(pages) for pages in rows), default=1), page_size)
        for pages in rows:
            table.append(table.allocate(), pages)
        return table

    @property
    def max_tokens(self) -> int:
        """Tokens that fit in a row."""
        return int(self.array.shape[1]) * self.page_size

    @property
    def num_free_rows(self) -> int:
        """Rows that nobody holds."""
        return self._rows.num_free

    def allocate(self) -> int:
        """An empty row; CacheError when there is none."""
        return self._rows.allocate()

    def release(self, row: int) -> None:
        """Empty a row and give it back."""
        self._rows.release(row)
        self.array[row, : self._num_pages[row]] = -1
        self._num_pages[row] = 0

    def append(self, row: int, pages: Sequence[int]) -> None:
        """Add pages at the end of a row.

        Raises:
            CacheError: the row would get too long; it is unchanged.
        """
        start = self._num_pages[row]
        end = start + len(pages)
        if end > self.array.shape[1]:
            raise CacheError(
                f"row {row} would have {end} pages, the limit is {self.array.shape[1]}"
            )
        self.array[row, start:end] = pages
        self._num_pages[row] = end

    def rewrite(self, row: int, start: int, pages: Sequence[int]) -> None:
        """Replace the pages from index `start` on; the row's length stays."""
        assert start + len(pages) <= self._num_pages[row]
        self.array[row, start : start + len(pages)] = pages

    def truncate(self, row: int, num_pages: int) -> None:
        """Drop the pages of a row beyond the first `num_pages`."""
        assert 0 <= num_pages <= self._num_pages[row]
        self.array[row, num_pages : self._num_pages[row]] = -1
        self._num_pages[row] = num_pages

    def num_pages(self, row: int) -> int:
        """Pages in a row."""
        return self._num_pages[row]

    def pages(self, row: int) -> list[int]:
        """The pages of a row, in order."""
        found: list[int] = self.array[row, : self._num_pages[row]].tolist()
        return found
