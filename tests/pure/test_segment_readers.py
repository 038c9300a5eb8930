"""A read-only store beside the one that writes the directory: what it sees, and what it leaves alone."""

import math
import os
from pathlib import Path

from tests.pure.store_cases import (
    SEGMENT_BYTES,
    hash_of,
    hits,
    opened,
    put,
    segment_files,
    slots_per_segment,
)

PER_SEGMENT = slots_per_segment()


def test_a_reader_follows_the_writer(tmp_path: Path) -> None:
    """Every five seconds a read-only store sees what was written, sealed, removed and evicted."""
    now = [0.0]
    store = opened(tmp_path, budget_bytes=3 * SEGMENT_BYTES)
    reader = opened(tmp_path, read_only=True, clock=lambda: now[0])
    reader.maintain()

    def seen(count: int) -> list[int]:
        now[0] += 5
        reader.maintain()
        return hits(reader, range(count))

    put(store, range(3))
    assert hits(reader, range(3)) == []
    assert seen(3) == [0, 1, 2]
    store.remove_many([hash_of(1)], deadline=math.inf)
    put(store, range(3, slots_per_segment() + 2))
    assert seen(40) == [0, *range(2, slots_per_segment() + 2)]
    put(store, [1])
    assert seen(40) == list(range(slots_per_segment() + 2))
    put(store, range(100, 100 + 4 * slots_per_segment()))
    assert seen(40) == hits(store, range(40)) != list(range(slots_per_segment() + 2))
    store.clear(deadline=math.inf)
    assert seen(200) == [] and reader.counts().num_pages == 0
    put(store, range(3))
    store.close()
    assert seen(3) == [0, 1, 2]
    store = opened(tmp_path)
    put(store, [5])
    assert seen(6) == [0, 1, 2, 5]
    assert reader.counts().errors == ()


def test_a_reader_sees_a_page_that_leaves_the_file_its_time_of_change(tmp_path: Path) -> None:
    """The system's clock of files is coarse: the last page before a pause may not show."""
    now = [0.0]
    writer = opened(tmp_path)
    put(writer, [0])
    [path] = segment_files(tmp_path)
    before = path.stat().st_mtime_ns
    reader = opened(tmp_path, read_only=True, clock=lambda: now[0])
    reader.maintain()
    put(writer, [1])
    os.utime(path, ns=(before, before))

    now[0] = 6.0
    reader.maintain()

    assert hits(reader, range(3)) == [0, 1]


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
