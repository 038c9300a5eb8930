"""File layers that fail on demand, and one that loses power."""

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ramify.kv.stores.file_ops import O_DIRECT, FileSize, OsFileOps

Buffers = Sequence[memoryview | bytes]
KINDS = (
    "open", "close", "read", "write", "allocate", "truncate", "datasync", "sync_directory",
    "unlink", "rename", "size", "names", "lock", "is_at",
)  # fmt: skip


class FailingOps(OsFileOps):
    """Calls of the system, of which the planned ones fail.

    Args:
        plan: (kind, how often it was called before) -> the error to raise, or None. "short" and
            "zero" are no errors: a read or write then moves half of its bytes, or none.
    """

    def __init__(self, plan: Callable[[str, int], OSError | str | None]) -> None:
        self.plan = plan
        self.calls: Counter[str] = Counter()
        self.open_fds: set[int] = set()
        self._lock = threading.Lock()

    def _next(self, kind: str) -> str | None:
        with self._lock:
            number = self.calls[kind]
            self.calls[kind] += 1
        fault = self.plan(kind, number)
        if isinstance(fault, OSError):
            raise fault
        return fault

    def open(self, path: Path, flags: int) -> int:
        self._next("open")
        # Past the page cache each read would wait for the disk.
        fd = super().open(path, flags & ~O_DIRECT)
        self.open_fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        # As close(2): the descriptor is gone even if the call fails.
        super().close(fd)
        self.open_fds.discard(fd)
        self._next("close")

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        fault = self._next("read")
        return super().read(fd, _cut(fault, buffers), offset) if fault != "zero" else 0

    def read_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        # Reads go through `read`, where they fail.
        return 0

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        fault = self._next("write")
        return super().write(fd, _cut(fault, buffers), offset) if fault != "zero" else 0

    def allocate(self, fd: int, num_bytes: int) -> None:
        self._next("allocate")
        super().allocate(fd, num_bytes)

    def truncate(self, fd: int, num_bytes: int) -> None:
        self._next("truncate")
        super().truncate(fd, num_bytes)

    def datasync(self, fd: int) -> None:
        self._next("datasync")  # nobody loses power here, and a real one takes milliseconds

    def sync_directory(self, path: Path) -> None:
        self._next("sync_directory")

    def unlink(self, path: Path) -> None:
        self._next("unlink")
        super().unlink(path)

    def rename(self, source: Path, target: Path) -> None:
        self._next("rename")
        super().rename(source, target)

    def size(self, path: Path) -> FileSize:
        self._next("size")
        return super().size(path)

    def names(self, path: Path) -> list[str]:
        self._next("names")
        return super().names(path)

    def lock(self, fd: int) -> bool:
        self._next("lock")
        return super().lock(fd)

    def is_at(self, fd: int, path: Path) -> bool:
        self._next("is_at")
        return super().is_at(fd, path)


def _cut(fault: str | None, buffers: Buffers) -> list:
    """Half of the bytes for a short call, else all."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    if fault != "short":
        return views
    remaining = max(sum(view.nbytes for view in views) // 2, 1)
    cut = []
    for view in views:
        if remaining:
            cut.append(view[:remaining])
            remaining -= min(remaining, view.nbytes)
    return cut


def no_fault(kind: str, number: int) -> None:
    """A plan without faults."""


def nth(kind: str, number: int, fault: str | int) -> Callable[[str, int], OSError | str | None]:
    """A plan in which one call of a kind fails: errno, "short" or "zero"."""

    def plan(called: str, before: int) -> OSError | str | None:
        if (called, before) != (kind, number):
            return None
        return fault if isinstance(fault, str) else OSError(fault, os.strerror(fault))

    return plan


def always(kinds: str, code: int = errno.EIO) -> Callable[[str, int], OSError | str | None]:
    """A plan in which every call of these kinds fails."""
    return lambda kind, _: OSError(code, os.strerror(code)) if kind in kinds.split() else None


class PowerLossOps(OsFileOps):
    """Calls of the system that can lose power: any part of what was not synced is undone.

    At `lose_power` each unsynced write keeps or loses any of its blocks of 4 KiB; lengths, created
    and removed names go back to what they were at the last sync, or do not.
    """

    def __init__(self) -> None:
        self._paths: dict[int, Path] = {}
        # Undo records of a file since its last datasync: (offset, old bytes), or (old length, None).
        self._undo: dict[Path, list[tuple[int, bytes | None]]] = {}
        self._created: list[Path] = []
        self._unlinked: list[tuple[Path, bytes]] = []
        self._replaced: list[tuple[Path, bytes]] = []
        self.datasync_fails = False

    def open(self, path: Path, flags: int) -> int:
        is_new = not path.exists()
        fd = super().open(path, flags)
        if is_new:
            self._created.append(path)
            self._undo[path] = []
        self._paths[fd] = path
        return fd

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        path = self._paths[fd]
        num_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        old = os.pread(fd, num_bytes, offset)
        length = os.fstat(fd).st_size
        undo = self._undo.setdefault(path, [])
        if offset + num_bytes > length:
            undo.append((length, None))
        # Blocks are aligned in the file, as the page cache has them.
        old = old.ljust(num_bytes, b"\0")
        start = offset
        while start < offset + num_bytes:
            end = min(start - start % 4096 + 4096, offset + num_bytes)
            undo.append((start, old[start - offset : end - offset]))
            start = end
        return super().write(fd, buffers, offset)

    def allocate(self, fd: int, num_bytes: int) -> None:
        self._note_length(fd)
        super().allocate(fd, num_bytes)

    def truncate(self, fd: int, num_bytes: int) -> None:
        length = self._note_length(fd)
        if num_bytes < length:
            cut = os.pread(fd, length - num_bytes, num_bytes)
            self._undo[self._paths[fd]].append((num_bytes, cut))
        super().truncate(fd, num_bytes)

    def _note_length(self, fd: int) -> int:
        length = os.fstat(fd).st_size
        self._undo.setdefault(self._paths[fd], []).append((length, None))
        return length

    def datasync(self, fd: int) -> None:
        if self.datasync_fails:
            raise OSError(errno.EIO, "failed fsync")
        self._undo[self._paths[fd]] = []

    def sync_directory(self, path: Path) -> None:
        self._created = [created for created in self._created if created.parent != path]
        self._unlinked = [entry for entry in self._unlinked if entry[0].parent != path]
        self._replaced = [entry for entry in self._replaced if entry[0].parent != path]

    def unlink(self, path: Path) -> None:
        if path not in self._created:
            self._unlinked.append((path, path.read_bytes()))
        else:
            self._created.remove(path)
        self._undo.pop(path, None)
        super().unlink(path)

    def rename(self, source: Path, target: Path) -> None:
        self._replaced.append((target, target.read_bytes()))
        self._undo[target] = self._undo.pop(source, [])
        self._created = [path for path in self._created if path != source]
        super().rename(source, target)

    def lose_power(self, rng: random.Random) -> None:
        """Undo any subset of what was not synced, newest first."""
        for path, records in self._undo.items():
            if not path.exists():
                continue
            share = rng.choice((0.0, 0.3, 1.0))
            with path.open("r+b") as file:
                for offset, old in reversed(records):
                    if rng.random() < share:
                        if old is None:
                            file.truncate(offset)
                        else:
                            file.seek(offset)
                            file.write(old)
        for path in self._created:
            if path.exists() and rng.random() < 0.5:
                path.unlink()
        for path, content in self._unlinked:
            if not path.exists() and rng.random() < 0.5:
                path.write_bytes(content)
        for path, content in self._replaced[:1]:
            if path.exists() and rng.random() < 0.5:
                path.write_bytes(content)
