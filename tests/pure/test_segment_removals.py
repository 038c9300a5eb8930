"""Pages that were removed from a disk tier: no restart brings them back, and their log has a bound."""

import errno
import math
import os
from pathlib import Path

import pytest

from ramify.kv.stores.page_store import ReadOutcome
from ramify.kv.stores.removal_log import FILE_NAME as REMOVAL_FILE
from ramify.kv.stores.segments import SegmentStore
from tests.pure.file_faults import FailingOps, always, no_fault, nth
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


def remove(store: SegmentStore, numbers: range) -> int:
    return store.remove_many([hash_of(number) for number in numbers], deadline=math.inf)


def removal_logs(directory: Path) -> list[Path]:
    return list(directory.glob(f"*/{REMOVAL_FILE}"))


def test_a_removal_that_cannot_be_recorded_deletes_every_page(tmp_path: Path) -> None:
    """A page that must not come back takes all others with it, rather than coming back."""
    ops = FailingOps(no_fault)
    store = opened(tmp_path, ops=ops)
    put(store, range(20))
    ops.plan = always("write")

    store.remove_many([hash_of(3)], deadline=math.inf)

    ops.plan = no_fault
    assert hits(store, range(20)) == [] and segment_files(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_removal_on_a_full_disk_takes_the_place_of_one_segment(tmp_path: Path, code: int) -> None:
    """The least recently used segment makes room for it; no restart brings the removed page back."""
    ops = FailingOps(no_fault)
    store = opened(tmp_path, ops=ops)
    numbers = range(3 * PER_SEGMENT)
    put(store, numbers)
    removed, before = 2 * PER_SEGMENT + 1, ops.calls["unlink"]
    ops.plan = lambda kind, _: (
        OSError(code, "full") if kind == "write" and ops.calls["unlink"] == before else None
    )

    store.remove_many([hash_of(removed)], deadline=math.inf)
    ops.plan = no_fault
    store.close()

    left = [number for number in numbers[PER_SEGMENT:] if number != removed]
    assert hits(opened(tmp_path), numbers) == left


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

    left = hits(opened(tmp_path, budget_bytes=3 * SEGMENT_BYTES), range(600))

    num_slots = slots_per_segment()
    assert max(sizes) <= 2 * 32 * (4 * num_slots) + 32 * 9
    assert len(left) > num_slots // 4 and {number % 10 for number in left} == {1}


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


def test_a_log_of_removals_without_a_whole_entry_is_not_compacted(tmp_path: Path) -> None:
    """An entry that is appended behind the damage shows at the next start that some are not known."""
    store = opened(tmp_path)
    put(store, range(40))
    store.remove_many([hash_of(number) for number in range(20)], deadline=math.inf)
    [log] = tmp_path.glob("*/removed.log")
    log.write_bytes(bytes(byte ^ 1 for byte in log.read_bytes()))
    store._removals._compact_at_bytes = 0

    store.maintain()
    store.remove_many([hash_of(20)], deadline=math.inf)
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
