"""The mover's threads: order of writes, failures of stores, reads that hang, the end."""

import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.kv.mover_jobs import PageRead, PageWrite, ReadEnded, Removal, Removed, Result, Written
from ramify.kv.offload import Mover, MoverThreads, StoreJobs, WriterQueue
from ramify.kv.stores.memory import FaultyStore, MemoryStore, StoreFaults
from ramify.kv.stores.page_store import PageKey, ReadOutcome
from tests.budget import examples

PAGE_BYTES = 64
LIMIT_S = 20.0


class Setup:
    """A mover over one store whose faults the test changes."""

    def __init__(self) -> None:
        self.store = MemoryStore(PAGE_BYTES, 64)
        self.faults = StoreFaults()
        self.mover = MoverThreads([FaultyStore(self.store, self.faults)])

    def write(self, number: int) -> PageWrite:
        job = PageWrite(key(number), number, page(number), frozenset(["host"]))
        self.mover.write(deque([job]))
        return job

    def read(self, *numbers: int) -> PageRead:
        job = PageRead(
            0,
            range(len(numbers)),
            tuple(map(key, numbers)),
            tuple(numbers),
            tuple(memoryview(bytearray(PAGE_BYTES)) for _ in numbers),
            "host",
            time.monotonic() + LIMIT_S,
        )
        self.mover.read(job)
        return job

    def results(self, count: int) -> list[Result]:
        return results_of(self.mover, count)


def results_of(mover: Mover, count: int) -> list[Result]:
    """The next results, once there are so many."""
    results: list[Result] = []
    while len(results) < count:
        assert mover.wait(LIMIT_S)
        results += mover.take_results()
    return results


def key(number: int) -> PageKey:
    return PageKey(b"%016d" % number, b"%016d" % (number - 1))


def page(number: int) -> memoryview:
    return memoryview(bytearray([number]) * PAGE_BYTES)


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    assert setup.mover.close(LIMIT_S)


def test_what_was_written_is_read(setup: Setup) -> None:
    """Each page comes back as it was; each job has one result."""
    writes = [setup.write(number) for number in range(40)]
    written = setup.results(40)
    reads = [setup.read(*range(start, start + 8)) for start in range(0, 40, 8)]
    ended = setup.results(5)

    assert [result.write for result in written if isinstance(result, Written)] == writes
    assert all(result.outcomes["host"] for result in written if isinstance(result, Written))
    assert {result.read for result in ended if isinstance(result, ReadEnded)} == set(reads)
    for read in reads:
        assert [view.tolist() for view in read.views] == [[n] * PAGE_BYTES for n in read.buffers]


def test_a_removal_keeps_its_place_among_the_writes(setup: Setup) -> None:
    """A page that was queued before it is gone afterwards, one behind it stays."""
    setup.write(1)
    removal = Removal(None)
    setup.mover.remove(removal)
    setup.write(2)

    results = setup.results(3)

    assert [type(result) for result in results] == [Written, Removed, Written]
    assert setup.store.has_many([key(1).hash, key(2).hash], deadline=0.0) == [False, True]


@given(
    st.lists(st.tuples(st.sampled_from("wrc"), st.integers(0, 4), st.integers(0, 4)), max_size=25)
)
@settings(max_examples=examples(200))
def test_removals_that_go_together_leave_the_pages_that_they_would_one_by_one(steps) -> None:
    """A removal is carried out before writes of other pages only; a clear replaces those that wait."""
    queue, carried_out, alone = WriterQueue(), set[bytes](), set[bytes]()
    ended: list[PageWrite | Removal] = []
    jobs = [job_of(*step) for step in steps]
    for job in jobs:
        carry_out(job, alone)
        if isinstance(job, PageWrite):
            queue.move(deque([job]))
        else:
            ended += queue.put(job)

    while taken := queue.take():
        assert len({type(job) for job in taken}) == 1
        for job in taken:
            carry_out(job, carried_out)
            ended.append(job)

    assert carried_out == alone
    assert {id(job) for job in ended} == {id(job) for job in jobs} and len(ended) == len(jobs)


def job_of(kind: str, first: int, second: int) -> PageWrite | Removal:
    if kind == "w":
        return PageWrite(key(first), first, page(first), frozenset(["host"]))
    return Removal(None if kind == "c" else (key(first).hash, key(second).hash))


def carry_out(job: PageWrite | Removal, pages: set[bytes]) -> None:
    if isinstance(job, PageWrite):
        pages.add(job.key.hash)
    elif job.hashes is None:
        pages.clear()
    else:
        pages.difference_update(job.hashes)


class HangingStore(MemoryStore):
    """A store whose writes wait for `gate`, and which notes how many pages are removed at once."""

    def __init__(self) -> None:
        super().__init__(PAGE_BYTES, 64)
        self.gate, self.begun = threading.Event(), threading.Event()
        self.removals: list[int] = []

    def put_many(self, keys, pages, *, deadline):
        self.begun.set()
        self.gate.wait(LIMIT_S)
        return super().put_many(keys, pages, deadline=deadline)

    def remove_many(self, hashes, *, deadline):
        self.removals.append(len(hashes))
        return super().remove_many(hashes, deadline=deadline)


def test_removals_wait_for_a_hanging_writer_in_one_call() -> None:
    """Ten behind a write that hangs are one call of the store; one of all pages takes their place."""
    store = HangingStore()
    mover = MoverThreads([store])
    mover.write(deque([PageWrite(key(1), 1, page(1), frozenset(["host"]))]))
    assert store.begun.wait(LIMIT_S)
    replaced = [Removal((key(number).hash,)) for number in range(1000)]
    for removal in [*replaced, Removal(None)]:
        mover.remove(removal)

    ended = [*mover.take_results()]
    last = [Removal((key(number).hash,)) for number in range(10)]
    for removal in last:
        mover.remove(removal)
    store.gate.set()
    assert mover.close(LIMIT_S)

    assert [result.removal for result in ended if isinstance(result, Removed)] == replaced
    assert len([result for result in mover.take_results() if isinstance(result, Removed)]) == 11
    assert store.removals[-1] == 10
    assert store.counts().num_pages == 0


def test_a_store_that_is_gone_loses_the_page_and_nothing_else(setup: Setup) -> None:
    """The job ends, its buffer is free; a removal says which store may still have the pages."""
    setup.faults.unavailable = "gone"
    setup.write(1)
    setup.mover.remove(Removal((key(1).hash,)))
    setup.read(1)

    results = setup.results(3)

    by_type = {type(result): result for result in results}
    written, removed, ended = by_type[Written], by_type[Removed], by_type[ReadEnded]
    assert isinstance(written, Written)
    assert written.outcomes == {}
    assert isinstance(removed, Removed)
    assert removed.failed == ("host",)
    assert isinstance(ended, ReadEnded)
    assert ended.outcomes == (ReadOutcome.IO_ERROR,)
    setup.faults.unavailable = ""


def test_a_bug_of_a_store_ends_no_thread(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises, the next job is carried out."""

    def fail(*_: object, **__: object) -> list[object]:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(setup.store, "get_many", fail)
        patch.setattr(setup.store, "put_many", fail)
        setup.write(1)
        setup.read(1)
        setup.results(2)
    setup.write(2)
    setup.results(1)
    setup.read(2)

    [ended] = setup.results(1)
    assert isinstance(ended, ReadEnded)
    assert ended.outcomes == (ReadOutcome.HIT,)


def test_reads_that_hang_hold_up_neither_writes_nor_the_end() -> None:
    """All readers hang; the writer goes on, and `close` returns."""
    setup = Setup()
    stuck = threading.Event()
    setup.faults.stuck = stuck
    for number in range(8):
        setup.read(number)

    setup.write(1)
    [written] = setup.results(1)
    closed = setup.mover.close(LIMIT_S)
    stuck.set()

    assert isinstance(written, Written)
    assert closed


@pytest.mark.parametrize("call", ["maintain", "close"])
def test_a_store_that_cannot_be_maintained_or_closed_holds_up_no_other(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises is logged, and the stores behind it do what is due."""
    stores = [MemoryStore(PAGE_BYTES, 1), MemoryStore(PAGE_BYTES, 1)]
    stores[1].tier = "disk"
    done = []

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(stores[0], call, fail)
    monkeypatch.setattr(stores[1], call, lambda: done.append("disk"))
    jobs = StoreJobs(stores)

    {"maintain": jobs.maintain, "close": jobs.close}[call]()

    assert done == ["disk"]
    assert f"host tier was not {call.removesuffix('e')}" in caplog.text


def test_a_write_that_hangs_does_not_hold_up_the_end() -> None:
    """`close` says within its limit that the writer has not finished; its thread keeps no process alive."""
    setup = Setup()
    hanging, go_on = threading.Event(), threading.Event()

    def hang(_: float) -> None:
        hanging.set()
        go_on.wait(LIMIT_S)

    setup.faults.call_s, setup.faults.wait = 1.0, hang
    setup.write(1)
    assert hanging.wait(LIMIT_S)

    is_closed = setup.mover.close(0.05)

    assert not is_closed
    assert all(thread.daemon for thread in threading.enumerate() if "tier-w" in thread.name)
    go_on.set()
    assert setup.mover.close(LIMIT_S)


def test_close_writes_what_is_queued(setup: Setup) -> None:
    """And closes the store; a second call does nothing."""
    setup.faults.call_s = 0.001
    for number in range(20):
        setup.write(number)

    assert setup.mover.close(LIMIT_S)

    assert setup.store.counts().written_pages == 20
    assert setup.store.counts().unavailable == "closed"
