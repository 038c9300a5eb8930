"""`DecodeRows`: the block table of decoding requests on the device; a step uploads what has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

NO_ENTRIES: NDArray[np.int64] = np.empty(0, np.int64)


class RowChanges(NamedTuple):
    """Rows of a step's requests, and the entries of the table that differ from the device's."""

    rows: NDArray[np.int64]  # [B]
    entries: NDArray[np.int64]  # [D] indices into the flat table
    pages: NDArray[np.int64]  # [D]


class DecodeRows:
    """A row of pages for each request that decodes, and one more for padding.

    A request keeps its row while there are rows for all; then the one that has paused longest gives
    up its own. Entries behind a request's pages may be those of an earlier request: attention masks
    them by the request's length.

    Args:
        num_rows: most requests of a step.
        max_pages: of a request.
        padding_page: of the pool; the padding row and unused entries hold it.
    """

    def __init__(
        self, num_rows: int, max_pages: int, padding_page: int, device: torch.device
    ) -> None:
        self.num_rows, self.max_pages, self._padding_page = num_rows, max_pages, padding_page
        shape = num_rows + 1, max_pages
        self.table = torch.full(shape, padding_page, dtype=torch.int64, device=device)
        self._on_device = np.full(shape, padding_page, np.int32)  # what `table` will hold
        # Requests, rows and pages of the last step.
        self._request_ids: Sequence[int] = ()
        self._rows: NDArray[np.int64] = NO_ENTRIES
        self._block_table: NDArray[np.int32] | None = None
        self._row_of = dict[int, int]()  # by request id, the one that paused longest first
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def padding_row(self) -> int:
        """The row whose pages are all the padding page."""
        return self.num_rows

    def update(self, request_ids: Sequence[int], block_table: NDArray[np.int32]) -> RowChanges:
        """Give each request its row; the caller writes the changes to `table` before the step reads it.

        Args:
            request_ids: [B], at most `num_rows`, no two equal.
            block_table: [B, P] pages in order, -1 behind the last; P at most `max_pages`. It never
                changes: the same array in the next step means the same pages.
        """
        if request_ids != self._request_ids:
            self._rows = self._allocate_rows(request_ids)
            self._request_ids, self._block_table = request_ids, None
        rows, width = self._rows, block_table.shape[1]
        if block_table is self._block_table:
            return RowChanges(rows, NO_ENTRIES, NO_ENTRIES)
        differs = self._on_device[rows, :width] != block_table
        changed = np.flatnonzero(differs & (block_table >= 0))
        at, columns, pages = rows[changed // width], changed % width, block_table.flat[changed]
        self._on_device[at, columns] = pages
        self._block_table = block_table
        return RowChanges(rows, at * self.max_pages + columns, pages.astype(np.int64))

    def forget(self) -> None:
        """Give out all rows anew and upload every entry: a step failed, perhaps within `update`."""
        self._on_device.fill(-1)
        self._on_device[self.padding_row] = self._padding_page
        self._request_ids, self._rows, self._block_table = (), NO_ENTRIES, None
        self._row_of.clear()
        self._free = list(range(self.num_rows - 1, -1, -1))

    def _allocate_rows(self, request_ids: Sequence[int]) -> NDArray[np.int64]:
        for request_id in request_ids:
            row = self._row_of.pop(request_id, -1)  # again at the end: it has paused least
            if row < 0:
                row = self._free.pop() if self._free else self._take_row(request_ids)
            self._row_of[request_id] = row
        return np.fromiter(map(self._row_of.__getitem__, request_ids), np.int64, len(request_ids))

    def _take_row(self, request_ids: Sequence[int]) -> int:
        needed = set(request_ids)
        for request_id in self._row_of:
            if request_id not in needed:
                return self._row_of.pop(request_id)
        raise AssertionError(f"{len(needed)} requests, but {self.num_rows} rows")
