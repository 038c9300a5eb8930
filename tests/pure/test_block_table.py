"""Block tables: rows, their pages and lengths."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from ramify.attention.batch import AttentionBatch, Extend
from ramify.cache import PrefixCache
from ramify.errors import CacheError, OutOfPagesError
from ramify.kv.block_table import (
    BlockTable,
    ContiguousBlockTable,
    PagedBlockTable,
    RowAllocator,
)


def paged(num_rows: int, max_pages: int, page_size: int) -> PagedBlockTable:
    """A paged table over a cache with pages for every row."""
    source = PrefixCache(num_rows * max_pages, page_size)
    return PagedBlockTable(num_rows, max_pages, page_size, source=source)


TABLES: list[Callable[[int, int, int], BlockTable]] = [paged, ContiguousBlockTable]
both = pytest.mark.parametrize("make", TABLES, ids=["paged", "contiguous"])


def test_rows_stay_dense() -> None:
    """The smallest free row is allocated first, so that used rows stay at the start of the table."""
    rows = RowAllocator(4)
    taken = [rows.allocate() for _ in range(4)]

    for row in (2, 0, 3):
        rows.release(row)

    assert taken == [0, 1, 2, 3]
    assert rows.num_free == 3
    assert [rows.allocate() for _ in range(3)] == [0, 2, 3]


def test_no_row_is_allocated_twice() -> None:
    """When all rows are in use, the error names their number and what to do."""
    rows = RowAllocator(1)
    rows.allocate()

    with pytest.raises(
        CacheError, match=r"no row of the block table is free, 1 in use; release a sequence"
    ):
        rows.allocate()

    assert rows.num_free == 0


@pytest.mark.parametrize("row", [0, 1, 7, -1])
def test_a_free_row_cannot_be_released(row: int) -> None:
    """Releasing a row twice, or a row that does not exist, raises and changes nothing."""
    rows = RowAllocator(2)
    rows.release(rows.allocate())

    with pytest.raises(CacheError, match="not in use"):
        rows.release(row)

    assert rows.num_free == 2


def test_sizes_below_one_are_refused() -> None:
    """Rows, pages per row and page size must be at least 1."""
    for num_rows, max_pages, page_size in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        for table in (PagedBlockTable, ContiguousBlockTable):
            with pytest.raises(ValueError, match="at least 1"):
                table(num_rows, max_pages, page_size)


def test_a_row_grows_at_its_end_and_is_rewritten_in_place() -> None:
    """`append` keeps the order of pages; `rewrite` replaces pages, not their number."""
    table = PagedBlockTable(2, 4, page_size=3)
    row, other = table.allocate(), table.allocate()

    table.append(row, [5, 1])
    table.append(other, [9])
    table.append(row, [7])
    table.rewrite(row, 1, [2, 8])

    assert table.pages(row) == [5, 2, 8]
    assert table.num_pages(row) == 3
    assert table.pages(other) == [9]
    assert table.array.tolist() == [[5, 2, 8, -1], [9, -1, -1, -1]]
    assert table.max_tokens == 12


def test_a_row_too_long_is_refused_whole() -> None:
    """Appending more than max_pages raises and leaves the row unchanged."""
    table = PagedBlockTable(1, 2, page_size=1)
    row = table.allocate()
    table.append(row, [3])

    with pytest.raises(CacheError, match="would have 3 pages, the limit is 2"):
        table.append(row, [4, 5])

    assert table.pages(row) == [3]
    assert table.array.tolist() == [[3, -1]]


def test_a_released_row_is_empty() -> None:
    """A reallocated row has none of its previous pages."""
    table = PagedBlockTable.of([[7, 2], [4]], page_size=4)

    table.release(0)
    row = table.allocate()

    assert row == 0
    assert table.pages(row) == []
    assert table.array.tolist() == [[-1, -1], [4, -1]]
    assert table.num_free_rows == 0


@both
def test_rows_have_lengths_and_pages_for_them(make: Callable[[int, int, int], BlockTable]) -> None:
    """`view` is a copy: the pages that a row's tokens need, then -1."""
    table = make(3, 4, 2)

    first, second = table.allocate_all([3, 0])
    table.update(second, 5)
    table.update(first, -2)

    assert (first, second) == (0, 1)
    assert table.lengths([1, 0]).tolist() == [5, 1]
    assert (table.view([1, 0, 1]) >= 0).sum(1).tolist() == [3, 1, 3]
    table.view([0])[:] = 9
    assert (table.view([0]) != 9).all()
    assert table.view([]).shape == (0, 4)


@both
def test_a_reset_table_is_empty(make: Callable[[int, int, int], BlockTable]) -> None:
    """All rows are free; the first allocated row is row 0, of length 0."""
    table = make(3, 2, 4)
    table.allocate_all([8, 1])

    table.reset()

    assert table.num_free_rows == 3
    assert table.allocate() == 0
    assert table.lengths([0]).tolist() == [0]
    assert table.allocate_all([8, 8]) == [1, 2]  # the pages are back too


@both
def test_eb5_limits_of_a_row_hold(make: Callable[[int, int, int], BlockTable]) -> None:
    """A length above the row's capacity or below 0 raises and changes nothing."""
    table = make(2, 3, 2)
    row = table.allocate(5)
    before = table.view([row]).tolist()

    with pytest.raises(CacheError, match="would have 7 tokens, it holds 0 to 6"):
        table.update(row, 2)
    with pytest.raises(CacheError, match="would have -1 tokens"):
        table.update(row, -6)
    with pytest.raises(CacheError, match="would have 7 tokens"):
        table.allocate(7)

    assert table.lengths([row]).tolist() == [5]
    assert table.view([row]).tolist() == before
    assert table.num_free_rows == 1


@both
def test_eb9_free_rows_are_refused(
    make: Callable[[int, int, int], BlockTable],
) -> None:
    """By every call that takes a row, alone or together with rows in use."""
    table = make(3, 2, 2)
    table.allocate(1)

    for row in (1, -1, 3):
        calls: list[Callable[[], object]] = [
            partial(table.update, row, 1),
            partial(table.release, row),
            partial(table.view, [0, row]),
            partial(table.lengths, [0, row]),
        ]
        for call in calls:
            with pytest.raises(CacheError, match=f"row {row} is not in use"):
                call()

    assert table.lengths([0]).tolist() == [1]


@both
def test_yb7_rows_for_several_requests_are_all_or_none(
    make: Callable[[int, int, int], BlockTable],
) -> None:
    """Too few rows, or a length too large: no row is allocated, and none is lost."""
    table = make(3, 2, 4)
    table.allocate(1)

    with pytest.raises(CacheError, match="3 rows asked for, 2 of 3 are free"):
        table.allocate_all([1, 1, 1])
    with pytest.raises(CacheError, match="would have 9 tokens"):
        table.allocate_all([1, 9])

    assert table.num_free_rows == 2
    assert table.allocate_all([8, 8]) == [1, 2]


def test_yb7_pages_for_several_requests_are_all_or_none() -> None:
    """With 4 pages, 2 in use, 3 more are refused and nothing is allocated; 2 more fit."""
    cache = PrefixCache(4, page_size=2)
    table = PagedBlockTable(4, 3, 2, source=cache)
    row = table.allocate(4)

    with pytest.raises(OutOfPagesError, match="3 pages asked for"):
        table.allocate_all([2, 4])
    with pytest.raises(OutOfPagesError):
        table.allocate(6)
    table.allocate(4)
    with pytest.raises(OutOfPagesError):
        table.update(row, 1)

    assert table.num_free_rows == 2
    assert table.lengths([row]).tolist() == [4]
    assert cache.stats().free_pages == 0
    table.reset()
    assert cache.stats().free_pages == 4
    cache.check()


def test_without_a_source_pages_are_appended_first() -> None:
    """A table without a source reserves no pages and gives none back; `update` needs appended pages."""
    table = PagedBlockTable(2, 3, 2)
    row = table.allocate()
    table.append(row, [7, 5])

    table.update(row, 4)
    with pytest.raises(CacheError, match=r"needed: 1 more page, .*append them first"):
        table.update(row, 1)
    with pytest.raises(CacheError, match="no source of pages"):
        table.allocate(1)

    assert table.lengths([row]).tolist() == [4]
    table.update(row, -3)
    assert table.pages(row) == [7, 5]
    table.truncate(row, 0)
    assert table.lengths([row]).tolist() == [0]
    table.append(row, [7])
    table.update(row, 2)
    table.release(row)
    assert table.lengths([table.allocate()]).tolist() == [0]
    assert table.num_free_rows == 1


def test_eb4_pages_and_rows_come_back_ten_thousand_times() -> None:
    """5,000 rounds of two requests leave every row and page free."""
    cache = PrefixCache(8, page_size=16)
    table = PagedBlockTable(2, 4, 16, source=cache)

    for _ in range(5_000):
        for row in table.allocate_all([64, 50]):
            table.release(row)

    assert table.num_free_rows == 2
    assert cache.stats().free_pages == 8
    assert (table.array == -1).all()


def test_eb7_a_row_keeps_its_pages_when_it_grows() -> None:
    """A longer row keeps its first pages; used and free pages add up to all pages."""
    cache = PrefixCache(10, page_size=4)
    table = PagedBlockTable(2, 8, 4, source=cache)
    row = table.allocate(8)
    before = table.pages(row)

    table.update(row, 20)

    assert table.pages(row)[:2] == before
    assert len(set(table.pages(row))) == 7
    assert cache.stats().free_pages == 3
    table.release(row)
    assert cache.stats().free_pages == 10


def test_ab9_a_row_has_as_many_pages_as_its_tokens_need() -> None:
    """num_pages = ceil(length / page_size), for every length, growth and page size."""
    for page_size in (1, 2, 3, 4, 8):
        table = PagedBlockTable(1, 40, page_size, source=PrefixCache(40, page_size))
        for length in range(12):
            for more in range(12):
                row = table.allocate(length)
                table.update(row, more)
                assert table.num_pages(row) == -(-(length + more) // page_size)
                table.release(row)


def test_yb24_rows_of_a_static_cache_have_their_own_slots() -> None:
    """Rows 1 and 3 of 6 slots write to slots 6.. and 18.., although rows 0 and 2 are free."""
    table = ContiguousBlockTable(4, 2, 3)
    rows = table.allocate_all([0, 4, 0, 2])
    for row in (rows[0], rows[2]):
        table.release(row)

    batch = AttentionBatch.build([Extend(0, 1, 4, 1), Extend(1, 3, 2, 2)], table)

    assert batch.slot_mapping.tolist() == [6 + 4, 18 + 2, 18 + 3]
    assert batch.kv_slots(0).tolist() == list(range(6, 11))
    assert table.num_pages == 8
    with pytest.raises(ValueError, match="read-only"):
        table.array[0] = 0


class FailingSource:
    """A source of pages whose every call fails."""

    def reserve(self, num_pages: int) -> Sequence[int]:
        raise RuntimeError("no")

    def give_back(self, pages: Sequence[int]) -> None:
        raise RuntimeError("not mine")


def test_a_source_that_fails_leaves_the_table_as_it_was() -> None:
    """When allocating, growing, shrinking and releasing."""
    table = PagedBlockTable(2, 4, 2, source=FailingSource())
    row = table.allocate()
    table.append(row, [3])
    table.update(row, 2)

    for call in (
        lambda: table.allocate(1),
        lambda: table.update(row, 1),
        lambda: table.update(row, -2),
        lambda: table.release(row),
    ):
        with pytest.raises(RuntimeError):
            call()

    assert table.num_free_rows == 1
    assert table.pages(row) == [3]
    assert table.lengths([row]).tolist() == [2]
    assert table.array.dtype == np.int32
