"""Rows and the pages in them."""

import pytest

from ramify.errors import CacheError
from ramify.kv.block_table import PagedBlockTable, SlotAllocator


def test_rows_stay_dense() -> None:
    """The smallest free row is handed out first, so that a table is filled from its start."""
    rows = SlotAllocator(4)
    taken = [rows.allocate() for _ in range(4)]

    for row in (2, 0, 3):
        rows.release(row)

    assert taken == [0, 1, 2, 3]
    assert rows.num_free == 3
    assert [rows.allocate() for _ in range(3)] == [0, 2, 3]


def test_no_row_is_given_twice() -> None:
    """When all rows are taken the error names their number and the way out."""
    rows = SlotAllocator(1)
    rows.allocate()

    with pytest.raises(CacheError, match=r"all 1 rows .* release a sequence"):
        rows.allocate()

    assert rows.num_free == 0


@pytest.mark.parametrize("row", [0, 1, 7, -1])
def test_a_row_that_nobody_holds_cannot_be_released(row: int) -> None:
    """Releasing twice, or a row that does not exist, is an error and changes nothing."""
    rows = SlotAllocator(2)
    rows.release(rows.allocate())

    with pytest.raises(CacheError, match="not in use"):
        rows.release(row)

    assert rows.num_free == 2


def test_a_table_needs_room() -> None:
    """Rows, pages per row and page size are at least 1."""
    for num_rows, max_pages, page_size in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            PagedBlockTable(num_rows, max_pages, page_size)


def test_a_row_grows_at_its_end_and_is_rewritten_in_place() -> None:
    """Pages keep their order; a rewrite replaces pages and leaves the length."""
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
    """Appending past the end of a row raises and leaves the row as it was."""
    table = PagedBlockTable(1, 2, page_size=1)
    row = table.allocate()
    table.append(row, [3])

    with pytest.raises(CacheError, match="would have 3 pages, the limit is 2"):
        table.append(row, [4, 5])

    assert table.pages(row) == [3]
    assert table.array.tolist() == [[3, -1]]


def test_a_released_row_is_empty() -> None:
    """The next owner of a row sees none of the pages of the one before."""
    table = PagedBlockTable.of([[7, 2], [4]], page_size=4)

    table.release(0)
    row = table.allocate()

    assert row == 0
    assert table.pages(row) == []
    assert table.array.tolist() == [[-1, -1], [4, -1]]
    assert table.num_free_rows == 0
