"""Which pages were removed for good, so that no restart brings them back.

A record in a segment is never changed. A removed page's name goes to this log with the position at
which the next record would have been written: records of that name before it are void, one that is
written later counts. An entry is needed as long as a record that it voids is on disk: `compact` drops the others.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from ramify.kv.stores.file_ops import FileOps, read_exactly, write_fully
from ramify.kv.stores.page_names import NAME_BYTES

Position = tuple[int, int]
FILE_NAME, NEW_FILE_NAME = "removed.log", "removed.new"
_ENTRY = struct.Struct(f"<{NAME_BYTES}sQI")
_CHECK_BYTES = 4
_ENTRY_BYTES = _ENTRY.size + _CHECK_BYTES


class RemovalLog:
    """The log of one directory.

    Args:
        seed: 8 bytes or more of the directory's key: entries of another directory do not verify.
        free_bytes: length up to which it is never compacted.
    """

    def __init__(self, ops: FileOps, directory: Path, seed: bytes, *, free_bytes: int) -> None:
        self._ops, self._path = ops, directory / FILE_NAME
        self._seed = int.from_bytes(seed[:8], "little")
        self._num_bytes, self._compact_at_bytes = 0, free_bytes
        self._free_bytes = free_bytes
        self._has_name = False  # that survives a loss of power
        self._has_gap = False

    @property
    def has_gap(self) -> bool:
        """Whether `load` met a damaged entry before a good one: a removal that is not known."""
        return self._has_gap

    @property
    def is_due(self) -> bool:
        """Whether it has grown so much that `compact` is worth its reads."""
        return self._num_bytes > self._compact_at_bytes

    def load(self) -> dict[bytes, Position]:
        """Name -> position before which its records are void. A torn tail is left out, see `has_gap`.

        May be called again: another process may have appended.

        Raises:
            OSError: the log is there and cannot be read.
        """
        self._has_gap = has_damage = False
        try:
            size = self._ops.size(self._path).num_bytes
            fd = self._ops.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            self._num_bytes = 0
            return {}
        try:
            content = read_exactly(self._ops, fd, size, 0)
        finally:
            self._ops.close(fd)
        removed: dict[bytes, Position] = {}
        self._num_bytes = 0
        for start in range(0, len(content) - _ENTRY_BYTES + 1, _ENTRY_BYTES):
            entry = content[start : start + _ENTRY_BYTES]
            if entry[_ENTRY.size :] != self._check(entry[: _ENTRY.size]):
                has_damage = True
                continue
            self._has_gap |= has_damage
            name, number, slot = _ENTRY.unpack_from(entry)
            removed[name] = max(removed.get(name, (0, 0)), (number, slot))
            self._num_bytes = start + _ENTRY_BYTES
        return removed

    def append(self, names: Sequence[bytes], position: Position) -> None:
        """Record removals; they survive a loss of power once this has returned.

        Raises:
            OSError: nothing, or a part, was recorded.
        """
        content = self._encode(dict.fromkeys(names, position))
        fd = self._ops.open(self._path, os.O_RDWR | os.O_CREAT)
        try:
            # What follows the last good entry is a torn tail.
            write_fully(self._ops, fd, [content], self._num_bytes)
            self._ops.truncate(fd, self._num_bytes + len(content))
            self._ops.datasync(fd)
        finally:
            self._ops.close(fd)
        if not self._has_name:
            self._ops.sync_directory(self._path.parent)
            self._has_name = True
        self._num_bytes += len(content)

    def compact(
        self, needed: Callable[[Mapping[bytes, Position]], Mapping[bytes, Position]]
    ) -> None:
        """Drop the entries that are needed no longer. A failure leaves the log as it was.

        Args:
            needed: those of the entries that void a record which is on disk.

        Raises:
            OSError: a file could not be read, written or replaced, or the log is damaged; not tried
                again until it is twice as long.
        """
        num_bytes = self._num_bytes
        self._compact_at_bytes = 2 * num_bytes
        removed = self.load()
        if self._has_gap or self._num_bytes != num_bytes:
            # An entry behind the damage makes it a gap: then the next start drops every page.
            self._num_bytes = num_bytes
            raise OSError(errno.EIO, "some of its entries are damaged")
        content = self._encode(needed(removed))
        path = self._path.with_name(NEW_FILE_NAME)
        try:
            fd = self._ops.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                write_fully(self._ops, fd, [content], 0)
                self._ops.datasync(fd)
            finally:
                self._ops.close(fd)
            self._ops.rename(path, self._path)
        except OSError:
            with suppress(OSError):
                self._ops.unlink(path)
            raise
        # Until the directory is synced either may be there after a loss of power; both say the same.
        self._has_name = False
        self._num_bytes = len(content)
        self._compact_at_bytes = max(self._free_bytes, 2 * len(content))
        self._ops.sync_directory(self._path.parent)
        self._has_name = True

    def _encode(self, removed: Mapping[bytes, Position]) -> bytes:
        entries = [_ENTRY.pack(name, *position) for name, position in removed.items()]
        return b"".join(entry + self._check(entry) for entry in entries)

    def discard(self) -> None:
        """Delete the log: every segment that it speaks of is gone.

        Raises:
            OSError: the file cannot be removed.
        """
        if self._num_bytes:
            self._ops.unlink(self._path)
            self._num_bytes, self._has_gap, self._has_name = 0, False, False
            self._compact_at_bytes = self._free_bytes

    def _check(self, entry: bytes) -> bytes:
        return xxhash.xxh3_64_digest(entry, seed=self._seed)[:_CHECK_BYTES]
