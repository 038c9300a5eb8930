"""`SegmentListing`: what a start finds of an identity's segments, and what it may no longer list."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ramify.kv.stores.file_ops import FileOps
from ramify.kv.stores.removal_log import Position, RemovalLog
from ramify.kv.stores.segment import OpenedSegment, number_of, open_segment
from ramify.kv.stores.segment_format import Geometry, join_name, split_name
from ramify.kv.stores.segment_reader import SegmentReader
from ramify.kv.stores.segment_table import SegmentTable
from ramify.kv.stores.store_directory import StoreDirectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SegmentListing:
    """The segments of a directory, as they are found at a start.

    Args:
        segments: with their records, by number.
        unlisted: files that stay on disk and whose pages are not known.
        removed: name -> position before which its records are void.
        first_number: above the number of every segment that ever was.
    """

    segments: list[OpenedSegment]
    unlisted: list[Path]
    removed: dict[bytes, Position]
    first_number: int

    @property
    def newest(self) -> OpenedSegment | None:
        """The segment with the highest number, to which a writer may append; None: there is none."""
        return self.segments[-1] if self.segments else None

    @property
    def has_hidden_pages(self) -> bool:
        """Whether pages may be on disk that are not listed, so that a later start may list them.

        The writer seals the newest segment before anything else. Of others without a footer, what lies
        behind a damaged header is not known.
        """
        return bool(self.unlisted) or any(not item.segment.is_sealed for item in self.segments[:-1])


class SegmentSearch:
    """Finds the segments of a directory; a writer's deletes those that are of no use.

    Args:
        table: counts what is damaged or cannot be read.
        reader: reads the payloads of a segment that a crash left open.
    """

    def __init__(
        self,
        ops: FileOps,
        directory: StoreDirectory,
        geometry: Geometry,
        table: SegmentTable,
        reader: SegmentReader,
        *,
        page_bytes: int,
        read_only: bool,
    ) -> None:
        self._ops, self._directory, self._geometry = ops, directory, geometry
        self._table, self._reader = table, reader
        self._page_bytes, self._read_only = page_bytes, read_only

    def find(self, removals: RemovalLog) -> SegmentListing:
        """Every segment that can be opened.

        Raises:
            OSError: the directory or its removal log cannot be read.
        """
        removed = self._load(removals)
        unlisted: list[Path] = []
        segments = [] if removals.has_gap else self._open_all(unlisted)
        numbers = [number_of(path.name) or 0 for path in self._directory.segment_paths()]
        numbers += [number for number, _ in removed.values()]
        return SegmentListing(segments, unlisted, removed, max(numbers, default=0) + 1)

    def voided(self, removed: Mapping[bytes, Position], end: Position) -> dict[bytes, Position]:
        """Those of these removals that void a record which is on disk, or may be in a damaged file.

        Args:
            end: of the segment that the writer appends to.

        Raises:
            OSError: the directory cannot be read.
        """
        positions: dict[bytes, Position] = {}
        lows = np.array([split_name(name)[1] for name in removed], np.uint64)
        for path in self._directory.segment_paths():
            number = number_of(path.name) or 0
            try:
                opened = open_segment(
                    self._ops, path, self._geometry, self._directory.identity.digest
                )
            except OSError:
                opened = None
            is_whole = opened is not None and (
                opened.segment.is_sealed or (number, opened.segment.num_used) == end
            )
            if opened is None or not is_whole:
                # Behind a damaged header there may be records of any page.
                positions |= {
                    name: position for name, position in removed.items() if position > (number, 0)
                }
                continue
            for entry in opened.entries[np.isin(opened.entries["low"], lows)]:
                name = join_name(int(entry["high"]), int(entry["low"]))
                position = removed.get(name)
                if position is not None and (number, int(entry["slot"])) < position:
                    positions[name] = position
        return positions

    def _load(self, removals: RemovalLog) -> dict[bytes, Position]:
        """What the removal log voids; if some of it is not known, every page is dropped."""
        removed = removals.load()
        if removals.has_gap:
            logger.warning(
                "the log of removed pages in %s is damaged, so that any page may be a removed one: "
                "all of them are dropped",
                self._directory.path,
            )
            self._table.count("corrupt")
            if not self._read_only:
                self._directory.delete_segments()
                removals.discard()
        return removed

    def _open_all(self, unlisted: list[Path]) -> list[OpenedSegment]:
        """The segments on disk; files that stay there without being listed go to `unlisted`."""
        opened = []
        for path in self._directory.segment_paths():
            try:
                segment = open_segment(
                    self._ops, path, self._geometry, self._directory.identity.digest
                )
            except OSError as error:
                logger.warning("%s cannot be read: %s", path, error)
                self._table.count("io_error")
                unlisted.append(path)
                continue
            if segment is not None:
                opened.append(self._without_torn_records(segment))
                continue
            self._table.count("corrupt")
            logger.warning("%s has a damaged beginning; its pages are computed again", path)
            if not self._read_only:
                try:
                    self._ops.unlink(path)
                except OSError as error:
                    logger.warning("%s could not be deleted: %s", path, error)
                    unlisted.append(path)
        return sorted(opened, key=lambda item: item.segment.number)

    def _without_torn_records(self, opened: OpenedSegment) -> OpenedSegment:
        """A segment without a footer lists what its headers say: keep the records whose payload is whole.

        A crash may leave a header before a torn payload. Listed, such a page would not be written
        again, and three reads of such pages would drop the durable ones in the segment.
        """
        segment = opened.segment
        if segment.is_sealed:
            return opened
        page = memoryview(bytearray(self._page_bytes))
        is_whole = [
            self._reader.read_any(segment, slot, page) is not None
            for slot in opened.entries["slot"].tolist()
        ]
        return OpenedSegment(segment, opened.entries[np.array(is_whole, bool)])
