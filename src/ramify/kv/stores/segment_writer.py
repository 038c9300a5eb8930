"""`SegmentWriter`: appends records, makes them durable, seals segments and keeps the budget.

Written: the write has returned, the page survives the end of the process. Durable: an fdatasync
after it has returned, the page survives a loss of power. The two are counted apart.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ramify.kv.stores.file_ops import FileOps, write_fully
from ramify.kv.stores.page_store import StoreUnavailableError
from ramify.kv.stores.payload_codec import PayloadCodec, encode_record
from ramify.kv.stores.removal_log import Position
from ramify.kv.stores.segment import (
    SUFFIX,
    OpenedSegment,
    Segment,
    create_segment,
    seal_segment,
    unseal_segment,
)
from ramify.kv.stores.segment_format import ENTRY, HEADER_BYTES, Geometry, entry_of
from ramify.kv.stores.segment_reader import SegmentReader
from ramify.kv.stores.segment_table import SegmentTable

logger = logging.getLogger(__name__)

SYNC_S = 5.0
RETRY_S = 60.0
# Pages of an evicted segment that were read are written again, unless they are few (they went cold)
# or more than half a segment (eviction would free too little).
MIN_HOT_SHARE, MAX_COPIED_SHARE = 0.1, 0.5

# No block is left on the disk, or for this user.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

FooterRow = tuple[int, int, bytes, bytes, int, int, int]


@dataclass(frozen=True, slots=True)
class ForeignSegment:
    """A file whose pages are not listed; the budget counts and evicts it first.

    A segment of another identity, or one that could not be opened or deleted.
    """

    path: Path
    allocated_bytes: int


class SegmentWriter:
    """The one writer of a directory. Not locked: its owner is.

    Args:
        resume: the newest segment found, to which records are appended if it has room.
        first_number: above the number of every segment that ever was.
        foreign: segments whose pages are not listed, oldest first.
    """

    def __init__(
        self,
        ops: FileOps,
        directory: Path,
        geometry: Geometry,
        identity: bytes,
        codec: PayloadCodec,
        table: SegmentTable,
        reader: SegmentReader,
        *,
        budget_bytes: int,
        resume: OpenedSegment | None,
        first_number: int,
        foreign: Sequence[ForeignSegment],
        clock: Callable[[], float],
    ) -> None:
        self._ops, self._directory, self._geometry = ops, directory, geometry
        self._identity, self._codec, self._clock = identity, codec, clock
        self._table, self._reader = table, reader
        self._budget_bytes = budget_bytes
        self._resume, self._next_number = resume, first_number
        self._foreign = list(foreign)
        self._padding = bytes(geometry.record_bytes - HEADER_BYTES - geometry.payload_bytes)
        self._active: Segment | None = None
        self._fd = -1
        self._rows: list[FooterRow] = []
        self._num_unsynced, self._unsynced_since = 0, 0.0
        self._off_reason, self._retry_at = "", 0.0

    @property
    def off_reason(self) -> str:
        """Why nothing is written at present; empty: pages are."""
        return self._off_reason

    @property
    def foreign_bytes(self) -> int:
        """Bytes of segments whose pages are not listed: other identities', and damaged ones."""
        return sum(segment.allocated_bytes for segment in self._foreign)

    @property
    def position(self) -> Position:
        """Segment and slot of the next record; every record so far is before it."""
        if self._active is not None:
            return self._active.number, self._active.num_used
        if self._resume is not None:
            return self._resume.segment.number, self._resume.segment.num_used
        return self._next_number, 0

    def append(self, name: bytes, parent_tag: bytes, tenant_tag: bytes, page: memoryview) -> bool:
        """Write a page and list it; False: the store takes none at present."""
        if self._off_reason and self._clock() < self._retry_at:
            return False
        try:
            # A reader may drop the active segment at any time: then the page goes to another one.
            while not self._append_to(self._writable_segment(), name, parent_tag, tenant_tag, page):
                self._delete_condemned()
        except OSError as error:
            self._turn_off(error)
            return False
        if self._off_reason:
            logger.warning("%s takes pages again", self._directory)
            self._off_reason = ""
        self._table.count("written")
        return True

    def _append_to(
        self, segment: Segment, name: bytes, parent_tag: bytes, tenant_tag: bytes, page: memoryview
    ) -> bool:
        """Write a page and list it; False: its segment has been dropped."""
        header, pieces = encode_record(
            self._codec, name, parent_tag, tenant_tag, page, segment.segment_id
        )
        slot = segment.num_used
        offset = self._geometry.offset(slot)
        write_fully(self._ops, self._fd, [*pieces, self._padding], offset)
        self._rows.append(entry_of(header, slot))
        segment.num_used += 1
        if not self._num_unsynced:
            self._unsynced_since = self._clock()
        self._num_unsynced += 1
        return self._table.add(name, segment, slot)

    def maintain(self) -> None:
        """Delete condemned segments, keep the budget, and fdatasync what was written 5 seconds ago."""
        self._delete_condemned()
        self._seal_left_open()
        if self._active is None and not self._off_reason:
            # The budget may be lower than at the last start, and pages are only read.
            try:
                self._make_room()
            except OSError as error:
                self._turn_off(error)
        if self._num_unsynced and self._clock() - self._unsynced_since >= SYNC_S:
            self.sync()

    def sync(self) -> bool:
        """Make every written page durable; False: that failed, and the segment was dropped."""
        was_off = self._off_for_good
        self._seal_left_open()
        if self._active is None or not self._num_unsynced:
            return was_off or not self._off_for_good
        try:
            self._ops.datasync(self._fd)
        except OSError as error:
            self._drop_after_failed_sync(error)
            return False
        self._table.count("durable", self._num_unsynced)
        self._num_unsynced = 0
        return True

    def stop(self, reason: str) -> None:
        """Write nothing any more, not even a footer: the files are somebody else's, or gone."""
        if self._off_for_good:
            return
        self._resume = None
        if self._active is not None:
            self._release_active()
        self._turn_off(OSError(errno.ESTALE, reason), forever=True)

    def close(self) -> None:
        """Seal the active segment."""
        self._seal_left_open()
        if self._active is not None:
            self._seal()

    def _seal_left_open(self) -> None:
        """Seal the newest segment if an earlier process ended without: that makes its pages durable."""
        resume = self._resume
        if (
            resume is None
            or self._active is not None
            or resume.segment.is_sealed
            or not self._table.is_listed(resume.segment)
        ):
            return
        try:
            self._continue(resume, unseal=False)
        except OSError as error:
            # Its slots must not be used again: a loss of power may free slots that a removal is after.
            logger.warning("%s could not be sealed: %s", resume.segment.path, error)
            self._resume = None
            self._table.note_hidden()
            return
        self._seal()
        if not resume.segment.is_sealed:
            self._resume = None
            self._table.note_hidden()

    def delete_all(self, listed: Sequence[Segment]) -> None:
        """Delete every segment file, listed or not; the table has forgotten them.

        Raises:
            StoreUnavailableError: a file could not be deleted and may come back at a restart.
        """
        self._resume = None
        if self._active is not None:
            self._release_active()
        failures = []
        segments = [*listed, *self._table.take_condemned()]
        paths = {segment.path for segment in segments}
        try:
            # Files that could not be opened at the start, or deleted since, would be listed again.
            names = self._ops.names(self._directory)
            paths |= {self._directory / name for name in names if name.endswith(SUFFIX)}
        except OSError as error:
            failures.append(error)
        for path in sorted(paths):
            try:
                with suppress(FileNotFoundError):
                    self._ops.unlink(path)
            except OSError as error:
                failures.append(error)
        for segment in segments:
            self._reader.files.forget(segment.number)
        self._foreign = [item for item in self._foreign if item.path not in paths]
        try:
            self._ops.sync_directory(self._directory)
        except OSError as error:
            failures.append(error)
        if failures:
            raise StoreUnavailableError(
                f"the disk tier in {self._directory}",
                f"pages that must not come back could not be deleted: {failures[0]}; delete "
                "the directory",
            )

    @property
    def _off_for_good(self) -> bool:
        return self._retry_at == float("inf")

    def _writable_segment(self) -> Segment:
        """The active segment, with a free slot; started if there is none."""
        while True:
            if self._active is not None and self._active.is_full:
                self._seal()
            if self._off_for_good:
                raise OSError(errno.EIO, self._off_reason)
            if self._active is not None:
                return self._active
            self._make_room()
            self._start_segment()
            # Copies of hot pages may take every slot that is left.
            self._make_room()

    def _start_segment(self) -> None:
        self._seal_left_open()
        if self._off_for_good:
            raise OSError(errno.EIO, self._off_reason)
        resume, self._resume = self._resume, None
        if (
            resume is not None
            and not resume.segment.is_full
            and self._table.is_listed(resume.segment)
        ):
            self._continue(resume, unseal=True)
            return
        number = self._next_number
        self._next_number += 1
        segment, self._fd = create_segment(
            self._ops, self._directory, number, self._geometry, self._identity
        )
        self._active, self._rows = segment, []
        self._table.add_segment(segment)

    def _continue(self, resume: OpenedSegment, *, unseal: bool) -> None:
        segment = resume.segment
        num_unsynced = 0 if segment.is_sealed else segment.num_used
        fd = self._ops.open(segment.path, os.O_RDWR)
        try:
            if unseal:
                unseal_segment(self._ops, fd, segment)
            segment.allocated_bytes = self._ops.size(segment.path).allocated_bytes
        except OSError:
            with suppress(OSError):
                self._ops.close(fd)
            raise
        self._active, self._fd = segment, fd
        self._rows = resume.entries.tolist()
        self._num_unsynced, self._unsynced_since = num_unsynced, self._clock()

    def _seal(self) -> None:
        """Sync, write the footer and close the active segment."""
        segment = self._active
        assert segment is not None
        if not self.sync():
            return
        try:
            seal_segment(self._ops, self._fd, segment, np.array(self._rows, ENTRY))
        except OSError as error:
            logger.warning("%s has no footer: %s", segment.path, error)
            self._release_active()
            return
        try:
            self._ops.datasync(self._fd)
        except OSError as error:
            self._drop_after_failed_sync(error)
            return
        with suppress(OSError):
            segment.allocated_bytes = self._ops.size(segment.path).allocated_bytes
        self._release_active()

    def _release_active(self) -> None:
        with suppress(OSError):
            self._ops.close(self._fd)
        self._active, self._fd, self._rows, self._num_unsynced = None, -1, [], 0

    def _drop_after_failed_sync(self, error: OSError) -> None:
        """Drop the active segment: the kernel may have lost its pages, and says so only once."""
        segment = self._active
        assert segment is not None
        self._table.count("dropped", self._table.forget(segment))
        self._table.note_hidden()
        self._release_active()
        with suppress(OSError):
            self._delete(segment)
        self._turn_off(error, forever=True)

    def _turn_off(self, error: OSError, *, forever: bool = False) -> None:
        if not self._off_reason:
            again = "for good" if forever else f"tried again every {RETRY_S:.0f} s"
            logger.warning(
                "%s takes no further pages (%s): %s; what is stored is still read",
                self._directory,
                again,
                error,
            )
        if not self._off_for_good:
            self._off_reason = str(error) or type(error).__name__
            self._retry_at = float("inf") if forever else self._clock() + RETRY_S
        self._table.count(f"write_{errno.errorcode.get(error.errno or 0, 'error').lower()}")

    def _make_room(self) -> None:
        """Delete segments until the budget holds: other identities' first, then the least recently used."""
        num_copied = 0
        while self._table.allocated_bytes() + self.foreign_bytes > self._budget_bytes:
            if self._foreign:
                self._delete_foreign()
                continue
            victim = self._next_victim()
            if victim is None:
                break
            count = self._copy_hot_pages(victim, num_copied)
            num_copied += count
            # A durable page stays durable: its copy is on disk before its file is deleted.
            if count and not self.sync():
                raise OSError(errno.EIO, self._off_reason)
            self._evict(victim)

    def evict_next(self) -> bool:
        """Delete the segment that is evicted next, hot pages too, for its blocks; False: there is none.

        Raises:
            OSError: it could not be deleted.
        """
        victim = self._next_victim()
        if self._foreign:
            self._delete_foreign()
        elif victim is not None:
            self._evict(victim)
        else:
            return False
        return True

    def _next_victim(self) -> Segment | None:
        return next(
            (segment for segment in self._table.segments() if segment is not self._active), None
        )

    def _delete_foreign(self) -> None:
        with suppress(FileNotFoundError):
            self._ops.unlink(self._foreign[0].path)
        self._foreign.pop(0)

    def _evict(self, victim: Segment) -> None:
        # Deleted before it is forgotten: if that fails, its pages stay.
        try:
            self._delete(victim)
            self._table.count("evicted", self._table.evict(victim))
            self._ops.sync_directory(self._directory)
        except OSError:
            # The file may be there after a restart, with pages that moved on or are not listed.
            self._table.note_hidden()
            raise

    def _copy_hot_pages(self, victim: Segment, num_copied: int) -> int:
        """Write pages of a segment again that were read since they were written; returns how many."""
        active = self._active
        if active is None:
            return 0
        hot = [(name, slot) for name, slot in self._table.pages_in(victim) if victim.hot[slot]]
        if len(hot) < MIN_HOT_SHARE * max(victim.num_used, 1):
            return 0
        limit = int(self._geometry.num_slots * MAX_COPIED_SHARE) - num_copied
        page = memoryview(bytearray(self._geometry.payload_bytes - self._codec.extra_bytes))
        count = 0
        for name, slot in hot[: max(limit, 0)]:
            if active.is_full:
                break
            header = self._reader.read_any(victim, slot, page)
            if header is None or header.name != name:
                continue
            if not self._append_to(active, name, header.parent_tag, header.tenant_tag, page):
                break
            count += 1
        self._table.count("copied", count)
        return count

    def _delete(self, segment: Segment) -> None:
        with suppress(FileNotFoundError):
            self._ops.unlink(segment.path)
        self._reader.files.forget(segment.number)

    def _delete_condemned(self) -> None:
        condemned = self._table.take_condemned()
        for segment in condemned:
            if segment is self._active:
                self._release_active()
            try:
                self._delete(segment)
            except OSError as error:
                logger.warning("%s could not be deleted: %s", segment.path, error)
                self._foreign.append(ForeignSegment(segment.path, segment.allocated_bytes))
