"""Pages in one block of host memory, least recently used first out; and a store that fails on demand."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ramify.errors import ConfigError, StoreUnavailableError
from ramify.kv.stores.evicted_names import EvictedNames
from ramify.kv.stores.page_store import (
    PageKey,
    PageStore,
    ReadOutcome,
    StoreCounts,
    WriteOutcome,
    check_call,
)

Bytes = NDArray[np.uint8]


class MemoryStore:
    """Pages in host memory. A put evicts the least recently used page; a restart forgets all.

    Args:
        slab: num_pages * page_bytes writable bytes, pinned memory beside a GPU; None: allocated.
        clock: what deadlines are compared with.

    Raises:
        ConfigError: a size below 1, or a slab of another size.
    """

    tier = "host"

    def __init__(
        self,
        page_bytes: int,
        num_pages: int,
        *,
        slab: memoryview | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if page_bytes < 1 or num_pages < 1:
            raise ConfigError(
                f"page_bytes={page_bytes} and num_pages={num_pages} of a host tier must be at least 1"
            )
        if slab is not None and (slab.nbytes != page_bytes * num_pages or slab.readonly):
            raise ConfigError(
                f"a slab of {slab.nbytes} bytes for {num_pages} pages of {page_bytes}: pass "
                f"{num_pages * page_bytes} writable bytes"
            )
        self.page_bytes, self.num_pages, self._clock = page_bytes, num_pages, clock
        flat = (
            np.empty(page_bytes * num_pages, np.uint8)
            if slab is None
            else np.frombuffer(slab, np.uint8)
        )
        self._slots: Bytes = flat.reshape(num_pages, page_bytes)
        # Held during copies: a put may reuse the slot of any page.
        self._lock = threading.Lock()
        # Hash -> parent and slot, least recently used first.
        self._pages: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        self._free = deque(range(num_pages))
        self._evicted_names = EvictedNames()
        self._closed = False
        self._written = self._hits = self._absent = self._late = self._evicted = self._removed = 0

    def has_many(self, hashes: Sequence[bytes], *, deadline: float) -> list[bool]:
        """See PageStore."""
        del deadline
        with self._lock:
            self._check_open()
            return [page_hash in self._pages for page_hash in hashes]

    def were_evicted(self, hashes: Sequence[bytes]) -> list[bool]:
        """See PageStore."""
        with self._lock:
            return [page_hash in self._evicted_names for page_hash in hashes]

    def get_many(
        self, keys: Sequence[PageKey], into: Sequence[memoryview], *, deadline: float
    ) -> list[ReadOutcome]:
        """See PageStore."""
        check_call(keys, into, self.page_bytes)
        return [self._get(key, buffer, deadline) for key, buffer in zip(keys, into, strict=True)]

    def _get(self, key: PageKey, buffer: memoryview, deadline: float) -> ReadOutcome:
        with self._lock:
            self._check_open()
            if self._clock() > deadline:
                self._late += 1
                return ReadOutcome.LATE
            parent, slot = self._pages.get(key.hash, (b"", -1))
            if slot < 0:
                self._absent += 1
                return ReadOutcome.ABSENT
            if parent != key.parent:
                self._drop(key.hash)
                return ReadOutcome.CORRUPT
            np.copyto(np.frombuffer(buffer, np.uint8), self._slots[slot])
            self._pages.move_to_end(key.hash)
            self._hits += 1
            return ReadOutcome.HIT

    def read_any(self, into: Sequence[memoryview], *, deadline: float) -> int:
        """See PageStore. Slots with no page in them take as long."""
        del deadline
        with self._lock:
            self._check_open()
            for slot, buffer in zip(itertools.cycle(range(self.num_pages)), into, strict=False):
                np.copyto(np.frombuffer(buffer, np.uint8), self._slots[slot])
        return len(into)

    def put_many(
        self, keys: Sequence[PageKey], pages: Sequence[memoryview], *, deadline: float
    ) -> list[WriteOutcome]:
        """See PageStore."""
        check_call(keys, pages, self.page_bytes)
        return [self._put(key, page, deadline) for key, page in zip(keys, pages, strict=True)]

    def _put(self, key: PageKey, page: memoryview, deadline: float) -> WriteOutcome:
        with self._lock:
            self._check_open()
            if self._clock() > deadline:
                self._late += 1
                return WriteOutcome.LATE
            if key.hash in self._pages:
                self._pages.move_to_end(key.hash)
                return WriteOutcome.PRESENT
            if not self._free:
                oldest = next(iter(self._pages))
                self._drop(oldest)
                self._evicted_names.add([oldest])
                self._evicted += 1
            slot = self._free.popleft()
            np.copyto(self._slots[slot], np.frombuffer(page, np.uint8))
            self._pages[key.hash] = (key.parent, slot)
            self._evicted_names.discard(key.hash)
            self._written += 1
            return WriteOutcome.WRITTEN

    def remove_many(self, hashes: Sequence[bytes], *, deadline: float) -> int:
        """See PageStore."""
        del deadline
        with self._lock:
            self._check_open()
            listed = [page_hash for page_hash in dict.fromkeys(hashes) if page_hash in self._pages]
            for page_hash in hashes:
                self._evicted_names.discard(page_hash)
            for page_hash in listed:
                self._drop(page_hash)
            self._removed += len(listed)
            return len(listed)

    def clear(self, *, deadline: float) -> int:
        """See PageStore."""
        with self._lock:
            self._evicted_names.clear()
            listed = list(self._pages)
        return self.remove_many(listed, deadline=deadline)

    def maintain(self) -> None:
        """See PageStore; nothing is ever due."""

    def counts(self) -> StoreCounts:
        """See PageStore."""
        return StoreCounts(
            num_pages=len(self._pages),
            used_bytes=len(self._pages) * self.page_bytes,
            budget_bytes=self.num_pages * self.page_bytes,
            unavailable="closed" if self._closed else "",
            written_pages=self._written,
            hit_pages=self._hits,
            absent_pages=self._absent,
            late_pages=self._late,
            evicted_pages=self._evicted,
            removed_pages=self._removed,
        )

    def close(self) -> None:
        """See PageStore; forgets every page."""
        with self._lock:
            self._closed = True
            self._pages.clear()

    def _drop(self, page_hash: bytes) -> None:
        _, slot = self._pages.pop(page_hash)
        self._free.append(slot)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError("the host tier", "it is closed")


@dataclass(slots=True)
class StoreFaults:
    """What a FaultyStore does wrong from now on; tests change the fields between calls.

    Args:
        unavailable: the reason with which every call raises StoreUnavailableError; empty: none does.
        reads, writes: outcomes of these pages in place of the store's own.
        call_s, bytes_per_s: duration of a call, spent by `wait`; infinite bytes_per_s: none.
        wait: a virtual clock's in tests of scheduling.
        stuck: reads wait until it is set, whatever their deadline.
    """

    unavailable: str = ""
    reads: dict[bytes, ReadOutcome] = field(default_factory=dict)
    writes: dict[bytes, WriteOutcome] = field(default_factory=dict)
    call_s: float = 0.0
    bytes_per_s: float = float("inf")
    wait: Callable[[float], None] = time.sleep
    stuck: threading.Event | None = None


class FaultyStore:
    """A store with the faults of `StoreFaults` in front of it."""

    def __init__(self, inner: PageStore, faults: StoreFaults) -> None:
        self.inner, self.faults = inner, faults
        self.tier, self.page_bytes = inner.tier, inner.page_bytes

    def has_many(self, hashes: Sequence[bytes], *, deadline: float) -> list[bool]:
        """See PageStore."""
        self._before(0)
        return self.inner.has_many(hashes, deadline=deadline)

    def were_evicted(self, hashes: Sequence[bytes]) -> list[bool]:
        """See PageStore."""
        return self.inner.were_evicted(hashes)

    def get_many(
        self, keys: Sequence[PageKey], into: Sequence[memoryview], *, deadline: float
    ) -> list[ReadOutcome]:
        """See PageStore. The buffer of a page whose read fails is overwritten with 0xA5."""
        if self.faults.stuck is not None:
            self.faults.stuck.wait()
        self._before(len(keys))
        outcomes = self.inner.get_many(keys, into, deadline=deadline)
        faulty = {key.hash for key in keys} & self.faults.reads.keys()
        for index, key in enumerate(keys):
            if key.hash in faulty:
                outcomes[index] = self.faults.reads[key.hash]
                into[index][:] = b"\xa5" * self.page_bytes
        self._forget(page_hash for page_hash in faulty if not self.faults.reads[page_hash])
        return outcomes

    def read_any(self, into: Sequence[memoryview], *, deadline: float) -> int:
        """See PageStore."""
        if self.faults.stuck is not None:
            self.faults.stuck.wait()
        self._before(len(into))
        return self.inner.read_any(into, deadline=deadline)

    def put_many(
        self, keys: Sequence[PageKey], pages: Sequence[memoryview], *, deadline: float
    ) -> list[WriteOutcome]:
        """See PageStore."""
        self._before(len(keys))
        outcomes = [self.faults.writes.get(key.hash) for key in keys]
        taken = [index for index, outcome in enumerate(outcomes) if outcome is None]
        written = self.inner.put_many(
            [keys[index] for index in taken], [pages[index] for index in taken], deadline=deadline
        )
        by_index = dict(zip(taken, written, strict=True))
        return [
            by_index[index] if outcome is None else outcome
            for index, outcome in enumerate(outcomes)
        ]

    def remove_many(self, hashes: Sequence[bytes], *, deadline: float) -> int:
        """See PageStore."""
        self._before(0)
        return self.inner.remove_many(hashes, deadline=deadline)

    def clear(self, *, deadline: float) -> int:
        """See PageStore."""
        self._before(0)
        return self.inner.clear(deadline=deadline)

    def maintain(self) -> None:
        """See PageStore."""
        self.inner.maintain()

    def counts(self) -> StoreCounts:
        """See PageStore."""
        counts = self.inner.counts()
        return replace(counts, unavailable=self.faults.unavailable or counts.unavailable)

    def close(self) -> None:
        """See PageStore."""
        self.inner.close()

    def _before(self, num_pages: int) -> None:
        if self.faults.unavailable:
            raise StoreUnavailableError("the faulty store", self.faults.unavailable)
        seconds = self.faults.call_s + num_pages * self.page_bytes / self.faults.bytes_per_s
        if seconds:
            self.faults.wait(seconds)

    def _forget(self, hashes: Iterable[bytes]) -> None:
        """Remove pages from the store, except those that were late."""
        self.inner.remove_many(
            [h for h in hashes if self.faults.reads[h] is not ReadOutcome.LATE],
            deadline=float("inf"),
        )
