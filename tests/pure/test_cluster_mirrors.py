"""Mirrors of replicas' caches: matches, snapshots, and what happens when messages are lost."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from random import Random

import pytest

from ramify.cache import CacheKey, PrefixCache
from ramify.cache.key import HASH_BYTES
from ramify.cache.window import release_outside_window
from ramify.cluster.mirrors import Mirrors
from ramify.cluster.page_index import PageIndex
from ramify.errors import ConfigError
from tests.pure.cache_mirror import content
from tests.pure.mirrored_replica import (
    INTERVAL_S,
    MAX_INTERVAL_S,
    TIMEOUT_S,
    Replica,
    assert_mirrored,
    joined,
)
from tests.pure.test_prefix_cache import key, serve


def test_the_longest_prefix_of_each_replica_is_matched() -> None:
    """Each replica is matched with its own length; one without the first page is left out."""
    mirrors = Mirrors()
    replicas = [joined(mirrors, name, number) for number, name in enumerate("abc", 1)]
    for replica, text in zip(replicas, ("abcdefgh", "abcdxxyy", "xxabcdef"), strict=True):
        serve(replica.cache, text)
        replica.message().deliver(mirrors)

    assert mirrors.match(key("abcdefghij").packed_hashes(2)) == {"a": 4, "b": 2}
    assert mirrors.match(key("abcd").packed_hashes(2)) == {"a": 2, "b": 2}
    assert mirrors.match(key("xxabcd").packed_hashes(2)) == {"c": 3}
    assert mirrors.match(key("zz").packed_hashes(2)) == {}
    assert mirrors.match(b"") == {}


@pytest.mark.parametrize("stride", [1, 2, 3, 8])
@pytest.mark.parametrize("num_shared", [0, 1, 7, 8, 9, 40])
def test_a_stride_rounds_a_match_down(stride: int, num_shared: int) -> None:
    """With a stride a match is the multiple of it below the pages that are cached."""
    mirrors = Mirrors(stride=stride)
    replica = joined(mirrors)
    serve(replica.cache, "a" * 2 * num_shared + "xy")
    replica.message().deliver(mirrors)

    pages = mirrors.match(key("a" * 100).packed_hashes(2))

    assert pages.get("a", 0) == num_shared // stride * stride


def test_the_memory_of_an_index_is_what_python_allocates() -> None:
    """50,000 pages in two columns: within a fifth of the allocator's count."""
    random = Random(7)
    hashes = random.randbytes(16 * 50_000)
    tracemalloc.start()
    try:
        index = PageIndex()
        for column in (index.add_column(), index.add_column()):
            index.store(column, index.keys(0, hashes))
        allocated = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert index.num_bytes == pytest.approx(allocated, rel=0.2)
    assert PageIndex().num_bytes < 1000


@pytest.mark.parametrize("stride", [1, 3])
def test_any_lengths_are_matched_as_caches_match_them(stride: int) -> None:
    """Of 40 caches with prefixes of random lengths, each is matched with its length."""
    random, index = Random(7), PageIndex(stride)
    names = key("".join(map(chr, range(200, 700)))).packed_hashes(1)
    for _ in range(60):
        num_pages, lengths = random.randint(0, 500), dict[int, int]()
        hashes = names[: HASH_BYTES * num_pages]
        for _ in range(40):
            column = index.add_column()
            lengths[column] = random.choice((0, 1, 2, 33, random.randint(0, 500)))
            index.store(column, index.keys(0, names[: HASH_BYTES * lengths[column]]))
        columns = sum(1 << column for column in lengths)

        matched = index.match_prefixes(hashes, columns)

        expected = {
            column: min(length, num_pages) // stride * stride for column, length in lengths.items()
        }
        assert matched == {column: depth for column, depth in expected.items() if depth}
        assert matched == index.match_last(hashes, columns)
        for column in lengths:
            index.drop_column(column)


def test_a_released_head_does_not_remove_the_tail() -> None:
    """A windowed cache that released its first pages still hits the whole prefix."""
    mirrors = Mirrors(is_windowed=True)
    replica = Replica("a", 1, PrefixCache(16, 4, window=9))
    mirrors.add("a", 1)
    replica.ask(mirrors.due_snapshots(0.0)[0])
    prompt = CacheKey(range(1, 41))
    lease = replica.cache.publish(replica.cache.acquire(prompt), prompt, replica.cache.reserve(10))
    release_outside_window(replica.cache, [lease], [40])

    replica.message().deliver(mirrors)

    assert mirrors.match(prompt.packed_hashes(4)) == {"a": 10}
    assert mirrors.num_pages("a") == 2


def test_messages_of_an_earlier_incarnation_change_nothing() -> None:
    """What a replica sent before its restart does not come back."""
    mirrors = Mirrors()
    before = joined(mirrors, incarnation=1)
    serve(before.cache, "abcd")
    late = before.message(with_digest=True)

    after = joined(mirrors, incarnation=2)
    late.deliver(mirrors)

    assert mirrors.match(key("abcd").packed_hashes(2)) == {}
    assert_mirrored(mirrors, after)
    assert mirrors.counters.num_late == 2


def test_an_address_may_lead_to_an_earlier_engine_again() -> None:
    """Two engines behind one address, by turns: the mirror is that of the engine that is connected."""
    mirrors = Mirrors()
    engines = [Replica("a", number, PrefixCache(64, 2), capacity=1000) for number in (1, 2)]
    serve(engines[0].cache, "abcd")
    for turn, engine in enumerate(engines * 2):
        mirrors.add("a", engine.incarnation)
        for request in mirrors.due_snapshots(10.0 * turn):
            engine.ask(request, max_runs=9)
        serve(engine.cache, "efghijkl"[: 2 * turn + 2])
        engine.message().deliver(mirrors)

        assert_mirrored(mirrors, engine)


def test_the_same_engine_may_come_back() -> None:
    """After a partition a replica joins with its incarnation, and its cache counts at once."""
    mirrors = Mirrors()
    replica = joined(mirrors)
    serve(replica.cache, "abcd")
    replica.message().deliver(mirrors)

    mirrors.leave("a")
    assert not mirrors.is_known("a")
    assert not mirrors.are_known(["a"])
    mirrors.add("a", 1)

    assert not mirrors.is_known("a")
    assert mirrors.match(key("abcd").packed_hashes(2)) == {"a": 2}
    mirrors.remove("a")
    assert mirrors.match(key("abcd").packed_hashes(2)) == {}
    joined(mirrors, incarnation=1)


def test_one_replicas_eviction_leaves_the_others_pages() -> None:
    """A page that two replicas have is removed and cleared for one of them only."""
    mirrors = Mirrors()
    replicas = [joined(mirrors, name, number) for number, name in enumerate("ab", 1)]
    for replica in replicas:
        serve(replica.cache, "abcd")
    replicas[0].cache.evict(1)
    for replica in replicas:
        replica.message().deliver(mirrors)

    assert mirrors.match(key("abcd").packed_hashes(2)) == {"a": 1, "b": 2}
    replicas[0].cache.clear()
    replicas[0].message().deliver(mirrors)
    assert mirrors.match(key("abcd").packed_hashes(2)) == {"b": 2}
    assert_mirrored(mirrors, replicas[0])


def test_one_snapshot_is_in_flight_and_a_silent_one_is_asked_for_again() -> None:
    """A replica that does not answer is asked again after the time-out, less often each time."""
    mirrors = Mirrors(snapshot_timeout_s=TIMEOUT_S, snapshot_interval_s=INTERVAL_S)
    mirrors.add("a", 1)
    moments = [now / 10 for now in range(3000) if mirrors.due_snapshots(now / 10)]

    assert moments[:4] == [0.0, 10.0, 20.0, 30.0]
    assert moments[-1] - moments[-2] == MAX_INTERVAL_S


def test_a_replica_that_is_away_is_not_asked() -> None:
    """However long: it is asked as soon as it is connected again, and no failure is counted for it."""
    mirrors = Mirrors(snapshot_timeout_s=TIMEOUT_S, snapshot_interval_s=INTERVAL_S)
    replica = Replica("a", 1, PrefixCache(64, 2))
    mirrors.add("a", 1)
    replica.ask(mirrors.due_snapshots(0.0)[0])

    mirrors.leave("a")
    assert not [now for now in range(1, 1000) if mirrors.due_snapshots(float(now))]
    mirrors.add("a", 1)
    replica.ask(mirrors.due_snapshots(1000.0)[0])
    replica.message().deliver(mirrors)

    assert_mirrored(mirrors, replica)
    assert (mirrors.counters.num_asked, mirrors.counters.num_failed_snapshots) == (2, 1)
    mirrors.leave("a")
    mirrors.leave("nobody")
    assert mirrors.counters.num_failed_snapshots == 1


def test_a_snapshot_that_comes_in_slowly_is_waited_for() -> None:
    """Each part that arrives starts the time-out again."""
    mirrors = Mirrors(snapshot_timeout_s=TIMEOUT_S)
    replica = Replica("a", 1, PrefixCache(64, 2), capacity=1000)
    for text in ("abcd", "efgh", "ijkl", "mnop"):
        serve(replica.cache, text)
    mirrors.add("a", 1)
    replica.ask(mirrors.due_snapshots(0.0)[0], max_runs=1)

    for now in range(9, 45, 9):
        replica.message().deliver(mirrors)
        assert mirrors.due_snapshots(float(now)) == []

    assert_mirrored(mirrors, replica)


def test_a_lost_last_event_is_noticed_by_the_digest() -> None:
    """Without any later event only the digest's sequence shows that a message was lost."""
    mirrors = Mirrors()
    replica = joined(mirrors)
    serve(replica.cache, "abcd")
    replica.message()

    replica.message(with_digest=True).deliver(mirrors)

    assert not mirrors.is_known("a")
    assert (mirrors.counters.num_gaps, mirrors.counters.num_mismatches) == (1, 0)
    replica.ask(mirrors.due_snapshots(1.0)[0])
    replica.message().deliver(mirrors)
    assert_mirrored(mirrors, replica)


def test_a_wrong_digest_asks_for_a_snapshot() -> None:
    """An event with wrong hashes is found by the next digest."""
    mirrors = Mirrors()
    replica = joined(mirrors)
    serve(replica.cache, "abcd")
    message = replica.message(with_digest=True)
    message.events = [replace(event, hashes=bytes(16)) for event in message.events]

    message.deliver(mirrors)

    assert not mirrors.is_known("a")
    assert (mirrors.counters.num_gaps, mirrors.counters.num_mismatches) == (0, 1)
    assert [snapshot.replica for snapshot in mirrors.due_snapshots(1.0)] == ["a"]


def test_a_clear_voids_the_parts_still_to_come() -> None:
    """What a snapshot in parts has of a cache that was cleared meanwhile is not stored."""
    mirrors = Mirrors()
    replica = Replica("a", 1, PrefixCache(64, 2), capacity=1000)
    for text in ("abcd", "efgh", "ijkl"):
        serve(replica.cache, text)
    mirrors.add("a", 1)
    replica.ask(mirrors.due_snapshots(0.0)[0], max_runs=1)
    replica.message().deliver(mirrors)

    replica.cache.clear()
    serve(replica.cache, "ijkl")
    for _ in range(2):
        replica.message().deliver(mirrors)

    assert mirrors.match(key("efgh").packed_hashes(2)) == {}
    assert_mirrored(mirrors, replica)


def test_an_eviction_between_two_parts_is_not_undone() -> None:
    """A part that was captured before an eviction does not bring the page back."""
    mirrors = Mirrors()
    replica = Replica("a", 1, PrefixCache(64, 2), capacity=1000)
    for text in ("abcd", "efgh", "ijkl"):
        serve(replica.cache, text)
    mirrors.add("a", 1)
    replica.ask(mirrors.due_snapshots(0.0)[0], max_runs=1)
    replica.message().deliver(mirrors)

    replica.cache.evict(5)
    serve(replica.cache, "ij")
    for _ in range(2):
        replica.message().deliver(mirrors)

    assert_mirrored(mirrors, replica)


def test_a_snapshot_that_later_events_overtook_is_asked_for_again() -> None:
    """It would replace the content that these events made, and they do not come again."""
    mirrors = Mirrors()
    replica = joined(mirrors)
    mirrors.add("a", 1)
    replica.ask(mirrors.due_snapshots(1.0)[0])
    first = replica.message()
    serve(replica.cache, "abcd")

    replica.message().deliver(mirrors)
    first.deliver(mirrors)

    assert not mirrors.is_known("a")
    assert mirrors.counters.num_failed_snapshots == 1
    assert len(mirrors.due_snapshots(10.0)) == 1


def test_clearing_again_and_again_takes_no_memory() -> None:
    """Ended columns are swept: neither entries nor columns pile up."""
    mirrors = Mirrors()
    other, replica = joined(mirrors, "b", 2), joined(mirrors, "a", 1)
    serve(other.cache, "abcdefgh" * 8)
    other.message().deliver(mirrors)
    for _ in range(500):
        serve(replica.cache, "abcdefgh" * 8)
        replica.cache.clear()
        replica.message().deliver(mirrors)

    assert len(mirrors.index) == len(content(other.cache))
    assert len(mirrors.index._num_entries) < 100


@pytest.mark.parametrize("stride", [0, -8])
def test_a_stride_is_one_or_more(stride: int) -> None:
    """An index with a stride below 1 is refused."""
    with pytest.raises(ConfigError, match=f"stride={stride}"):
        Mirrors(stride=stride)
