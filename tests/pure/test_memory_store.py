"""The host tier, and the faults that tests of the tiers inject into any store."""

import math

import pytest

from ramify.errors import ConfigError, StoreUnavailableError
from ramify.kv.stores.evicted_names import EvictedNames
from ramify.kv.stores.memory import FaultyStore, MemoryStore, StoreFaults
from ramify.kv.stores.page_store import PageKey, PageStore, ReadOutcome, WriteOutcome

PAGE_BYTES = 64


def key(number: int) -> PageKey:
    return PageKey(bytes([number]) * 16, bytes([number - 1]) * 16)


def page(number: int) -> memoryview:
    return memoryview(bytes([number]) * PAGE_BYTES)


def put(store: PageStore, *numbers: int) -> list[WriteOutcome]:
    return store.put_many([key(n) for n in numbers], [page(n) for n in numbers], deadline=math.inf)


def get(store: PageStore, number: int, *, deadline: float = math.inf) -> tuple[ReadOutcome, bytes]:
    buffer = memoryview(bytearray(PAGE_BYTES))
    return store.get_many([key(number)], [buffer], deadline=deadline)[0], bytes(buffer)


def test_a_page_comes_back_as_it_was_put() -> None:
    """What was put is read, byte for byte; a second put of the same page stores nothing."""
    store = MemoryStore(PAGE_BYTES, 4)

    first, second = put(store, 1, 2), put(store, 2)

    assert first == [WriteOutcome.WRITTEN] * 2 and second == [WriteOutcome.PRESENT]
    assert get(store, 1) == (ReadOutcome.HIT, bytes(page(1)))
    assert get(store, 2) == (ReadOutcome.HIT, bytes(page(2)))
    assert store.has_many([key(1).hash, key(3).hash], deadline=math.inf) == [True, False]


def test_the_least_recently_used_page_makes_room() -> None:
    """A full tier evicts the page that was neither put nor read for the longest time."""
    store = MemoryStore(PAGE_BYTES, 2, slab=memoryview(bytearray(2 * PAGE_BYTES)))
    put(store, 1, 2)
    get(store, 1)

    put(store, 3)

    assert get(store, 1)[0] and get(store, 3)[0]
    assert get(store, 2)[0] is ReadOutcome.ABSENT
    assert store.counts().evicted_pages == 1


def test_a_page_after_another_parent_is_no_hit() -> None:
    """A hash that stands after another page is a collision: CORRUPT, and gone from the index."""
    store = MemoryStore(PAGE_BYTES, 2)
    put(store, 1)
    other = PageKey(key(1).hash, key(7).hash)

    outcome = store.get_many([other], [memoryview(bytearray(PAGE_BYTES))], deadline=math.inf)

    assert outcome == [ReadOutcome.CORRUPT]
    assert get(store, 1)[0] is ReadOutcome.ABSENT


def test_removed_pages_and_closed_stores_give_nothing() -> None:
    """remove_many counts what was listed; after close every call says so."""
    store = MemoryStore(PAGE_BYTES, 2)
    put(store, 1)

    assert store.remove_many([key(1).hash, key(2).hash], deadline=math.inf) == 1
    assert get(store, 1)[0] is ReadOutcome.ABSENT
    store.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        put(store, 1)


def test_a_passed_deadline_reads_and_writes_nothing() -> None:
    """Pages not started by the deadline are LATE and stay listed."""
    store = MemoryStore(PAGE_BYTES, 2)
    put(store, 1)

    assert get(store, 1, deadline=-1.0)[0] is ReadOutcome.LATE
    assert store.put_many([key(2)], [page(2)], deadline=-1.0) == [WriteOutcome.LATE]
    assert store.has_many([key(1).hash, key(2).hash], deadline=math.inf) == [True, False]


@pytest.mark.parametrize("buffers", [[], [memoryview(bytearray(PAGE_BYTES - 1))]])
def test_buffers_that_do_not_fit_are_refused(buffers: list[memoryview]) -> None:
    """A call with too few buffers, or one of another size, is an error of the caller."""
    with pytest.raises(ConfigError, match="buffer"):
        MemoryStore(PAGE_BYTES, 2).get_many([key(1)], buffers, deadline=math.inf)


def test_sizes_that_cannot_work_are_refused() -> None:
    """No page, or a slab of another size: refused with the numbers."""
    with pytest.raises(ConfigError, match="num_pages=0"):
        MemoryStore(PAGE_BYTES, 0)
    with pytest.raises(ConfigError, match=f"{2 * PAGE_BYTES} writable"):
        MemoryStore(PAGE_BYTES, 2, slab=memoryview(bytearray(PAGE_BYTES)))


def test_faults_are_as_ordered() -> None:
    """Each fault has its effect: outcomes, poisoned buffers, time spent, no answer at all."""
    waits: list[float] = []
    faults = StoreFaults(call_s=0.2, bytes_per_s=PAGE_BYTES / 2, wait=waits.append)
    store = FaultyStore(MemoryStore(PAGE_BYTES, 4), faults)
    faults.writes[key(3).hash] = WriteOutcome.REFUSED

    written = put(store, 1, 3, 2)
    faults.reads[key(1).hash] = ReadOutcome.IO_ERROR

    assert written == [WriteOutcome.WRITTEN, WriteOutcome.REFUSED, WriteOutcome.WRITTEN]
    assert waits == [pytest.approx(0.2 + 3 * 2)]
    assert get(store, 1) == (ReadOutcome.IO_ERROR, b"\xa5" * PAGE_BYTES)
    assert not store.inner.has_many([key(1).hash], deadline=math.inf)[0]
    assert get(store, 2) == (ReadOutcome.HIT, bytes(page(2)))
    faults.unavailable = "paused"
    with pytest.raises(StoreUnavailableError, match="paused"):
        get(store, 2)


def test_the_last_evicted_pages_are_remembered() -> None:
    """Not those that are back, were removed by order, or were never there."""
    store = MemoryStore(PAGE_BYTES, 2)
    put(store, 1, 2, 3, 4)
    put(store, 1)
    store.remove_many([key(2).hash], deadline=math.inf)

    evicted = store.were_evicted([key(number).hash for number in (1, 2, 3, 4, 9)])

    assert evicted == [False, False, True, False, False]


def test_evicted_names_have_a_bound() -> None:
    """The oldest are forgotten first."""
    names = EvictedNames(max_names=2)

    names.add([bytes([number]) * 16 for number in (1, 2, 3)])

    assert [bytes([number]) * 16 in names for number in (1, 2, 3)] == [False, True, True]
