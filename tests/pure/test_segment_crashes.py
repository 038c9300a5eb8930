"""Processes that are killed and machines that lose power: what was acknowledged is found, nothing is wrong."""

import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.kv.stores.page_store import WriteOutcome
from ramify.kv.stores.segments import SegmentStore
from tests.budget import examples
from tests.pure.file_faults import PowerLossOps
from tests.pure.store_cases import (
    PAGE_BYTES,
    SEGMENT_BYTES,
    crash,
    hash_of,
    hits,
    opened,
    put,
    segment_files,
    slots_per_segment,
)

ROOT = Path(__file__).resolve().parents[2]

# Writes pages of 4 KiB, reads and removes some, and acknowledges each on stdout once the store has.
WRITER = """
import sys
from pathlib import Path
from tests.pure.store_cases import *
store = opened(Path(sys.argv[1]), page_bytes=4096, segment_bytes=1 << 20, budget_bytes=1 << 30)
number = int(sys.argv[2])
out = sys.stdout
while True:
    numbers = range(number, number + 3)
    if all(put(store, numbers)):
        out.write("".join(f"written {n}\\n" for n in numbers))
        out.flush()
    if number % 5 == 0:
        # Announced before: a removal under way may or may not have happened.
        out.write(f"removing {number}\\n")
        out.flush()
        store.remove_many([hash_of(number)], deadline=math.inf)
        out.write(f"removed {number}\\n")
        out.flush()
    hits(store, [max(number - 7, 0)])
    store.maintain()
    number += 3
"""


def kill_rounds(directory: Path, num_rounds: int) -> None:
    rng = random.Random(num_rounds)
    written: set[int] = set()
    removed: set[int] = set()
    removing: set[int] = set()
    number = 0
    for _ in range(num_rounds):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory), str(number)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        )
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        time.sleep(rng.random() * 0.1)
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
        child.wait()
        child.stdout.close()
        for line in lines:
            # The last line may be cut.
            if line.endswith("\n"):
                verb, page_number = line.split()
                sets = {"written": written, "removing": removing, "removed": removed}
                sets[verb].add(int(page_number))
        start = time.perf_counter()
        store = opened(directory, page_bytes=4096, segment_bytes=1 << 20, budget_bytes=1 << 30)
        assert time.perf_counter() - start < 2
        assert store.counts().evicted_pages == 0
        expected = sorted(written - removing)
        recent = expected[-600:]
        assert hits(store, recent) == recent
        assert store.has_many([hash_of(n) for n in expected], deadline=math.inf) == [True] * len(
            expected
        )
        assert hits(store, sorted(removed)[-100:]) == []
        store.close()
        number = max(written, default=0) + 10
    assert len(written) > num_rounds and removed


def test_no_acknowledged_page_is_lost_in_five_kills(tmp_path: Path) -> None:
    """SIGKILL at random moments: every page acknowledged as written is found and right, none removed is."""
    kill_rounds(tmp_path, 5)


@pytest.mark.timeout(1800)
def test_no_acknowledged_page_is_lost_in_two_hundred_kills(tmp_path: Path) -> None:
    """The same, two hundred times on one directory."""
    kill_rounds(tmp_path, 200)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 20)),
        st.tuples(st.just("sync"), st.none()),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("put back"), st.integers(0, 30)),
        st.tuples(st.just("read"), st.integers(0, 30)),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("kill"), st.none()),
        st.tuples(st.just("lose power"), st.integers(0, 2**32)),
        st.tuples(st.just("failed fsync"), st.none()),
    ),
    min_size=2,
    max_size=25,
)


# Bytes of a page and of a segment: 30 records in 16 KiB; 9 records in 64 KiB, each over two or three
# blocks, so that a loss of power tears pages and not only whole records.
SHAPES = {"small": (PAGE_BYTES, SEGMENT_BYTES), "torn": (6000, 65536)}


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=examples(600), deadline=None)
@given(steps=STEPS, num_segments=st.sampled_from([2, 3, 64]))
def test_no_durable_page_is_lost_with_the_power(
    shape: str, steps: list[tuple[str, int | None]], num_segments: int
) -> None:
    """Any unsynced block may be lost or torn: durable pages that were not evicted are found, none is wrong.

    And no page that was removed returns. Small budgets evict segments and move their hot pages.
    """
    page_bytes, segment_bytes = SHAPES[shape]
    with tempfile.TemporaryDirectory() as name:
        _run_steps(
            Path(name),
            steps,
            page_bytes=page_bytes,
            segment_bytes=segment_bytes,
            budget_bytes=num_segments * segment_bytes,
        )


def _run_steps(directory: Path, steps: list[tuple[str, int | None]], **sizes: Any) -> None:
    ops = PowerLossOps()
    store = opened(directory, ops=ops, **sizes)
    number = 0
    durable: set[int] = set()
    removed: set[int] = set()
    for step, argument in (*steps, ("lose power", 7)):
        if step == "put":
            numbers = range(number, number + (argument or 0))
            number = numbers.stop
            put(store, numbers)
        elif step == "sync":
            store.sync()
        elif step == "remove":
            assert argument is not None
            store.remove_many([hash_of(argument)], deadline=math.inf)
            if argument < number:
                removed.add(argument)
                durable.discard(argument)
        elif step == "put back":
            assert argument is not None
            if argument in removed:
                put(store, [argument])
                removed.discard(argument)
        elif step == "read":
            hits(store, range(argument or 0))
        elif step == "failed fsync":
            ops.datasync_fails = True
            if not store.sync():
                # The segment is gone with every page in it.
                durable = set(hits(store, durable))
            ops.datasync_fails = False
        else:
            if step == "restart":
                store.close()
                durable |= kept_by(directory, number, **sizes)
            else:
                crash(store)
            if step == "lose power":
                ops.lose_power(random.Random(argument))
                ops = PowerLossOps()
            store = opened(directory, ops=ops, **sizes)
            kept = set(hits(store, range(number)))
            assert durable <= kept
            assert not kept & removed
        listed = store.has_many([hash_of(n) for n in range(number)], deadline=math.inf)
        durable |= durable_in(store, number)
        durable = {n for n in durable if listed[n]}
    store.close()


class Everything(random.Random):
    """Draws with which every unsynced block is lost."""

    def choice(self, values):
        return values[-1]

    def random(self) -> float:
        return 0.0


def test_durable_pages_that_move_on_stay_durable(tmp_path: Path) -> None:
    """A hot page is durable in its new segment before its old one is deleted."""
    per_segment = slots_per_segment()
    ops = PowerLossOps()
    store = opened(tmp_path, ops=ops, budget_bytes=3 * SEGMENT_BYTES)
    put(store, range(per_segment))
    hot = list(range(0, per_segment, 2))
    number = 1000
    store.sync()
    assert hits(store, hot) == hot

    while not store.counts().copied_pages:
        put(store, [number])
        number += 1
    assert store.counts().evicted_pages
    crash(store)
    ops.lose_power(Everything())

    assert hits(opened(tmp_path, budget_bytes=3 * SEGMENT_BYTES), hot) == hot


def test_a_torn_copy_gives_way_to_the_whole_one(tmp_path: Path) -> None:
    """A page that was being moved when the power went is in two segments: the intact one is read."""
    store = opened(tmp_path)
    put(store, range(slots_per_segment() + 1))
    name = store._names.name(hash_of(3))
    store._table.remove_many([name])
    put(store, [3])
    segment, slot = store._table.find(name) or pytest.fail("not listed")
    crash(store)
    with segment.path.open("r+b") as file:
        file.seek(segment.geometry.offset(slot) + 100)
        file.write(bytes(50))

    store = opened(tmp_path)

    assert hits(store, range(slots_per_segment() + 1)) == list(range(slots_per_segment() + 1))
    assert store.counts().errors == ()
    # A removal voids both.
    store.remove_many([hash_of(3)], deadline=math.inf)
    store.close()
    assert hits(opened(tmp_path), [3]) == []


def test_a_removal_voids_no_record_written_after_a_loss_of_power(tmp_path: Path) -> None:
    """The segment may be shorter after the loss than it was when the page was removed."""
    ops = PowerLossOps()
    store = opened(tmp_path, ops=ops)
    put(store, [0])
    store.sync()
    put(store, range(1, 8))
    store.remove_many([hash_of(0)], deadline=math.inf)
    crash(store)
    ops.lose_power(Everything())

    store = opened(tmp_path)
    assert hits(store, [0]) == []
    assert all(put(store, [0]))
    store.close()

    assert hits(opened(tmp_path), [0]) == [0]


def test_records_behind_a_torn_one_stay_void(tmp_path: Path) -> None:
    """What lay behind a torn record does not come back once the segment has grown past it."""
    store = opened(tmp_path)
    put(store, range(5))
    crash(store)
    with segment_files(tmp_path)[0].open("r+b") as file:
        file.seek(store._writer._geometry.offset(2))
        file.write(bytes(64))
    store = opened(tmp_path)
    assert hits(store, range(5)) == [0, 1]

    store.remove_many([hash_of(4)], deadline=math.inf)
    put(store, [10, 11])
    crash(store)

    assert hits(opened(tmp_path), [0, 1, 2, 3, 4, 10, 11]) == [0, 1, 10, 11]


def durable_in(store: SegmentStore, count: int) -> set[int]:
    """The pages that the store has made durable: in sealed segments, or before the last sync."""
    writer = store._writer
    pages = set()
    for number in range(count):
        location = store._table.find(store._names.name(hash_of(number)))
        if location is not None:
            segment, slot = location
            is_active = segment is writer._active
            synced = segment.num_used - writer._num_unsynced if is_active else 0
            if segment.is_sealed or slot < synced:
                pages.add(number)
    return pages


def kept_by(directory: Path, count: int, **sizes: Any) -> set[int]:
    """The pages that another process reads."""
    reader = opened(directory, read_only=True, **sizes)
    kept = set(hits(reader, range(count)))
    reader.close()
    return kept


@pytest.mark.parametrize("seed", range(5))
def test_a_hot_page_is_durable_where_it_moved_to(tmp_path: Path, seed: int) -> None:
    """A durable page whose segment is evicted is durable elsewhere before the segment's file is deleted."""
    per_segment = slots_per_segment()
    ops = PowerLossOps()
    store = opened(tmp_path, ops=ops, budget_bytes=3 * SEGMENT_BYTES)
    put(store, range(per_segment))
    hot = hits(store, range(0, per_segment, 3))
    number = 1000
    while not store.counts().copied_pages:
        put(store, [number])
        number += 1

    crash(store)
    ops.lose_power(random.Random(seed))

    assert hits(opened(tmp_path, budget_bytes=3 * SEGMENT_BYTES), hot) == hot


def test_records_torn_by_a_crash_are_not_listed(tmp_path: Path) -> None:
    """Headers whose payload is torn: the pages are written again, and never drop the durable ones beside them."""
    store = opened(tmp_path)
    put(store, range(5))
    store.sync()
    put(store, range(5, 10))
    geometry = store._writer._geometry
    crash(store)
    with segment_files(tmp_path)[0].open("r+b") as file:
        for slot in (5, 6, 8, 9):
            file.seek(geometry.offset(slot) + 150)
            file.write(bytes(50))

    store = opened(tmp_path)

    assert put(store, range(10)) == [
        *[WriteOutcome.PRESENT] * 5,
        *[WriteOutcome.WRITTEN] * 2,
        WriteOutcome.PRESENT,
        *[WriteOutcome.WRITTEN] * 2,
    ]
    assert hits(store, range(10)) == list(range(10))
    assert store.counts().errors == ()
    store.close()
    assert hits(opened(tmp_path), range(10)) == list(range(10))


class LoseAll(random.Random):
    """Draws with which a loss of power undoes everything that was not synced."""

    def random(self) -> float:
        return 0.0

    def choice(self, seq: Any) -> Any:
        return seq[-1]


def test_a_page_written_again_after_a_removal_is_durable(tmp_path: Path) -> None:
    """Killed, removed after the restart, then the power goes: slots used again are after the removal."""
    ops = PowerLossOps()
    store = opened(tmp_path, ops=ops)
    put(store, range(5))
    store.sync()
    put(store, range(5, 20))
    crash(store)
    store = opened(tmp_path, ops=ops)
    store.remove_many([hash_of(0)], deadline=math.inf)
    crash(store)
    ops.lose_power(LoseAll())

    store = opened(tmp_path)
    put(store, [0])
    store.close()

    assert hits(opened(tmp_path), [0, 1]) == [0, 1]


def test_pages_of_a_killed_process_become_durable_without_a_write(tmp_path: Path) -> None:
    """What a process left unsynced is synced by the next one, though it writes nothing."""
    ops = PowerLossOps()
    store = opened(tmp_path, ops=ops)
    put(store, range(5))
    crash(store)
    store = opened(tmp_path, ops=ops)

    store.maintain()
    crash(store)
    ops.lose_power(LoseAll())

    assert store.counts().durable_pages == 5
    assert hits(opened(tmp_path), range(5)) == [0, 1, 2, 3, 4]


def test_the_power_loss_layer_loses_something(tmp_path: Path) -> None:
    """The fake itself: with nothing synced, some draws lose pages and some tear them."""
    outcomes = set()
    for seed in range(20):
        ops = PowerLossOps()
        store = opened(tmp_path / str(seed), ops=ops)
        put(store, range(slots_per_segment()))
        crash(store)
        ops.lose_power(random.Random(seed))
        outcomes.add(len(hits(opened(tmp_path / str(seed)), range(slots_per_segment()))))

    assert len(outcomes) > 2 and min(outcomes) < slots_per_segment() == max(outcomes)
