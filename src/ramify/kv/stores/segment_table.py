"""`SegmentTable`: the segments of a directory, the pages in them, and the figures; under one lock."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence

from ramify.kv.stores.evicted_names import EvictedNames
from ramify.kv.stores.page_index import PageIndex
from ramify.kv.stores.page_store import ReadOutcome
from ramify.kv.stores.removal_log import Position
from ramify.kv.stores.segment import OpenedSegment, Segment
from ramify.kv.stores.segment_format import join_name

logger = logging.getLogger(__name__)

# Names of pages whose read failed; beyond, any page may be on disk without being listed.
MAX_UNREAD = 65_536
# Damaged or unreadable pages in one segment after which nothing else in it is trusted.
MAX_SEGMENT_ERRORS = 3


class SegmentTable:
    """Where each page is and what its segment is. Its calls are short and do no I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._index = PageIndex()
        self._evicted = EvictedNames()
        self._segments: dict[int, Segment] = {}
        # Dropped from the index; their files are still to be deleted.
        self._condemned: list[Segment] = []
        self._totals: Counter[str] = Counter()
        self._num_uses = 0
        self._is_exhausted = False
        # Pages on disk that are not listed, since a read of theirs failed: a restart lists them again.
        self._unread: set[bytes] = set()
        self._has_hidden = False

    def load(self, opened: Sequence[OpenedSegment], removed: dict[bytes, Position]) -> None:
        """List what was on disk, without the pages that the removal log voids."""
        with self._lock:
            ordered = sorted(opened, key=lambda item: item.segment.number)
            self._segments = {item.segment.number: item.segment for item in ordered}
            for item in ordered:
                self._note_use(item.segment)
            self._index.load([(item.segment.number, item.entries) for item in ordered])
            # Where one of two records moves on, the other stays behind unlisted.
            self._has_hidden |= self._index.has_duplicates
        self.void(removed)

    def void(self, removed: dict[bytes, Position]) -> None:
        """Remove the pages that the removal log voids: those written before their positions."""
        with self._lock:
            for name, position in removed.items():
                for location in self._index.locations(name):
                    if location < position:
                        self._index.remove(name, location)

    def extend(self, opened: OpenedSegment) -> bool:
        """List a segment, or the records that were appended to it since it was listed.

        Returns whether it took the place of another one of its number: the directory was cleared.
        """
        with self._lock:
            segment = opened.segment
            before = self._segments.get(segment.number)
            is_replaced = before is not None and before.segment_id != segment.segment_id
            if is_replaced:
                del self._segments[segment.number]
                self._index.remove_segment(segment.number)
            listed = self._segments.setdefault(segment.number, segment)
            num_known = listed.num_used if listed is not segment else 0
            listed.num_used, listed.is_sealed = segment.num_used, segment.is_sealed
            listed.allocated_bytes = segment.allocated_bytes
            for entry in opened.entries[opened.entries["slot"] >= num_known]:
                name = join_name(int(entry["high"]), int(entry["low"]))
                self._index.add(name, (segment.number, int(entry["slot"])))
            return is_replaced

    def add_segment(self, segment: Segment) -> None:
        """List a new segment."""
        with self._lock:
            self._note_use(segment)
            self._segments[segment.number] = segment

    def segments(self) -> list[Segment]:
        """Every segment, least recently used first."""
        with self._lock:
            return sorted(self._segments.values(), key=lambda segment: segment.last_use)

    def contains_many(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each page is listed."""
        with self._lock:
            return self._index.contains_many(names)

    def find(self, name: bytes) -> tuple[Segment, int] | None:
        """The segment and slot of a page."""
        with self._lock:
            location = self._index.find(name)
            return None if location is None else (self._segments[location[0]], location[1])

    def add(self, name: bytes, segment: Segment, slot: int) -> bool:
        """List a page that was written; False: its segment has been dropped."""
        with self._lock:
            if segment.number not in self._segments:
                return False
            self._index.add(name, (segment.number, slot))
            self._evicted.discard(name)
            self._note_use(segment)
            return True

    def remove_many(self, names: Sequence[bytes]) -> int:
        """Remove pages from the index; returns how many were listed."""
        with self._lock:
            for name in names:
                self._evicted.discard(name)
            return sum(self._index.remove(name) for name in names)

    def note_hidden(self) -> None:
        """Files or records that are not listed may be listed after a restart: any page may be there."""
        with self._lock:
            self._has_hidden = True

    def on_disk(self, names: Sequence[bytes]) -> list[bytes]:
        """Those of these pages of which there may be a record on disk, listed or not."""
        with self._lock:
            if self._has_hidden:
                return list(names)
            listed = self._index.contains_many(names)
            unread = self._unread
            return [
                name for name, is_listed in zip(names, listed, strict=True)
                if is_listed or name in unread
            ]  # fmt: skip

    def pages_in(self, segment: Segment) -> list[tuple[bytes, int]]:
        """Name and slot of every page listed in a segment."""
        with self._lock:
            return list(self._index.locations_in(segment.number))

    def note_read(self, name: bytes, segment: Segment, slot: int, outcome: ReadOutcome) -> None:
        """Count a read; remove a page that could not be read, and a segment that has three of them."""
        with self._lock:
            if outcome is not ReadOutcome.ABSENT:
                self._totals[outcome.value] += 1
            if outcome is ReadOutcome.HIT:
                self._note_use(segment)
                segment.hot[slot] = 1
                return
            self._index.remove(name, (segment.number, slot))
            if outcome is ReadOutcome.ABSENT:
                return
            self._note_unread(name)
            segment.num_errors += 1
            first, dropped = segment.num_errors == 1, segment.num_errors == MAX_SEGMENT_ERRORS
            if dropped:
                self._condemn(segment)
        if first:
            logger.warning(
                "a page in %s could not be read (%s); it is computed again",
                segment.path,
                outcome.value,
            )
        if dropped:
            logger.warning(
                "pages that could not be read: %d in %s; the segment is dropped",
                MAX_SEGMENT_ERRORS,
                segment.path,
            )

    def note_exhausted(self, name: bytes, segment: Segment, slot: int, error: OSError) -> None:
        """Count a read for which this process had no descriptor or memory; remove the page only."""
        with self._lock:
            first, self._is_exhausted = not self._is_exhausted, True
            self._totals[ReadOutcome.IO_ERROR.value] += 1
            self._index.remove(name, (segment.number, slot))
            self._note_unread(name)
        if first:
            logger.warning(
                "%s could not be read for lack of resources (%s); raise the limit of open files "
                "(ulimit -n) or free memory",
                segment.path,
                error,
            )

    def _note_unread(self, name: bytes) -> None:
        self._unread.add(name)
        if len(self._unread) > MAX_UNREAD:
            self._unread.clear()
            self._has_hidden = True

    def _note_use(self, segment: Segment) -> None:
        self._num_uses += 1
        segment.last_use = self._num_uses

    def _condemn(self, segment: Segment) -> None:
        if self._segments.pop(segment.number, None) is not None:
            self._condemned.append(segment)
            self._has_hidden = True
            self._totals["dropped"] += self._index.remove_segment(segment.number)

    def forget(self, segment: Segment) -> int:
        """Remove a segment and its pages; returns how many pages were listed."""
        with self._lock:
            self._segments.pop(segment.number, None)
            return self._index.remove_segment(segment.number)

    def evict(self, segment: Segment) -> int:
        """Remove a segment and its pages, whose names are remembered; returns how many were listed."""
        with self._lock:
            self._segments.pop(segment.number, None)
            self._evicted.add(name for name, _ in self._index.locations_in(segment.number))
            return self._index.remove_segment(segment.number)

    def were_evicted(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each page was evicted with its segment, as far as that is remembered."""
        with self._lock:
            return [name in self._evicted for name in names]

    def forget_all(self) -> tuple[list[Segment], int]:
        """Remove everything; returns the segments, and how many pages were listed."""
        with self._lock:
            self._evicted.clear()
            segments, count = [*self._segments.values()], len(self._index)
            self._segments, self._index = {}, PageIndex()
            return segments, count

    def take_condemned(self) -> list[Segment]:
        """The segments whose files are to be deleted; each is returned once."""
        with self._lock:
            condemned, self._condemned = self._condemned, []
            return condemned

    def count(self, what: str, number: int = 1) -> None:
        """Add to a total."""
        with self._lock:
            self._totals[what] += number

    def totals(self) -> tuple[Counter[str], int, int]:
        """A copy of the totals, the number of pages, and the bytes allocated to all segments."""
        with self._lock:
            allocated = sum(segment.allocated_bytes for segment in self._segments.values())
            allocated += sum(segment.allocated_bytes for segment in self._condemned)
            return Counter(self._totals), len(self._index), allocated

    def allocated_bytes(self) -> int:
        """Bytes allocated to all segments whose files are there."""
        return self.totals()[2]

    def is_listed(self, segment: Segment) -> bool:
        """Whether a segment is still there."""
        with self._lock:
            return segment.number in self._segments

    def index_bytes(self) -> int:
        """Bytes of the index's arrays."""
        with self._lock:
            return self._index.nbytes
