"""Block tables: the pages of each live request, in order, in one persistent array [num_rows, max_pages]."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ramify.counts import counted
from ramify.errors import CacheError, ConfigError


class RowAllocator:
    """Allocates rows 0 .. capacity - 1, the smallest free row first, so that used rows stay dense."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity={capacity} but at least 1 row is needed")
        self.capacity = capacity
        self._free = list(range(capacity))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    @property
    def rows(self) -> list[int]:
        """Rows in use, ascending."""
        return sorted(self._used)

    def allocate(self) -> int:
        """Take the smallest free row.

        Raises:
            CacheError: every row is in use.
        """
        if not self._free:
            raise CacheError(
                f"no row of the block table is free, {self.capacity} in use; release a sequence, "
                "or build the table with more rows"
            )
        row = heapq.heappop(self._free)
        self._used.add(row)
        return row

    def require_free(self, count: int) -> None:
        """Raise CacheError unless `count` rows are free."""
        if count > len(self._free):
            raise CacheError(
                f"{counted(count, 'row')} asked for, {len(self._free)} of {self.capacity} are free; release a "
                "sequence, or build the table with more rows"
            )

    def require(self, row: int) -> None:
        """Raise CacheError unless this row is in use."""
        if row not in self._used:
            raise CacheError(f"row {row} is not in use; it was released before, or never allocated")

    def release(self, row: int) -> None:
        """Free a row.

        Raises:
            CacheError: it is not in use.
        """
        self.require(row)
        self._used.discard(row)
        heapq.heappush(self._free, row)


class BlockTable(Protocol):
    """A row of pages for each live request, and its length in tokens.

    Integers and NumPy on the host, whatever device the pool is on. A call that fails changes
    nothing; errors are CacheError, or what the source of pages raises.
    """

    page_size: int
    array: NDArray[np.int32]  # [num_rows, max_pages]; only the table writes to it
    _rows: RowAllocator
    _lengths: list[int]  # by row, in tokens

    @property
    def max_tokens(self) -> int:
        """Tokens that fit in a row."""
        return int(self.array.shape[1]) * self.page_size

    @property
    def num_free_rows(self) -> int:
        """Number of free rows."""
        return self._rows.num_free

    def allocate(self, num_tokens: int = 0) -> int:
        """Take the smallest free row, with pages for `num_tokens`, and set its length to that."""
        return self.allocate_all((num_tokens,))[0]

    def allocate_all(self, lengths: Sequence[int]) -> list[int]:
        """Take a row for each length in tokens: all rows, or an error and none."""
        ...

    def update(self, row: int, num_tokens: int) -> None:
        """Lengthen a row by `num_tokens`, with pages for them; shorten it if negative."""
        ...

    def release(self, row: int) -> None:
        """Empty a row and free it."""
        ...

    def view(self, rows: Sequence[int]) -> NDArray[np.int32]:
        """A copy of the pages of `rows`: [len(rows), max_pages], -1 beyond a row's last page."""
        ...

    def lengths(self, rows: Sequence[int]) -> NDArray[np.int32]:
        """Lengths of `rows` in tokens, as set by `allocate` and `update`: [len(rows)]."""
        return np.array(self._lengths, np.int32)[_index(self._rows, rows)]

    def reset(self) -> None:
        """Release every row."""
        for row in self._rows.rows:
            self.release(row)

    def _require_rows(self, lengths: Sequence[int]) -> None:
        """Raise CacheError unless there are free rows for these lengths."""
        self._rows.require_free(len(lengths))
        for length in lengths:
            _check_length(length, self.max_tokens)

    def _updated_length(self, row: int, num_tokens: int) -> int:
        """Tokens of a row once it is `num_tokens` longer; CacheError if it cannot be."""
        self._rows.require(row)
        length = self._lengths[row] + num_tokens
        _check_length(length, self.max_tokens)
        return length


class PageSource(Protocol):
    """Allocator of a table's pages; a `PrefixCache` is one."""

    def reserve(self, num_pages: int) -> Sequence[int]:
        """Take `num_pages` pages: all, or an error and none."""
        ...

    def give_back(self, pages: Sequence[int]) -> None:
        """Free reserved pages."""
        ...


class PagedBlockTable(BlockTable):
    """A table whose rows hold arbitrary pages. Entries of `array` beyond a row's pages are -1.

    With a `source` the table owns the pages of its rows: it reserves them as rows get longer and
    gives them back, appended pages included. Without a source the caller owns them, as the planner
    does: it adds pages by `append`, and `update` refuses a length beyond them.

    Args:
        num_rows: maximum number of live requests.
        max_pages: maximum number of pages per row.
        page_size: tokens per page.
    """

    def __init__(
        self, num_rows: int, max_pages: int, page_size: int, *, source: PageSource | None = None
    ) -> None:
        _check_sizes(max_pages, page_size)
        self.page_size = page_size
        self.array: NDArray[np.int32] = np.full((num_rows, max_pages), -1, dtype=np.int32)
        self._num_pages = [0] * num_rows
        self._lengths = [0] * num_rows
        self._rows = RowAllocator(num_rows)
        self._source = source

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], page_size: int) -> PagedBlockTable:
        """A table with these pages in rows 0, 1, ..."""
        table = cls(max(1, len(rows)), max([1, *map(len, rows)]), page_size)
        for pages in rows:
            table.append(table.allocate(), pages)
        return table

    def allocate(self, num_tokens: int = 0) -> int:
        """See `BlockTable.allocate`."""
        return super().allocate(num_tokens) if num_tokens else self._rows.allocate()

    def allocate_all(self, lengths: Sequence[int]) -> list[int]:
        """See `BlockTable.allocate_all`."""
        self._require_rows(lengths)
        counts = [-(-length // self.page_size) for length in lengths]
        pages = self._reserve(sum(counts))
        rows, start = [], 0
        for length, count in zip(lengths, counts, strict=True):
            row = self._rows.allocate()
            self.append(row, pages[start : start + count])
            self._lengths[row] = length
            rows.append(row)
            start += count
        return rows

    def update(self, row: int, num_tokens: int) -> None:
        """See `BlockTable.update`; gives pages that a shorter row does not need back to the source."""
        length = self._updated_length(row, num_tokens)
        missing = -(-length // self.page_size) - self._num_pages[row]
        if missing > 0:
            self.append(row, self._reserve(missing))
        elif num_tokens < 0 and self._source is not None:
            self.truncate(row, self._num_pages[row] + missing)
        self._lengths[row] = length

    def release(self, row: int) -> None:
        """Empty a row and free it; gives its pages back to the source if there is one."""
        if self._source is not None:
            self._rows.require(row)
            self.truncate(row, 0)
        self._rows.release(row)
        self.array[row, : self._num_pages[row]] = -1
        self._num_pages[row] = self._lengths[row] = 0

    def reset(self) -> None:
        """Release every row, in whatever state an interrupted call has left the table."""
        for row in self._rows.rows if self._source is not None else ():
            self.truncate(row, 0)
        num_rows = self._rows.capacity
        self.array.fill(-1)
        self._num_pages, self._lengths = [0] * num_rows, [0] * num_rows
        self._rows = RowAllocator(num_rows)

    def view(self, rows: Sequence[int]) -> NDArray[np.int32]:
        """See `BlockTable.view`."""
        return self.array[_index(self._rows, rows)]

    def append(self, row: int, pages: Sequence[int]) -> None:
        """Append pages to a row.

        Raises:
            CacheError: the row would have more than max_pages; it is unchanged.
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
        """Replace the pages at `start`, `start` + 1, ... of a row; their number does not change."""
        assert start + len(pages) <= self._num_pages[row]
        self.array[row, start : start + len(pages)] = pages

    def truncate(self, row: int, num_pages: int) -> None:
        """Drop the pages of a row after the first `num_pages`."""
        assert 0 <= num_pages <= self._num_pages[row]
        if self._source is not None and num_pages < self._num_pages[row]:
            self._source.give_back(self.pages(row)[num_pages:])
        self.array[row, num_pages : self._num_pages[row]] = -1
        self._num_pages[row] = num_pages
        self._lengths[row] = min(self._lengths[row], num_pages * self.page_size)

    def num_pages(self, row: int) -> int:
        """Number of pages in a row."""
        return self._num_pages[row]

    def pages(self, row: int) -> list[int]:
        """The pages of a row, in order."""
        pages: list[int] = self.array[row, : self._num_pages[row]].tolist()
        return pages

    def _reserve(self, num_pages: int) -> Sequence[int]:
        if not num_pages:
            return ()
        if self._source is None:
            raise CacheError(
                f"needed: {counted(num_pages, 'more page')}, and this table has no source of pages; "
                "append them first, or build it with source="
            )
        return self._source.reserve(num_pages)


class ContiguousBlockTable(BlockTable):
    """A table whose row r always has pages r * max_pages .. (r + 1) * max_pages - 1.

    A static cache without a radix tree: it reserves the longest request in advance and shares
    nothing; a request's slots are contiguous. For the arguments see `PagedBlockTable`.
    """

    def __init__(self, num_rows: int, max_pages: int, page_size: int) -> None:
        _check_sizes(max_pages, page_size)
        self.page_size = page_size
        self._rows = RowAllocator(num_rows)
        self.array: NDArray[np.int32] = np.arange(num_rows * max_pages, dtype=np.int32).reshape(
            num_rows, max_pages
        )
        self.array.flags.writeable = False
        self._lengths = [0] * num_rows

    @property
    def num_pages(self) -> int:
        """Number of pages that the pool must have."""
        return self.array.size

    def allocate_all(self, lengths: Sequence[int]) -> list[int]:
        """See `BlockTable.allocate_all`."""
        self._require_rows(lengths)
        rows = [self._rows.allocate() for _ in lengths]
        for row, length in zip(rows, lengths, strict=True):
            self._lengths[row] = length
        return rows

    def update(self, row: int, num_tokens: int) -> None:
        """See `BlockTable.update`."""
        self._lengths[row] = self._updated_length(row, num_tokens)

    def release(self, row: int) -> None:
        """See `BlockTable.release`."""
        self._rows.release(row)
        self._lengths[row] = 0

    def view(self, rows: Sequence[int]) -> NDArray[np.int32]:
        """See `BlockTable.view`."""
        pages = self.array[_index(self._rows, rows)]
        num_used = -(-self.lengths(rows) // self.page_size)
        pages[np.arange(pages.shape[1]) >= num_used[:, None]] = -1
        return pages


def _check_sizes(max_pages: int, page_size: int) -> None:
    if max_pages < 1 or page_size < 1:
        raise ConfigError(f"max_pages={max_pages} and page_size={page_size} must be at least 1")


def _check_length(length: int, limit: int) -> None:
    if not 0 <= length <= limit:
        raise CacheError(
            f"a row would have {length} tokens, it holds 0 to {limit}; build the table with more "
            "pages per row for longer ones"
        )


def _index(allocator: RowAllocator, rows: Sequence[int]) -> NDArray[np.int64]:
    """`rows` as an index array; CacheError unless all are in use."""
    for row in rows:
        allocator.require(row)
    return np.fromiter(rows, np.int64, len(rows))
