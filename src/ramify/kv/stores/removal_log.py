"""Which pages were removed for good, so that no restart brings them back.

A record in a segment is never changed. A removed page's name goes to this log with the position at
which the next record would have been written: records of that name before it are void, one that is
written later counts.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import xxhash

from ramify.kv.stores.file_ops import FileOps, read_exactly, write_fully
from ramify.kv.stores.page_names import NAME_BYTES

Position = tuple[int, int]
FILE_NAME = "removed.log"
_ENTRY = struct.Struct(f"<{NAME_BYTES}sQI")
_CHECK_BYTES = 4
_ENTRY_BYTES = _ENTRY.size + _CHECK_BYTES


class RemovalLog:
    """The log of one directory.

    Args:
        seed: 8 bytes or more of the directory's key: entries of another directory do not verify.
    """

    def __init__(self, ops: FileOps, directory: Path, seed: bytes) -> None:
        self._ops, self._path = ops, directory / FILE_NAME
        self._seed = int.from_bytes(seed[:8], "little")
        self._num_bytes = 0
        self._has_gap = False

    @property
    def has_gap(self) -> bool:
        """Whether `load` met a damaged entry before a good one: a removal that is not known."""
        return self._has_gap

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
            return {}
        try:
            content = read_exactly(self._ops, fd, size, 0)
        finally:
            self._ops.close(fd)
        removed: dict[bytes, Position] = {}
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
        entries = [_ENTRY.pack(name, *position) for name in names]
        content = b"".join(entry + self._check(entry) for entry in entries)
        is_new = not self._num_bytes
        fd = self._ops.open(self._path, os.O_RDWR | os.O_CREAT)
        try:
            # What follows the last good entry is a torn tail.
            write_fully(self._ops, fd, [content], self._num_bytes)
            self._ops.truncate(fd, self._num_bytes + len(content))
            self._ops.datasync(fd)
        finally:
            self._ops.close(fd)
        if is_new:
            self._ops.sync_directory(self._path.parent)
        self._num_bytes += len(content)

    def discard(self) -> None:
        """Delete the log: every segment that it speaks of is gone.

        Raises:
            OSError: the file cannot be removed.
        """
        if self._num_bytes:
            self._ops.unlink(self._path)
            self._num_bytes, self._has_gap = 0, False

    def _check(self, entry: bytes) -> bytes:
        return xxhash.xxh3_64_digest(entry, seed=self._seed)[:_CHECK_BYTES]
