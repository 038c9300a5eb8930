"""`SegmentFollower`: lists in a read-only store what the directory's writer adds and deletes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ramify.kv.stores.file_ops import FileOps, FileSize
from ramify.kv.stores.removal_log import RemovalLog
from ramify.kv.stores.segment import number_of, open_segment
from ramify.kv.stores.segment_format import Geometry
from ramify.kv.stores.segment_reader import SegmentReader
from ramify.kv.stores.segment_table import SegmentTable
from ramify.kv.stores.store_directory import StoreDirectory

logger = logging.getLogger(__name__)

FOLLOW_S = 5.0
# Two writes this close together may leave a file the same time of change.
SAME_TIME_S = 1.0


class SegmentFollower:
    """Looks every five seconds which segments have changed, and reads their footers or headers again."""

    def __init__(
        self,
        ops: FileOps,
        directory: StoreDirectory,
        geometry: Geometry,
        table: SegmentTable,
        reader: SegmentReader,
        removals: RemovalLog,
        clock: Callable[[], float],
    ) -> None:
        self._ops, self._directory, self._geometry = ops, directory, geometry
        self._table, self._reader, self._removals = table, reader, removals
        self._clock = clock
        self._sizes: dict[int, FileSize] = {}
        self._due = clock()

    def maintain(self) -> None:
        """Follow the writer if that is due. Raises nothing."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + FOLLOW_S
        try:
            self._follow()
        except OSError as error:
            logger.warning("%s cannot be read: %s", self._directory.path, error)
            self._table.count("io_error")

    def _follow(self) -> None:
        # Before the segments: what is written after a removal counts.
        removed = self._removals.load()
        if self._removals.has_gap:
            # Some removals are not known. The writer deletes every page at its next start.
            self._table.forget_all()
            self._sizes.clear()
            return
        present = set()
        for path in self._directory.segment_paths():
            number = number_of(path.name)
            assert number is not None
            present.add(number)
            try:
                size = self._ops.size(path)
                if self._sizes.get(number) == size:
                    continue
                opened = open_segment(
                    self._ops, path, self._geometry, self._directory.identity.digest
                )
            except FileNotFoundError:
                continue  # deleted since it was listed
            if time.time() - size.modified_s > SAME_TIME_S:
                self._sizes[number] = size
            # None: the writer has created the file and not yet written its preamble.
            if opened is not None and self._table.extend(opened):
                self._reader.files.forget(number)
        for segment in self._table.segments():
            if segment.number not in present:
                self._table.evict(segment)
                self._reader.files.forget(segment.number)
                self._sizes.pop(segment.number, None)
        self._table.void(removed)
