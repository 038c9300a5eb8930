"""What a disk tier makes of the directory that it finds at its start, and of what changes beside it."""

import errno
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ramify.errors import ConfigError
from ramify.kv.stores.file_ops import OsFileOps
from ramify.kv.stores.page_store import ReadOutcome, WriteOutcome
from ramify.kv.stores.removal_log import FILE_NAME as REMOVAL_FILE
from ramify.kv.stores.segments import SegmentStore
from ramify.kv.stores.store_directory import IDENTITY_FILE, list_identities
from tests.pure.file_faults import FailingOps, always, no_fault, nth
from tests.pure.store_cases import (
    SEGMENT_BYTES,
    crash,
    get,
    hash_of,
    hits,
    opened,
    put,
    segment_files,
    slots_per_segment,
)

PER_SEGMENT = slots_per_segment()
NOBODY = 65534


def remove(store: SegmentStore, numbers: range) -> int:
    return store.remove_many([hash_of(number) for number in numbers], deadline=math.inf)


def removal_logs(directory: Path) -> list[Path]:
    return list(directory.glob(f"*/{REMOVAL_FILE}"))


def test_on_a_full_disk_a_start_reads_its_pages(tmp_path: Path) -> None:
    """Not even the lock's text can be written: the start goes on, pages are read, none is taken."""
    store = opened(tmp_path)
    put(store, range(PER_SEGMENT))
    store.close()
    ops = FailingOps(always("write allocate truncate", errno.ENOSPC))

    store = opened(tmp_path, ops=ops)

    assert hits(store, range(PER_SEGMENT)) == list(range(PER_SEGMENT))
    assert put(store, [100]) == [WriteOutcome.REFUSED]
    with pytest.raises(ConfigError, match="in use by"):
        opened(tmp_path)


def test_a_new_file_system_is_an_empty_directory(tmp_path: Path) -> None:
    """`lost+found` is nobody's; any other file is somebody's."""
    for name in ("disk", "home"):
        (tmp_path / name / "lost+found").mkdir(parents=True)
    (tmp_path / "home" / "thesis.txt").touch()

    assert put(opened(tmp_path / "disk"), [1]) == [WriteOutcome.WRITTEN]
    with pytest.raises(ConfigError, match="thesis"):
        opened(tmp_path / "home")


def test_a_reader_that_started_first_finds_what_is_written_later(tmp_path: Path) -> None:
    """The writer's directory, with its key of names, comes into being after the reader has started."""
    reader = opened(tmp_path, read_only=True)
    reader.maintain()
    assert hits(reader, range(3)) == []
    writer = opened(tmp_path)
    put(writer, range(3))

    reader.maintain()

    assert hits(reader, range(3)) == [0, 1, 2]


def test_a_reader_follows_a_writer_that_gives_a_number_again(tmp_path: Path) -> None:
    """Cleared and started again, a directory begins with the first number: another segment than before."""
    writer = opened(tmp_path)
    put(writer, range(3))
    reader = opened(tmp_path, read_only=True)
    assert hits(reader, range(3)) == [0, 1, 2]
    writer.clear(deadline=math.inf)
    writer.close()

    writer = opened(tmp_path)
    put(writer, range(2, 6))
    reader.maintain()

    assert [path.name for path in segment_files(tmp_path)] == ["00000001.seg"]
    assert hits(reader, range(6)) == [2, 3, 4, 5]
    assert reader.counts().errors == ()


def test_a_reader_never_syncs_the_segment_of_a_writer(tmp_path: Path) -> None:
    """To a read-only store the open segment looks like one that a crash left: it must stay as it is."""
    writer = opened(tmp_path)
    put(writer, range(3))
    reader = opened(tmp_path, read_only=True)
    size = segment_files(tmp_path)[0].stat().st_size

    assert reader.sync()
    reader.close()

    assert segment_files(tmp_path)[0].stat().st_size == size
    put(writer, [3])
    writer.close()
    assert hits(opened(tmp_path), range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("read_only", [True, False])
def test_a_start_that_fails_leaves_no_file_open(tmp_path: Path, read_only: bool) -> None:
    """The segment that a crash left open has been read when the directory cannot be listed."""
    store = opened(tmp_path)
    put(store, range(3))
    crash(store)
    ops = FailingOps(nth("names", 1, errno.EIO))

    with pytest.raises(ConfigError, match="cannot be read"):
        opened(tmp_path, ops=ops, read_only=read_only)

    assert ops.calls["read"] > 3 and not ops.open_fds
    assert hits(opened(tmp_path), range(3)) == [0, 1, 2]


def test_a_lower_budget_holds_before_anything_is_written(tmp_path: Path) -> None:
    """A start with a lower budget deletes segments, least recently used first, though pages are only read."""
    store = opened(tmp_path, budget_bytes=8 * SEGMENT_BYTES)
    put(store, range(6 * PER_SEGMENT))
    store.close()

    store = opened(tmp_path, budget_bytes=3 * SEGMENT_BYTES)
    store.maintain()

    used = sum(path.stat().st_blocks * 512 for path in segment_files(tmp_path))
    assert 2 * SEGMENT_BYTES < used <= 3 * SEGMENT_BYTES
    newest = range(4 * PER_SEGMENT, 6 * PER_SEGMENT)
    assert hits(store, newest) == list(newest)
    assert store.counts().evicted_pages == 6 * PER_SEGMENT - store.counts().num_pages


@pytest.mark.parametrize("content", [b"", b'{"fields": {"wei'])
def test_an_identity_that_a_crash_cut_is_written_again(tmp_path: Path, content: bytes) -> None:
    """Tools need it; the pages are found with and without."""
    store = opened(tmp_path)
    put(store, range(3))
    store.close()
    next(tmp_path.glob(f"*/{IDENTITY_FILE}")).write_bytes(content)

    store = opened(tmp_path)

    assert hits(store, range(3)) == [0, 1, 2]
    [listed] = list_identities(OsFileOps(), tmp_path)
    assert listed.identity == store._directory.identity


@pytest.mark.parametrize("is_hidden", [False, True])
def test_the_log_of_removals_is_as_long_as_their_records(tmp_path: Path, is_hidden: bool) -> None:
    """Whatever is removed over time: entries go with the segments of their records, and no page comes back.

    With pages on disk that are not listed every removal is recorded, also of pages that never were there.
    """
    store = opened(tmp_path, budget_bytes=3 * SEGMENT_BYTES)
    sizes = []
    for first in range(0, 600, 10):
        put(store, range(first, first + 5))
        if is_hidden:
            store._table.note_hidden()
        store.remove_many(
            [hash_of(number) for number in range(first, first + 9)], deadline=math.inf
        )
        put(store, [first + 1])
        sizes += [path.stat().st_size for path in tmp_path.glob("*/removed.log")]
    [identity] = {path.parent for path in segment_files(tmp_path)}
    (identity / "removed.new").write_bytes(b"of a process that was killed")
    store.close()

    numbers = hits(opened(tmp_path, budget_bytes=3 * SEGMENT_BYTES), range(600))

    num_slots = slots_per_segment()
    assert max(sizes) <= 2 * 32 * (4 * num_slots) + 32 * 9
    assert len(numbers) > num_slots // 4 and {number % 10 for number in numbers} == {1}


def test_a_log_of_removals_that_is_damaged_is_not_compacted(tmp_path: Path) -> None:
    """Else the removals that nobody can read any more would be forgotten, and their pages come back."""
    store = opened(tmp_path)
    put(store, range(40))
    store.remove_many([hash_of(1)], deadline=math.inf)
    [log] = tmp_path.glob("*/removed.log")
    content = bytearray(log.read_bytes())
    content[3] ^= 1
    log.write_bytes(content)
    for number in range(2, 20):
        store.remove_many([hash_of(number)], deadline=math.inf)
        store.maintain()
    store.close()

    assert hits(opened(tmp_path), range(40)) == []


def test_removals_of_pages_that_are_not_on_disk_cost_nothing(tmp_path: Path) -> None:
    """Most pages that an eviction removes were never written: no fsync, and a log that does not grow."""
    ops = FailingOps(no_fault)
    store = opened(tmp_path, ops=ops)
    put(store, range(10))
    store.sync()
    calls = ops.calls["datasync"]

    assert remove(store, range(1000, 3000)) == 0

    assert ops.calls["datasync"] == calls and not removal_logs(tmp_path)
    assert remove(store, range(8, 12)) == 2
    [log] = removal_logs(tmp_path)
    assert log.stat().st_size < 100
    store.close()
    assert hits(opened(tmp_path), range(10)) == list(range(8))


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_page_whose_read_failed_is_removed_for_good(tmp_path: Path, is_removed: bool) -> None:
    """It is not listed any more, but on disk: without the removal the next start finds it."""
    ops = FailingOps(no_fault)
    store = opened(tmp_path, ops=ops)
    put(store, range(3))
    ops.plan = nth("read", ops.calls["read"], errno.EIO)
    assert get(store, 1) is ReadOutcome.IO_ERROR

    if is_removed:
        assert remove(store, range(1, 2)) == 0
    store.close()

    assert hits(opened(tmp_path), range(3)) == ([0, 2] if is_removed else [0, 1, 2])


def test_a_page_of_a_segment_that_cannot_be_opened_is_removed_for_good(tmp_path: Path) -> None:
    """Its names are not known to this process; they are to the next one."""

    class NoSegments(FailingOps):
        def open(self, path: Path, flags: int) -> int:
            if path.suffix == ".seg":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().open(path, flags)

    store = opened(tmp_path)
    put(store, range(3))
    store.close()
    store = opened(tmp_path, ops=NoSegments(no_fault))

    assert remove(store, range(1, 2)) == 0
    store.close()

    assert hits(opened(tmp_path), range(3)) == [0, 2]


@contextmanager
def directory_as_nobody(mode: int, owner: int) -> Iterator[Path]:
    """A directory below one that everybody may enter, seen by a user without rights."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    root = Path(tempfile.mkdtemp())
    directory = root / "pages"
    directory.mkdir()
    os.chown(directory, owner, owner)
    directory.chmod(mode)
    root.chmod(0o755)
    os.seteuid(NOBODY)
    try:
        yield directory
    finally:
        os.seteuid(0)
        shutil.rmtree(root)


@pytest.mark.parametrize(
    ("mode", "owner", "reason"),
    [
        (0o777, 0, f"belongs to user 0, this is user {NOBODY}"),
        (0o500, NOBODY, "cannot be written.*choose another --cache-dir, or read its pages"),
        (0o000, NOBODY, "cannot be used.*choose another"),
    ],
)
def test_a_directory_of_somebody_else_is_refused(mode: int, owner: int, reason: str) -> None:
    """Not ours, not writable, not readable: refused at the start with the reason and the way out."""
    with directory_as_nobody(mode, owner) as directory, pytest.raises(ConfigError, match=reason):
        opened(directory)
