"""Whether the kernel holds a part of a file in its page cache, without reading it.

`preadv2` with `RWF_NOWAIT` reads nothing that is not cached, but starts reading ahead. Where an O_DIRECT
read follows, the disk then reads everything twice.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys

CACHESTAT = 451  # the number of the system call, on all processors; Linux 6.5
UNKNOWN = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)  # old kernels, sandboxes, file systems


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("num_bytes", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


class PageCache:
    """Asks the kernel by `cachestat`."""

    def __init__(self) -> None:
        self._syscall = None
        if sys.platform == "linux":
            self._syscall = ctypes.CDLL(None, use_errno=True).syscall

    def holds(self, fd: int, offset: int, num_bytes: int) -> bool | None:
        """Whether all of a range is cached; None: this kernel or file system does not say."""
        if self._syscall is None:
            return None
        part, counts = _Range(offset, num_bytes), _Counts()
        if self._syscall(CACHESTAT, fd, ctypes.byref(part), ctypes.byref(counts), 0) != 0:
            if ctypes.get_errno() in UNKNOWN:
                self._syscall = None
            return None
        first, last = offset // mmap.PAGESIZE, (offset + num_bytes - 1) // mmap.PAGESIZE
        return int(counts.cached) > last - first
