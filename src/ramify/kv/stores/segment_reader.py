"""Reads of records: from the page cache where they are there, else past it; verified before use."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ramify.kv.stores.file_ops import BLOCK_BYTES, O_DIRECT, FileOps
from ramify.kv.stores.page_store import ReadOutcome
from ramify.kv.stores.payload_codec import PayloadCodec, decode_record
from ramify.kv.stores.segment import Segment
from ramify.kv.stores.segment_format import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    Geometry,
    RecordHeader,
    align,
)

# The process or the system has no descriptor or no memory left.
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_MAX_OPEN = 128


@dataclass(slots=True)
class _OpenFile:
    fd: int
    direct_fd: int  # -1: none
    num_users: int = 0
    is_doomed: bool = False


class OpenFiles:
    """Descriptors of segments for reading, at most 128 segments that nobody reads stay open."""

    def __init__(self, ops: FileOps, *, direct: bool) -> None:
        self._ops, self._direct = ops, direct
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _OpenFile] = OrderedDict()
        self._num_forgets = 0
        self._is_closed = False

    @contextmanager
    def reading(self, segment: Segment) -> Iterator[tuple[int, int]]:
        """The descriptors of a segment, buffered and O_DIRECT (-1: none), open until the block ends.

        Raises:
            OSError: the file cannot be opened.
        """
        file = self._acquire(segment)
        try:
            yield file.fd, file.direct_fd
        finally:
            self._release(file)

    def _acquire(self, segment: Segment) -> _OpenFile:
        file = self._use(segment.number)
        if file is not None:
            return file
        num_forgets = self._num_forgets
        # Outside the lock: an open that does not return must not stop other reads.
        opened = self._open(segment)
        file = self._keep(segment.number, opened, num_forgets)
        if file is not opened:
            self._close(opened)
        return file

    def _open(self, segment: Segment) -> _OpenFile:
        fd = self._ops.open(segment.path, os.O_RDONLY)
        direct_fd = -1
        if self._direct:
            # Without the second descriptor, reads go through the page cache.
            with suppress(OSError):
                direct_fd = self._ops.open(segment.path, os.O_RDONLY | O_DIRECT)
        return _OpenFile(fd, direct_fd)

    def _use(self, number: int) -> _OpenFile | None:
        """The open file of a segment, with one more user; None: it is not open."""
        with self._lock:
            file = self._files.get(number)
            if file is not None:
                file.num_users += 1
                self._files.move_to_end(number)
            return file

    def _keep(self, number: int, opened: _OpenFile, num_forgets: int) -> _OpenFile:
        """The open file of a segment, else `opened`, with one more user.

        Args:
            num_forgets: before the file was opened.
        """
        with self._lock:
            file = self._files.get(number, opened)
            file.num_users += 1
            if file is opened and (self._is_closed or self._num_forgets != num_forgets):
                # It may have been deleted since: a descriptor that stays open would keep its blocks.
                file.is_doomed = True
                return file
            self._files[number] = file
            self._files.move_to_end(number)
            while len(self._files) > _MAX_OPEN:
                self._doom(self._files.popitem(last=False)[1])
            return file

    def _release(self, file: _OpenFile) -> None:
        with self._lock:
            file.num_users -= 1
            if file.is_doomed and not file.num_users:
                self._close(file)

    def forget(self, number: int) -> None:
        """Close a segment's descriptors, once the reads under way have ended."""
        with self._lock:
            self._num_forgets += 1
            file = self._files.pop(number, None)
            if file is not None:
                self._doom(file)

    def close(self) -> None:
        """Close every descriptor, once the reads under way have ended."""
        with self._lock:
            self._is_closed = True
            while self._files:
                self._doom(self._files.popitem()[1])

    def _doom(self, file: _OpenFile) -> None:
        file.is_doomed = True
        if not file.num_users:
            self._close(file)

    def _close(self, file: _OpenFile) -> None:
        for fd in (file.fd, file.direct_fd):
            if fd >= 0:
                with suppress(OSError):
                    self._ops.close(fd)


class SegmentReader:
    """Reads and verifies records. Any number of threads; each has a buffer of one record."""

    def __init__(self, ops: FileOps, geometry: Geometry, codec: PayloadCodec, *, direct: bool):
        self.files = OpenFiles(ops, direct=direct)
        self._ops, self._geometry, self._codec = ops, geometry, codec
        self._threads = threading.local()

    def read(
        self, segment: Segment, slot: int, name: bytes, parent_tag: bytes, page: memoryview
    ) -> ReadOutcome:
        """Read a page to `page`, whose content means something only after HIT.

        Raises:
            OSError: one of EXHAUSTED, which says nothing of the segment.
        """
        try:
            with self.files.reading(segment) as (fd, direct_fd):
                head, stored = self._fetch(fd, direct_fd, slot, page)
        except FileNotFoundError:
            return ReadOutcome.ABSENT  # evicted since it was looked up
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            return ReadOutcome.IO_ERROR
        intact = stored is not None and decode_record(
            self._codec, head, stored, page, name, parent_tag, segment.segment_id
        )
        return ReadOutcome.HIT if intact else ReadOutcome.CORRUPT

    def read_any(self, segment: Segment, slot: int, page: memoryview) -> RecordHeader | None:
        """Read the page that a slot holds, whatever its name; None: it is damaged or unreadable."""
        try:
            with self.files.reading(segment) as (fd, direct_fd):
                head, stored = self._fetch(fd, direct_fd, slot, page)
        except OSError:
            return None
        header = RecordHeader.decode(head, segment.segment_id)
        if header is None or stored is None:
            return None
        intact = decode_record(
            self._codec, head, stored, page, header.name, header.parent_tag, segment.segment_id
        )
        return header if intact else None

    def _fetch(
        self, fd: int, direct_fd: int, slot: int, page: memoryview
    ) -> tuple[memoryview, memoryview | None]:
        """Header and payload of a record; no payload: the file ends before it does.

        The payload is `page` itself where it was read in place.
        """
        offset = self._geometry.offset(slot)
        scratch = self._scratch()
        num_bytes = HEADER_BYTES + self._geometry.payload_bytes
        head = scratch[:HEADER_BYTES]
        whole = scratch[:num_bytes]
        in_place = self._codec.in_place
        pieces = [head, page] if in_place else [whole]
        stored = page if in_place else self._payload(scratch, 0)
        if self._ops.read_cached(fd, pieces, offset) == num_bytes:
            return head, stored
        if direct_fd < 0:
            return head, stored if self._read_all(fd, pieces, offset) >= num_bytes else None
        start = offset - offset % BLOCK_BYTES
        lead = offset - start
        window = scratch[: align(lead + num_bytes, BLOCK_BYTES)]
        if self._read_all(direct_fd, [window], start) < lead + num_bytes:
            return head, None
        return scratch[lead : lead + HEADER_BYTES], self._payload(scratch, lead)

    def _payload(self, scratch: memoryview, lead: int) -> memoryview:
        start = lead + HEADER_BYTES
        return scratch[start : start + self._geometry.payload_bytes + CHECKSUM_BYTES]

    def _read_all(self, fd: int, pieces: list[memoryview], offset: int) -> int:
        """Read until the pieces are full or the file ends; bytes read."""
        filled = 0
        pieces = list(pieces)
        while pieces:
            count = self._ops.read(fd, pieces, offset + filled)
            if count <= 0:
                break
            filled += count
            while pieces and count >= pieces[0].nbytes:
                count -= pieces.pop(0).nbytes
            if pieces and count:
                pieces[0] = pieces[0][count:]
        return filled

    def _scratch(self) -> memoryview:
        """This thread's buffer, aligned for O_DIRECT (an anonymous mapping is)."""
        scratch: memoryview | None = getattr(self._threads, "scratch", None)
        if scratch is None:
            record = HEADER_BYTES + self._geometry.payload_bytes + CHECKSUM_BYTES
            mapping = mmap.mmap(-1, align(record, BLOCK_BYTES) + 2 * BLOCK_BYTES)
            scratch = self._threads.scratch = memoryview(mapping)
        return scratch
