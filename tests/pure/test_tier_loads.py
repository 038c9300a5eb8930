"""Loads and staging buffers: pages in any order, one owner each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.cache.events import CacheEvent
from ramify.cache.pages import Pages
from ramify.cache.staging import StagingLedger
from ramify.cache.tier_loads import MAX_LOADS, Load, LoadTable
from ramify.cache.tiers import PageName, WriteQueue
from ramify.engine.tier_parts import PendingRemovals
from ramify.errors import InvariantError
from ramify.kv.mover_jobs import Removal


def load_of(tiers: list[str], number: int = 1) -> Load:
    names = [PageName(b"%016d" % page, b"parent") for page in range(len(tiers))]
    return Load(number, 0, names, tiers, 0.0, 1.0)


@given(
    tiers=st.lists(st.sampled_from(["host", "disk"]), min_size=1, max_size=12),
    max_pages=st.integers(1, 5),
    data=st.data(),
)
def test_pages_are_published_in_order_up_to_the_first_that_fails(
    tiers: list[str], max_pages: int, data: st.DataObject
) -> None:
    """Whatever the order in which reads end; every buffer comes back once."""
    load, reading, buffers_back, published = load_of(tiers), list[int](), list[int](), 0
    failing = data.draw(st.sets(st.integers(0, len(tiers) - 1)))
    while not load.is_settled:
        batch = load.next_batch(max_pages)
        if batch and (not reading or data.draw(st.booleans())):
            assert len({tiers[page] for page in batch}) == 1
            load.requested(batch)
            reading += batch
            continue
        if reading:
            page = reading.pop(data.draw(st.integers(0, len(reading) - 1)))
            if page in failing:
                buffers_back += [page, *load.failed(page)]
            elif not load.arrived(page, page):
                buffers_back.append(page)
        ready = load.ready()
        assert ready == [*range(published, published + len(ready))]
        buffers_back += load.published(len(ready))
        published += len(ready)

    assert published == min(failing, default=len(tiers))
    assert sorted(buffers_back) == [*range(load.num_requested)]


@given(
    num_buffers=st.integers(2, 8),
    actions=st.lists(st.tuples(st.sampled_from("wrfx"), st.integers(0, 7)), max_size=40),
    data=st.data(),
)
def test_every_staging_buffer_has_one_owner(
    num_buffers: int, actions: list[tuple[str, int]], data: st.DataObject
) -> None:
    """Reads always find a buffer that writes did not take; no buffer is handed out twice."""
    for_reads = data.draw(st.integers(1, num_buffers - 1))
    ledger = StagingLedger(num_buffers, for_reads)
    held: dict[int, str] = {}
    for action, choice in actions:
        if action in "wr":
            buffer = ledger.take_for_write() if action == "w" else ledger.take_for_read()
            num_reads = sum(owner != "w" for owner in held.values())
            if buffer is None and action == "r":
                assert num_reads >= for_reads
            if buffer is not None:
                assert buffer not in held
                held[buffer] = action
        elif action == "f":
            reading = [buffer for buffer, owner in held.items() if owner == "r"]
            if reading:
                buffer = reading[choice % len(reading)]
                ledger.fill(buffer)
                held[buffer] = "f"
        elif held:
            buffer = [*held][choice % len(held)]
            ledger.free(buffer)
            del held[buffer]
        ledger.check([buffer for buffer, owner in held.items() if owner == "f"])
        assert ledger.num_in_use == len(held)


def test_a_buffer_that_is_free_cannot_be_freed() -> None:
    """A second owner would overwrite a page that is being written."""
    ledger = StagingLedger(2, 1)
    buffer = ledger.take_for_write()
    assert buffer is not None
    ledger.free(buffer)

    with pytest.raises(InvariantError, match="is free"):
        ledger.free(buffer)


def test_requests_share_a_load_and_leave_it() -> None:
    """The load is without a waiter when the last one has left."""
    table = LoadTable[str]()
    names = [PageName(b"%016d" % page, b"parent") for page in range(3)]
    load = table.begin("first", 0, names, ["disk"] * 3, 0.0, 1.0)
    assert table.continuing_with(names[0].hash) is load
    assert table.continuing_with(names[1].hash) is None
    table.join("second", load, 3)

    assert table.leave("first") is None
    table.check()
    assert table.leave("second") is load
    assert table.leave("second") is None
    table.check()


def test_a_request_waits_for_its_own_pages_only() -> None:
    """One whose prompt leaves the load's after two pages goes on when these are there."""
    table = LoadTable[str]()
    names = [PageName(b"%016d" % page, b"parent") for page in range(3)]
    load = table.begin("long", 0, names, ["disk"] * 3, 0.0, 1.0)
    table.join("short", load, 2)
    load.requested(range(3))
    for page in range(3):
        load.arrived(page, page)

    load.published(1)
    assert table.take_served(load) == []
    load.published(1)

    assert table.take_served(load) == ["short"]
    assert table.load_of("short") is None
    assert table.waiters(load) == ["long"]
    table.check()


def test_a_request_loads_a_limited_number_of_times() -> None:
    """In a pool of a few pages, each load may evict what the last one brought."""
    table = LoadTable[str]()
    names = [PageName(b"%016d" % 0, b"parent")]
    for number in range(MAX_LOADS):
        assert table.may_load("request"), number
        table.take_waiters(table.begin("request", 0, names, ["disk"], 0.0, 1.0))

    assert not table.may_load("request")
    table.forget("request")
    assert table.may_load("request")


def event(kind: str, pages: list[int], hashes: bytes, reason: str = "") -> CacheEvent:
    packed = b"".join(bytes([value]) * 16 for value in hashes)
    return CacheEvent(0, kind, b"namespace", b"parent", 0, packed, Pages.of(pages), reason)


def test_an_evicted_page_is_urgent_and_a_removed_one_goes_from_the_tiers() -> None:
    """Only capacity and window say nothing against a page."""
    queue = WriteQueue(8)
    queue.put(event("stored", [3, 1, 2], b"abc"))
    queue.add_lazy([1, 2])

    queue.put(event("removed", [1], b"b", "capacity"))
    queue.put(event("removed", [2], b"c", "predicate"))

    assert queue.take_urgent() == [(1, PageName(b"b" * 16, b"a" * 16))]
    assert queue.take_removed() == [b"c" * 16]
    assert queue.num_lazy == 0
    assert queue.name_of(3) == PageName(b"a" * 16, b"parent")
    queue.check()


def test_an_evicted_page_that_is_removed_is_not_copied_behind_its_removal() -> None:
    """Computed again and removed before the first page was copied: the copy would outlive the removal."""
    queue = WriteQueue(8)
    queue.put(event("stored", [1, 2], b"ab"))
    queue.put(event("removed", [1, 2], b"ab", "window"))
    queue.put(event("stored", [5], b"b"))

    queue.put(event("removed", [5], b"b", "predicate"))

    assert [page for page, _ in queue.take_urgent()] == [1]
    assert queue.take_removed() == [b"b" * 16]


def test_a_refused_namespace_has_no_names() -> None:
    """Pages of an isolated request are never copied."""
    queue = WriteQueue(4)
    queue.refuse_namespace(b"namespace")
    queue.put(event("stored", [0], b"a"))
    queue.add_lazy([0])

    queue.put(event("removed", [0], b"a", "capacity"))

    assert (queue.take_urgent(), queue.take_lazy(1)) == ([], [])


def test_a_cleared_cache_has_no_names() -> None:
    """After a rebuild nobody knows what a page holds."""
    queue = WriteQueue(4)
    queue.put(event("stored", [0, 1], b"ab"))
    queue.add_lazy([0])
    queue.put(event("removed", [1], b"b", "capacity"))

    queue.put(event("cleared", [], b""))

    assert (queue.take_urgent(), queue.take_lazy(4), queue.name_of(0)) == ([], [], None)


def test_a_page_waits_for_every_removal_of_it() -> None:
    """Two removals of a page, and one of all pages: it may be read once all of them are made."""
    first, second = Removal((b"a", b"b")), Removal((b"a",))
    everything = Removal(None)
    pending = PendingRemovals()
    for removal in (first, second, everything):
        pending.add(removal)
    states = []

    for removal in (everything, first, first, second):
        pending.discard(removal)
        states.append((pending.has(b"a"), pending.has(b"b"), pending.has(b"c")))

    assert states == [(True, True, False), (True, False, False), (True, False, False), (False,) * 3]
