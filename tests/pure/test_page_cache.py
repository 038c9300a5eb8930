"""What the kernel says of its page cache, and reads that must not fill it."""

import os
from pathlib import Path

import pytest

from ramify.kv.stores.file_ops import OsFileOps
from ramify.kv.stores.page_cache import PageCache

NUM_BYTES = 4 << 20
ELSEWHERE = 777  # not a multiple of a page


@pytest.fixture
def fd(tmp_path: Path) -> int:
    """A file of four megabytes that is on the disk and not in the page cache."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(NUM_BYTES))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if PageCache().holds(fd, 0, NUM_BYTES) is not False:
        pytest.skip("this kernel has no cachestat (Linux 6.5), or the file system is in memory")
    return fd


def test_what_was_read_is_held(fd: int) -> None:
    """A range is held when all of its pages are."""
    cache = PageCache()
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    read = os.pread(fd, 8192, 65536)
    assert len(read) == 8192

    assert cache.holds(fd, 65536, 8192)
    assert cache.holds(fd, 65536 + ELSEWHERE, 4096)
    assert cache.holds(fd, 0, NUM_BYTES) is False


def test_a_look_starts_no_read(fd: int) -> None:
    """Neither the question nor the read that asks it fills the page cache."""
    ops, cache = OsFileOps(), PageCache()
    page = memoryview(bytearray(NUM_BYTES // 2))

    assert ops.read_cached(fd, [page], ELSEWHERE) == 0
    assert cache.holds(fd, 0, 4096) is False
    assert cache.holds(fd, ELSEWHERE, 4096) is False

    os.pread(fd, NUM_BYTES, 0)
    assert ops.read_cached(fd, [page], ELSEWHERE) == len(page)


def test_a_kernel_that_does_not_know_is_asked_once() -> None:
    """A closed descriptor says nothing; neither does a kernel without the call."""
    cache = PageCache()
    assert cache.holds(-1, 0, 4096) is None
    cache._syscall = None
    assert cache.holds(0, 0, 4096) is None
