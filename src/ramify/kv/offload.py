"""The mover: threads that carry staging buffers to and from page stores; decides nothing.

One writer keeps writes, removals and clears in order. Readers take batches in any order. The results
wait until the thread that owns the pool takes them; until then, a buffer belongs to its job.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from ramify.errors import StoreUnavailableError
from ramify.kv.mover_jobs import (
    LookedUp,
    PageLookUp,
    PageRead,
    PageWrite,
    Probe,
    ProbeEnded,
    ReadEnded,
    ReaderJob,
    Removal,
    Removed,
    Result,
    Written,
)
from ramify.kv.stores.page_store import PageStore, ReadOutcome, WriteOutcome

logger = logging.getLogger(__name__)

NUM_READERS = 4
MAX_WRITES = 16  # pages of one `put_many`
WRITE_LIMIT_S = 30.0  # for one `put_many`
PROBE_PAGES = 8  # of the longest read of a probe
PROBE_BYTES = 16 << 20
MAINTAIN_S = 1.0


class Mover(Protocol):
    """Carries jobs out, in other threads or later; `MoverThreads`, and a fake in tests."""

    def write(self, waiting: deque[PageWrite]) -> None:
        """Take all writes out of `waiting`, and queue them in this order; all are of the same tiers' lane.

        Whatever interrupts the call, each of them is either queued or still in `waiting`.
        """

    def remove(self, removal: Removal) -> None:
        """Queue a removal behind the writes that were queued before."""

    def read(self, job: ReaderJob) -> None:
        """Queue a job of the readers; a look-up goes before all others, for it is short."""

    def take_results(self) -> Iterable[Result]:
        """Take the results one by one: those that the caller does not reach are left for the next call."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for a result; returns whether there is one."""

    def close(self, timeout_s: float) -> bool:
        """Carry out what the writer has, then close the stores; returns whether that was in time."""


class StoreJobs:
    """Carries single jobs out, in the caller's thread.

    Args:
        stores: by tier.
    """

    def __init__(self, stores: Sequence[PageStore]) -> None:
        self._stores = {store.tier: store for store in stores}

    def write(self, writes: Sequence[PageWrite]) -> list[Written]:
        """Put pages into each store that they are for."""
        begin_s = time.thread_time()
        outcomes: list[dict[str, WriteOutcome]] = [{} for _ in writes]
        for tier, store in self._stores.items():
            mine = [index for index, write in enumerate(writes) if tier in write.tiers]
            if not mine:
                continue
            try:
                written = store.put_many(
                    [writes[index].key for index in mine],
                    [writes[index].data for index in mine],
                    deadline=time.monotonic() + WRITE_LIMIT_S,
                )
            except StoreUnavailableError as error:
                logger.debug("%d pages were not written: %s", len(mine), error)
                continue
            except Exception:
                logger.exception("%d pages were not written to the %s tier", len(mine), tier)
                continue
            for index, outcome in zip(mine, written, strict=True):
                outcomes[index][tier] = outcome
        cpu_s = (time.thread_time() - begin_s) / len(writes)
        return [
            Written(write, by_tier, cpu_s) for write, by_tier in zip(writes, outcomes, strict=True)
        ]

    def run(self, job: ReaderJob) -> ReadEnded | ProbeEnded | LookedUp:
        """Carry out a job of the readers."""
        match job:
            case PageRead():
                return self.read(job)
            case Probe():
                return self.probe(job)
            case PageLookUp():
                return self.look_up(job)

    def read(self, read: PageRead) -> ReadEnded:
        """Read pages of one store; a store that does not answer lacks them."""
        begin_s = time.monotonic()
        try:
            store = self._stores[read.tier]
            outcomes = tuple(store.get_many(read.keys, read.views, deadline=read.deadline))
        except StoreUnavailableError as error:
            logger.debug("%d pages were not read: %s", len(read.keys), error)
            outcomes = (ReadOutcome.IO_ERROR,) * len(read.keys)
        except Exception:
            logger.exception("%d pages were not read from the %s tier", len(read.keys), read.tier)
            outcomes = (ReadOutcome.IO_ERROR,) * len(read.keys)
        return ReadEnded(read, outcomes, begin_s, time.monotonic())

    def probe(self, probe: Probe) -> ProbeEnded:
        """Time two reads of a page, and one of several pages."""
        reads: list[tuple[int, float]] = []
        try:
            store = self._stores[probe.tier]
            num_pages = max(1, min(PROBE_PAGES, PROBE_BYTES // store.page_bytes))
            # Written to once, so that no read is charged for the memory.
            pages = [memoryview(bytearray(b"\1" * store.page_bytes)) for _ in range(num_pages)]
            for into in (pages[:1], pages[:1], pages):
                begin_s = time.monotonic()
                if begin_s > probe.deadline:
                    break
                if num_read := store.read_any(into, deadline=probe.deadline):
                    reads.append((num_read, time.monotonic() - begin_s))
        except StoreUnavailableError as error:
            logger.debug("the %s tier was not measured: %s", probe.tier, error)
        except Exception:
            logger.exception("the %s tier was not measured", probe.tier)
        return ProbeEnded(probe, tuple(reads))

    def look_up(self, job: PageLookUp) -> LookedUp:
        """Ask a store which pages it lists."""
        try:
            listed = self._stores[job.tier].has_many(job.hashes, deadline=job.deadline)
        except StoreUnavailableError as error:
            logger.debug("%d pages were not looked up: %s", len(job.hashes), error)
        except Exception:
            logger.exception("pages were not looked up in the %s tier", job.tier)
        else:
            return LookedUp(job, tuple(listed), time.monotonic())
        return LookedUp(job, None, time.monotonic())

    def remove(self, hashes: Sequence[bytes] | None) -> tuple[str, ...]:
        """Remove pages from all stores; None: all pages. Returns the tiers that may still have them."""
        failed = []
        for tier, store in self._stores.items():
            try:
                limit_s = time.monotonic() + WRITE_LIMIT_S
                if hashes is None:
                    store.clear(deadline=limit_s)
                else:
                    store.remove_many(hashes, deadline=limit_s)
            except Exception as error:  # noqa: BLE001 - whatever it is, the pages may be there
                logger.warning("pages were not removed from the %s tier: %s", tier, error)
                failed.append(tier)
        return tuple(failed)

    def maintain(self) -> None:
        """Let every store do what is due."""
        for tier, store in self._stores.items():
            try:
                store.maintain()
            except Exception:
                # A bug of one store must not end the writer of all.
                logger.exception("the %s tier was not maintained", tier)

    def close(self) -> None:
        """Close every store."""
        for tier, store in self._stores.items():
            try:
                store.close()
            except StoreUnavailableError as error:
                logger.debug("the %s tier was not closed: %s", tier, error)
            except Exception:
                # The stores behind it have pages to make durable.
                logger.exception("the %s tier was not closed", tier)


class ResultQueue:
    """Results of the threads of one or several movers."""

    def __init__(self) -> None:
        self._results: deque[Result] = deque()
        self._lock = threading.Lock()
        self._has_results = threading.Condition(self._lock)

    def put(self, results: Sequence[Result]) -> None:
        """Append results, and wake who waits."""
        with self._lock:  # as in `MoverThreads`
            self._results.extend(results)
            self._has_results.notify_all()

    def take(self) -> Iterator[Result]:
        """Take the results one by one, until there is none."""
        while self._results:
            yield self._results.popleft()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a result; returns whether there is one."""
        with self._lock:
            return self._has_results.wait_for(lambda: bool(self._results), timeout_s)


class WriterQueue:
    """The jobs of a writer: a write per staging buffer at most, and removals. Not locked: its owner is.

    Nothing bounds removals while a store hangs but that a removal of all pages takes the place of those
    that wait: `EngineTiering` sends one before there are too many.
    """

    def __init__(self) -> None:
        self._jobs: deque[PageWrite | Removal] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def move(self, waiting: deque[PageWrite]) -> None:
        """Move writes to the end of the queue, in one call of C: no signal comes between out and in."""
        self._jobs.extend(islice(iter(waiting.popleft, None), len(waiting)))

    def put(self, removal: Removal) -> list[Removal]:
        """Append a removal; returns those that it makes needless, which leave the queue."""
        needless: list[Removal] = []
        if removal.hashes is None:
            needless = [waiting for waiting in self._jobs if isinstance(waiting, Removal)]
            self._jobs = deque(item for item in self._jobs if isinstance(item, PageWrite))
        self._jobs.append(removal)
        return needless

    def take(self) -> list[PageWrite] | list[Removal]:
        """The next jobs, of one kind; none: the queue is empty."""
        if self._jobs and isinstance(self._jobs[0], Removal):
            return self._take_removals()
        writes: list[PageWrite] = []
        while self._jobs and len(writes) < MAX_WRITES and isinstance(self._jobs[0], PageWrite):
            job = self._jobs.popleft()
            assert isinstance(job, PageWrite)
            writes.append(job)
        return writes

    def _take_removals(self) -> list[Removal]:
        """The first removal, and others that no write of one of their pages precedes: one fsync for all."""
        first = self._jobs.popleft()
        assert isinstance(first, Removal)
        removals, left = [first], deque[PageWrite | Removal]()
        written: set[bytes] = set()
        is_open = first.hashes is not None
        for job in self._jobs:
            if isinstance(job, PageWrite):
                written.add(job.key.hash)
                left.append(job)
            elif is_open and job.hashes is not None and written.isdisjoint(job.hashes):
                removals.append(job)
            else:
                is_open = is_open and job.hashes is not None
                left.append(job)
        self._jobs = left
        return removals


class MoverThreads:
    """A writer, and up to `NUM_READERS` readers. Queues hold a job per staging buffer, and removals.

    The threads are daemons: a call that never returns does not keep the process alive.

    Args:
        results: where results go, if other movers share it.
    """

    def __init__(self, stores: Sequence[PageStore], results: ResultQueue | None = None) -> None:
        self._jobs = StoreJobs(stores)
        self._results = ResultQueue() if results is None else results
        # One lock, and a condition for each kind of thread: a page to write wakes no reader. The lock is
        # entered, never a condition: `Condition.__enter__` is Python, and an interrupt in it would leave
        # the lock held.
        self._lock = threading.Lock()
        self._to_write = threading.Condition(self._lock)
        self._to_read = threading.Condition(self._lock)
        self._writes = WriterQueue()
        self._reads: deque[ReaderJob] = deque()
        self._is_closing = False
        self._num_idle_readers = 0
        self._readers: list[threading.Thread] = []
        # Starts at once: stores need `maintain`, and the close at the end.
        self._writer = threading.Thread(target=self._run_writer, name="ramify-tier-w", daemon=True)
        self._writer.start()

    def write(self, waiting: deque[PageWrite]) -> None:
        """See `Mover.write`."""
        with self._lock:
            self._writes.move(waiting)
            self._to_write.notify()

    def remove(self, removal: Removal) -> None:
        """See `Mover.remove`."""
        with self._lock:
            needless = self._writes.put(removal)
            self._to_write.notify()
        if needless:
            self._results.put([Removed(other, ()) for other in needless])

    def read(self, job: ReaderJob) -> None:
        """See `Mover.read`."""
        with self._lock:
            if isinstance(job, PageLookUp):
                self._reads.appendleft(job)
            else:
                self._reads.append(job)
            if self._num_idle_readers < len(self._reads) and len(self._readers) < NUM_READERS:
                name = f"ramify-tier-r{len(self._readers)}"
                reader = threading.Thread(target=self._run_reader, name=name, daemon=True)
                self._readers.append(reader)
                reader.start()
            self._to_read.notify()

    def take_results(self) -> Iterable[Result]:
        """See `Mover.take_results`."""
        return self._results.take()

    def wait(self, timeout_s: float) -> bool:
        """See `Mover.wait`."""
        return self._results.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """See `Mover.close`."""
        self.begin_close()
        self._writer.join(max(0.0, timeout_s))
        return not self._writer.is_alive()

    def begin_close(self) -> None:
        """Let the threads end; `close` waits for that."""
        with self._lock:
            self._is_closing = True
            self._to_write.notify_all()
            self._to_read.notify_all()

    def _run_reader(self) -> None:
        _lower_priority()
        while True:
            with self._lock:
                self._num_idle_readers += 1
                while not self._reads and not self._is_closing:
                    self._to_read.wait()
                self._num_idle_readers -= 1
                if self._is_closing:
                    return
                job = self._reads.popleft()
            self._results.put([self._jobs.run(job)])

    def _run_writer(self) -> None:
        _lower_priority()
        maintained_s = time.monotonic()
        while True:
            with self._lock:
                if not self._writes and not self._is_closing:
                    self._to_write.wait(MAINTAIN_S)
                jobs = self._writes.take()
                is_over = self._is_closing and not jobs
            if is_over:
                self._jobs.close()
                return
            self._carry_out(jobs)
            if time.monotonic() >= maintained_s + MAINTAIN_S:
                maintained_s = time.monotonic()
                self._jobs.maintain()

    def _carry_out(self, jobs: Sequence[PageWrite] | Sequence[Removal]) -> None:
        writes = [job for job in jobs if isinstance(job, PageWrite)]
        removals = [job for job in jobs if isinstance(job, Removal)]
        if writes:
            self._results.put(self._jobs.write(writes))
        if removals:
            pages = None
            if removals[0].hashes is not None:
                pages = [page for removal in removals for page in removal.hashes or ()]
            failed = self._jobs.remove(pages)
            self._results.put([Removed(removal, failed) for removal in removals])


def _lower_priority() -> None:
    """Let this thread run when others do not: the forward pass needs the cores."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
