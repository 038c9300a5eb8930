"""`PageIndex`: page hash → bit mask of the columns that have the page; a column is a cache.

Keys are 60 bits of a page hash: an integer of two digits takes half the memory of the 16 bytes. Two
pages with the same key cost a wrong guess of a router, in 1 of 20,000 fleets of 10 million pages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ramify.cache.key import HASH_BYTES
from ramify.errors import ConfigError

KEY_BYTES, UNUSED_BITS = 8, 4
KEY_OBJECT_BYTES = 32  # of an integer of two digits
MAX_SHARED_MASKS = 1 << 16
SWEPT_PER_ENTRY = 4  # entries that are swept for each entry that is stored or removed
MAX_RETIRED = 64  # columns that wait for a sweep; beyond, the sweep is run to its end


class PageIndex:
    """Answers for all columns in one look-up per page; holds a page of many columns once.

    Args:
        stride: keep every stride-th page of a prompt only; matches are multiples of it.
    """

    def __init__(self, stride: int = 1) -> None:
        if stride < 1:
            raise ConfigError(f"stride={stride} but an index keeps every 1st page or fewer")
        self.stride = stride
        self._masks: dict[int, int] = {}
        self._shared: dict[int, int] = {}  # a mask → the object that entries share
        self._num_entries: list[int] = []  # by column
        self._free: list[int] = []
        self._retired: list[int] = []  # columns whose entries the next sweep drops
        self._swept: list[int] = []  # columns of the running sweep
        self._unswept: list[int] = []  # keys that it has not seen

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def num_bytes(self) -> int:
        """Memory of all entries: a table, an integer for each key, and the masks that they share."""
        masks = sum(sys.getsizeof(mask) for mask in self._shared)
        return sys.getsizeof(self._masks) + KEY_OBJECT_BYTES * len(self._masks) + masks

    def num_entries(self, column: int) -> int:
        """Pages of a column that the index holds."""
        return self._num_entries[column]

    # -- columns ---------------------------------------------------------------------------

    def add_column(self) -> int:
        """Take an empty column; returns its number."""
        if self._free:
            return self._free.pop()
        self._num_entries.append(0)
        return len(self._num_entries) - 1

    def drop_column(self, column: int) -> None:
        """End a column. Its entries go in a sweep, a few with each later change."""
        if not self._num_entries[column]:
            self._free.append(column)
            return
        self._retired.append(column)
        if not self._swept:
            self._begin_sweep()
        if len(self._retired) > MAX_RETIRED:
            while self._swept:
                self.sweep(len(self._unswept))

    def _begin_sweep(self) -> None:
        self._swept, self._retired = self._retired, []
        self._unswept = list(self._masks) if self._swept else []

    def sweep(self, num_entries: int) -> None:
        """Drop what ended columns left in the next `num_entries` entries."""
        if not self._swept:
            return
        keys = self._unswept[-num_entries:] if num_entries else []
        del self._unswept[len(self._unswept) - len(keys) :]
        masks, kept = self._masks, ~sum(1 << column for column in self._swept)
        for key in keys:
            before = masks.get(key, 0)
            mask = before & kept
            if mask != before:
                if mask:
                    masks[key] = self._share(mask)
                else:
                    del masks[key]
        if not self._unswept:
            for column in self._swept:
                self._num_entries[column] = 0
            self._free += self._swept
            self._begin_sweep()

    # -- entries ---------------------------------------------------------------------------

    def keys(self, start: int, hashes: bytes) -> list[int]:
        """The keys of those pages of a run that the index keeps.

        Args:
            start: pages before the run.
            hashes: packed, 16 bytes each.
        """
        first = (-start - 1) % self.stride
        halves = memoryview(hashes).cast("Q")[2 * first :: 2 * self.stride]
        return [half >> UNUSED_BITS for half in halves.tolist()]

    def store(self, column: int, keys: Iterable[int]) -> None:
        """Add pages to a column; those that it has stay."""
        masks, shared, bit, count, stored = self._masks, self._shared, 1 << column, 0, 0
        for key in keys:
            count += 1
            before = masks.get(key, 0)
            if not before & bit:
                mask = before | bit
                masks[key] = shared.get(mask) or self._share(mask)
                stored += 1
        self._num_entries[column] += stored
        if self._swept:
            self.sweep(SWEPT_PER_ENTRY * count)

    def remove(self, column: int, keys: Iterable[int]) -> None:
        """Take pages out of a column, as far as it has them."""
        masks, shared, bit, count, removed = self._masks, self._shared, 1 << column, 0, 0
        for key in keys:
            count += 1
            before = masks.get(key, 0)
            if before & bit:
                mask = before ^ bit
                removed += 1
                if mask:
                    masks[key] = shared.get(mask) or self._share(mask)
                else:
                    del masks[key]
        self._num_entries[column] -= removed
        if self._swept:
            self.sweep(SWEPT_PER_ENTRY * count)

    def _share(self, mask: int) -> int:
        """An equal integer that other entries refer to: a wide one takes 48 bytes."""
        if len(self._shared) >= MAX_SHARED_MASKS:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)

    # -- finding ---------------------------------------------------------------------------

    def has(self, column: int, page_hash: bytes) -> bool:
        """Whether a column has a page; for pages that the index keeps."""
        return bool(self._masks.get(_key(page_hash), 0) >> column & 1)

    def match_prefixes(self, page_hashes: bytes, columns: int) -> dict[int, int]:
        """How many leading pages each of the columns has; columns with none are left out.

        Takes a column that has a page to have all pages before it, as caches without a window do.

        Args:
            page_hashes: of a prompt, from its first page on; packed, 16 bytes each.
            columns: bit mask.

        Cost: O(log pages) look-ups for each length that some column has.
        """
        stride, get = self.stride, self._masks.get
        depths: dict[int, int] = {}
        halves = memoryview(page_hashes).cast("Q")
        end = len(halves) // (2 * stride)
        begin, alive = 0, columns  # `alive` have the first `begin` of the pages kept
        while alive and begin < end:
            # All of them have page `low`, not all have page `high`: those in `mask`.
            low, high, mask = begin, end + 1, 0
            at = begin + 1
            while low < at < high:
                middle = get(halves[2 * (at * stride - 1)] >> UNUSED_BITS, 0) & alive
                if middle == alive:
                    low = at
                else:
                    high, mask = at, middle
                at = (low + high) // 2
            if high > end:
                break
            if low:
                _note_depths(depths, alive ^ mask, low * stride)
            alive, begin = mask, high
        if alive and end:
            _note_depths(depths, alive, end * stride)
        return depths

    def match_last(self, page_hashes: bytes, columns: int) -> dict[int, int]:
        """Pages up to the last that each of the columns has, whatever it has before.

        For caches that release pages outside a sliding window: a query does not read them.

        Cost: O(pages) look-ups.
        """
        get, keys = self._masks.get, self.keys(0, page_hashes)
        depths: dict[int, int] = {}
        for at in range(len(keys), 0, -1):
            mask = get(keys[at - 1], 0) & columns
            if mask:
                _note_depths(depths, mask, at * self.stride)
                columns ^= mask
                if not columns:
                    break
        return depths


def _key(page_hash: bytes) -> int:
    assert len(page_hash) == HASH_BYTES
    return int.from_bytes(page_hash[:KEY_BYTES], sys.byteorder) >> UNUSED_BITS


def _note_depths(depths: dict[int, int], columns: int, num_pages: int) -> None:
    bits = reversed(bin(columns))
    depths.update([(column, num_pages) for column, bit in enumerate(bits) if bit == "1"])
