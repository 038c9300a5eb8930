"""What each fault of a disk gets: a miss, writing off, a dropped segment; never an error, never a leak."""

import errno
import math
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import ConfigError, StoreUnavailableError
from ramify.kv.stores.page_store import ReadOutcome, WriteOutcome
from ramify.kv.stores.segments import SegmentStore
from tests.pure.file_faults import KINDS, FailingOps, always, no_fault, nth
from tests.pure.store_cases import (
    SEGMENT_BYTES,
    get,
    hash_of,
    hits,
    opened,
    put,
    segment_files,
    slots_per_segment,
)

PER_SEGMENT = slots_per_segment()
# Large pages, three to a segment, keep the number of calls of a life small.
LARGE, PER_LARGE = 2500, slots_per_segment(2500)


def check_table(store: SegmentStore) -> None:
    """The invariants of a store's tables: every listed page lies in a used slot of a listed segment."""
    table = store._table
    index = table._index
    listed = [
        (number, slot) for number in table._segments for _, slot in index.locations_in(number)
    ]
    assert len(listed) == len(index) == len(set(listed))
    assert all(slot < table._segments[number].num_used for number, slot in listed)


def large_store(directory: Path, ops: FailingOps, **changes: Any) -> SegmentStore:
    return opened(directory, ops=ops, page_bytes=LARGE, budget_bytes=3 * SEGMENT_BYTES, **changes)


def read_beside(directory: Path, ops: FailingOps, absent: list[int]) -> None:
    """Follow the writer of a directory for a while from a read-only store."""
    try:
        reader = large_store(directory, ops, read_only=True)
    except ConfigError:
        return
    reader.maintain()
    assert hits(reader, absent) == []
    hits(reader, range(4))
    reader.close()


def life(directory: Path, ops: FailingOps) -> list[int]:
    """Open, write, read, remove, evict, close and open again; returns the pages that were removed."""
    removed: list[int] = []
    for start in (0, 100):
        try:
            store = large_store(directory, ops)
        except ConfigError:
            continue
        try:
            numbers = range(start, start + 2 * PER_LARGE)
            put(store, numbers)
            hits(store, [*numbers, *removed])
            store.remove_many([hash_of(start)], deadline=math.inf)
            removed.append(start)
            assert get(store, start) is ReadOutcome.ABSENT
            put(store, range(start + 200, start + 200 + 2 * PER_LARGE))
            store.maintain()
            check_table(store)
            read_beside(directory, ops, removed)
        except StoreUnavailableError:
            pass
        store.close()
    return removed


def calls_of_a_life(directory: Path) -> dict[str, int]:
    ops = FailingOps(no_fault)
    life(directory, ops)
    assert not ops.open_fds
    return dict(ops.calls)


FAULTS: dict[str, tuple[str | int, ...]] = {
    "read": (errno.EIO, "short", "zero"),
    "write": (errno.ENOSPC, "short", "zero"),
    "allocate": (errno.ENOSPC,),
    "open": (errno.EMFILE,),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_call_may_fail_at_any_time(tmp_path: Path, kind: str) -> None:
    """The n-th call of a kind fails, for every n: no exception, no wrong page, no open file at the end."""
    num_calls = calls_of_a_life(tmp_path / "whole")[kind]
    assert num_calls > 0

    for fault in FAULTS.get(kind, (errno.EIO,)):
        for number in range(num_calls):
            directory = tmp_path / f"{fault}-{number}"
            ops = FailingOps(nth(kind, number, fault))
            removed = life(directory, ops)

            assert ops.calls[kind] > number
            assert not ops.open_fds
            store = large_store(directory, FailingOps(no_fault))
            assert hits(store, removed) == [], "a removed page came back"
            hits(store, (start + n for start in (0, 100, 200, 300) for n in range(2 * PER_LARGE)))
            check_table(store)
            store.close()


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ("lock", "has no locks"),
        ("write", "cannot be written"),
        ("open", "cannot be written"),
        ("names", "cannot be read"),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused(
    tmp_path: Path, calls: str, reason: str
) -> None:
    """A file system without locks, or one that is read-only: refused at the start, nothing stays open."""
    ops = FailingOps(always(calls, errno.EROFS))

    with pytest.raises(ConfigError, match=reason):
        opened(tmp_path, ops=ops)

    assert not ops.open_fds
    assert put(opened(tmp_path), [1]) == [WriteOutcome.WRITTEN]


@pytest.mark.parametrize("fault", [errno.EIO, "zero"])
def test_a_page_that_cannot_be_read_is_a_miss_and_unlisted(
    tmp_path: Path, fault: int | str
) -> None:
    """EIO or a short read: a miss, counted, the entry is gone before the call returns; others are read."""
    ops = FailingOps(no_fault)
    store = opened(tmp_path, ops=ops)
    put(store, range(3))
    ops.plan = nth("read", ops.calls["read"], fault)

    outcome = get(store, 1)

    assert outcome is (ReadOutcome.CORRUPT if fault == "zero" else ReadOutcome.IO_ERROR)
    assert store.has_many([hash_of(1)], deadline=math.inf) == [False]
    assert hits(store, range(3)) == [0, 2]
    assert store.counts().errors == ((outcome.value, 1),)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_process_without_descriptors_drops_no_segment(tmp_path: Path, code: int) -> None:
    """Reads that open no file are errors, and no damage: the segment stays, and its other pages."""
    ops = FailingOps(no_fault)
    store = opened(tmp_path, ops=ops)
    put(store, range(PER_SEGMENT))
    ops.plan = always("open", code)

    outcomes = [get(store, number) for number in range(4)]

    ops.plan = no_fault
    store.maintain()
    assert outcomes == [ReadOutcome.IO_ERROR] * 4
    assert store.counts().errors == (("io_error", 4),)
    assert hits(store, range(PER_SEGMENT)) == list(range(4, PER_SEGMENT))


def test_a_wrong_checksum_is_a_miss_and_the_page_can_be_written_again(tmp_path: Path) -> None:
    """A changed byte of a payload: a miss, counted; the page written again is read."""
    store = opened(tmp_path)
    put(store, range(3))
    flip_page(store, 1)

    assert get(store, 1) is ReadOutcome.CORRUPT
    assert put(store, [1]) == [WriteOutcome.WRITTEN]
    assert hits(store, range(3)) == [0, 1, 2]
    assert store.counts().errors == (("corrupt", 1),)


def flip_page(store: SegmentStore, number: int) -> None:
    location = store._table.find(store._names.name(hash_of(number)))
    assert location is not None
    segment, slot = location
    with segment.path.open("r+b") as file:
        file.seek(segment.geometry.offset(slot) + 100)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("is_active", [True, False])
def test_three_bad_pages_drop_their_segment(tmp_path: Path, is_active: bool) -> None:
    """Nothing else in such a segment is trusted; its file is deleted and pages go to another one."""
    store = opened(tmp_path)
    count = 5 if is_active else PER_SEGMENT + 1
    put(store, range(count))
    path = segment_files(tmp_path)[0]
    for number in range(3):
        flip_page(store, number)

    outcomes = [get(store, number) for number in range(4)]
    store.maintain()

    assert outcomes == [ReadOutcome.CORRUPT] * 3 + [ReadOutcome.ABSENT]
    assert not path.exists()
    assert set(put(store, range(5))) == {WriteOutcome.WRITTEN}
    assert hits(store, range(5)) == [0, 1, 2, 3, 4]
    store.close()
    assert hits(opened(tmp_path), range(5)) == [0, 1, 2, 3, 4]


def test_a_reader_deletes_nothing(tmp_path: Path) -> None:
    """A read-only store drops a bad segment from its own index only."""
    store = opened(tmp_path)
    put(store, range(5))
    reader = opened(tmp_path, read_only=True)
    for number in range(3):
        flip_page(store, number)

    assert hits(reader, range(5)) == []
    put(reader, [9])
    reader.maintain()
    reader.remove_many([hash_of(4)], deadline=math.inf)
    reader.clear(deadline=math.inf)
    reader.close()

    assert len(segment_files(tmp_path)) == 1
    assert hits(store, [3, 4]) == [3, 4]


@pytest.mark.parametrize("where", ["allocate", "write"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_stops_writing_only(
    tmp_path: Path, where: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """ENOSPC, quota, read-only: pages are refused, reading goes on, one warning; again after a minute."""
    now = [0.0]
    ops = FailingOps(no_fault)
    store = opened(tmp_path, ops=ops, clock=lambda: now[0])
    put(store, range(PER_SEGMENT))
    ops.plan = always(where, code)

    refused = put(store, range(100, 105))
    calls = ops.calls[where]
    now[0] = 59.0
    put(store, [106])

    assert set(refused) == {WriteOutcome.REFUSED}
    assert ops.calls[where] == calls, "tried again within a minute"
    assert os.strerror(code) in store.counts().writing_off
    assert hits(store, range(PER_SEGMENT)) == list(range(PER_SEGMENT))
    assert sum("takes no further pages" in record.message for record in caplog.records) == 1
    ops.plan = no_fault
    now[0] = 61.0
    assert put(store, [107]) == [WriteOutcome.WRITTEN]
    assert store.counts().writing_off == "" and store.counts().refused_pages == 6


def test_a_failed_fsync_drops_the_segment_and_is_not_repeated(tmp_path: Path) -> None:
    """The kernel may have lost the pages and says so once: none of them is served again."""
    now = [0.0]
    ops = FailingOps(no_fault)
    store = opened(tmp_path, ops=ops, clock=lambda: now[0])
    put(store, range(PER_SEGMENT + 3))
    ops.plan = always("datasync")
    calls = ops.calls["datasync"]
    now[0] = 6.0

    store.maintain()
    ops.plan = no_fault
    now[0] = 1000.0
    store.maintain()

    assert ops.calls["datasync"] == calls + 1
    assert hits(store, range(PER_SEGMENT + 3)) == list(range(PER_SEGMENT))
    assert put(store, [200]) == [WriteOutcome.REFUSED]
    assert store.counts().durable_pages == PER_SEGMENT
    store.close()
    assert hits(opened(tmp_path), range(PER_SEGMENT + 3)) == list(range(PER_SEGMENT))


def test_a_file_size_limit_stops_writing_only(tmp_path: Path) -> None:
    """A real limit of the system (RLIMIT_FSIZE): refused with its reason, reading goes on."""
    store = opened(tmp_path)
    put(store, range(3))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SEGMENT_BYTES - 1, hard))
    try:
        outcomes = put(store, range(10, 10 + 2 * PER_SEGMENT))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)

    assert WriteOutcome.REFUSED in outcomes
    assert os.strerror(errno.EFBIG) in store.counts().writing_off
    assert hits(store, range(3)) == [0, 1, 2]


def test_pages_that_cannot_be_deleted_close_the_store(tmp_path: Path) -> None:
    """If not even that is possible the store answers no further call, and says what to delete."""
    ops = FailingOps(no_fault)
    store = opened(tmp_path, ops=ops)
    put(store, range(20))
    ops.plan = always("write unlink")

    with pytest.raises(StoreUnavailableError, match="delete the directory"):
        store.remove_many([hash_of(3)], deadline=math.inf)

    with pytest.raises(StoreUnavailableError, match="delete the directory"):
        get(store, 1)


def test_clear_deletes_segments_that_could_not_be_opened(tmp_path: Path) -> None:
    """Unreadable at the start, a segment counts in the budget; cleared, it is gone at the next start."""
    ops = FailingOps(no_fault)
    store = opened(tmp_path, ops=ops)
    put(store, range(PER_SEGMENT))
    store.close()
    size = segment_files(tmp_path)[0].stat()

    class NoSegments(FailingOps):
        def open(self, path: Path, flags: int) -> int:
            if path.suffix == ".seg":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().open(path, flags)

    store = opened(tmp_path, ops=NoSegments(no_fault))
    used_bytes = store.counts().used_bytes
    store.clear(deadline=math.inf)
    left_bytes = store.counts().used_bytes
    store.close()

    assert (used_bytes, left_bytes) == (size.st_blocks * 512, 0)
    assert segment_files(tmp_path) == [] and hits(opened(tmp_path), range(PER_SEGMENT)) == []


def test_a_damaged_beginning_costs_its_segment_only(tmp_path: Path) -> None:
    """A segment whose preamble is damaged is deleted; the others are read."""
    store = opened(tmp_path)
    put(store, range(2 * PER_SEGMENT))
    store.close()
    with segment_files(tmp_path)[0].open("r+b") as file:
        file.write(b"\0")

    store = opened(tmp_path)

    assert hits(store, range(2 * PER_SEGMENT)) == list(range(PER_SEGMENT, 2 * PER_SEGMENT))
    assert len(segment_files(tmp_path)) == 1


def test_a_damaged_footer_costs_no_page(tmp_path: Path) -> None:
    """Without its footer a segment is listed by its headers."""
    store = opened(tmp_path)
    put(store, range(PER_SEGMENT))
    store.close()
    with segment_files(tmp_path)[0].open("r+b") as file:
        file.seek(-20, os.SEEK_END)
        file.write(b"damaged footer")

    assert hits(opened(tmp_path), range(PER_SEGMENT)) == list(range(PER_SEGMENT))


def test_a_file_that_vanished_is_a_miss(tmp_path: Path) -> None:
    """A segment deleted by somebody else: its pages are absent, at most one attempt each."""
    store = opened(tmp_path)
    put(store, range(3))
    store.close()
    store = opened(tmp_path)
    segment_files(tmp_path)[0].unlink()

    assert [get(store, number) for number in range(3)] == [ReadOutcome.ABSENT] * 3
    assert store.has_many([hash_of(n) for n in range(3)], deadline=math.inf) == [False] * 3


@pytest.mark.parametrize("end", ["clear", "close"])
def test_a_file_deleted_while_it_is_opened_is_not_kept_open(tmp_path: Path, end: str) -> None:
    """A segment is deleted, or the store closed, during an open: its descriptor ends with the read."""

    class EndsDuringOpen(FailingOps):
        is_armed = False

        def open(self, path: Path, flags: int) -> int:
            fd = super().open(path, flags)
            if self.is_armed and path.suffix == ".seg":
                self.is_armed = False
                if end == "clear":
                    store.clear(deadline=math.inf)
                else:
                    store.close()
            return fd

    ops = EndsDuringOpen(no_fault)
    store = opened(tmp_path, ops=ops)
    put(store, range(PER_SEGMENT))
    store.close()
    store = opened(tmp_path, ops=ops)
    before = set(ops.open_fds)
    ops.is_armed = True

    get(store, 1)

    assert not ops.is_armed and ops.open_fds <= before
