"""The disk tier: what is kept, what is found after a restart, what makes room, who may use it."""

import errno
import hashlib
import math
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import ConfigError, StoreUnavailableError
from ramify.kv.stores.page_store import PageKey, ReadOutcome, WriteOutcome
from ramify.kv.stores.payload_codec import read_cache_key
from tests.pure.file_faults import FailingOps, no_fault
from tests.pure.store_cases import (
    IDENTITY,
    PAGE_BYTES,
    SEGMENT_BYTES,
    crash,
    get,
    hash_of,
    hits,
    key,
    opened,
    page,
    put,
    segment_files,
    slots_per_segment,
)


@pytest.mark.parametrize("page_bytes", [1, 200, 4096])
def test_pages_are_read_back_and_survive_a_restart(tmp_path: Path, page_bytes: int) -> None:
    """What was put is read, before and after close and a new start, over several segments."""
    numbers = range(40 if page_bytes < 1000 else 8)
    store = opened(tmp_path, page_bytes=page_bytes)

    outcomes = put(store, numbers)
    before = hits(store, numbers)
    store.close()
    store = opened(tmp_path, page_bytes=page_bytes)

    assert set(outcomes) == {WriteOutcome.WRITTEN} and before == list(numbers)
    assert hits(store, numbers) == list(numbers) and get(store, 99) is ReadOutcome.ABSENT
    assert store.has_many([hash_of(0), hash_of(99)], deadline=math.inf) == [True, False]
    assert store.has_many([], deadline=math.inf) == []
    assert set(put(store, numbers)) == {WriteOutcome.PRESENT}
    assert store.counts().num_pages == len(numbers)


def test_large_pages_are_aligned_and_read_past_the_page_cache(tmp_path: Path) -> None:
    """Pages of 64 KiB and more begin at 4 KiB; dropped from the page cache they are read all the same."""
    large: dict[str, Any] = {
        "page_bytes": 70_000,
        "segment_bytes": 1 << 20,
        "budget_bytes": 4 << 20,
    }
    store = opened(tmp_path, **large)
    put(store, range(5))
    store.close()
    for path in segment_files(tmp_path):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    store = opened(tmp_path, **large)

    assert store._writer._geometry.record_bytes % 4096 == 0
    assert hits(store, range(5)) == [0, 1, 2, 3, 4]


def test_restarts_add_no_segments(tmp_path: Path) -> None:
    """Each start goes on in the last segment as long as it has room."""
    for number in range(6):
        store = opened(tmp_path)
        put(store, [number])
        store.close()

    assert len(segment_files(tmp_path)) == 1
    assert segment_files(tmp_path)[0].stat().st_size < SEGMENT_BYTES
    assert hits(opened(tmp_path), range(6)) == [0, 1, 2, 3, 4, 5]


def test_after_a_crash_the_written_pages_are_found(tmp_path: Path) -> None:
    """Without a footer the headers are walked; the torn record behind them is left out."""
    store = opened(tmp_path)
    put(store, range(5))
    crash(store)
    geometry = store._writer._geometry
    with segment_files(tmp_path)[0].open("r+b") as file:
        file.seek(geometry.offset(5))
        file.write(b"page" + b"\xff" * 300)

    store = opened(tmp_path)

    assert hits(store, range(6)) == [0, 1, 2, 3, 4]
    assert store.counts().errors == ()
    put(store, [5])
    store.close()
    assert hits(opened(tmp_path), range(6)) == [0, 1, 2, 3, 4, 5]


def test_written_and_durable_are_counted_apart(tmp_path: Path) -> None:
    """A page is durable 5 seconds after it was written, or once its segment is sealed."""
    now = [0.0]
    store = opened(tmp_path, clock=lambda: now[0])

    put(store, [0, 1])
    assert (store.counts().written_pages, store.counts().durable_pages) == (2, 0)
    now[0] = 4.9
    store.maintain()
    assert store.counts().durable_pages == 0
    now[0] = 5.1
    store.maintain()
    assert store.counts().durable_pages == 2
    put(store, range(2, slots_per_segment() + 1))
    assert store.counts().durable_pages == slots_per_segment()


def test_a_page_after_another_parent_is_a_miss(tmp_path: Path) -> None:
    """Two pages of one hash after different parents are a collision, and no hit."""
    store = opened(tmp_path)
    put(store, [1])

    outcome = store.get_many(
        [PageKey(hash_of(1), hash_of(7))], [memoryview(bytearray(PAGE_BYTES))], deadline=math.inf
    )

    assert outcome == [ReadOutcome.CORRUPT]
    assert get(store, 1) is ReadOutcome.ABSENT


def test_a_passed_deadline_touches_nothing(tmp_path: Path) -> None:
    """After its deadline a call reads and writes nothing, and the pages stay listed."""
    store = opened(tmp_path, clock=lambda: 10.0)
    put(store, [1])

    late = store.get_many([key(1)], [memoryview(bytearray(PAGE_BYTES))], deadline=9.0)

    assert late == [ReadOutcome.LATE]
    assert store.put_many([key(2)], [page(2)], deadline=9.0) == [WriteOutcome.LATE]
    assert hits(store, [1, 2]) == [1] and store.counts().late_pages == 2


def test_removed_pages_stay_away_until_they_are_written_again(tmp_path: Path) -> None:
    """No restart brings a removed page back, not even from a segment whose page was hidden."""
    store = opened(tmp_path)
    put(store, range(4))
    assert store.remove_many([hash_of(1), hash_of(2), hash_of(9)], deadline=math.inf) == 2
    assert hits(store, range(4)) == [0, 3]
    put(store, [2])
    crash(store)

    store = opened(tmp_path)

    assert hits(store, range(4)) == [0, 2, 3]
    store.close()
    assert hits(opened(tmp_path, read_only=True), range(4)) == [0, 2, 3]


def test_a_removal_covers_the_older_record_of_a_page_written_twice(tmp_path: Path) -> None:
    """A page that was damaged, written again and then removed has two records: neither comes back."""
    store = opened(tmp_path)
    put(store, [1])
    store._table.remove_many([store._names.name(hash_of(1))])  # as after a damaged read
    put(store, [1])
    assert store._writer.position == (1, 2)

    store.remove_many([hash_of(1)], deadline=math.inf)
    store.close()

    assert hits(opened(tmp_path), [1]) == []


def test_clear_removes_every_page_and_file(tmp_path: Path) -> None:
    """After clear nothing is found, now or after a restart, and the store can be written."""
    store = opened(tmp_path)
    put(store, range(30))
    store.remove_many([hash_of(40)], deadline=math.inf)

    assert store.clear(deadline=math.inf) == 30
    assert segment_files(tmp_path) == [] and hits(store, range(30)) == []
    assert not list(tmp_path.glob("*/removed.log"))
    put(store, [3, 40])
    store.close()
    assert hits(opened(tmp_path), [*range(30), 40]) == [3, 40]


def test_the_budget_holds_and_the_least_recently_used_segment_goes(tmp_path: Path) -> None:
    """Disk never has more than budget + one segment, files never more than the budget's + 2."""
    budget = 4 * SEGMENT_BYTES
    store = opened(tmp_path, budget_bytes=budget)
    per_segment = slots_per_segment()

    used = 0

    for number in range(12 * per_segment):
        put(store, [number])
        used = sum(path.stat().st_blocks * 512 for path in segment_files(tmp_path))
        assert used <= budget + SEGMENT_BYTES
        assert len(segment_files(tmp_path)) <= 4 + 2

    assert store.counts().used_bytes == used <= budget
    assert store.counts().evicted_pages + store.counts().num_pages == 12 * per_segment
    assert store.counts().num_pages <= 5 * per_segment
    newest = range(12 * per_segment - 2 * per_segment, 12 * per_segment)
    assert hits(store, newest) == list(newest)
    # What was evicted, and nothing else, is remembered so; a page that is written again is not.
    listed = store.has_many([hash_of(n) for n in range(12 * per_segment)], deadline=math.inf)
    evicted = store.were_evicted([hash_of(n) for n in range(12 * per_segment)])
    assert evicted == [not is_there for is_there in listed]
    assert store.were_evicted([hash_of(10**6)]) == [False]
    put(store, [0])
    assert store.were_evicted([hash_of(0)]) == [False]
    store.clear(deadline=math.inf)
    assert not any(store.were_evicted([hash_of(n) for n in range(12 * per_segment)]))


def test_hot_pages_are_copied_on(tmp_path: Path) -> None:
    """Pages read since they were written outlive their segment; those never read go with it."""
    per_segment = slots_per_segment()
    store = opened(tmp_path, budget_bytes=3 * SEGMENT_BYTES)
    put(store, range(per_segment))
    hot = list(range(0, per_segment, 3))
    assert hits(store, hot) == hot

    put(store, range(1000, 1000 + 3 * per_segment))

    assert hits(store, range(per_segment)) == hot
    assert store.counts().copied_pages == len(hot)
    store.close()
    assert hits(opened(tmp_path, budget_bytes=3 * SEGMENT_BYTES), hot) == hot


def test_hot_pages_that_fill_the_last_segment_leave_the_next_page_a_new_one(tmp_path: Path) -> None:
    """Copies may take the last slots of a segment that a restart goes on with: no record lies behind its end."""
    per_segment = slots_per_segment()
    store = opened(tmp_path)
    put(store, range(2 * per_segment))
    put(store, range(200, 200 + per_segment - 8))
    store.close()
    used = sum(path.stat().st_blocks * 512 for path in segment_files(tmp_path))
    store = opened(tmp_path, budget_bytes=used)
    hits(store, range(11))
    get(store, per_segment)

    assert put(store, [300]) == [WriteOutcome.WRITTEN]

    assert store.counts().copied_pages == 8
    assert hits(store, [300]) == [300]
    store.close()
    assert hits(opened(tmp_path, budget_bytes=used), [*range(8), 300]) == [*range(8), 300]


def test_one_hot_page_in_a_cold_segment_is_not_copied(tmp_path: Path) -> None:
    """Below a tenth of a segment, pages that were read go with it."""
    per_segment = slots_per_segment()
    assert per_segment > 10
    store = opened(tmp_path, budget_bytes=3 * SEGMENT_BYTES)
    put(store, range(per_segment))
    get(store, 0)

    put(store, range(1000, 1000 + 4 * per_segment))

    assert hits(store, range(per_segment)) == []
    assert store.counts().copied_pages == 0


def test_other_identities_make_room_first(tmp_path: Path) -> None:
    """Their segments count towards the budget and are evicted before this identity's."""
    other = {**IDENTITY, "weights": "w0"}
    store = opened(tmp_path, identity=other, budget_bytes=4 * SEGMENT_BYTES)
    per_segment = slots_per_segment()
    put(store, range(3 * per_segment))
    store.close()

    store = opened(tmp_path, budget_bytes=4 * SEGMENT_BYTES)
    put(store, range(4 * per_segment))

    assert hits(store, range(4 * per_segment)) == list(range(4 * per_segment))
    assert store.counts().used_bytes <= 4 * SEGMENT_BYTES


@pytest.mark.parametrize("name", [*IDENTITY, "page_bytes", "encryption"])
def test_another_identity_gives_no_hit_and_is_named(tmp_path: Path, name: str) -> None:
    """One field changed: 0 hits and a line that names it; the old pages still hit afterwards."""
    store = opened(tmp_path)
    put(store, range(5))
    store.close()
    changes: dict[str, Any] = {"identity": {**IDENTITY, name: "another"}}
    if name == "page_bytes":
        changes = {"page_bytes": PAGE_BYTES + 1}
    elif name == "encryption":
        pytest.importorskip("cryptography")
        changes = {"cache_key": bytes(32)}

    store = opened(tmp_path, **changes)
    report = store.start_report
    assert hits(store, range(5)) == []
    put(store, [7])
    store.close()

    assert name in report and "no pages" in report
    assert hits(opened(tmp_path), range(5)) == [0, 1, 2, 3, 4]


def test_encrypted_pages_need_their_key(tmp_path: Path) -> None:
    """With the key the pages are there, no byte of them is in the files; with another there are none."""
    pytest.importorskip("cryptography")
    store = opened(tmp_path, cache_key=b"k" * 32)
    put(store, range(5))
    get(store, 3)
    store.close()

    stored = b"".join(path.read_bytes() for path in segment_files(tmp_path))
    assert all(bytes(page(number))[:16] not in stored for number in range(5))
    with_key = opened(tmp_path, cache_key=b"k" * 32)
    assert hits(with_key, range(5)) == [0, 1, 2, 3, 4]
    with_key.close()
    assert hits(opened(tmp_path, cache_key=b"j" * 32), range(5)) == []


def test_names_in_files_are_keyed_and_files_are_private(tmp_path: Path) -> None:
    """No page hash is in the files; directories are 0700, files 0600; two directories differ in names."""
    names = []
    for directory in (tmp_path / "a", tmp_path / "b"):
        store = opened(directory)
        store.put_many([key(1, b"alice")], [page(1)], deadline=math.inf)
        names.append(store._names.name(hash_of(1)))
        store.close()
        for path in (directory, *directory.rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        content = b"".join(path.read_bytes() for path in segment_files(directory))
        assert hash_of(1) not in content and b"alice" not in content

    assert names[0] != names[1]


def test_a_second_writer_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    """While one store holds the directory another cannot write it; read-only it can be shared."""
    store = opened(tmp_path)
    put(store, [1])

    with pytest.raises(ConfigError, match=f"process {os.getpid()}.*readonly"):
        opened(tmp_path)
    reader = opened(tmp_path, read_only=True)
    assert hits(reader, [1]) == [1]
    assert put(reader, [2]) == [WriteOutcome.REFUSED]
    assert reader.counts().writing_off == "read only"
    reader.close()
    assert put(store, [2]) == [WriteOutcome.WRITTEN]


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    """The lock of a process that was killed is free at once."""
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from ramify.kv.stores.file_ops import OsFileOps\n"
        "from ramify.kv.stores.store_directory import lock_directory\n"
        "lock_directory(OsFileOps(), Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)

    assert child.returncode == -9 and (tmp_path / "lock").exists()
    assert put(opened(tmp_path), [1]) == [WriteOutcome.WRITTEN]


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    """Budget below two segments, a page larger than a segment, a directory of something else."""
    foreign = tmp_path / "home"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("")
    a_file = tmp_path / "file"
    a_file.write_text("")

    with pytest.raises(ConfigError, match=f"raise it to {2 * SEGMENT_BYTES}"):
        opened(tmp_path / "x", budget_bytes=2 * SEGMENT_BYTES - 1)
    with pytest.raises(ConfigError, match="does not fit"):
        opened(tmp_path / "x", page_bytes=SEGMENT_BYTES)
    with pytest.raises(ConfigError, match="no cache directory"):
        opened(foreign)
    with pytest.raises(ConfigError, match="choose another"):
        opened(a_file)
    with pytest.raises(ConfigError, match="does not exist"):
        opened(tmp_path / "missing", read_only=True)


def test_a_cache_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """A key file is private and has 16 bytes or more."""
    path = tmp_path / "key"
    path.write_bytes(hashlib.sha256(b"1").digest())
    path.chmod(0o644)

    with pytest.raises(ConfigError, match="chmod 600"):
        read_cache_key(path)
    path.chmod(0o600)
    assert len(read_cache_key(path)) == 32
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes"):
        read_cache_key(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cache_key(tmp_path / "missing")


def test_a_lost_key_file_is_a_cold_start(tmp_path: Path) -> None:
    """Without the key file no page is found; a new key is made and pages are written again."""
    store = opened(tmp_path)
    put(store, range(3))
    store.close()
    next(tmp_path.glob("*/key")).write_bytes(b"torn")

    store = opened(tmp_path)

    assert hits(store, range(3)) == []
    put(store, range(3))
    store.close()
    assert hits(opened(tmp_path), range(3)) == [0, 1, 2]


def test_a_key_file_that_cannot_be_read_is_kept(tmp_path: Path) -> None:
    """No descriptor left, or a failing disk: the start is refused, and a later one has every page."""
    store = opened(tmp_path)
    put(store, range(3))
    store.close()

    class NoKey(FailingOps):
        def open(self, path: Path, flags: int) -> int:
            if path.name == "key" and flags == os.O_RDONLY:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().open(path, flags)

    for read_only in (False, True):
        with pytest.raises(ConfigError, match="Too many open files"):
            opened(tmp_path, ops=NoKey(no_fault), read_only=read_only)

    assert hits(opened(tmp_path), range(3)) == [0, 1, 2]


def test_a_closed_store_answers_no_call(tmp_path: Path) -> None:
    """After close every call raises, a second close does nothing."""
    store = opened(tmp_path)
    store.close()
    store.close()

    with pytest.raises(StoreUnavailableError, match="closed"):
        get(store, 1)
    with pytest.raises(StoreUnavailableError, match="closed"):
        put(store, [1])
