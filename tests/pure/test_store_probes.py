"""Reads of a store's own choice, by which the start measures it; and the job that times them."""

import math
import time
from pathlib import Path

import pytest

from ramify.kv.mover_jobs import Probe, ProbeEnded
from ramify.kv.offload import PROBE_PAGES, MoverThreads, StoreJobs
from ramify.kv.stores.memory import FaultyStore, MemoryStore, StoreFaults
from ramify.kv.stores.page_store import PageStore
from ramify.kv.stores.valkey import ValkeyStore
from tests.pure.store_cases import IDENTITY, PAGE_BYTES, hits, opened, put, slots_per_segment
from tests.pure.valkey_server import ValkeyServer

LIMIT_S = 20.0


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(PAGE_BYTES)) for _ in range(count)]


def test_an_empty_directory_has_nothing_to_read(tmp_path: Path) -> None:
    """Nothing is written to measure it."""
    store = opened(tmp_path)
    files = sorted(tmp_path.rglob("*"))

    assert store.read_any(buffers(8), deadline=math.inf) == 0
    assert sorted(tmp_path.rglob("*")) == files


def test_pages_of_a_directory_are_read_and_none_is_counted_or_moved(tmp_path: Path) -> None:
    """Also by an engine that may only read it, and after the deadline none."""
    writer = opened(tmp_path)
    put(writer, range(slots_per_segment() + 3))
    reader = opened(tmp_path, read_only=True)

    for store in (writer, reader):
        counts = store.counts()
        for _ in range(20):  # segments are chosen at random, the last one has three pages
            assert store.read_any(buffers(8), deadline=math.inf) in (3, 8)
        assert store.read_any(buffers(8), deadline=-1.0) == 0
        assert store.counts() == counts
    assert hits(reader, range(slots_per_segment() + 3)) == [*range(slots_per_segment() + 3)]


def test_a_host_tier_is_read_whether_or_not_it_has_pages() -> None:
    """Memory is as fast."""
    store = MemoryStore(PAGE_BYTES, 2)

    assert store.read_any(buffers(8), deadline=math.inf) == 8
    assert store.counts() == MemoryStore(PAGE_BYTES, 2).counts()


def test_a_shared_store_is_read_by_a_value_that_expires() -> None:
    """Its pages are not listed; the scratch value is as long as a page, and no page."""
    pytest.importorskip("valkey", reason="needs valkey: pip install 'ramify[remote]'")
    server = ValkeyServer("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    try:
        store = ValkeyStore(server.url, identity=IDENTITY, page_bytes=PAGE_BYTES)

        assert store.read_any(buffers(8), deadline=time.monotonic() + LIMIT_S) == 8
        assert store.read_any(buffers(1), deadline=time.monotonic() + LIMIT_S) == 1
        assert store.counts().hit_pages == store.counts().written_pages == 0
        store.close()
    finally:
        server.close()


def probe_of(store: PageStore, limit_s: float = LIMIT_S) -> ProbeEnded:
    return StoreJobs([store]).probe(Probe("host", time.monotonic() + limit_s))


def test_a_probe_times_reads_of_a_page_and_of_several() -> None:
    """The difference tells latency from bandwidth."""
    waits: list[float] = []
    faults = StoreFaults(call_s=0.25, bytes_per_s=PAGE_BYTES * 100.0, wait=waits.append)

    result = probe_of(FaultyStore(MemoryStore(PAGE_BYTES, 4), faults))

    assert [num_pages for num_pages, _ in result.reads] == [1, 1, PROBE_PAGES]
    assert waits == pytest.approx([0.26, 0.26, 0.25 + PROBE_PAGES * 0.01])


def test_a_probe_never_fails() -> None:
    """A store that is gone, or whose deadline has passed, is not measured."""
    gone = FaultyStore(MemoryStore(PAGE_BYTES, 4), StoreFaults(unavailable="gone"))

    assert probe_of(gone).reads == ()
    assert probe_of(MemoryStore(PAGE_BYTES, 4), limit_s=-1.0).reads == ()


def test_the_threads_carry_out_a_probe() -> None:
    """As a job of the readers, so that a slow store does not hold up the start."""
    mover = MoverThreads([MemoryStore(PAGE_BYTES, 4)])
    probe = Probe("host", time.monotonic() + LIMIT_S)
    mover.read(probe)

    assert mover.wait(LIMIT_S)
    [result] = mover.take_results()

    assert isinstance(result, ProbeEnded)
    assert result.probe is probe
    assert all(seconds >= 0 for _, seconds in result.reads)
    assert mover.close(LIMIT_S)
