"""`FileOps`: every system call of the stores on disk, so that tests can make each of them fail."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ramify.kv.stores.page_cache import PageCache

# Linux only. A read that would wait for the disk returns at once; then the page cache is bypassed.
RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
O_DIRECT = getattr(os, "O_DIRECT", 0)
# A read with RWF_NOWAIT starts reading ahead. Pages of 368 KB gain by that (1,360 MB/s in place of 940,
# since those of a prefix lie behind each other), pages of 2 MiB lose (690 MB/s in place of 890).
READ_AHEAD_BYTES = 1 << 20
_PAGE_CACHE = PageCache()
BLOCK_BYTES = 4096
_ST_BLOCK_BYTES = 512  # POSIX's unit of st_blocks


@dataclass(frozen=True, slots=True)
class FileSize:
    """Length of a file, the bytes that the file system allocated to it, and its last change."""

    num_bytes: int
    allocated_bytes: int
    modified_s: float


class FileOps(Protocol):
    """System calls on files. Each raises OSError as the call does."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file, created with mode 0600; returns the descriptor."""
        ...

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        ...

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into the buffers in order; returns the number of bytes read, 0 at the file's end."""
        ...

    def read_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read what the page cache has, without waiting; 0 or fewer bytes where it has not all."""
        ...

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """Write the buffers in order; returns the number of bytes written."""
        ...

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Reserve disk blocks for the first `num_bytes` of a file and extend it to that length."""
        ...

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Cut or extend a file."""
        ...

    def datasync(self, fd: int) -> None:
        """Make what was written to a file survive a loss of power."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make names created and removed in a directory survive a loss of power."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Put a file in the place of another one, at once."""
        ...

    def size(self, path: Path) -> FileSize:
        """The size of a file."""
        ...

    def names(self, path: Path) -> list[str]:
        """Names in a directory, sorted."""
        ...

    def is_at(self, fd: int, path: Path) -> bool:
        """Whether a path names the file that is open; False: nothing is there, or another file."""
        ...

    def lock(self, fd: int) -> bool:
        """Take the exclusive lock of a file until it is closed; whether no other process holds it."""
        ...


class OsFileOps:
    """The system's own calls."""

    def open(self, path: Path, flags: int) -> int:
        """See FileOps."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        """See FileOps."""
        os.close(fd)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See FileOps."""
        return os.preadv(fd, buffers, offset)

    def read_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See FileOps; file systems without the flag answer 0."""
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        if num_bytes > READ_AHEAD_BYTES and _PAGE_CACHE.holds(fd, offset, num_bytes) is False:
            return 0
        try:
            return os.preadv(fd, buffers, offset, RWF_NOWAIT) if RWF_NOWAIT else 0
        except BlockingIOError:
            return 0
        except OSError:
            # The flag is not supported here, or the disk failed: a plain read finds out.
            return 0

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """See FileOps."""
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """See FileOps."""
        os.posix_fallocate(fd, 0, num_bytes)

    def truncate(self, fd: int, num_bytes: int) -> None:
        """See FileOps."""
        os.ftruncate(fd, num_bytes)

    def datasync(self, fd: int) -> None:
        """See FileOps."""
        getattr(os, "fdatasync", os.fsync)(fd)

    def sync_directory(self, path: Path) -> None:
        """See FileOps."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        """See FileOps."""
        path.unlink()

    def rename(self, source: Path, target: Path) -> None:
        """See FileOps."""
        source.replace(target)

    def size(self, path: Path) -> FileSize:
        """See FileOps."""
        status = path.stat()
        return FileSize(status.st_size, status.st_blocks * _ST_BLOCK_BYTES, status.st_mtime)

    def names(self, path: Path) -> list[str]:
        """See FileOps."""
        return sorted(os.listdir(path))  # noqa: PTH208 - names, not paths

    def is_at(self, fd: int, path: Path) -> bool:
        """See FileOps."""
        try:
            return os.path.samestat(os.fstat(fd), path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def lock(self, fd: int) -> bool:
        """See FileOps."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def read_exactly(ops: FileOps, fd: int, num_bytes: int, offset: int) -> bytes:
    """Read `num_bytes` at `offset`, fewer only at the file's end."""
    buffer = memoryview(bytearray(num_bytes))
    filled = 0
    while filled < num_bytes:
        count = ops.read(fd, [buffer[filled:]], offset + filled)
        if count <= 0:
            break
        filled += count
    return bytes(buffer[:filled])


def write_fully(ops: FileOps, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
    """Write all buffers at `offset`; a short write is continued.

    Raises:
        OSError: a write failed, or wrote nothing.
    """
    remaining = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while remaining:
        count = ops.write(fd, remaining, offset)
        if count <= 0:
            raise OSError(f"a write at {offset} wrote {count} bytes")
        offset += count
        while remaining and count >= remaining[0].nbytes:
            count -= remaining.pop(0).nbytes
        if count:
            remaining[0] = remaining[0][count:]
