"""Events of the tiers for routers outside: what a reader believes of a tier is what its store has."""

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from ramify.cache.events import CacheEvent
from ramify.engine.async_llm import AsyncLLM
from ramify.engine.tier_events import TierEvents
from ramify.kv.stores.memory import FaultyStore, MemoryStore, StoreFaults
from ramify.kv.stores.page_store import ReadOutcome
from ramify.params import SamplingParams
from ramify.server.kv_events.form import EventForm
from ramify.server.kv_events.options import KvEventOptions
from tests.pure.test_tiering import A, B, C, _hashes
from tests.pure.tier_bench import TierBench, memory_tier


class Believed:
    """The pages that a reader of the events believes in, by tier."""

    def __init__(self) -> None:
        self.pages: dict[str, set[bytes]] = defaultdict(set)

    def apply(self, events: list[CacheEvent]) -> None:
        for event in events:
            if event.kind == "stored":
                self.pages[event.tier].update(event.page_hashes)
            else:
                self.pages[event.tier].difference_update(event.page_hashes)


def watched(**options: Any) -> tuple[TierBench, Believed]:
    """An engine whose tier events are read."""
    bench = TierBench(**options)
    assert bench.core.tier_events is not None
    bench.core.tier_events.open()
    return bench, Believed()


def update(bench: TierBench, believed: Believed) -> None:
    """Let the engine compare what it announced with the stores, and read its events."""
    bench.settle()
    bench.time += 1.0
    bench.tiering.poll()
    believed.apply(bench.tiering.events.take())


def stored(bench: TierBench, tier: str) -> set[bytes]:
    [store] = [store for store in bench.stores if store.tier == tier]
    inner = store.inner if isinstance(store, FaultyStore) else store
    assert isinstance(inner, MemoryStore)
    return set(inner._pages)


def test_a_reader_believes_in_what_each_tier_has() -> None:
    """After writes, evictions of the pool and of a tier, and a clear."""
    bench, believed = watched(host_pages=10, disk_pages=14, remote_pages=256)
    for prompt in (A, A, B, C, B, A, C):
        bench.answer(prompt)
        update(bench, believed)
        for tier in ("host", "disk", "remote"):
            assert believed.pages[tier] == stored(bench, tier), tier
    assert all(believed.pages.values())

    bench.core.clear_tiers()
    bench.core.cache.clear()
    update(bench, believed)

    assert not any(believed.pages.values())


def test_a_page_that_cannot_be_read_is_announced_as_removed() -> None:
    """The store has dropped it."""
    faults = StoreFaults()
    page_bytes = TierBench().device.page_bytes
    disk = FaultyStore(memory_tier("disk", 64, page_bytes), faults)
    bench, believed = watched(stores=[disk])
    for prompt in (A, B, C):
        bench.answer(prompt)
        update(bench, believed)
    damaged = _hashes(bench, A)[5]
    assert damaged in believed.pages["disk"]
    faults.reads = {damaged: ReadOutcome.CORRUPT}

    bench.answer(A)
    believed.apply(bench.tiering.events.take())

    assert damaged not in believed.pages["disk"]


def test_the_events_of_the_pool_know_no_tiers() -> None:
    """A mirror of the pool sees neither events of tiers nor gaps, and has the same digest."""
    bench, believed = watched(host_pages=64, disk_pages=64)
    subscription = bench.core.cache.subscribe(1 << 16)
    before = subscription.digest()[0]

    for prompt in (A, B, C, A):
        bench.answer(prompt)
        update(bench, believed)

    events = subscription.take()
    assert believed.pages["disk"]
    assert {event.tier for event in events} == {""}
    assert [event.sequence for event in events] == [*range(before + 1, before + 1 + len(events))]
    assert subscription.digest() == (events[-1].sequence, bench.core.cache.snapshot().digest)


def test_nothing_is_noted_for_nobody() -> None:
    """Without a reader the events cost nothing."""
    bench = TierBench()
    bench.answer(A)
    bench.answer(A)
    bench.settle()

    assert bench.tiering.events.take() == []
    assert bench.tiering.events.announced() == ()


def test_what_is_announced_has_a_bound() -> None:
    """The oldest page is announced as removed, so that a reader does not believe in it for ever."""
    events, believed = TierEvents(max_announced=2), Believed()
    events.open()
    for number in range(4):
        events.stored("disk", bytes([number]) * 16, b"parent")
    believed.apply(events.take())

    assert believed.pages["disk"] == {b"\2" * 16, b"\3" * 16}
    assert [event.page_hashes for event in events.announced()] == [[b"\2" * 16], [b"\3" * 16]]


def test_events_that_nobody_takes_are_counted() -> None:
    """A snapshot of what was announced stands in for them."""
    events = TierEvents(max_events=2)
    events.open()
    for number in range(5):
        events.stored("disk", bytes([number]) * 16, b"parent")

    assert (len(events.take()), events.num_dropped, len(events.announced())) == (2, 3, 5)


@pytest.mark.parametrize("form", EventForm)
@pytest.mark.parametrize("tiers", [True, False])
def test_a_subscriber_reads_the_medium_of_each_block(form: EventForm, tiers: bool) -> None:
    """By an option; the pool's blocks are on the GPU, as they are without tiers."""
    zmq: Any = pytest.importorskip("zmq", reason="pyzmq is not installed (ramify[kv-events])")
    from msgspec.msgpack import decode

    from ramify.server.kv_events.feed import published

    bench = TierBench(remote_pages=64)
    media: dict[str, set[int]] = defaultdict(set)

    def read(socket: Any) -> None:
        while socket.poll(200):
            for event in decode(socket.recv_multipart()[2])[1]:
                fields = list(event.values()) if form is EventForm.map else event
                if fields[0] == "BlockStored":
                    media[fields[6]].update(fields[1])

    async def main() -> None:
        llm = AsyncLLM.from_core(bench.core)
        options = KvEventOptions("tcp://127.0.0.1:*", form=form, tiers=tiers)
        async with published(llm, options) as feed:
            assert feed is not None
            context = zmq.Context()
            socket = context.socket(zmq.SUB)
            socket.connect(feed.sockets.endpoints[0])
            socket.setsockopt_string(zmq.SUBSCRIBE, "")
            await asyncio.to_thread(socket.poll, 200)  # joined
            for _ in range(2):
                await llm.generate(A, SamplingParams(max_tokens=1, ignore_eos=True))
                await asyncio.to_thread(read, socket)
            context.destroy(linger=0)
        await llm.aclose()

    asyncio.run(main())

    names = {int.from_bytes(page[-8:], "big") for page in _hashes(bench, A)}
    assert media["GPU"] == names
    assert media["DISK"] == media["EXTERNAL"] == (names if tiers else set())
