"""Where each page is: a sorted array of what was found at start, and a small dict of what is new."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ramify.kv.stores.segment_format import Entries, join_name, split_name

Location = tuple[int, int]
_DEAD = np.uint32(0xFFFFFFFF)
# New pages are merged into the array when they are more than this, and than this share of it: an
# entry of the dict takes six times the memory of one of the array.
_MIN_NEW, _NEW_SHARE = 1024, 32


class PageIndex:
    """Name -> (segment, slot). About 24 bytes a page. Not locked: its owner is."""

    def __init__(self) -> None:
        self._high: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._low: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._segments: NDArray[np.uint32] = np.empty(0, np.uint32)
        # _DEAD: removed.
        self._slots: NDArray[np.uint32] = np.empty(0, np.uint32)
        self._new: dict[bytes, Location] = {}
        self._num_live = 0
        # Whether a page was in two places when the index was loaded.
        self.has_duplicates = False

    def __len__(self) -> int:
        """Pages listed."""
        return self._num_live + len(self._new)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._high.nbytes + self._low.nbytes + self._segments.nbytes + self._slots.nbytes

    def load(self, segments: Sequence[tuple[int, Entries]]) -> None:
        """List the entries of all segments found at start, by number.

        A page may be in two of them: the newest is tried first.
        """
        counts = [len(entries) for _, entries in segments]
        total = sum(counts)
        high, low = np.empty(total, np.uint64), np.empty(total, np.uint64)
        numbers, slots = np.empty(total, np.uint32), np.empty(total, np.uint32)
        end = 0
        for (number, entries), count in zip(segments, counts, strict=True):
            part = slice(end, end + count)
            high[part], low[part] = entries["high"], entries["low"]
            numbers[part], slots[part] = number, entries["slot"]
            end += count
        # Stable: of equal high halves, the newest segment is last.
        order = np.argsort(high, kind="stable")
        self._high, self._low = high[order], low[order]
        self._segments, self._slots = numbers[order], slots[order]
        self._num_live = total
        same = (self._high[1:] == self._high[:-1]) & (self._low[1:] == self._low[:-1])
        self.has_duplicates = bool(same.any())

    def find(self, name: bytes) -> Location | None:
        """The newest place of a page; None: it is not listed."""
        location = self._new.get(name)
        if location is not None:
            return location
        rows = self._rows(name)
        return self._location(rows[-1]) if rows else None

    def locations(self, name: bytes) -> list[Location]:
        """Every place of a page, oldest first: two after a crash while it was being moved."""
        listed = [self._location(row) for row in self._rows(name)]
        return [*listed, self._new[name]] if name in self._new else listed

    def add(self, name: bytes, location: Location) -> None:
        """List a page, or list it elsewhere."""
        for row in self._rows(name):
            self._kill(row)
        self._new[name] = location
        if len(self._new) > max(_MIN_NEW, len(self._high) // _NEW_SHARE):
            self._merge()

    def remove(self, name: bytes, location: Location | None = None) -> bool:
        """Remove a page, or one place of it; whether that was listed."""
        is_new = name in self._new and location in {None, self._new[name]}
        if is_new:
            del self._new[name]
        rows = [row for row in self._rows(name) if location in {None, self._location(row)}]
        for row in rows:
            self._kill(row)
        return is_new or bool(rows)

    def remove_segment(self, number: int) -> int:
        """Remove every page of a segment; returns how many were listed."""
        new = [name for name, (segment, _) in self._new.items() if segment == number]
        for name in new:
            del self._new[name]
        rows = np.flatnonzero((self._segments == number) & (self._slots != _DEAD))
        self._slots[rows] = _DEAD
        self._num_live -= len(rows)
        return len(new) + len(rows)

    def locations_in(self, number: int) -> Iterator[tuple[bytes, int]]:
        """Name and slot of every page listed in a segment, as of the call."""
        new = [(name, slot) for name, (segment, slot) in self._new.items() if segment == number]
        rows = np.flatnonzero((self._segments == number) & (self._slots != _DEAD))
        base = [
            (join_name(int(self._high[row]), int(self._low[row])), int(self._slots[row]))
            for row in rows
        ]
        yield from sorted(new + base, key=lambda entry: entry[1])

    def contains_many(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each page is listed; one search of the array for all."""
        new = self._new
        if not len(self._high):
            return [name in new for name in names]
        halves = np.frombuffer(b"".join(names), "<u8").reshape(-1, 2)
        rows = np.minimum(np.searchsorted(self._high, halves[:, 0]), len(self._high) - 1)
        same = (self._high[rows] == halves[:, 0]) & (self._low[rows] == halves[:, 1])
        listed = same & (self._slots[rows] != _DEAD)
        # Rows of equal high halves, an older duplicate first, are rare: those look one by one.
        return [
            bool(hit) or name in new or (bool(first) and self.find(name) is not None)
            for name, hit, first in zip(
                names, listed, self._high[rows] == halves[:, 0], strict=True
            )
        ]

    def _rows(self, name: bytes) -> list[int]:
        """Live rows of the array with this name, oldest first."""
        if not len(self._high):
            return []
        high, low = split_name(name)
        wanted = np.uint64(high)
        row = int(np.searchsorted(self._high, wanted))
        rows = []
        while row < len(self._high) and self._high[row] == wanted:
            if self._low[row] == np.uint64(low) and self._slots[row] != _DEAD:
                rows.append(row)
            row += 1
        return rows

    def _location(self, row: int) -> Location:
        return int(self._segments[row]), int(self._slots[row])

    def _kill(self, row: int) -> None:
        self._slots[row] = _DEAD
        self._num_live -= 1

    def _merge(self) -> None:
        """Move what is new into the array, and drop removed rows from it."""
        live = self._slots != _DEAD
        new = sorted((*split_name(name), *location) for name, location in self._new.items())
        columns = list(zip(*new, strict=True))
        high = np.array(columns[0], np.uint64)
        places = np.searchsorted(self._high[live], high)
        self._low = np.insert(self._low[live], places, np.array(columns[1], np.uint64))
        self._segments = np.insert(self._segments[live], places, np.array(columns[2], np.uint32))
        self._slots = np.insert(self._slots[live], places, np.array(columns[3], np.uint32))
        self._high = np.insert(self._high[live], places, high)
        self._new = {}
        self._num_live = len(self._high)
