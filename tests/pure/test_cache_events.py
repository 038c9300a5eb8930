"""Events: a subscriber can mirror the cache's content; without subscribers nothing is hashed."""

import sys
from collections.abc import Callable, Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import CacheEvent, PrefixCache
from ramify.cache.key import chain_hashes, namespace_hash
from ramify.cache.packed import ATOM_BYTES
from ramify.errors import ConfigError
from tests.budget import examples
from tests.pure.cache_mirror import Mirror, content
from tests.pure.cache_traffic import Traffic
from tests.pure.test_prefix_cache import begin, key, publish, serve

SEEDS = st.integers(0, 2**32)
INDICES = pytest.mark.parametrize("index", ["radix", "hash"])


def kinds(events: Iterable[CacheEvent]) -> list[tuple[str, int]]:
    return [(event.kind, len(event.page_hashes)) for event in events]


# -- by example ----------------------------------------------------------------------------


@INDICES
def test_what_is_published_is_stored_under_the_hashes_of_its_key(index: str) -> None:
    """Published pages are `stored` under the page hashes of their key, parents first."""
    cache = PrefixCache(16, 2, index=index)
    subscription = cache.subscribe()

    pages = list(serve(cache, "abcdefg", "n"))

    names, stored = key("abcdefg", "n").page_hashes(2), list[tuple[bytes, int]]()
    for event in subscription.take():
        assert (event.kind, event.namespace_hash, event.reason) == (
            "stored",
            namespace_hash(b"n"),
            "",
        )
        assert event.parent_hash == (stored[-1][0] if stored else namespace_hash(b"n"))
        assert event.start == len(stored)
        stored += zip(event.page_hashes, event.pages, strict=True)
    assert stored == list(zip(names, pages, strict=True))
    assert subscription.take() == []


def test_a_hit_stores_only_what_is_new() -> None:
    """A second turn stores only the pages after the hit, under the hash of its last page."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")
    subscription = cache.subscribe()

    pages = list(serve(cache, "abcdefgh"))

    (event,) = subscription.take()
    names = key("abcdefgh").page_hashes(2)
    assert (event.kind, event.page_hashes) == ("stored", names[2:])
    assert (event.parent_hash, event.start, list(event.pages)) == (names[1], 2, pages[2:])


def test_a_hit_on_whole_nodes_tells_nothing() -> None:
    """Hits on whole nodes, queries and pins emit no event; only the split by `serve` does."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")
    subscription = cache.subscribe()

    for _ in range(3):
        cache.release(cache.acquire(key("abcdx")))
        cache.match(key("abx"))
        cache.explain(key("abx"))
        cache.unpin(cache.pin(key("abcd"), "me"))
    serve(cache, "abcd")

    assert subscription.take() == [
        CacheEvent(
            1,
            "split",
            namespace_hash(b""),
            namespace_hash(b""),
            0,
            b"".join(key("ab").page_hashes(2)),
            cache.acquire(key("abx")).pages,
        )
    ]


def test_pb11_a_split_is_told() -> None:
    """Each split emits one event with the pages of the upper node; the pages stay as they are."""
    cache = PrefixCache(16, 2)
    pages = list(serve(cache, "abcdef"))
    subscription = cache.subscribe()

    cache.release(cache.acquire(key("abcdX")))
    cache.release(cache.acquire(key("abX")))

    first, second = subscription.take()
    names = key("abcdef").page_hashes(2)
    assert (first.kind, first.page_hashes, list(first.pages)) == ("split", names[:2], pages[:2])
    assert (second.kind, second.page_hashes, list(second.pages)) == ("split", names[:1], pages[:1])
    assert second.sequence == first.sequence + 1


@pytest.mark.parametrize(
    ("evict", "reason"),
    [
        (lambda cache: cache.evict(2), "asked"),
        (lambda cache: cache.give_back(cache.reserve(7)), "capacity"),
        (lambda cache: cache.evict_if(lambda node: True, 2), "predicate"),
    ],
)
@INDICES
def test_an_eviction_is_told_with_its_reason(
    evict: Callable[[PrefixCache], object], reason: str, index: str
) -> None:
    """`removed` events name the reason, the pages and the page before them."""
    cache = PrefixCache(8, 2, index=index)
    pages = list(serve(cache, "abcdef"))
    subscription = cache.subscribe()

    evict(cache)

    events = subscription.take()
    names = key("abcdef").page_hashes(2)
    gone = [pair for event in events for pair in zip(event.page_hashes, event.pages, strict=True)]
    assert sorted(gone) == sorted(zip(names[1:], pages[1:], strict=True))
    assert {(event.kind, event.reason) for event in events} == {("removed", reason)}
    assert (events[-1].parent_hash, events[-1].start) == (names[0], 1)


def test_clear_is_one_event_when_all_goes() -> None:
    """`clear` emits one `cleared` event, or `removed` events when a lease keeps pages."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")
    serve(cache, "uvwx", "n")
    subscription = cache.subscribe()

    assert cache.clear() == 4
    assert kinds(subscription.take()) == [("cleared", 0)]
    assert cache.snapshot().digest == bytes(16)

    serve(cache, "abcd")
    serve(cache, "uvwx", "n")
    lease = cache.acquire(key("abcde"))
    subscription.take()
    assert cache.clear() == 2
    (event,) = subscription.take()
    expected = ("removed", namespace_hash(b"n"), "cleared")
    assert (event.kind, event.namespace_hash, event.reason) == expected
    cache.release(lease)


def test_pending_pages_are_told_when_they_are_computed() -> None:
    """Pages are `stored` when published, not when announced, and never if withdrawn."""
    cache = PrefixCache(16, 2)
    subscription = cache.subscribe()
    lease, private = begin(cache, "abcdef")
    leader = cache.announce(lease, key("abcd"), private)
    follower = cache.announce(cache.attach(key("abcdxy")), key("abcdxy"), cache.reserve(1))

    assert subscription.take() == []
    assert cache.snapshot().runs == ()
    leader = cache.publish(leader, key("abcd"))
    assert kinds(subscription.take()) == [("stored", 2)]
    cache.withdraw(follower)

    assert subscription.take() == []
    cache.release(follower)
    cache.release(leader, private[2:])


# -- queues --------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_pb27_a_full_queue_drops_the_oldest_and_counts_them(capacity: int) -> None:
    """A full queue drops its oldest events and counts them; sequence numbers show the gap."""
    cache = PrefixCache(32, 2)
    subscription = cache.subscribe(capacity)

    for letter in "abcdefgh":
        serve(cache, letter * 2)

    assert subscription.num_dropped == 8 - capacity
    assert [event.sequence for event in subscription.take()] == [*range(9 - capacity, 9)]
    serve(cache, "xy")
    assert [event.sequence for event in subscription.take()] == [9]
    assert subscription.num_dropped == 8 - capacity
    assert subscription._events.maxlen == capacity


def test_who_lost_events_goes_on_from_a_snapshot() -> None:
    """After lost events, a snapshot and the queue rebuild the exact content."""
    cache = PrefixCache(8, 2)
    subscription = cache.subscribe(2)
    for text in ("abcd", "abxy", "uvwx", "uv", "klmnop"):
        serve(cache, text)

    mirror = Mirror(cache.snapshot())
    mirror.apply(subscription.take())
    assert mirror.pages == content(cache)
    serve(cache, "zz")
    mirror.apply(subscription.take())

    assert mirror.pages == content(cache)


@INDICES
@pytest.mark.parametrize("max_runs", [1, 3, 1000])
def test_chunks_describe_one_moment_whatever_happens_between_them(
    index: str, max_runs: int
) -> None:
    """Chunks taken while requests run and pages are evicted add up to the snapshot of the call."""
    cache = PrefixCache(12, 2, index=index)
    subscription = cache.subscribe()
    for text in ("abcd", "abxy", "uvwx", "klmnop"):
        serve(cache, text)
    expected, chunks = cache.snapshot(), []

    for at, chunk in enumerate(subscription.snapshot_chunks(max_runs)):
        chunks.append(chunk)
        serve(cache, chr(ord("0") + at) * 8)
    for number, chunk in enumerate(chunks):
        assert (chunk.sequence, chunk.digest) == (expected.sequence, expected.digest)
        assert (chunk.number, chunk.is_last) == (number, number == len(chunks) - 1)
        assert 1 <= len(chunk.runs) <= max_runs

    assert tuple(run for chunk in chunks for run in chunk.runs) == expected.runs
    mirror = Mirror(expected)
    mirror.apply(subscription.take())
    assert mirror.pages == content(cache)
    assert subscription.digest() == (mirror.sequence, mirror.digest)


@pytest.mark.parametrize("max_runs", [0, -1])
def test_a_chunk_has_at_least_one_run(max_runs: int) -> None:
    """A limit below 1 is refused; an empty cache is one empty chunk."""
    subscription = PrefixCache(8, 2).subscribe()

    with pytest.raises(ConfigError, match=f"max_runs={max_runs}"):
        subscription.snapshot_chunks(max_runs)

    (chunk,) = subscription.snapshot_chunks()
    assert (chunk.number, chunk.runs, chunk.is_last, chunk.digest) == (0, (), True, bytes(16))


def test_nothing_that_leaves_the_cache_has_the_namespace_in_clear() -> None:
    """Events and snapshots have hashes in place of a namespace with its tenant and salt."""
    cache = PrefixCache(16, 2)
    subscription = cache.subscribe()

    serve(cache, "abcd", "acme-secret")
    serve(cache, "abxy", "acme-secret")
    cache.evict(1)
    events = subscription.take()

    assert {event.kind for event in events} == {"stored", "split", "removed"}
    assert "secret" not in repr((events, cache.snapshot(), list(subscription.snapshot_chunks())))


@pytest.mark.parametrize("capacity", [0, -3])
def test_a_queue_keeps_at_least_one_event(capacity: int) -> None:
    """A capacity below 1 is refused and creates no subscription."""
    cache = PrefixCache(8, 2)

    with pytest.raises(ConfigError, match=f"capacity={capacity}"):
        cache.subscribe(capacity)

    assert cache._store.log.subscribers == []


def test_subscribers_do_not_disturb_each_other() -> None:
    """Subscriptions have separate queues; a closed one receives no events and may close again."""
    cache = PrefixCache(16, 2)
    first, second = cache.subscribe(), cache.subscribe(1)
    serve(cache, "ab")
    serve(cache, "cd")

    assert (len(first.take()), len(second.take()), second.num_dropped) == (2, 1, 1)
    first.close()
    first.close()
    serve(cache, "ef")

    assert (len(first.take()), len(second.take())) == (0, 1)


@INDICES
def test_nothing_is_hashed_while_nobody_listens(index: str) -> None:
    """Without a subscriber the event log holds no hashes, also after a close or a snapshot."""
    cache = PrefixCache(16, 2, index=index)
    log = cache._store.log
    serve(cache, "abcd")
    assert log._hashes == {}

    subscriptions = cache.subscribe(), cache.subscribe()
    serve(cache, "abef")
    assert {len(known) // 16 for known in log._hashes.values()} == {1}
    for subscription in subscriptions:
        assert log._hashes
        subscription.close()
    serve(cache, "ghij")
    cache.evict(1)
    assert (log._hashes, log._digest) == ({}, 0)
    Mirror(cache.snapshot())

    assert (log._hashes, log._digest) == ({}, 0)


@INDICES
@pytest.mark.parametrize("once", ["snapshot", "subscription"])
def test_what_happened_while_nobody_listened_is_a_gap(index: str, once: str) -> None:
    """Events missed between two subscriptions leave a gap in the sequence numbers."""
    cache = PrefixCache(16, 2, index=index)
    if once == "snapshot":
        last = cache.snapshot().sequence
    else:
        feed = cache.subscribe()
        serve(cache, "abcd")
        last = feed.take()[-1].sequence
        feed.close()
    serve(cache, "efgh")

    feed = cache.subscribe()
    serve(cache, "ijkl")

    assert feed.take()[0].sequence > last + 1


# -- the mirror ----------------------------------------------------------------------------


@settings(max_examples=examples(150))
@given(
    seed=SEEDS,
    index=st.sampled_from(["radix", "hash"]),
    page_size=st.sampled_from([1, 2, 3]),
    ghost_pages=st.sampled_from([None, 0, 3]),
)
def test_a_mirror_has_the_caches_content_at_every_moment(
    seed: int, index: str, page_size: int, ghost_pages: int | None
) -> None:
    """Mirrors fed from the first event or from a snapshot always equal the cache's content.

    Random requests share, announce, fail and leave; pages are pinned and evicted.
    """
    random = Random(seed)
    cache = PrefixCache(random.randint(6, 16), page_size, index=index, ghost_pages=ghost_pages)
    traffic = Traffic(cache, random)
    subscription, mirror = cache.subscribe(), Mirror()
    late, late_mirror = None, Mirror()

    for at, _ in enumerate(traffic.run(40)):
        mirror.apply(subscription.take())
        snapshot, expected = cache.snapshot(), content(cache)
        assert mirror.pages == expected
        assert mirror.digest == snapshot.digest
        assert mirror.sequence == snapshot.sequence
        restored = Mirror(snapshot)
        assert (restored.pages, restored.parents) == (mirror.pages, mirror.parents)
        assert restored.namespaces == mirror.namespaces
        if at == 15:
            late, late_mirror = cache.subscribe(sys.maxsize), restored
        elif late is not None and at % 5 == 0:
            late_mirror.apply(late.take())
            assert late_mirror.pages == expected
    traffic.end()
    cache.clear()
    mirror.apply(subscription.take())
    assert mirror.pages == content(cache) == {}


def test_a_published_page_is_mirrored_in_pieces_too() -> None:
    """A node that grows by chunks emits its pages chunk by chunk."""
    cache = PrefixCache(16, 2)
    subscription, mirror = cache.subscribe(), Mirror()
    lease, private = begin(cache, "abcdefgh")

    for end in (2, 4, 8):
        lease, private = publish(cache, "abcdefgh"[:end], lease, private)
        mirror.apply(subscription.take())
        assert list(mirror.pages) == key("abcdefgh"[:end]).page_hashes(2)

    assert cache.stats().num_nodes == 1


@INDICES
@given(seed=SEEDS)
@settings(max_examples=examples(15))
def test_atoms_are_those_that_the_hashes_are_of(index: str, seed: int) -> None:
    """Stored runs and snapshots have the tokens of their pages, for the subscriber that asks for them."""
    cache, random = PrefixCache(24, 2, index=index), Random(seed)
    subscription, plain = cache.subscribe(with_atoms=True), cache.subscribe()

    for _ in range(25):
        serve(cache, "".join(random.choice("ab") for _ in range(random.randint(1, 12))))
        if random.random() < 0.2:
            cache.evict(random.randint(1, 4))

    page_bytes = 2 * ATOM_BYTES
    events = subscription.take()
    runs = [event for event in events if event.kind == "stored"]
    runs += [run for chunk in subscription.snapshot_chunks(3) for run in chunk.runs]
    assert runs
    for run in runs:
        assert chain_hashes(run.parent_hash, run.atoms, page_bytes) == run.hashes
    assert not [event for event in events if event.kind != "stored" and event.atoms]
    assert not [event for event in plain.take() if event.atoms]
    assert not [run for chunk in plain.snapshot_chunks() for run in chunk.runs if run.atoms]
