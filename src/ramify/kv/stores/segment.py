"""`Segment`: one segment file: create, open by footer or by headers, append, seal, read a record."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ramify.kv.stores.file_ops import FileOps, read_exactly, write_fully
from ramify.kv.stores.segment_format import (
    ENTRY,
    HEADER_BYTES,
    ID_BYTES,
    PREAMBLE_BYTES,
    TRAILER_BYTES,
    Entries,
    Geometry,
    Preamble,
    RecordHeader,
    decode_footer,
    decode_trailer,
    encode_footer,
    entry_of,
)

SUFFIX = ".seg"
_NUMBER_DIGITS = 8
# Eight digits, or nine without a leading zero: each number has one name, and fits into 32 bits.
_NAME = re.compile(r"([0-9]{8}|[1-9][0-9]{8})\.seg")


class Segment:
    """What is known of a segment file. Holds no descriptor.

    Args:
        num_used: slots with a record; the next record goes to this slot.
        allocated_bytes: disk blocks, what the budget counts.
    """

    __slots__ = ("allocated_bytes", "geometry", "hot", "is_sealed", "last_use", "num_errors",
                 "num_used", "number", "path", "segment_id")  # fmt: skip

    def __init__(
        self, path: Path, preamble: Preamble, num_used: int, allocated_bytes: int, is_sealed: bool
    ) -> None:
        self.path, self.number = path, preamble.number
        self.geometry, self.segment_id = preamble.geometry, preamble.segment_id
        self.num_used, self.allocated_bytes, self.is_sealed = num_used, allocated_bytes, is_sealed
        # A byte for each slot that was read since the record was written.
        self.hot = bytearray(self.geometry.num_slots)
        self.last_use = 0
        self.num_errors = 0

    @property
    def is_full(self) -> bool:
        """Whether no slot is left."""
        return self.num_used >= self.geometry.num_slots


@dataclass(frozen=True, slots=True)
class OpenedSegment:
    """A segment that was on disk, with the records that its footer or its headers list."""

    segment: Segment
    entries: Entries


def path_of(directory: Path, number: int) -> Path:
    """The file of a segment."""
    return directory / f"{number:0{_NUMBER_DIGITS}d}{SUFFIX}"


def number_of(name: str) -> int | None:
    """The number in a file's name as `path_of` writes it; None: it is no segment."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def create_segment(
    ops: FileOps, directory: Path, number: int, geometry: Geometry, identity: bytes
) -> tuple[Segment, int]:
    """Create and preallocate a segment; returns it and its descriptor, open for writing.

    Raises:
        OSError: no room, or the file system fails; the file is removed if that is possible.
    """
    path = path_of(directory, number)
    preamble = Preamble(geometry, number, identity, os.urandom(ID_BYTES))
    fd = ops.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        # Before anything is written: a full disk is found here, not in the middle of a segment.
        ops.allocate(fd, geometry.segment_bytes)
        write_fully(ops, fd, [preamble.encode()], 0)
        ops.sync_directory(directory)
        size = ops.size(path)
    except OSError:
        with contextlib.suppress(OSError):
            ops.close(fd)
        with contextlib.suppress(OSError):
            ops.unlink(path)
        raise
    return Segment(path, preamble, 0, size.allocated_bytes, is_sealed=False), fd


def open_segment(
    ops: FileOps, path: Path, geometry: Geometry, identity: bytes
) -> OpenedSegment | None:
    """A segment with its records; None: it is not one of this directory, or its preamble is damaged.

    Payloads are not read: without a footer, an entry may be a header before a torn payload.

    Raises:
        OSError: the file cannot be read.
    """
    number = number_of(path.name)
    if number is None:
        return None
    size = ops.size(path)
    fd = ops.open(path, os.O_RDONLY)
    try:
        block = read_exactly(ops, fd, PREAMBLE_BYTES, 0)
        preamble = Preamble.decode(block, geometry, number, identity)
        if preamble is None:
            return None
        sealed = _read_footer(ops, fd, size.num_bytes, preamble)
        if sealed is not None:
            num_used, entries = sealed
        else:
            entries = _walk(ops, fd, size.num_bytes, preamble)
            num_used = len(entries)
    finally:
        ops.close(fd)
    segment = Segment(path, preamble, num_used, size.allocated_bytes, sealed is not None)
    return OpenedSegment(segment, entries)


def _read_footer(
    ops: FileOps, fd: int, file_bytes: int, preamble: Preamble
) -> tuple[int, Entries] | None:
    geometry, segment_id = preamble.geometry, preamble.segment_id
    block = read_exactly(ops, fd, TRAILER_BYTES, max(file_bytes - TRAILER_BYTES, 0))
    trailer = decode_trailer(block, geometry, file_bytes, segment_id)
    if trailer is None:
        return None
    count, num_used, checksum = trailer
    body = read_exactly(ops, fd, count * ENTRY.itemsize, geometry.offset(num_used))
    entries = decode_footer(body, checksum, segment_id, num_used)
    return None if entries is None else (num_used, entries)


def _walk(ops: FileOps, fd: int, file_bytes: int, preamble: Preamble) -> Entries:
    """The records up to the first damaged header."""
    geometry = preamble.geometry
    rows = []
    for slot in range(geometry.num_slots):
        offset = geometry.offset(slot)
        if offset + geometry.record_bytes > file_bytes:
            break
        block = read_exactly(ops, fd, HEADER_BYTES, offset)
        header = RecordHeader.decode(block, preamble.segment_id)
        if header is None or header.payload_bytes != geometry.payload_bytes:
            break
        rows.append(entry_of(header, slot))
    return np.array(rows, ENTRY)


def seal_segment(ops: FileOps, fd: int, segment: Segment, entries: Entries) -> None:
    """Write the footer and cut the file behind it. Not synced.

    Raises:
        OSError: the segment may have no footer now; its records are intact.
    """
    geometry, num_used = segment.geometry, segment.num_used
    footer = encode_footer(entries, geometry, num_used, segment.segment_id)
    write_fully(ops, fd, [footer], geometry.offset(num_used))
    ops.truncate(fd, geometry.sealed_bytes(num_used, len(entries)))
    segment.is_sealed = True


def unseal_segment(ops: FileOps, fd: int, segment: Segment) -> None:
    """Cut the file behind its last record and preallocate the rest again, for further records.

    Raises:
        OSError: no room; the records are intact.
    """
    segment.is_sealed = False
    # Nothing that stood behind the last record may look like one later.
    ops.truncate(fd, segment.geometry.offset(segment.num_used))
    ops.allocate(fd, segment.geometry.segment_bytes)
